"""The watched modules of one model: which layer answers for each, and where its parameters hang."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.shared import Operations
from adadp.gradients.capture.slot import Slot
from adadp.gradients.layers.fallback import ThroughFunc
from adadp.gradients.layers.layer import Layer, known_layer


class Tree:
    """One module tree, as it was when the capture began.

    Args:
        module: the root.
        through_func: names of modules that `torch.func` differentiates as a whole.
        chunk: how many examples torch.func differentiates at a time.
        meetings: sees the operations on parameters that no layer answers for.

    Raises:
        UnsupportedModuleError: a name of `through_func` is no module's, or a layer refuses a module's settings.
    """

    def __init__(self, module: nn.Module, through_func: frozenset[str], chunk: int, meetings: Operations) -> None:
        self.module = module
        self.watched: list[nn.Module] = []  # all but those below an atomic layer, which are not called through hooks
        self._names = {id(part): name for name, part in module.named_modules()}
        unknown = through_func - set(self._names.values())
        if unknown:
            raise UnsupportedModuleError(f"through_func names no module of this model: {sorted(unknown)}")
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.slots = [
            Slot(owner, attribute, parameter, first_names[id(parameter)], meetings)
            for owner in module.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._constants: dict[int, Tensor] = {}
        self._constants_of = -1  # the pass in which they were collected
        self._layers: dict[int, Layer] = {}
        self._slots_of: dict[int, dict[str, Slot]] = {}
        self._choose_layers(through_func, chunk)

    def _choose_layers(self, through_func: frozenset[str], chunk: int) -> None:
        slots: dict[int, dict[str, Slot]] = {}
        for slot in self.slots:
            slots.setdefault(id(slot.module), {})[slot.attribute] = slot
        answered: set[int] = set()  # modules below an atomic layer
        for name, part in self.module.named_modules():
            if id(part) in answered:
                continue
            self.watched.append(part)
            forced = name in through_func
            if not forced and id(part) not in slots:
                continue
            layer = ThroughFunc() if forced else known_layer(part)
            if layer is None:
                continue  # each operation on its parameters is seen by itself
            layer.check(part, name or type(part).__name__)
            self._layers[id(part)] = layer
            own = dict(slots.get(id(part), {}))
            if layer.atomic:
                for below, child in part.named_modules():
                    answered.add(id(child))
                    own |= {f"{below}.{k}" if below else k: slot for k, slot in slots.get(id(child), {}).items()}
            self._slots_of[id(part)] = own

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._names

    def name(self, module: nn.Module) -> str:
        """The module's name in the tree, or its class's where it has none; for messages."""
        return self._names.get(id(module), "") or type(module).__name__

    def layer(self, module: nn.Module) -> Layer | None:
        """The layer that answers for this module, None for one without parameters of its own."""
        return self._layers.get(id(module))

    def slots_of(self, module: nn.Module) -> dict[str, Slot]:
        """The slots of a module that a layer answers for, by the module's own names of their parameters."""
        return self._slots_of[id(module)]

    def guard(self) -> None:
        """Put a shared value in the place of every parameter that is trained."""
        for slot in self.slots:
            slot.guard()

    def restore(self) -> None:
        """Put every parameter back, at the end of a pass."""
        self._constants, self._constants_of = {}, -1
        for slot in self.slots:
            slot.restore()

    def trained(self) -> tuple[bool, ...]:
        """For each place of a parameter whether it is trained."""
        return tuple([slot.parameter.requires_grad for slot in self.slots])

    def constant(self, tensor: Tensor, number: int) -> bool:
        """Whether a tensor is a buffer, a parameter's value or a view of one: no example is in it.

        They are collected anew in the pass of each `number`, since they may have been moved since the one before.
        """
        if self._constants_of != number:
            held = [slot.alias for slot in self.slots] + [buffer for buffer in self.module.buffers() if buffer.numel()]
            self._constants = {one.untyped_storage().data_ptr(): one for one in held}
            self._constants_of = number
        known = self._constants.get(tensor.untyped_storage().data_ptr())
        return known is not None and not tensor.requires_grad

    def refuse_replaced(self) -> None:
        """Raise where a parameter was replaced: putting the watched one back would undo what the user did."""
        replaced = next((slot for slot in self.slots if slot.replaced), None)
        if replaced is not None and isinstance(replaced.there, DTensor):
            raise TrainingLoopError(
                f"{replaced.name} is a shard: fully_shard comes before make_private. From then on the model runs with "
                "gradients on batches of the private loader alone, for whose lots its weights are gathered. Evaluate "
                "under torch.no_grad(), and call state_dict() or reshard() between optimizer.step() and the next batch."
            )
        if replaced is not None:
            raise TrainingLoopError(
                f"{replaced.name} is not the parameter that was made private: it was replaced or tied since "
                "(load_state_dict(assign=True), decoder.weight = embedding.weight). Change the model first, then call "
                "make_private; load weights without assign=True."
            )

    def refuse_unseen_uses(self, why: str | None = None) -> None:
        """Raise where a gradient came to a parameter's place past everything that watches it."""
        for slot in self.slots:
            if slot.unseen():
                raise UnsupportedModuleError(why or UNSEEN.format(slot.name))

    def holder(self, names: Collection[str], running: Sequence[nn.Module]) -> str | None:
        """The name of the smallest of the modules that run which holds all parameters of these names, or None."""
        owners = [slot.module for slot in self.slots if slot.name in names]
        for module in reversed(running):
            parts = {id(part) for part in module.modules()}
            if all(id(owner) in parts for owner in owners):
                return str(self._names[id(module)])
        return None


UNSEEN = (
    "{} is used in the forward pass by something that torch's own operations do not show (an autograd.Function, an "
    "extension), so its per-example gradients were not seen. Name the module that uses it in through_func=[...] ('' "
    "for the whole model)."
)
