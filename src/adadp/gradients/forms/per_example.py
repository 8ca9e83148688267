"""The interface of one parameter's per-example gradients, whatever form they are held in.

A layer does not return its examples' gradients. It returns one of the forms of this package, and a clipping asks the
form for what it needs: norms, a weighted sum, a sum of clamped values. The form chooses the arithmetic from shapes and
from a public number of examples alone, so nothing is read back from the device and no example influences the choice.

Norms are *upper bounds* on what an example then adds to a sum: where a product of matrices is summed in another order
than its norm was taken, the rounding error of both is added to the norm. When tokens cancel, a float32 norm can
otherwise be hundreds of times too small, and clipping with it would bound nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Literal, Self

import torch
from torch import Tensor

from adadp.gradients.forms.factors import Factor
from adadp.gradients.forms.segments import SegmentRows
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import Pair, Sums
from adadp.gradients.rounding import drop, flattened, norms_of

# A dense form holds one gradient per example. Below this size it is kept after its norm was taken, since a second
# product costs more than the memory; above it, the work is done in chunks of examples of this size.
DENSE_BYTES = 64 * 2**20

Side = Literal["rows", "columns"]
Detail = Literal["full", "diagonal"]


class PerExample(ABC):
    """Gradients g_1..g_n of one parameter, not necessarily stored.

    A new form implements the five abstract methods; every other method has a default that goes through `dense`, a chunk
    of examples at a time, and may be overridden where the form knows a cheaper way.

    Args:
        count: number of examples n.
        shape: the parameter's shape.
        planned: number of examples that ways of computing are chosen for, a public number; `count` if None, which is
            right only where the count itself is public. Ways differ in their rounding. If the realised count chose, one
            example more could change the way, and with it the clipping factors of all the others a little: a
            sensitivity that nobody accounts for. Forms made from this one are planned for the same number.

    Guarantee: `|weighted_sum(e_i)| <= sqrt(squared_norms()[i])` for every example i, in the arithmetic of the machine,
    where e_i is the weight vector with a single 1. Clipping relies on nothing else.
    """

    def __init__(self, count: int, shape: Sequence[int], planned: int | None = None) -> None:
        self.count, self.shape = count, torch.Size(shape)
        self.planned = count if planned is None else planned

    @property
    def matrix(self) -> tuple[int, int]:
        """The parameter's shape as a matrix: its first dimension by the rest."""
        return (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)

    def fits(self, element_size: int = 4) -> bool:
        """Whether dense gradients of all examples may be kept. Fewer than two cannot be cut any smaller."""
        return self.planned < 2 or self.planned * math.prod(self.shape) * element_size <= DENSE_BYTES

    # ---- what every form implements -----------------------------------------------------------------------------

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Upper bounds on the squared L2 norm of what each example adds to `weighted_sum` at weight 1.

        Returns:
            [n], float64; infinite or NaN for an example that must not be added.
        """

    @abstractmethod
    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        """`sum_n weights[n] * g_n`.

        Args:
            weights: [n].
            keep: [n] of bool, or None for all. An example that is not kept adds exactly nothing, whatever it holds.

        Returns:
            A tensor of shape `shape`.
        """

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The gradients themselves of some examples, shape [k, *shape]."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> PerExample:
        """The gradients multiplied elementwise by `scale` of shape `shape`."""

    @abstractmethod
    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        """Gradients L g R of the parameter seen as a matrix (first dimension by the rest)."""

    # ---- what a form may know better ----------------------------------------------------------------------------

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors [n, ...] from whose `lengths` this form computes its norms."""
        return ()

    @cached_property
    def lengths(self) -> tuple[Tensor, ...]:
        """Upper bounds on the norms of each example's part of `factors`, each [n] in float64.

        Set by `forms.together`, which takes those of all forms at once, where it comes before.
        """
        return tuple(norms_of(self.factors))

    @classmethod  # noqa: B027 - most have nothing in common
    def prepare(cls, forms: Sequence[Self], let_go: bool) -> None:
        """Do at once what the norms of several forms of this class have in common; each keeps its part.

        With `let_go` nothing but norms and weighted sums is asked for afterwards: what they do not need may be freed.
        """

    @property
    def norm_operands(self) -> Pair | None:
        """Operands for the fused norm kernel (float32 on a CPU), or None if this form computes its own norms."""
        return None

    @property
    def norm_floor(self) -> Tensor | None:
        """Lower bound on each example's clipping norm, [n], or None if no terms of its gradient can cancel.

        When tokens cancel, the computed gradient is mostly rounding error, which clipping would scale up to the full
        bound. So no norm is taken below `reference.CANCELLED` of the sum of the terms' norms.
        """
        return None

    def floor_times(self, *factors: float | Tensor) -> Tensor | None:
        """`norm_floor` of these gradients multiplied by matrices or scales of at most these norms."""
        floor = self.norm_floor
        return None if floor is None else math.prod(factors, start=floor)  # type: ignore[return-value]

    def joined(self, others: Sequence[PerExample]) -> PerExample | None:
        """The sum of this and other forms without making them dense, or None if this form knows no such sum."""
        return None

    def segmented(self, rows: SegmentRows) -> PerExample | None:
        """The gradients of segments of examples (`forms.segments`) without making them dense.

        None if this form knows no such way; `forms.dense.by_segment` has one for all.
        """
        return None

    def finite(self) -> Tensor:
        """Which examples' gradients are finite in every coordinate; [n] of bool."""
        return torch.cat([flattened(g).isfinite().all(1) for _, g in self.chunks()])

    def vectors(self, keep: Tensor, side: Side) -> Tensor | None:
        """Vectors [k, rows or columns] the sum of whose outer products is `moments`' full matrix of that side.

        None where an example has more than one such vector.
        """
        return None

    # ---- sums over examples -------------------------------------------------------------------------------------

    def chunks(self, room: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Dense gradients, a bounded number of examples at a time: as many as fit into `room` bytes."""
        each = max(1, math.prod(self.shape)) * 4
        step = max(1, (DENSE_BYTES if room is None else room) // each)
        for start in range(0, max(1, self.count), step):  # one chunk at least: that of no examples has its shape too
            examples = slice(start, min(start + step, self.count))
            yield examples, self.dense(examples)

    def clamped_sum(self, bound: Tensor, scale: float, keep: Tensor, moments: bool = False) -> Tensor:
        """`sum_n clamp(scale * g_n, -bound, bound)` over the kept examples. A coordinate that is NaN adds zero.

        With `moments`, the same pass computes `square_sum` of the same `keep` and stores it for the next call.
        """
        total, squares = self._clamped_sums(bound, scale, keep, moments)
        if squares is not None:
            self.cache_square_sum(keep, squares / scale**2)
        return total

    def square_sum(self, keep: Tensor) -> Tensor:
        """`sum_n g_n^2` elementwise over the kept examples: the paper's E', before averaging."""
        if self._square_sum_cache is not None and self._square_sum_cache[0] is keep:
            return self._square_sum_cache[1]
        return self._square_sum(keep)

    def cache_square_sum(self, keep: Tensor, squares: Tensor) -> None:
        """Store what `square_sum(keep)` returns from now on; the caller holds no other reference to `squares`."""
        self._square_sum_cache = keep, squares

    _square_sum_cache: tuple[Tensor, Tensor] | None = None

    def moments(self, keep: Tensor, details: Mapping[Side, Detail]) -> dict[str, Tensor]:
        """Second moments over the kept examples, each gradient seen as a matrix G_n (`matrix`).

        Args:
            keep: [n] of bool.
            details: for each side that is wanted, whether all of its matrix or the diagonal alone.

        Returns:
            By side: of the rows `sum_n G_n G_n^T`, of the columns `sum_n G_n^T G_n`, or their diagonals. The gradients
            are made once for both sides.
        """
        found: dict[str, Tensor] = {}
        for detail, compute in (("full", self._full_moments), ("diagonal", self._diagonal_moments)):
            if sides := [side for side, wanted in details.items() if wanted == detail]:
                found |= zip(sides, compute(keep, sides), strict=True)
        return {side: found[side] for side in details}

    # ---- their arithmetic, which forms override -----------------------------------------------------------------

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        """Of `scale * g_n`: the clamped sum and, where moments are cheaper here than on their own, the squares."""
        whole: list[Tensor] = []
        for examples, gradients in self.chunks():
            gradients = drop(gradients, keep[examples]) * scale
            sums = kernel("dense_clamped", gradients)(gradients, bound.to(gradients.dtype), moments)
            parts = [part for part in sums if part is not None]
            whole = [total.add_(part) for total, part in zip(whole, parts, strict=True)] if whole else parts
        return whole[0], whole[1] if moments else None

    def _square_sum(self, keep: Tensor) -> Tensor:
        return self._total(lambda g: g.square().sum(0), keep)

    def _full_moments(self, keep: Tensor, sides: Sequence[Side]) -> Sequence[Tensor]:
        if len(sides) == 2:
            kept = (drop(gradients, keep[examples]) for examples, gradients in self.chunks(moments_room(keep)))
            return both_moments(kept, self.matrix)
        rows = sides[0] == "rows"

        def gram(gradients: Tensor) -> Tensor:
            """Sum over examples of M M^T."""
            matrices = gradients.reshape(len(gradients), *self.matrix)
            stacked = (matrices if rows else matrices.mT).transpose(0, 1).flatten(1)
            return stacked @ stacked.T

        return [self._total(gram, keep)]

    def _diagonal_moments(self, keep: Tensor, sides: Sequence[Side]) -> Sequence[Tensor]:
        squares = self.square_sum(keep).reshape(self.matrix)
        return [squares.sum(1 if side == "rows" else 0) for side in sides]

    def _total(self, term: Callable[[Tensor], Tensor], keep: Tensor) -> Tensor:
        return sum_tensors(term(drop(gradients, keep[examples])) for examples, gradients in self.chunks())


def sum_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, one at a time; there is at least one."""
    return reduce(torch.add, tensors)


def moments_room(like: Tensor) -> int:
    """Bytes of gradients that exist at a time when moments are taken: many on a GPU, which waits for the host."""
    return 8 * DENSE_BYTES if like.is_cuda else DENSE_BYTES


def both_moments(parts: Iterable[Tensor], matrix: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`sum_n G_n G_n^T` and `sum_n G_n^T G_n` of gradients that come some at a time, seen as matrices of that shape."""
    sums: list[Tensor] = []
    for gradients in parts:
        matrices = gradients.reshape(len(gradients), *matrix)
        side_by_side, on_top = matrices.transpose(0, 1).flatten(1), matrices.flatten(0, 1)
        if not sums:
            sums = [matrices.new_zeros(size, size) for size in matrix]
        sums[0].addmm_(side_by_side, side_by_side.T)
        sums[1].addmm_(on_top.T, on_top)
    return sums[0], sums[1]
