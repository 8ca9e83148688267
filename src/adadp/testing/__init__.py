"""Tests of your own training loop, to find loops whose printed epsilon is false. A test that passes proves nothing.

    from adadp.testing import influence
    print(influence(train, dataset))  # train(dataset) is your own function

- `influence` (`lockstep`, `world`): how far one example moves a release. The function is run without the example and
  with it, in lockstep: `keyed_loader` and `keyed_draws` make all random numbers the same, `changed_dataset` and
  `awkward_examples` make the data, `fingerprints` compares weights, and `effects` holds the results.
- `noise`, `processes`, `inclusion` (`statistics`): whether noise and lots are drawn as is charged for.
- `spending` (`printed_epsilon`): whether a printed epsilon covers all that was released.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adadp.testing.effects import Effect, Influence
    from adadp.testing.lockstep import influence
    from adadp.testing.printed_epsilon import Spending, spending
    from adadp.testing.statistics import Tested, inclusion, noise, processes

# Imported when first used: pytest imports this package, for its plugin, in every project in which adadp is installed.
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
