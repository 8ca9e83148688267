"""Test your own training loop: what one example does to what is released, the noise, the lots.

A test that passes proves nothing: it is there to find loops whose printed epsilon is false.
"""

from __future__ import annotations

from adadp.testing.lockstep import influence
from adadp.testing.result import Effect, Influence

__all__ = ["Effect", "Influence", "influence"]
