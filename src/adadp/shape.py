"""How large the gradient is in each direction of a parameter: its second moments, and their powers.

A shape is used twice in a step: each example's gradient is multiplied by S^-before, bounded and noised there, and the
release is multiplied by S^-after. Where its moments come from, and at what price, is the business of a *source*
(`adadp.sources`). Until a shape has learnt a parameter, it leaves that parameter alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.arithmetic import norms, unit_roundoff
from adadp.gradients.per_example import PerExample

Statistics = dict[str, Tensor]


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

    @abstractmethod
    def matrix(self, size: int, like: Tensor) -> Tensor:
        """F itself."""

    @abstractmethod
    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        """Upper bounds on the L2 norms of the exact `tensor @ F` for each of n examples, [n], float64.

        `lengths` [n] are upper bounds on the norms of `tensor` [n, ..., d] itself.
        """


def _last_bit(tensor: Tensor) -> float:
    """The relative error of one operation on values of `tensor`'s dtype."""
    return 2.0**-53 if tensor.dtype == torch.float64 else 2.0**-24


def _rounding(tensor: Tensor) -> float:
    """Bounds |fl(x . y) - x . y| / (|x| |y|) for products along the last dimension of `tensor`, in any order."""
    return 2 * unit_roundoff(tensor) + tensor.shape[-1] * _last_bit(tensor)


def _measurable(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Lengths with room for what products of values close to the smallest number lose."""
    return lengths + tensor.shape[-1] * 2.0**-126


class _Identity(Factor):
    def apply(self, tensor: Tensor) -> Tensor:
        return tensor

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.eye(size, dtype=like.dtype, device=like.device)

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return lengths


@dataclass(frozen=True)
class _Diagonal(Factor):
    values: Tensor

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.values.to(tensor.dtype)

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.diag(self.values.to(like.dtype))

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return _measurable(tensor, norms(self.apply(tensor))) * (1 + 2 * _last_bit(tensor))


@dataclass(frozen=True)
class _Full(Factor):
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
class _LowRank(Factor):
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
        wrong = 3 * math.sqrt(len(self.top)) * _rounding(tensor) + 2 * self.skew + 8 * _last_bit(tensor)
        return (whole * (rest + wrong * torch.maximum(rest, top.amax())) + along).clamp_min(0).sqrt()


IDENTITY: Factor = _Identity()


class Spectrum:
    """Eigenvalues and directions of second moments, scaled to mean eigenvalue 1 and damped.

    `moments` is a symmetric matrix [d, d], or its diagonal [d]. A matrix with more than `2 * rank` rows is kept as its
    `rank` largest directions and a multiple of the identity.
    """

    def __init__(self, moments: Tensor, damping: float, rank: int | None, previous: Spectrum | None = None) -> None:
        moments = moments.to(torch.float64 if moments.dtype == torch.float64 else torch.float32)
        # A model that diverged: eigh would raise on what is not finite, or overflows in a product of moments.
        moments = moments.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-1e15, 1e15)
        size = len(moments)
        self.basis: Tensor | None = None
        self.rest: Tensor | None = None
        self.skew = torch.zeros((), dtype=torch.float64, device=moments.device)
        trace = moments.sum() if moments.ndim == 1 else moments.diagonal().sum()
        if moments.ndim == 1:
            values = moments.clamp_min(0)
        elif rank is None or size <= 2 * rank:
            values, self.basis = torch.linalg.eigh(moments)
            values = values.clamp_min(0)
        else:
            values, self.basis = _largest(moments, rank, None if previous is None else previous.basis)
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
            return _Diagonal(values)
        if self.rest is None:
            matrix = (self.basis * values) @ self.basis.T
            return _Full(matrix, matrix.double().norm(), float(values.amax() / values.amin()))
        rest = self.rest**exponent
        largest, smallest = torch.maximum(values.amax(), rest), torch.minimum(values.amin(), rest)
        spread = torch.where(self.skew <= 2.0**-10, largest / smallest, math.inf)  # of no basis nothing is known
        return _LowRank(self.basis, values, rest, self.skew, float(spread))


def _largest(matrix: Tensor, rank: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues and their directions, by subspace iteration from where it last ended."""
    if start is None or start.shape != (len(matrix), rank):
        generator = torch.Generator().manual_seed(0)  # only a starting point: no secret and no data in it
        start = torch.randn(len(matrix), rank, generator=generator, dtype=matrix.dtype).to(matrix.device)
    basis = start.to(matrix.dtype)
    for _ in range(3):
        basis = torch.linalg.qr(matrix @ basis)[0]
    values, rotation = torch.linalg.eigh(basis.T @ (matrix @ basis))
    return values, basis @ rotation


class Shape(ABC):
    """Second moments per parameter with two exponents. One object serves one training run."""

    def __init__(self, before: float, after: float, damping: float) -> None:
        if not (math.isfinite(before) and math.isfinite(after)):
            raise ConfigurationError(f"a shape's exponents must be finite, not ({before}, {after})")
        if not (math.isfinite(damping) and damping > 0):
            raise ConfigurationError(f"damping must be above 0, not {damping}: noise would be divided by zero")
        self.before, self.after, self.damping = before, after, damping

    @abstractmethod
    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """Sums over the kept examples of the second moments that this shape is made of."""

    @abstractmethod
    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        """Statistics small enough to be noised, of gradients multiplied by `weights` [n].

        For one example of norm 1 over all parameters their L2 norm is at most `low_sensitivity`.
        """

    low_sensitivity: float

    @abstractmethod
    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        """Zeros of the shapes of `low_statistics`."""

    @abstractmethod
    def moments_of(self, gradient: Tensor) -> Statistics:
        """The statistics of one gradient, such as a released one."""

    @abstractmethod
    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        """The statistics that the noise alone has, on average, in a release carried back by `undo`."""

    @abstractmethod
    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        """Take these second moments as the parameter's shape from now on."""

    @abstractmethod
    def apply_before(self, name: str, form: PerExample) -> PerExample:
        """Gradients multiplied by S^-before."""

    @abstractmethod
    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        """One gradient multiplied by S^exponent."""


class Diagonal(Shape):
    """A second moment for every coordinate: the paper's E'. Its form of noise and step is (1/2, 0)."""

    low_sensitivity = 1.0  # |g^2|_2 <= |g|_2^2

    def __init__(self, before: float = 0.5, after: float = 0.0, *, damping: float = 0.1) -> None:
        super().__init__(before, after, damping)
        self._squares: dict[str, Tensor] = {}
        self._powers: dict[tuple[str, float], Tensor] = {}  # made where they are needed, until something is learnt

    def mean_square(self, name: str, parameter: Tensor) -> Tensor:
        """E' itself: the mean squared gradient of each coordinate, zero where nothing was learnt yet."""
        known = self._squares.get(name)
        return torch.zeros(parameter.shape, device=parameter.device) if known is None else known

    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        return {"square": form.square_sum(keep)}

    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        total = None
        for examples, gradients in form.chunks():
            weight = weights[examples].to(gradients.dtype).view(-1, *[1] * (gradients.ndim - 1))
            gradients = torch.where(weight != 0, gradients * weight, 0)
            term = gradients.square().sum(0)
            total = term if total is None else total + term
        return {"square": total if total is not None else torch.zeros(form.shape)}

    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        return {"square": torch.zeros(parameter.shape, device=parameter.device)}

    def moments_of(self, gradient: Tensor) -> Statistics:
        return {"square": gradient.square()}

    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        return {"square": self.apply(name, torch.ones_like(gradient) * stddev, self.before).square()}

    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        self._squares[name] = statistics["square"].clamp_min(0)
        for key in [key for key in self._powers if key[0] == name]:
            del self._powers[key]

    def _power(self, name: str, exponent: float) -> Tensor:
        """The moments, scaled to mean 1 and damped, raised to `exponent`."""
        key = (name, exponent)
        if key not in self._powers:
            square = self._squares[name]
            mean = square.mean().clamp_min(torch.finfo(square.dtype).tiny)
            self._powers[key] = (square / mean + self.damping) ** exponent
        return self._powers[key]

    def apply_before(self, name: str, form: PerExample) -> PerExample:
        if self.before == 0 or name not in self._squares:
            return form
        return form.scaled(self._power(name, -self.before))

    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        if exponent == 0 or name not in self._squares:
            return tensor
        return tensor * self._power(name, exponent).to(tensor.dtype)


class Kronecker(Shape):
    """A factor for the rows of a parameter's gradient and one for its columns: S^-p g = L^-p g R^-p.

    A parameter of more than two dimensions is a matrix of its first dimension by the rest; a vector or a single number
    has rows only, and those diagonal. Factors are full up to `2 * rank` directions, of rank `rank` plus a multiple of
    the identity up to `widest`, diagonal beyond. `rank=0` makes every factor diagonal: one scale per row
    and one per column.
    """

    low_sensitivity = math.sqrt(2)  # row energies and column energies, each of L2 norm at most |g|_2^2

    def __init__(
        self,
        before: float = 0.25,
        after: float = 0.0,
        *,
        damping: float = 0.1,
        rank: int | None = 32,
        widest: int = 4096,
    ) -> None:
        super().__init__(before, after, damping)
        if rank is not None and rank < 0:
            raise ConfigurationError(f"rank must be at least 0 (diagonal factors), or None (full), not {rank}")
        self.rank, self.widest = rank, widest
        self._rows: dict[str, Spectrum] = {}
        self._columns: dict[str, Spectrum] = {}
        self._powers: dict[tuple[str, float], tuple[Factor, Factor]] = {}

    def _full(self, size: int) -> bool:
        return self.rank != 0 and size <= self.widest

    def statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        if len(form.shape) < 2:
            return {"rows": form.square_sum(keep).reshape(-1)}
        rows, columns = form.shape[0], math.prod(form.shape[1:])
        return {
            "rows": form.row_moments(keep) if self._full(rows) else form.row_energy(keep),
            "columns": form.column_moments(keep) if self._full(columns) else form.column_energy(keep),
        }

    def low_statistics(self, form: PerExample, weights: Tensor) -> Statistics:
        square = Diagonal().low_statistics(form, weights)["square"]
        if square.ndim < 2:
            return {"rows": square.reshape(-1)}
        matrix = square.reshape(len(square), -1)
        return {"rows": matrix.sum(1), "columns": matrix.sum(0)}

    def low_statistics_like(self, parameter: Tensor) -> Statistics:
        if parameter.ndim < 2:
            return {"rows": torch.zeros(parameter.numel(), device=parameter.device)}
        return {
            "rows": torch.zeros(parameter.shape[0], device=parameter.device),
            "columns": torch.zeros(math.prod(parameter.shape[1:]), device=parameter.device),
        }

    def moments_of(self, gradient: Tensor) -> Statistics:
        if gradient.ndim < 2:
            return {"rows": gradient.square().reshape(-1)}
        matrix = gradient.reshape(len(gradient), -1)
        rows, columns = matrix.shape
        return {
            "rows": matrix @ matrix.T if self._full(rows) else matrix.square().sum(1),
            "columns": matrix.T @ matrix if self._full(columns) else matrix.square().sum(0),
        }

    def moments_of_noise(self, name: str, gradient: Tensor, stddev: float | Tensor) -> Statistics:
        if gradient.ndim < 2:
            return {"rows": self.apply(name, torch.ones_like(gradient) * stddev, self.before).square().reshape(-1)}
        matrix = gradient.reshape(len(gradient), -1)
        rows, columns = matrix.shape
        left, right = (IDENTITY, IDENTITY) if name not in self._rows else self._pair(name, 2 * self.before)
        # E[(A Z B)(A Z B)^T] = stddev^2 tr(B^2) A^2 for symmetric A, B and Z of unit variance.
        row_power, column_power = left.matrix(rows, matrix), right.matrix(columns, matrix)
        row_noise = stddev**2 * column_power.diagonal().sum() * row_power
        column_noise = stddev**2 * row_power.diagonal().sum() * column_power
        return {
            "rows": row_noise if self._full(rows) else row_noise.diagonal(),
            "columns": column_noise if self._full(columns) else column_noise.diagonal(),
        }

    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        for side, store in (("rows", self._rows), ("columns", self._columns)):
            if side in statistics:
                rank = self.rank or None
                store[name] = Spectrum(statistics[side], self.damping, rank, store.get(name))
        for key in [key for key in self._powers if key[0] == name]:
            del self._powers[key]

    def _pair(self, name: str, exponent: float) -> tuple[Factor, Factor]:
        key = (name, exponent)
        if key not in self._powers:
            columns = self._columns.get(name)
            right = IDENTITY if columns is None else columns.power(exponent)
            self._powers[key] = (self._rows[name].power(exponent), right)
        return self._powers[key]

    def apply_before(self, name: str, form: PerExample) -> PerExample:
        if self.before == 0 or name not in self._rows:
            return form
        left, right = self._pair(name, -self.before)
        if len(form.shape) < 2:
            values = self._rows[name].values
            return form.scaled(left.apply(torch.ones_like(values)).reshape(form.shape))
        return form.sandwiched(left, right)

    def apply(self, name: str, tensor: Tensor, exponent: float) -> Tensor:
        if exponent == 0 or name not in self._rows:
            return tensor
        left, right = self._pair(name, exponent)
        matrix = right.apply(tensor.reshape(len(tensor), -1)) if tensor.ndim > 1 else tensor.reshape(-1, 1)
        return left.apply_left(matrix).reshape(tensor.shape)
