"""Checks that the trained weights are those made private, and that gradients reach them only through the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.ledger import Ledger
from adadp.checks import other_optimizers
from adadp.distributed.sharded import may_have_run, sharded_of, state_of, whole
from adadp.distributed.wrapped import inside
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.gradients import Capture
from adadp.gradients.capture.hooks import copied_from

#: Modules that belong to a private model, each with the capture that watches it.
_PRIVATE: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]] = weakref.WeakKeyDictionary()

#: The ledger that a module's training was charged to: whoever trains it on goes on from what it holds.
_PAID: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()

#: In-place changes that a freshly made or loaded parameter has at most; an optimizer makes one or more a step.
_FRESH = 16


class Weights:
    """The tensors of one private model, as they were when it was made private."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        # Flat lists of ids: they are compared at every step, which must be fast.
        held: list[dict[str, Any]] = []
        for part in module.modules():
            held += [part._modules, part._parameters]
        self._held = [(entries, list(map(id, entries.values()))) for entries in held]
        sharded = sharded_of(module)
        self._values = [*module.parameters(), *module.buffers(), *([] if sharded is None else sharded.shards.values())]
        self.settle()
        self.note_groups(optimizer)
        self._reached: dict[str, None] = {}
        for name, parameter in [*module.named_parameters(), *([] if sharded is None else sharded.shards.items())]:
            _watch(parameter, name, self._reached)

    def note_groups(self, optimizer: Optimizer) -> None:
        """Accept the optimizer's parameter groups as they are now."""
        self._optimizer = optimizer
        self._stepped = _stepped_on(optimizer)

    def check(self) -> None:
        """Raise where a tensor that is trained is not one of those that were made private."""
        for current, known in self._held:
            if len(current) != len(known) or list(map(id, current.values())) != known:
                raise TrainingLoopError(
                    "the module is not the one that was made private: a part or a parameter was added, replaced, tied "
                    "or reparametrized since (a new head, LoRA, weight_norm, load_state_dict(assign=True)). What came "
                    "later is trained without clipping and noise. Change the model first, then call make_private."
                )
        if _stepped_on(self._optimizer) != self._stepped:
            raise TrainingLoopError(
                "the optimizer's parameters were changed after make_private: what it steps on must be what is "
                "released. Build the optimizer with all parameters first, then call make_private."
            )

    def settle(self) -> None:
        """Accept all values as they are now: the optimizer or the module itself changed them."""
        self._states = [*map(state_of, self._values)]

    def touched(self) -> bool:
        """Whether the loop changed weights or buffers since `settle`: it could write private data into them."""
        return [*map(state_of, self._values)] != self._states

    def take_reached(self) -> str:
        """Parameters that a gradient reached outside the module's calls since the last time, in words; "" if none.

        Inside the module's calls parameters are replaced, so autograd accumulates into them only from outside.
        """
        names = list(self._reached)
        self._reached.clear()
        return ", ".join(names[:3])


def _stepped_on(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _watch(parameter: nn.Parameter, name: str, reached: dict[str, None]) -> None:
    if parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex()):
        before = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook needs it; it may be unfrozen later
        parameter.register_post_accumulate_grad_hook(lambda _: reached.setdefault(name))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(before)


def private_part(module: nn.Module) -> str | None:
    """The name of a submodule that belongs to another private model; None if there is none."""
    for name, part in module.named_modules():
        if _capture_of(part) is not None:
            return name or type(part).__name__
    return None


def _capture_of(part: nn.Module) -> Capture | None:
    reference = _PRIVATE.get(part)
    capture = None if reference is None else reference()
    return capture if capture is not None and capture.attached else None


def capture_of_private(module: nn.Module) -> Capture | None:
    """The capture that watches this module (compiled, wrapped or not) as a private model; None if it is not one."""
    module = inside(module)
    capture = _capture_of(module)
    return capture if capture is not None and capture.module is module else None


@contextmanager
def watching(module: nn.Module, **how: Any) -> Iterator[Capture]:
    """The capture of a module that is made private inside, made with `how`, and all of its weights.

    Where an error is raised inside, the module is left as it was.
    """
    with whole(module):
        capture = Capture(module, **how)
        try:
            yield capture
        except BaseException:
            capture.detach()
            raise


def mark_private(module: nn.Module, capture: Capture, ledger: Ledger) -> None:
    """Note that all parts of `module` are watched by `capture`, and that its training is charged to `ledger`."""
    _PAID[module] = ledger
    for part in module.modules():
        # Weak: the module's own hooks keep the capture alive, so that both can go together.
        _PRIVATE[part] = weakref.ref(capture)
    other_optimizers.watch(module, capture)


def note_paid(module: nn.Module, ledger: Ledger) -> None:
    """Note that what was spent on the weights that were loaded into `module` is in `ledger`.

    Raises:
        ConfigurationError: another ledger is charged for what is trained from them.

    """
    module = inside(module)
    if capture_of_private(module) is not None and _PAID.get(module) is not ledger:
        raise ConfigurationError(
            "this module was made private by another engine, whose ledger would not hold what these weights cost: load "
            "them with that engine, or before make_private"
        )
    _PAID[module] = ledger


def inherit_spending(module: nn.Module, ledger: Ledger) -> None:
    """Charge what was spent on these weights before, by another engine, or on those that they are a copy of."""
    for source in (module, copied_from(module)):
        paid = None if source is None else _PAID.get(source)
        if paid is not None and paid is not ledger:
            ledger.inherit(paid.spending())


def trained_before(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether the weights show that they were trained in this process already, or cannot show that they were not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    changed = any(parameter.grad is not None or parameter._version > _FRESH for parameter in parameters)
    return changed or may_have_run(module) or any(optimizer.state.get(parameter) for parameter in parameters)


def foreign_leaves(losses: Tensor, capture: Capture) -> str:
    """A parameter that the graph of `losses` reaches outside the module's calls, in words; "" if there is none."""
    names = {id(parameter): name for name, parameter in capture.module.named_parameters()}
    seen: set[Any] = set()
    waiting = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if isinstance(leaf, nn.Parameter):
            shape = list(leaf.shape)
            return f"the module's own {names[id(leaf)]}" if id(leaf) in names else f"a parameter of shape {shape}"
        waiting.extend(following for following, _ in node.next_functions)
    return ""


__all__ = [
    "Weights",
    "capture_of_private",
    "foreign_leaves",
    "inherit_spending",
    "mark_private",
    "note_paid",
    "private_part",
    "trained_before",
    "watching",
]
