"""A table in raw units cannot be trained privately; standardised within the budget it can.

Everything at (epsilon 1, delta 1e-5): a tenth of the budget for the scales, DP-SGD on a linear model for the
rest.
"""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from adadp.preprocessing import TablePreprocessor, noise_multiplier_for_share

ROWS, LOT, STEPS, EPSILON, DELTA = 30_000, 1_500, 150, 1.0, 1e-5


def table(rng):
    """Twenty numbers in units from 1e-6 to 1e6, four far from zero, two columns of text; two classes."""
    hidden = rng.normal(size=(ROWS, 20))
    units = 10.0 ** np.linspace(-6, 6, 20)
    offset = np.where(np.arange(20) % 5 == 0, 200.0, 0.0)
    columns = {f"x{i}": (hidden[:, i] + offset[i]) * units[i] for i in range(20)}
    colour = rng.integers(0, 3, ROWS)
    columns["colour"] = np.array(["red", "green", "blue"])[colour]
    columns["street"] = np.array([f"street {i}" for i in rng.integers(0, 500, ROWS)], dtype=object)
    score = hidden @ rng.normal(size=20) / 2 + (colour - 1) + rng.logistic(size=ROWS) / 2
    return columns, (score > 0).astype(np.float64)


def training_noise(charged):
    """Noise multiplier of the training steps, so that they and `charged` cost (EPSILON, DELTA) together."""

    def epsilon(sigma):
        accountant = rdp.RdpAccountant()
        step = dp_accounting.PoissonSampledDpEvent(LOT / (ROWS * 0.8), dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, STEPS))
        for event in charged:
            accountant.compose(dp_accounting.GaussianDpEvent(event.noise_multiplier))
        return accountant.get_epsilon(DELTA)

    low, high = 0.5, 50.0
    for _ in range(25):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle) > EPSILON else (low, middle)
    return high


def accuracy(x, y, charged, rng):
    """Accuracy of logistic regression by DP-SGD (clipping 1, Poisson lots), best of three rates."""
    x = np.hstack([x, np.ones((ROWS, 1))])
    train = np.arange(ROWS) < 0.8 * ROWS
    sigma, best = training_noise(charged), 0.0
    for rate in (0.3, 1.0, 3.0):
        w = np.zeros(x.shape[1])
        for _ in range(STEPS):
            lot = np.flatnonzero(train & (rng.random(ROWS) < LOT / (0.8 * ROWS)))
            residual = 1 / (1 + np.exp(-np.clip(x[lot] @ w, -50, 50))) - y[lot]
            norm = np.abs(residual) * np.linalg.norm(x[lot], axis=1)
            clipped = residual / np.maximum(norm, 1.0)
            w -= rate * (clipped @ x[lot] + sigma * rng.normal(size=len(w))) / LOT
        best = max(best, float((((x[~train] @ w) > 0) == (y[~train] > 0)).mean()))
    return best


@pytest.mark.parametrize("seed", [0])
def test_standardised_within_the_budget_is_as_good_as_with_leaked_statistics(seed):
    rng = np.random.default_rng(seed)
    columns, y = table(rng)
    train = {name: values[: int(0.8 * ROWS)] for name, values in columns.items()}
    share = noise_multiplier_for_share(EPSILON, DELTA, share=0.1)
    private = TablePreprocessor(share, categories={"colour": ["red", "green", "blue"]}, buckets=8).fit(train)
    inside = private.transform(columns)
    numbers = np.stack([columns[f"x{i}"] for i in range(20)], axis=1)
    raw, leaked = inside.copy(), inside.copy()
    raw[:, :20] = numbers
    leaked[:, :20] = np.clip((numbers - numbers.mean(axis=0)) / numbers.std(axis=0), -5, 5)
    figures = {
        "raw units": accuracy(raw, y, (), rng),
        "leaked statistics": accuracy(leaked, y, (), rng),
        "within the budget": accuracy(inside, y, private.events_, rng),
    }
    print(f"sigma {share:.1f}", {name: f"{value:.3f}" for name, value in figures.items()})
    assert private.scaler_.resolved_.all()
    assert figures["raw units"] < 0.75
    assert figures["within the budget"] > figures["leaked statistics"] - 0.01
    assert figures["within the budget"] > 0.85
