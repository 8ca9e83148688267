"""Gradients that are products of a layer's inputs and the gradients of its outputs, summed over tokens.

The two factors are kept, and an example's gradient is not computed where its norm follows from them. How norms and sums
are computed is chosen from shapes and the planned number of examples alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.forms.dense import MOST_AMPLIFIED, Dense, Sandwiched, amplification, stored_or_recomputed
from adadp.gradients.forms.factors import Factor, last_bit
from adadp.gradients.forms.half_precision import HalvedProducts, Halves, may_be_halved
from adadp.gradients.forms.per_example import DENSE_BYTES, PerExample, Side, both_moments, moments_room
from adadp.gradients.forms.scaled import Scaled, ScaledVectors
from adadp.gradients.forms.segments import SegmentRows
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import CANCELLED, MOST_WEIGHTED, Pair, Sums
from adadp.gradients.rounding import (
    accumulation_dtype,
    alike,
    bounded_factors,
    drop,
    largest_number,
    layout,
    norms,
    outer_norms,
    squares,
    unit_roundoff,
    weighted,
)


@dataclass(frozen=True)
class Costs:
    """Costs of the ways to compute norms and sums, in units of one multiplication of the product itself."""

    gram: float  # a multiplication in a Gram matrix, which is taken in float64
    short_gram: float  # the same in float32, where that is enough
    again: float  # a coordinate of a product that is computed for its norm alone
    stored: float  # a coordinate that is stored, measured and summed
    most_stored: float  # coordinates stored for each value of the factors


# Measured on a CPU (one thread, 32 examples of 16 to 256 tokens, 64 to 1024 rows and columns) and on an H200 (products
# at 420 TFLOP/s, float64 ones at an eighth of that, 2.7 TB/s). `lab/adadp_lab/bench/ways.py` shows what they choose.
COSTS = {
    "cpu": Costs(gram=3, short_gram=1.5, again=15, stored=25, most_stored=2),
    "cuda": Costs(gram=8, short_gram=8, again=400, stored=900, most_stored=2),
}
# Columns that a CPU multiplies at a time.
LANES = 16
# Few examples at a time: what is made of them stays in a CPU's cache.
GRAM_BYTES = 4 * 2**20


class Products(PerExample):
    """g_n = sum_t b_nt a_nt^T: every layer that multiplies tokens by a matrix.

    Args:
        inputs: a, [n, T, columns]; T = 1 for a layer on vectors.
        outputs: b, the gradients of the layer's outputs, [n, T, rows].
        shape: the parameter's shape, [rows, columns] if None.
        planned: see `PerExample`.
        whole: never cut the factors to half precision.
    """

    def __init__(
        self,
        inputs: Tensor,
        outputs: Tensor,
        shape: Sequence[int] | None = None,
        *,
        planned: int | None = None,
        whole: bool = False,
    ) -> None:
        dtype = accumulation_dtype(outputs.dtype)
        self.inputs, self.outputs = inputs.to(dtype), outputs.to(dtype)
        count, self.tokens, self.columns = self.inputs.shape
        self.rows = self.outputs.shape[2]
        super().__init__(count, (self.rows, self.columns) if shape is None else shape, planned)
        self._halves = not whole and may_be_halved(self.outputs, self.inputs)

    def joined(self, others: Sequence[PerExample]) -> PerExample | None:
        """Several calls of one layer: their tokens side by side give exactly the sum of their gradients."""
        parts = [self, *(part for part in others if isinstance(part, Products))]
        if len(parts) <= len(others):
            return None
        inputs = torch.cat([part.inputs for part in parts], 1)
        return self._of(inputs, torch.cat([part.outputs for part in parts], 1))

    def segmented(self, rows: SegmentRows) -> Products:
        # A segment's examples are more tokens: what holds for tokens that cancel holds for them.
        inputs, outputs = rows.folded(self.inputs), rows.shared(rows.folded(self.outputs))
        return Products(inputs, outputs, self.shape, planned=rows.segments.planned)

    def _of(self, inputs: Tensor, outputs: Tensor) -> Products:
        """Products of other factors, for the same parameter, examples and plan."""
        return Products(inputs, outputs, self.shape, planned=self.planned)

    def whole(self) -> Products:
        """The same, never cut to half precision."""
        return Products(self.inputs, self.outputs, self.shape, planned=self.planned, whole=True)

    @cached_property
    def _way(self) -> str:
        """The cheapest way to compute norms and a weighted sum.

        vectors: T = 1, |g| = |a| |b|. half: products in float16. gram: |g|^2 from the Gram matrices of a and b. again:
        products computed for their norms and not kept. stored: products computed once and kept, where they fit.
        """
        if self.tokens == 1:
            return "vectors"
        if self._halves:  # the fastest at all sizes
            return "half"
        cost = COSTS["cuda" if self.outputs.is_cuda else "cpu"]
        entries, factors = self.rows * self.columns, self.tokens * (self.rows + self.columns)
        product = self.tokens * entries
        ways = {
            "gram": product + (cost.short_gram if self._short_grams else cost.gram) * self.tokens * factors,
            "again": 2 * product + cost.again * entries,
        }
        # What is kept until all layers are measured stays of the order of what the backward pass keeps anyway.
        if self.fits(self.outputs.element_size()) and entries <= cost.most_stored * factors:
            ways["stored"] = product + cost.stored * entries
        return min(ways, key=lambda way: ways[way])

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return (self.outputs, self.inputs) if self._way in ("half", "vectors") else ()

    @cached_property
    def _stored(self) -> Dense:
        return Dense(self.dense(slice(0, self.count)), planned=self.planned)

    @cached_property
    def _halved(self) -> HalvedProducts:
        return self._cut()

    def _cut(self) -> HalvedProducts:
        return HalvedProducts(Halves([self.outputs], [self.inputs], [self.lengths], self.planned), 0, self)

    @property
    def halved(self) -> HalvedProducts | None:
        """These products cut to half precision, if that was done already."""
        found: HalvedProducts | None = vars(self).get("_halved")
        return found

    @classmethod
    def prepare(cls, forms: Sequence[Products], let_go: bool) -> None:
        """Cut those that are cut at all and were not yet."""
        waiting = [form for form in forms if form._way == "half" and form.halved is None]
        for some in alike(waiting, lambda form: (form.planned, layout(form.outputs), layout(form.inputs))):
            outputs, inputs = [form.outputs for form in some], [form.inputs for form in some]
            group = Halves(outputs, inputs, [form.lengths for form in some], some[0].planned)
            for place, form in enumerate(some):
                form._halved = HalvedProducts(group, place, form)
                if let_go:
                    del form.inputs, form.outputs  # twice as large as what was cut

    @property
    def norm_floor(self) -> Tensor | None:
        return CANCELLED * self.reach if self.tokens > 1 else None

    @cached_property
    def _squared_norms(self) -> Tensor:
        if self._way == "vectors":
            return self.vector_norms[2]
        if self._way == "half":
            return self._halved.squared_norms()
        floor = CANCELLED * self.reach
        if self._way == "stored":
            return torch.maximum(self._stored.squared_norms(), floor.square())
        if self._way == "gram":
            bound = self.gram_norms().sqrt() + self.rounding()
        else:
            bound = self._product_norms().sqrt() + self.rounding(products=2)
        return bounded_factors(torch.maximum(bound, floor).square(), *self.largest_factors)

    @cached_property
    def vector_norms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of a layer on vectors: the norms of each output gradient and input, and the squared ones of their products.

        Upper bounds, each of shape [n].
        """
        operands = self.norm_operands
        if operands is not None:
            inputs, outputs, squared, _ = outer_norms([operands]).unbind()
            return outputs, inputs, squared
        outputs, inputs = self.lengths
        squared = (outputs * inputs * (1 + 4 * unit_roundoff(self.outputs))).square()
        return outputs, inputs, bounded_factors(squared, torch.maximum(outputs, inputs))

    @property
    def norm_operands(self) -> Pair | None:
        on_cpu = self.tokens == 1 and self.outputs.is_cpu and self.outputs.dtype == torch.float32
        return (self.outputs[:, 0], self.inputs[:, 0]) if on_cpu else None

    @property
    def largest_factors(self) -> list[Tensor]:
        """The norms of each example's longest input and output gradient."""
        return [lengths.amax(1) for lengths in self._lengths if lengths.numel()]

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        """The norms of each token's input and output gradient, each of shape [n, T]."""
        shape = (self.count, self.tokens)
        return norms(self.inputs.flatten(0, 1)).view(shape), norms(self.outputs.flatten(0, 1)).view(shape)

    @cached_property
    def reach(self) -> Tensor:
        """sum_t |a_t| |b_t|: bounds every partial sum."""
        inputs, outputs = self._lengths
        return (inputs * outputs).sum(1)

    def rounding(self, products: int = 1) -> Tensor:
        """How far a weighted sum may be from the true one or, for two `products`, from another such sum."""
        # Where all terms are equal, each addition rounds the same way: the error grows with their number, not its root.
        allowance = (8 + products * self.tokens) * last_bit(self.outputs)
        return (allowance + 2 * unit_roundoff(self.outputs)) * self.reach

    def gram_norms(self) -> Tensor:
        """|sum_t b_t a_t^T|^2 = sum_{t,s} (a_t . a_s)(b_t . b_s), as a bound: tokens may cancel."""
        if not self._short_grams:
            return self.exact_gram_norms()
        inputs, outputs = self._lengths
        # What additions lose, and what products close to the smallest number lose, once more for the other factor.
        lost = (self.rows + self.columns + 8) * 1.02 * 2.0**-24 * self.reach.square()
        ends = self.rows * inputs.sum(1).square() + self.columns * outputs.sum(1).square() + self.tokens**2
        lost += 2.0**-125 * ends
        squared = _gram_norms(self.inputs, self.outputs)
        # Alone, as in `norms`: squares that may overflow, and those that are small beside what is lost.
        sure = (torch.maximum(*self.largest_factors) < 1e9) & (squared > 2.0**6 * lost)
        squared += lost
        if not bool(sure.all()):
            rest = (~sure).nonzero().squeeze(1)
            squared[rest] = self.exact_gram_norms(rest)
        return squared

    @cached_property
    def _short_grams(self) -> bool:
        """Whether Gram matrices may be in float32: it costs 0.4% of a norm whose tokens neither agree nor cancel."""
        known = not self.outputs.is_cuda and self.outputs.dtype == torch.float32
        some = self.inputs.numel() > 0 and self.outputs.numel() > 0
        return known and some and (self.rows + self.columns) * self.tokens <= 2.0**17

    def exact_gram_norms(self, examples: Tensor | slice = slice(None)) -> Tensor:
        """The same in float64, of some examples."""
        squared = _gram_norms(self.inputs[examples], self.outputs[examples], torch.float64)
        return squared + (self.rows + self.columns + self.tokens) * 2.0**-52 * self.reach[examples].square()

    def _product_norms(self) -> Tensor:
        """|sum_t b_t a_t^T|^2 of the products themselves, which are not kept."""
        squared: Tensor = kernel("products_norms", self.outputs)(self.outputs, self.inputs)
        return squared * (1 + 2.0**-30)  # they are summed in float64

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        if self._way == "stored":
            return self._stored.weighted_sum(weights, keep)
        if self._way == "half":
            return self._halved.weighted_sum(weights, keep)
        return self._weighted_product(weights, keep)

    def _weighted_product(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        if self.tokens == 1 and self.outputs.is_cpu and self.rows >= self.columns and self.columns % LANES:
            return self._weighted_vectors(weights, keep)
        if self.rows < self.columns:
            inputs, outputs = drop(self.inputs, keep), weighted(self.outputs, weights, keep)
        else:
            inputs, outputs = weighted(self.inputs, weights, keep), drop(self.outputs, keep)
        return (outputs.flatten(0, 1).T @ inputs.flatten(0, 1)).view(self.shape)

    def _weighted_vectors(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        """The same for T = 1, with columns padded to whole lanes; a column of the padding sums the bias's gradients."""
        wide = self.inputs.new_zeros(self.count, self.columns + -self.columns % LANES)
        wide[:, self.columns] = weights
        torch.mul(drop(self.inputs, keep)[:, 0], wide[:, self.columns, None], out=wide[:, : self.columns])
        sums = drop(self.outputs, keep)[:, 0].T @ wide
        self._bias_sum = weights, keep, sums[:, self.columns]
        return sums[:, : self.columns].reshape(self.shape)

    _bias_sum: tuple[Tensor, Tensor | None, Tensor] | None = None

    def bias_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor | None:
        """The weighted sum of the outputs alone, or None if the last `weighted_sum` did not compute it."""
        found, self._bias_sum = self._bias_sum, None
        return found[2] if found is not None and found[0] is weights and found[1] is keep else None

    def dense(self, examples: slice) -> Tensor:
        if self._way == "half":
            return self._halved.dense(examples)
        if self.tokens == 1:
            product = self.outputs[examples].mT * self.inputs[examples]
        else:
            product = self.outputs[examples].mT @ self.inputs[examples]
        return product.view(len(product), *self.shape)

    def scaled(self, scale: Tensor) -> PerExample:
        if self.tokens == 1:
            return ScaledVectors(self, self.inputs[:, 0], self.outputs[:, 0], scale.to(self.outputs.dtype))
        factor = scale.to(self.outputs.dtype)
        if self._halves:
            return self._halved.scaled(factor)
        if self.outputs.is_cuda:
            return Scaled(self, factor, lambda: self._scaled_norms(factor), self._weighted_product)
        floor = self.floor_times(factor.abs().amax())
        return stored_or_recomputed(lambda examples: self.dense(examples).mul_(factor), self, floor)

    def _scaled_norms(self, scale: Tensor) -> Tensor:
        """Squared norms of products multiplied elementwise, which are not kept; [n]."""
        matrix = scale.reshape(self.rows, self.columns)
        squared: Tensor = kernel("products_norms", self.outputs)(self.outputs, self.inputs, matrix)
        # No coordinate's error grows by more than the largest scale.
        largest = scale.abs().amax().double()
        bound = squared.sqrt() * (1 + 2.0**-22) + self.rounding(products=2) * largest
        return bounded_factors(torch.maximum(bound, CANCELLED * self.reach * largest).square(), *self.largest_factors)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        scale = None if self.tokens == 1 else left.times_columns(right, self.rows, self.columns)
        if self.outputs.is_cuda and scale is not None:
            return self.scaled(scale)
        if self.tokens != 1:
            return self._both_sides(left, right)
        amplified = amplification(self.outputs, left, right)
        # One matrix on both sides, in float64, or two vectors of each example.
        cheaper = 8 * self.rows * self.columns <= self.planned * (self.rows + self.columns)
        if not (cheaper and amplified <= MOST_AMPLIFIED):
            return self._of(right.apply(self.inputs), left.apply(self.outputs))

        def measure() -> Tensor:
            outputs, inputs, _ = self.vector_norms
            product = right.norms(self.inputs[:, 0], inputs) * left.norms(self.outputs[:, 0], outputs)
            return product * (1 + 4 * amplified)

        return Sandwiched(self, left, right, measure)

    def _both_sides(self, left: Factor, right: Factor) -> PerExample:
        """Multiply each token's two vectors; a number common to all of them is applied to the sum instead."""
        inputs, columns = right.apply_unscaled(self.inputs)
        outputs, rows = left.apply_unscaled(self.outputs)
        form = self._of(inputs, outputs)
        if columns is None and rows is None:
            return form
        scale = (1.0 if rows is None else rows) * (1.0 if columns is None else columns)
        assert isinstance(scale, Tensor)

        def measure() -> Tensor:
            itself = form.squared_norms()
            measured = itself * scale.double().square() * (1 + 8 * last_bit(outputs))
            return torch.where(itself <= 1e40 * measured, measured, math.inf)  # as of what is `Sandwiched`

        return Scaled(form, scale.expand(self.shape), measure, form.weighted_sum)

    def _square_sum(self, keep: Tensor) -> Tensor:
        if self._halves:
            return self._cut()._square_sum(keep)
        if self.tokens != 1:
            return super()._square_sum(keep)
        inputs, outputs = drop(self.inputs, keep)[:, 0], drop(self.outputs, keep)[:, 0]
        return (outputs.square().T @ inputs.square()).view(self.shape)

    def _full_moments(self, keep: Tensor, sides: Sequence[Side]) -> Sequence[Tensor]:
        if self.tokens == 1:
            return [self._vector_moments(keep, side) for side in sides]
        return self._token_moments(keep) if len(sides) == 2 else super()._full_moments(keep, sides)

    def _sides(self, side: Side) -> tuple[Tensor, Tensor]:
        """The factor that spans this side of the gradient, and the other one."""
        return (self.outputs, self.inputs) if side == "rows" else (self.inputs, self.outputs)

    def _vector_moments(self, keep: Tensor, side: Side) -> Tensor:
        """sum_n |a_n|^2 b_n b_n^T, or the same with a and b exchanged."""
        own, other = (drop(factor, keep) for factor in self._sides(side))
        return (own[:, 0] * squares(other).to(own.dtype).unsqueeze(1)).T @ own[:, 0]

    def _token_moments(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of rows and of columns, from gradients made once for both or from the tokens' inner products."""
        # Dropped before they are multiplied, and whole, though they may be cut elsewhere: no norm is taken of these.
        inputs, outputs = drop(self.inputs, keep), drop(self.outputs, keep)
        sides = self.rows + self.columns
        of_tokens = self.tokens * (self.rows**2 + self.columns**2 + self.tokens * sides)
        if inputs.numel() and outputs.numel() and of_tokens < self.rows * self.columns * (self.tokens + sides):
            # sum_n B^T A A^T B: where tokens are few, their inner products are less than the gradients. Both sides are
            # made alike in size first: squares of one of them could overflow where the gradients do not.
            balance = (outputs.abs().amax() / inputs.abs().amax()).sqrt().nan_to_num(1.0).clamp(1e-15, 1e15)
            inputs, outputs = inputs * balance, outputs / balance
            by_row = outputs.flatten(0, 1).T @ (inputs @ inputs.mT @ outputs).flatten(0, 1)
            return by_row, inputs.flatten(0, 1).T @ (outputs @ outputs.mT @ inputs).flatten(0, 1)
        step = max(1, moments_room(outputs) // max(1, 4 * self.rows * self.columns))
        parts = (slice(start, start + step) for start in range(0, max(1, self.count), step))
        return both_moments((outputs[part].mT @ inputs[part] for part in parts), (self.rows, self.columns))

    def vectors(self, keep: Tensor, side: Side) -> Tensor | None:
        if self.tokens != 1:
            return None
        own, other = (drop(factor, keep) for factor in self._sides(side))
        return own[:, 0] * norms(other).to(own.dtype).unsqueeze(1)

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        if self._halves:
            return self._cut()._clamped_sums(bound, scale, keep, moments)  # not kept: nothing comes after
        limit = bound.view(self.rows, self.columns).to(self.outputs.dtype)
        total, squares = self._whole_clamped_sums(limit, scale, keep, moments)
        return total.view(self.shape), None if squares is None else squares.view(self.shape)

    def _whole_clamped_sums(self, limit: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        inputs, outputs = drop(self.inputs, keep), drop(self.outputs, keep)
        if self.rows < self.columns:
            outputs = outputs * scale
        else:
            inputs = inputs * scale
        if self.tokens == 1:
            sums: Sums = kernel("outer_clamped", outputs)(outputs[:, 0], inputs[:, 0], limit, moments, self.planned)
        else:
            sums = kernel("products_clamped", outputs)(outputs, inputs, limit, moments)
        return sums

    def finite(self) -> Tensor:
        # Every partial sum of a product's coordinates is bounded by these norms: none needs to be made.
        if self.tokens == 1:
            return self.squared_norms().sqrt() < largest_number(self.outputs)
        if self._halves:
            outputs, inputs = self.lengths
            weighable = torch.maximum(outputs, inputs) < MOST_WEIGHTED
            return weighable & (outputs * inputs < torch.finfo(torch.float32).max / 2)
        return bounded_factors(self.reach, *self.largest_factors) < largest_number(self.outputs)


class Bias(Dense):
    """The bias beside a weight on vectors: its gradients are the weight's `outputs`, measured and summed with them.

    The sum is shared only if the weight's `weighted_sum` is called first, as `Gradients` does.
    """

    def __init__(self, weight: Products) -> None:
        super().__init__(weight.outputs[:, 0], planned=weight.planned)
        self._weight = weight

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return ()

    @cached_property
    def norms(self) -> Tensor:
        return self._weight.vector_norms[0]

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        found = self._weight.bias_sum(weights, keep)
        return super().weighted_sum(weights, keep) if found is None else found


def _gram_norms(inputs: Tensor, outputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """sum_{t,s} (a_t . a_s)(b_t . b_s) of inputs and outputs [n, T, ...], in `dtype`; [n], float64, not negative."""
    count, tokens = inputs.shape[:2]
    width = 8 if torch.float64 in (dtype, inputs.dtype) else 4
    room = DENSE_BYTES if outputs.is_cuda else GRAM_BYTES
    step = max(1, room // (width * max(1, tokens) * (inputs.shape[2] + outputs.shape[2] + 2 * tokens)))
    parts = []
    for start in range(0, count, step):
        a, b = (factor[start : start + step].to(dtype or factor.dtype) for factor in (inputs, outputs))
        parts.append((a @ a.mT).mul_(b @ b.mT).sum((1, 2), dtype=torch.float64))
    return torch.cat(parts).clamp_min(0) if parts else inputs.new_zeros(0, dtype=torch.float64)
