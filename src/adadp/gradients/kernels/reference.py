"""Every kernel in plain torch: what the others are compared with, and what runs where there is nothing better.

Work is done in chunks of examples, so that no more than `CHUNK_BYTES` of gradients exist at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adadp.gradients.layers.convolution import Geometry

CHUNK_BYTES = 64 * 2**20
MOST_ENTRIES = 2**31 - 2**16  # of one example, which kernels count in 32 bits
# When tokens cancel, the computed gradient sum_t b_t a_t^T is mostly rounding error, which clipping would scale up to
# the full bound, and which changes with the examples that are summed beside it. So no norm is taken below this part of
# sum_t |a_t| |b_t|. Few gradients that do not cancel are that small.
CANCELLED = 2.0**-8
MOST_ALIKE = 16  # tensors that one kernel works on
MOST_WEIGHTED = 1e32  # the norm of a factor that can still be weighted without overflowing


#: The public number of examples that a sum is planned for; their number if None. See `forms.per_example.PerExample`.
Plan = int | None

#: `sum_n clamp(g_n, +-bound)`, and `sum_n g_n^2` where that was asked for.
Sums = tuple[Tensor, Tensor | None]

#: The vectors b_n [n, rows] and a_n [n, columns] that gradients b_n a_n^T are made of; None for those that are b_n.
Pair = tuple[Tensor, Tensor | None]


class Float16Factor(NamedTuple):
    """A tensor [n, T, size] in float16: `values * unit`. Values may have more tokens and columns, which are zero."""

    values: Tensor
    unit: Tensor  # [n], float32: powers of two; zero for an example that was not finite
    norms: Tensor  # [n], float64: of the tensor itself, upper bounds
    size: int
    planned: Plan = None
    parameters: int = 1  # whose examples these are, one parameter's after the other's

    def of(self, parameter: int) -> Float16Factor:
        """One parameter's part."""
        count = len(self.unit) // self.parameters
        part = slice(parameter * count, (parameter + 1) * count)
        return Float16Factor(self.values[part], self.unit[part], self.norms[part], self.size, self.planned)


def outer_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False, planned: Plan = None) -> Sums:
    """Sums over g_n = b_n a_n^T for b [n, rows], a [n, columns], bound [rows, columns]."""
    return _clamped(lambda part: outputs[part, :, None] * inputs[part, None, :], len(outputs), bound, moments)


def outer_norms(pairs: Sequence[Pair], most: float) -> Tensor:
    """Rows |a_n|, |b_n| and |b_n a_n^T|^2 of each pair, the last infinite where one is `most`; then their sum."""
    rows, squares = [], []
    for outputs, inputs in pairs:
        b = row_norms(outputs)
        a, squared = torch.ones_like(b), b.square()
        if inputs is not None:
            a = row_norms(inputs)
            squared = torch.where(torch.maximum(a, b) < most, (a * b).square(), math.inf)
        rows += [a, b, squared]
        squares.append(squared)
    return torch.stack([*rows, torch.stack(squares).sum(0)])


def products_clamped(outputs: Tensor, inputs: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over g_n = sum_t b_nt a_nt^T for b [n, T, rows], a [n, T, columns], bound [rows, columns]."""
    return _clamped(lambda part: outputs[part].mT @ inputs[part], len(outputs), bound, moments)


def products_norms(outputs: Tensor, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of `sum_t b_nt a_nt^T`, multiplied elementwise by `scale` [rows, columns]; [n], float64."""
    return _norms(lambda part: outputs[part].mT @ inputs[part], len(outputs), outputs.shape[2] * inputs.shape[2], scale)


def halves(tensor: Tensor, norms: Tensor, planned: Plan = None) -> Float16Factor:
    """`tensor` [n, T, d] in float16, scaled by example so that the norm [n], at least each entry, is below 2^15.

    An example whose norm is not finite is zero.
    """
    known = norms.float()
    finite = known.isfinite()
    exponent = torch.frexp(torch.where(finite, known, 0.0).clamp_min(2.0**-126)).exponent.clamp_min(-111)
    unit = torch.ldexp(torch.ones_like(known), exponent - 15)
    values = torch.where(finite.view(-1, 1, 1), tensor.float() / unit.view(-1, 1, 1), 0.0)
    return Float16Factor(values.half(), torch.where(finite, unit, 0.0), norms, tensor.shape[2], planned)


def alike_halves(tensors: Sequence[Tensor], norms: Tensor, planned: Plan = None) -> Float16Factor:
    """Of tensors that are alike (see `alike_norms`), whose examples follow each other in `norms`."""
    return halves(torch.cat(list(tensors)), norms, planned)._replace(parameters=len(tensors))


def halves_bounds(
    outputs: Float16Factor, inputs: Float16Factor, rounding: float, scale: Tensor | None = None
) -> Tensor:
    """Upper bounds on |g_n * scale|^2 for each example, `scale` of [rows, columns]; [n], float64.

    Sums may be off by `rounding` times the product of both factors' norms. Where one of these is too large to be
    weighted, the bound is infinite (see `rounding.bounded_factors`).
    """
    largest = torch.ones_like(outputs.norms[:1]) if scale is None else scale.abs().amax().double()
    if scale is not None:  # squares of scaled entries then do not overflow either
        scale = torch.where(largest > 0, scale / largest.to(scale.dtype), 0.0)
    found = _norms(_halves_products(outputs, inputs), len(outputs.unit), outputs.size * inputs.size, scale)
    # Factors close to the smallest number may double where they are cut.
    reach = (outputs.norms + 2.0**-120) * (inputs.norms + 2.0**-120)
    unit = outputs.unit.double() * inputs.unit.double()
    bound = torch.maximum(found.sqrt() * unit * (1 + 2.0**-16) + rounding * reach, CANCELLED * reach) * largest
    return torch.where((outputs.norms < MOST_WEIGHTED) & (inputs.norms < MOST_WEIGHTED), bound.square(), math.inf)


def halves_sum(outputs: Float16Factor, inputs: Float16Factor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """`sum_n weights[n] g_n` over the kept examples; [rows, columns], of several parameters [parameters, ...]."""
    if outputs.parameters > 1:
        each = ((outputs.of(parameter), inputs.of(parameter)) for parameter in range(outputs.parameters))
        return torch.stack([halves_sum(*factors, weights, keep) for factors in each])
    make, factor = _halves_products(outputs, inputs), _halves_weights(outputs, inputs, weights, keep)
    total = torch.zeros(outputs.size, inputs.size, device=factor.device)
    for part in _chunks(len(factor), total.numel(), 4):
        total += (make(part) * factor[part]).sum(0)
    return total


def halves_dense(outputs: Float16Factor, inputs: Float16Factor, examples: slice) -> Tensor:
    """The products of some examples, [k, rows, columns]: what is measured, weighted and clamped.

    NaN for an example that was not finite, which shows nowhere else: it is zero in every sum.
    """
    units = _halves_weights(outputs, inputs, torch.ones_like(outputs.unit), None)
    lost = (outputs.unit == 0) | (inputs.unit == 0)
    units = torch.where(lost.view(-1, 1, 1), math.nan, units)
    return _halves_products(outputs, inputs)(examples) * units[examples]


def halves_clamped(
    outputs: Float16Factor, inputs: Float16Factor, scale: float, keep: Tensor, bound: Tensor, moments: bool = False
) -> Sums:
    """Clamped sums of `scale * g_n` over the kept examples; bound [rows, columns]."""
    weights = torch.full_like(outputs.unit, scale, dtype=torch.float64)
    make, factor = _halves_products(outputs, inputs), _halves_weights(outputs, inputs, weights, keep)
    return _clamped(lambda part: make(part) * factor[part], len(factor), bound, moments)


def _halves_weights(outputs: Float16Factor, inputs: Float16Factor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """Of the products of values, [n, 1, 1] in float32: never rounded up by more than a last bit, never infinite."""
    whole = weights.double() * outputs.unit.double() * inputs.unit.double()
    whole = torch.where(whole.abs() < 2.0**-126, 0.0, whole).clamp(-3e38, 3e38)
    return (whole if keep is None else torch.where(keep, whole, 0.0)).float().view(-1, 1, 1)


def _halves_products(outputs: Float16Factor, inputs: Float16Factor) -> Callable[[slice], Tensor]:
    """Of halves before anything else: those products lose nothing, however they are cut."""
    rows, columns = (factor.values[..., : factor.size] for factor in (outputs, inputs))
    return lambda part: rows[part].float().mT @ columns[part].float()


def dense_clamped(gradients: Tensor, bound: Tensor, moments: bool = False) -> Sums:
    """Sums over the gradients [n, *shape] of examples, bound of that shape."""
    return _clamped(lambda part: gradients[part], len(gradients), bound, moments)


def dense_norms(gradients: Tensor, scale: Tensor | None = None) -> Tensor:
    """Squared norms of gradients [n, ...], multiplied elementwise by `scale`; [n], float64."""
    return _norms(lambda part: gradients[part], len(gradients), math.prod(gradients.shape[1:]), scale)


def row_norms(tensor: Tensor) -> Tensor:
    """Norms of the rows of a matrix; [rows], float64."""
    measured: Tensor = torch.linalg.vector_norm(tensor, dim=1, dtype=torch.float64)
    return measured


def alike_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of rows of at most `MOST_ALIKE` matrices of one shape and with equal strides; [matrices, rows], float64."""
    return torch.stack([row_norms(tensor) for tensor in tensors])


def weighted(tensor: Tensor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Rows of `tensor` [n, ...] times their weight [n]; zero where weight or `keep` [n] is, whatever they hold."""
    weights = weights if keep is None else torch.where(keep != 0, weights, 0.0)
    spread = weights.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(spread != 0, tensor * spread, 0.0)


def kept(tensor: Tensor, keep: Tensor) -> Tensor:
    """Rows of `tensor` [n, ...] as they are where `keep` [n] is not zero; zero elsewhere, whatever they hold."""
    spread = keep.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(spread != 0, tensor, 0.0)


def group_norm_sums(outputs: Tensor, inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Each example's gradients of a group normalisation's weight and bias, [n, channels], from [n, channels, ...].

    They are the sums over places of output gradients times normalised inputs, and of output gradients.
    """
    products = outputs * torch.nn.functional.group_norm(inputs, groups, eps=eps)
    if inputs.ndim == 2:
        return products, outputs
    return products.flatten(2).sum(2), outputs.flatten(2).sum(2)


def layer_norm_sums(outputs: Tensor, inputs: Tensor, eps: float, planned: Plan = None) -> tuple[Tensor, Tensor]:
    """Each example's gradients of a layer normalisation's weight and bias, [n, d], from tensors [n, T, d].

    They are the sums over tokens of output gradients times normalised inputs, and of output gradients.
    """
    normalised = torch.nn.functional.layer_norm(inputs, inputs.shape[2:], eps=eps)
    return (outputs * normalised).sum(1), outputs.sum(1)


def convolution_clamped(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, bound: Tensor, moments: bool = False, planned: Plan = None
) -> Sums:
    """Sums over the gradients g_n of a convolution's weight; bound has the weight's shape."""
    return _clamped(lambda part: geometry.per_example(inputs[part], outputs[part]), len(outputs), bound, moments)


def convolution_norms(
    outputs: Tensor, inputs: Tensor, geometry: Geometry, scale: Tensor | None = None, planned: Plan = None
) -> Tensor:
    """Squared norms of the gradients of a convolution's weight, multiplied elementwise by `scale`; [n], float64."""
    size = math.prod(geometry.weight)
    return _norms(lambda part: geometry.per_example(inputs[part], outputs[part]), len(outputs), size, scale)


def convolution_bounds(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], geometry: Geometry, lengths: tuple[Tensor, Tensor],
    rounding: float, scale: Tensor | None = None, planned: Plan = None,
) -> Tensor:  # fmt: skip
    """Upper bounds on the squares that `convolution_norms` returns; [n], float64; of several, one's after the other's.

    Sums may be off by `rounding` times what bounds every partial sum: the product of the factors' norms, `lengths`,
    times the root of the number of places from which an input is seen. Infinite where a factor cannot be weighted.
    """
    pairs = zip(outputs, inputs, strict=True)
    squared = torch.cat([convolution_norms(*pair, geometry, scale, planned) for pair in pairs])
    largest = 1.0 if scale is None else scale.abs().amax().double()
    reach = lengths[0] * lengths[1] * math.sqrt(math.prod(geometry.kernel)) * largest
    bound = torch.maximum(squared.sqrt() * (1 + 2.0**-22) + rounding * reach, CANCELLED * reach)
    return torch.where((lengths[0] < MOST_WEIGHTED) & (lengths[1] < MOST_WEIGHTED), bound.square(), math.inf)


def _chunks(count: int, entries: int, element_size: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // max(1, entries * element_size))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _clamped(make: Callable[[slice], Tensor], count: int, bound: Tensor, moments: bool) -> Sums:
    total, squares = torch.zeros_like(bound), torch.zeros_like(bound) if moments else None
    for part in _chunks(count, bound.numel(), bound.element_size()):
        gradients = make(part)
        gradients = torch.where(gradients.isnan(), 0.0, gradients)
        if squares is not None:
            squares += gradients.square().sum(0)
        total += torch.clamp(gradients, -bound, bound).sum(0)
    return total, squares


def _norms(make: Callable[[slice], Tensor], count: int, entries: int, scale: Tensor | None) -> Tensor:
    found = []
    for part in _chunks(count, entries, 4):
        gradients = make(part) if scale is None else make(part) * scale
        found.append(torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=torch.float64).square())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
