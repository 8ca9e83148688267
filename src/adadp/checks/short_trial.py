"""The short trial: the few passes that are enough for a module or a loss which keeps its examples apart exactly.

A few rows are run as they are, with half of them replaced, and with the first one left out; gradients are taken with a
different factor for each example. All results are compared on their device, and the host reads one table of numbers at
the end. `passes` is True only where every kept example's result is bitwise equal and every gradient norm is as
predicted. Anything else (small differences, random draws, attributes that change, any exception) is False, and the long
trial (`module_trial`, `loss_trial`), which also knows why, decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adadp.checks.gradient_norms import scales, stacked_norms
from adadp.checks.module_state import ModuleState
from adadp.checks.result_comparison import ExampleAxis, coarse, example_axis, example_dimension, one_row_less, same_bits
from adadp.checks.seeds import generators_kept, seed_of, seeded
from adadp.checks.trial_rows import Row, replaced, splits, unlike_rows
from adadp.checks.trial_runs import LossRuns, TrialRuns
from adadp.gradients.capture.readings import UnlearntError
from adadp.gradients.capture.work import Observed

_NUMBERS = (4, 3, 5, 6, 7, 8)  # of rows, tried in this order
#: The kind of row that replaces examples, one for each split of four rows.
_FOR_MODULES = ("zero", "large", "own", "ignored")
_FOR_LOSSES = ("zero", "large", "missing", "ignored")
_WITH_GRADIENTS = 1  # the split for which gradients are taken


class _Unclear(Exception):  # noqa: N818 - no error: the long trial decides
    """The short trial cannot say that examples are kept apart."""


@dataclass(frozen=True)
class _Pass:
    seen: Observed
    outputs: list[Tensor]
    names: tuple[str, ...] = ()  # of the parameters that have gradients
    norms: Tensor | None = None  # their squared norms, [parameters, n], on their device

    def tensors(self) -> list[Tensor]:
        """All outputs: those of each layer, then those of the whole."""
        return [*(leaf for _, leaves in self.seen.outputs for leaf in leaves), *self.outputs]


class ShortTrial:
    """One short trial. Afterwards `places` says where examples are in each tensor that is returned."""

    def __init__(self, runs: TrialRuns, dimensions: Sequence[int]) -> None:
        self._runs, self._dimensions = runs, dimensions
        self._of_loss = isinstance(runs, LossRuns)
        self._weights: list[Tensor] = []
        self.places: list[ExampleAxis | None] = []

    def passes(self) -> bool:
        """Whether examples are kept apart exactly. Every exception means no: the long trial will meet it again."""
        runs = self._runs
        for leaf, dim in runs.arguments.pairs():
            if dim is not None and (not isinstance(leaf, Tensor) or leaf.requires_grad or leaf.is_complex()):
                return False
        buffers = [(buffer, buffer.detach().clone()) for buffer in runs.module.buffers()]
        try:
            with generators_kept():
                self._run()
        except UnlearntError:
            raise
        except Exception:
            return False
        finally:
            runs.before.restore()
        after = list(runs.module.buffers())
        return len(after) == len(buffers) and all(
            one is other and same_bits(one, values) for one, (other, values) in zip(after, buffers, strict=True)
        )

    # ---- the passes ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        base, rows = self._base()
        count = len(rows)
        fewer = self._pass(self._runs.leaves(rows[1:]), [1.0] * (count - 1))
        self._refuse_shapes(base, fewer, count)
        own = self._runs.leaves(rows)
        kinds = _FOR_LOSSES if self._of_loss else _FOR_MODULES
        factors = scales(count)
        kept, given, found = list(splits(count)), [], []
        for run, stay in enumerate(kept):
            given.append(self._runs.leaves(replaced(rows, stay, kinds[run % len(kinds)])))
            found.append(self._pass(given[-1], factors if run == _WITH_GRADIENTS else None))
        columns = [
            _together(self._between(base, found, kept)),
            _together(self._without_the_first(base, fewer)),
            self._changed(own, given),
            *self._gradients(base, found[_WITH_GRADIENTS], fewer),
        ]
        table = torch.cat(columns).cpu()  # the only time that the host waits
        self._decide(torch.split(table, [len(column) for column in columns]), kept[_WITH_GRADIENTS], factors)

    def _base(self) -> tuple[_Pass, list[Row]]:
        """The first pass and its rows: so many that no layer has a second dimension of this length by chance."""
        for number in _NUMBERS:
            rows = [Row(index) for index in unlike_rows(self._runs.arguments, number)]
            base = self._pass(self._runs.leaves(rows), [1.0] * number, first=True)
            alike = any(given.ndim > 1 and given.shape[:2] == (number, number) for _, given, _ in base.seen.inputs)
            if self._dimensions == (0,) or not alike:  # examples come first, whatever comes second
                return base, rows
        raise _Unclear

    def _pass(self, leaves: Sequence[Any], factors: Sequence[float] | None, first: bool = False) -> _Pass:
        """A run, always with the same random numbers. With `factors`, gradients are taken of losses times factors."""
        runs, capture = self._runs, self._runs.capture
        before = runs.before
        with seeded(seed_of(runs.trial, 0)) as draws, runs.aside(leaves), torch.enable_grad():
            with capture.observing() as seen:
                outputs = runs.call(leaves)
            result = _Pass(seen, [leaf.detach() for leaf in outputs])
            if factors is not None:
                capture.differentiate(self._total(outputs, factors))
                names, norms = stacked_norms(capture, len(factors))
                if norms is None:
                    raise _Unclear
                result = _Pass(seen, result.outputs, names, norms)
        if draws.any or (first and (before.generators or ModuleState(runs.module).changed_from(before) is not None)):
            raise _Unclear
        before.restore()
        return result

    def _total(self, outputs: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        """The scalar to differentiate: losses times factors; outputs of a module also times random weights."""
        count = len(factors)
        total: Tensor | None = None
        for place, leaf in enumerate(outputs):
            if self._of_loss and leaf.shape != (count,):
                raise _Unclear
            dims = [d for d in self._dimensions if leaf.ndim > d and leaf.shape[d] == count]
            if not leaf.requires_grad or not leaf.is_floating_point() or len(dims) != 1:
                raise _Unclear
            scale = leaf.new_tensor(factors).view([count if d == dims[0] else 1 for d in range(leaf.ndim)])
            if not self._of_loss:
                if place == len(self._weights):
                    generator = torch.Generator().manual_seed(place)
                    shape = [size for d, size in enumerate(leaf.shape) if d != dims[0]]
                    self._weights.append(torch.randn(shape, generator=generator).to(leaf.device))
                scale = scale * self._weights[place].unsqueeze(dims[0])
            term = (leaf.float() * scale).sum()
            total = term if total is None else total + term
        if total is None:
            raise _Unclear
        return total

    # ---- comparing -----------------------------------------------------------------------------------------------

    def _refuse_shapes(self, base: _Pass, fewer: _Pass, count: int) -> None:
        """Without the first example every layer must see one row less; every result must have a row for each."""
        for (_, one, _), (_, less, _) in zip(base.seen.inputs, fewer.seen.inputs, strict=True):
            if not one_row_less(one, less, count, self._dimensions):
                raise _Unclear
        first = self._dimensions == (0,)
        self.places = [
            example_axis(one, less, count, first) for one, less in zip(base.outputs, fewer.outputs, strict=True)
        ]
        self._dims = [example_dimension(one, less) for one, less in zip(base.tensors(), fewer.tensors(), strict=True)]
        if None in self.places or (not self._of_loss and given_items(self._runs)):
            raise _Unclear

    def _between(self, base: _Pass, found: Sequence[_Pass], kept: Sequence[Sequence[int]]) -> list[Tensor]:
        """For each split and each output of any layer: the largest change among the kept examples."""
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for other, stay in zip(found, kept, strict=True):
            if [name for name, _ in other.seen.outputs] != [name for name, _ in base.seen.outputs]:
                raise _Unclear
            if len(other.seen.free) != len(base.seen.free):
                raise _Unclear
            for (_, one), (_, two) in zip(base.seen.free, other.seen.free, strict=True):
                if one.shape != two.shape:
                    raise _Unclear
                ours.append(one)
                theirs.append(two)
            for one, two, dim in zip(base.tensors(), other.tensors(), self._dims, strict=True):
                if one.shape != two.shape:
                    raise _Unclear
                if dim is not None and one.numel():
                    ours.append(_some(one, dim, stay))
                    theirs.append(_some(two, dim, stay))
        return largest_differences(ours, theirs)

    def _without_the_first(self, base: _Pass, fewer: _Pass) -> list[Tensor]:
        """The same where the first example was left out."""
        tensors = zip(base.tensors(), fewer.tensors(), self._dims, strict=True)
        pairs = [(one.narrow(d, 1, less.shape[d]), less) for one, less, d in tensors if d is not None and less.numel()]
        for (_, one), (_, less) in zip(base.seen.free, fewer.seen.free, strict=True):
            if one.shape != less.shape or not torch.equal(one, less):
                raise _Unclear
        return largest_differences([one for one, _ in pairs], [less for _, less in pairs])

    def _changed(self, own: Sequence[Any], given: Sequence[Sequence[Any]]) -> Tensor:
        """For each example, whether some split replaced it by something else, [n], as 0 or 1."""
        found: Tensor | None = None
        for place, (leaf, dim) in enumerate(zip(own, self._runs.arguments.dims, strict=True)):
            if dim is not None:
                others = torch.stack([leaves[place] for leaves in given]).movedim(dim + 1, 1)
                changed = (others != leaf.movedim(dim, 0)).flatten(2).any(2) if leaf.ndim > 1 else others != leaf
                found = changed.any(0) if found is None else found | changed.any(0).to(found.device)
        if found is None:
            raise _Unclear
        return found.to(_device(self._runs), torch.float64)

    def _gradients(self, *passes: _Pass) -> list[Tensor]:
        if any(one.norms is None or one.names != passes[0].names for one in passes):
            raise _Unclear
        return [one.norms.flatten().to(_device(self._runs)) for one in passes if one.norms is not None]

    def _decide(self, table: Sequence[Tensor], stay: list[int], factors: Sequence[float]) -> None:
        """Raise where a number is not what it must be. Comparisons are written so that NaN fails them."""
        with_others, without_first, changed, *norms = table
        count = len(changed)
        plain, scaled, fewer = norms[0].view(-1, count), norms[1].view(-1, count), norms[2].view(-1, count - 1)
        if not bool((with_others == 0).all() & (without_first <= 1e-4).all() & changed.all()):
            raise _Unclear  # (with other shapes, sums are taken in another order)
        plain_kept, scaled_kept = plain[:, stay], scaled[:, stay]
        if not all(bool(each.isfinite().all()) for each in (plain, fewer, scaled_kept)):
            raise _Unclear
        least = 1e-10 * float(plain.max())
        squared = torch.tensor(factors, dtype=torch.float64)[stay] ** 2
        wanted = plain_kept * squared
        far = (scaled_kept - wanted).abs() > 1e-2 * wanted + least * squared.clamp_min(1.0)
        away = (plain[:, 1:] - fewer).abs() > 2 * coarse(self._runs.module) * plain[:, 1:] + least
        if bool(far.any() | away.any()):
            raise _Unclear


def given_items(runs: TrialRuns) -> bool:
    """Whether a module is given `num_items_in_batch`, by which Hugging Face's losses divide."""
    _, kwargs = runs.arguments.parts.rebuilt(runs.arguments.leaves)
    return kwargs.get("num_items_in_batch") is not None


def _some(tensor: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """Some rows: as a view where they are evenly spaced."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if list(rows) == list(range(rows[0], rows[-1] + 1, step)):
        return tensor[(*[slice(None)] * dim, slice(rows[0], rows[-1] + 1, step))]
    return tensor.index_select(dim, torch.tensor(list(rows), device=tensor.device))


def largest_differences(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute difference of each pair of tensors, as a scalar (for integers: whether they differ)."""
    whole = [place for place, one in enumerate(ours) if one.is_floating_point()]
    found: list[Tensor] = [torch.empty(0)] * len(ours)
    if whole:
        apart = torch._foreach_sub([ours[p] for p in whole], [theirs[p] for p in whole])
        for place, value in zip(whole, torch._foreach_norm(apart, float("inf")), strict=True):
            found[place] = value
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not one.is_floating_point():
            found[place] = (one != other).any()
    return found


def _together(values: Sequence[Tensor]) -> Tensor:
    """Scalars as one tensor of double precision."""
    if len({(value.dtype, value.device) for value in values}) > 1:
        device = values[0].device
        return torch.stack([value.to(device, torch.float64) for value in values])
    return torch.stack(list(values)).double()


def _device(runs: TrialRuns) -> torch.device:
    return next((p.device for p in runs.module.parameters()), torch.device("cpu"))
