"""Operations of parameters and examples whose per-example gradients have a form: products, convolutions, tables, norms.

Their outputs are tapped, as those of layers are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.capture.operations import Broadcast, Meeting, NoRule, Operation, Rule, aligned, made, register
from adadp.gradients.capture.readings import FREE, Reading, of_rows
from adadp.gradients.capture.shared import Shared, back_to_origins
from adadp.gradients.capture.tap import unfolded
from adadp.gradients.forms.dense import Dense, merged
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.gradients.layers.embedding import Rows
from adadp.gradients.layers.layer import Layer, LayerCall
from adadp.gradients.layers.linear import tokens
from adadp.gradients.rounding import accumulation_dtype

# ---- products, convolutions, tables ------------------------------------------------------------------------------


class _Formed(Rule, Layer):
    """An operation whose gradients have a form: its output is tapped. `LayerCall.context` begins with `each`."""

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = self.inputs(operation)
        if isinstance(inputs, Shared) or not isinstance(inputs, Tensor) or inputs.ndim < 2:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    def alone(self, operation: Operation, meeting: Meeting) -> Any:
        reading = self.readings(operation)[0]
        if reading == FREE:  # nothing of the example came here
            raise NoRule
        return self.meet(operation, reading, meeting)

    @abstractmethod
    def inputs(self, operation: Operation) -> Any:
        """The argument that holds the examples."""

    def plain(self, operation: Operation) -> Any:
        """The result, without a way back to the parameters."""
        return operation.with_copies(lambda shared: shared.value.detach())


def gathered(parts: Sequence[tuple[Any, PerExample | None]]) -> Mapping[str, PerExample]:
    """The parameters' gradients, by name, from those of several shared values (what is not shared is left out)."""
    found: dict[str, list[PerExample]] = {}
    for shared, form in parts:
        if isinstance(shared, Shared) and form is not None:
            for name, part in back_to_origins(shared, form).items():
                found.setdefault(name, []).append(part)
    return {name: merged(forms) for name, forms in found.items()}


class _Linear(_Formed):
    """y = x W^T + b, of tokens."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        """W and b."""
        return operation.argument(1, "weight"), operation.argument(2, "bias")

    def form(self, inputs: Tensor, outputs: Tensor, planned: int | None) -> Products:
        """The gradients of W as it was given."""
        return Products(inputs, outputs, planned=planned)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        weight, bias = self.weights(operation)
        if isinstance(bias, Shared) and bias.value.ndim != 1:
            raise NoRule
        context = (reading[1], weight, bias)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [self.inputs(operation)], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, weight, bias = call.context
        inputs, outputs = (tokens(unfolded(part, each)) for part in (call.saved[0], call.gradients[0]))
        form = self.form(inputs, outputs, call.planned) if isinstance(weight, Shared) else None
        return gathered([(weight, form), (bias, Dense(outputs.sum(1), planned=call.planned))])


class _Matmul(_Linear):
    """y = x W: the weight as Hugging Face's Conv1D keeps it. Other products of matrices broadcast."""

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        return operation.args[1], None

    def form(self, inputs: Tensor, outputs: Tensor, planned: int | None) -> Products:
        return Products(outputs, inputs, planned=planned)

    def readings(self, operation: Operation) -> Sequence[Reading]:
        if self._vector(operation) is None and self._broadcasts(operation):
            return _MATRICES.readings(operation)
        return super().readings(operation)

    def alone(self, operation: Operation, meeting: Meeting) -> Any:
        if self._vector(operation) is None and self._broadcasts(operation):
            return _MATRICES.alone(operation, meeting)
        return super().alone(operation, meeting)

    def _vector(self, operation: Operation) -> Shared | None:
        """The second factor, if it is a shared vector: x @ v."""
        factor = operation.args[1] if operation.name in ("matmul", "__matmul__") else None
        return factor if isinstance(factor, Shared) and factor.value.ndim == 1 else None

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        vector, inputs = self._vector(operation), operation.args[0]
        if vector is not None:
            return (inputs * aligned(vector, meeting, inputs.ndim, reading[1])).sum(-1)
        if self._broadcasts(operation):
            return _MATRICES.meet(operation, reading, meeting)
        return super().meet(operation, reading, meeting)

    def _broadcasts(self, operation: Operation) -> bool:
        weight = operation.args[1]
        return not (isinstance(weight, Shared) and weight.value.ndim == 2 and operation.name != "bmm")


class _Addmm(_Matmul):
    """y = b + x W."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(1, "mat1")

    def weights(self, operation: Operation) -> tuple[Any, Any]:
        if operation.kwargs.get("beta", 1) != 1 or operation.kwargs.get("alpha", 1) != 1:
            raise NoRule
        return operation.argument(2, "mat2"), operation.argument(0, "input")

    def _broadcasts(self, operation: Operation) -> bool:
        return False


_MATRICES = Broadcast(least=2)
register(_Linear(), "linear")
register(_Matmul(), "matmul", "__matmul__", "mm", "bmm")
register(_Addmm(), "addmm")


class _Convolve(_Formed):
    """conv1d, conv2d and conv3d with zeros around."""

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = self.inputs(operation)
        if isinstance(inputs, Shared) or inputs.ndim != operation.argument(1, "weight").ndim:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        inputs, weight = self.inputs(operation), operation.argument(1, "weight")
        if reading[1] != 1:
            raise NoRule
        size = inputs.ndim - 2
        stride, padding, dilation = (
            operation.argument(place, name, default)
            for place, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        if isinstance(padding, str):
            raise NoRule
        stride, padding, dilation = (
            tuple(x) * (size // len(x)) if isinstance(x, Sequence) else (x,) * size for x in (stride, padding, dilation)
        )
        geometry = Geometry(weight.shape, stride, padding, dilation, operation.argument(6, "groups", 1))
        context = (geometry, weight, operation.argument(2, "bias"))
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [inputs], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        geometry, weight, bias = call.context
        outputs = call.gradients[0]
        form = None
        if isinstance(weight, Shared):
            form = Convolution(call.saved[0], outputs, geometry, planned=call.planned)
        summed = outputs.flatten(2).sum(2, dtype=accumulation_dtype(outputs.dtype))
        return gathered([(weight, form), (bias, Dense(summed, planned=call.planned))])


register(_Convolve(), "conv1d", "conv2d", "conv3d")


class _LookUp(_Formed):
    """Rows of a shared table, by ids that belong to the examples: F.embedding(ids, table), table[ids]."""

    def inputs(self, operation: Operation) -> Any:
        if operation.name == "embedding":
            return operation.argument(0, "input")
        return operation.args[1]

    def _table(self, operation: Operation) -> Shared:
        table = operation.argument(1, "weight") if operation.name == "embedding" else operation.args[0]
        options = (operation.argument(3, "max_norm"), operation.argument(5, "scale_grad_by_freq", False))
        if not isinstance(table, Shared) or (operation.name == "embedding" and (options[0] or options[1])):
            raise NoRule
        return table

    def readings(self, operation: Operation) -> Sequence[Reading]:
        ids, _ = self.inputs(operation), self._table(operation)
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not ids.ndim:
            if isinstance(ids, tuple | list):  # several indices: only those free of examples are known
                return [FREE]
            raise NoRule
        return of_rows(ids.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        table, ids = self._table(operation), self.inputs(operation)
        padding = operation.argument(2, "padding_idx") if operation.name == "embedding" else None
        context = (reading[1], table, padding)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [ids], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, table, padding = call.context
        ids, outputs = unfolded(call.saved[0].long(), each), unfolded(call.gradients[0], each)
        rest = table.value.shape[1:]
        outputs = outputs.reshape(len(ids), -1, rest.numel())
        ids = ids.reshape(len(ids), -1) % len(table.value)  # a negative one counts from the end
        if padding is not None:
            outputs = outputs.masked_fill(ids.eq(padding % len(table.value)).unsqueeze(-1), 0)
        rows = Rows.summed(ids, outputs, (len(table.value), rest.numel()), call.planned)
        if len(rest) == 1:
            return gathered([(table, rows)])
        whole = rows.dense(slice(0, rows.count)).reshape(rows.count, *table.value.shape)
        return gathered([(table, Dense(whole, planned=call.planned))])


register(_LookUp(), "embedding", "__getitem__")


# ---- norms and activations with parameters -----------------------------------------------------------------------


_NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}


class _Norm(_Formed):
    """A norm with its scale and shift: what each example adds to them is summed as the backward pass comes by."""

    small: ClassVar[bool] = True

    def inputs(self, operation: Operation) -> Any:
        return operation.argument(0, "input")

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        given = dict(zip(_NORMS[operation.name], operation.args, strict=False)) | operation.kwargs
        inputs, scale, shift = given.pop("input"), given.pop("weight", None), given.pop("bias", None)
        if isinstance(inputs, Shared):
            raise NoRule
        channels = operation.name == "group_norm"

        def normalised(of: Tensor) -> Tensor:
            result: Tensor = operation.function(of, **given)
            return result

        context = (reading[1], normalised, scale, shift, channels)
        return meeting.tap_shared(self, operation.shared, self.plain(operation), [inputs], context)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        each, normalised, scale, shift, channels = call.context
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))

        def summed(products: Tensor, value: Shared) -> Dense:
            if channels:  # [n, C, ...]
                products = products.flatten(2).sum(2) if products.ndim > 2 else products
            products = unfolded(products, each)
            places = tuple(range(1, products.ndim - value.value.ndim))
            return Dense(products.sum(places) if places else products, planned=call.planned)

        parts: list[tuple[Any, PerExample | None]] = []
        if isinstance(scale, Shared):
            parts.append((scale, summed(outputs * normalised(call.saved[0].to(outputs.dtype)), scale)))
        if isinstance(shift, Shared):
            parts.append((shift, summed(outputs, shift)))
        return gathered(parts)


register(_Norm(), *_NORMS)


class _Prelu(Rule):
    """prelu: a slope for negative values, one or one a channel."""

    def alone(self, operation: Operation, meeting: Meeting) -> Any:
        return self.meet(operation, self.readings(operation)[0], meeting)

    def readings(self, operation: Operation) -> Sequence[Reading]:
        inputs = operation.argument(0, "input")
        if isinstance(inputs, Shared) or inputs.ndim < 2:
            raise NoRule
        return of_rows(inputs.shape[0], operation.count)

    def meet(self, operation: Operation, reading: Reading, meeting: Meeting) -> Any:
        inputs, slope = operation.argument(0, "input"), operation.argument(1, "weight")
        if not isinstance(slope, Shared):
            raise NoRule
        slope = made(slope, slope.traced().view(-1, *[1] * (inputs.ndim - 2)))
        return F.relu(inputs) - F.relu(-inputs) * aligned(slope, meeting, inputs.ndim, reading[1])


register(_Prelu(), "prelu")
