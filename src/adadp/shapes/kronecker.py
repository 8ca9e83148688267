"""A factor for the rows of a parameter's gradient and one for its columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.forms.factors import IDENTITY, Factor
from adadp.gradients.forms.per_example import Detail, PerExample, Side
from adadp.shapes.diagonal import Diagonal
from adadp.shapes.shape import THIN, Shape, Statistics
from adadp.shapes.spectrum import Moments, Spectrum, diagonal_of_power, powers, spectra


class Kronecker(Shape):
    """A factor for the rows of a parameter's gradient and one for its columns: S^-p g = L^-p g R^-p.

    A parameter of more than two dimensions is a matrix of its first dimension by the rest; a vector or a single number
    has rows only, with a diagonal factor.

    Args:
        before: exponent for gradients before they are bounded.
        after: exponent for the release.
        damping: added to eigenvalues, which are scaled to mean 1.
        rank: factors of up to `2 * rank` directions are full; larger ones keep `rank` directions and a multiple of the
            identity. 0 makes every factor diagonal (one scale per row and one per column), None makes all full.
        widest: factors of more directions are diagonal.

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
        """Raise the factors of parameters to exponents."""
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

    def deviations(self, name: str, like: Tensor, exponent: float) -> float | Tensor:
        if exponent == 0 or name not in self._rows:
            return 1.0
        # The coordinate (i, j) of A Z B, for symmetric A and B, has variance (A^2)_ii (B^2)_jj.
        variances = diagonal_of_power(self._rows[name], 2 * exponent)
        if name in self._columns:
            variances = variances[:, None] * diagonal_of_power(self._columns[name], 2 * exponent)
        return variances.sqrt().reshape(like.shape)
