"""Many private linear layers on fixed features at once: how the settings of the recipes were searched.

The noise, clipping and update of `adadp train`, in a few tensor operations: variants of one run share its lots, and no
ledger is kept, so nothing that comes out is a release or has a guarantee. For data that is public anyway.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from adadp.accounting.calibration import calibrate_noise
from adadp.accounting.events import Gaussian, PoissonGaussian
from adadp.data import Dataset
from adadp.features import Scattering, made_images
from adadp.preprocessing import noise_multiplier_for_share
from adadp.preprocessing.shaped_features import PublicDirections, ShapedFeatures

DELTA = 1e-5
HELD_OUT = 10_000
"""Rows at the end of the training set on which settings are chosen."""


@dataclass(frozen=True)
class Prepared:
    """How features are made ready: `power` of each feature, directions of synthetic images, shares of the budget."""

    power: float = 1.0
    directions: int = 1500
    mean_share: float = 0.03
    moments_share: float = 0.0


@dataclass(frozen=True)
class Variant:
    """S^-before for examples' gradients; `walk` is how far noise moves a weight in all."""

    before: float
    damping: float
    bound: float
    walk: float


@dataclass(frozen=True)
class Length:
    """Expected lot of 60,000 examples, and number of steps."""

    lot: int = 8192
    steps: int = 800

    @property
    def rate(self) -> float:
        """With which an example is drawn."""
        return self.lot / 60_000


def scattered(images: Tensor, device: str) -> Tensor:
    """Features of images, on the CPU."""
    plan = Scattering.for_images(tuple(images.shape[1:]))
    return torch.cat([plan(part.to(device)).cpu() for part in torch.split(images, 4096)])


class Features:
    """One data set's features, and what preparations make of them."""

    def __init__(self, data: Dataset, device: str, made: int) -> None:
        self.name, self.labels, self.device, self.made = data.name, data.labels, device, made
        self.shape = data.input_shape
        self.held_out = min(HELD_OUT, len(data) // 5)
        self.features = scattered(data.inputs(), device)

    def prepared(self, how: Prepared, epsilon: float) -> tuple[Tensor, Tensor]:
        """Rows in their coordinates, not yet scaled by a shape, and the variances along these."""
        public = public_directions(self.shape, self.made, how.power, how.directions, self.device)
        noise = [
            noise_multiplier_for_share(epsilon, DELTA, share) if share else None
            for share in (how.mean_share, how.moments_share)
        ]
        estimator = ShapedFeatures(public.vectors.shape[1], *noise, power=how.power)
        rows = self.features.numpy()
        estimator.fit(rows[: -self.held_out], public=public)
        return torch.from_numpy(estimator.transform(rows)), torch.from_numpy(estimator.moments_).float()


@lru_cache
def _directions(shape: tuple[int, ...], count: int, power: float, device: str) -> PublicDirections:
    rows = scattered(made_images(shape, count, torch.Generator().manual_seed(0)), device)
    return PublicDirections.of(rows.numpy(), 2500, power)


def public_directions(
    shape: tuple[int, ...], count: int, power: float, directions: int, device: str
) -> PublicDirections:
    """The largest directions of synthetic images."""
    found = _directions(shape, count, power, device)
    return PublicDirections(found.mean, found.vectors[:, :directions], found.values[:directions])


def noise_of(how: tuple[float, float, Length, float]) -> float:
    """Sigma of a step, where a mean and second moments take their shares of the same budget."""
    mean_share, moments_share, length, epsilon = how
    shares = [Gaussian(noise_multiplier_for_share(epsilon, DELTA, s)) for s in (mean_share, moments_share) if s]
    beside = [(event, 1) for event in shares]
    step = length.rate, length.steps
    return calibrate_noise(
        lambda sigma: [*beside, (PoissonGaussian(sigma, step[0]), step[1])], epsilon, DELTA
    ).noise_multiplier


@torch.no_grad()
def learn(
    rows: Tensor, labels: Tensor, values: Tensor, variants: list[Variant], length: Length, sigma: float, seed: int
) -> Tensor:
    """Weights (variants, directions + 1, classes) after private steps of all variants on the same lots."""
    device, count, size = rows.device, len(rows), rows.shape[1]
    classes = int(labels.max()) + 1
    generator = torch.Generator(device=device).manual_seed(seed)
    relative = values.to(device) / values.mean()

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(each, name) for each in variants], device=device)

    damped = relative[None] + column("damping")[:, None]
    before = damped ** -column("before")[:, None]
    bound, lot = column("bound"), length.rate * count
    rate = column("walk") * lot / (bound * sigma * math.sqrt(length.steps))
    weights = torch.zeros(len(variants), size + 1, classes, device=device)
    momentum = torch.zeros_like(weights)
    squares = before.square().T.contiguous()
    for step in range(length.steps):
        drawn = (torch.rand(count, generator=generator, device=device) < length.rate).nonzero()[:, 0]
        z, y = rows[drawn], labels[drawn]
        wide = weights[:, :-1].permute(1, 0, 2).reshape(size, -1)
        outputs = (z @ wide).view(len(z), len(variants), classes) + weights[:, -1]
        errors = outputs.softmax(2)
        errors -= torch.nn.functional.one_hot(y, classes)[:, None]
        norms = errors.norm(dim=2) * (z.square() @ squares + 1).sqrt()
        errors *= (bound / norms.clamp_min(1e-12)).clamp(max=1)[:, :, None]
        total = (z.T @ errors.flatten(1)).view(size, len(variants), classes).permute(1, 0, 2) * before[:, :, None]
        gradient = torch.cat([total, errors.sum(0)[:, None]], 1)
        gradient += torch.randn(gradient.shape, generator=generator, device=device) * (sigma * bound)[:, None, None]
        momentum.mul_(0.9).add_(gradient / lot)
        weights -= (rate * 0.05 * (1 + math.cos(math.pi * step / length.steps)))[:, None, None] * momentum
    return weights


def accuracies(weights: Tensor, rows: Tensor, labels: Tensor) -> list[float]:
    """Of each variant."""
    return [float(((rows @ one[:-1] + one[-1]).argmax(1) == labels).double().mean()) for one in weights]


PREPARED = (
    *(Prepared(power, size) for power, size in ((0.5, 1500), (0.35, 1500), (0.7, 1500), (0.5, 800), (0.5, 2500))),
    *(Prepared(power, size, 0.03, 0.15) for power in (0.5, 1.0) for size in (400, 800)),
)
SHAPES = tuple(itertools.product((0.25, 0.375, 0.5, 0.75), (1e-3, 1e-2, 1e-1)))
"""Exponents and dampings."""
WALKS = (0.8, 1.6, 3.2, 6.4, 12.8)
LENGTHS = (Length(4096, 800), Length(8192, 800), Length(4096, 1600))


def search(data: Iterable[Dataset], device: str, *, made: int = 8000, quick: bool = False) -> Iterator[dict[str, Any]]:
    """One record for each variant: first at epsilon 1, then the best at other lengths and epsilons."""
    sets = [Features(each, device, made) for each in data]
    preparations = PREPARED[:2] if quick else PREPARED
    lengths = (Length(600, 8), Length(600, 4)) if quick else LENGTHS
    epsilons = (1.0, 3.0) if quick else (0.5, 1.0, 3.0)
    for how in preparations:  # one after the other: each takes all cores
        public_directions(sets[0].shape, made, how.power, how.directions, device)
    first = [
        Variant(*shape, bound, walk)
        for shape, bound, walk in itertools.product(SHAPES[:2] if quick else SHAPES, (1.0,), WALKS)
    ]
    shares = {(how.mean_share, how.moments_share) for how in preparations}
    asked = [(*pair, length, epsilon) for pair in shares for length in lengths for epsilon in epsilons]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        noise = dict(zip(asked, pool.map(noise_of, asked), strict=True))
    kept: list[dict[str, Any]] = []

    def tried(one: Features, how: Prepared, at: tuple[Tensor, Tensor], length: Length, epsilon: float,
              variants: list[Variant]) -> Iterator[dict[str, Any]]:  # fmt: skip
        rows, values = at[0].to(device), at[1].to(device)
        labels, split = one.labels.to(device), len(rows) - one.held_out
        sigma = noise[how.mean_share, how.moments_share, length, epsilon]
        weights = learn(rows[:split], labels[:split], values, variants, length, sigma, 0)
        for variant, accuracy in zip(variants, accuracies(weights, rows[split:], labels[split:]), strict=True):
            yield {"dataset": one.name, "epsilon": epsilon, "accuracy": accuracy, "sigma": sigma,
                   **asdict(how), **asdict(variant), **asdict(length)}  # fmt: skip

    for one, how, at, _ in _at_once([(one, how, 1.0) for one in sets for how in preparations]):
        for record in tried(one, how, at, lengths[0], 1.0, first):
            kept.append(record)
            yield record
    best = _best(kept, 1 if quick else 3)
    jobs = [(one, how, epsilon) for one in sets for epsilon in epsilons for how in best]
    for one, how, at, epsilon in _at_once(jobs):
        variants = [
            Variant(*split, bound, walk) for split, bound, walk in itertools.product(best[how], (0.3, 1.0), WALKS)
        ]
        for length in lengths:
            yield from tried(one, how, at, length, epsilon, variants)


def _at_once(
    jobs: list[tuple[Features, Prepared, float]],
) -> Iterator[tuple[Features, Prepared, tuple[Tensor, Tensor], float]]:
    """Each data set, prepared; a few are made ready ahead."""
    with ThreadPoolExecutor(4) as threads:
        ready = [threads.submit(one.prepared, how, epsilon) for one, how, epsilon in jobs[:6]]
        for number, (one, how, epsilon) in enumerate(jobs):
            if number + 6 < len(jobs):
                following, other, its = jobs[number + 6]
                ready.append(threads.submit(following.prepared, other, its))
            yield one, how, ready[0].result(), epsilon
            ready.pop(0)


def _best(records: list[dict[str, Any]], count: int) -> dict[Prepared, list[tuple[float, float]]]:
    """The best preparations in the mean over data sets, each with its three best shapes."""
    found: dict[Prepared, list[tuple[float, float]]] = {}
    for each in means(records):
        how = Prepared(**{name: each[name] for name in Prepared.__dataclass_fields__})
        shape = each["before"], each["damping"]
        if how in found or len(found) < count:
            shapes = found.setdefault(how, [])
            if shape not in shapes and len(shapes) < 3:
                shapes.append(shape)
    return found


def means(records: list[dict[str, Any]], apart: tuple[str, ...] = ("dataset",)) -> list[dict[str, Any]]:
    """The mean accuracy of each choice over data sets (and what else is named in `apart`), best first."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], float]] = {}
    for record in records:
        left_out = ("accuracy", "sigma", *apart)
        key = tuple((name, value) for name, value in record.items() if name not in left_out)
        groups.setdefault(key, {})[tuple(record[name] for name in apart)] = record["accuracy"]
    most = max(map(len, groups.values()), default=0)
    complete = {key: each for key, each in groups.items() if len(each) == most}
    found = [{**dict(key), "accuracy": sum(each.values()) / most} for key, each in complete.items()]
    return sorted(found, key=lambda each: -each["accuracy"])


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records, best first."""
    return sorted(records, key=lambda each: (each["dataset"], each["epsilon"], -each["accuracy"]))
