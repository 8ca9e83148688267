"""The command `adadp`. A command is one file here and one line below; other packages add theirs by entry point.

Bad input ends with exit code 2 and one line on stderr, never with a traceback. Modules of commands import
what they need when they run, so that `adadp --help` is quick.
"""

from __future__ import annotations

import typer

from adadp.cli import account, audit, calibrate, evaluate, ledger, predict, train
from adadp.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train with differential privacy, and know what it cost.",
)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("audit")(audit.audit)
app.command("account")(account.account)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(ledger.app, name="ledger")

__all__ = ["app"]
