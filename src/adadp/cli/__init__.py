"""The command `adadp`. A command is one file here and one line below; other packages add theirs by entry point.

Bad input ends with exit code 2 and one line on stderr, never with a traceback. Modules of commands import
what they need when they run, so that `adadp --help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from adadp import __version__
from adadp.cli import account, audit, calibrate, evaluate, export, ledger, plan, predict, report, train
from adadp.cli.commands import Commands
from adadp.cli.several import refuse_several

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train with differential privacy, and know what it cost.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adadp {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train with differential privacy, and know what it cost."""
    refuse_several(context.invoked_subcommand)


app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("audit")(audit.audit)
app.command("account")(account.account)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(ledger.app, name="ledger")

__all__ = ["app"]
