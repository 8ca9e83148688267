"""nn.Conv1d, Conv2d and Conv3d: stride, padding of every kind, dilation, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.forms.dense import (
    MOST_AMPLIFIED,
    Dense,
    between,
    recomputed,
    stored_or_recomputed,
    summed_by_segment,
)
from adadp.gradients.forms.factors import Factor, LowRank, last_bit
from adadp.gradients.forms.low_rank import TimesLowRank
from adadp.gradients.forms.per_example import DENSE_BYTES, PerExample
from adadp.gradients.forms.scaled import Scaled
from adadp.gradients.forms.segments import SegmentRows
from adadp.gradients.kernels import kernel
from adadp.gradients.kernels.reference import CANCELLED, Sums
from adadp.gradients.layers.layer import Layer, LayerCall, supports
from adadp.gradients.rounding import (
    TF32,
    accumulation_dtype,
    alike,
    bounded_factors,
    convolutions_are_cut,
    drop,
    full_precision,
    largest_number,
    layout,
    squares,
    unit_roundoff,
    weighted,
)

# Measured on CPUs. The native weight gradient of one example at a time wins where it has this many multiplications to
# do; below, the call itself costs more. Patches are copied in pieces that stay in the cache: large ones cost twice.
NATIVE_MULTIPLICATIONS = 2**24
PATCH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Geometry:
    """How a convolution's kernel moves over its input. `padding` is with zeros, the same on both sides."""

    weight: torch.Size  # [out, in / groups, *kernel]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> torch.Size:
        """The spatial part of the weight's shape."""
        return self.weight[2:]

    def weight_gradient(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The ordinary weight gradient, summed over examples, by torch's own kernel."""
        none = [0] * len(self.kernel)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            outputs, inputs, inputs.new_empty(self.weight), None, self.stride, self.padding, self.dilation,
            False, none, self.groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient

    def convolved(self, inputs: Tensor, kernels: Tensor) -> Tensor:
        """The convolution of inputs with kernels [k, in, *kernel]; for one group."""
        none = [0] * len(self.kernel)
        seen: Tensor = torch.ops.aten.convolution(
            inputs, kernels, None, self.stride, self.padding, self.dilation, False, none, 1
        )
        return seen

    def per_example(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The weight gradient of each example, shape [n, *weight]."""
        gradients = outputs.new_empty(len(inputs), *self.weight)
        places = math.prod(outputs.shape[2:])
        if not outputs.is_cuda and math.prod(self.weight) * places >= NATIVE_MULTIPLICATIONS:
            for example in range(len(inputs)):
                one = slice(example, example + 1)
                gradients[one] = self.weight_gradient(inputs[one], outputs[one])
            return gradients
        rows, columns = self.weight[0] // self.groups, math.prod(self.weight[1:])
        for piece in _pieces(len(inputs), self.groups * columns * places, outputs):
            patches = self.patches(inputs[piece], outputs.shape[2:])
            torch.bmm(
                outputs[piece].reshape(-1, rows, places),
                patches.reshape(-1, columns, places).mT,
                out=gradients[piece].view(-1, rows, columns),
            )
        return gradients

    def patches(self, inputs: Tensor, size: Sequence[int]) -> Tensor:
        """What the kernel sees at each of the `size` places, shape [n, channels, *kernel, *size]; a view."""
        padded = F.pad(inputs, [side for pad in reversed(self.padding) for side in (pad, pad)]).contiguous()
        steps = padded.stride()[2:]
        return padded.as_strided(
            (*padded.shape[:2], *self.kernel, *size),
            (
                *padded.stride()[:2],
                *(step * dilation for step, dilation in zip(steps, self.dilation, strict=True)),
                *(step * stride for step, stride in zip(steps, self.stride, strict=True)),
            ),
        )


def _pieces(count: int, patch_elements: int, like: Tensor) -> Iterator[slice]:
    limit = DENSE_BYTES if like.is_cuda else PATCH_BYTES
    step = max(1, limit // max(1, patch_elements * like.element_size()))
    return (slice(start, start + step) for start in range(0, count, step))


class Convolution(PerExample):
    """Gradients of a convolution's weight, from its inputs [n, in, *size] and output gradients [n, out, *size]."""

    def __init__(self, inputs: Tensor, outputs: Tensor, geometry: Geometry, *, planned: int | None = None) -> None:
        super().__init__(len(inputs), geometry.weight, planned)
        dtype = accumulation_dtype(outputs.dtype)
        self.inputs, self.outputs, self.geometry = inputs.to(dtype), outputs.to(dtype), geometry

    @property
    def _keeps(self) -> bool:
        # On a GPU a kernel measures them without making them, and the ordinary weight gradient sums them.
        return not self.outputs.is_cuda and self.fits(self.outputs.element_size())

    @property
    def _measured_as_it_is(self) -> bool:
        """By a kernel, without a copy of its factors."""
        return self.outputs.is_cuda and self.outputs.is_contiguous() and self.inputs.is_contiguous()

    @property
    def norm_floor(self) -> Tensor:
        return CANCELLED * self._reach

    @cached_property
    def _stored(self) -> Dense:
        return Dense(self.dense(slice(0, self.count)), self.norm_floor, planned=self.planned)

    @cached_property
    def _squared_norms(self) -> Tensor:
        if self._keeps:
            return self._stored.squared_norms()
        if self.outputs.is_cuda:
            return self._measured(None)
        measured = torch.cat([squares(gradients) for _, gradients in self.chunks()]).sqrt()
        bound = torch.maximum(measured + self._rounding * self._reach, self.norm_floor)
        return bounded_factors(bound.square(), *self.lengths)

    def _measured(self, scale: Tensor | None) -> Tensor:
        """Squared norms of gradients multiplied elementwise by `scale`, by a kernel that does not keep them; [n]."""
        lengths = self.lengths[0], self.lengths[1]
        return self._bounds([self.outputs], [self.inputs], lengths, scale)

    def _bounds(
        self, outputs: list[Tensor], inputs: list[Tensor], lengths: tuple[Tensor, Tensor], scale: Tensor | None
    ) -> Tensor:
        """The same of several such gradients, whose lengths follow each other; [parameters * n]."""
        squared: Tensor = kernel("convolution_bounds", self.outputs)(
            outputs, inputs, self.geometry, lengths, self._rounding, scale, self.planned
        )
        return squared

    @classmethod
    def prepare(cls, forms: Sequence[Convolution], let_go: bool) -> None:
        """Measure those that are measured by a kernel and were not yet; others would be copied, several at a time."""
        waiting = [form for form in forms if form._measured_as_it_is and "_squared_norms" not in vars(form)]
        for some in alike(waiting, lambda f: (f.geometry, f.planned, layout(f.outputs), layout(f.inputs))):
            left, right = (torch.cat(lengths) for lengths in zip(*(form.lengths for form in some), strict=True))
            outputs, inputs = [form.outputs for form in some], [form.inputs for form in some]
            squared = some[0]._bounds(outputs, inputs, (left, right), None)
            for form, own in zip(some, squared.view(len(some), -1).unbind(), strict=True):
                form._squared_norms = own

    @property
    def _rounding(self) -> float:
        """How far a weighted sum may be from the gradients that were measured, in units of `_reach`.

        The norm is taken of one product, the sum is another. Multiplications err by a multiple of sum_t |a_t| |b_t|
        over places t each, additions, which are in the full precision, by one that grows with their number. An input is
        seen from at most as many places as the kernel is large.
        """
        places = math.prod(self.outputs.shape[2:])
        added = (8 + 2 * places) * last_bit(self.outputs)
        multiplied = unit_roundoff(self.outputs)
        if self.outputs.is_cuda and self.outputs.dtype == torch.float32 and convolutions_are_cut():
            multiplied = TF32
        return added + 2 * multiplied

    @cached_property
    def _reach(self) -> Tensor:
        """Upper bounds on sum_t |a_t| |b_t| over places t; [n]."""
        outputs, inputs = self.lengths
        return inputs * outputs * math.sqrt(math.prod(self.geometry.kernel))

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self.outputs, self.inputs

    def segmented(self, rows: SegmentRows) -> PerExample:
        return summed_by_segment(self._stored if self._keeps else self, rows, self.norm_floor)

    def squared_norms(self) -> Tensor:
        return self._squared_norms

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        if self._keeps:
            return self._stored.weighted_sum(weights, keep)
        return self.geometry.weight_gradient(drop(self.inputs, keep), weighted(self.outputs, weights, keep))

    def dense(self, examples: slice) -> Tensor:
        return self.geometry.per_example(self.inputs[examples], self.outputs[examples])

    def _clamped_sums(self, bound: Tensor, scale: float, keep: Tensor, moments: bool) -> Sums:
        inputs, outputs = drop(self.inputs, keep), drop(self.outputs, keep) * scale
        sums: Sums = kernel("convolution_clamped", outputs)(
            outputs, inputs, self.geometry, bound.to(outputs.dtype), moments, self.planned
        )
        return sums

    def finite(self) -> Tensor:
        # A coordinate is a product of an input's and an output gradient's values, each once: Cauchy and Schwarz.
        outputs, inputs = self.lengths
        return bounded_factors(inputs * outputs, inputs, outputs) < largest_number(self.outputs)

    def scaled(self, scale: Tensor) -> PerExample:
        factor = scale.to(self.outputs.dtype)
        if self.outputs.is_cuda:
            return Scaled(self, factor, lambda: self._measured(factor.reshape(self.shape)), self.weighted_sum)
        floor = self.floor_times(factor.abs().amax())
        return stored_or_recomputed(lambda examples: self.dense(examples).mul_(factor), self, floor)

    def sandwiched(self, left: Factor, right: Factor) -> PerExample:
        scale = left.times_columns(right, *self.matrix)
        if self.outputs.is_cuda and scale is not None:
            return self.scaled(scale.reshape(self.shape))
        if self.geometry.groups > 1:
            kept = self._stored if self._keeps else recomputed(self.dense, self, self.norm_floor)
            return kept.sandwiched(left, right)
        # A row of the gradient is a channel of the outputs: there the factor has far less to multiply.
        outputs = left.apply_left(self.outputs.flatten(2)).reshape(self.outputs.shape)
        turned = Convolution(self.inputs, outputs, self.geometry, planned=self.planned)
        if self._keeps:
            return turned._stored.times(right)
        # As with what is `Sandwiched`, a sum's rounding errors must stay far below what one example may add.
        if self.outputs.is_cuda and isinstance(right, LowRank) and last_bit(outputs) * right.spread <= MOST_AMPLIFIED:
            return turned.along(right)
        floor = turned.floor_times(right.growth)
        return recomputed(lambda e: between(None, turned.dense(e), right, self.shape), self, floor)

    def along(self, right: LowRank) -> PerExample:
        """Gradients g R. g U = sum_t b_t (a_t . U) over places t; all a_t . U are a convolution with U as kernels."""

        def make() -> tuple[Tensor, Tensor]:
            kernels = right.basis.T.to(self.inputs.dtype)
            with full_precision():
                seen = self.geometry.convolved(self.inputs, kernels.reshape(-1, *self.shape[1:]))
                along = self.outputs.flatten(2) @ seen.flatten(2).mT
            # All bits, in two sums over the kernel and over places; libraries may transform the kernel in float32.
            places = seen[0, 0].numel() if len(seen) else 0
            made = (2.0**12 + self.matrix[1] + places + 16) * math.sqrt(len(kernels)) * last_bit(self.outputs)
            vanished = 2.0**-110 * (1 + sum(self.lengths))  # products close to the smallest number
            return along, (self._rounding + made) * self._reach + vanished

        return TimesLowRank(self, right, make)


@supports(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Layer):
    """A kernel that moves over its input: the gradient is a sum over places of outer products with patches."""

    defining: ClassVar[tuple[str, ...]] = ("forward", "_conv_forward")

    expected: ClassVar[str] = "[n, channels, ...]"
    repeatable: ClassVar[bool] = True

    def fewest_dimensions(self, module: nn.Module) -> int:
        return len(module.kernel_size) + 2  # type: ignore[arg-type]

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        (outputs,) = call.gradients
        forms: dict[str, PerExample] = {}
        if "weight" in call.wanted:
            forms["weight"] = _weight_form(call)
        if "bias" in call.wanted:
            summed = outputs.flatten(2).sum(2, dtype=accumulation_dtype(outputs.dtype))
            forms["bias"] = Dense(summed, planned=call.planned)
        return forms


def _weight_form(call: LayerCall) -> Convolution:
    module, (inputs,), (outputs,) = call.module, call.saved, call.gradients
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    sides: list[int] = module._reversed_padding_repeated_twice  # last dimension first, both its sides
    padding = tuple(reversed(sides[::2]))
    if module.padding_mode != "zeros" or sides[::2] != sides[1::2]:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs, padding = F.pad(inputs, sides, mode=mode), (0,) * len(padding)
    geometry = Geometry(module.weight.shape, module.stride, padding, module.dilation, module.groups)
    return Convolution(inputs, outputs, geometry, planned=call.planned)
