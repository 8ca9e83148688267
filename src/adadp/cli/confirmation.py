"""What counts as public, what a ledger holds and what looks wrong: shown, and confirmed, before anything is spent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from adadp.cli.messages import warn
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.training.planning import Plan


def confirm(plan: Plan, *, yes: bool, quiet: bool) -> None:
    """Show what counts as public, what was spent before and what looks wrong; have confirmed what was not declared.

    Args:
        plan: of the run.
        yes: it is confirmed already (`--yes`).
        quiet: standard output is for JSON alone.

    Raises:
        ConfigurationError: something was read off private rows, and nobody is there to confirm it; or somebody said no.

    """
    for line in (*_public(plan), *_kept(plan), *plan.notices):
        typer.echo(line, err=quiet)
    for doubt in plan.doubts:
        warn(doubt)
    if yes or not plan.undeclared:
        return
    question = (
        "These were read off the rows, so one person's value can change them, and no epsilon covers that: "
        + "; ".join(plan.undeclared)
    )
    way_out = "declare them (--classes, --number, --category, --text, --date, --ignore), or confirm them with --yes"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(f"{question}. Nothing was spent: {way_out}")
    typer.echo(f"{question}.", err=True)
    if not typer.confirm("Do they count as public?", err=True):
        raise ConfigurationError(f"nothing was spent: {way_out}")


def _kept(plan: Plan) -> list[str]:
    """What is kept of data of the user's own outside the run's folder, a line each."""
    from adadp.data import Dataset
    from adadp.features import cache, images

    settings = plan.settings
    if (
        not plan.own_data
        or settings.features != "scattering"
        or settings.no_cache
        or not isinstance(plan.train, Dataset)
    ):
        return []
    if not images.worth_keeping(plan.train):
        return []
    return [f"features of these images are kept in {cache.folder()}, for you alone (--no-cache keeps none)"]


def _public(plan: Plan) -> list[str]:
    """What counts as public about data of the user's own, a line each."""
    from adadp.data import Table
    from adadp.data.labels import listed

    if not plan.own_data:
        return []
    rows = plan.numbers
    if not plan.train.classes:
        assert isinstance(plan.train, Table)
        low, high = plan.train.target or (0.0, 0.0)
        lines = [f"public by your use of this data: {rows}; a number in {low:g}..{high:g} is predicted"]
    else:
        how = "declared classes" if plan.settings.classes else "classes"
        lines = [f"public by your use of this data: {rows}; {how}: {listed(plan.train.classes)}"]
    if isinstance(plan.train, Table):
        declared = plan.train.declared
        kinds = [
            f"{name} {kind}{' (declared)' if name in declared.kinds else ''}" for name, kind in plan.train.kinds.items()
        ]
        lines.append(
            "columns: " + ", ".join(kinds[:40]) + (f", ... ({len(kinds):,} in all)" if len(kinds) > 40 else "")
        )
    return lines
