"""What a target's trials are held against: its guarantee's trade-off curve, or the claim where there is none."""

from __future__ import annotations

from dataclasses import dataclass

from adadp.accounting import gaussian
from adadp.accounting.accountants import covering_accountant
from adadp.accounting.composition import Canonical
from adadp.accounting.curves import privacy_profile
from adadp.accounting.events import Neighbours
from adadp.accounting.renyi import as_gaussian
from adadp.audit.bounds import Claim, gaussian_claim

_POINTS = 60
"""Of a profile that is not Gaussian's: fewer make the curve lower, never higher."""


@dataclass(frozen=True)
class Promise:
    """A claim with its numbers. `guaranteed` is None where no proof covers what ran; `why` then says so."""

    claim: Claim
    delta: float
    guaranteed: float | None
    claimed: float | None
    gaussian: bool
    why: tuple[str, ...] = ()

    @property
    def epsilon(self) -> float:
        """What the verdict is about."""
        found = self.guaranteed if self.guaranteed is not None else self.claimed
        assert found is not None
        return found


def of_guarantee(composition: Canonical, epsilon: float, delta: float, neighbours: Neighbours) -> Promise:
    """The whole curve of what the engine charged."""
    sigmas = [(as_gaussian(event, neighbours), count) for event, count in composition]
    plain = [(sigma, count) for sigma, count in sigmas if sigma is not None]
    if len(plain) == len(sigmas):
        return Promise(gaussian_claim(gaussian.compose(plain)), delta, epsilon, epsilon, True)
    top = 1.5 * max(epsilon, 0.1)
    epsilons = [top * index / _POINTS for index in range(_POINTS + 1)]
    accountant = covering_accountant(composition, neighbours)
    deltas = privacy_profile(composition, epsilons, accountant=accountant, neighbours=neighbours, aim=delta)
    return Promise(Claim((*epsilons, epsilon), (*deltas, delta)), delta, epsilon, epsilon, False)


def of_text(claimed: float, delta: float, why: tuple[str, ...]) -> Promise:
    """The one (epsilon, delta) that a published text claims."""
    return Promise(Claim((claimed,), (delta,)), delta, None, claimed, False, why)
