"""Weights of classes in the loss: declared, or from class counts that were released with noise and charged.

Each row's loss is multiplied by a number that follows from its own label and released or declared numbers alone,
before its gradient is clipped: one row's contribution stays within the bound that it has without weights. The largest
weight is 1. Weights from raw counts would show how many rows each class has, so there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.accounting.events import Gaussian
from adadp.data.labels import listed
from adadp.errors import ConfigurationError
from adadp.preprocessing.release import Charges, person_weights, release

PAID = "paid"
"""In place of declared numbers: pay for counts."""

SHARE = 0.02
"""Part of the budget that counts take."""


def parse(text: str | None) -> Mapping[str, float] | None:
    """Class -> weight from "no=1,yes=5"; None for "paid", and where nothing was asked for."""
    if text is None or text == PAID:
        return None
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = item.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name.strip() or name.strip() in found or not (math.isfinite(weight) and weight > 0):
            raise ConfigurationError(
                f"class_weights must be {PAID}, or a weight above 0 for each class, such as no=1,yes=5, not {text!r}"
            )
        found[name.strip()] = weight
    return found


def declared(text: str | None, classes: Sequence[str]) -> Tensor | None:
    """The declared weights in the order of the classes, [k], the largest 1; None where none were declared.

    Raises:
        ConfigurationError: they are not those of the classes.

    """
    given = parse(text)
    if text is not None and not classes:
        raise ConfigurationError("class_weights are for classes, and a number is predicted here: leave them out")
    if given is None:
        return None
    missing, unknown = (sorted(one - other) for one, other in ((set(classes), set(given)), (set(given), set(classes))))
    if missing or unknown:
        raise ConfigurationError(
            f"class_weights must name each class once ({listed(classes)}): "
            + (f"{listed(missing)} has none" if missing else f"there is no class {unknown[0]!r}")
        )
    return _largest_one([given[name] for name in classes])


def planned(noise_multiplier: float | None) -> tuple[Gaussian, ...]:
    """Return the events that `paid` will charge; none where it is not asked for."""
    return () if noise_multiplier is None else (Gaussian(noise_multiplier),)


def paid(
    labels: Tensor, classes: int, noise_multiplier: float, *, persons: Any, seed: int | None, ledger: Charges
) -> Tensor:
    """Weights in proportion to 1 / a class's noised count, [k], the largest 1.

    Guarantee:
        One `Gaussian(noise_multiplier)` event, charged before the release. Adding or removing a row moves one count by
        1; with `persons`, rows weigh 1 / their person's rows, and all rows of one person move the counts by at most 1
        in L2 norm. A count below three deviations of the noise is taken as that: nothing is divided by noise.

    """
    weights = person_weights(persons, len(labels), ledger)
    counts = np.bincount(labels.numpy(), weights=weights, minlength=classes).astype(np.float64)
    noised, _ = release(
        counts, sensitivity=1.0, noise_multiplier=noise_multiplier, random_state=seed, purpose="class counts",
        ledger=ledger,
    )  # fmt: skip
    return _largest_one((1 / np.maximum(noised, max(1.0, 3 * noise_multiplier))).tolist())


def by_name(weights: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """The weights by the names of the classes."""
    return dict(zip(classes, (round(weight, 6) for weight in weights.tolist()), strict=True))


def _largest_one(weights: Sequence[float]) -> Tensor:
    return torch.tensor([weight / max(weights) for weight in weights], dtype=torch.float32)
