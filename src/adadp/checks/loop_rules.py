"""What a training loop must not do between a batch and its step, and what it does that no trial can test."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from adadp.accounting.ledger import Ledger
from adadp.accounting.run import Run
from adadp.checks.frozen_norms import FrozenNorms
from adadp.checks.trial import Trial
from adadp.checks.weights import Weights, foreign_leaves
from adadp.distributed.sharded import at_rest, sharded_of, state_of
from adadp.distributed.wrapped import switch_off_caller
from adadp.errors import TrainingLoopError, UntriedWarning
from adadp.gradients import Capture
from adadp.sampling.lot import Lots, Microbatch

_LOSS_ADDED = (
    "the loss is a scalar that the loop differentiates: what it added to the criterion's, or to the module's own, "
    "which were tried, cannot be seen. optimizer.backward(losses) with one loss for each example can be tried"
)
_LOSS_UNTRIED = (
    "the loss is a scalar that the loop computes: that it is a plain {reduction} over examples of terms that each "
    "depend on one example alone (no mean over all tokens, no class weights, no padding to the longest, no comparison "
    "of examples) cannot be seen. optimizer.backward(losses) with one loss for each example can be tried"
)
_KEEP = (
    "the loop leaves examples out by step(keep=): that each is kept or not by itself and the weights alone, and not by "
    "comparison with others, cannot be seen"
)
_TOUCHED = (
    "the weights or buffers were changed by the loop, outside of the optimizer and of the module's calls: that nothing "
    "of the data went into them cannot be seen"
)
_STATE = (
    "the optimizer's state was loaded from a file that does not say what was spent on it: if it was made with this "
    "data, its cost is missing here"
)
_FROZEN = (
    "the loop froze or unfroze parameters while a batch was out: that this was not because of what is in the batch "
    "cannot be seen. Change requires_grad between optimizer.step() and the next batch"
)
_NOTHING: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)


class Passes(Protocol):
    """What backward passes brought for the microbatch that is out (`mechanism.step.PrivateStep`)."""

    capture: Capture
    trained: list[bool]  # by parameter: whether it was trained when the microbatch was handed out
    calls_from_losses: int | None
    mean_loss: bool

    def forget(self) -> None:
        """Drop it."""


class LoopRules:
    """The rules that one run's loop has to keep.

    Each check raises `TrainingLoopError`, or records in the run what the guarantee then rests on untested. Nothing that
    is computed here becomes part of a release.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        passes: Passes,
        *,
        lots: Lots,
        trial: Trial,
        run: Run,
        ledger: Ledger,
        processes: int,
    ) -> None:
        self._processes = processes
        self._optimizer, self._passes, self._capture = optimizer, passes, passes.capture
        self._lots, self._trial, self._run, self._ledger = lots, trial, run, ledger
        self._parameters: Mapping[str, nn.Parameter] = at_rest(module)
        self._sharded = sharded_of(module)
        self._worked_on = list(module.parameters())  # of a sharded model the whole ones, which the loop sees in a lot
        self._weights = Weights(module, optimizer)
        self._norms = FrozenNorms(module)
        # Weak: a gradient that zero_grad() dropped must not stay in memory until the next step.
        self._placed: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._part: Microbatch | None = None  # for which the module was called last
        self._rates: list[Any] = []  # learning rates when the lot that is out was begun
        self._scalar = ""  # what was noted about a scalar loss
        self._noted: tuple[int, str] | None = None  # how much was untried, and of which kind a scalar loss is
        self._warned: set[str] = set()

    # ---- around calls of the module -------------------------------------------------------------------------------

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        """Before an outermost module runs: it must be given the batch that is out, and is tried if that is due."""
        switch_off_caller(self._capture.module, self._processes)
        part = self._lots.current
        if part is None:
            return
        if self._sharded is not None:
            self._capture.refuse_replaced()
        self._norms.check()
        self._note_touched()  # at every call: what the module does itself is accepted after it
        if self._part is not part:
            self._part = part
            self._trial.handed_out()
        if torch.is_grad_enabled():
            self._lots.trained_on = part
        self._lots.refuse_other_batches(tree_leaves((args, kwargs)))
        self._trial.before_call(module, args, kwargs, part)

    def after_call(self, output: Any) -> None:
        """After it ran: what it changed itself (buffers) is not the loop's doing."""
        part = self._lots.current
        if part is not None:
            self.settle()
            self._trial.after_call(output, part)

    # ---- before a step --------------------------------------------------------------------------------------------

    def refuse_foreign_leaves(self, losses: Tensor) -> None:
        """Raise where losses depend on weights outside of the private module's calls."""
        foreign = foreign_leaves(losses, self._capture)
        if foreign:
            raise TrainingLoopError(
                f"the losses depend on {foreign}, outside of the private module's calls: what is "
                "trained there sees data without noise, or carries it into the module. Make one module of all that "
                "is trained, call it as model(x), and freeze or detach() the rest."
            )

    def refuse_changes(self, microbatch: Microbatch) -> None:
        """Raise where the weights, what reached them or the rates are not what the release is made for."""
        if self._sharded is not None:
            self._capture.refuse_replaced()
        self._weights.check()
        self._norms.check()  # torch.func runs parts of the model again below
        self._refuse_foreign_gradients()
        self._refuse_changed_rates(microbatch)

    def check_passes(self, microbatch: Microbatch, keep: Tensor | None) -> None:
        """Raise where the batch was not differentiated once and in one way, or `keep` does not fit it."""
        self._refuse_missing_pass()
        self._refuse_mixed_passes()
        self._note_freezing()
        if keep is not None:
            self._check_keep(keep, microbatch)
            self._trial.untried["keep"] = _KEEP
        if self._capture.recorded and self._passes.calls_from_losses is None:
            self._take_scalar_loss(microbatch)

    def say_untried(self) -> None:
        """Before the first release, and whenever there is more: warn of what the guarantee rests on untried."""
        self._note_touched()
        known = len(self._trial.untried), self._scalar
        if known == self._noted:
            return  # asking the ledger costs more than the rest of this
        self._noted = known
        self._run.note(untried=list(self._trial.untried.values()))
        new = [text for text in self._ledger.untried if text not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                "the guarantee rests on what could not be tried: " + "; ".join(new), UntriedWarning, stacklevel=5
            )

    # ---- what the optimizer does ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take weights and buffers as they are: the optimizer changed them, or the module itself."""
        self._weights.settle()

    def placed(self, name: str, gradient: Tensor) -> None:
        """Note that the optimizer put this private gradient on a parameter."""
        self._placed[name] = weakref.ref(gradient), state_of(gradient)

    def earlier(self, name: str) -> Tensor | None:
        """The gradient that an earlier step put on a parameter, if it stands there unchanged."""
        standing = self._parameters[name].grad
        reference, version = self._placed.get(name, _NOTHING)
        return standing if standing is not None and standing is reference() and state_of(standing) == version else None

    def note_unpaid_state(self) -> None:
        """The optimizer is about to load a state that does not say what was spent on it."""
        self._trial.untried["state"] = _STATE
        self._run.note(untried=[_STATE])

    def state_loaded(self) -> None:
        """The optimizer's groups are new ones, of the same parameters."""
        self._weights.note_groups(self._optimizer)

    # ---- each rule ------------------------------------------------------------------------------------------------

    def _note_touched(self) -> None:
        if self._weights.touched():
            self._trial.untried["weights"] = _TOUCHED

    def _refuse_foreign_gradients(self) -> None:
        """A gradient on the weights that the optimizer has not put there is one of data that went past the engine."""
        reached = self._weights.take_reached()
        if reached:
            self._optimizer.zero_grad()
            if self._sharded is not None:
                self._sharded.forget()
            self._passes.forget()
            raise TrainingLoopError(
                f"a gradient reached {reached} from outside the calls of the private module: a term of the loss on the "
                "weights themselves, a weight that the loop uses (F.linear(h, model.fc.weight)), or model.forward(x) "
                "in place of model(x), which goes past the engine. Declare a term on the weights as "
                "make_private(penalty=lambda module: ...), or use the optimizer's weight_decay; compute everything "
                "else inside the module's forward."
            )
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._placed.get(name, _NOTHING)[0]() is not parameter.grad:
                raise TrainingLoopError(
                    f"{name}.grad was set by hand: what stands there is not private. Leave .grad to the optimizer; "
                    "optimizer.zero_grad() clears it."
                )

    def _refuse_changed_rates(self, microbatch: Microbatch) -> None:
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        if microbatch.index == 0:
            self._rates = rates
        elif any(_differ(one, other) for one, other in zip(rates, self._rates, strict=True)):
            raise TrainingLoopError(
                "the learning rate was changed within a lot, which came in several batches: how many there are depends "
                "on the data. Call scheduler.step() where optimizer.stepped is True, once for each lot."
            )

    def _note_freezing(self) -> None:
        if [p.requires_grad for p in self._worked_on] != self._passes.trained:
            self._trial.untried["frozen"] = _FROZEN

    def _refuse_missing_pass(self) -> None:
        """A lot whose gradients were left out is a lot that was skipped, noise or not."""
        trains = any(parameter.requires_grad for parameter in self._worked_on)
        if (self._capture.recorded and trains) or not any(self._passes.trained):
            return
        self._lots.note(
            reasons=["optimizer.step() was called for a batch that was not differentiated: its lot was skipped"]
        )
        raise TrainingLoopError(
            "optimizer.step() without a backward pass through the private module for the batch that is out: where that "
            "depends on the batch (a guard against NaN), one example decides whether all others count. Differentiate "
            "every batch: examples whose gradients are not finite count for nothing by themselves."
        )

    def _refuse_mixed_passes(self) -> None:
        if self._passes.calls_from_losses is not None and self._capture.records != self._passes.calls_from_losses:
            self._passes.forget()
            raise mixed_passes()

    def _check_keep(self, keep: Tensor, microbatch: Microbatch) -> None:
        if keep.shape != (microbatch.count,) or keep.dtype != torch.bool:
            raise TrainingLoopError(
                f"step(keep=) takes one bool for each of the batch's {microbatch.count} rows, not "
                f"{keep.dtype} of shape {list(keep.shape)}"
            )
        if self._capture.bound_early is not None:
            raise TrainingLoopError(
                "step(keep=) comes after the backward pass, in which this clipping has added examples up already. "
                "Multiply the losses of the examples to be left out by zero instead."
            )

    def _take_scalar_loss(self, microbatch: Microbatch) -> None:
        """A scalar was differentiated: a mean must not have been rounded, and what could not be tried is said."""
        if self._passes.mean_loss and self._capture.halved:
            self._passes.forget()
            raise TrainingLoopError(
                "a mean loss was differentiated in bfloat16 or float16: 1/n is rounded to a few bits, alike for all "
                "examples, so that one example less can move every other's gradient. Use optimizer.backward(losses) "
                "with one loss for each example, or loss_reduction='sum'."
            )
        if self._trial.by_function is microbatch:
            return
        reduction = "mean" if self._passes.mean_loss else "sum"
        text = _LOSS_ADDED if self._trial.loss_tried(microbatch) else _LOSS_UNTRIED.format(reduction=reduction)
        if text != self._scalar:
            self._scalar = text
            self._run.note(untried=[text])


def mixed_passes() -> TrainingLoopError:
    """Two kinds of losses on one batch."""
    return TrainingLoopError(
        "a scalar loss and losses for each example were differentiated on the same batch: their gradients have "
        "different scales. Use optimizer.backward() for both."
    )


def _differ(one: Any, other: Any) -> bool:
    """Whether two learning rates are not the same one; tensors are compared without waiting for a GPU."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is not other
    return bool(one != other)
