"""nn.Linear, on vectors, sequences and anything with more dimensions; and matrix products inside other layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.forms.per_example import Dense, PerExample
from adadp.gradients.forms.products import Bias, Products
from adadp.gradients.layers.layer import Layer, Taps, batch_first, no_batch, supports


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
        weight = Products(inputs, outputs)
        forms: dict[str, PerExample] = {"weight": weight} if "weight" in wanted else {}
        if "bias" in wanted and weight.tokens == 1 and forms:
            forms["bias"] = Bias(weight)
        elif "bias" in wanted:
            forms["bias"] = Dense(outputs.sum(1))
        return forms


@dataclass(frozen=True)
class _Part:
    """Some rows of a parameter that a product used."""

    name: str
    rows: slice
    height: int

    def whole(self, gradients: Tensor) -> Tensor:
        """[..., rows used] with zeros for the rows that were not."""
        if gradients.shape[-1] == self.height:
            return gradients
        whole = gradients.new_zeros(*gradients.shape[:-1], self.height)
        whole[..., self.rows] = gradients
        return whole


class Projection(Layer):
    """Matrix products inside a larger layer (attention, recurrence), batch first."""

    def linear(
        self,
        taps: Taps,
        module: nn.Module,
        inputs: Tensor,
        weight: str,
        bias: str | None,
        rows: slice = slice(None),
        bias_rows: slice | None = None,
    ) -> Tensor:
        """`inputs @ W[rows]^T + b[bias_rows]` with the module's parameters of those names, tapped.

        A bias that the module does not have adds nothing; `bias_rows` are the weight's where not given.
        """
        matrix = taps.alias(module, weight)
        offset = None if bias is None else taps.alias(module, bias)
        if matrix is None:
            raise KeyError(weight)
        parts: list[_Part | None] = [_Part(weight, rows, len(matrix)), None]
        if bias is not None and offset is not None:
            bias_rows = rows if bias_rows is None else bias_rows
            parts[1] = _Part(bias, bias_rows, len(offset))
            offset = offset[bias_rows]
        used = [part.name for part in parts if part is not None]
        return taps.tap(self, module, [F.linear(inputs, matrix[rows], offset)], [inputs], parts, used)[0]

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
        weight, bias = context
        inputs, outputs = tokens(saved[0]), tokens(gradients[0])
        forms: dict[str, PerExample] = {}
        if weight.name in wanted:
            forms[weight.name] = Products(inputs, weight.whole(outputs))
        if bias is not None and bias.name in wanted:
            forms[bias.name] = Dense(bias.whole(outputs.sum(1)))
        return forms
