"""What a run costs, along the way: Theorem 1 as the paper counts, and PLD as it may be counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adadp.accounting.accountants import get_accountant
from adadp.accounting.calibration import calibrate_noise, most
from adadp.accounting.events import Event, Gaussian, PoissonGaussian
from adadp.accounting.theorem1 import ORDERS, renyi_divergences
from adadp_lab.paper.item import Job
from adadp_lab.paper.workbench import Workbench


def account_job(
    *, rate: float, noise_multiplier: float, steps: Sequence[int], delta: float,
    epsilon: float | None = None, gaussian: float | None = None, pld: Sequence[int] | None = None,
) -> Job:  # fmt: skip
    """The cost of training after each of `steps`; PLD, which takes longer, after those of `pld` (the last one)."""
    settings: dict[str, Any] = {
        "rate": rate, "noise_multiplier": noise_multiplier, "steps": list(steps), "delta": delta, "epsilon": epsilon,
        "gaussian": gaussian, "pld": list(steps[-1:] if pld is None else pld),
    }  # fmt: skip
    return Job(account, settings, cost=0.3 * len(settings["pld"]))


def account(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """Theorem 1's epsilon at `delta`, and its delta_* at `epsilon`; PLD's epsilon with and without DP-PCA."""
    del seed, bench
    rate, sigma, delta = settings["rate"], settings["noise_multiplier"], settings["delta"]
    claimed = Theorem1(rate, delta).along([[max(settings["steps"]), sigma]], settings["steps"], settings["epsilon"])
    pld, whole = [], []
    for steps in settings["pld"]:
        training: list[tuple[Event, int]] = [(PoissonGaussian(sigma, rate), steps)]
        pld.append(_pld(training, delta))
        if settings["gaussian"] is not None:
            whole.append(_pld([*training, (Gaussian(settings["gaussian"]), 1)], delta))
    return {"claimed": claimed, "pld": pld, "pld_with_pca": whole or pld}


def _pld(composition: list[tuple[Event, int]], delta: float) -> float:
    return float(f"{get_accountant('pld').epsilon(composition, delta).epsilon:.6g}")


class Theorem1:
    """Lots of possibly different noise, added up at each order."""

    def __init__(self, rate: float, delta: float) -> None:
        self.rate, self.delta = rate, delta

    def along(self, lots: Sequence[Sequence[float]], steps: Sequence[int], epsilon: float | None) -> dict[str, Any]:
        """After each of `steps`, of `lots` [[how many, noise multiplier], ...]: epsilon, and delta_* at `epsilon`."""
        found: dict[str, Any] = {"steps": list(steps), "epsilon": [], "delta": []}
        totals, gone, queue = [0.0] * len(ORDERS), 0, [[int(count), sigma] for count, sigma in lots]
        for step in steps:
            while gone < step and queue:
                count = min(queue[0][0], step - gone)
                each = renyi_divergences(self.rate, queue[0][1])
                totals = [total + count * value for total, value in zip(totals, each, strict=True)]
                gone += int(count)
                queue[0][0] -= count
                if not queue[0][0]:
                    queue.pop(0)
            found["epsilon"].append(self._rounded(self._epsilon(totals)))
            found["delta"].append(None if epsilon is None else self._rounded(_delta(totals, epsilon)))
        return found

    def _epsilon(self, totals: Sequence[float]) -> float:
        return min(t + math.log(1 / self.delta) / (order - 1) for t, order in zip(totals, ORDERS, strict=True))

    @staticmethod
    def _rounded(value: float) -> float:
        return float(f"{value:.5g}")


def _delta(totals: Sequence[float], epsilon: float) -> float:
    """The least delta_* for which Theorem 1 gives `epsilon`: the paper's right axis."""
    logs = [(order - 1) * (total - epsilon) for total, order in zip(totals, ORDERS, strict=True)]
    return min(1.0, math.exp(min(min(logs), 0.0)))


def steps_for(epsilon: float, delta: float, *, rate: float, noise_multiplier: float) -> int:
    """How many steps Theorem 1 allows."""
    event = PoissonGaussian(noise_multiplier, rate)
    return most(lambda count: [(event, count)], epsilon, delta, accountant="theorem1", guess=100)


def noise_for(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """The least noise multiplier, by PLD, rounded up to four digits: settings are read by people too."""
    found = calibrate_noise(lambda sigma: [(PoissonGaussian(sigma, rate), steps)], epsilon, delta)
    digits = 3 - math.floor(math.log10(found.noise_multiplier))
    return float(math.ceil(found.noise_multiplier * 10**digits) / 10**digits)
