"""Test your own training loop: what one example does to what is released, the noise, the lots, the number.

    from adadp.testing import influence
    print(influence(train, dataset))  # train(dataset) is your own function

A test that passes proves nothing: it is there to find loops whose printed epsilon is false.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adadp.testing.effects import Effect, Influence
    from adadp.testing.lockstep import influence
    from adadp.testing.printed_epsilon import Spending, spending
    from adadp.testing.statistics import Tested, inclusion, noise, processes

# Imported when first used: pytest loads the plugin of this package in every project that adadp is installed for.
_HOME_OF = {
    "influence": "lockstep",
    "Effect": "effects",
    "Influence": "effects",
    "Spending": "printed_epsilon",
    "spending": "printed_epsilon",
    "Tested": "statistics",
    "inclusion": "statistics",
    "noise": "statistics",
    "processes": "statistics",
}

__all__ = ["Effect", "Influence", "Spending", "Tested", "inclusion", "influence", "noise", "processes", "spending"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'adadp.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"adadp.testing.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
