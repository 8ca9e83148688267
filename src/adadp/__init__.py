"""Differentially private training for PyTorch, with guarantees that are true.

    from adadp import PrivacyEngine

makes a model, an optimizer and a data loader private in one call; `engine.guarantee(delta)` says what may be said.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from adadp import _moved

if TYPE_CHECKING:
    from adadp.accounting.budget import Budget
    from adadp.accounting.ledger import Ledger
    from adadp.checks.notes import notes
    from adadp.checks.repair import fix
    from adadp.clipping import Adaptive, Automatic, Clipping, Ellipsoid, Flat, Grouped, Local, PerLayer
    from adadp.engine import PrivacyEngine
    from adadp.errors import PrivacyError
    from adadp.gradients.registration import register_layer
    from adadp.mechanism.replay import TrainingStep
    from adadp.sampling.units import Units
    from adadp.shapes import Diagonal, Kronecker, Paid, Probe, Public, Raw, Released

# Where each name lives. They are imported when first used: `adadp account` and reading a ledger need no torch.
_HOMES = {
    "adadp.accounting.budget": ("Budget",),
    "adadp.accounting.ledger": ("Ledger",),
    "adadp.clipping": ("Adaptive", "Automatic", "Clipping", "Ellipsoid", "Flat", "Grouped", "Local", "PerLayer"),
    "adadp.engine": ("PrivacyEngine",),
    "adadp.errors": ("PrivacyError",),
    "adadp.gradients.registration": ("register_layer",),
    "adadp.mechanism.replay": ("TrainingStep",),
    "adadp.sampling.units": ("Units",),
    "adadp.shapes": ("Diagonal", "Kronecker", "Paid", "Probe", "Public", "Raw", "Released"),
    "adadp.checks.notes": ("notes",),
    "adadp.checks.repair": ("fix",),
}
_moved.install()
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.2.0"

__all__ = [
    "Adaptive",
    "Automatic",
    "Budget",
    "Clipping",
    "Diagonal",
    "Ellipsoid",
    "Flat",
    "Grouped",
    "Kronecker",
    "Ledger",
    "Local",
    "Paid",
    "PerLayer",
    "PrivacyEngine",
    "PrivacyError",
    "Probe",
    "Public",
    "Raw",
    "Released",
    "TrainingStep",
    "Units",
    "fix",
    "notes",
    "register_layer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'adadp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
