"""nn.Embedding and nn.EmbeddingBag: gradients that touch few rows of a large table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.factors import DiagonalFactor, Factor, Identity, LowRank, last_bit
from adadp.gradients.forms.low_rank import AlongDirections
from adadp.gradients.forms.per_example import (
    MOST_AMPLIFIED,
    PerExample,
    Recomputed,
    fits,
    merged,
    stored_or_recomputed,
)
from adadp.gradients.forms.products import Products
from adadp.gradients.kernels.reference import CANCELLED, Sums
from adadp.gradients.layers.layer import Layer, Taps, batch_first, no_batch, supports
from adadp.gradients.layers.linear import tokens
from adadp.gradients.rounding import (
    accumulation_dtype,
    bounded_factors,
    drop,
    full_precision,
    norms,
    squares,
    unit_roundoff,
)


class Rows(PerExample):
    """Gradients of a table [vocabulary, d], zero but for the rows that an example looked up.

    `ids` [n, T] are distinct within an example wherever `rows` [n, T, d] is not zero (see `summed`), so the norm of
    the rows is the norm of the gradient and what is added to a sum is what was measured.
    """

    def __init__(self, ids: Tensor, rows: Tensor, shape: Sequence[int]) -> None:
        self.ids, self.rows, self.shape = ids, rows, torch.Size(shape)
        self.count = len(ids)

    @classmethod
    def summed(cls, ids: Tensor, outputs: Tensor, shape: Sequence[int]) -> Rows:
        """From the output gradient at every place; those of a repeated id are added before any norm."""
        outputs = outputs.to(accumulation_dtype(outputs.dtype))
        if ids.shape[1] == 1:
            return cls(ids, outputs, shape)
        sorted_ids, order = ids.sort(dim=1, stable=True)
        new = torch.ones_like(sorted_ids)
        new[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
        segment = new.cumsum(1) - 1  # which distinct id of its example a place holds
        distinct = torch.zeros_like(ids).scatter_(1, segment, sorted_ids)
        places = torch.empty_like(segment).scatter_(1, order, segment)
        first = torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
        flat = torch.zeros_like(outputs).flatten(0, 1)
        flat.index_add_(0, (first + places).flatten(), outputs.flatten(0, 1))
        return cls(distinct, flat.view(outputs.shape), shape)

    def joined(self, others: Sequence[PerExample]) -> PerExample | None:
        """Several look-ups in one table are one look-up of all their ids; with products beside them, see `Tied`."""
        parts = [self, *(part for part in others if isinstance(part, Rows))]
        products = [part for part in others if isinstance(part, Products)]
        if len(parts) + len(products) <= len(others):
            return None
        ids, rows = torch.cat([part.ids for part in parts], 1), torch.cat([part.rows for part in parts], 1)
        together = Rows.summed(ids, rows, self.shape)
        if not products:
            return together
        if fits(self.count, self.shape, rows.element_size()):
            return None
        joined = merged(products)
        return Tied(together, joined) if isinstance(joined, Products) else None

    def squared_norms(self) -> Tensor:
        return squares(self.rows)

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
        return Rows(self.ids, self.rows * scale.to(self.rows.dtype)[self.ids], self.shape)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        turned = Rows(self.ids, right.apply(self.rows), self.shape)
        if isinstance(left, Identity):
            return turned
        if isinstance(left, DiagonalFactor):
            return Rows(self.ids, turned.rows * left.values.to(turned.rows.dtype)[self.ids].unsqueeze(2), self.shape)
        # A factor over the vocabulary mixes its rows: nothing sparse is left, but along a few directions.
        if isinstance(left, LowRank) and last_bit(turned.rows) * left.spread <= MOST_AMPLIFIED:
            return turned.along(left)
        return stored_or_recomputed(lambda e: left.apply_left(turned.dense(e)), self.count, self.shape)

    def along(self, left: LowRank) -> PerExample:
        """Gradients L g."""

        def make() -> tuple[Tensor, Tensor]:
            directions = left.basis.to(self.rows.dtype)[self.ids]  # [n, T, k]
            with full_precision():
                along = directions.mT @ self.rows
            # Looked-up rows of the basis are at most as long as it is, sqrt(k) and a little.
            size = 1.01 * math.sqrt(left.basis.shape[1])
            made = (self.ids.shape[1] + 16) * last_bit(self.rows) * size * norms(self.rows)
            return along, made + 2.0**-110

        return AlongDirections(self, left, make, on_left=True)

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        limit = bound[self.ids]
        return self._added(torch.clamp(drop(self.rows, keep) * scale, -limit, limit).nan_to_num_(nan=0.0)), None

    def finite(self) -> Tensor:
        return self.rows.flatten(1).isfinite().all(1)

    def _square_sum(self, keep: Tensor) -> Tensor:
        return self._added(drop(self.rows, keep).square())

    def column_moments(self, keep: Tensor) -> Tensor:
        rows = drop(self.rows, keep).flatten(0, 1)
        return rows.T @ rows

    def row_energy(self, keep: Tensor) -> Tensor:
        return self._added(drop(self.rows, keep).square().sum(2))

    def column_energy(self, keep: Tensor) -> Tensor:
        return drop(self.rows, keep).square().sum((0, 1))


class Tied(PerExample):
    """A table that is looked up and also multiplies, as tied input and output embeddings do: never made dense."""

    def __init__(self, rows: Rows, products: Products) -> None:
        # Whole: they are measured by their Gram matrices, together with the rows.
        self.rows, self.products = rows, Products(products.inputs, products.outputs, products.shape, whole=True)
        self.count, self.shape = rows.count, rows.shape

    @property
    def least(self) -> Tensor:
        return CANCELLED * (self.products.reach + norms(self.rows.rows))

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
        bound = torch.maximum(squared.sqrt() + rounding, self.least)
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
        return Recomputed(self.dense, self.count, self.shape, self.least).scaled(scale)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        return Recomputed(self.dense, self.count, self.shape, self.least).sandwiched(left, right)


def _refuse_options(module: nn.Module, name: str) -> None:
    """Refuse what touches weights or examples outside the private step."""
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


def _without_padding(module: nn.Embedding | nn.EmbeddingBag, ids: Tensor, outputs: Tensor) -> Tensor:
    if module.padding_idx is None:
        return outputs
    return outputs.masked_fill(ids.eq(module.padding_idx).unsqueeze(-1), 0)


@supports(nn.Embedding)
class Embedding(Layer):
    """One row of the table for each id."""

    def check(self, module: nn.Module, name: str) -> None:
        _refuse_options(module, name)

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        ids = args[0] if args else kwargs["input"]
        if ids.ndim < 1:
            raise no_batch(taps, module, ids, "[n] or [n, ...]")
        return taps.tap(self, module, [output], [ids], taps.batch_first)[0]

    def per_example(
        self,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Collection[str],
    ) -> Mapping[str, PerExample]:
        ids = batch_first(saved[0], context, 2).long()
        outputs = batch_first(gradients[0], context, 3)
        ids, outputs = tokens(ids.unsqueeze(-1)).squeeze(-1), tokens(outputs)
        assert isinstance(module, nn.Embedding)
        return {"weight": Rows.summed(ids, _without_padding(module, ids, outputs), module.weight.shape)}


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

    def per_example(
        self,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Collection[str],
    ) -> Mapping[str, PerExample]:
        assert isinstance(module, nn.EmbeddingBag)
        ids, outputs = saved[0].long(), gradients[0]
        each = outputs.unsqueeze(1).expand(-1, ids.shape[1], -1)
        if len(saved) > 1:
            each = each * saved[1].unsqueeze(2)
        if module.mode == "mean":
            size = torch.full_like(ids[:, 0], ids.shape[1])
            if module.padding_idx is not None:
                size = (ids != module.padding_idx).sum(1)
            each = each / size.clamp_min(1).view(-1, 1, 1)
        return {"weight": Rows.summed(ids, _without_padding(module, ids, each), module.weight.shape)}
