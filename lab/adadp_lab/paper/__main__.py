"""`python -m adadp_lab.paper`: the same as `adadp reproduce`, without an installed command."""

from adadp.cli.commands import run_alone
from adadp_lab.paper.command import reproduce

run_alone(reproduce)
