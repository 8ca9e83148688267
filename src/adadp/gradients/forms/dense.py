"""Forms that go through dense gradients: stored, made again chunk by chunk, or stored before they are multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.forms.factors import Factor
from adadp.gradients.forms.per_example import DENSE_BYTES, PerExample, sum_tensors
from adadp.gradients.forms.segments import SegmentRows
from adadp.gradients.kernels.reference import CANCELLED, Pair
from adadp.gradients.rounding import accumulation_dtype, drop, flattened, squares, unit_roundoff


class Dense(PerExample):
    """Stored gradients: small parameters (biases, norms) and whatever has no better form.

    Args:
        gradients: [n, *shape].
        floor: `norm_floor`, [n].
        planned: see `PerExample`.
    """

    def __init__(self, gradients: Tensor, floor: Tensor | None = None, *, planned: int | None = None) -> None:
        super().__init__(len(gradients), gradients.shape[1:], planned)
        self.gradients = gradients.to(accumulation_dtype(gradients.dtype))
        self._floor = floor

    @property
    def norm_floor(self) -> Tensor | None:
        return self._floor

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return (self.gradients,)

    @cached_property
    def norms(self) -> Tensor:
        """Upper bounds on the L2 norms; [n], float64."""
        (measured,) = self.lengths
        return measured if self._floor is None else torch.maximum(measured, self._floor)

    @property
    def norm_operands(self) -> Pair | None:
        on_cpu = self.gradients.is_cpu and self.gradients.dtype == torch.float32 and self._floor is None
        return (flattened(self.gradients), None) if on_cpu else None

    def squared_norms(self) -> Tensor:
        return self.norms.square()

    def finite(self) -> Tensor:
        return self.norms < math.inf  # known already, or soon needed

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        flat = flattened(drop(self.gradients, keep))
        # A matrix times a vector: unlike a product of matrices, GPUs take it in all bits of float32, as the norms were.
        return torch.mv(flat.T, weights.to(flat.dtype)).view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return self.gradients[examples]

    def segmented(self, rows: SegmentRows) -> Dense:
        floor = rows.shared(rows.summed(cancelled(self)))
        return Dense(rows.shared(rows.summed(self.gradients)), floor, planned=rows.segments.planned)

    def scaled(self, scale: Tensor) -> Dense:
        gradients = self.gradients * scale.to(self.gradients.dtype)
        return Dense(gradients, self.floor_times(scale.abs().amax()), planned=self.planned)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        # On the left at once: those products are then what is summed, and no rounding stands between.
        turned = left.apply_left(self.gradients.reshape(self.count, *self.matrix)).reshape(self.gradients.shape)
        return Dense(turned, self.floor_times(left.growth), planned=self.planned).times(right)

    def times(self, right: Factor) -> PerExample:
        """Gradients g R of a parameter seen as a matrix."""
        amplified, floor = amplification(self.gradients, right), self.floor_times(right.growth)
        if not (right.low_rank and amplified <= MOST_AMPLIFIED):
            return Dense(between(None, self.gradients, right, self.shape), floor, planned=self.planned)
        matrices = self.gradients.reshape(self.count, *self.matrix)

        def measure() -> Tensor:
            measured = right.norms(matrices, self.norms) * (1 + 4 * amplified)
            return measured if floor is None else torch.maximum(measured, floor)

        return Sandwiched(self, None, right, measure)


class Recomputed(PerExample):
    """Gradients that are made again, a chunk of examples at a time, whenever they are needed: too many to store.

    Norms and sums are taken of the same numbers, so no rounding stands between them.

    Args:
        make: returns the gradients [k, *shape] of a slice of examples.
        count, shape, planned: see `PerExample`.
        floor: `norm_floor`, [n].
    """

    def __init__(
        self,
        make: Callable[[slice], Tensor],
        count: int,
        shape: Sequence[int],
        floor: Tensor | None = None,
        *,
        planned: int | None = None,
    ) -> None:
        super().__init__(count, shape, planned)
        self._make, self._floor = make, floor

    @property
    def norm_floor(self) -> Tensor | None:
        return self._floor

    @cached_property
    def _squared_norms(self) -> Tensor:
        measured = torch.cat([squares(gradients) for _, gradients in self.chunks()])
        return measured if self._floor is None else torch.maximum(measured, self._floor.square())

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return sum_tensors(
            Dense(gradients).weighted_sum(weights[examples], None if keep is None else keep[examples])
            for examples, gradients in self.chunks()
        )

    def dense(self, examples: slice) -> Tensor:
        return self._make(examples)

    def scaled(self, scale: Tensor) -> PerExample:
        floor = self.floor_times(scale.abs().amax())
        return recomputed(lambda e: Dense(self._make(e)).scaled(scale).gradients, self, floor)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        floor = self.floor_times(left.growth, right.growth)
        return recomputed(lambda e: between(left, self._make(e), right, self.shape), self, floor)


def recomputed(make: Callable[[slice], Tensor], like: PerExample, floor: Tensor | None = None) -> PerExample:
    """The gradients that `make` returns, of the same parameter, examples and plan as `like`."""
    return Recomputed(make, like.count, like.shape, floor, planned=like.planned)


def stored_or_recomputed(make: Callable[[slice], Tensor], like: PerExample, floor: Tensor | None = None) -> PerExample:
    """The same, stored where they fit."""
    if like.fits():
        return Dense(make(slice(0, like.count)), floor, planned=like.planned)
    return recomputed(make, like, floor)


def merged(parts: Sequence[PerExample]) -> PerExample:
    """One form for the sum of all that a parameter received in a step."""
    if len(parts) == 1:
        return parts[0]
    for place, part in enumerate(parts):
        joined = part.joined([*parts[:place], *parts[place + 1 :]])
        if joined is not None:
            return joined

    def total(examples: slice) -> Tensor:
        return sum_tensors(part.dense(examples) for part in parts)

    known = [part.norm_floor for part in parts if part.norm_floor is not None]
    return stored_or_recomputed(total, parts[0], sum_tensors(known) if known else None)


def by_segment(form: PerExample, rows: SegmentRows) -> PerExample:
    """The gradients of segments of examples: sums over the examples of each, times its share."""
    known = form.segmented(rows)
    return summed_by_segment(form, rows, cancelled(form)) if known is None else known


def summed_by_segment(form: PerExample, rows: SegmentRows, floor: Tensor) -> PerExample:
    """The same from the dense gradients of few examples at a time. `floor` [n] is what each adds to the norm floor."""
    segments = rows.segments
    room = max(1, DENSE_BYTES // (4 * max(1, math.prod(form.shape))))

    def make(some: slice) -> Tensor:
        chosen, first = rows.part(some), segments.rows_of(some).start
        parts = []
        for piece in chosen.segments.pieces(room):
            examples = chosen.segments.rows_of(piece)
            parts.append(chosen.part(piece).summed(form.dense(slice(first + examples.start, first + examples.stop))))
        return chosen.shared(torch.cat(parts))

    floor = rows.shared(rows.summed(floor))
    made = Recomputed(make, len(segments), form.shape, floor, planned=segments.planned)
    return Dense(make(slice(0, made.count)), floor, planned=segments.planned) if made.fits() else made


def cancelled(form: PerExample) -> Tensor:
    """What each example adds to the norm floor of a segment: examples of a segment may cancel as tokens may. [n]."""
    own, floor = CANCELLED * form.squared_norms().sqrt(), form.norm_floor
    return own if floor is None else torch.maximum(own, floor)


class Unstored(PerExample):
    """A form that is multiplied further by making its gradients dense."""

    def scaled(self, scale: Tensor) -> PerExample:
        def make(examples: slice) -> Tensor:
            gradients = self.dense(examples)
            return gradients * scale.to(gradients.dtype)

        return stored_or_recomputed(make, self)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return stored_or_recomputed(lambda examples: between(left, self.dense(examples), right, self.shape), self)


# Where a sum is multiplied by L and R instead of each example, so are the rounding errors of that sum, made while it
# was still one of g. An example that L and R make small has a large weight and large errors; those of a whole
# microbatch, which one example more may change, must stay far below what one example may add.
MOST_AMPLIFIED = 2.0**-17


def amplification(tensor: Tensor, *factors: Factor) -> float:
    """The relative error of one product of `tensor`'s values after these factors; NaN where a factor is unusable."""
    return unit_roundoff(tensor) * math.prod(factor.spread for factor in factors)


def between(left: Factor | None, gradients: Tensor, right: Factor, shape: Sequence[int]) -> Tensor:
    """L g R of gradients [..., *shape], each seen as a matrix (first dimension by the rest)."""
    matrices = gradients.reshape(*gradients.shape[: gradients.ndim - len(shape)], shape[0], -1)
    product = right.apply(matrices)
    return (product if left is None else left.apply_left(product)).reshape(gradients.shape)


class Sandwiched(Unstored):
    """Gradients L g R that are not made: sum_n w_n L g_n R = L (sum_n w_n g_n) R, so the sum alone is multiplied.

    Args:
        form: g.
        left: L, or None for the identity.
        right: R.
        measure: returns upper bounds on the L2 norms of L g_n R, [n].
    """

    def __init__(self, form: PerExample, left: Factor | None, right: Factor, measure: Callable[[], Tensor]) -> None:
        super().__init__(form.count, form.shape, form.planned)
        self.form, self.left, self.right, self._measure = form, left, right, measure

    @cached_property
    def _squared_norms(self) -> Tensor:
        # g is weighted and summed before it is multiplied. One that is huge beside L g R would overflow on the way, and
        # be NaN in the whole sum: it counts like one that is not finite. Damped factors are far from this.
        itself, measured = self.form.squared_norms(), self._measure().square()
        return torch.where(itself <= 1e40 * measured, measured, math.inf)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        total = self.form.weighted_sum(weights, keep)
        # In float64: it is one matrix, and no rounding of L and R is left for the norms to bound.
        return between(self.left, total.double(), self.right, self.shape).to(total.dtype)

    def dense(self, examples: slice) -> Tensor:
        return between(self.left, self.form.dense(examples), self.right, self.shape)
