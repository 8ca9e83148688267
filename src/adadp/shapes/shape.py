"""How large the gradient is in each direction of a parameter: its second moments, and their powers.

A shape is used twice in a step: each example's gradient is multiplied by S^-before, bounded and noised there, and the
release is multiplied by S^-after. Where its moments come from, and at what price, is the business of a *source*
(`adadp.shapes.sources`). Until a shape has learnt a parameter, it leaves that parameter alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.forms.factors import IDENTITY, Factor
from adadp.gradients.forms.per_example import Detail, PerExample, Side
from adadp.shapes.spectrum import Moments, Spectrum, powers, spectra

Statistics = dict[str, Tensor]
THIN = " vectors"


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

    def thin_statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        """The same, or what they are cheaply had from: vectors [k, d] in place of the sum of their outer products.

        Those have a name that ends in THIN, and are added by putting them side by side.
        """
        return self.statistics(form, keep)

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

    def learn(self, name: str, statistics: Mapping[str, Tensor]) -> None:
        """Take these second moments as the parameter's shape from now on."""
        self.learn_all({name: statistics})

    @abstractmethod
    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The same for many parameters at once: most are small, and a GPU would wait for Python at each of them.

        Those of their powers that were needed before are made anew: the next lot needs them.
        """

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
        self._powers: dict[tuple[str, float], Tensor] = {}  # made where they are first needed

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

    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        if statistics:
            squares = torch._foreach_clamp_min([found["square"] for found in statistics.values()], 0)
            self._squares |= zip(statistics, squares, strict=True)
            self._make([key for key in self._powers if key[0] in statistics])

    def _make(self, keys: Sequence[tuple[str, float]]) -> None:
        """The moments, scaled to mean 1 and damped, raised to exponents."""
        if keys:
            squares = [self._squares[name] for name, _ in keys]
            means = [square.mean().clamp_min(torch.finfo(square.dtype).tiny) for square in squares]
            scaled = torch._foreach_div(squares, means)
            torch._foreach_add_(scaled, self.damping)
            self._powers |= zip(keys, torch._foreach_pow(scaled, [exponent for _, exponent in keys]), strict=True)

    def _power(self, name: str, exponent: float) -> Tensor:
        key = (name, exponent)
        if key not in self._powers:
            self._make([key])
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
        return form.moments(keep, self._details(form))

    def _details(self, form: PerExample) -> dict[Side, Detail]:
        """How much of each side's moments is learnt."""
        rows, columns = form.matrix
        return {
            "rows": "full" if self._full(rows) else "diagonal",
            "columns": "full" if self._full(columns) else "diagonal",
        }

    def thin_statistics(self, form: PerExample, keep: Tensor) -> Statistics:
        if len(form.shape) < 2:
            return self.statistics(form, keep)
        found: Statistics = {}
        details = self._details(form)
        for side, size in zip(list(details), form.matrix, strict=True):
            vectors = form.vectors(keep, side) if self._low_rank(size) else None
            if vectors is not None:
                found[side + THIN] = vectors
                del details[side]
        return {**found, **form.moments(keep, details)}

    def _low_rank(self, size: int) -> bool:
        return bool(self.rank) and self._full(size) and size > 2 * (self.rank or 0)

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

    def learn_all(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        places: list[tuple[dict[str, Spectrum], str]] = []
        moments: list[Moments] = []
        for side, store in (("rows", self._rows), ("columns", self._columns)):
            for name, found in statistics.items():
                for kind in ("", THIN):
                    if side + kind in found:
                        start = store[name].basis if name in store else None
                        places.append((store, name))
                        moments.append(Moments(found[side + kind], bool(kind), start))
        for (store, name), spectrum in zip(places, spectra(moments, self.damping, self.rank or None), strict=True):
            store[name] = spectrum
        self._make([key for key in self._powers if key[0] in statistics])

    def _make(self, keys: Sequence[tuple[str, float]]) -> None:
        """The factors of parameters raised to exponents."""
        sides = [[store[name] for store in (self._rows, self._columns) if name in store] for name, _ in keys]
        made = iter(powers([(side, key[1]) for key, both in zip(keys, sides, strict=True) for side in both]))
        for key, both in zip(keys, sides, strict=True):
            self._powers[key] = next(made), next(made) if len(both) > 1 else IDENTITY

    def _pair(self, name: str, exponent: float) -> tuple[Factor, Factor]:
        key = (name, exponent)
        if key not in self._powers:
            self._make([key])
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
