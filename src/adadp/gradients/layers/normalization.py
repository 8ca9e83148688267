"""Normalisation within one example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.per_example import Dense, PerExample
from adadp.gradients.layers.layer import Layer, Taps, batch_first, no_batch, supports
from adadp.gradients.rounding import accumulation_dtype


class _Affine(Layer):
    """y = normalised(x) * weight + bias: one number for each of an example's many."""

    small: ClassVar[bool] = True

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs = args[0] if args else kwargs["input"]
        if inputs.ndim < self.least_dimensions(module):
            raise no_batch(taps, module, inputs, "the examples in its first dimension")
        return taps.tap(self, module, [output], [inputs], taps.batch_first)[0]

    def per_example(
        self,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Collection[str],
    ) -> Mapping[str, PerExample]:
        outputs = gradients[0].to(accumulation_dtype(gradients[0].dtype))
        forms: dict[str, PerExample] = {}
        if "weight" in wanted:
            normalised = self.normalised(module, saved[0].to(outputs.dtype))
            forms["weight"] = Dense(self.summed(module, outputs * normalised, context))
        if "bias" in wanted:
            forms["bias"] = Dense(self.summed(module, outputs, context))
        return forms

    @abstractmethod
    def least_dimensions(self, module: nn.Module) -> int:
        """How many dimensions a batch of inputs has at least."""

    @abstractmethod
    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """What the module multiplies by its weight."""

    @abstractmethod
    def summed(self, module: nn.Module, products: Tensor, examples_first: bool) -> Tensor:
        """The sum over everything that shares an entry of the weight, within each example."""


class _OverLastDimensions(_Affine):
    """Each token is normalised over its features; the weight has the features' shape."""

    def least_dimensions(self, module: nn.Module) -> int:
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

    def least_dimensions(self, module: nn.Module) -> int:
        return 2

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

    def least_dimensions(self, module: nn.Module) -> int:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return module._get_no_batch_dim() + 1

    def normalised(self, module: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        return F.instance_norm(inputs, eps=module.eps)
