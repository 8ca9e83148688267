"""One parameter's per-example gradients, in the cheapest form that is known for them.

A layer does not hand out the gradients of its examples: it hands out one of the forms below, and a clipping asks
that form for what it needs (norms, a weighted sum, a sum of clamped values). Which arithmetic answers is chosen
here, from shapes alone, so nothing is read back from the device.

Norms are *upper bounds* on what an example then adds to a sum: where a product of matrices is summed in another order
than its norm was taken, the rounding error of both is added to the norm. Tokens that cancel each other can
otherwise make a float32 norm hundreds of times too small, and clipping with it would not bound anything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, reduce

import torch
from torch import Tensor

from adadp.gradients.forms.factors import Factor
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import Pair, Sums
from adadp.gradients.rounding import (
    accumulation_dtype,
    drop,
    flattened,
    norms,
    squares,
    unit_roundoff,
)

# A dense form holds one gradient per example. Below this size it is kept after its norm was taken, since a second
# product costs more than the memory; above it, the work is done in chunks of examples of this size.
DENSE_BYTES = 64 * 2**20


class PerExample(ABC):
    """Gradients g_1..g_n of one parameter of shape `shape`, never necessarily stored."""

    shape: torch.Size
    count: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The parameter's shape as a matrix: its first dimension by the rest."""
        return (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)

    @property
    def pair(self) -> Pair | None:
        """What `squared_norms` can be had from, with those of other forms at once; on a CPU in float32 alone."""
        return None

    @property
    def least(self) -> Tensor | None:
        """What no example counts for less than, [n], where its terms may cancel (`reference.CANCELLED`)."""
        return None

    def times_least(self, *factors: float | Tensor) -> Tensor | None:
        """The same of gradients multiplied by what is no larger than these."""
        least = self.least
        return None if least is None else math.prod(factors, start=least)  # type: ignore[return-value]

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Upper bounds on the squared L2 norm of what each example adds to `weighted_sum` at weight 1; [n]."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        """`sum_n weights[n] * g_n`, shape `shape`; an example that is not kept adds exactly nothing."""

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The gradients themselves of some examples, shape [k, *shape]."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> PerExample:
        """The gradients multiplied elementwise by `scale` of shape `shape`."""

    @abstractmethod
    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        """Gradients L g R of a parameter seen as a matrix (first dimension by the rest)."""

    def joined(self, others: Sequence[PerExample]) -> PerExample | None:
        """The sum of this and other forms without making them dense, where that is known."""
        return None

    def chunks(self, room: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Dense gradients, a bounded number of examples at a time: so many as have `room`, in bytes."""
        each = max(1, math.prod(self.shape)) * 4
        step = max(1, (DENSE_BYTES if room is None else room) // each)
        for start in range(0, max(1, self.count), step):  # one chunk at least: that of no examples has its shape too
            examples = slice(start, min(start + step, self.count))
            yield examples, self.dense(examples)

    def clamped_sum(self, bound: Tensor, scale: float, keep: Tensor, moments: bool = False) -> Tensor:
        """`sum_n clamp(scale * g_n, -bound, bound)` over the kept examples. A coordinate that is NaN adds zero.

        With `moments`, `square_sum` of the same `keep` comes out of the same pass, and is at hand when it is asked for.
        """
        total, squares = self._clamped_sums(bound, scale, keep, moments)
        if squares is not None:
            self.have(keep, squares / scale**2)
        return total

    def have(self, keep: Tensor, squares: Tensor) -> None:
        """Be told what `square_sum(keep)` is; nobody else keeps the tensor."""
        self._at_hand = keep, squares

    _at_hand: tuple[Tensor, Tensor] | None = None

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        """Of `scale * g_n`: the clamped sum and, where moments are cheaper here than on their own, the squares."""
        whole: list[Tensor] = []
        for examples, gradients in self.chunks():
            gradients = drop(gradients, keep[examples]) * scale
            sums = kernel("dense_clamped", gradients)(gradients, bound.to(gradients.dtype), moments)
            parts = [part for part in sums if part is not None]
            whole = [total.add_(part) for total, part in zip(whole, parts, strict=True)] if whole else parts
        return whole[0], whole[1] if moments else None

    def finite(self) -> Tensor:
        """Which examples' gradients are finite in every coordinate; [n] of bool."""
        return torch.cat([flattened(g).isfinite().all(1) for _, g in self.chunks()])

    def square_sum(self, keep: Tensor) -> Tensor:
        """`sum_n g_n^2` elementwise over the kept examples: the paper's E', before averaging."""
        if self._at_hand is not None and self._at_hand[0] is keep:
            return self._at_hand[1]
        return self._square_sum(keep)

    def _square_sum(self, keep: Tensor) -> Tensor:
        return self._total(lambda g: g.square().sum(0), keep)

    def row_moments(self, keep: Tensor) -> Tensor:
        """`sum_n g_n g_n^T` over the kept examples, the gradient seen as a matrix."""
        return self._total(lambda g: _gram(g.reshape(len(g), *self.matrix)), keep)

    def column_moments(self, keep: Tensor) -> Tensor:
        """`sum_n g_n^T g_n` over the kept examples, the gradient seen as a matrix."""
        return self._total(lambda g: _gram(g.reshape(len(g), *self.matrix).mT), keep)

    def both_moments(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """`row_moments` and `column_moments`, of gradients that are made once for both."""
        kept = (drop(gradients, keep[examples]) for examples, gradients in self.chunks(moments_room(keep)))
        return both_moments(kept, self.matrix)

    def row_vectors(self, keep: Tensor) -> Tensor | None:
        """Vectors [k, rows] the sum of whose outer products is `row_moments`, where there is one for each example."""
        return None

    def column_vectors(self, keep: Tensor) -> Tensor | None:
        """The same for `column_moments`."""
        return None

    def row_energy(self, keep: Tensor) -> Tensor:
        """`sum_n` of the squared norm of each row: the diagonal of `row_moments`."""
        return self._squares_for_both(keep).sum(1)

    def column_energy(self, keep: Tensor) -> Tensor:
        """`sum_n` of the squared norm of each column: the diagonal of `column_moments`."""
        return self._squares_for_both(keep).sum(0)

    def _squares_for_both(self, keep: Tensor) -> Tensor:
        """`square_sum` as a matrix, made once for rows and columns. Nobody outside gets hold of what is kept here."""
        if self._energies is None or self._energies[0] is not keep:
            self._energies = keep, self.square_sum(keep).reshape(self.matrix)
        return self._energies[1]

    _energies: tuple[Tensor, Tensor] | None = None

    def _total(self, term: Callable[[Tensor], Tensor], keep: Tensor) -> Tensor:
        return sum_tensors(term(drop(gradients, keep[examples])) for examples, gradients in self.chunks())


def sum_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, one at a time; there is at least one."""
    return reduce(torch.add, tensors)


def moments_room(like: Tensor) -> int:
    """How many bytes of gradients exist at a time when moments are taken: many where the host is waited for."""
    return 8 * DENSE_BYTES if like.is_cuda else DENSE_BYTES


def both_moments(parts: Iterable[Tensor], matrix: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`sum_n g_n g_n^T` and `sum_n g_n^T g_n` of gradients that come some at a time, seen as matrices of that shape."""
    sums: list[Tensor] = []
    for gradients in parts:
        matrices = gradients.reshape(len(gradients), *matrix)
        side_by_side, on_top = matrices.transpose(0, 1).flatten(1), matrices.flatten(0, 1)
        if not sums:
            sums = [matrices.new_zeros(size, size) for size in matrix]
        sums[0].addmm_(side_by_side, side_by_side.T)
        sums[1].addmm_(on_top.T, on_top)
    return sums[0], sums[1]


def _gram(matrices: Tensor) -> Tensor:
    """Sum over the batch of M M^T."""
    stacked = matrices.transpose(0, 1).flatten(1)
    return stacked @ stacked.T


class Dense(PerExample):
    """Stored gradients: small parameters (biases, norms) and whatever has no better form."""

    def __init__(self, gradients: Tensor, least: Tensor | None = None) -> None:
        self.gradients = gradients.to(accumulation_dtype(gradients.dtype))
        self.count = len(gradients)
        self.shape = gradients.shape[1:]
        self._least = least

    @property
    def least(self) -> Tensor | None:
        return self._least

    @cached_property
    def norms(self) -> Tensor:
        """Upper bounds on the L2 norms; [n], float64."""
        measured = norms(self.gradients)
        return measured if self._least is None else torch.maximum(measured, self._least)

    @property
    def pair(self) -> Pair | None:
        on_cpu = self.gradients.is_cpu and self.gradients.dtype == torch.float32 and self._least is None
        return (flattened(self.gradients), None) if on_cpu else None

    def squared_norms(self) -> Tensor:
        return self.norms.square()

    def finite(self) -> Tensor:
        return self.norms < math.inf  # at hand, or soon needed

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        flat = flattened(drop(self.gradients, keep))
        # A matrix times a vector: unlike a product of matrices, GPUs take it in all bits of float32, as the norms were.
        return torch.mv(flat.T, weights.to(flat.dtype)).view(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return self.gradients[examples]

    def scaled(self, scale: Tensor) -> Dense:
        return Dense(self.gradients * scale.to(self.gradients.dtype), self.times_least(scale.abs().amax()))

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        # On the left at once: those products are then what is summed, and no rounding stands between.
        turned = left.apply_left(self.gradients.reshape(self.count, *self.matrix))
        return Dense(turned.reshape(self.gradients.shape), self.times_least(left.growth)).times(right)

    def times(self, right: Factor) -> PerExample:
        """Gradients g R of a parameter seen as a matrix."""
        amplified, least = amplification(self.gradients, right), self.times_least(right.growth)
        if not (right.low_rank and amplified <= MOST_AMPLIFIED):
            return Dense(between(None, self.gradients, right, self.shape), least)
        matrices = self.gradients.reshape(self.count, *self.matrix)

        def measure() -> Tensor:
            measured = right.norms(matrices, self.norms) * (1 + 4 * amplified)
            return measured if least is None else torch.maximum(measured, least)

        return Sandwiched(self, None, right, measure)


# Where a sum is multiplied by L and R instead of each example, so are the rounding errors of that sum, made while it
# was still one of g. An example that L and R make small has a large weight and large errors; those of a whole
# microbatch, which one example more may turn, must stay far below what one example may add.
MOST_AMPLIFIED = 2.0**-17


def amplification(tensor: Tensor, *factors: Factor) -> float:
    """The relative error of one product of `tensor`'s values after these factors; NaN where they are no good."""
    return unit_roundoff(tensor) * math.prod(factor.spread for factor in factors)


def between(left: Factor | None, gradients: Tensor, right: Factor, shape: Sequence[int]) -> Tensor:
    """L g R of gradients [..., *shape], each seen as a matrix (first dimension by the rest)."""
    matrices = gradients.reshape(*gradients.shape[: gradients.ndim - len(shape)], shape[0], -1)
    product = right.apply(matrices)
    return (product if left is None else left.apply_left(product)).reshape(gradients.shape)


class Sandwiched(PerExample):
    """Gradients L g R that are not made: their norms are found from those of g, and the sum is multiplied instead.

    `left` is None where there is nothing on the left. `measure` gives upper bounds on the L2 norms, [n].
    """

    def __init__(self, form: PerExample, left: Factor | None, right: Factor, measure: Callable[[], Tensor]) -> None:
        self.form, self.left, self.right, self._measure = form, left, right, measure
        self.count, self.shape = form.count, form.shape

    @cached_property
    def _squared_norms(self) -> Tensor:
        # g is weighted and summed before it is multiplied. One that is huge beside L g R would overflow on the way, and
        # be NaN in everybody's sum: it counts like one that is not finite. Damped factors are far from this.
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

    def scaled(self, scale: Tensor) -> PerExample:
        factor = scale.to(accumulation_dtype(scale.dtype))
        return stored_or_recomputed(lambda examples: self.dense(examples) * factor, self.count, self.shape)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return stored_or_recomputed(
            lambda examples: between(left, self.dense(examples), right, self.shape), self.count, self.shape
        )


class Scaled(PerExample):
    """Gradients multiplied elementwise by one tensor, not made: they are measured as products are, and summed first.

    `measure` gives upper bounds on the squared norms, [n]; `add` the weighted sum of what is not multiplied yet.
    """

    def __init__(
        self,
        form: PerExample,
        scale: Tensor,
        measure: Callable[[], Tensor],
        add: Callable[[Tensor, Tensor | None], Tensor],
    ) -> None:
        self.form, self.scale, self._measure, self._add = form, scale, measure, add
        self.count, self.shape = form.count, form.shape

    @cached_property
    def _squared_norms(self) -> Tensor:
        return self._measure()

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return self._add(weights, keep) * self.scale.reshape(self.shape)

    def dense(self, examples: slice) -> Tensor:
        return self.form.dense(examples) * self.scale.reshape(self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        return self.form.scaled(self.scale.reshape(self.shape) * scale.to(self.scale.dtype))

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return stored_or_recomputed(
            lambda examples: between(left, self.dense(examples), right, self.shape), self.count, self.shape
        )


class Recomputed(PerExample):
    """Gradients that are made anew, a chunk of examples at a time, whenever they are needed: too many to store.

    Norms and sums are taken of the same numbers, so no rounding stands between them.
    """

    def __init__(
        self, make: Callable[[slice], Tensor], count: int, shape: Sequence[int], least: Tensor | None = None
    ) -> None:
        self._make, self.count, self.shape, self._least = make, count, torch.Size(shape), least

    @property
    def least(self) -> Tensor | None:
        return self._least

    @cached_property
    def _squared_norms(self) -> Tensor:
        measured = torch.cat([squares(gradients) for _, gradients in self.chunks()])
        return measured if self._least is None else torch.maximum(measured, self._least.square())

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return sum_tensors(
            Dense(gradients).weighted_sum(weights[examples], None if keep is None else keep[examples])
            for examples, gradients in self.chunks()
        )

    def dense(self, examples: slice) -> Tensor:
        return self._make(examples)

    def scaled(self, scale: Tensor) -> Recomputed:
        least = self.times_least(scale.abs().amax())
        return Recomputed(lambda e: Dense(self._make(e)).scaled(scale).gradients, self.count, self.shape, least)

    def sandwiched(self, left: Factor, right: Factor) -> Recomputed:
        least = self.times_least(left.growth, right.growth)
        return Recomputed(lambda e: between(left, self._make(e), right, self.shape), self.count, self.shape, least)


_PUBLIC_COUNT: ContextVar[int | None] = ContextVar("public count", default=None)


@contextmanager
def planned_for(count: int) -> Iterator[None]:
    """Choose ways of computing for microbatches of `count` examples, a public number, however many there are.

    Ways differ in their rounding. If the realised count chose, one example more could change the way, and with it the
    clipping factors of all the others a little: a sensitivity that nobody accounts for.
    """
    token = _PUBLIC_COUNT.set(count)
    try:
        yield
    finally:
        _PUBLIC_COUNT.reset(token)


def public(count: int) -> int:
    """How many examples to plan for where there are `count`."""
    planned = _PUBLIC_COUNT.get()
    return count if planned is None else planned


def fits(count: int, shape: Sequence[int], element_size: int = 4) -> bool:
    """Whether dense gradients of all examples may be kept. Fewer than two cannot be cut any smaller."""
    count = public(count)
    return count < 2 or count * math.prod(shape) * element_size <= DENSE_BYTES


def stored_or_recomputed(
    make: Callable[[slice], Tensor], count: int, shape: Sequence[int], least: Tensor | None = None
) -> PerExample:
    """The gradients that `make` returns for a slice of examples: kept where they fit."""
    return Dense(make(slice(0, count)), least) if fits(count, shape) else Recomputed(make, count, shape, least)


def merged(parts: Sequence[PerExample]) -> PerExample:
    """One form for all that a parameter received in a step."""
    if len(parts) == 1:
        return parts[0]
    for place, part in enumerate(parts):
        joined = part.joined([*parts[:place], *parts[place + 1 :]])
        if joined is not None:
            return joined

    def total(examples: slice) -> Tensor:
        return sum_tensors(part.dense(examples) for part in parts)

    known = [part.least for part in parts if part.least is not None]
    return stored_or_recomputed(total, parts[0].count, parts[0].shape, sum_tensors(known) if known else None)
