"""`python -m adadp.cli`, where the command is not on the path."""

from adadp.cli import app

app()
