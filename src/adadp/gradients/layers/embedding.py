"""nn.Embedding and nn.EmbeddingBag: gradients that touch few rows of a large table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import MOST_AMPLIFIED, cancelled, merged, recomputed, stored_or_recomputed
from adadp.gradients.forms.factors import DiagonalFactor, Factor, Identity, LowRank, last_bit
from adadp.gradients.forms.low_rank import TimesLowRank
from adadp.gradients.forms.per_example import PerExample, Side
from adadp.gradients.forms.products import Products
from adadp.gradients.forms.segments import SegmentRows
from adadp.gradients.kernels.reference import CANCELLED, Sums
from adadp.gradients.layers.layer import Layer, LayerCall, Taps, batch_first, supports
from adadp.gradients.layers.linear import tokens
from adadp.gradients.rounding import (
    accumulation_dtype,
    bounded_factors,
    drop,
    full_precision,
    unit_roundoff,
)


class Rows(PerExample):
    """Gradients of a table [vocabulary, d], zero but for the rows that an example looked up.

    Args:
        ids: [n, T], distinct within an example wherever `rows` is not zero (see `summed`): the norm of the rows is then
            the norm of the gradient, and exactly what is measured is added to a sum.
        rows: [n, T, d].
        shape, planned: see `PerExample`.
        floor: `norm_floor`, [n].
    """

    def __init__(
        self, ids: Tensor, rows: Tensor, shape: Sequence[int], planned: int | None = None, floor: Tensor | None = None
    ) -> None:
        super().__init__(len(ids), shape, planned)
        self.ids, self.rows, self._floor = ids, rows, floor

    @property
    def norm_floor(self) -> Tensor | None:
        return self._floor

    @classmethod
    def summed(cls, ids: Tensor, outputs: Tensor, shape: Sequence[int], planned: int | None = None) -> Rows:
        """From the output gradient at every place; those of a repeated id are added before any norm."""
        outputs = outputs.to(accumulation_dtype(outputs.dtype))
        if ids.shape[1] == 1:
            return cls(ids, outputs, shape, planned)
        sorted_ids, order = ids.sort(dim=1, stable=True)
        new = torch.ones_like(sorted_ids)
        new[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
        segment = new.cumsum(1) - 1  # which distinct id of its example a place holds
        distinct = torch.zeros_like(ids).scatter_(1, segment, sorted_ids)
        places = torch.empty_like(segment).scatter_(1, order, segment)
        first = torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
        flat = torch.zeros_like(outputs).flatten(0, 1)
        flat.index_add_(0, (first + places).flatten(), outputs.flatten(0, 1))
        return cls(distinct, flat.view(outputs.shape), shape, planned)

    def _with(self, rows: Tensor, growth: float | Tensor) -> Rows:
        """Other rows in the same places, no longer than `growth` times these."""
        return Rows(self.ids, rows, self.shape, self.planned, self.floor_times(growth))

    def joined(self, others: Sequence[PerExample]) -> PerExample | None:
        """Several look-ups in one table are one look-up of all their ids; with products beside them, see `Tied`."""
        parts = [self, *(part for part in others if isinstance(part, Rows))]
        products = [part for part in others if isinstance(part, Products)]
        if len(parts) + len(products) <= len(others):
            return None
        ids, rows = torch.cat([part.ids for part in parts], 1), torch.cat([part.rows for part in parts], 1)
        together = Rows.summed(ids, rows, self.shape, self.planned)
        if not products:
            return together
        if self.fits(rows.element_size()):
            return None
        joined = merged(products)
        return Tied(together, joined) if isinstance(joined, Products) else None

    def segmented(self, rows: SegmentRows) -> Rows:
        looked_up = rows.shared(rows.folded(self.rows))
        found = Rows.summed(rows.folded(self.ids), looked_up, self.shape, rows.segments.planned)
        found._floor = rows.shared(rows.summed(cancelled(self)))
        return found

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return (self.rows,)

    def squared_norms(self) -> Tensor:
        lengths = self.lengths[0]
        return (lengths if self._floor is None else torch.maximum(lengths, self._floor)).square()

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return self._added(drop(self.rows, keep) * weights.to(self.rows.dtype).view(-1, 1, 1))

    def _added(self, rows: Tensor) -> Tensor:
        """The table that receives all these rows, [vocabulary, ...]."""
        table = rows.new_zeros(self.shape[0], *rows.shape[2:])
        return table.index_add_(0, self.ids.flatten(), rows.flatten(0, 1))

    def dense(self, examples: slice) -> Tensor:
        ids, rows = self.ids[examples], self.rows[examples]
        gradients = rows.new_zeros(len(ids), *self.shape)
        return gradients.scatter_add_(1, ids.unsqueeze(2).expand_as(rows), rows)

    def scaled(self, scale: Tensor) -> Rows:
        return self._with(self.rows * scale.to(self.rows.dtype)[self.ids], scale.abs().amax())

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        turned = self._with(right.apply(self.rows), right.growth)
        if isinstance(left, Identity):
            return turned
        if isinstance(left, DiagonalFactor):
            return turned._with(turned.rows * left.values.to(turned.rows.dtype)[self.ids].unsqueeze(2), left.growth)
        # A factor over the vocabulary mixes its rows: nothing sparse is left, but along a few directions.
        if isinstance(left, LowRank) and last_bit(turned.rows) * left.spread <= MOST_AMPLIFIED:
            return turned.along(left)
        floor = turned.floor_times(left.growth)
        return stored_or_recomputed(lambda e: left.apply_left(turned.dense(e)), self, floor)

    def along(self, left: LowRank) -> PerExample:
        """Gradients L g."""

        def make() -> tuple[Tensor, Tensor]:
            directions = left.basis.to(self.rows.dtype)[self.ids]  # [n, T, k]
            with full_precision():
                along = directions.mT @ self.rows
            # Looked-up rows of the basis are at most as long as it is, sqrt(k) and a little.
            size = 1.01 * math.sqrt(left.basis.shape[1])
            made = (self.ids.shape[1] + 16) * last_bit(self.rows) * size * self.lengths[0]
            return along, made + 2.0**-110

        return TimesLowRank(self, left, make, on_left=True)

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        limit = bound[self.ids]
        return self._added(torch.clamp(drop(self.rows, keep) * scale, -limit, limit).nan_to_num_(nan=0.0)), None

    def finite(self) -> Tensor:
        return self.rows.flatten(1).isfinite().all(1)

    def _square_sum(self, keep: Tensor) -> Tensor:
        return self._added(drop(self.rows, keep).square())

    def _full_moments(self, keep: Tensor, sides: Sequence[Side]) -> Sequence[Tensor]:
        if list(sides) != ["columns"]:
            return super()._full_moments(keep, sides)
        rows = drop(self.rows, keep).flatten(0, 1)
        return [rows.T @ rows]

    def _diagonal_moments(self, keep: Tensor, sides: Sequence[Side]) -> Sequence[Tensor]:
        squares = drop(self.rows, keep).square()
        return [self._added(squares.sum(2)) if side == "rows" else squares.sum((0, 1)) for side in sides]


class Tied(PerExample):
    """The sum of look-ups in a table and products with it (tied input and output embeddings), never made dense."""

    def __init__(self, rows: Rows, products: Products) -> None:
        super().__init__(rows.count, rows.shape, rows.planned)
        # Whole: they are measured by their Gram matrices, together with the rows.
        self.rows, self.products = rows, products.whole()

    @property
    def norm_floor(self) -> Tensor:
        floor = CANCELLED * (self.products.reach + self.rows.lengths[0])
        return floor if self.rows.norm_floor is None else torch.maximum(floor, self.rows.norm_floor)

    def segmented(self, rows: SegmentRows) -> Tied:
        return Tied(self.rows.segmented(rows), self.products.segmented(rows))

    @cached_property
    def _squared_norms(self) -> Tensor:
        rows, inputs = self.rows.rows.double(), self.products.inputs.double()
        places = self.rows.ids.unsqueeze(1).expand(-1, self.products.tokens, -1)
        looked_up = self.products.outputs.gather(2, places).double()  # [n, token, look-up]
        cross = (looked_up * (inputs @ rows.mT)).sum((1, 2))  # <rows, products>, summed over both
        length: Tensor = rows.square().sum((1, 2)).sqrt()  # in float64, for the parts may cancel
        squared = length.square() + self.products.exact_gram_norms() + 2 * cross
        squared = squared.clamp_min(0) + rows.shape[1] * 2.0**-50 * (length + self.products.reach).square()
        rounding = self.products.rounding() + unit_roundoff(self.products.outputs) * 4 * length
        bound = torch.maximum(squared.sqrt() + rounding, self.norm_floor)
        return bounded_factors(bound.square(), *self.products.largest_factors)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return self.products.weighted_sum(weights, keep) + self.rows.weighted_sum(weights, keep)

    def dense(self, examples: slice) -> Tensor:
        return self.products.dense(examples) + self.rows.dense(examples)

    def finite(self) -> Tensor:
        return self.squared_norms().isfinite()

    def scaled(self, scale: Tensor) -> PerExample:
        return recomputed(self.dense, self, self.norm_floor).scaled(scale)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return recomputed(self.dense, self, self.norm_floor).sandwiched(left, right)


def _refuse_options(module: nn.Module, name: str) -> None:
    """Refuse options that change weights without noise, or let one example change another's gradient."""
    if module.max_norm is not None:
        raise UnsupportedModuleError(
            f"{name}: max_norm rescales the rows that a batch looks up, in place and without noise: which rows were "
            "looked up could be read off the weights. Use max_norm=None."
        )
    if module.scale_grad_by_freq:
        raise UnsupportedModuleError(
            f"{name}: scale_grad_by_freq divides an example's gradient by how often others of its batch use the same "
            "id. Use scale_grad_by_freq=False."
        )


def _weight_form(call: LayerCall, ids: Tensor, outputs: Tensor) -> dict[str, PerExample]:
    """The table's gradients, from ids [n, T] and the output gradient [n, T, d] at each of them; padding has none."""
    module = call.module
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if module.padding_idx is not None:
        outputs = outputs.masked_fill(ids.eq(module.padding_idx).unsqueeze(-1), 0)
    return {"weight": Rows.summed(ids, outputs, module.weight.shape, call.planned)}


@supports(nn.Embedding)
class Embedding(Layer):
    """One row of the table for each id."""

    expected: ClassVar[str] = "[n] or [n, ...]"
    tokenwise: ClassVar[bool] = True

    def check(self, module: nn.Module, name: str) -> None:
        _refuse_options(module, name)

    def fewest_dimensions(self, module: nn.Module) -> int:
        return 1

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        ids = batch_first(call.saved[0], call.context, 2).long()
        outputs = batch_first(call.gradients[0], call.context, 3)
        return _weight_form(call, tokens(ids.unsqueeze(-1)).squeeze(-1), tokens(outputs))


@supports(nn.EmbeddingBag)
class EmbeddingBag(Layer):
    """The sum or mean of the rows of a bag, each bag one example."""

    def check(self, module: nn.Module, name: str) -> None:
        _refuse_options(module, name)
        if module.mode == "max":
            raise UnsupportedModuleError(
                f"{name}: per-example gradients of mode='max' are not known. Use 'mean' or 'sum'."
            )

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        ids, factors = given["input"], given.get("per_sample_weights")
        if ids.ndim != 2:
            raise UnsupportedModuleError(
                f"{taps.module_name(module)}: bags given by offsets are not supported. Pad them to one length, with "
                "padding_idx=, and pass ids of shape [n, length]."
            )
        return taps.tap(self, module, [output], [ids] if factors is None else [ids, factors])[0]

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        module, ids = call.module, call.saved[0].long()
        assert isinstance(module, nn.EmbeddingBag)
        each = call.gradients[0].unsqueeze(1).expand(-1, ids.shape[1], -1)
        if len(call.saved) > 1:
            each = each * call.saved[1].unsqueeze(2)
        if module.mode == "mean":
            size = torch.full_like(ids[:, 0], ids.shape[1])
            if module.padding_idx is not None:
                size = (ids != module.padding_idx).sum(1)
            each = each / size.clamp_min(1).view(-1, 1, 1)
        return _weight_form(call, ids, each)
