"""The optimizer that the training loop calls: the user's own, which receives private gradients only.

`backward(losses)` differentiates a batch. `step()` adds it to its lot and, with the lot's last batch, releases a
gradient and lets the user's optimizer step with it. `adadp.checks.loop_rules` has what the loop must not do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.ledger import Ledger
from adadp.accounting.run import Run
from adadp.checks.loop_rules import LoopRules, mixed_passes
from adadp.checks.other_optimizers import private_step
from adadp.checks.trial import Trial
from adadp.clipping.base import Clipping
from adadp.distributed.agreement import Agreement
from adadp.distributed.sharded import at_rest
from adadp.errors import BudgetExhaustedError, ConfigurationError, NoGuaranteeError, TrainingLoopError
from adadp.gradients.collection import LOSS
from adadp.mechanism.observation import Observer
from adadp.mechanism.step import PrivateStep
from adadp.mechanism.sums import ReleasedGradient
from adadp.out_of_memory import advising
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Lot, Microbatch

Penalty = Callable[[nn.Module], Tensor]
"""A scalar function of the weights alone."""

SPENDING = "adadp"
"""Where `state_dict()` keeps what was spent."""

OBSERVED = "an observer was shown sums before their noise"
"""Why there is no guarantee while an observer is attached."""


class BudgetWarning(UserWarning):
    """The budget is spent: the last step did not run, and the loader gives out nothing more."""


def _of_original(name: str) -> Any:
    """An attribute of the wrapped optimizer as one of the private one."""
    return property(
        lambda self: getattr(self.original_optimizer, name),
        lambda self, value: setattr(self.original_optimizer, name, value),
        doc=f"The wrapped optimizer's {name}.",
    )


class PrivateOptimizer(Optimizer):
    """Wraps a `torch.optim` optimizer. Made by `PrivacyEngine.make_private`.

    `step()` must be called once for each batch of the private loader. If the batch is not the last of its lot, `step()`
    only adds its bounded sums to the lot's. `param_groups`, `state` and `defaults` are those of the wrapped optimizer,
    so learning-rate schedulers work as usual.

    Attributes:
        original_optimizer: the wrapped optimizer.
        stepped: whether the last `step()` released a gradient and changed the weights. This is public.

    Guarantee:
        The wrapped optimizer sees `.grad` values that were clipped, noised and charged (plus the gradient of `penalty`,
        a function of the weights), and nothing else of the data.

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
        self._parameters, self._held = dict(module.named_parameters()), at_rest(module)
        self.stepped = False
        self.began: Any = None  # how the run began (`adadp.mechanism.resuming.Continuation`)
        for parameter in (*self._parameters.values(), *self._held.values()):
            parameter.grad = None  # whatever stood here before was not made private
        self._rules = LoopRules(
            module, optimizer, step, lots=loader.lots, trial=trial, run=run, ledger=ledger,
            processes=step.agreement.group.size,
        )  # fmt: skip
        step.capture.on_first_call, step.capture.after_call = self._rules.before_call, self._rules.after_call
        # Not calling Optimizer.__init__: all of its state is the wrapped optimizer's.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    def __deepcopy__(self, memo: Any) -> PrivateOptimizer:
        raise ConfigurationError(
            "a private optimizer is not copied: the copy's steps would not be charged to any ledger. Copy its "
            "state_dict(), and make another one private."
        )

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a private optimizer is not pickled: the steps of the loaded one would not be charged to any ledger. Save "
            "its state_dict(), which carries what was spent."
        )

    param_groups = _of_original("param_groups")
    state = _of_original("state")
    defaults = _of_original("defaults")

    @property
    def noise_multiplier(self) -> float:
        """Noise over the clipping bound."""
        return self._step.noise_multiplier

    @property
    def clipping(self) -> Clipping:
        """The clipping, which states how large the noise is (`Clipping.noise_of_release`)."""
        return self._step.clipping

    @property
    def agreement(self) -> Agreement:
        """The agreement with other processes on each lot, if there are any."""
        return self._step.agreement

    @property
    def expected_batch_size(self) -> float:
        """The denominator of every step: the expected size of a lot, whatever was drawn."""
        return self._step.expected_lot

    @property
    def raw_nonfinite(self) -> int:
        """How many examples' gradients were not finite so far: a count without noise.

        Raises:
            NoGuaranteeError: `expose_raw` was not set in `make_private`.

        """
        if not self._expose_raw:
            raise NoGuaranteeError(
                "raw_nonfinite is a count over private examples without noise: make_private(..., expose_raw=True) "
                "shows it, and the guarantee is none from then on"
            )
        return 0 if self._step.nonfinite is None else int(self._step.nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` as the wrapped optimizer does, and drop what backward passes recorded since the last step."""
        self._step.forget()
        self.original_optimizer.zero_grad(set_to_none)

    # ---- a checkpoint carries what was spent on it ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "adadp" what the ledger holds for the weights that go with it."""
        return {**self.original_optimizer.state_dict(), SPENDING: self._ledger.spending()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer, and charge what was spent on it to this engine's ledger.

        Runs that the ledger already holds are not charged twice; runs on other datasets are kept separately.

        Raises:
            LedgerError: what was spent cannot be read, or is under another neighbouring relation or unit.
            BudgetExhaustedError: the ledger's budget does not allow it.

        """
        spent = state_dict.get(SPENDING)
        if spent is not None:
            self._ledger.inherit(spent)
        else:
            self._rules.note_unpaid_state()
        self.original_optimizer.load_state_dict({key: part for key, part in state_dict.items() if key != SPENDING})
        self._rules.state_loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters that are released are fixed by make_private."""
        raise ConfigurationError("parameters cannot be added after make_private: build the optimizer with all of them")

    def observe(self, observer: Observer | None) -> None:
        """Show every release to `observer` before and after its noise (audits, tests); None ends it.

        The run has no guarantee from the first observer on.
        """
        self._step.observer = observer
        if observer is not None:
            self._run.note(reasons=[OBSERVED])

    # ---- a batch ----------------------------------------------------------------------------------------------------

    def backward(self, losses: Tensor, *, figures: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Run the backward pass from one loss for each example. This is the recommended way; `step()` follows.

        Each example's gradient is that of its own loss, however many others there are: the mean over the expected lot
        is taken after the noise.

        Args:
            losses: one loss for each row of the batch, shape [n] (`reduction="none"`; see `adadp.losses`). Row i must
                be a function of example i and the weights alone.
            figures: other numbers of each row, [n] by name, for a clipping that releases their means (`PaidFigures`).
            kwargs: passed to `torch.autograd.backward` (retain_graph).

        Raises:
            TrainingLoopError: losses or figures are not one for each row, or losses depend on weights outside the
                module; or, on trial lots, a loss depends on another row's example.

        """
        microbatch = self._current()
        self._refuse_shape(losses)
        if self._trial.loss_due(self._trial, microbatch):
            self._rules.refuse_foreign_leaves(losses)
        self._trial.of_rows(losses, microbatch)
        self.backward_by_rows(losses, figures, **kwargs)

    def _refuse_shape(self, losses: Tensor) -> None:
        count = self._current().count
        if losses.shape != (count,):
            raise TrainingLoopError(
                f"one loss is needed for each of the batch's {count} rows, of shape [{count}], not "
                f"{list(losses.shape)}: use reduction='none', and for tokens the mean over each example's own "
                "(adadp.losses)."
            )

    def _refuse_figures(self, figures: Mapping[str, Tensor]) -> None:
        count = self._current().count
        if LOSS in figures:
            raise TrainingLoopError(f"the figure {LOSS!r} is what backward() is given first: call yours otherwise")
        for name, value in figures.items():
            if not isinstance(value, Tensor) or value.shape != (count,) or value.is_complex():
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise TrainingLoopError(
                    f"the figure {name!r} must be a tensor of one real number for each of the batch's {count} rows, of "
                    f"shape [{count}], not {found}: without a sum or mean over rows."
                )

    def backward_by_rows(self, losses: Tensor, figures: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        """As `backward`, without a trial of the losses."""
        self._refuse_shape(losses)
        self._refuse_figures(figures or {})
        step = self._step
        if step.capture.recorded and step.calls_from_losses is None:
            raise mixed_passes()
        step.calls_from_losses = step.calls_from_losses or 0
        torch.autograd.backward(losses, torch.full_like(losses, step.loss_scale), **kwargs)
        step.calls_from_losses = step.capture.records
        step.figures = {LOSS: losses.detach(), **{name: value.detach() for name, value in (figures or {}).items()}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None, *, keep: Tensor | None = None) -> Any:
        """Add the current microbatch to its lot. If the lot is then complete, release its gradient and step with it.

        Where the budget does not allow the release, nothing is released, the loader ends, and `BudgetWarning` warns.

        Args:
            closure: called first, with gradients enabled, if given.
            keep: bool, [n]; examples with False are left out of the sum. Whether example i is kept must depend on
                example i and the weights alone.

        Returns:
            What `closure` returned.

        Raises:
            TrainingLoopError: the loop broke a rule (`adadp.checks.loop_rules`); the message says what to do.

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
            self._rest()
            with private_step():
                self.original_optimizer.step()
            self._rules.settle()
            self.stepped = True
        return loss

    def _current(self) -> Microbatch:
        microbatch = self._loader.lots.current
        if microbatch is None:
            raise TrainingLoopError(
                "optimizer.step() without a lot: the batches must come from the data loader that make_private returned"
            )
        return microbatch

    def release(self, microbatch: Microbatch, keep: Tensor | None = None) -> None:
        """Add the microbatch whose backward pass has ended; if it is the last of its lot, set private gradients."""
        self._rules.refuse_changes(microbatch)
        self._step.refuse_misuse(microbatch)
        self._rules.check_passes(microbatch, keep)
        self._rules.say_untried()
        self._trial.handed_out()  # what it kept of this batch holds the graph, which holds the module
        with advising(microbatch.count):
            self._step.add(microbatch, keep)
        if microbatch.last:
            self._set_gradients(microbatch.of)

    def stop(self, spent: BudgetExhaustedError) -> None:
        """End training: the budget does not allow another release, so the loader hands out no more batches."""
        self._loader.lots.stopped = True
        self._rest()
        warnings.warn(f"training ends here, with the model as it is: {spent}", BudgetWarning, stacklevel=3)

    def _rest(self) -> None:
        """Let go of what was gathered for the lot, if the model is sharded."""
        if self._step.sharded is not None:
            self._step.sharded.rest()

    @torch.no_grad()
    def step_with(self, gradients: ReleasedGradient) -> None:
        """Step with private gradients that a replay computed (`adadp.mechanism.replay`)."""
        for name, gradient in gradients.items():
            self._set(name, gradient)
        with private_step():
            self.original_optimizer.step()
        self._rules.settle()
        self.stepped = True
        self._opt_called = True  # what learning-rate schedulers look at

    def _set_gradients(self, lot: Lot) -> None:
        penalties, released = self._penalties(), self._step.release(lot)
        if self._step.observer is not None:
            self._step.observer.stepped(lot.number, released)
        sharded = self._step.sharded
        if sharded is not None:
            sharded.note(released.values())
        for name, gradient in released.items():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # frozen since the model ran
                continue
            private = gradient.to(parameter.dtype)
            if name in penalties:
                private = private + penalties[name]
            if sharded is not None:
                private = sharded.own(name, private)
            earlier = self._rules.earlier(name)
            if earlier is not None:
                private = private + earlier  # without zero_grad() gradients accumulate, as in torch
            self._set(name, private)

    def _penalties(self) -> dict[str, Tensor]:
        """The gradient of the declared penalty, by parameter: no example contributes to it."""
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
        self._held[name].grad = private
        self._rules.placed(name, private)
