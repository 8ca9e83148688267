"""`adadp reproduce`: the paper's tables and figures, run again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp_lab.paper.item import Item

FULL, QUICK = "results/reproduce", "runs/reproduce-quick"


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Items, as --list names them. [all]", show_default=False)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the items and end.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The beginning of each run only.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Runs of each setting. [3; quick: 1]", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Results. [results/reproduce; quick: runs/reproduce-quick]", show_default=False)
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes. [one for each core]", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what is finished.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.", show_default=False)] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Run nothing: only draw what is in --out again.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Run nothing: draw again and say what differs.")] = False,
    claims: Annotated[
        Path | None, typer.Option(help="Where the claims are written. [CLAIMS.md in --out]", show_default=False)
    ] = None,
) -> None:
    """Run the paper's tables and figures again, in its own reading and soundly, and say what holds."""
    from adadp.training.planning import device_of
    from adadp_lab import paper as items
    from adadp_lab.paper.item import Options
    from adadp_lab.paper.runner import run

    known = items.load()
    folder = out or Path(QUICK if quick else FULL)
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigurationError(f"no item is called {unknown[0]!r}; there are {', '.join(known)}")
    if draw or check:
        if names:
            raise ConfigurationError("--draw and --check are for everything in --out: leave the names out")
        return _pages(known, folder, claims or folder / "CLAIMS.md", only_check=check)
    if list_:
        width = max(map(len, known))
        for item in known.values():
            typer.echo(f"{item.name:<{width}}  {item.where:<9}  {item.title}")
        return
    count = (1 if quick else 3) if seeds is None else seeds
    if count < 1:
        raise ConfigurationError(f"--seeds must be at least 1, not {count}")
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"--jobs must be at least 1, not {jobs}")
    started = time.perf_counter()

    def tell(done: int, total: int, item: str) -> None:
        if done % max(1, total // 50) == 0 or done == total:
            typer.echo(f"{done}/{total} runs after {time.perf_counter() - started:.0f} s ({item})", err=True)

    chosen = [known[name] for name in dict.fromkeys(names or known)]
    summary = run(
        chosen,
        Options(count, quick, str(device_of(device))),
        folder,
        workers=jobs or os.cpu_count() or 1,
        force=force,
        data_dir=data_dir,
        progress=tell,
        say=lambda line: typer.echo(line, err=True),
    )
    for name, outcome in summary.outcomes.items():
        typer.echo(f"{name}: {outcome}")
    typer.echo(f"{summary.seconds:.0f} s, results in {folder}")
    agree = _compare(chosen, folder) if quick else True
    if not quick:
        _pages(known, folder, claims or folder / "CLAIMS.md")
    if not summary.complete:
        skipped = sum("finished" not in outcome for outcome in summary.outcomes.values())
        typer.echo(f"{skipped} of {len(summary.outcomes)} items have no results")
    if not (summary.complete and agree):
        raise typer.Exit(1)


def _pages(known: dict[str, Item], folder: Path, claims: Path, *, only_check: bool = False) -> None:
    """Draw everything from the records, or say what would be drawn differently."""
    from adadp_lab.paper.paper_records import Records
    from adadp_lab.paper.render import check, render

    if only_check:
        differing = check(known, Records(folder), claims)
        for line in differing:
            typer.echo(line)
        if differing:
            raise typer.Exit(1)
        typer.echo(f"{folder} and {claims} are what their records give")
        return
    missing = render(known, Records(folder), folder, claims)
    typer.echo(f"tables and figures in {folder}, claims in {claims}")
    if missing:
        typer.echo(f"no records of {', '.join(missing)}")


def _compare(chosen: list[Item], folder: Path) -> bool:
    """Show quick results beside the full ones that are kept. Whether they are the beginning of those."""
    from adadp_lab.paper.paper_records import Records
    from adadp_lab.paper.quick_table import reasons, rows_of, verdict

    quick, full = Records(folder), Records(_kept())
    found, beside = {item: rows_of(quick.of(item), full.of(item)) for item in chosen if quick.of(item)}, []
    for item, rows in found.items():
        typer.echo(f"\n{item.name}: {item.title} ({item.where})")
        _print_beside([("", "quick", "full", ""), *((row.what, row.quick, row.full, row.word) for row in rows)])
        beside += full.of(item)
    every = [row for rows in found.values() for row in rows]
    if every:
        typer.echo()
        for line in reasons((record for item in found for record in quick.of(item)), beside):
            typer.echo(line)
        typer.echo(verdict(every, str(full.folder)))
    return all(row.agrees is not False for row in every)


def _kept() -> Path:
    """Where the full records are: here, or in the checkout that this is installed from."""
    checkout = Path(__file__).parents[3] / FULL
    return checkout if checkout.is_dir() and not Path(FULL).is_dir() else Path(FULL)


def _print_beside(rows: list[tuple[str, str, str, str]]) -> None:
    """Figures to the right, words to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for what, quick, full, word in rows:
        line = f"  {what:<{widths[0]}}  {quick:>{widths[1]}}  {full:>{widths[2]}}  {word}"
        typer.echo(line.rstrip())
