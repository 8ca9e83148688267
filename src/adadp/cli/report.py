"""`adadp report`: one page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adadp.cli.messages import as_options
from adadp.cli.output import argument, option


def report(
    runs: Annotated[list[Path], argument("The folders of one run, or of several to compare.")],
    out: Annotated[
        Path | None, option("The file. [report.html in the first run's folder; report-public.html with --public]")
    ] = None,
    format: Annotated[str, option("html, md or json. [html]", "--format")] = "html",
    public: Annotated[
        bool, option("Leave out everything that may not be published: a page to pass on.", "--public")
    ] = False,
) -> None:
    """Write what a run did, what it cost and what may be said of it: one page that needs no network."""
    from adadp.report import report as write

    with as_options(["out", "format"]):
        path = write(*runs, out=out, format=format, public=public)
    typer.echo(f"{path}{'' if public else ': for the curator only; --public makes one that may be published'}")
