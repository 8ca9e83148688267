"""Step time and peak memory over plain SGD, for every clipping of ours and every peer, in one process.

Machines are noisy, so what counts is the ratio: every way takes one step in turn, round after round, and its time is
the median. A shape is refreshed every `EVERY` steps, and that is counted in: `ms` is the median of steps without a
refresh, plus what a step with one takes longer, divided by `EVERY`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from adadp.errors import ConfigurationError
from adadp_lab.bench import machine
from adadp_lab.bench.cases import Sizes
from adadp_lab.bench.clock import milliseconds, peak_mib, release
from adadp_lab.bench.goals import judge
from adadp_lab.bench.methods import EVERY, METHODS, OURS, BenchTask, TimedStep, trained
from adadp_lab.bench.models import MODELS, NAMES, SIZES, build
from adadp_lab.bench.real_models import refuse_missing

PEERS = tuple(dict.fromkeys(method.peer for method in METHODS.values() if method.peer))
#: The rounds of a model, and the seconds that they may take, by kind of device. At least 5 rounds are made.
ROUNDS = {"cpu": 25, "cuda": 60}
SECONDS = {"cpu": 45.0, "cuda": 10.0}
REFRESHES = 3
NO_OPACUS = "Opacus is not installed, so it is not in this table: pip install 'adadp[bench]' brings it"
NO_FASTDP = "fastDP is not on the package index, so it is not in this table: --fastdp DIR names a checkout of it"


def clippings_of(names: Sequence[str]) -> list[str]:
    """The clippings meant: "ellipsoid" stands for one with each shape."""
    found: list[str] = []
    for name in names:
        own = [clipping for clipping in OURS if clipping == name or clipping.partition("-")[0] == name]
        if not own:
            known = dict.fromkeys([*(clipping.partition("-")[0] for clipping in OURS), *OURS])
            raise ConfigurationError(f"no clipping is called {name!r}; there are {', '.join(known)}")
        found += own
    return list(dict.fromkeys(found))


def _known(kind: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ConfigurationError(f"no {kind} is called {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


class Contender:
    """One way to take a step of one model. Whatever goes wrong is kept in `error`, and it takes no more steps.

    `trained` is how many parameters its steps change.
    """

    def __init__(self, method: str, clipping: str) -> None:
        self.method, self.clipping = method, clipping
        self.error: str | None = None
        self.trained: int | None = None
        self._step: TimedStep | None = None

    def make(
        self, model: str, sizes: Sizes, seed: int, device: torch.device, *, probes: int | None = None, warm: int = 3
    ) -> None:
        """Make the step and take `warm` of them, which do not count."""

        def work() -> None:
            task = BenchTask(*build(model, sizes, seed, device), self.clipping, probes)
            self._step = METHODS[self.method].make(task)
            for _ in range(warm):
                self._step.run()
            self.trained = sum(trained(task.module).values())

        self._guarded(work)

    @property
    def step(self) -> TimedStep:
        """The step, made."""
        assert self._step is not None
        return self._step

    def run(self) -> None:
        """One step."""
        if self.error is None:
            self._guarded(self.step.run)

    def run_with_refresh(self) -> None:
        """One step that learns its shape anew, and those that are longer because of it."""
        if self.error is None and self.step.refresh is not None:
            self.step.refresh()
            for _ in range(self.step.unsettled):
                self.run()

    def peak_mib(self, device: str) -> float | None:
        """The memory of one step. A recording is let go of first: the clipping's state of then is held by it too.

        Lots 0, 1, 10, 100 and so on are tried, which takes memory of its own: the smaller of two measurements counts.
        """
        found: list[float] = []

        def work() -> None:
            if self.step.unrecorded is not None:
                self._step = replace(self.step, run=self.step.unrecorded, unrecorded=None)
                release()
                self.step.run()  # the ordinary step's own first trial
            found.append(min(peak_mib(self.step.run, self.step.clear, device) for _ in range(2)))

        self._guarded(work)
        return found[0] if found else None

    def let_go(self) -> None:
        """Give back what the step holds."""
        self._step = None
        release()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a way that cannot do this model is a result too
            self.error = machine.said(error)
        if self.error is not None:
            self._step = None  # outside of `except`: the error's traceback holds on to the step's tensors
            release()


@dataclass(frozen=True)
class Comparison:
    """What was measured. `notes` say what is not in it."""

    rows: list[dict[str, Any]]
    versions: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        return {"rows": self.rows, "versions": self.versions, "settings": self.settings, "notes": self.notes}

    def beside(self, earlier: Mapping[str, Any]) -> Comparison:
        """This, and what an earlier one (as written to JSON) has of other models."""
        measured = self.settings["sizes"]
        rows = [*(row for row in earlier["rows"] if row["model"] not in measured), *self.rows]
        sizes = {**earlier["settings"]["sizes"], **measured}
        return Comparison(
            sorted(rows, key=lambda row: NAMES.index(row["model"])),
            {**earlier["versions"], **self.versions},
            {**self.settings, "sizes": {name: sizes[name] for name in NAMES if name in sizes}},
            list(dict.fromkeys([*earlier.get("notes", []), *self.notes])),
        )


def compare(
    models: Sequence[str] = tuple(MODELS),
    against: Sequence[str] = ("sgd", "opacus"),
    clipping: Sequence[str] = ("flat", "ellipsoid", "local"),
    *,
    device: str = "auto",
    rounds: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    probes: int | None = None,
    sizes: Mapping[str, Sizes] | None = None,
    fastdp: Path | None = None,
    earlier: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure `models` with each of our clippings and with the peers in `against`. SGD is always there: it is the unit.

    `rounds` is the most that are made of a model; `sizes` replaces sizes of models (`models.SIZES`); `probes` is the
    number of synthetic examples in a shape's refresh, by default two lots' worth and at most what training takes.
    `fastdp` is a checkout of that peer. `earlier` is what `Comparison.beside` is to be given: it must come from the
    same machine with the same packages.
    """
    names = _known("model", models, NAMES)
    for name in names:
        refuse_missing(name)
    peers = _known("peer", against, PEERS)
    if fastdp is not None:
        _import_from(fastdp)
        peers = list(dict.fromkeys([*peers, "fastdp"]))
    ours = clippings_of(clipping)
    chosen = machine.device_for(device)
    kind = chosen.type
    for what, value in (("rounds", rounds), ("probes", probes)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{what} must be at least 1, not {value}")
    notes: list[str] = []
    for peer, package, missing in (("opacus", "opacus", NO_OPACUS), ("fastdp", "fastDP", NO_FASTDP)):
        if peer in peers and find_spec(package) is None:
            notes.append(missing)
            say(missing)
            peers.remove(peer)
    ways = [
        (name, way)
        for name, method in METHODS.items()
        if (not method.peer or method.peer == "sgd" or method.peer in peers) and method.only_on in ("", kind)
        for way in method.clippings
        if method.peer or way in ours
    ]
    measured = {name: {**SIZES[kind][name], **(sizes or {}).get(name, {})} for name in names}
    most = ROUNDS[kind] if rounds is None else rounds
    rows: list[dict[str, Any]] = []
    with machine.settings(chosen, threads):
        versions = machine.versions(chosen)
        _refuse_other_versions(versions, {} if earlier is None else earlier["versions"])
        for name in names:
            say(f"{name} on {kind}: {len(ways)} ways to take a step")
            rows += _rows(name, measured[name], ways, chosen, most, seed, probes)
    if "fastDP" in sys.modules:
        versions["fastdp"] = getattr(sys.modules["fastDP"], "__version__", "")
    settings = {"rounds": most, "refresh_every": EVERY, "seed": seed, "sizes": measured}
    return Comparison(rows, versions, settings, notes)


def _import_from(folder: Path) -> None:
    if not (folder / "fastDP" / "__init__.py").is_file():
        raise ConfigurationError(f"{folder} is no checkout of fastDP: it has no fastDP/__init__.py")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _refuse_other_versions(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    unlike = [
        f"{name} {there[name]} there, {here[name]} here" for name in here if there.get(name, here[name]) != here[name]
    ]
    if unlike:
        raise ConfigurationError(f"the file was measured with other versions: {'; '.join(unlike)}. Measure it anew")


def _rows(
    model: str, sizes: Sizes, ways: Sequence[tuple[str, str]], device: torch.device, rounds: int, seed: int,
    probes: int | None,
) -> list[dict[str, Any]]:  # fmt: skip
    contenders = [Contender(*way) for way in ways]
    # A recording holds on to its memory, so those take their turns with SGD alone.
    # Plain SGD's comes last: one that breaks off leaves torch's own generator unusable, which peers draw from.
    recorded = [contender for contender in contenders if METHODS[contender.method].only_on]
    recorded.sort(key=lambda contender: METHODS[contender.method].peer == "sgd")
    together = [contender for contender in contenders if contender not in recorded]
    found: dict[Contender, dict[str, Any]] = {}
    for group in (together, *([contender] for contender in recorded)):
        for contender in group:
            contender.make(model, sizes, seed, device, probes=probes)
        found |= _measured(model, sizes, group, together[0], device.type, rounds)
        for contender in group if group is not together else together[1:]:
            contender.let_go()
    rows = [found[contender] for contender in contenders]
    base = next((row for row in rows if row["method"] == "sgd"), None)
    for row in rows:
        for ratio, of in (("ratio_to_sgd", "ms"), ("peak_ratio_to_sgd", "peak_mib")):
            known = base is not None and base[of] and row[of] is not None
            row[ratio] = round(row[of] / base[of], 3) if known and base is not None else None
    for row in rows:
        row["goals"] = judge(row, rows)
    together[0].let_go()
    return rows


def _measured(
    model: str, sizes: Sizes, group: Sequence[Contender], sgd: Contender, kind: str, rounds: int
) -> dict[Contender, dict[str, Any]]:
    turns = [contender for contender in dict.fromkeys((sgd, *group)) if contender.error is None]
    limit = SECONDS[kind] if sgd in group else SECONDS[kind] / 4
    times = milliseconds({c: c.run for c in turns}, rounds, kind, warm=1, limit=limit)
    shaped = [c for c in group if c.error is None and c.step.refresh is not None]
    refreshes = milliseconds({c: c.run_with_refresh for c in shaped}, REFRESHES, kind, warm=0)
    release()
    return {c: _row(model, sizes, kind, c, times.get(c, []), refreshes.get(c, [])) for c in group}


def _row(
    model: str, sizes: Sizes, kind: str, contender: Contender, times: list[float], refreshes: list[float]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": model, "method": contender.method, "clipping": contender.clipping, "device": kind,
        "lot": sizes["lot"], "trained": contender.trained, "ms": None, "ratio_to_sgd": None, "peak_mib": None,
        "peak_ratio_to_sgd": None,
    }  # fmt: skip
    peak = contender.peak_mib(kind) if contender.error is None else None
    if contender.error is not None:
        return row | {"error": contender.error}
    ordinary = statistics.median(times)
    longer = max(0.0, statistics.median(refreshes) - contender.step.unsettled * ordinary) if refreshes else 0.0
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [ordinary] * 3
    row |= {
        "ms": round(ordinary + longer / EVERY, 4), "peak_mib": None if peak is None else round(peak, 2),
        "step_ms": round(ordinary, 4), "quartiles_ms": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "rounds": len(times),
    }  # fmt: skip
    if refreshes:
        row |= {"refresh_ms": round(longer, 3), "refresh_probes": contender.step.probes}
    return row
