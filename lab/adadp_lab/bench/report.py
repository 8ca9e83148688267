"""Tables of what was measured: for the terminal, and tables.md for the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adadp.errors import ConfigurationError
from adadp_lab.bench.cases import Sizes
from adadp_lab.bench.compare import REFRESHES
from adadp_lab.bench.goals import judged_apart
from adadp_lab.bench.machine import KINDS
from adadp_lab.bench.methods import EVERY
from adadp_lab.bench.plots import draw_scaling
from adadp_lab.bench.real_models import REAL
from adadp_lab.bench.scaling import series_in
from adadp_lab.report.tables import paragraph, table

Row = Mapping[str, Any]
#: From so many other processes at work on, a page says that the machine was not alone.
OTHERS = 0.5
DEVICES = {"cpu": "CPU", "cuda": "GPU"}


def title(model: str, sizes: Sizes, kind: str) -> str:
    """A model, its sizes and where it ran."""
    return f"{model} on {kind}: " + ", ".join(f"{name} {value:,}" for name, value in sizes.items())


def heading(rows: Sequence[Row], goals: bool) -> list[str]:
    """The columns of `cells`."""
    replayed = ["x replayed SGD"] if _replayed_sgd(rows) else []
    return ["", "ms", "x SGD", *replayed, "peak MiB", "x SGD", *(["goals"] if goals else [])]


def cells(rows: Sequence[Row], goals: bool) -> list[list[str]]:
    """The table of one model."""
    replayed = bool(_replayed_sgd(rows))
    return [
        [
            way(row) + _fewer(row, rows), _number(row["ms"], ".2f"), _number(row["ratio_to_sgd"], ".2f", "x"),
            *([_number(over_replayed_sgd(row, rows), ".2f", "x")] if replayed else []),
            _number(row["peak_mib"], ",.1f"), _number(row["peak_ratio_to_sgd"], ".2f", "x"),
            *([_goals(row)] if goals else []),
        ]
        for row in rows
    ]  # fmt: skip


def over_replayed_sgd(row: Row, rows: Sequence[Row]) -> float | None:
    """A replayed step's time over that of replayed SGD of the same model; None for an ordinary one.

    SGD gains most from replaying where its step is short: beside ordinary SGD alone, a small model's replayed private
    step seems to cost nothing.
    """
    base = _replayed_sgd([other for other in rows if other["model"] == row["model"]])
    return row["ms"] / base if base and "-graph" in row["method"] and row["ms"] is not None else None


def _replayed_sgd(rows: Sequence[Row]) -> float | None:
    return next((row["ms"] for row in rows if row["method"] == "sgd-graph"), None)


def parted(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def way(row: Row) -> str:
    """Method and clipping; what has but one clipping goes without."""
    return f"{row['method']} {row['clipping']}" if row["method"].startswith("adadp") else str(row["method"])


def failures(rows: Sequence[Row]) -> list[str]:
    """What could not be measured, and why."""
    return [f"{row['model']}, {way(row)}: {row['error']}" for row in rows if "error" in row]


def fewer(row: Row, rows: Sequence[Row]) -> tuple[int, int] | None:
    """How many parameters a way trains, and how many SGD does, where those are more: less work is no speed."""
    all_of_them = [
        other.get("trained") for other in rows if other["method"] == "sgd" and other["model"] == row["model"]
    ]
    own = row.get("trained")
    if own is None or not all_of_them or all_of_them[0] is None or own >= all_of_them[0]:
        return None
    return own, all_of_them[0]


def _fewer(row: Row, rows: Sequence[Row]) -> str:
    return ", trains fewer" if fewer(row, rows) else ""


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _goals(row: Row) -> str:
    if "error" in row:
        return "failed"
    return ", ".join(
        f"{name} {goal['most']:.2f} {'met' if goal['met'] else 'MISSED'}" for name, goal in row["goals"].items()
    )


# ---- tables.md ------------------------------------------------------------------------------------------------------


def write_report(folder: Path) -> list[Path]:
    """Write tables.md and the figures of every result in `folder`: cpu.json, cuda.json, scaling-*.json."""
    steps = {kind: read(folder / f"{kind}.json", "rows") for kind in KINDS}
    scaling = {kind: read(folder / f"scaling-{kind}.json", "sweeps") for kind in KINDS}
    if not any([*steps.values(), *scaling.values()]):
        names = ", ".join([*(f"{kind}.json" for kind in KINDS), *(f"scaling-{kind}.json" for kind in KINDS)])
        raise ConfigurationError(f"{folder} has none of {names}: run adadp bench --out {folder}/cpu.json first")
    parts = ["# Step time and memory", "Written by `adadp bench --draw` from the JSON files beside it.", _how()]
    written: list[Path] = []
    for kind, values in steps.items():
        if values is not None:
            parts += _steps(kind, values)
    for kind, values in scaling.items():
        if values is not None:
            written += draw_scaling(values, folder, f"scaling-{kind}")
            parts += _scaling(kind, values)
    path = folder / "tables.md"
    path.write_text("\n\n".join(parts) + "\n")
    return [path, *written]


def read(path: Path, key: str) -> dict[str, Any] | None:
    """A file of results that has `key`; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    expected = {"rows": {"rows", "versions", "settings"}, "sweeps": {"sweeps", "local_memory", "versions"}}[key]
    if not expected <= values.keys():
        raise ConfigurationError(f"{path} was not written by this version of adadp bench: measure again")
    return values


def _how() -> str:
    return paragraph(
        "Every way takes one step in turn, round after round, in one process; a time is the median over rounds, and",
        f"ratios are to plain SGD of the same model. A shape is refreshed every {EVERY} steps, and that is counted in:",
        f"the median of steps without a refresh, plus what a step with one takes longer (median of {REFRESHES}),",
        f"divided by {EVERY}. Memory is the highest of a step, gradients included.",
        "On GPUs products are TF32 for all.",
    )


def _machine(versions: Mapping[str, Any]) -> str:
    names = (
        "gpu", "processor", "threads", "torch", "cuda", "triton", "numba", "opacus", "fastdp", "transformers", "peft",
        "timm", "python", "kernels",
    )  # fmt: skip
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def _steps(kind: str, values: Mapping[str, Any]) -> list[str]:
    by_model = parted(values["rows"])
    parts = [
        f"## {DEVICES[kind]}", _machine(values["versions"]) + ".",
        "Time over SGD's, and peak memory over SGD's in brackets:",
    ]  # fmt: skip
    for real in (False, True):
        chosen = {model: rows for model, rows in by_model.items() if (model in REAL) == real}
        parts += [_overview(chosen)] if chosen else []
        parts += _over_replayed(chosen)
    fewest = [
        f"- {row['model']}, {way(row)}: {found[0]:,} of {found[1]:,}"
        for row in values["rows"]
        if "error" not in row and (found := fewer(row, values["rows"]))
    ]
    parts += ["\\* trains fewer parameters than SGD does:\n\n" + "\n".join(fewest)] if fewest else []
    judged = _best(values["rows"])
    missed = [
        f"- {row['model']}, {way(row)}: {name} {_reached(row, name):.3f}x of {row['goals'][name]['most']:.3f}x"
        for (*_, name), row in judged.items()
        if not row["goals"][name]["met"]
    ]
    failed = [f"- {line}" for line in failures(values["rows"])]
    if judged:
        parts.append(f"{len(judged) - len(missed)} of {len(judged)} goals are met." + (" Missed:" if missed else ""))
        parts += ["\n".join(missed)] if missed else []
    parts += ["Not measured, and not among those goals:\n\n" + "\n".join(failed)] if failed else []
    parts += values.get("notes", [])
    for model, rows in by_model.items():
        parts.append(f"### {title(model, values['settings']['sizes'][model], kind)}")
        parts.append(table(heading(rows, True), cells(rows, True)))
    return parts


def _overview(by_model: Mapping[str, Sequence[Row]]) -> str:
    ways = list(dict.fromkeys(way(row) for rows in by_model.values() for row in rows))
    lines = [[name, *(_cell(rows, name) for rows in by_model.values())] for name in ways]
    return table(["", *(f"{model}, lot {rows[0]['lot']:,}" for model, rows in by_model.items())], lines)


def _over_replayed(by_model: Mapping[str, Sequence[Row]]) -> list[str]:
    """Replayed steps beside replayed SGD, where there are any."""
    ways = [way(row) for rows in by_model.values() for row in rows if "-graph" in row["method"]]
    lines = [
        [name, *(_over_replayed_cell(rows, name) for rows in by_model.values())]
        for name in dict.fromkeys(ways)
        if name != "sgd-graph"
    ]
    return ["Replayed steps, time over *replayed* SGD's:", table(["", *by_model], lines)] if lines else []


def _over_replayed_cell(rows: Sequence[Row], name: str) -> str:
    row = next((row for row in rows if way(row) == name), None)
    if row is None or (ratio := over_replayed_sgd(row, rows)) is None:
        return "" if row is None else "failed"
    return f"{ratio:.2f}x" + (r" \*" if fewer(row, rows) else "")


def _best(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], Row]:
    """For each goal of a model and clipping, the row that comes nearest: a step may be taken ordinarily or replayed.

    Where both must reach it, each is a goal of its own.
    """
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        for name in row["goals"]:
            kind = row["method"] if judged_apart(row) else row["method"].replace("-graph", "")
            cell = row["model"], kind, row["clipping"], name
            if cell not in found or _reached(row, name) < _reached(found[cell], name):
                found[cell] = row
    return found


def _reached(row: Row, goal: str) -> float:
    return float(row["peak_ratio_to_sgd" if goal == "memory" else "ratio_to_sgd"])


def _cell(rows: Sequence[Row], name: str) -> str:
    row = next((row for row in rows if way(row) == name), None)
    if row is None or row["ratio_to_sgd"] is None:
        return "" if row is None else "failed"
    memory = _number(row["peak_ratio_to_sgd"], ".2f", "x")
    mark = r" \*" if fewer(row, rows) else ""
    return f"{row['ratio_to_sgd']:.2f}x" + (f" ({memory})" if memory else "") + mark


def _scaling(kind: str, values: Mapping[str, Any]) -> list[str]:
    parts = [
        f"## How cost grows, {DEVICES[kind]}", _machine(values["versions"]) + ".",
        "Slopes of a line through the larger half of the points, log over log: time, and peak memory in brackets.",
    ]  # fmt: skip
    if values.get("time") == "fastest":
        parts.append("A time is that of the fastest of several steps without a refresh of the shape.")
    if (load := values.get("load_before")) and load >= OTHERS:
        parts.append(paragraph(
            f"Others used the machine: {load:g} processes wanted one of its processors, on average, in the minute",
            "before. Times are what the processor spent on these steps, with one thread."
            if values.get("clock") == "processor" else "Times are longer for it.",
        ))  # fmt: skip
    series, replayed = series_in(values), values.get("replayed", [])
    if replayed:
        parts.append(paragraph(
            f"Steps of {', '.join(replayed)} are replayed from a recording (CUDA graphs); their memory is that of the",
            "same steps done ordinarily.",
        ))  # fmt: skip
    lines, left = [], []
    for sweep in values["sweeps"]:
        grown = [_slope(sweep["slopes"][name]) for name in series]
        sizes = [point["value"] for point in sweep["points"]]
        lines.append([f"{sweep['model']}, {sweep['size']} {min(sizes):,} to {max(sizes):,}", *grown])
        left += [
            f"- {sweep['model']}, {sweep['size']} {point['value']:,}, {point['series']}: {point['left_out']}"
            for point in sweep["points"]
            if "left_out" in point
        ]
    parts.append(table(["", *series], lines))
    parts += ["Left out:\n\n" + "\n".join(left)] if left else []
    parts += [f"![{what} over sizes](scaling-{kind}-{what}.svg)" for what in ("time", "memory")]
    if values["local_memory"]:
        parts.append("Memory of local clipping beyond SGD's, whose own growth is activations and their gradients:")
        lines = [
            [
                found["model"], ", ".join(f"{mib:,.1f}" for mib in found["local_less_sgd_mib"]),
                _number(found["mib_per_1000"]["local_less_sgd"], ".2f"), _number(found["mib_per_1000"]["sgd"], ".2f"),
                _number(found["gradient_mib_per_1000"], ",.1f"),
            ]
            for found in values["local_memory"]
        ]  # fmt: skip
        unit = "MiB per 1,000 examples"
        parts.append(table(["", "MiB at each lot", f"grows by, {unit}", "SGD itself", "gradients, if kept"], lines))
    return parts


def _slope(slopes: Mapping[str, float | None]) -> str:
    return f"{_number(slopes['ms'], '.2f')} ({_number(slopes['peak_mib'], '.2f')})"
