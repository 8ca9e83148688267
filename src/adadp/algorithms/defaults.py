"""Every number that an algorithm is run with unless told otherwise, in one place.

The sound forms are ours, and so are their numbers; those of the published forms are the paper's for MNIST. `lr` is
the learning rate at the start, `schedule` how it goes on (`adadp.algorithms.schedules`); None is `learning_rate` below.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

#: The paper's local clipping and update rule. It says nothing of eps0; 1e-8 is our choice.
_BOX = {"max_grad_norm": 4.0, "beta": 1.2, "threshold": 1e-6, "decay": 0.9}
_RULE = {"gamma": 0.1, "epsilon0": 1e-8}

#: A shape from probes: `probes` synthetic inputs through the current weights, every `refresh` steps.
_SHAPE = {"damping": 0.1, "rank": 32, "probes": 512, "refresh": 50}
BOUND, WIDE_BOUND = 0.1, 3.0
"""The sound forms' bound on one example's gradient, and their bound where classes are weighted.

Nearly every gradient is longer than the small one, so that examples count alike, which would undo weights. The wide one
leaves many as they are (`results/tables/class-weights.md`)."""

_SOUND = {"schedule": "cosine", "momentum": 0.9, "max_grad_norm": BOUND}

DEFAULTS: MappingProxyType[tuple[str, str], dict[str, Any]] = MappingProxyType(
    {
        ("adadp", "sound"): {"lr": None, **_SOUND, "before": 0.25, "after": 0.0, **_SHAPE},
        ("adadp", "example"): {"lr": 0.002, "schedule": "constant", **_BOX, **_RULE},
        ("adadp", "lot"): {"lr": 0.002, "schedule": "constant", **_BOX, **_RULE},
        ("dpsgd", ""): {"lr": None, **_SOUND},
        ("adal", ""): {"lr": 0.001, "schedule": "constant", "max_grad_norm": 4.0, **_RULE},
        ("adan", "sound"): {"lr": None, **_SOUND, "before": 0.25, "after": -0.25, **_SHAPE},
        ("adan", "example"): {"lr": 0.1, "schedule": "constant", **_BOX},
        ("adan", "lot"): {"lr": 0.1, "schedule": "constant", **_BOX},
        # The paper does not give AGD's numbers; growth is its authors'. Objectives are differences from where the step
        # starts, each example's bounded by `objective_bound`, or ("loss") losses as published.
        ("agd", ""): {
            "lr": 0.5,
            "schedule": "constant",
            "max_grad_norm": 1.0,
            "candidates": 5,
            "objective": "improvement",
            "objective_bound": 0.2,
            "share": 0.2,
            "growth": 0.1,
            "redraws": 1,
        },
        ("dpopt", "sound"): {"lr": None, **_SOUND, "floor": 0.1, "probes": 512, "refresh": 50},
        ("dpopt", "published"): {"lr": 0.1, "schedule": "linear", **_BOX, "floor": 1e-3},
        ("sgd", ""): {"lr": 0.1, "schedule": "cosine", "momentum": 0.9},
    }
)


NOISE_WALK, LARGEST_STEP = 0.4, 0.8


def learning_rate(max_grad_norm: float, lot: int, steps: int, noise_multiplier: float, weights: int) -> float:
    """A rate for SGD with momentum 0.9 that transfers, from public numbers alone.

    Noise moves a weight by lr * C * sigma / L in a step and by sqrt(steps) times that in all. How far it may is much
    the same for all budgets and lots (`results/shapes`: the best rate of every grid is in proportion to 1 / sigma), and
    falls slowly with the number of weights. Where there is little noise, a step is held to what it may be without any.
    """
    walk = max_grad_norm * noise_multiplier / lot * math.sqrt(steps * math.sqrt(weights))
    return min(NOISE_WALK / walk, LARGEST_STEP / max_grad_norm)


def rate_for_walk(walk: float, max_grad_norm: float, lot: int, steps: int, noise_multiplier: float) -> float:
    """The rate at which the noise of all steps would move a weight by `walk`, if each moved it by lr * noise."""
    return walk * lot / (max_grad_norm * noise_multiplier * math.sqrt(steps))


def default_lot(examples: int) -> int:
    """About 4 sqrt(N), from the size of the dataset alone: 980 of 60,000 examples, 152 of 1,438."""
    return max(1, min(examples, round(4 * math.sqrt(examples))))


STEPS = 600
"""How long a run is unless told otherwise, whatever its lot."""


def default_delta(examples: int) -> float:
    """1 / N^1.1 rounded down to one digit, and 1e-4 at most: below 1/N, at which one example could be published."""
    exponent = math.floor(-1.1 * math.log10(examples))
    digit = math.floor(examples**-1.1 / 10.0**exponent)
    return min(1e-4, float(f"{max(1, digit)}e{exponent}"))
