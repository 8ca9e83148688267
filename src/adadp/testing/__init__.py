"""Test your own training loop: what one example does to what is released, the noise, the lots.

    from adadp.testing import influence
    print(influence(train, dataset))  # train(dataset) is your own function

A test that passes proves nothing: it is there to find loops whose printed epsilon is false.
"""

from __future__ import annotations

from adadp.testing.lockstep import influence
from adadp.testing.result import Effect, Influence
from adadp.testing.statistics import Tested, inclusion, noise, processes

__all__ = ["Effect", "Influence", "Tested", "inclusion", "influence", "noise", "processes"]
