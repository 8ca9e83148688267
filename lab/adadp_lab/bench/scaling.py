"""How the cost of a step grows with the lot, the depth, the width and the sequence's length.

Steps here are those without a refresh of shapes. A time is the fastest of several rounds: whatever else the machine
does makes steps longer, and there is no time for many rounds of the largest sizes. On a GPU ours are replayed, as users
are told to, for ordinary ones wait for Python there; memory is that of the same step done ordinarily. A point that does
not fit, cannot be replayed or takes too long is left out, and why is written down in its place.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adadp.errors import ConfigurationError
from adadp.mechanism.replay import WARM_UP
from adadp_lab.bench import machine
from adadp_lab.bench.cases import Sizes
from adadp_lab.bench.clock import milliseconds, release
from adadp_lab.bench.compare import Contender
from adadp_lab.bench.methods import METHODS
from adadp_lab.bench.models import MODELS

#: Kronecker is the shape that `adadp train` has unless told otherwise.
_OURS = ("flat", "ellipsoid-kronecker", "local")
#: What grows, by kind of device and by the name that its points have: method and clipping.
SERIES: dict[str, dict[str, tuple[str, str]]] = {
    "cpu": {"sgd": ("sgd", "none"), **{name: ("adadp", name) for name in _OURS}},
    "cuda": {
        "sgd": ("sgd", "none"), "sgd-graph": ("sgd-graph", "none"), **{name: ("adadp-graph", name) for name in _OURS},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """One size of a model goes through `values`; the others stay."""

    model: str
    size: str
    values: tuple[int, ...]
    others: Sizes = field(default_factory=dict)


_LOTS = tuple(2**power for power in range(6, 14))
SWEEPS: dict[str, tuple[Sweep, ...]] = {
    "cpu": (
        Sweep("mlp", "lot", _LOTS, {"width": 1000}),
        Sweep("transformer", "lot", _LOTS, {"width": 32, "depth": 1, "length": 8}),
        Sweep("transformer", "depth", (1, 2, 4, 8), {"lot": 16, "width": 128, "length": 32}),
        Sweep("transformer", "width", (32, 64, 128, 256), {"lot": 16, "depth": 2, "length": 32}),
        Sweep("transformer", "length", (16, 32, 64, 128, 256, 512), {"lot": 8, "width": 64, "depth": 2}),
    ),
    "cuda": (
        Sweep("mlp", "lot", _LOTS, {"width": 1000}),
        Sweep("transformer", "lot", _LOTS, {"width": 256, "depth": 4, "length": 64}),
        Sweep("transformer", "depth", (1, 2, 4, 8, 16, 32), {"lot": 32, "width": 512, "length": 128}),
        Sweep("transformer", "width", (128, 256, 512, 1024, 2048), {"lot": 32, "depth": 4, "length": 128}),
        Sweep("transformer", "length", (64, 128, 256, 512, 1024, 2048, 4096), {"lot": 8, "width": 256, "depth": 4}),
    ),
}
#: Seconds: the longest step that is measured, what the rounds of steps in turn aim at, and all of a sweep; by kind.
STEP, POINT, SWEEP = {"cpu": 3.0, "cuda": 2.0}, {"cpu": 2.0, "cuda": 0.5}, {"cpu": 50.0, "cuda": 45.0}
#: A point is tried only where this share of the free memory is enough for what the last one lets expect.
SHARE = 0.8


def scale(
    *,
    device: str = "auto",
    threads: int | None = None,
    seed: int = 0,
    sweeps: Sequence[Sweep] | None = None,
    busy: bool = False,
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time and peak memory of every point, slopes fitted to them, and Local's memory beyond SGD's over lots.

    `keep` is given what there is after each sweep: the next one may be the one that time does not suffice for.
    `busy` is for a CPU that others use too: steps take one thread, and time is what the processor spends on them.
    """
    chosen = machine.device_for(device)
    if busy and chosen.type != "cpu":
        raise ConfigurationError(f"only a processor's own time can be told from the wall's, not that of {chosen.type}")
    threads, now = (1, time.process_time) if busy else (threads, time.perf_counter)
    found: list[dict[str, Any]] = []
    load = machine.load()

    def so_far() -> dict[str, Any]:
        beyond = [beyond_sgd(sweep) for sweep in found if sweep["size"] == "lot"]
        return {
            "device": chosen.type, "time": "fastest", "clock": "processor" if busy else "wall",
            "sweeps": found, "local_memory": beyond,
            "replayed": [name for name in SERIES[chosen.type] if _replayed(name, chosen.type)],
            "versions": machine.versions(chosen), "load_before": load,
        }  # fmt: skip

    try:
        with machine.settings(chosen, threads):
            for sweep in SWEEPS[chosen.type] if sweeps is None else sweeps:
                say(f"{sweep.model} on {chosen.type}: {sweep.size} {sweep.values[0]} to {sweep.values[-1]}")
                found.append(_swept(sweep, chosen, seed, now))
                keep(so_far())
            return so_far()
    finally:
        gc.unfreeze()


def _replayed(series: str, kind: str) -> bool:
    """Whether its steps are recorded, which is what only some devices do."""
    return METHODS[SERIES[kind][series][0]].only_on != ""


def _turns(kind: str) -> list[list[str]]:
    """Series whose steps are taken in turn. A recording holds on to its memory, so each of those is measured alone."""
    recorded = [series for series in SERIES[kind] if _replayed(series, kind)]
    return [[series for series in SERIES[kind] if series not in recorded], *([series] for series in recorded)]


def _swept(sweep: Sweep, device: torch.device, seed: int, now: Callable[[], float]) -> dict[str, Any]:
    if sweep.size == "lot" and "lot" in sweep.others:
        raise ConfigurationError("the lot goes through the sweep's values: it is not one of the other sizes")
    kind = device.type
    points: list[dict[str, Any]] = []
    ended: dict[str, str] = {}  # series that have come to an end, and why
    begun = now()
    for value in sweep.values:
        if now() - begun > SWEEP[kind]:
            ended = dict.fromkeys(SERIES[kind], f"the sweep's {SWEEP[kind]:g} s were spent") | ended
        for turn in _turns(kind):
            made: dict[str, Contender] = {}
            for series in turn:
                if series not in ended:
                    ended |= _too_large(series, points, value, device)
                if series in ended:
                    points.append({"series": series, "value": value, "left_out": ended[series]})
                    continue
                made[series] = Contender(*SERIES[kind][series])
                # A shape is learnt in the first step, two ordinary ones follow, then one is recorded and replayed.
                warm = WARM_UP + 3 if _replayed(series, kind) else 1
                made[series].make(sweep.model, {**sweep.others, sweep.size: value}, seed, device, warm=warm)
            points += _measured(made, value, device, ended, now)
            if made:
                del made
                release()
        gc.freeze()  # nothing that was made is left: what is, modules above all, need not be gone through each time
    slopes = {series: _slopes(points, series) for series in SERIES[kind]}
    return {
        "model": sweep.model, "size": sweep.size, "others": dict(sweep.others), "points": points, "slopes": slopes,
    }  # fmt: skip


def _too_large(series: str, points: list[dict[str, Any]], value: int, device: torch.device) -> dict[str, str]:
    """Why a point is not worth trying, going by the last one of its series: the peak may grow by its square.

    A recording has memory of its own, beside that of the ordinary steps before it.
    """
    last = next((point for point in reversed(points) if point["series"] == series and "ms" in point), None)
    if last is None:
        return {}
    growth = value / last["value"]
    if last["ms"] / 1e3 * growth > STEP[device.type]:
        return {series: f"a step would take about {last['ms'] / 1e3 * growth:.1f} s, over {STEP[device.type]:g} s"}
    free, need = machine.free_mib(device), last["peak_mib"] * growth * (1 + _replayed(series, device.type))
    if need > SHARE * free:
        return {series: f"it would need about {need / 1024:.1f} GiB where {free / 1024:.1f} GiB are free"}
    return {}


def _measured(
    made: dict[str, Contender], value: int, device: torch.device, ended: dict[str, str], now: Callable[[], float]
) -> list[dict[str, Any]]:
    if not made:
        return []
    kind = device.type
    first = {
        c: times[0] for c, times in milliseconds({c: c.run for c in made.values()}, 1, kind, warm=0, now=now).items()
    }
    quick = {c: c.run for c in made.values() if c.error is None}
    rounds = round(POINT[kind] * 1e3 / max(1e-3, sum(first[c] for c in quick))) if quick else 0
    times = milliseconds(quick, min(20, max(2, rounds)), kind, warm=0, now=now)
    release()
    found = []
    for series, contender in made.items():
        peak = contender.peak_mib(kind) if contender.error is None else None
        if peak is None:
            ended[series] = f"{value}: {contender.error}"
            found.append({"series": series, "value": value, "left_out": contender.error})
            continue
        fastest = min(times[contender])
        found.append({"series": series, "value": value, "ms": round(fastest, 4), "peak_mib": round(peak, 3)})
    return found


def slope(values: Sequence[float], costs: Sequence[float]) -> float | None:
    """The exponent with which costs grow at the end: a line through the larger half of the points, log over log."""
    pairs = [(math.log(v), math.log(c)) for v, c in zip(values, costs, strict=True) if c > 0]
    pairs = pairs[-max(3, (len(pairs) + 1) // 2) :]
    if len(pairs) < 2:
        return None
    fitted = statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs])
    return round(fitted.slope, 3)


def series_in(values: Mapping[str, Any]) -> list[str]:
    """The series that a file of results has: which there are has changed."""
    return list(dict.fromkeys(series for sweep in values["sweeps"] for series in sweep["slopes"]))


def series_of(sweep: Mapping[str, Any], series: str, cost: str) -> tuple[list[int], list[float]]:
    """Values and costs ("ms" or "peak_mib") of the points that were measured."""
    found = [point for point in sweep["points"] if point["series"] == series and cost in point]
    return [point["value"] for point in found], [point[cost] for point in found]


def _slopes(points: list[dict[str, Any]], series: str) -> dict[str, float | None]:
    return {cost: slope(*series_of({"points": points}, series, cost)) for cost in ("ms", "peak_mib")}


def beyond_sgd(sweep: dict[str, Any]) -> dict[str, Any]:
    """Local's peak less SGD's over lots, in MiB, and how it grows per 1,000 examples at the end.

    SGD's own growth is its activations and their gradients. Gradients of examples, were they kept, would be
    `gradient_mib_per_1000`.
    """
    own = dict(zip(*series_of(sweep, "local", "peak_mib"), strict=True))
    base = dict(zip(*series_of(sweep, "sgd", "peak_mib"), strict=True))
    lots = [lot for lot in base if lot in own]
    excess = [round(own[lot] - base[lot], 3) for lot in lots]
    module = MODELS[sweep["model"]](lot=1, **sweep["others"])[0]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return {
        "model": sweep["model"], "lots": lots, "local_less_sgd_mib": excess, "sgd_mib": [base[lot] for lot in lots],
        "mib_per_1000": {
            "local_less_sgd": _per_thousand(lots, excess), "sgd": _per_thousand(lots, [base[lot] for lot in lots]),
        },
        "gradient_mib_per_1000": round(1000 * weights / 2**20, 3),
    }  # fmt: skip


def _per_thousand(lots: Sequence[int], mib: Sequence[float]) -> float | None:
    pairs = list(zip(lots, mib, strict=True))[-max(3, (len(lots) + 1) // 2) :]
    if len(pairs) < 2:
        return None
    fitted = statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs])
    return round(1000 * fitted.slope, 4)
