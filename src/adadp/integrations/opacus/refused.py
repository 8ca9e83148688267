"""Names of Opacus that have no counterpart. They can be imported, and say what to do when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from adadp.errors import ConfigurationError


class Refused:
    """Stands for a function or class of Opacus; calling it raises ConfigurationError."""

    def __init__(self, name: str, instead: str) -> None:
        self.__name__, self._instead = name, instead

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(f"{self.__name__} of Opacus is not here: {self._instead} (docs/opacus.md)")

    def __repr__(self) -> str:
        return f"<{self.__name__} of Opacus, refused>"


_WRAPPER = "make_private watches the model that it is given, and needs no wrapper. Nothing stores an example's gradient"
_ACCOUNTANT = "PrivacyEngine has its ledger, and engine.accountant shows it. For numbers alone: adadp.accounting"
_FIXER = "change the layer yourself before make_private. ModuleValidator.fix is adadp.fix"

DPLightningDataModule = Refused(
    "DPLightningDataModule", "adadp.integrations.lightning.Private makes Lightning's Trainer private"
)
DPPerLayerOptimizer = Refused("DPPerLayerOptimizer", 'make_private(clipping="per_layer") makes the optimizer')
GradSampleModule = Refused("GradSampleModule", _WRAPPER)
wrap_model = Refused("wrap_model", _WRAPPER)
forbid_accumulation_hook = Refused(
    "forbid_accumulation_hook", "a lot is released once, and what was differentiated twice is refused, without a hook"
)
make_functional = Refused(
    "make_functional", "use grad_sample_mode='hooks' and the ordinary loop, or torch.func.functional_call"
)
RDPAccountant = Refused("RDPAccountant", f'{_ACCOUNTANT}; PrivacyEngine(accountant="rdp")')
PRVAccountant = Refused("PRVAccountant", _ACCOUNTANT)
GaussianAccountant = Refused("GaussianAccountant", "its central limit theorem can give an epsilon that is too small")
UniformWithReplacementSampler = Refused(
    "UniformWithReplacementSampler", "give make_private an ordinary DataLoader; it draws Poisson lots by itself"
)
register_module_fixer = Refused("register_module_fixer", _FIXER)
register_module_validator = Refused("register_module_validator", _FIXER)
