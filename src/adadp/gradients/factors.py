"""Symmetric matrices that gradients are multiplied by: what a power of second moments is, and how it is applied.

A factor knows upper bounds on the norms of what it makes, often without making it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adadp.gradients.arithmetic import norms, unit_roundoff


class Factor(ABC):
    """A symmetric matrix F, applied to the last dimension of a tensor."""

    #: Whether `norms` is much cheaper than `apply`.
    low_rank: ClassVar[bool] = False
    #: How much more rounding errors of `tensor` can weigh in `tensor @ F` than in `tensor`: largest over smallest
    #: eigenvalue; NaN or infinite where F is no good. 1 where F mixes no coordinates: each keeps its relative error.
    spread: float = 1.0

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """`tensor @ F`."""

    def apply_left(self, tensor: Tensor) -> Tensor:
        """`F @ tensor`."""
        return self.apply(tensor.mT).mT

    def apply_unscaled(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """`tensor @ F` up to a number, and that number where there is one: a pass over all tokens less."""
        return self.apply(tensor), None

    @abstractmethod
    def matrix(self, size: int, like: Tensor) -> Tensor:
        """F itself."""

    def times_columns(self, right: Factor, rows: int, columns: int) -> Tensor | None:
        """The matrix [rows, columns] that L g R multiplies g by elementwise, where it does only that."""
        sides = (self, rows), (right, columns)
        if not all(isinstance(side, Identity | DiagonalFactor) for side, _ in sides):
            return None
        down, across = (side.values if isinstance(side, DiagonalFactor) else None for side, _ in sides)
        if down is None or across is None:
            only = down if across is None else across
            return None if only is None else (only[:, None] if across is None else only[None]).expand(rows, columns)
        return down[:, None] * across[None]

    @abstractmethod
    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        """Upper bounds on the L2 norms of the exact `tensor @ F` for each of n examples, [n], float64.

        `lengths` [n] are upper bounds on the norms of `tensor` [n, ..., d] itself.
        """


def last_bit(tensor: Tensor) -> float:
    """The relative error of one operation on values of `tensor`'s dtype."""
    return 2.0**-53 if tensor.dtype == torch.float64 else 2.0**-24


def _rounding(tensor: Tensor) -> float:
    """Bounds |fl(x . y) - x . y| / (|x| |y|) for products along the last dimension of `tensor`, in any order."""
    return 2 * unit_roundoff(tensor) + tensor.shape[-1] * last_bit(tensor)


def _measurable(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Lengths with room for what products of values close to the smallest number lose."""
    return lengths + tensor.shape[-1] * 2.0**-126


class Identity(Factor):
    """Leaves everything as it is."""

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.eye(size, dtype=like.dtype, device=like.device)

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return lengths


@dataclass(frozen=True)
class DiagonalFactor(Factor):
    """One value for each coordinate."""

    values: Tensor

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.values.to(tensor.dtype)

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.diag(self.values.to(like.dtype))

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return _measurable(tensor, norms(self.apply(tensor))) * (1 + 2 * last_bit(tensor))


@dataclass(frozen=True)
class Full(Factor):
    """All entries."""

    values: Tensor
    reach: Tensor  # its Frobenius norm, float64
    spread: float

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor @ self.values.to(tensor.dtype)

    def apply_left(self, tensor: Tensor) -> Tensor:
        # Not the transpose of a product: a batch of them is slow to copy. F is symmetric up to rounding alone, and what
        # `norms` measures is the transpose's.
        return self.values.to(tensor.dtype).mT @ tensor

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return self.values.to(like.dtype)

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return norms(self.apply(tensor)) + _rounding(tensor) * self.reach * _measurable(tensor, lengths)


@dataclass(frozen=True)
class LowRank(Factor):
    """A few directions of their own, one value for all the others: rest * I + U diag(top - rest) U^T."""

    low_rank: ClassVar[bool] = True

    basis: Tensor
    top: Tensor
    rest: Tensor
    skew: Tensor  # how far U^T U is from the identity (Frobenius, float64): a basis is orthonormal up to rounding
    spread: float

    def apply(self, tensor: Tensor) -> Tensor:
        basis, rest = self.basis.to(tensor.dtype), self.rest.to(tensor.dtype)
        inner = (tensor @ basis) * (self.top.to(tensor.dtype) - rest)
        return torch.addcmul(inner @ basis.T, tensor, rest)

    def apply_unscaled(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        basis, rest = self.basis.to(tensor.dtype), self.rest.to(tensor.dtype)
        flat = tensor.flatten(0, -2)
        inner = (flat @ basis) * (self.top.to(tensor.dtype) / rest - 1)
        return torch.addmm(flat, inner, basis.T).view(tensor.shape), rest

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return self.apply(torch.eye(size, dtype=like.dtype, device=like.device))

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        # |xF|^2 = rest^2 |x|^2 + sum_k (top_k^2 - rest^2) (x . u_k)^2: the few products with the basis are enough.
        rest, top = self.rest.double().square(), self.top.double().square()
        whole = _measurable(tensor, lengths).square()
        inner = (tensor @ self.basis.to(tensor.dtype)).double().square()
        along = (inner.flatten(1, -2).sum(1) if inner.ndim > 2 else inner) @ (top - rest)
        # An x that lies in the basis is all taken off rest^2 |x|^2 again: the difference is wrong by what the products
        # with the basis are wrong by (2 and a little for the square), and by the basis's skew (1 + skew, at most 2).
        wrong = 3 * math.sqrt(len(self.top)) * _rounding(tensor) + 2 * self.skew + 8 * last_bit(tensor)
        return (whole * (rest + wrong * torch.maximum(rest, top.amax())) + along).clamp_min(0).sqrt()


IDENTITY: Factor = Identity()


class Spectrum:
    """Eigenvalues and directions of second moments, scaled to mean eigenvalue 1 and damped.

    `moments` is a symmetric matrix [d, d], or its diagonal [d], or (`thin`) vectors [k, d] the sum of whose outer
    products it is. A matrix with more than `2 * rank` rows is kept as its `rank` largest directions and a multiple of
    the identity.
    """

    def __init__(
        self, moments: Tensor, damping: float, rank: int | None, previous: Spectrum | None = None, *, thin: bool = False
    ) -> None:
        if thin and (rank is None or moments.shape[1] <= 2 * rank):
            moments, thin = moments.T @ moments, False
        moments = moments.to(torch.float64 if moments.dtype == torch.float64 else torch.float32)
        # A model that diverged: eigh would raise on what is not finite, or overflows in a product of moments.
        most = 1e7 if thin else 1e15
        if moments.is_cuda or not _all_below(moments, most):
            moments = moments.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-most, most)
        size = moments.shape[-1]
        self.basis: Tensor | None = None
        self.rest: Tensor | None = None
        self.skew = torch.zeros((), dtype=torch.float64, device=moments.device)
        diagonal = moments.square() if thin else moments if moments.ndim == 1 else moments.diagonal()
        trace = diagonal.sum()
        if moments.ndim == 1:
            values = moments.clamp_min(0)
        elif not thin and (rank is None or size <= 2 * rank):
            values, self.basis = torch.linalg.eigh(moments)
            values = values.clamp_min(0)
        else:
            assert rank is not None
            values, self.basis = _largest(moments, rank, None if previous is None else previous.basis, thin)
            values = values.clamp_min(0)
            self.rest = ((trace - values.sum()) / (size - rank)).clamp_min(0)
            exact = self.basis.double()
            self.skew = (exact.T @ exact - torch.eye(rank, dtype=exact.dtype, device=exact.device)).norm()
        # Estimates less their noise need not be positive: the mean is that of what is left of them.
        total = values.sum() + (0 if self.rest is None else self.rest * (size - len(values)))
        mean = (total / size).clamp_min(torch.finfo(moments.dtype).tiny)
        self.values = values / mean + damping
        if self.rest is not None:
            self.rest = self.rest / mean + damping

    def power(self, exponent: float) -> Factor:
        """The moments (scaled, damped) raised to `exponent`."""
        if exponent == 0:
            return IDENTITY
        values = self.values**exponent
        if self.basis is None:
            return DiagonalFactor(values)
        if self.rest is None:
            matrix = (self.basis * values) @ self.basis.T
            return Full(matrix, matrix.double().norm(), _spread(values.amax() / values.amin()))
        rest = self.rest**exponent
        largest, smallest = torch.maximum(values.amax(), rest), torch.minimum(values.amin(), rest)
        spread = torch.where(self.skew <= 2.0**-10, largest / smallest, math.inf)  # of no basis nothing is known
        return LowRank(self.basis, values, rest, self.skew, _spread(spread))


def _spread(exact: Tensor) -> float:
    """On a GPU the next power of two, a bound as well: mostly it is the same after a refresh, and recordings last."""
    spread = float(exact)
    return rounded_up(spread) if exact.is_cuda else spread


def rounded_up(spread: float) -> float:
    """The next power of two."""
    return 2.0 ** math.ceil(math.log2(spread)) if 0 < spread < 1e300 else spread


def _all_below(moments: Tensor, limit: float) -> bool:
    """Whether all are finite and at most `limit`: on a CPU reading is a third of the price of writing anew, twice."""
    if not moments.numel():
        return True
    low, high = moments.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _largest(moments: Tensor, rank: int, start: Tensor | None, thin: bool) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues and their directions, by subspace iteration from where it last ended."""
    size = moments.shape[1]
    if start is None or start.shape != (size, rank):
        generator = torch.Generator().manual_seed(0)  # only a starting point: no secret and no data in it
        start = torch.randn(size, rank, generator=generator, dtype=moments.dtype).to(moments.device)
    basis = start.to(moments.dtype)

    def times(basis: Tensor) -> Tensor:
        return moments.T @ (moments @ basis) if thin else moments @ basis

    for _ in range(3):
        basis = torch.linalg.qr(times(basis))[0]
    values, rotation = torch.linalg.eigh((basis.T @ times(basis)).double())  # a GPU is faster at it than in float32
    return values.to(basis.dtype), basis @ rotation.to(basis.dtype)
