"""A world: one call of the user's training function under watch, with or without the example under test.

The first world, without the example, decides what every lot releases. The second world, with the example, is given the
same releases, so that at each lot both have the same past, and what differs is the effect of the example on this lot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from adadp.accounting.events import Event, Neighbours, Uncovered
from adadp.accounting.reading import ReadableLedger
from adadp.clipping import Flat, Grouped
from adadp.clipping.early import clamps_early
from adadp.errors import NoGuaranteeError
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.sums import NoisedSums
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Microbatch
from adadp.testing.changed_dataset import places_of
from adadp.testing.effects import ROUNDING, Effect
from adadp.testing.fingerprints import ALIKE, differing, fingerprints, named_state, unmatched
from adadp.testing.keyed_draws import KeyedDraws, RowOwners, generators_kept, normal, seed_everything, seed_of
from adadp.testing.keyed_loader import KeyedCollate, KeyedItems, KeyedLots
from adadp.testing.watching import EnoughLots, Train, on_hand_out, quietly_watched_by

_OPEN = 2.0**20  # factor on the clipping bound so that nothing is clipped
# Lots are treated by their number modulo 9:
_ABSENT = (2, 5)  # these do not hold the example, and 8 does not either: it must have no effect on them
_WIDTHS = {3: 1.0, 4: 2.0, 6: 4.0, 7: 8.0}  # these have a clipping bound of so many typical gradient norms


class _Differs(EnoughLots):
    """Ends the second world where it has differed from the first one."""


@dataclass(frozen=True)
class ReleaseEntry:
    """A release: the sums before noise (private data), its noise scale, and fingerprints of the module's state."""

    run: int
    kind: str
    lot: int
    event: Event
    expected_lot: float
    stddev: dict[str, Any]
    sums: dict[str, Tensor]
    state: dict[str, tuple[float, ...]]
    lengths: tuple[float, ...] = ()  # of each example's gradient, sorted; only for releases of gradients
    given: dict[str, Tensor] = field(default_factory=dict)  # what was released


@dataclass(frozen=True)
class StepEntry:
    """A step of any optimizer: its learning rates, and fingerprints of its parameters afterwards."""

    optimizer: str
    rates: tuple[float, ...]
    state: dict[str, tuple[float, ...]]


@dataclass
class WatchedRun(Observer):
    """A private run that the training function started."""

    world: World
    number: int
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    places: list[int]
    always: list[int]
    bases: dict[int, float] = field(default_factory=dict)  # the loop's own clipping bounds, by id of the clipping
    bounds: dict[int, float] = field(default_factory=dict)  # the bounds set for the current lot
    typical: float | None = None  # mean norm of a gradient, from a lot in which nothing was clipped
    scales: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, list[float]] = field(default_factory=dict)  # of gradients before they are clipped, by lot
    readers: dict[int, set[int]] = field(default_factory=dict)  # by item of the dataset: items of the loader

    @property
    def ledger(self) -> ReadableLedger:
        """The ledger that the run is charged to."""
        return self.optimizer._ledger

    @property
    def bound(self) -> float:
        """By how much one example may move a release, in multiples of the clipping bound."""
        return 2.0 if self.loader.sampling.neighbours is Neighbours.REPLACE_ONE else 1.0

    def noising(self, release: Unnoised) -> NoisedSums:
        return self.world.noising(self, release)


class World:
    """Runs a training function once. With `earlier` (the first world) it is the second one, and compared with it."""

    def __init__(
        self,
        target: int,
        *,
        key: int,
        lots: int,
        always: tuple[int, ...] = (),
        inside: bool = False,
        earlier: World | None = None,
    ) -> None:
        self.always = always
        self.target, self.key, self.lots, self.inside, self.earlier = target, key, lots, inside, earlier
        self.runs: list[WatchedRun] = []
        self.entries: list[ReleaseEntry | StepEntry] = []
        self.seen = 0  # releases of gradients
        self.worst = Effect("")
        self._squares: dict[tuple[int, int], float] = {}
        self.draws: KeyedDraws = KeyedDraws(None if earlier is None else earlier.draws)
        self.orders: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self, train: Train, dataset: Any) -> None:
        """Call `train(dataset)` until enough lots were released, or it ends.

        Raises:
            PrivacyError: the engine refused.
            Exception: the function failed by itself.

        """
        hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        with quietly_watched_by(self), generators_kept():
            seed_everything(self.key, "start")
            try:
                with self.draws:
                    train(dataset)
            except EnoughLots:
                return
            except NoGuaranteeError:
                if self.seen == 0:
                    raise  # else the loop asked for an epsilon, and there is none while it is watched
            finally:
                hook.remove()
        if self.earlier is not None and len(self.entries) < len(self.earlier.entries):
            self._note(math.inf, None, why="the loop made fewer releases, or steps, with the example than without it")

    def read_for_several(self) -> str:
        """In words: an item of the dataset that is read for several items of a loader; "" if there is none."""
        for run in self.runs:
            for item, readers in run.readers.items():
                if len(readers) > 1:
                    some = ", ".join(str(reader) for reader in sorted(readers)[:3])
                    return f"item {item} of the dataset is read for several items of the loader ({some})"
        return ""

    # ---- what a run is made of --------------------------------------------------------------------------------------

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> WatchedRun:
        """A private run begins: let its lots, items and augmentation be drawn by key."""
        always = [place for index in self.always for place in places_of(loader.dataset, index)]
        run = WatchedRun(self, len(self.runs), optimizer, loader, places_of(loader.dataset, self.target), always)
        self.runs.append(run)
        inner, self.draws.batch_first = loader._loader, loader.batch_first
        loader.sampling = KeyedLots(self, run, loader.sampling)
        loader._loader = DataLoader(
            KeyedItems(self, run, loader.dataset),
            batch_sampler=inner.batch_sampler,
            num_workers=0,  # workers would draw random numbers of their own
            collate_fn=KeyedCollate(self, run, inner.collate_fn),
        )
        on_hand_out(loader, lambda microbatch: self._handed_out(run, microbatch))
        _note_lengths(run)
        return run

    def holds(self, lot: int) -> bool:
        """Whether a lot holds the example, in the world that has it."""
        return lot % 9 not in (*_ABSENT, 8)

    def _handed_out(self, run: WatchedRun, microbatch: Microbatch) -> None:
        if microbatch.index == 0:
            if self.seen >= self.lots:
                raise EnoughLots
            self._widen(run, microbatch.lot)
        indices = tuple(microbatch.indices)
        known = self.orders.pop(indices, indices)[: microbatch.count]
        rows = (*known, *range(-1, len(known) - microbatch.count - 1, -1))
        self.draws.rows = RowOwners(rows, (run.number, microbatch.lot))
        seed_everything(self.key, run.number, "lot", microbatch.lot)

    def _widen(self, run: WatchedRun, lot: int) -> None:
        """Set other clipping bounds than the loop's own: where everybody is clipped anyway, a fault hardly shows."""
        parts = run.optimizer._step.clipping.objects()
        if not all(type(part) is Flat or isinstance(part, Grouped) for part in parts):
            run.scales[lot] = 1.0
            return
        flat = [part for part in parts if type(part) is Flat]
        for part in flat:
            # A loop may change its bound between lots: then the ratio to the bound that we set is applied to its own.
            before = run.bounds.get(id(part), part.max_grad_norm)
            run.bases[id(part)] = run.bases.get(id(part), before) * part.max_grad_norm / before
        own = math.sqrt(sum(run.bases[id(part)] ** 2 for part in flat))
        if self.earlier is not None:
            runs = self.earlier.runs
            scale = runs[run.number].scales.get(lot, 1.0) if run.number < len(runs) else 1.0
        elif lot % 9 == _ABSENT[0]:
            scale = _OPEN
        elif run.typical and lot % 9 in _WIDTHS:
            scale = run.typical * _WIDTHS[lot % 9] / own
        else:
            scale = 1.0
        run.scales[lot] = scale
        for part in flat:
            part.max_grad_norm = run.bounds[id(part)] = run.bases[id(part)] * scale

    # ---- what it releases -------------------------------------------------------------------------------------------

    def noising(self, run: WatchedRun, release: Unnoised) -> NoisedSums:
        """Note a release (first world), or compare it with the first world's. Returns what is released instead."""
        self.seen += release.kind == "gradient"
        scale = run.scales.get(release.lot, 1.0)
        sums = {name: value.detach().double().cpu() for name, value in release.sums.items()}
        stddev = {name: _double(value) for name, value in release.stddev.items() if name in sums}
        seen = ReleaseEntry(
            run=run.number,
            kind=release.kind,
            lot=release.lot,
            event=release.event,
            expected_lot=release.expected_lot,
            stddev=stddev,
            sums=sums,
            state=fingerprints(named_state(run.optimizer._step.capture.module)),
            lengths=tuple(sorted(run.lengths.pop(release.lot, []))) if release.kind == "gradient" else (),
        )
        if self.earlier is not None:
            given = self._compared(run, seen, release.noise_multiplier, scale)
        else:
            if scale == _OPEN and release.kind == "gradient":
                length = math.sqrt(sum(float(value.square().sum()) for value in sums.values()))
                run.typical = length / max(1, run.sizes.get(release.lot, 1)) if math.isfinite(length) else None
            given = {name: self._noised(release, name, value, stddev[name]) / scale for name, value in sums.items()}
            self.entries.append(replace(seen, given=given))
        return NoisedSums({name: given[name].to(value) for name, value in release.sums.items()})

    def _noised(self, release: Unnoised, name: str, value: Tensor, stddev: Any) -> Tensor:
        drawn = normal(seed_of(self.key, "noise", release.kind, release.lot, name, len(self.entries)), value.shape)
        return value + torch.as_tensor(drawn) * torch.as_tensor(stddev)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.runs:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(value): name for run in self.runs for name, value in run.optimizer._parameters.items()}
        state = fingerprints(
            (names.get(id(p), f"a parameter of shape {list(p.shape)} (number {i})"), p)
            for i, p in enumerate(parameters)
        )
        rates = tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)
        step = StepEntry(type(optimizer).__name__, rates, state)
        if self.earlier is None:
            self.entries.append(step)
            return
        before = self._next(step)
        if not isinstance(before, StepEntry):
            self._differ(None, f"{step.optimizer} stepped where the other world released a lot")
        elif before.optimizer != step.optimizer or before.rates != step.rates:
            self._differ(
                None, f"the learning rates of {step.optimizer} are {step.rates}, without the example {before.rates}"
            )
        elif name := differing(before.state, step.state):
            self._differ(
                name,
                f"{step.optimizer} stepped on {name} with something that was not released",
            )

    # ---- comparing --------------------------------------------------------------------------------------------------

    def _next(self, entry: ReleaseEntry | StepEntry) -> ReleaseEntry | StepEntry | None:
        """The first world's entry at the same position."""
        assert self.earlier is not None
        place = len(self.entries)
        self.entries.append(entry)
        if place >= len(self.earlier.entries):
            if self.seen > self.earlier.seen or isinstance(entry, ReleaseEntry):
                self._differ(None, "the loop made more releases, or steps, with the example than without it")
            raise EnoughLots
        return self.earlier.entries[place]

    def _compared(self, run: WatchedRun, seen: ReleaseEntry, multiplier: float, scale: float) -> dict[str, Tensor]:
        before = self._next(seen)
        if not isinstance(before, ReleaseEntry) or (before.run, before.kind, before.lot) != (
            seen.run,
            seen.kind,
            seen.lot,
        ):
            self._differ(None, "releases come in another order, or of other lots, than without the example")
        assert isinstance(before, ReleaseEntry)
        for what in ("event", "expected_lot"):
            if getattr(before, what) != getattr(seen, what):
                self._differ(
                    None,
                    f"the {what} of a release is {getattr(seen, what)}, without the example {getattr(before, what)}",
                )
        shapes = [{name: tuple(value.shape) for name, value in each.sums.items()} for each in (before, seen)]
        if shapes[0] != shapes[1]:
            self._differ(None, "other parameters are released than without the example")
        for name, value in before.stddev.items():
            if not _close(torch.as_tensor(value), torch.as_tensor(seen.stddev[name])):
                self._differ(name, "the noise has another scale than without the example")
        if name := differing(before.state, seen.state):
            self._differ(
                name,
                f"{name} differs before the release although all earlier releases were equal: something that was not "
                "released changed it",
            )
        self._measure(run, before, seen, multiplier, scale)
        return before.given

    def _measure(
        self, run: WatchedRun, before: ReleaseEntry, seen: ReleaseEntry, multiplier: float, scale: float
    ) -> None:
        squares: dict[str, float] = {}
        total, size = 0.0, 0.0
        for name, summed in seen.sums.items():
            difference = summed - before.sums[name]
            total, size = total + float(difference.square().sum()), size + float(before.sums[name].square().sum())
            share = difference / seen.stddev[name]
            squares[name] = float(torch.where(difference == 0, 0.0, share).square().sum())
        absent = not (self.inside and self.holds(seen.lot) and run.places)
        self._look_at_others(run, before, seen, absent)
        if total <= ALIKE**2 * size and (absent or scale == _OPEN):
            return
        place = (run.number, seen.lot)
        self._squares[place] = self._squares.get(place, 0.0) + sum(squares.values())
        value = _sigma(seen.event, multiplier) * math.sqrt(self._squares[place])
        value = math.inf if math.isnan(value) else value
        parameter, why = max(squares, key=lambda name: squares[name]), ""
        if absent:
            value *= scale
            if value <= ROUNDING:
                return
            value, why = math.inf, "the example is not in this lot, and moves its release"
        if scale != 1 and value > run.bound * (1 + ROUNDING):
            bound = f"seen with a clipping bound {scale:.3g} times the loop's own"
            why = f"{why} ({bound})" if why else f"one example changes what others add ({bound})"
        if value > self.worst.value:
            self.worst = replace(self.worst, value=value, lot=seen.lot, parameter=parameter, kind=seen.kind, why=why)

    def _look_at_others(self, run: WatchedRun, before: ReleaseEntry, seen: ReleaseEntry, absent: bool) -> None:
        """Note where other examples' gradients change with the example: the proof assumes that they do not."""
        here = 0 if absent else len(run.places)
        least = 1e-4 * max((length for length in before.lengths if math.isfinite(length)), default=0.0)
        new = unmatched(seen.lengths, before.lengths, least) - here
        # In lots of a fixed size the example replaces another one.
        gone = unmatched(before.lengths, seen.lengths, least) - (here if run.bound > 1 else 0)
        changed = max(new, gone)
        if changed > 0 and not self.worst.mixed:
            others = "one other example adds" if changed == 1 else f"{changed} other examples add"
            self.worst = replace(self.worst, mixed=f"what {others} to lot {seen.lot} changes with this one")

    def _differ(self, parameter: str | None, why: str) -> None:
        lot = None if not self.runs or self.runs[-1].loader.current is None else self.runs[-1].loader.current.lot
        self._note(math.inf, parameter, why=why, lot=lot)
        raise _Differs

    def _note(self, value: float, parameter: str | None, *, why: str, lot: int | None = None) -> None:
        self.worst = replace(self.worst, value=value, lot=lot, parameter=parameter, kind=None, why=why)


def _note_lengths(run: WatchedRun) -> None:
    """Have the run note the norm of every example's gradient before clipping."""
    step = run.optimizer._step
    own = step._gradients

    def noted(microbatch: Microbatch, keep: Tensor | None) -> Any:
        gradients = own(microbatch, keep)
        if not clamps_early(step.clipping):  # else they were clipped during the backward pass already
            lengths = gradients.norms().detach().double()[gradients.keep].nan_to_num(math.inf, math.inf)
            before = run.lengths.get(microbatch.of.number, []) if microbatch.index else []
            run.lengths[microbatch.of.number] = before + lengths.cpu().tolist()
        return gradients

    step._gradients = noted  # type: ignore[method-assign]


def _sigma(event: Event, multiplier: float) -> float:
    """The noise multiplier that a release is charged as."""
    charged = event.claimed if isinstance(event, Uncovered) else event
    return float(getattr(charged, "noise_multiplier", multiplier))


def _double(value: float | Tensor) -> Any:
    return value.detach().double().cpu() if isinstance(value, Tensor) else float(value)


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=ALIKE, atol=0.0, equal_nan=True)


__all__ = ["WatchedRun", "World"]
