"""The optimizer that the user's loop sees: the user's own, fed with private gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.ledger import Ledger, Run
from adadp.checks.trial import Trial
from adadp.checks.weights import Weights, foreign_leaves
from adadp.errors import (
    BudgetExhaustedError,
    ConfigurationError,
    NoGuaranteeError,
    TrainingLoopError,
    UntriedWarning,
)
from adadp.mechanism.observation import Observer
from adadp.mechanism.step import PrivateStep
from adadp.mechanism.sums import ReleasedGradient
from adadp.out_of_memory import advising
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Lot, Microbatch

Penalty = Callable[[nn.Module], Tensor]
"""A function of the weights alone, as a scalar."""

_LOSS_ADDED = (
    "the loss is a scalar that the loop differentiates: what it added to the criterion's, or to the module's own, "
    "which were tried, cannot be seen. optimizer.backward(losses) with one loss for each example can be tried"
)
_KEEP = (
    "the loop leaves examples out by step(keep=): that each is kept or not by itself and the weights alone, and not by "
    "comparison with others, cannot be seen"
)
_TOUCHED = (
    "the weights or buffers were changed by the loop, outside of the optimizer and of the module's calls: that nothing "
    "of the data went into them cannot be seen"
)
SPENDING = "adadp"
"""Where `state_dict()` keeps what was spent."""

_LOSS_UNTRIED = (
    "the loss is a scalar that the loop computes: that it is a plain {reduction} over examples of terms that each "
    "depend on one example alone (no mean over all tokens, no class weights, no padding to the longest, no comparison "
    "of examples) cannot be seen. optimizer.backward(losses) with one loss for each example can be tried"
)


OBSERVED = "an observer was shown sums before their noise"
"""Why there is no guarantee while an observer is attached."""


class BudgetWarning(UserWarning):
    """The budget is spent: the last step did not run, and the loader gives out nothing more."""


class PrivateOptimizer(Optimizer):
    """Wraps a `torch.optim` optimizer; `step()` releases a private gradient and lets that optimizer use it.

    While a lot is not complete (it came as several microbatches), `step()` only adds up. `param_groups`, `state` and
    learning-rate schedulers are those of the wrapped optimizer, which is at `original_optimizer`.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler reaches `step`, which says why it cannot be used

    def __init__(
        self,
        optimizer: Optimizer,
        step: PrivateStep,
        loader: PrivateLoader,
        module: nn.Module,
        *,
        run: Run,
        ledger: Ledger,
        trial: Trial,
        penalty: Penalty | None = None,
        expose_raw: bool = False,
    ) -> None:
        self.original_optimizer = optimizer
        self._step, self._loader, self._expose_raw = step, loader, expose_raw
        self._run, self._ledger, self._trial, self._penalty = run, ledger, trial, penalty
        self._parameters = dict(module.named_parameters())
        self._own: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # the gradients that were set here, as they were set
        self._said: set[str] = set()  # what could not be tried, as far as it was said
        self._known: tuple[int, str] | None = None  # how much of it there was, and of which kind a scalar loss is
        self._scalar = ""
        self.stepped = False
        for parameter in self._parameters.values():
            parameter.grad = None  # whatever stood here before was not made private
        self._weights = Weights(module, optimizer)
        # Not calling Optimizer.__init__: all of its state is the wrapped optimizer's.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    def __deepcopy__(self, memo: Any) -> PrivateOptimizer:
        raise ConfigurationError(
            "a private optimizer is not copied: the copy's steps would be charged to nobody. Copy its state_dict(), "
            "and make another one private."
        )

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a private optimizer is not pickled: whoever loads it would step with nobody's account. Save its "
            "state_dict(), which carries what was spent."
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    @property
    def noise_multiplier(self) -> float:
        """Noise over the clipping bound."""
        return self._step.noise_multiplier

    @property
    def expected_batch_size(self) -> float:
        """The denominator of every step: the expected size of a lot, whatever was drawn."""
        return self._step.expected_lot

    @property
    def raw_nonfinite(self) -> int:
        """How many examples' gradients were not finite so far. Not noised: it takes the guarantee away."""
        if not self._expose_raw:
            raise NoGuaranteeError(
                "raw_nonfinite is a count over private examples without noise: make_private(..., expose_raw=True) "
                "shows it, and the guarantee is none from then on"
            )
        return 0 if self._step.nonfinite is None else int(self._step.nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does; what a backward pass brought for this batch, before any step, is dropped."""
        self._step.forget()
        self.original_optimizer.zero_grad(set_to_none)

    # ---- what was spent goes where the weights go -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "adadp" what was spent on the weights that go with it."""
        return {**self.original_optimizer.state_dict(), SPENDING: self._ledger.spending()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer. What the state was paid with is charged to this engine's ledger as well.

        Runs that the ledger holds already are not charged twice; those on other datasets are kept apart.
        """
        spent = state_dict.get(SPENDING)
        if spent is not None:
            self._ledger.inherit(spent)
        else:
            self._trial.untried["state"] = _STATE_UNTRIED
            self._run.note(untried=[_STATE_UNTRIED])
        self.original_optimizer.load_state_dict({key: part for key, part in state_dict.items() if key != SPENDING})
        self._weights.note_groups(self.original_optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters that are released are fixed by make_private."""
        raise ConfigurationError("parameters cannot be added after make_private: build the optimizer with all of them")

    def observe(self, observer: Observer | None) -> None:
        """Show every release to `observer`, before and after its noise. The guarantee is none from then on."""
        self._step.observer = observer
        if observer is not None:
            self._run.note(reasons=[OBSERVED])

    # ---- a batch ----------------------------------------------------------------------------------------------------

    def backward(self, losses: Tensor, **kwargs: Any) -> None:
        """The backward pass from one loss for each example: the front door.

        Each example's gradient is that of its own loss, whatever the number of the others: the mean over the expected
        lot is taken after the noise. `step()` comes next, as ever.

        Args:
            losses: [n], one for each row of the batch (`reduction="none"`; `adadp.losses` has more), row i a function
                of example i and the weights alone.
            kwargs: those of `torch.autograd.backward` (retain_graph).

        Raises:
            TrainingLoopError: the losses are not one for each row, or depend on weights outside the module; or, on
                trial lots, a loss depends on another row's example.

        """
        microbatch = self._current()
        self._refuse_shape(losses)
        if self._trial.loss_due(self._trial, microbatch):
            self.refuse_foreign_leaves(losses)
        self._trial.of_rows(losses, microbatch)
        self.backward_by_rows(losses, **kwargs)

    def _refuse_shape(self, losses: Tensor) -> None:
        count = self._current().count
        if losses.shape != (count,):
            raise TrainingLoopError(
                f"one loss is needed for each of the batch's {count} rows, of shape [{count}], not "
                f"{list(losses.shape)}: use reduction='none', and for tokens the mean over each example's own "
                "(adadp.losses)."
            )

    def refuse_foreign_leaves(self, losses: Tensor) -> None:
        """Raise where losses depend on weights outside of the private module's calls."""
        foreign = foreign_leaves(losses, self._step.capture)
        if foreign:
            raise TrainingLoopError(
                f"the losses depend on {foreign}, outside of the private module's calls: what is "
                "trained there sees data without noise, or carries it into the module. Make one module of all that "
                "is trained, call it as model(x), and freeze or detach() the rest."
            )

    def backward_by_rows(self, losses: Tensor, **kwargs: Any) -> None:
        """As `backward`, of losses that were tried, or need not be."""
        self._refuse_shape(losses)
        step = self._step
        if step.capture.recorded and step.rows is None:
            raise _mixed_passes()
        step.rows = step.rows or 0
        torch.autograd.backward(losses, torch.full_like(losses, step.loss_scale), **kwargs)
        step.rows = step.capture.records

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None, *, keep: Tensor | None = None) -> Any:
        """Add the current microbatch; when its lot is complete, release its private gradient and step with it.

        `stepped` says afterwards whether it did. `keep`, [n] of bool, leaves examples out of the sum: whether example
        i is kept must follow from example i and the weights alone.
        """
        self.stepped = False
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            self.grad_scale = self.found_inf = None
            raise TrainingLoopError(
                "a GradScaler looks for overflows in gradients that are not private and skips steps because of them. "
                "Use bfloat16 autocast, which needs no scaling, or a fixed make_private(..., loss_scale=) with "
                "(loss * loss_scale).backward()."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        microbatch = self._current()
        try:
            self.release(microbatch, keep)
        except BudgetExhaustedError as spent:
            self.stop(spent)
            return loss
        if microbatch.last:
            self.original_optimizer.step()
            self._weights.settle()
            self.stepped = True
        return loss

    def _current(self) -> Microbatch:
        microbatch = self._loader.current
        if microbatch is None:
            raise TrainingLoopError(
                "optimizer.step() without a lot: the batches must come from the data loader that make_private returned"
            )
        return microbatch

    def release(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        """Add the microbatch whose backward pass has just ended; if it is its lot's last, set private gradients."""
        self.refuse_changes(microbatch)
        self._step.refuse_misuse(microbatch)
        self._refuse_missing_pass()
        self._refuse_mixed_passes()
        if keep is not None:
            self._check_keep(keep, microbatch)
            self._trial.untried["keep"] = _KEEP
        if self._step.capture.recorded and self._step.rows is None:
            self._take_scalar_loss(microbatch)
        self.say_untried()
        self._trial.handed_out()  # what it kept of this batch holds the graph, which holds the module
        with advising(microbatch.count):
            self._step.add(microbatch, keep)
        if microbatch.last:
            self._set_gradients(microbatch.of)

    def stop(self, spent: BudgetExhaustedError) -> None:
        """The budget allows no further release: the loader gives out nothing more."""
        self._loader.lots.stopped = True
        warnings.warn(f"training ends here, with the model as it is: {spent}", BudgetWarning, stacklevel=3)

    def look_at_weights(self, settle: bool = False) -> None:
        """Note where the loop has changed weights or buffers; with `settle`, the module itself may have."""
        if settle:
            self._weights.settle()
        elif self._weights.touched():
            self._trial.untried["weights"] = _TOUCHED

    def refuse_changes(self, microbatch: Microbatch) -> None:
        """Raise where the weights, what reached them or the rates are not what the release is made for."""
        self._weights.check()
        self._refuse_foreign_gradients()
        self._refuse_changed_rates(microbatch)

    # ---- what no proof covers -------------------------------------------------------------------------------------

    def _refuse_foreign_gradients(self) -> None:
        """A gradient on the weights that this optimizer has not put there is one of data that went past the engine."""
        reached = self._weights.take_reached()
        if reached:
            self.original_optimizer.zero_grad()
            self._step.forget()
            raise TrainingLoopError(
                f"a gradient reached {reached} from outside the calls of the private module: a term of the loss on the "
                "weights themselves, a weight that the loop uses (F.linear(h, model.fc.weight)), or model.forward(x) "
                "in place of model(x), which goes past the engine. Declare a term on the weights as "
                "make_private(penalty=lambda module: ...), or use the optimizer's weight_decay; compute everything "
                "else inside the module's forward."
            )
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._own.get(name, _NOTHING)[0]() is not parameter.grad:
                raise TrainingLoopError(
                    f"{name}.grad was set by hand: what stands there is not private. Leave .grad to the optimizer; "
                    "optimizer.zero_grad() clears it."
                )

    def _refuse_missing_pass(self) -> None:
        """A lot whose gradients were left out is a lot that was skipped, noise or not."""
        if self._step.capture.recorded or not any(p.requires_grad for p in self._parameters.values()):
            return
        self._loader.lots.note(
            reasons=["optimizer.step() was called for a batch that was not differentiated: its lot was skipped"]
        )
        raise TrainingLoopError(
            "optimizer.step() without a backward pass through the private module for the batch that is out: where that "
            "depends on the batch (a guard against NaN), one example decides whether all others count. Differentiate "
            "every batch: examples whose gradients are not finite count for nothing by themselves."
        )

    def _refuse_mixed_passes(self) -> None:
        if self._step.rows is not None and self._step.capture.records != self._step.rows:
            self._step.forget()
            raise _mixed_passes()

    def _refuse_changed_rates(self, microbatch: Microbatch) -> None:
        rates = [group.get("lr") for group in self.param_groups]
        if microbatch.index == 0:
            self._rates = rates
        elif any(_differ(one, other) for one, other in zip(rates, self._rates, strict=True)):
            raise TrainingLoopError(
                "the learning rate was changed within a lot, which came in several batches: how many there are depends "
                "on the data. Call scheduler.step() where optimizer.stepped is True, once for each lot."
            )

    def _check_keep(self, keep: Tensor, microbatch: Microbatch) -> None:
        if keep.shape != (microbatch.count,) or keep.dtype != torch.bool:
            raise TrainingLoopError(
                f"step(keep=) takes one bool for each of the batch's {microbatch.count} rows, not "
                f"{keep.dtype} of shape {list(keep.shape)}"
            )
        if self._step.capture.bound_early is not None:
            raise TrainingLoopError(
                "step(keep=) comes after the backward pass, in which this clipping has added examples up already. "
                "Multiply the losses of the examples to be left out by zero instead."
            )

    def _take_scalar_loss(self, microbatch: Microbatch) -> None:
        """A scalar was differentiated: a mean must not have been rounded, and what could not be tried is said."""
        if self._step.mean_loss and self._step.capture.halved:
            self._step.forget()
            raise TrainingLoopError(
                "a mean loss was differentiated in bfloat16 or float16: 1/n is rounded to a few bits, alike for all "
                "examples, so that one example less can move every other's gradient. Use optimizer.backward(losses) "
                "with one loss for each example, or loss_reduction='sum'."
            )
        reduction = "mean" if self._step.mean_loss else "sum"
        text = _LOSS_ADDED if self._trial.loss_tried(microbatch) else _LOSS_UNTRIED.format(reduction=reduction)
        if text != self._scalar:
            self._scalar = text
            self._run.note(untried=[text])

    def say_untried(self) -> None:
        """Before the first release, and whenever there is more: what the number rests on that nobody has tried."""
        if self._weights.touched():
            self._trial.untried["weights"] = _TOUCHED
        known = len(self._trial.untried), self._scalar
        if known == self._known:
            return  # asking the ledger costs more than the rest of this
        self._known = known
        self._run.note(untried=list(self._trial.untried.values()))
        new = [text for text in self._ledger.untried if text not in self._said]
        if new:
            self._said.update(new)
            warnings.warn(
                "the guarantee rests on what could not be tried: " + "; ".join(new), UntriedWarning, stacklevel=5
            )

    @torch.no_grad()
    def step_with(self, gradients: ReleasedGradient) -> None:
        """Step with private gradients that were made elsewhere (`adadp.mechanism.replay`)."""
        for name, gradient in gradients.items():
            self._set(name, gradient)
        self.original_optimizer.step()
        self._weights.settle()
        self.stepped = True
        self._opt_called = True  # what learning-rate schedulers look at

    def _set_gradients(self, lot: Lot) -> None:
        penalties, released = self._penalties(), self._step.release(lot)
        if self._step.observer is not None:
            self._step.observer.stepped(lot.number, released)
        for name, gradient in released.items():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # frozen since the model ran
                continue
            private = gradient.to(parameter.dtype)
            if name in penalties:
                private = private + penalties[name]
            reference, version = self._own.get(name, _NOTHING)
            if parameter.grad is not None and parameter.grad is reference() and parameter.grad._version == version:
                private = private + parameter.grad  # what earlier lots released adds up, as ever without zero_grad()
            self._set(name, private)

    def _penalties(self) -> dict[str, Tensor]:
        """The gradient of the declared term on the weights, which no example has a part in."""
        if self._penalty is None:
            return {}
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        with torch.enable_grad():
            value = self._penalty(self._step.capture.module)
            found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        if all(part is None for part in found):
            raise ConfigurationError(
                "penalty= has no gradient on the weights: it must be computed from the parameters themselves "
                "(sum(p.square().sum() for p in module.parameters())), not by calling the module"
            )
        return {name: part for name, part in zip(trained, found, strict=True) if part is not None}

    def _set(self, name: str, private: Tensor) -> None:
        self._parameters[name].grad = private
        self._own[name] = weakref.ref(private), private._version


def _mixed_passes() -> TrainingLoopError:
    return TrainingLoopError(
        "a scalar loss and losses for each example were differentiated on the same batch: their gradients have "
        "different scales. Use optimizer.backward() for both."
    )


_NOTHING: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)


def _differ(one: Any, other: Any) -> bool:
    """Whether two learning rates are not the same one; tensors are compared without waiting for a GPU."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is not other
    return bool(one != other)


_STATE_UNTRIED = (
    "the optimizer's state was loaded from a file that does not say what was spent on it: if it was made with this "
    "data, its cost is missing here"
)
