"""Normalisation within one example (LayerNorm, RMSNorm, GroupNorm, InstanceNorm) or by constants (BatchNorm)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.kernels import kernel
from adadp.gradients.layers.layer import Layer, LayerCall, Taps, batch_first, supports
from adadp.gradients.rounding import accumulation_dtype


class _Affine(Layer):
    """y = normalised(x) * weight + bias: one number for each of an example's many.

    Gradients of the weight are sums of output gradients times normalised inputs, those of the bias of output gradients.
    """

    small: ClassVar[bool] = True
    expected: ClassVar[str] = "the examples in its first dimension"

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        outputs = call.gradients[0].to(accumulation_dtype(call.gradients[0].dtype))
        inputs = call.saved[0].to(outputs.dtype).expand_as(outputs)
        named = zip(("weight", "bias"), self.sums(call, outputs, inputs), strict=True)
        shape: Sequence[int] = call.module.weight.shape  # type: ignore[assignment]
        return {own: Dense(total.view(-1, *shape), planned=call.planned) for own, total in named if own in call.wanted}

    @abstractmethod
    def sums(self, call: LayerCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Each example's gradients of the weight and of the bias, [n, entries], in its output gradients' precision."""


class _OverLastDimensions(_Affine):
    """Each token is normalised over its features; the weight has the features' shape."""

    tokenwise: ClassVar[bool] = True

    def fewest_dimensions(self, module: nn.Module) -> int:
        return len(module.normalized_shape) + 1  # type: ignore[arg-type]

    def by_token(self, call: LayerCall, tensor: Tensor) -> Tensor:
        """As [n, T, entries]."""
        shape: tuple[int, ...] = call.module.normalized_shape  # type: ignore[assignment]
        tensor = batch_first(tensor, call.context, len(shape) + 2)
        return tensor.reshape(len(tensor), math.prod(tensor.shape[1 : -len(shape)]), math.prod(shape))


@supports(nn.LayerNorm)
class LayerNorm(_OverLastDimensions):
    """Mean and variance of a token's features."""

    def sums(self, call: LayerCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(call.module, nn.LayerNorm)
        outputs, inputs = self.by_token(call, outputs), self.by_token(call, inputs)
        found: tuple[Tensor, Tensor] = kernel("layer_norm_sums", outputs)(
            outputs, inputs, call.module.eps, call.planned
        )
        return found


@supports(nn.RMSNorm)
class RMSNorm(_OverLastDimensions):
    """Root mean square of a token's features."""

    def sums(self, call: LayerCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(call.module, nn.RMSNorm)
        products = outputs * F.rms_norm(inputs, list(call.module.normalized_shape), eps=call.module.eps)
        return self.by_token(call, products).sum(1), self.by_token(call, outputs)[:, :0]  # it has no bias


class _OverPlaces(_Affine):
    """Channels in the second dimension, normalised over places; the weight has one entry per channel."""

    @abstractmethod
    def groups(self, module: nn.Module) -> int:
        """Of channels that are normalised together."""

    def sums(self, call: LayerCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = kernel("group_norm_sums", outputs)(
            outputs, inputs, self.groups(call.module), call.module.eps
        )
        return found


@supports(nn.GroupNorm)
class GroupNorm(_OverPlaces):
    """Mean and variance of a group of channels."""

    def groups(self, module: nn.Module) -> int:
        assert isinstance(module, nn.GroupNorm)
        return module.num_groups


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

    def groups(self, module: nn.Module) -> int:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return module.num_features


def normalises_by_constants(module: _BatchNorm) -> bool:
    """Whether a BatchNorm normalises each example by its running statistics, and by nothing of the others."""
    there = module.running_mean is not None and module.running_var is not None
    return not module.training and bool(module.track_running_stats) and there


@supports(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNorm(_Affine):
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

    def sums(self, call: LayerCall, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        module = call.module
        assert isinstance(module, _BatchNorm)
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, variance = module.running_mean.to(inputs.dtype), module.running_var.to(inputs.dtype)
        products = outputs * F.batch_norm(inputs, mean, variance, eps=module.eps)
        if outputs.ndim == 2:
            return products, outputs
        return products.flatten(2).sum(2), outputs.flatten(2).sum(2)
