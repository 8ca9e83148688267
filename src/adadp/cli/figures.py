"""Figures on held-out rows for people: the ones over all rows, and those of each class."""

from __future__ import annotations

from adadp.cli.output import print_table
from adadp.training.metrics import Metrics

_MOST = 12  # classes that are shown


def rows_of(metrics: Metrics, of: str) -> list[tuple[str, str]]:
    """Lines of a table; `of` says what rows the figures are of."""
    values = metrics.values
    if "accuracy" in values:
        noise = f" ± {metrics.noise:.1%} of noise" if metrics.noise else ""
        lines = [("accuracy", f"{values['accuracy']:.2%}{noise} on {metrics.rows:,.0f} {of}")]
        lines.append(("baseline", f"{metrics.baseline:.2%}: always the most frequent class"))
        others = {"balanced accuracy": "balanced_accuracy", "F1 (mean of classes)": "f1", "AUC": "auc"}
        return lines + [(name, f"{values[key]:.4f}") for name, key in others.items() if key in values]
    noise = f" ± {metrics.noise:.3g} of noise" if metrics.noise else ""
    lines = [("mean absolute error", f"{values['mae']:.6g}{noise} on {metrics.rows:,.0f} {of}")]
    lines.append(("baseline", f"{metrics.baseline:.6g}: always the same number"))
    return lines + [(name, f"{values[key]:.4g}") for name, key in (("RMSE", "rmse"), ("R2", "r2")) if key in values]


def print_classes(metrics: Metrics) -> None:
    """A line for each class: the most frequent ones, where there are many."""
    if not metrics.by_class:
        return
    ordered = sorted(metrics.by_class.items(), key=lambda item: -item[1]["rows"])
    lines = [
        (name, f"{one['rows']:,.0f} rows, recall {one['recall']:.1%}, precision {one['precision']:.1%}")
        for name, one in ordered[:_MOST]
    ]
    if len(ordered) > _MOST:
        lines.append(("...", f"{len(ordered) - _MOST} more classes"))
    print_table("Classes", lines)
