"""What `adadp reproduce --quick` prints: each result beside the full records' figure, and why some differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adadp_lab.paper.agreement import POINTS, Compared, compare
from adadp_lab.paper.item import Record

#: Of a job with many numbers so many are shown; how many more there are is said.
SHOWN = 4


@dataclass(frozen=True)
class Row:
    """One result. `full` is empty where there is nothing to put beside it; `word` says how they compare, or why not.

    `agrees` is None where nothing was compared.
    """

    what: str
    quick: str
    full: str
    word: str
    agrees: bool | None = None


def rows_of(quick: Sequence[Record], full: Sequence[Record]) -> list[Row]:
    """The results of one item's quick run."""
    found: list[Row] = []
    for record in quick:
        if record["work"] == "measure":
            found += _times(record, full)
            continue
        compared = compare([record], full)
        if not compared:
            found.append(_alone(record, full))
        shown = [line for line in compared if not line.agrees] or compared[:SHOWN]
        found += [_beside(line, percent=record["work"] == "train") for line in shown]
        agreeing = sum(line.agrees for line in compared) - sum(line.agrees for line in shown)
        found += [Row(f"{record['work']}: {agreeing} more numbers", "", "", "agree", True)] if agreeing else []
    return found


def _beside(line: Compared, *, percent: bool) -> Row:
    form, unit = (".2f", "%") if percent else (".6g", "")
    distance = abs(line.quick - line.full)
    word = "agrees" if line.agrees else f"DIFFERS by {distance:.3g}, more than {line.tolerance:.2g}"
    what = f"{line.what}, to step {line.step:,}" if line.step else line.what
    return Row(what, f"{line.quick:{form}}{unit}", f"{line.full:{form}}{unit}", word, line.agrees)


def _alone(record: Record, full: Sequence[Record]) -> Row:
    """A result that has nothing beside it."""
    if record["work"] != "train":
        return Row(record["work"], "", "", "no full record of it")
    who, (step, value) = record["settings"]["who"], record["curve"][-1]
    beside = any(other["work"] == "train" and other["settings"]["who"] == who for other in full)
    why = "full runs have too few steps in common with it" if beside else "no full record of it"
    return Row(f"{who}, at step {step:,}", f"{100 * value:.2f}%", "", why)


def _times(record: Record, full: Sequence[Record]) -> list[Row]:
    """Times over DPSGD's of the same process: machines differ, so nothing has to agree."""
    said = record["settings"]
    ratios = _ratios(record)
    same = [other for other in full if other["work"] == "measure" and _place(other) == _place(record)]
    beside = _ratios(same[0]) if same else {}
    return [
        Row(
            f"{said['dataset']}, {who}: time over DPSGD's", f"{ratio:.2f}x",
            f"{beside[who]:.2f}x" if who in beside else "", "a time: not compared",
        )
        for who, ratio in ratios.items()
        if who != "dpsgd"
    ]  # fmt: skip


def _place(record: Record) -> tuple[str, str, bool]:
    said = record["settings"]
    return said["dataset"], said["on"], bool(said.get("replayed"))


def _ratios(record: Record) -> dict[str, float]:
    return {who: ms / record["mean_ms"]["dpsgd"] for who, ms in record["mean_ms"].items()}


def reasons(quick: Iterable[Record], full: Iterable[Record]) -> list[str]:
    """Why the figures of a quick run are not those of the full ones, to the digit."""
    here, there = ({str(record["device"]) for record in records} for records in (quick, full))
    said = [
        "A quick run is the beginning of one seed's: accuracies are means over the steps that it has in common with a "
        "full run, and are lower than those at the end."
    ]
    if there - here:
        said.append(
            f"Run on {', '.join(sorted(here))}; full records are of {', '.join(sorted(there))}. Noise is drawn anew on "
            f"each kind of device, so an accuracy agrees within {POINTS:g} points. Costs have to be equal."
        )
    return said


def verdict(found: Sequence[Row], where: str) -> str:
    """The line under the table."""
    compared = [row for row in found if row.agrees is not None]
    if not compared:
        return f"{len(found)} results; nothing in {where} can be compared with them"
    differing = sum(row.agrees is False for row in compared)
    beside = len(found) - len(compared)
    more = f"; {beside} more are only shown" if beside else ""
    return f"{'All results agree' if not differing else f'{differing} results DIFFER'} with those in {where}{more}"
