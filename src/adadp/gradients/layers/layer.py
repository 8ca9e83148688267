"""The interface of a layer: how the capture gets per-example gradients of one kind of module, and which are known.

A new kind of layer is one subclass of `Layer` in a file of its own, registered by `@supports(nn.Kind)`. The soundness
tests go through `registered()` and ask for an example of every kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from adadp.errors import ConfigurationError, UnsupportedModuleError
from adadp.gradients.forms.per_example import PerExample


class Taps(Protocol):
    """What a layer may use of the capture.

    Attributes:
        batch_first: whether sequences come as [n, T, ...]; if not, as [T, n, ...].
        chunk: how many examples torch.func differentiates at a time.
    """

    batch_first: bool
    chunk: int

    def tap(
        self,
        layer: Layer,
        module: nn.Module,
        outputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        context: Any = None,
        used: Collection[str] | None = None,
    ) -> tuple[Tensor, ...]:
        """Keep what a call's per-example gradients are made of until the gradients of its outputs arrive.

        Args:
            layer: the layer whose `per_example` is called then.
            module: the module that was called.
            outputs: what it returned.
            saved: tensors to keep; checkpointing may drop and recompute them.
            context: anything else to keep.
            used: the module's own names of the parameters that the outputs were computed with; all of them if None.

        Returns:
            The outputs to return from the module instead.
        """

    def watches(self, module: nn.Module) -> bool:
        """Whether a call of `module` is to be seen now."""

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether an argument of the module that runs has a row for each example; else it is the same for all."""

    def alias(self, module: nn.Module, name: str) -> Tensor | None:
        """The value of a module's parameter, detached; None if the module has no such parameter."""

    def module_name(self, module: nn.Module) -> str:
        """The module's name in the tree, for messages."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a module that a backward pass came through: all that its per-example gradients are made of.

    Attributes:
        module: the module that was called.
        context: what the layer gave to `Taps.tap` beside tensors.
        saved: the tensors that the layer gave to `Taps.tap`, detached; usually the module's inputs.
        gradients: the gradient of each tapped output.
        wanted: the module's own names of the parameters whose gradients are wanted.
        planned: the public number of examples that forms choose their arithmetic for (see `PerExample`); None outside a
            step, where the number of examples is public itself.
    """

    module: nn.Module
    context: Any
    saved: Sequence[Tensor]
    gradients: Sequence[Tensor]
    wanted: Collection[str]
    planned: int | None


class Layer(ABC):
    """Computes the per-example gradients of one kind of module.

    A subclass implements `per_example`. A module of one input tensor and one output, with examples in the first
    dimension, needs nothing else; others override `after`.

    Guarantee: the form returned for a parameter holds, for every example i of the call, the gradient with respect to
    that parameter of <output_i, gradients_i>, and nothing of any other example.
    """

    #: The layer answers for every module below its own as well; those are not watched.
    atomic: ClassVar[bool] = False
    #: The gradients are small beside what they are made of, so they are computed in the backward pass and the tensors
    #: that they are made of are freed.
    small: ClassVar[bool] = False
    #: Works on each token alone, so that its input may have examples and tokens in one dimension, [n * T, ...], or be
    #: the same for all examples ([1, T, ...] or [T, ...], without examples).
    tokenwise: ClassVar[bool] = False
    #: An input [1, ...] may be the same for all examples.
    repeatable: ClassVar[bool] = False
    #: Asks by itself where the examples are in each of its inputs.
    own_rows: ClassVar[bool] = False
    #: The methods that define what the module computes. A subclass that replaces one is not known.
    defining: ClassVar[tuple[str, ...]] = ("forward",)
    #: The shape of a batch of inputs, for the message that refuses an input without one.
    expected: ClassVar[str] = "[n, ...]"

    def check(self, module: nn.Module, name: str) -> None:  # noqa: B027 - most layers have nothing to refuse
        """Raise UnsupportedModuleError for settings of `module` that have no per-example gradients."""

    def install(self, module: nn.Module, taps: Taps) -> None:  # noqa: B027 - most layers need no preparation
        """Prepare `module`, once, when the capture begins to watch it."""

    def uninstall(self, module: nn.Module) -> None:  # noqa: B027
        """Undo `install`."""

    def fewest_dimensions(self, module: nn.Module) -> int:
        """How many dimensions a batch of inputs has at least; torch accepts a single example of one less."""
        return 2

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Called with what the module was given and returned; taps the output and returns what to use instead.

        Raises:
            UnsupportedModuleError: the call has no per-example gradients.
        """
        inputs = args[0] if args else kwargs["input"]
        if inputs.ndim < self.fewest_dimensions(module):
            raise no_batch(taps, module, inputs, self.expected)
        return taps.tap(self, module, [output], [inputs], taps.batch_first)[0]

    @abstractmethod
    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        """Per-example gradients of the `wanted` parameters, by the module's own names for them.

        Called once the backward pass has reached the output, with `exact_arithmetic`. Every form is planned for
        `call.planned` examples.
        """


_REGISTER: dict[type[nn.Module], Layer] = {}


def registered() -> Mapping[type[nn.Module], Layer]:
    """Every kind of module that a layer is registered for."""
    return MappingProxyType(_REGISTER)


def supports(*kinds: type[nn.Module]) -> Callable[[type[Layer]], type[Layer]]:
    """Register a layer for these module classes and their subclasses that keep the class's `forward`."""

    def register(layer: type[Layer]) -> type[Layer]:
        for kind in kinds:
            if kind in _REGISTER:
                raise ConfigurationError(f"a layer for {kind.__name__} is registered already")
            _REGISTER[kind] = layer()
        return layer

    return register


def known_layer(module: nn.Module) -> Layer | None:
    """The layer that is registered for a module's class or the nearest of its base classes, or None.

    None also for a subclass that overrides one of the layer's `defining` methods: it may compute something else.
    """
    for kind in type(module).__mro__:
        layer = _REGISTER.get(kind)
        if layer is not None:
            same = all(getattr(type(module), method) is getattr(kind, method) for method in layer.defining)
            return layer if same else None
    return None


def no_batch(taps: Taps, module: nn.Module, inputs: Tensor, expected: str) -> UnsupportedModuleError:
    """The error for an input without a dimension of examples, which torch allows for many layers."""
    return UnsupportedModuleError(
        f"{taps.module_name(module)} ({type(module).__name__}): an input of shape {list(inputs.shape)} holds no batch "
        f"of examples. Give it {expected}: a single example is a batch of one (x.unsqueeze(0))."
    )


def batch_first(tensor: Tensor, first: bool, minimum: int) -> Tensor:
    """The tensor with examples in front; sequences of at least `minimum` dimensions may come as [T, N, ...]."""
    return tensor if first or tensor.ndim < minimum else tensor.transpose(0, 1)
