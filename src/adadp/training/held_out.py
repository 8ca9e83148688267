"""What a run says of its held-out rows: exact figures for the curator's eyes, or noised ones that are paid for.

Held-out rows are private rows too. Exact figures on them are not covered by the guarantee and not for publication.
With `paid_metrics` the counts are released with noise, charged to the same ledger, and what follows from them is
covered; nothing exact is computed then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from adadp.accounting.events import Gaussian
from adadp.data import HELD_OUT_NOTE, PUBLISHED_TESTS, Dataset, Table
from adadp.persons import keys_of
from adadp.preprocessing.release import Charges, person_weights, release
from adadp.training.metrics import Floats, Metrics, confusion, of_classes, of_confusion, of_numbers

COVERED = (
    "figures on held-out rows are computed from counts that were released with noise: they are covered by the guarantee"
)
PUBLISHED = "figures on the published test set are exact: its examples are not covered by the guarantee"


def is_published(dataset: object, test: object) -> bool:
    """Whether a run's held-out examples are a published test set's: settings `dataset` and `test` say so."""
    return dataset in PUBLISHED_TESTS and test is None


def note(dataset: object, test: object, *, paid: bool) -> str:
    """Who is covered by a run's figures on held-out rows, in one sentence."""
    return COVERED if paid else PUBLISHED if is_published(dataset, test) else HELD_OUT_NOTE


def exact(data: Dataset | Table, outputs: Tensor, *, balanced: bool = False) -> Metrics:
    """Metrics of a model's outputs on the rows of `data`, (n, classes) logits or (n, 1) numbers in [-1, 1].

    `balanced`: classes were weighted, and whether anything was learnt is judged by balanced accuracy.
    """
    if isinstance(data, Table) and data.target is not None:
        predicted = data.in_units(outputs.squeeze(1).clamp(-1, 1)).numpy()
        return of_numbers(predicted, data.in_units(data.labels).numpy())
    return of_classes(torch.softmax(outputs.double(), 1).numpy(), data.labels.numpy(), data.classes, balanced)


def paid(
    data: Dataset | Table,
    outputs: Tensor,
    noise_multiplier: float,
    *,
    seed: int | None,
    ledger: Charges,
    balanced: bool = False,
) -> Metrics:
    """Metrics from a noised release of counts; `balanced` as in `exact`. The number of held-out units is public.

    Guarantee:
        One `Gaussian(noise_multiplier)` event, charged before the release. Adding or removing a held-out row moves one
        count by 1; or, where a number is predicted, three sums of errors, in units of the declared range, by at most 1,
        1 and 1/2: 1.5 in L2 norm. Where rows belong to persons they weigh 1 / their person's rows: what all rows of one
        person add is a mean of such, and no longer.

    """
    whose = person_weights(data.persons, len(data), ledger)
    weights = np.ones(len(data)) if whose is None else whose
    units = len(data) if data.persons is None else len(set(keys_of(data.persons)))
    if isinstance(data, Table) and data.target is not None:
        return _paid_numbers(data, outputs, noise_multiplier, weights, units, seed, ledger)
    predicted = outputs.argmax(1).numpy()
    counts = confusion(predicted, data.labels.numpy(), len(data.classes), weights)
    noised, _ = release(
        counts, sensitivity=1.0, noise_multiplier=noise_multiplier, random_state=seed, purpose="held-out", ledger=ledger
    )
    return of_confusion(noised, data.classes, noise=noise_multiplier, rows=units, balanced=balanced)


def _paid_numbers(
    data: Table, outputs: Tensor, sigma: float, weights: Floats, units: int, seed: int | None, ledger: Charges
) -> Metrics:
    assert data.target is not None
    low, high = data.target
    # Of the range. What is no number is as wrong as can be: one row must not make the release NaN.
    errors = ((outputs.squeeze(1).double().clamp(-1, 1) - data.labels.double()).abs() / 2).nan_to_num(nan=1.0).numpy()
    middle = np.abs(data.labels.double().numpy()) / 2  # of always naming the middle of the range, which is public
    sums = np.stack([errors, errors**2, middle]) @ weights
    noised, _ = release(
        sums, sensitivity=1.5, noise_multiplier=sigma, random_state=seed, purpose="held-out", ledger=ledger
    )
    mae, mse, constant = (max(float(value), 0.0) / max(units, 1) for value in noised)
    values = {"mae": mae * (high - low), "rmse": math.sqrt(mse) * (high - low)}
    noise = 1.5 * sigma / max(units, 1)
    learnt = constant - mae > 2 * math.sqrt(2) * noise
    return Metrics(values, constant * (high - low), units, {}, learnt, noise * (high - low))


def planned(noise_multiplier: float | None) -> tuple[Gaussian, ...]:
    """Return the events that `paid` will charge; none where it is not asked for."""
    return () if noise_multiplier is None else (Gaussian(noise_multiplier),)


def remark(metrics: Metrics, classes: Sequence[str], *, balanced: bool = False) -> str | None:
    """What to say of a run that is no better than a constant guess; None for others."""
    if metrics.learnt:
        return None
    if classes and balanced:
        accuracy, guess = metrics.values["balanced_accuracy"], 1 / len(classes)
        said = f"balanced accuracy {accuracy:.1%}, and a constant guess has {guess:.1%}"
    elif classes:
        accuracy = metrics.values["accuracy"]
        said = f"accuracy {accuracy:.1%}, and always naming the most frequent class is right in {metrics.baseline:.1%}"
    else:
        said = f"mean absolute error {metrics.values['mae']:.4g}, and a constant guess has {metrics.baseline:.4g}"
    if metrics.noise:
        return (
            f"these figures do not show that this run learnt anything ({said}; their noise alone has a standard error "
            f"of {metrics.noise:.2g}). A larger epsilon, or more held-out rows (--test-fraction), would show more"
        )
    return (
        f"this run learnt nothing that a constant guess does not know ({said}). Look at the kinds of the columns (is "
        "one free text, or an id?), at the budget (epsilon, number of rows), and at the learning rate"
        + ("; if a class is rare, see --class-weights" if classes and not balanced else "")
    )


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor, batch: int = 2048) -> Tensor:
    """The model's outputs on rows (n, ...), on the CPU; the model is left in the mode in which it was."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = [model(part.to(device)).float().cpu() for part in torch.split(inputs, batch)]
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.empty(0, 1)
