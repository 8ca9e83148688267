"""nn.Linear on inputs of any number of dimensions, and the matrix products inside other layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Bias, Products
from adadp.gradients.layers.layer import Layer, LayerCall, Taps, batch_first, supports


def tokens(tensor: Tensor) -> Tensor:
    """[n, ..., d] as [n, T, d]."""
    return tensor.flatten(1, -2) if tensor.ndim > 2 else tensor.unsqueeze(1)


@supports(nn.Linear)
class Linear(Layer):
    """y = x W^T + b: the gradient of W is a sum over tokens of outer products."""

    expected: ClassVar[str] = "[n, features] or [n, ..., features]"
    tokenwise: ClassVar[bool] = True

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        inputs = tokens(batch_first(call.saved[0], call.context, 3))
        outputs = tokens(batch_first(call.gradients[0], call.context, 3))
        weight = Products(inputs, outputs, planned=call.planned)
        forms: dict[str, PerExample] = {"weight": weight} if "weight" in call.wanted else {}
        if "bias" in call.wanted and weight.tokens == 1 and forms:
            forms["bias"] = Bias(weight)
        elif "bias" in call.wanted:
            forms["bias"] = Dense(outputs.sum(1), planned=call.planned)
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

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        weight, bias = call.context
        inputs, outputs = tokens(call.saved[0]), tokens(call.gradients[0])
        forms: dict[str, PerExample] = {}
        if weight.name in call.wanted:
            forms[weight.name] = Products(inputs, weight.whole(outputs), planned=call.planned)
        if bias is not None and bias.name in call.wanted:
            forms[bias.name] = Dense(bias.whole(outputs.sum(1)), planned=call.planned)
        return forms
