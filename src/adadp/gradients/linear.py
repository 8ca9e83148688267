"""nn.Linear, on vectors, sequences and anything with more dimensions; and matrix products inside other layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.layer import Layer, Taps, batch_first, no_batch, supports
from adadp.gradients.per_example import Dense, PerExample, Products


def tokens(tensor: Tensor) -> Tensor:
    """[n, ..., d] as [n, T, d]."""
    return tensor.flatten(1, -2) if tensor.ndim > 2 else tensor.unsqueeze(1)


@supports(nn.Linear)
class Linear(Layer):
    """y = x W^T + b: the gradient of W is a sum over tokens of outer products."""

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs = args[0] if args else kwargs["input"]
        if inputs.ndim < 2:
            raise no_batch(taps, module, inputs, "[n, features] or [n, ..., features]")
        return taps.tap(self, module, [output], [inputs], taps.batch_first)[0]

    def per_example(
        self,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Collection[str],
    ) -> Mapping[str, PerExample]:
        inputs = tokens(batch_first(saved[0], context, 3))
        outputs = tokens(batch_first(gradients[0], context, 3))
        forms: dict[str, PerExample] = {}
        if "weight" in wanted:
            forms["weight"] = Products(inputs, outputs)
        if "bias" in wanted:
            forms["bias"] = Dense(outputs[:, 0] if outputs.shape[1] == 1 else outputs.sum(1))
        return forms


@dataclass(frozen=True)
class _Projection:
    """Which parameters a product used, and which rows of them."""

    weight: str
    bias: str | None
    rows: slice
    height: int


class Projection(Layer):
    """A matrix product inside a larger layer (attention, recurrence), batch first."""

    def linear(
        self, taps: Taps, module: nn.Module, inputs: Tensor, weight: str, bias: str | None, rows: slice = slice(None)
    ) -> Tensor:
        """`inputs @ W[rows]^T + b[rows]` with the module's parameters of those names, tapped."""
        matrix = taps.alias(module, weight)
        offset = None if bias is None else taps.alias(module, bias)
        if matrix is None:
            raise KeyError(weight)
        output = F.linear(inputs, matrix[rows], None if offset is None else offset[rows])
        context = _Projection(weight, bias if offset is not None else None, rows, matrix.shape[0])
        return taps.tap(self, module, [output], [inputs], context)[0]

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return output  # the products inside were tapped one by one

    def per_example(
        self,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Collection[str],
    ) -> Mapping[str, PerExample]:
        inputs, outputs = tokens(saved[0]), tokens(gradients[0])
        if outputs.shape[2] != context.height:  # some rows only: the others' gradient is zero
            whole = torch.zeros(*outputs.shape[:2], context.height, dtype=outputs.dtype, device=outputs.device)
            whole[..., context.rows] = outputs
            outputs = whole
        forms: dict[str, PerExample] = {}
        if context.weight in wanted:
            forms[context.weight] = Products(inputs, outputs)
        if context.bias in wanted:
            forms[context.bias] = Dense(outputs.sum(1))
        return forms
