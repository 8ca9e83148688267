"""`adadp reproduce`: the paper's tables and figures, run again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from adadp.errors import ConfigurationError


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
) -> None:
    """Run the paper's tables and figures again, in its own reading and soundly, and say what holds."""
    from adadp import reproduce as items
    from adadp.plan import device_of
    from adadp.reproduce.item import Options
    from adadp.reproduce.runner import run

    known = items.load()
    if list_:
        width = max(map(len, known))
        for item in known.values():
            typer.echo(f"{item.name:<{width}}  {item.where:<9}  {item.title}")
        return
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigurationError(f"no item is called {unknown[0]!r}; there are {', '.join(known)}")
    count = (1 if quick else 3) if seeds is None else seeds
    if count < 1:
        raise ConfigurationError(f"--seeds must be at least 1, not {count}")
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"--jobs must be at least 1, not {jobs}")
    folder = out or Path("runs/reproduce-quick" if quick else "results/reproduce")
    started = time.perf_counter()

    def tell(done: int, total: int, item: str) -> None:
        if done % max(1, total // 50) == 0 or done == total:
            typer.echo(f"{done}/{total} runs after {time.perf_counter() - started:.0f} s ({item})", err=True)

    summary = run(
        [known[name] for name in dict.fromkeys(names or known)],
        Options(count, quick, str(device_of(device))),
        folder,
        workers=jobs or os.cpu_count() or 1,
        force=force,
        data_dir=data_dir,
        progress=tell,
    )
    for name, outcome in summary.outcomes.items():
        typer.echo(f"{name}: {outcome}")
    typer.echo(f"{summary.seconds:.0f} s, results in {folder}")
    if not summary.complete:
        raise typer.Exit(1)
