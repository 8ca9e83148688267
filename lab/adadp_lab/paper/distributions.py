"""Gradients, what E' expected of them, and the noise, at one step: the paper's two distribution plots.

Nothing here is private: it looks at raw gradients in order to say how well they were estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adadp.clipping import Clipping, Ellipsoid, Local

#: Histograms are over log10 of a value: from 1e-9 to 1e3 in steps of a tenth of a decade; what is smaller goes first.
LOW, HIGH, BINS = -9.0, 3.0, 120


def look(
    clipping: Clipping, model: nn.Module, inputs: Tensor, targets: Tensor, lot: int, noise_multiplier: float
) -> dict[str, Any]:
    """Histograms over coordinates of |g_t|, of its estimate and of sigma_i, and how the first two go together.

    `model` is at the weights of the step, `clipping` as it was used in it. The estimate is sqrt(E') where there is
    an E'. The sound form's shape says the same up to a factor, which is fitted here; its noise is that of the release
    carried back to the gradient's own coordinates.
    """
    average, each = _gradients(model, inputs, targets, lot)
    found: dict[str, Any] = {"gradient": _histogram(average), "example_gradient": _histogram(each)}
    expected, noise = _expected(clipping, model, noise_multiplier)
    # E' is made of each example's gradient or of the lot's average: it estimates that.
    target = each if clipping_is_by_example(clipping) else average
    if expected is not None:
        live = (expected > 0) & (target > 0)
        if isinstance(clipping, Ellipsoid):
            expected = expected * (target[live].median() / expected[live].median())
        found["estimate"] = _histogram(expected)
        found["correlation"] = round(_correlation(expected[live].log(), target[live].log()), 4)
        found["median_ratio"] = float(f"{(expected[live] / target[live]).median():.4g}")
    if noise is not None:
        found["sigma"] = _histogram(noise)
        found["sigma_quantiles"] = [float(f"{value:.4g}") for value in _quantiles(noise)]
        found["sigma_below_10"] = round(float((noise < 10).float().mean()), 4)
        found["sigma_10_to_20"] = round(float(((noise >= 10) & (noise <= 20)).float().mean()), 4)
    return found


def clipping_is_by_example(clipping: Clipping) -> bool:
    """Whether single examples are bounded, so that estimates are of their gradients."""
    from adadp.algorithms.published import LotLocal

    return not isinstance(clipping, LotLocal)


def _gradients(model: nn.Module, inputs: Tensor, targets: Tensor, lot: int) -> tuple[Tensor, Tensor]:
    """|g_t| of the lot's average, and the root mean square of examples' gradients, for all coordinates in a row."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: Mapping[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, dict(values), (row[None],))
        return nn.functional.cross_entropy(output, label[None])

    take = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    total: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for rows, labels in zip(torch.split(inputs, 100), torch.split(targets, 100), strict=True):
        for name, value in take(parameters, rows, labels).items():
            total[name] = total.get(name, 0) + value.sum(0)
            squares[name] = squares.get(name, 0) + value.square().sum(0)
    flat = [torch.cat([part[name].flatten() for name in parameters]) for part in (total, squares)]
    return (flat[0] / lot).abs(), (flat[1] / lot).sqrt()


def _expected(clipping: Clipping, model: nn.Module, sigma: float) -> tuple[Tensor | None, Tensor | None]:
    names = [name for name, _ in model.named_parameters()]
    if isinstance(clipping, Local):
        bounds = torch.cat([clipping.bounds[name].flatten() for name in names])
        flat = torch.full_like(bounds, sigma * clipping.max_grad_norm)
        return bounds / clipping.beta, sigma * math.sqrt(len(bounds)) * bounds if clipping.local else flat
    if isinstance(clipping, Ellipsoid):
        shape = clipping.shape
        length = sigma * clipping.max_grad_norm

        def spread(exponent: float) -> Tensor:
            """Per coordinate, the deviation of unit noise multiplied by S^exponent; 4% off, from 256 draws."""
            parts = []
            for name, value in model.named_parameters():
                generator = torch.Generator(value.device).manual_seed(0)
                total = torch.zeros_like(value)
                for _ in range(256):
                    drawn = torch.randn(value.shape, generator=generator, device=value.device)
                    total += shape.apply(name, drawn, exponent).square()
                parts.append((total / 256).sqrt().flatten())
            return torch.cat(parts)

        return spread(0.5).detach(), (length * spread(shape.before)).detach()
    return None, None


def _histogram(values: Tensor) -> list[int]:
    logs = values.double().clamp_min(1e-300).log10().clamp(LOW, HIGH - 1e-9)
    return [int(count) for count in torch.histc(logs.cpu(), BINS, LOW, HIGH)]


def _quantiles(values: Tensor) -> list[float]:
    ordered = values.sort().values
    return [float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])
