"""Normalisation within one example (LayerNorm, RMSNorm, GroupNorm, InstanceNorm) or by constants (BatchNorm)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer, LayerCall, Taps, batch_first, supports
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


def normalises_by_constants(module: _BatchNorm) -> bool:
    """Whether a BatchNorm normalises each example by its running statistics, and by nothing of the others."""
    there = module.running_mean is not None and module.running_var is not None
    return not module.training and bool(module.track_running_stats) and there


@supports(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNorm(_OverPlaces):
    """Running mean and variance of a channel, in eval mode only: they are constants then."""

    def check(self, module: nn.Module, name: str) -> None:
        assert isinstance(module, _BatchNorm)
        if not normalises_by_constants(module):
            raise UnsupportedModuleError(
                f"{name} ({type(module).__name__}) normalises each example by the others of its batch. Call its "
                ".eval() (after model.train(), which switches it on again), so that its running statistics are used."
            )

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        self.check(module, taps.module_name(module))  # it may have been switched since
        return super().after(taps, module, args, kwargs, output)

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, _BatchNorm)
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, variance = module.running_mean.to(inputs.dtype), module.running_var.to(inputs.dtype)
        return F.batch_norm(inputs, mean, variance, eps=module.eps)
