"""A run's own notes that may be published: how much of each layer's released gradients is noise.

`history.jsonl` has a line for each of about `LINES` parts of the run:

| key | |
| --- | --- |
| `step` | how many steps were made by then |
| `samples` | the number K of released gradients that the line is made of |
| `layers` | for each layer: `noise`, the expected squared length of the noise in one released gradient; `signal`, an estimate of the squared length of what the K have in common; `error`, the standard error of `signal` |
| `noise_by_coordinate` | how many coordinates have a noise of which standard deviation sigma_i: `counts` of values from 10^`low` on, `per_decade` bins for a factor of ten |

The noise of two steps is independent, so `signal` is the mean of their gradients' inner products, over all pairs: it is
right on average, and may be negative.

Guarantee:
    Everything here is computed from released gradients, and from noise whose size the clipping states: post-processing.
    Lines are written at steps that follow from the planned number of steps. For a run that no proof covers, and for
    line searches, which average several releases of one lot, nothing is written.

"""  # noqa: E501  (a table's rows are one line each)

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from adadp.algorithms import Algorithm
from adadp.clipping.base import Clipping
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.sums import Stddev
from adadp.training import run_folder as runs

LINES = 20
MOST_SAMPLES = 640
LOW, HIGH, PER_DECADE = -9.0, 5.0, 20


def history_of(folder: Path, algorithm: Algorithm, optimizer: Optimizer, steps: int) -> History | None:
    """The history of a run; None where it may have none."""
    allowed = isinstance(optimizer, PrivateOptimizer) and algorithm.sound and not algorithm.looks
    return History(folder, cast(PrivateOptimizer, optimizer), steps) if allowed else None


class History:
    """Writes the history of one run.

    Args:
        folder: the run's.
        optimizer: whose gradients are looked at after each step.
        steps: planned.

    """

    def __init__(self, folder: Path, optimizer: PrivateOptimizer, steps: int) -> None:
        self._folder, self._optimizer = folder, optimizer
        self._line_every = max(2, math.ceil(steps / LINES))
        self._look_every = max(1, math.ceil(steps / MOST_SAMPLES))
        self._last = steps
        self._clear()

    def _clear(self) -> None:
        """Begin a new line. All sums are over its samples, by parameter."""
        self._samples = 0
        self._sums: dict[str, Tensor] = {}  # of gradients
        self._squares: Tensor | None = None  # of gradients' squared lengths, in the order of `_sums`
        self._noise: dict[str, tuple[float, float]] = {}  # of sigma_i^2 and sigma_i^4, over coordinates too

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """Look at the gradient that was released for step number `step`; write a line if one is due."""
        due = step % self._line_every == 0 or step == self._last
        if due or step % self._look_every == 0:
            self._look()
        if due and self._samples > 1:
            line = {"step": step, "samples": self._samples, "layers": self._layers()}
            runs.add_line(self._folder / runs.HISTORY, {**line, "noise_by_coordinate": self._by_coordinate()})
            self._clear()

    def _look(self) -> None:
        parameters = self._clipping.parameters
        released = {name: value.grad for name, value in parameters.items() if isinstance(value.grad, Tensor)}
        if not released or (self._sums and released.keys() != self._sums.keys()):
            return
        squares = torch.stack(torch._foreach_norm(list(released.values()))).double().square()
        if self._squares is None:
            self._squares, self._sums = squares, {name: value.clone() for name, value in released.items()}
        else:
            self._squares += squares
            torch._foreach_add_(list(self._sums.values()), list(released.values()))
        self._samples += 1
        noise = self._clipping.noise_of_release(self._optimizer.noise_multiplier)
        for name, value in released.items():
            second, fourth = _sums_of_powers(noise[name], value, self._optimizer.expected_batch_size)
            before = self._noise.get(name, (0.0, 0.0))
            self._noise[name] = before[0] + second, before[1] + fourth

    @property
    def _clipping(self) -> Clipping:
        return self._optimizer.clipping

    def _layers(self) -> dict[str, dict[str, float]]:
        assert self._squares is not None
        lengths = torch.stack(torch._foreach_norm(list(self._sums.values()))).double().square()
        products = dict(zip(self._sums, (lengths - self._squares).tolist(), strict=True))  # of all pairs, twice
        found: dict[str, dict[str, float]] = {}
        for layer in dict.fromkeys(map(layer_of, self._sums)):
            own = [name for name in self._sums if layer_of(name) == layer]
            pairs = self._samples * (self._samples - 1)
            signal = math.fsum(products[name] for name in own) / pairs
            second, fourth = (math.fsum(self._noise[name][power] for name in own) / self._samples for power in (0, 1))
            coordinates = sum(self._sums[name].numel() for name in own)
            # Of (mu + z)(mu + z'): sigma^4 from z z', and sigma^2 mu^2 from each of the other two. How the signal lies
            # to the noise is not known, so its part is taken at the mean sigma^2.
            variance = 2 * fourth / pairs + 4 * max(signal, 0.0) * second / coordinates / self._samples
            values = {"signal": signal, "noise": second, "error": math.sqrt(variance)}
            found[layer] = {key: float(f"{value:.6g}") for key, value in values.items()}
        return found

    def _by_coordinate(self) -> dict[str, Any]:
        return histogram(self._clipping.noise_of_gradient(self._optimizer.noise_multiplier), self._clipping.parameters)


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to, by its name."""
    return parameter.rpartition(".")[0] or parameter


def _sums_of_powers(stddev: float | Tensor, like: Tensor, lot: float) -> tuple[float, float]:
    """Sums over the coordinates of sigma_i^2 and sigma_i^4 of a mean over `lot`."""
    if isinstance(stddev, Tensor) and stddev.numel() > 1:
        squares = (stddev.double() / lot).square()
        return float(squares.sum()), float(squares.square().sum())
    square = (float(stddev) / lot) ** 2
    return like.numel() * square, like.numel() * square**2


def histogram(stddev: Stddev, parameters: dict[str, Tensor]) -> dict[str, Any]:
    """How many coordinates have which standard deviation, by powers of ten; zero is counted as the smallest."""
    bins = round((HIGH - LOW) * PER_DECADE)
    counts = torch.zeros(bins, dtype=torch.float64)
    for name, parameter in parameters.items():
        value = torch.as_tensor(stddev[name], dtype=torch.float64).cpu()
        logs = value.clamp_min(10.0**LOW).log10().clamp(LOW, HIGH - 1e-9)
        weight = parameter.numel() / max(value.numel(), 1)
        counts += weight * torch.histc(logs.flatten(), bins, LOW, HIGH)
    there = torch.nonzero(counts).flatten().tolist()
    if not there:
        return {"low": LOW, "per_decade": PER_DECADE, "counts": []}
    first, last = there[0], there[-1]
    kept = [round(count) for count in counts[first : last + 1].tolist()]
    return {"low": round(LOW + first / PER_DECADE, 6), "per_decade": PER_DECADE, "counts": kept}
