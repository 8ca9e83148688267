"""One run of the user's training function under watch: a world with the example, or one without it.

The first world, without the example, decides what every lot releases. The second one is given the same releases, so
that at each lot both have the same past, and what differs is what the example does to this lot.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from adadp.accounting.events import Event, Neighbours, Uncovered
from adadp.clipping import Flat, Grouped, Release
from adadp.errors import NoGuaranteeError, PrivacyError, UntriedWarning
from adadp.loader import PrivateLoader
from adadp.lot import Microbatch
from adadp.noise import Randomness
from adadp.observation import watched_by
from adadp.optimizer import BudgetWarning, PrivateOptimizer
from adadp.sampling import Poisson, Sampling
from adadp.step import Unnoised
from adadp.testing.held import places_of
from adadp.testing.keyed import KeyedDraws, Rows, generators_kept, normal, seed_everything, seed_of, uniform
from adadp.testing.result import ROUNDING, Effect

LOTS = 8
"""How many lots a world runs, unless told."""

_OPEN = 2.0**20  # a bound so wide that nothing is clipped
_ABSENT = (2, 5)  # of nine lots, those that do not hold the example: nothing of it may be seen there
_WIDTHS = {3: 1.0, 4: 2.0, 6: 4.0, 7: 8.0}  # of nine lots, those with a bound of so many typical gradients
_ALIKE = 1e-5  # relative: what rounding may do to equal work


class Enough(BaseException):
    """Ends a training function when enough lots were seen. Not an Exception, so that no loop takes it for one."""


class _Differs(Enough):
    """Ends the second world where it is not the first one any more."""


@dataclass(frozen=True)
class Released:
    """A release of the first world: private data and public numbers."""

    run: int
    kind: str
    lot: int
    event: Event
    expected_lot: float
    stddev: dict[str, Any]
    sums: dict[str, Tensor]
    given: dict[str, Tensor]  # what was released
    state: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Stepped:
    """A step of any optimizer: what its parameters and rates were afterwards."""

    optimizer: str
    rates: tuple[float, ...]
    state: dict[str, tuple[float, ...]]


@dataclass
class Run:
    """A private run inside the training function."""

    number: int
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    places: list[int]
    always: list[int]
    bases: dict[int, float] = field(default_factory=dict)  # the loop's own bounds
    typical: float | None = None  # the length of a gradient, from a lot in which nothing was clipped
    scales: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """What is promised of a release, in units of what one example adds."""
        return 2.0 if self.loader.sampling.neighbours is Neighbours.REPLACE_ONE else 1.0


class World:
    """Runs a training function once. With `earlier` it is the second world, compared with the first."""

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
        self.runs: list[Run] = []
        self.entries: list[Released | Stepped] = []
        self.seen = 0  # releases of gradients
        self.worst = Effect("")
        self._squares: dict[tuple[int, int], float] = {}
        self._draws: KeyedDraws = KeyedDraws(None if earlier is None else earlier._draws)
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self, train: Callable[[Any], Any], dataset: Any) -> None:
        """Call `train(dataset)` until enough lots were released, or it ends.

        Raises:
            PrivacyError: the engine refused.
            Exception: the function failed by itself.

        """
        hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        with warnings.catch_warnings(), generators_kept(), watched_by(self):
            warnings.simplefilter("ignore", UntriedWarning)
            warnings.simplefilter("ignore", BudgetWarning)
            seed_everything(self.key, "start")
            try:
                with self._draws:
                    train(dataset)
            except Enough:
                return
            except NoGuaranteeError:
                if self.seen == 0:
                    raise  # else the loop asked for an epsilon, which there is none of while it is watched
            finally:
                hook.remove()
        if self.earlier is not None and len(self.entries) < len(self.earlier.entries):
            self._note(math.inf, None, why="the loop made fewer releases, or steps, with the example than without it")

    # ---- what a run is made of --------------------------------------------------------------------------------------

    def started(self, optimizer: PrivateOptimizer, loader: PrivateLoader) -> _Observer:
        """A run begins: draw its lots, items and augmentation by key."""
        always = [place for index in self.always for place in places_of(loader.dataset, index)]
        run = Run(len(self.runs), optimizer, loader, places_of(loader.dataset, self.target), always)
        self.runs.append(run)
        inner, self._draws.batch_first = loader._loader, loader.batch_first
        loader.sampling = LockstepLots(self, run, loader.sampling)
        loader._loader = DataLoader(
            _Items(self, run, loader.dataset),
            batch_sampler=inner.batch_sampler,
            num_workers=0,  # a worker would draw for itself; what it does is done here, one item after the other
            collate_fn=_Collate(self, run, inner.collate_fn),
        )
        begin = loader.lots.on_hand_out

        def handed_out(microbatch: Microbatch) -> None:
            begin(microbatch)
            self._handed_out(run, microbatch)

        loader.lots.on_hand_out = handed_out
        return _Observer(self, run)

    def holds(self, lot: int) -> bool:
        """Whether a lot holds the example, in the world that has it."""
        return lot % 9 not in (*_ABSENT, 8)

    def _handed_out(self, run: Run, microbatch: Microbatch) -> None:
        if microbatch.index == 0:
            if self.seen >= self.lots:
                raise Enough
            self._widen(run, microbatch.lot)
        indices = tuple(microbatch.indices)
        known = self._orders.pop(indices, indices)[: microbatch.count]
        rows = (*known, *range(-1, len(known) - microbatch.count - 1, -1))
        self._draws.rows = Rows(rows, (run.number, microbatch.lot))
        seed_everything(self.key, run.number, "lot", microbatch.lot)

    def _widen(self, run: Run, lot: int) -> None:
        """Try other bounds than the loop's own: where all others are clipped anyway, little of a fault shows."""
        parts = run.optimizer._step.clipping.objects()
        if not all(type(part) is Flat or isinstance(part, Grouped) for part in parts):
            run.scales[lot] = 1.0
            return
        flat = [part for part in parts if type(part) is Flat]
        for part in flat:
            run.bases.setdefault(id(part), part.max_grad_norm)
        own = math.sqrt(sum(run.bases[id(part)] ** 2 for part in flat))
        if self.earlier is not None:
            scale = self.earlier.runs[run.number].scales.get(lot, 1.0)
        elif lot % 9 == _ABSENT[0]:
            scale = _OPEN
        elif run.typical and lot % 9 in _WIDTHS:
            scale = run.typical * _WIDTHS[lot % 9] / own
        else:
            scale = 1.0
        run.scales[lot] = scale
        for part in flat:
            part.max_grad_norm = run.bases[id(part)] * scale

    # ---- what it releases -------------------------------------------------------------------------------------------

    def noising(self, run: Run, release: Unnoised) -> Release:
        """Note a release, or compare it with the first world's; what it returns is released."""
        self.seen += release.kind == "gradient"
        scale = run.scales.get(release.lot, 1.0)
        sums = {name: value.detach().double().cpu() for name, value in release.sums.items()}
        stddev = {name: _double(value) for name, value in release.stddev.items() if name in sums}
        state = _prints(_named(run.optimizer._step.capture.module))
        if self.earlier is not None:
            seen = Released(run.number, release.kind, release.lot, release.event, release.expected_lot, stddev, sums, {}, state)
            given = self._compared(run, seen, release.noise_multiplier, scale)
        else:
            if scale == _OPEN and release.kind == "gradient":
                length = math.sqrt(sum(float(value.square().sum()) for value in sums.values()))
                run.typical = length / max(1, run.sizes.get(release.lot, 1)) if math.isfinite(length) else None
            given = {name: self._noised(release, name, value, stddev[name]) / scale for name, value in sums.items()}
            self.entries.append(
                Released(run.number, release.kind, release.lot, release.event, release.expected_lot, stddev, sums, given, state)
            )
        return {name: given[name].to(value) for name, value in release.sums.items()}

    def _noised(self, release: Unnoised, name: str, value: Tensor, stddev: Any) -> Tensor:
        drawn = normal(seed_of(self.key, "noise", release.kind, release.lot, name, len(self.entries)), value.shape)
        return value + torch.as_tensor(drawn) * torch.as_tensor(stddev)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.runs:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(value): name for run in self.runs for name, value in run.optimizer._parameters.items()}
        state = _prints((names.get(id(p), f"a parameter of shape {list(p.shape)} (number {i})"), p) for i, p in enumerate(parameters))
        rates = tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)
        step = Stepped(type(optimizer).__name__, rates, state)
        if self.earlier is None:
            self.entries.append(step)
            return
        before = self._next(step)
        if not isinstance(before, Stepped):
            self._differ(None, f"{step.optimizer} stepped where the other world released a lot")
        elif before.optimizer != step.optimizer or before.rates != step.rates:
            self._differ(None, f"the learning rates of {step.optimizer} are {step.rates}, without the example {before.rates}")
        elif name := _unlike(before.state, step.state):
            self._differ(name, f"{step.optimizer} stepped on {name} with something that was not released: it differs between the worlds")

    # ---- comparing --------------------------------------------------------------------------------------------------

    def _next(self, entry: Released | Stepped) -> Released | Stepped | None:
        """The first world's entry in the place of this one."""
        assert self.earlier is not None
        place = len(self.entries)
        self.entries.append(entry)
        if place >= len(self.earlier.entries):
            if self.seen > self.earlier.seen or isinstance(entry, Released):
                self._differ(None, "the loop made more releases, or steps, with the example than without it")
            raise Enough
        return self.earlier.entries[place]

    def _compared(self, run: Run, seen: Released, multiplier: float, scale: float) -> dict[str, Tensor]:
        before = self._next(seen)
        if not isinstance(before, Released) or (before.run, before.kind, before.lot) != (seen.run, seen.kind, seen.lot):
            self._differ(None, "releases come in another order, or of other lots, than without the example")
        assert isinstance(before, Released)
        for what in ("event", "expected_lot"):
            if getattr(before, what) != getattr(seen, what):
                self._differ(None, f"the {what} of a release is {getattr(seen, what)}, without the example {getattr(before, what)}")
        shapes = [{name: tuple(value.shape) for name, value in each.sums.items()} for each in (before, seen)]
        if shapes[0] != shapes[1]:
            self._differ(None, "other parameters are released than without the example")
        for name, value in before.stddev.items():
            if not _close(torch.as_tensor(value), torch.as_tensor(seen.stddev[name])):
                self._differ(name, "the noise has another scale than without the example")
        if name := _unlike(before.state, seen.state):
            self._differ(name, f"{name} differs before the release although all earlier releases were equal: it was changed by something that was not released")
        self._measure(run, before, seen, multiplier, scale)
        return before.given

    def _measure(self, run: Run, before: Released, seen: Released, multiplier: float, scale: float) -> None:
        squares: dict[str, float] = {}
        total, size = 0.0, 0.0
        for name, summed in seen.sums.items():
            difference = summed - before.sums[name]
            total, size = total + float(difference.square().sum()), size + float(before.sums[name].square().sum())
            share = difference / seen.stddev[name]
            squares[name] = float(torch.where(difference == 0, 0.0, share).square().sum())
        absent = not (self.inside and self.holds(seen.lot) and run.places)
        if total <= _ALIKE**2 * size and (absent or scale == _OPEN):
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
        if value > self.worst.value:
            self.worst = Effect("", value, seen.lot, parameter, seen.kind, why)

    def _differ(self, parameter: str | None, why: str) -> None:
        lot = None if not self.runs or self.runs[-1].loader.current is None else self.runs[-1].loader.current.lot
        self._note(math.inf, parameter, why=why, lot=lot)
        raise _Differs

    def _note(self, value: float, parameter: str | None, *, why: str, lot: int | None = None) -> None:
        self.worst = Effect("", value, lot, parameter, None, why)


class _Observer:
    """Shows the world what one run releases."""

    def __init__(self, world: World, run: Run) -> None:
        self._world, self._run = world, run

    def noising(self, release: Unnoised) -> Release | None:
        """Release what the world says."""
        return self._world.noising(self._run, release)

    def noised(self, release: Unnoised, noisy: Release) -> None:
        """Nothing more to note."""

    def stepped(self, lot: int, gradient: Release) -> None:
        """Nothing more to note."""


class LockstepLots(Sampling):
    """Lots whose coins are keyed by lot and index, so that both worlds draw the same others.

    Where lots are drawn by coins the example is added to those that hold it; where they have a fixed size it is in
    those of both worlds, and replaced.
    """

    def __init__(self, world: World, run: Run, sampling: Sampling) -> None:
        super().__init__(sampling.examples, sampling.lot)
        self._world, self._run, self._sampling = world, run, sampling
        self.name, self.neighbours, self.reasons = sampling.name, sampling.neighbours, sampling.reasons

    @property
    def capacity(self) -> int:
        return self._sampling.capacity

    def draw(self, lot: int, randomness: Randomness) -> torch.Tensor:
        world, run = self._world, self._run
        coins = uniform(seed_of(world.key, run.number, "coins", lot), (self.examples,))
        holds = world.holds(lot)
        if isinstance(self._sampling, Poisson):
            chosen = coins < self._sampling.rate
            chosen[run.always] = True
            chosen[run.places] = holds and world.inside
            drawn = np.flatnonzero(chosen)
        else:
            coins[run.always] -= 1
            coins[run.places] = coins[run.places] - 1 if holds else coins[run.places] + 1
            drawn = np.argsort(coins)[: self.lot]
            drawn = drawn[np.argsort(uniform(seed_of(world.key, run.number, "order", lot), (self.examples,))[drawn])]
        run.sizes[lot] = len(drawn)
        self.current = lot
        return torch.as_tensor(drawn)

    def event(self, noise_multiplier: float) -> Event:
        return self._sampling.event(noise_multiplier)


class _Items(Dataset[Any]):
    """The items that a loader reads, with augmentation drawn by lot and index."""

    def __init__(self, world: World, run: Run, dataset: Any) -> None:
        self._world, self._run, self._dataset = world, run, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        world, draws = self._world, self._world._draws
        rows, draws.rows = draws.rows, None
        with generators_kept():
            seed_everything(world.key, self._run.number, "item", _lot(self._run), index)
            try:
                return index, self._dataset[index]
            finally:
                draws.rows = rows


class _Collate:
    """The loop's own collate, with what it draws for a row keyed by the example in it."""

    def __init__(self, world: World, run: Run, collate: Callable[[Any], Any]) -> None:
        self._world, self._run, self._collate = world, run, collate

    def __call__(self, fetched: list[tuple[int, Any]]) -> Any:
        world, draws, lot = self._world, self._world._draws, _lot(self._run)
        indices = tuple(index for index, _ in fetched)
        rows, draws.rows = draws.rows, Rows(indices, (self._run.number, -1 - lot))
        items = [item for _, item in fetched]
        with generators_kept():
            seed_everything(world.key, self._run.number, "collate", lot)
            try:
                batch = self._collate(list(items))
            finally:
                draws.rows = rows
        world._orders[indices] = _order(indices, items, batch)
        return batch


def _lot(run: Run) -> int:
    """The lot that is being fetched: the loader draws it just before."""
    return int(getattr(run.loader.sampling, "current", 0))


def _order(indices: tuple[int, ...], items: Sequence[Any], batch: Any) -> tuple[int, ...]:
    """Whose row each row of the batch is: collate may have sorted them. As they were where it cannot be seen."""
    columns = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(indices)]
    parts = [[leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)] for item in items]
    for column in columns:
        for part in range(min((len(each) for each in parts), default=0)):
            wanted = [each[part] for each in parts]
            if any(leaf.ndim != column.ndim - 1 or leaf.dtype != column.dtype for leaf in wanted):
                continue
            if all(_starts(row, leaf) for row, leaf in zip(column, wanted, strict=True)):
                return indices
            free, found = list(range(len(indices))), []
            for row in column:
                # The longest that fits: a short example may be how a longer one begins.
                fits = [place for place in free if _starts(row, wanted[place])]
                if not fits:
                    break
                best = max(fits, key=lambda place: wanted[place].numel())
                free.remove(best)
                found.append(indices[best])
            if len(found) == len(indices):
                return tuple(found)
    return indices


def _starts(row: Tensor, leaf: Tensor) -> bool:
    """Whether a row of a batch, which may be padded, begins with this part of an item."""
    if any(size > room for size, room in zip(leaf.shape, row.shape, strict=True)):
        return False
    return torch.equal(row[tuple(slice(size) for size in leaf.shape)], leaf)


def _sigma(event: Event, multiplier: float) -> float:
    """The noise multiplier that a release is charged as."""
    charged = event.claimed if isinstance(event, Uncovered) else event
    return float(getattr(charged, "noise_multiplier", multiplier))


def _double(value: float | Tensor) -> Any:
    return value.detach().double().cpu() if isinstance(value, Tensor) else float(value)


def _named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@lru_cache(maxsize=256)
def _weights(count: int) -> Tensor:
    return torch.cos(torch.arange(count, dtype=torch.float64))


def _prints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, ...]]:
    """A fingerprint of each tensor: two sums, one of them weighted, so that little memory is needed for large models."""
    found: dict[str, tuple[float, ...]] = {}
    for name, tensor in tensors:
        flat = tensor.detach().double().cpu().flatten()
        found[name] = (float(flat.sum()), float(flat @ _weights(len(flat))), float(flat.abs().sum()))
    return found


def _unlike(one: Mapping[str, tuple[float, ...]], other: Mapping[str, tuple[float, ...]]) -> str:
    """The name of a tensor that differs; "" if none does."""
    for name in [*one, *other]:
        first, second = one.get(name), other.get(name)
        if first is None or second is None:
            return name
        size = max(first[2], second[2], 1e-30)
        if not all(a == b or (a != a and b != b) or abs(a - b) <= _ALIKE * size for a, b in zip(first, second, strict=True)):
            return name
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_ALIKE, atol=0.0, equal_nan=True)


__all__ = ["LOTS", "Enough", "PrivacyError", "World"]
