"""How good predictions are: on held-out rows, or from counts of them that carry noise.

None of it is private by itself. `held_out.py` says what a run may show of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """Figures by name, and what a constant guess reaches.

    Attributes:
        values: accuracy, balanced_accuracy, f1 and, from probabilities, auc (means over classes); or mae, rmse and r2.
        baseline: the accuracy of always naming the most frequent class; or the mean absolute error of always naming the
            median.
        rows: how many were predicted; persons, where they were counted.
        by_class: for each class how many rows, recall, precision and f1; empty where a number is predicted.
        learnt: whether the predictions are better than the constant guess by more than chance makes them: in accuracy,
            or, where classes were weighted, in balanced accuracy, of which a constant guess has 1 / the classes.
        noise: standard error that noise gives accuracy, or the mean absolute error; 0 for exact figures.

    """

    values: dict[str, float]
    baseline: float
    rows: float
    by_class: dict[str, dict[str, float]]
    learnt: bool
    noise: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        kept = {"values": self.values, "baseline": self.baseline, "rows": self.rows, "learnt": self.learnt}
        kept |= {"noise": self.noise} if self.noise else {}
        return {**kept, "by_class": self.by_class} if self.by_class else kept


def confusion(
    predicted: npt.NDArray[np.int64], actual: npt.NDArray[np.int64], classes: int, weights: Floats | None = None
) -> Floats:
    """Counts [actual, predicted]. One row more is one count more, by `weights` [n] if they are given."""
    counts = np.bincount(actual * classes + predicted, weights=weights, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.float64)


def of_confusion(
    counts: Floats, names: Sequence[str], *, noise: float = 0.0, rows: float | None = None, balanced: bool = False
) -> Metrics:
    """Return the metrics that follow from counts [actual, predicted].

    Args:
        counts: exact, or with noise. They are added up as they are: noised ones cut at 0 would add up too high.
        names: of the classes.
        noise: standard deviation of the noise of each count.
        rows: how many rows were counted, where that is public.
        balanced: `learnt` is by balanced accuracy.

    """
    rows, size = max(float(counts.sum()) if rows is None else rows, 1.0), len(names)
    right, actual, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    recall, precision, f1 = (
        np.clip(part / np.maximum(whole, 1e-12), 0, 1)
        for part, whole in ((right, actual), (right, predicted), (2 * right, actual + predicted))
    )
    actual = np.maximum(actual, 0)
    there = actual > 2 * noise * math.sqrt(size)  # a class below is lost in the noise
    accuracy, baseline = (min(max(float(part), 0.0) / rows, 1.0) for part in (right.sum(), actual.max()))
    chance = math.sqrt(baseline * (1 - baseline) / rows + 2 * size * (noise / rows) ** 2)
    learnt = accuracy > baseline + 2 * chance
    if balanced and there.any():
        known, guess = np.maximum(actual[there], 1.0), 1 / int(there.sum())
        spread = recall[there] * (1 - recall[there]) / known + size * (noise / known) ** 2
        learnt = float(recall[there].mean()) > guess + 2 * guess * math.sqrt(float(spread.sum()))
    by_class = {
        name: {
            "rows": float(actual[i]),
            "recall": float(recall[i]),
            "precision": float(precision[i]),
            "f1": float(f1[i]),
        }
        for i, name in enumerate(names)
    }
    values = {
        "accuracy": accuracy,
        "balanced_accuracy": float(recall[there].mean()) if there.any() else 0.0,
        "f1": float(f1[there].mean()) if there.any() else 0.0,
    }
    return Metrics(values, baseline, rows, by_class, learnt, noise * math.sqrt(size) / rows)


def of_classes(
    probabilities: Floats, actual: npt.NDArray[np.int64], names: Sequence[str], balanced: bool = False
) -> Metrics:
    """Metrics of class probabilities [n, classes] against the classes, [n]."""
    found = of_confusion(confusion(probabilities.argmax(1), actual, len(names)), names, balanced=balanced)
    areas = [area for i in range(len(names)) if (area := auc(probabilities[:, i], actual == i)) is not None]
    if areas:
        found.values["auc"] = float(np.mean(areas[1:] if len(names) == 2 and len(areas) == 2 else areas))
    return found


def auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Probability that a positive row scores above a negative one, ties counting half; None without both."""
    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return None
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (count.cumsum() - (count - 1) / 2)[place]
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


def of_numbers(predicted: Floats, actual: Floats) -> Metrics:
    """Metrics of predicted numbers [n] against the actual ones."""
    errors = np.abs(predicted - actual)
    constant = np.abs(actual - np.median(actual))
    spread = float(((actual - actual.mean()) ** 2).mean())
    values = {
        "mae": float(errors.mean()),
        "rmse": float(np.sqrt((errors**2).mean())),
        "r2": float(1 - (errors**2).mean() / spread) if spread > 0 else 0.0,
    }
    gain = constant - errors
    learnt = float(gain.mean()) > 2 * float(gain.std()) / math.sqrt(len(gain))
    return Metrics(values, float(constant.mean()), float(len(actual)), {}, learnt)
