"""The least noise with which planned steps, beside what was spent already, cost at most a target."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, Neighbours, RenyiBlock
from adadp.errors import ConfigurationError, LedgerNotice


def noise_for_target(
    spent: Canonical,
    event: Callable[[float], Event],
    steps: int,
    epsilon: float,
    delta: float,
    *,
    accountant: str,
    neighbours: Neighbours,
) -> float:
    """The noise multiplier for `steps` releases of `event(noise_multiplier)` on top of `spent`.

    Args:
        spent: what the ledger holds already.
        event: one step, for a noise multiplier.
        steps: how many of them are planned.
        epsilon: the target for everything together, at `delta`.
        delta: of the target.
        accountant: the name of the accountant that bounds it.
        neighbours: the relation of the ledger.

    Raises:
        ConfigurationError: no noise reaches the target; or the ledger's budget is kept by a filter, which leaves
            no target for one run.

    """
    from adadp.accounting.accountants import get_accountant  # the accounting stack is needed only here
    from adadp.accounting.calibration import calibrate_noise
    from adadp.accounting.guarantee import round_up

    if any(isinstance(kept, RenyiBlock) for kept, _ in spent):
        raise ConfigurationError(
            "this ledger's budget is kept by a filter for all of its runs, so there is no target for one of them: "
            "use make_private(noise_multiplier=...), which ends where the budget does, or another ledger"
        )

    def composition(noise_multiplier: float) -> list[tuple[Event, int]]:
        return [*spent, (event(noise_multiplier), steps)]

    found = calibrate_noise(composition, epsilon, delta, accountant=accountant, neighbours=neighbours)
    if spent:
        first = calibrate_noise(
            lambda sigma: [(event(sigma), steps)], epsilon, delta, accountant=accountant, neighbours=neighbours
        )
        before = get_accountant(accountant).epsilon(spent, delta, neighbours).epsilon
        warnings.warn(
            f"the ledger holds epsilon {round_up(before)} of the target {epsilon:g} already (delta {delta:g}): "
            f"noise multiplier {found.noise_multiplier:.4g}, where a first run needs {first.noise_multiplier:.4g}",
            LedgerNotice,
            stacklevel=3,
        )
    return found.noise_multiplier
