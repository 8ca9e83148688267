"""The private optimizer with the attributes that Opacus' has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from adadp.clipping import Clipping, Grouped, PerLayer
from adadp.clipping.adaptive import Adaptive
from adadp.clipping.flat import Flat
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.mechanism.optimizer import PrivateOptimizer

#: Attributes that loops read from Opacus' optimizer, and why there are none here.
MISSING = {
    "grad_samples": "no example's gradient is stored",
    "clip_and_accumulate": "step() bounds and adds up; a loop cannot do it in parts",
    "add_noise": "step() adds the noise, once for each lot",
    "scale_grad": "step() divides by the expected lot",
    "pre_step": "step() is one call; attach_step_hook(fn) runs fn between the noise and the step",
}
_SCHEDULE = "a loop that sets it by hand may follow what it saw of the data, which nothing charges"


class DPOptimizer(PrivateOptimizer):
    """`PrivateOptimizer` by Opacus' name. `PrivacyEngine.make_private` makes it."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        if not parts:
            raise ConfigurationError(
                "DPOptimizer is not made by hand: PrivacyEngine.make_private makes it, with the loader and the ledger "
                "that belong to it (docs/opacus.md)"
            )
        super().__init__(*parts, **settings)

    def __getattr__(self, name: str) -> Any:
        if name in MISSING:
            raise AttributeError(f"optimizer.{name} is not here: {MISSING[name]} (docs/opacus.md)")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- bound and noise: to be read; schedules change them ----------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | list[float] | None:
        """The clipping bound now; a list where layers have bounds of their own; None where the clipping has none."""
        return bound_of(self._step.clipping)

    @max_grad_norm.setter
    def max_grad_norm(self, value: object) -> None:
        raise ConfigurationError(
            f"optimizer.max_grad_norm is not set: {_SCHEDULE}. Plan it with ExponentialGradClip, StepGradClip or "
            'LambdaGradClip, or have it follow released counts with make_private(clipping="adaptive")'
        )

    @property
    def noise_multiplier(self) -> float:
        """Noise over the clipping bound, of the next lot."""
        return self._step.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: object) -> None:
        raise ConfigurationError(
            f"optimizer.noise_multiplier is not set: {_SCHEDULE}. Plan it with ExponentialNoise, StepNoise or "
            "LambdaNoise: each lot is then charged for its own noise"
        )

    def schedule_noise(self, noise_multiplier: float) -> None:
        """Use another noise multiplier from the next lot on, and charge each lot for its own."""
        if noise_multiplier == self.noise_multiplier:
            return
        self._refuse_within_lot("the noise")
        self._step.use_noise(noise_multiplier)

    def schedule_bound(self, max_grad_norm: float) -> None:
        """Use another clipping bound from the next lot on."""
        clipping = self._step.clipping
        if isinstance(clipping, Adaptive) or not isinstance(clipping, Flat):
            raise ConfigurationError(
                f"the bound of {type(clipping).__name__} has no schedule: use clipping='flat' or 'automatic'"
            )
        if max_grad_norm == clipping.max_grad_norm:
            return
        self._refuse_within_lot("the clipping bound")
        clipping.max_grad_norm = max_grad_norm

    def _refuse_within_lot(self, what: str) -> None:
        microbatch = self._loader.lots.current
        if microbatch is not None and microbatch.of.added:
            raise TrainingLoopError(
                f"{what} was changed within a lot, which comes in several batches: how many they are depends on the "
                "data. Step the scheduler once an epoch, or where optimizer.stepped is True."
            )

    # ---- the rest ----------------------------------------------------------------------------------------------------

    @property
    def accumulated_iterations(self) -> int:
        """1: a step releases one lot, in however many batches it came."""
        return 1

    @property
    def loss_reduction(self) -> str:
        """How a scalar loss puts examples together."""
        return "mean" if self._step.mean_loss else "sum"

    @property
    def params(self) -> list[nn.Parameter | Tensor]:
        """The parameters that the optimizer trains."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call `fn(optimizer)` for every lot once `.grad` is private, and before the weights change.

        Spending is charged whatever hooks there are.
        """
        self.original_optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: fn(self))

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Refused unless False: the loader knows which batches belong to one lot."""
        if do_skip:
            raise ConfigurationError(
                "signal_skip_step is not needed: a lot that comes in several batches is released with its last one. "
                "Use BatchMemoryManager or make_private(max_physical_batch_size=...); for larger lots, a larger "
                "batch_size of the DataLoader"
            )


def bound_of(clipping: Clipping) -> float | list[float] | None:
    """The bound of a clipping as Opacus shows it."""
    if isinstance(clipping, Flat):
        return clipping.max_grad_norm
    if isinstance(clipping, PerLayer) and clipping.max_grad_norm is not None:
        return clipping.max_grad_norm
    if isinstance(clipping, Grouped):
        return [bound for bound in map(bound_of, clipping.groups.values()) if isinstance(bound, float)]
    return None
