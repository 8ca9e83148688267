"""`adadp bench`: what private steps cost over plain ones, here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from adadp.cli.output import print_list
from adadp.cli.pipeline import JsonOption
from adadp.errors import ConfigurationError
from adadp_lab.report.records import write_json

if TYPE_CHECKING:
    from adadp_lab.bench import Comparison

FOLDER = Path("results/bench")
MODELS, AGAINST, CLIPPING = "mlp,alexnet,wrn,transformer", "sgd,opacus", "flat,ellipsoid,local"
REAL = "gpt2,bert,llama,llama-lora,vit,convnext,resnet50"


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=escape(help), show_default=False)  # else [words] are taken for styles


def bench(
    models: Annotated[
        str | None, _option(f"Which models; also {REAL}, with transformers, peft and timm. [{MODELS}]")
    ] = None,
    against: Annotated[str | None, _option(f"Compared with. [{AGAINST}]")] = None,
    clipping: Annotated[
        str | None, _option(f"Which of our clippings; ellipsoid is one with each shape. [{CLIPPING}]")
    ] = None,
    fastdp: Annotated[
        Path | None, _option("A checkout of fastDP, to compare with it: it is not on the package index.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int | None, _option("The most rounds of each model. [cpu: 25, cuda: 60]")] = None,
    threads: Annotated[int | None, _option("CPU threads. [torch's own choice]")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    probes: Annotated[
        int | None, _option("Synthetic examples in a shape's refresh. [two lots' worth, at most training's 512]")
    ] = None,
    goals: Annotated[bool, typer.Option("--goals", help="Say which goals were met.")] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Instead: how cost grows with lot, depth, width and length.")
    ] = False,
    busy: Annotated[
        bool,
        typer.Option("--busy", help="--scaling on a CPU that others use: one thread, and the processor's own time."),
    ] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Measure nothing: make tables.md and figures of what is in --out.")
    ] = False,
    out: Annotated[
        Path | None,
        _option(f"Write the JSON to this file. [none; --scaling: {FOLDER}/scaling-DEVICE.json; --draw: {FOLDER}]"),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what the file has of other models, measured by the same versions.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Step time and peak memory over plain SGD of the same model, in one process, beside Opacus if installed."""
    if draw:
        _refuse("--draw measures nothing", {
            "--models": models, "--against": against, "--clipping": clipping, "--rounds": rounds, "--probes": probes,
            "--goals": goals, "--scaling": scaling, "--json": json_output, "--threads": threads,
            "--fastdp": fastdp, "--add": add, "--busy": busy,
        })  # fmt: skip
        return _draw(out or FOLDER)
    if scaling:
        _refuse("--scaling has models and sizes of its own", {
            "--models": models, "--against": against, "--clipping": clipping, "--rounds": rounds, "--probes": probes,
            "--goals": goals, "--fastdp": fastdp, "--add": add,
        })  # fmt: skip
        if busy:
            _refuse("--busy takes one thread", {"--threads": threads})
        return _scale(device, threads, seed, busy, out, json_output)
    _refuse("times of single models are the wall's", {"--busy": busy})
    if add and out is None:
        raise ConfigurationError("--add needs a file to add to: give --out")
    from adadp_lab.bench import compare
    from adadp_lab.bench.report import read

    _check_writable(out)
    earlier = read(out, "rows") if add and out is not None else None
    found = compare(
        _names(MODELS if models is None else models),
        _names(AGAINST if against is None else against),
        _names(CLIPPING if clipping is None else clipping),
        device=device, rounds=rounds, threads=threads, seed=seed, probes=probes, fastdp=fastdp,
        earlier=earlier, say=_say,
    )  # fmt: skip
    if out is not None:
        write_json(out, (found if earlier is None else found.beside(earlier)).to_dict())
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    _print(found, goals)
    if out is not None:
        typer.echo(f"\nAs JSON in {out}.")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _refuse(why: str, options: dict[str, object]) -> None:
    """Options that would be ignored are refused: whoever gave them wanted something else."""
    for name, value in options.items():
        if value not in (None, False):
            raise ConfigurationError(f"{why}: no {name}")


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _check_writable(path: Path | None) -> None:
    """Before minutes are spent on what cannot be kept."""
    if path is not None and path.is_dir():
        raise ConfigurationError(f"--out {path} is a folder: give a file")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


def _scale(device: str, threads: int | None, seed: int, busy: bool, out: Path | None, json_output: bool) -> None:
    from adadp_lab.bench import scale
    from adadp_lab.bench.plots import draw_scaling

    _check_writable(out)

    def path_of(found: dict[str, Any]) -> Path:
        return out or FOLDER / f"scaling-{found['device']}.json"

    found = scale(
        device=device,
        threads=threads,
        seed=seed,
        busy=busy,
        say=_say,
        keep=lambda found: write_json(path_of(found), found),
    )
    path = path_of(found)
    drawn = draw_scaling(found, path.parent, path.stem)
    if json_output:
        typer.echo(json.dumps(found))
        return
    for line in [str(path), *map(str, drawn)]:
        typer.echo(line)


def _draw(folder: Path) -> None:
    from adadp_lab.bench.report import write_report

    for path in write_report(folder):
        typer.echo(str(path))


def _print(found: Comparison, goals: bool) -> None:
    from rich.console import Console

    from adadp_lab.bench.report import cells, failures, heading, parted, title

    console = Console(highlight=False)
    for model, rows in parted(found.rows).items():
        name = title(model, found.settings["sizes"][model], rows[0]["device"])
        console.print(_table(name, heading(rows, goals), cells(rows, goals)))
        console.print()
    print_list("Not measured", [*failures(found.rows), *found.notes])


def _table(title: str, heading: list[str], rows: list[list[str]]) -> Any:
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold")
    for place, name in enumerate(heading):
        side: Any = "left" if place == 0 or name == "goals" else "right"
        table.add_column(escape(name), justify=side, header_style="dim", no_wrap=name != "goals")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
