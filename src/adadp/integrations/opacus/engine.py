"""The engine with the arguments, attributes and methods that Opacus' has.

Arguments become those of `adadp.PrivacyEngine`, which does all of the work, or are refused.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adadp.checks.setup import as_float, check_training
from adadp.checks.weights import note_paid
from adadp.clipping import Adaptive, Clipping, PerLayer
from adadp.distributed.sharded import refuse_settings
from adadp.engine import PrivacyEngine as _Engine
from adadp.errors import ConfigurationError, PrivacyError
from adadp.integrations.opacus.accountant import Accountant, accountant_named
from adadp.integrations.opacus.criterion import DPLossFastGradientClipping
from adadp.integrations.opacus.loader import DPDataLoader, ordinary
from adadp.integrations.opacus.module import ModuleValidator, name_as_opacus_does
from adadp.integrations.opacus.notice import say
from adadp.integrations.opacus.optimizer import DPOptimizer
from adadp.mechanism.optimizer import PrivateOptimizer

_MODES = ("hooks", "functorch", "ew", "ghost")
_REFUSED_MODES = {
    "no_op": "the loop would compute each example's gradient itself, and the engine cannot see how. Use 'hooks' and an "
    "ordinary backward pass",
    "ghost_fsdp": "use 'ghost' with the model itself",
    "ghost_tp": "use 'ghost' with the model itself",
}
_GENERATOR = (
    "noise_generator is not taken: whoever knows its seed can subtract the noise, and torch.Generator() has the same "
    "seed everywhere. PrivacyEngine(seed=...) makes noise and lots repeatable, and must stay secret"
)
_FIXED = (
    "poisson_sampling=False draws lots of one size anew for each step (sampling='fixed'), which has a proof: an "
    "example is replaced, not removed, and epsilon is larger. Opacus keeps the DataLoader's own order, and its epsilon "
    "does not hold for that. sampling='shuffle' does the same, with no guarantee"
)
_SUM = (
    "loss_reduction='sum': the released gradient is divided by the expected lot all the same, where Opacus leaves the "
    "sum. Multiply the learning rate by optimizer.expected_batch_size for the same steps"
)
_PREFIX = "_module."


class PrivacyEngine(_Engine):
    """`adadp.PrivacyEngine` by the names of Opacus'.

    Args:
        accountant: "pld" ("prv" is the same), "rdp", or any other of adadp's. "gdp" is refused.
        settings: those of `adadp.PrivacyEngine`: secure_mode, seed, ledger, dataset, budget, strict.

    """

    _optimizer_class = DPOptimizer
    _loader_class = DPDataLoader

    def __init__(self, *, accountant: str = "pld", **settings: Any) -> None:
        super().__init__(accountant=accountant_named(accountant), **settings)
        self._noiseless = False

    # ---- making things private ----------------------------------------------------------------------------------

    def make_private(  # type: ignore[override] # Opacus returns the criterion, too, where its mode is "ghost"
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] | None = None,
        criterion: nn.Module | None = None,
        poisson_sampling: bool = True,
        clipping: str | Clipping = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        unclipped_num_std: float | None = None,
        **settings: Any,
    ) -> Any:
        """As `adadp.PrivacyEngine.make_private`, with Opacus' arguments.

        Args:
            module, optimizer, data_loader: as there; a private loader or optimizer of an earlier run stands for what it
                was made of.
            noise_multiplier: as there; with 0, to look for a mistake, nothing is noised and the guarantee is none.
            max_grad_norm: the bound; with clipping="per_layer" also a list of one for each parameter that is trained,
                in the optimizer's order.
            criterion: the loss. With grad_sample_mode="ghost" it is wrapped and returned.
            poisson_sampling: False for lots of one size, drawn anew for each step.
            clipping: "flat", "per_layer", "adaptive", any other of adadp's, or a clipping object.
            noise_generator: refused.
            grad_sample_mode: "hooks", "functorch", "ew" and "ghost" are one; "ghost" returns the criterion, too.
            unclipped_num_std: of clipping="adaptive": the standard deviation of the count's noise.
            settings: the other arguments of `adadp.PrivacyEngine.make_private`, and of clipping="adaptive":
                target_unclipped_quantile, clipbound_learning_rate, min_clipbound, max_clipbound.

        Returns:
            (module, optimizer, loader), or (module, optimizer, criterion, loader) with grad_sample_mode="ghost".

        Raises:
            ConfigurationError and others: as there.

        Guarantee:
            As there.

        """
        refuse_settings(module, {"the engine of adadp.integrations.opacus": True})
        _check_mode(grad_sample_mode, noise_generator)
        clipping, bound, settings = _clipping(clipping, max_grad_norm, module, optimizer, settings)
        if isinstance(clipping, Adaptive) and unclipped_num_std is not None:
            clipping.share = _share_of(noise_multiplier, unclipped_num_std)
        elif unclipped_num_std is not None:
            raise ConfigurationError("unclipped_num_std goes with clipping='adaptive'")
        reduction = settings.get("loss_reduction", "mean")
        if reduction == "sum":
            say(_SUM)
        ghost = grad_sample_mode == "ghost"
        model, private, loader = super().make_private(
            module=module,
            optimizer=_unwrapped(optimizer),
            data_loader=ordinary(data_loader),
            noise_multiplier=noise_multiplier,
            max_grad_norm=bound,
            clipping=clipping,
            criterion=None if ghost else criterion,
            **_with_sampling(poisson_sampling, settings),
        )
        name_as_opacus_does(model)
        if not ghost:
            return model, private, loader
        loss = nn.CrossEntropyLoss() if criterion is None else criterion
        return model, private, DPLossFastGradientClipping(loss, private, reduction), loader

    def make_private_with_epsilon(  # type: ignore[override] # as make_private
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        max_grad_norm: float | Sequence[float] | None = None,
        poisson_sampling: bool = True,
        clipping: str | Clipping = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        alphas: Any = None,
        **settings: Any,
    ) -> Any:
        """As `adadp.PrivacyEngine.make_private_with_epsilon`, with Opacus' arguments (`make_private`).

        What the ledger holds counts towards the target, and training ends before it is exceeded: here Opacus goes on.
        """
        _check_mode(grad_sample_mode, noise_generator)
        if alphas is not None:
            say("alphas= is not used: the accountant chooses its orders by itself")
        clipping, bound, settings = _clipping(clipping, max_grad_norm, module, optimizer, settings)
        return super().make_private_with_epsilon(
            module=module,
            optimizer=_unwrapped(optimizer),
            data_loader=ordinary(data_loader),
            max_grad_norm=bound,
            clipping=clipping,
            grad_sample_mode=grad_sample_mode,
            **_with_sampling(poisson_sampling, settings),
        )

    def _noise(self, noise_multiplier: float) -> float:
        if as_float("noise_multiplier", noise_multiplier) != 0:
            return super()._noise(noise_multiplier)
        say("noise_multiplier=0: sums over private examples are released as they are, and the guarantee is none")
        self._noiseless = True
        return 0.0

    # ---- what may be said -----------------------------------------------------------------------------------------

    @property
    def accountant(self) -> Accountant:  # type: ignore[override] # the engine itself does for a loop of our own
        """The ledger as Opacus' accountants show it."""
        return Accountant(self)

    def get_epsilon(self, delta: float) -> float:
        """The epsilon at `delta`; infinite where lots were released without noise.

        Raises:
            NoGuaranteeError: there is none, for another reason.

        """
        guarantee = self.guarantee(delta)
        return math.inf if guarantee.epsilon is None and self._noiseless else guarantee.require()

    # ---- before training ------------------------------------------------------------------------------------------

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether `validate` passes."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except PrivacyError:
            return False
        return True

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise what `make_private` would, as far as it can be known before: the module, and the others if given."""
        if optimizer is not None and data_loader is not None:
            loader = ordinary(data_loader)
            self._sampling(loader, "poisson", None)
            check_training(module, _unwrapped(optimizer), loader.dataset, "mean", 1.0)
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy in which layers that mix examples are replaced; raises where something is still in the way."""
        return ModuleValidator.fix_and_validate(module)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(  # type: ignore[override] # Opacus' arguments
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write weights, states and what they cost to one file, with the keys that Opacus uses.

        A run that goes on from the file is a new one, which draws other lots and noise. To go on with the interrupted
        one, save `state_dict()`, too, and give it to `PrivacyEngine(resume=...)` (docs/checkpoints.md).
        """
        states = {
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
        }
        parts = {"optimizer": optimizer, "noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        states |= {f"{name}_state_dict": part.state_dict() for name, part in parts.items() if part is not None}
        torch.save({**(checkpoint_dict or {}), **states}, path, **(torch_save_kwargs or {}))

    def load_checkpoint(  # type: ignore[override] # Opacus' arguments
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Read a file that `save_checkpoint`, or Opacus, wrote; what it cost is charged to this engine's ledger.

        Nothing in the file is executed (`weights_only=True`). The cost is charged first: where it is refused, nothing
        was loaded.

        Returns:
            What was in the file.

        """
        found: dict[str, Any] = torch.load(path, **{"weights_only": True, **(torch_load_kwargs or {})})
        note_paid(module, self._open())
        self.accountant.load_state_dict(found["privacy_accountant_state_dict"])
        weights = {key.removeprefix(_PREFIX): value for key, value in found["module_state_dict"].items()}
        module.load_state_dict(weights, **(module_load_dict_kwargs or {}))
        parts = {"optimizer": optimizer, "noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        for name, part in parts.items():
            state = found.get(f"{name}_state_dict")
            if part is not None and state is not None:
                part.load_state_dict(state)
            elif (part is None) != (state is None):
                say(f"the checkpoint has {'no' if state is None else 'a'} state of the {name}, which was"
                    f"{'' if part is not None else ' not'} given")  # fmt: skip
        return found


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """`PrivacyEngine` with clipping="adaptive". Opacus updates the bound within a lot, here it is fixed in each."""

    def make_private(self, *, clipping: str | Clipping = "adaptive", **settings: Any) -> Any:
        """As `PrivacyEngine.make_private`."""
        return super().make_private(clipping=clipping, **settings)

    def make_private_with_epsilon(self, *, clipping: str | Clipping = "adaptive", **settings: Any) -> Any:
        """As `PrivacyEngine.make_private_with_epsilon`."""
        return super().make_private_with_epsilon(clipping=clipping, **settings)


def _check_mode(mode: str, noise_generator: object) -> None:
    if noise_generator is not None:
        raise ConfigurationError(_GENERATOR)
    if mode in _REFUSED_MODES:
        raise ConfigurationError(f"grad_sample_mode={mode!r} is not here: {_REFUSED_MODES[mode]}")
    if mode not in _MODES:
        raise ConfigurationError(f"grad_sample_mode must be one of {', '.join(_MODES)} (all are one), not {mode!r}")


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.original_optimizer if isinstance(optimizer, PrivateOptimizer) else optimizer


def _with_sampling(poisson_sampling: bool, settings: dict[str, Any]) -> dict[str, Any]:
    if poisson_sampling or "sampling" in settings:
        return settings
    say(_FIXED)
    return {**settings, "sampling": "fixed"}


_ADAPTIVE = {
    "target_unclipped_quantile": "quantile",
    "clipbound_learning_rate": "rate",
    "min_clipbound": "least",
    "max_clipbound": "most",
}


def _clipping(
    clipping: str | Clipping,
    max_grad_norm: float | Sequence[float] | None,
    module: nn.Module,
    optimizer: Any,
    settings: dict[str, Any],
) -> tuple[str | Clipping, float | None, dict[str, Any]]:
    """The clipping and bound as the engine takes them, and the settings that are left."""
    own = {_ADAPTIVE[name]: value for name, value in settings.items() if name in _ADAPTIVE}
    rest = {name: value for name, value in settings.items() if name not in _ADAPTIVE}
    if own and clipping != "adaptive":
        raise ConfigurationError(f"{', '.join(set(settings) & set(_ADAPTIVE))} goes with clipping='adaptive'")
    if isinstance(max_grad_norm, list | tuple):
        if clipping != "per_layer":
            raise ConfigurationError("a list of bounds goes with clipping='per_layer'; any other has one bound")
        return PerLayer(_bound_of_each(max_grad_norm, module, _unwrapped(optimizer))), None, rest
    bound = None if max_grad_norm is None else as_float("max_grad_norm", max_grad_norm)  # type: ignore[arg-type]
    if clipping == "adaptive":
        return Adaptive(1.0 if bound is None else bound, **own), None, rest
    return clipping, bound, rest


def _bound_of_each(bounds: Sequence[float], module: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Bounds by parameter, in the order in which the optimizer has them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len(bounds) != len(trained):
        raise ConfigurationError(
            f"max_grad_norm has {len(bounds)} bounds, and the optimizer trains {len(trained)} parameters: one is "
            "needed for each, in the optimizer's order"
        )
    # A name is no pattern: what fnmatch would read as one is escaped.
    return {
        glob.escape(names.get(id(p), "")): as_float("max_grad_norm", bound)
        for p, bound in zip(trained, bounds, strict=True)
    }


def _share_of(noise_multiplier: float, unclipped_num_std: float) -> float:
    """The share of 1/sigma^2 that a count with noise of this standard deviation takes: (sigma / (2 sigma_b))^2."""
    if not 2 * unclipped_num_std > noise_multiplier > 0:
        raise ConfigurationError(
            f"unclipped_num_std must be above half of the noise multiplier, {noise_multiplier / 2:g}, which must be "
            f"above 0: nothing would be left for the gradient at {unclipped_num_std!r}"
        )
    return (noise_multiplier / (2 * unclipped_num_std)) ** 2
