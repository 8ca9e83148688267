"""Normalisation within one example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.kernels import kernel
from adadp.gradients.layers.layer import Layer, LayerCall, batch_first, supports
from adadp.gradients.rounding import accumulation_dtype


class _Affine(Layer):
    """y = normalised(x) * weight + bias: one number for each of an example's many."""

    small: ClassVar[bool] = True
    expected: ClassVar[str] = "the examples in its first dimension"

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))
        products = {}
        if "weight" in call.wanted:
            products["weight"] = outputs * self.normalised(call.module, call.saved[0].to(outputs.dtype))
        if "bias" in call.wanted:
            products["bias"] = outputs
        return {
            own: Dense(self.summed(call.module, product, call.context), planned=call.planned)
            for own, product in products.items()
        }

    @abstractmethod
    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """What the module multiplies by its weight."""

    @abstractmethod
    def summed(self, module: nn.Module, products: Tensor, examples_first: bool) -> Tensor:
        """The sum over everything that shares an entry of the weight, within each example."""


def _named(call: LayerCall, sums: tuple[Tensor, Tensor], shape: Sequence[int]) -> dict[str, PerExample]:
    """The gradients of a weight and a bias of this shape, those of them that are wanted."""
    named = zip(("weight", "bias"), sums, strict=True)
    return {own: Dense(total.view(-1, *shape), planned=call.planned) for own, total in named if own in call.wanted}


class _OverLastDimensions(_Affine):
    """Each token is normalised over its features; the weight has the features' shape."""

    tokenwise: ClassVar[bool] = True

    def fewest_dimensions(self, module: nn.Module) -> int:
        return len(module.normalized_shape) + 1  # type: ignore[arg-type]

    def summed(self, module: nn.Module, products: Tensor, examples_first: bool) -> Tensor:
        features = len(module.normalized_shape)  # type: ignore[arg-type]
        products = batch_first(products, examples_first, features + 2)
        return products.sum(tuple(range(1, products.ndim - features))) if products.ndim > features + 1 else products


@supports(nn.LayerNorm)
class LayerNorm(_OverLastDimensions):
    """Mean and variance of a token's features."""

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        module = call.module
        assert isinstance(module, nn.LayerNorm)
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))
        inputs = call.saved[0].to(outputs.dtype).expand_as(outputs)
        features = len(module.normalized_shape)

        def by_token(tensor: Tensor) -> Tensor:
            """As [n, T, entries]."""
            tensor = batch_first(tensor, call.context, features + 2)
            return tensor.reshape(len(tensor), math.prod(tensor.shape[1:-features]), math.prod(module.normalized_shape))

        sums = kernel("layer_norm_sums", outputs)(by_token(outputs), by_token(inputs), module.eps, call.planned)
        return _named(call, sums, module.normalized_shape)

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, nn.LayerNorm)
        return F.layer_norm(inputs, list(module.normalized_shape), eps=module.eps)


@supports(nn.RMSNorm)
class RMSNorm(_OverLastDimensions):
    """Root mean square of a token's features."""

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, nn.RMSNorm)
        return F.rms_norm(inputs, list(module.normalized_shape), eps=module.eps)


class _OverPlaces(_Affine):
    """Channels in the second dimension, normalised over places; the weight has one entry per channel."""

    def summed(self, module: nn.Module, products: Tensor, examples_first: bool) -> Tensor:
        return products.flatten(2).sum(2) if products.ndim > 2 else products


@supports(nn.GroupNorm)
class GroupNorm(_OverPlaces):
    """Mean and variance of a group of channels."""

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        module = call.module
        assert isinstance(module, nn.GroupNorm)
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))
        inputs = call.saved[0].to(outputs.dtype)
        sums = kernel("group_norm_sums", outputs)(outputs, inputs, module.num_groups, module.eps)
        return _named(call, sums, (module.num_channels,))

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, nn.GroupNorm)
        return F.group_norm(inputs, module.num_groups, eps=module.eps)


@supports(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(_OverPlaces):
    """Mean and variance of one channel."""

    def check(self, module: nn.Module, name: str) -> None:
        if module.track_running_stats:
            raise UnsupportedModuleError(
                f"{name}: track_running_stats=True averages the examples' statistics into buffers that are saved with "
                "the model and carry no noise. Use track_running_stats=False."
            )

    def fewest_dimensions(self, module: nn.Module) -> int:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return module._get_no_batch_dim() + 1

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return F.instance_norm(inputs, eps=module.eps)
