"""A walk with noise against the same walk without: the paper's D(P, Q), at learning rates chosen alike for all.

The paper names no noise, bound, start or learning rate, and D(P, Q) goes to zero with the learning rate, so each
algorithm gets the rate at which it does best: from one grid, the lowest median value after the last step, a walk that
ends outside the function's box counting as the worst. Walks for the choice are not those that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from adadp_lab.paper.item import Job, Record
from adadp_lab.paper.surfaces import Surface, surface
from adadp_lab.paper.trajectories import RULES, distance, walk
from adadp_lab.paper.workbench import Workbench

RATES = tuple(float(f"{10 ** (third / 3 - 4):.2g}") for third in range(13))
BOUND = 4.0
"""The L2 bound C: the paper's for MNIST. It matters to DPSGD; AdaDP leaves it with its first steps."""

_TRIALS = 150
_TRIAL_SEED = 1_000_003


def job(
    name: str, rules: Sequence[str], sigmas: Sequence[float], *, walks: int, seed: int, shown: float | None, kept: int
) -> Job:
    """Compare `rules` on the surface `name`; at the noise `shown`, keep so many walks of each to look at."""
    settings = {
        "surface": name, "rules": list(rules), "sigmas": list(sigmas), "bound": BOUND, "walks": walks, "shown": shown,
        "kept": kept,
    }  # fmt: skip
    return Job(compare, settings, seed, cost=0.2 * len(rules))


def compare(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """For each rule, a list over sigmas of: rate, distance to its noise-free twin (mean, spread) and to the plain
    algorithm (neither noise nor clipping), value above the lowest at the end (median; without noise), share lost.
    """
    place, sigmas, bound, walks = (settings[key] for key in ("surface", "sigmas", "bound", "walks"))
    ground = surface(place)
    # A function that falls without end has no best rate: the misprinted Beale is walked at the true one's.
    tuned_on = place if ground.lowest is not None else "beale"
    found: dict[str, list[dict[str, Any]]] = {}
    for name in settings["rules"]:
        rates = [tuned_rate(tuned_on, name, sigma, bound) for sigma in sigmas]
        rate = torch.tensor(rates, dtype=torch.float64)
        noisy = walk(
            ground, RULES[name], start=ground.start, rate=_each(rate, walks), bound=bound, walks=walks * len(sigmas),
            sigma=_each(torch.tensor(sigmas, dtype=torch.float64), walks), seed=seed,
        )  # fmt: skip
        still: dict[str, Any] = {"start": ground.start, "rate": rate[:, None], "sigma": 0.0, "bound": bound}
        still["walks"] = len(sigmas)
        twin = walk(ground, RULES[name], **still)
        plain = walk(ground, replace(RULES[name], clipped=False), **still)
        found[name] = []
        for index, sigma in enumerate(sigmas):
            these = slice(index * walks, (index + 1) * walks)
            path, quiet, bare = noisy.path[:, these], twin.path[:, index : index + 1], plain.path[:, index : index + 1]
            found[name].append({
                "sigma": sigma,
                "rate": rates[index],
                "lost": _rounded(noisy.lost[these].double().mean()),
                "distance": _summary(distance(path, quiet), noisy.lost[these].any()),
                "plain_distance": _summary(distance(path, bare), noisy.lost[these].any() | plain.lost[index]),
                "gap": _gap(ground, path[-1]),
                "twin_gap": _gap(ground, quiet[-1]),
            })  # fmt: skip
            if sigma == settings["shown"]:
                found[name][-1] |= {"paths": _points(path[:, : settings["kept"]]), "twin": _points(quiet)}
    return {"device": "cpu", "comparison": found}


@lru_cache(maxsize=256)
def tuned_rate(name: str, rule: str, sigma: float, bound: float) -> float:
    """The best of `RATES`."""
    ground, walks = surface(name), len(RATES) * _TRIALS
    rate = _each(torch.tensor(RATES, dtype=torch.float64), _TRIALS)
    trials = walk(
        ground, RULES[rule], start=ground.start, rate=rate, sigma=sigma, bound=bound, walks=walks, seed=_TRIAL_SEED
    )
    last = trials.path[-1]
    left, right, bottom, top = ground.box
    inside = (last[:, 0] >= left) & (last[:, 0] <= right) & (last[:, 1] >= bottom) & (last[:, 1] <= top)
    value = torch.where(inside, ground.value(last), math.inf).view(len(RATES), _TRIALS)
    return RATES[int(value.median(dim=1).values.argmin())]


def _each(values: Tensor, times: int) -> Tensor:
    return values.repeat_interleave(times)[:, None]


def _rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.5g}")


def _summary(distances: Tensor, lost: Tensor) -> dict[str, float] | None:
    """None where a walk ran away: such a mean would be of where it was stopped."""
    if bool(lost):
        return None
    return {"mean": _rounded(distances.mean()), "spread": _rounded(distances.std())}


def _gap(ground: Surface, points: Tensor) -> float:
    return _rounded(ground.value(points).median() - (ground.lowest or 0.0))


def _points(path: Tensor) -> list[list[list[float]]]:
    """[walks][steps][2], to three digits after the point."""
    return [[[round(float(x), 3), round(float(y), 3)] for x, y in one] for one in path.transpose(0, 1)]


def pooled(records: Sequence[Record], rule: str, index: int, key: str = "distance") -> tuple[float, float] | None:
    """The mean of D(P, Q) over the walks of all records and its standard error; None where a walk ran away."""
    parts = [record["comparison"][rule][index][key] for record in records]
    if any(part is None for part in parts):
        return None
    walks = sum(record["settings"]["walks"] for record in records)
    mean = sum(part["mean"] for part in parts) / len(parts)
    variance = sum(part["spread"] ** 2 for part in parts) / len(parts)
    return mean, math.sqrt(variance / walks)


def written(value: tuple[float, float] | None) -> str:
    """A mean with its standard error, for a table."""
    if value is None:
        return "runs away"
    digits = 2 if value[1] >= 0.01 else 3
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"
