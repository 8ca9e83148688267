"""The watched modules of one model: which layer answers for each, and where its parameters hang."""

from __future__ import annotations

from torch import nn

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.slot import Slot
from adadp.gradients.layers.fallback import ThroughFunc
from adadp.gradients.layers.layer import Layer, known_layer


class Tree:
    """One module tree, as it was when the capture began.

    Args:
        module: the root.
        through_func: names of modules that `torch.func` differentiates as a whole; so is every module with parameters
            of its own that no layer knows.
        chunk: how many examples torch.func differentiates at a time.

    Raises:
        UnsupportedModuleError: a name of `through_func` is no module's, or a layer refuses a module's settings.
    """

    def __init__(self, module: nn.Module, through_func: frozenset[str], chunk: int) -> None:
        self.module = module
        self.notices: list[tuple[str, str]] = []  # name and class of each module that goes through torch.func unasked
        self.watched: list[nn.Module] = []  # all but those below an atomic layer, which are not called through hooks
        self._names = {id(part): name for name, part in module.named_modules()}
        unknown = through_func - set(self._names.values())
        if unknown:
            raise UnsupportedModuleError(f"through_func names no module of this model: {sorted(unknown)}")
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.slots = [
            Slot(owner, attribute, parameter, first_names[id(parameter)])
            for owner in module.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
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
            layer = None if forced else known_layer(part)
            if layer is None:
                layer = ThroughFunc()
                if not forced:
                    self.notices.append((name or "the model", type(part).__name__))
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
        """Put a sentinel in every parameter's place."""
        for slot in self.slots:
            slot.guard()

    def restore(self) -> None:
        """Put every parameter back."""
        for slot in self.slots:
            slot.restore()

    def refuse_replaced(self) -> None:
        """Raise where a parameter was replaced: putting the watched one back would undo what the user did."""
        replaced = next((slot.name for slot in self.slots if slot.replaced), None)
        if replaced is not None:
            raise TrainingLoopError(
                f"{replaced} is not the parameter that was made private: it was replaced or tied since "
                "(load_state_dict(assign=True), decoder.weight = embedding.weight). Change the model first, then call "
                "make_private; load weights without assign=True."
            )

    def refuse_unseen_uses(self) -> None:
        """Raise where a gradient reached a sentinel: a parameter was used where no layer saw it."""
        for slot in self.slots:
            if slot.sentinel.grad is not None:
                slot.sentinel.grad = None
                raise UnsupportedModuleError(
                    f"{slot.name} is used in the forward pass outside {self.name(slot.module)}, the module that "
                    "owns it (F.linear(x, other.weight), for instance), so its per-example gradients were not seen. "
                    "Share the parameter instead (decoder.weight = embedding.weight), or name the module that uses it "
                    "in through_func=[...] ('' for the whole model)."
                )
