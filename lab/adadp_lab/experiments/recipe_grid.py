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
from adadp.features.scattering import Scattering
from adadp.preprocessing import noise_multiplier_for_share
from adadp.preprocessing.shaped_features import PublicDirections, ShapedFeatures
from adadp.shapes.probes import Blobs, PinkNoise

DELTA = 1e-5
HELD_OUT = 10_000
"""Rows at the end of the training set on which settings are chosen."""


@dataclass(frozen=True)
class Prepared:
    """How features are made ready: `power` of each feature, synthetic images, directions, shares of the budget."""

    power: float = 1.0
    made: str = "both"
    directions: int = 1500
    mean_share: float = 0.03
    moments_share: float = 0.0


@dataclass(frozen=True)
class Variant:
    """S^-before for examples' gradients, S^-after for the release; `walk` is how far noise moves a weight in all."""

    before: float
    after: float
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


def made_images(kind: str, shape: tuple[int, ...], count: int) -> Tensor:
    """Synthetic images, the same every time."""
    generator = torch.Generator().manual_seed(0)
    kinds = {"pink": (PinkNoise,), "blobs": (Blobs,), "both": (PinkNoise, Blobs)}[kind]
    return torch.cat([maker(shape)(count // len(kinds), generator) for maker in kinds])


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
        public = public_directions(how.made, self.shape, self.made, how.power, how.directions, self.device)
        noise = [
            noise_multiplier_for_share(epsilon, DELTA, share) if share else None
            for share in (how.mean_share, how.moments_share)
        ]
        estimator = ShapedFeatures(public.vectors.shape[1], *noise, power=how.power)
        rows = self.features.numpy()
        estimator.fit(rows[: -self.held_out], public=public)
        return torch.from_numpy(estimator.transform(rows)), torch.from_numpy(estimator.moments_).float()


@lru_cache
def _directions(made: str, shape: tuple[int, ...], count: int, power: float, device: str) -> PublicDirections:
    rows = scattered(made_images(made, shape, count), device)
    return PublicDirections.of(rows.numpy(), 1500, power)


def public_directions(
    made: str, shape: tuple[int, ...], count: int, power: float, directions: int, device: str
) -> PublicDirections:
    """The largest directions of synthetic images."""
    found = _directions(made, shape, count, power, device)
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
    before, after = damped ** -column("before")[:, None], damped ** -column("after")[:, None]
    typical = (before.square() * relative).sum(1, keepdim=True) / relative.sum()
    before = before / typical.sqrt()  # rows are of norm 1, and stay so
    after = after / after.square().mean(1, keepdim=True).sqrt()
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
        gradient[:, :-1] *= after[:, :, None]
        momentum.mul_(0.9).add_(gradient / lot)
        weights -= (rate * 0.05 * (1 + math.cos(math.pi * step / length.steps)))[:, None, None] * momentum
    return weights


def accuracies(weights: Tensor, rows: Tensor, labels: Tensor) -> list[float]:
    """Of each variant."""
    return [float(((rows @ one[:-1] + one[-1]).argmax(1) == labels).double().mean()) for one in weights]


PREPARED = (
    *(Prepared(made=made, directions=d, moments_share=s) for made in ("both", "pink", "blobs")
      for d, s in ((1500, 0.0), (400, 0.15))),
    Prepared(mean_share=0.0), Prepared(directions=600), Prepared(directions=400),
    Prepared(directions=200, moments_share=0.15), Prepared(directions=800, moments_share=0.15),
    Prepared(power=0.5), Prepared(power=0.5, directions=400, moments_share=0.15),
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """What is tried: first all of it at the first length and epsilon 1, then the best at all lengths and epsilons."""

    prepared: tuple[Prepared, ...]
    splits: tuple[tuple[float, float], ...]
    """Exponents of the shape before and after the noise."""
    walks: tuple[float, ...]
    lengths: tuple[Length, ...]
    dampings: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    epsilons: tuple[float, ...] = (0.5, 1.0, 3.0)
    best: int = 3


#: The second was made when all that was best in the first stood at the end of its walks.
GRIDS = {
    "first": Grid(
        PREPARED,
        ((0.0, 0.0), (0.125, 0.125), (0.25, 0.25), (0.25, 0.0), (0.375, 0.375), (0.5, 0.0)),
        (0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
        (Length(), Length(4096, 800), Length(8192, 400), Length(8192, 1600), Length(16384, 800), Length(4096, 1600)),
    ),
    "second": Grid(
        (Prepared(power=0.5), Prepared(power=0.5, made="pink"), Prepared(power=0.5, mean_share=0.06)),
        ((0.25, 0.0), (0.5, 0.0), (0.375, 0.0), (0.375, 0.125)),
        (1.6, 2.4, 3.2, 4.8, 6.4),
        (Length(), Length(8192, 1600), Length(4096, 1600), Length(8192, 3200)),
    ),
    "quick": Grid(
        PREPARED[:2],
        ((0.25, 0.0), (0.375, 0.125)),
        (1.6, 3.2),
        (Length(600, 8), Length(600, 4)),
        (1e-2,),
        (1.0, 3.0),
        1,
    ),
}


def search(data: Iterable[Dataset], device: str, grid: Grid, *, made: int = 8000) -> Iterator[dict[str, Any]]:
    """One record for each variant: first at epsilon 1, then the best at other lengths and epsilons."""
    sets = [Features(each, device, made) for each in data]
    for how in grid.prepared:  # one after the other: each takes all cores
        public_directions(how.made, sets[0].shape, made, how.power, how.directions, device)
    first = [
        Variant(*split, damping, 1.0, walk)
        for split, damping, walk in itertools.product(grid.splits, grid.dampings, grid.walks)
    ]
    shares = {(how.mean_share, how.moments_share) for how in grid.prepared}
    asked = [(*pair, length, epsilon) for pair in shares for length in grid.lengths for epsilon in grid.epsilons]
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

    for one, how, at, _ in _at_once([(one, how, 1.0) for one in sets for how in grid.prepared]):
        for record in tried(one, how, at, grid.lengths[0], 1.0, first):
            kept.append(record)
            yield record
    chosen = {one.name: _best(kept, one.name, grid.best) for one in sets}
    jobs = [(one, how, epsilon) for one in sets for epsilon in grid.epsilons for how in chosen[one.name]]
    for one, how, at, epsilon in _at_once(jobs):
        variants = [
            Variant(*split, bound, walk)
            for split, bound, walk in itertools.product(chosen[one.name][how], (0.3, 1.0), grid.walks)
        ]
        for length in grid.lengths:
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


def _best(records: list[dict[str, Any]], dataset: str, count: int) -> dict[Prepared, list[tuple[float, float, float]]]:
    """The best preparations, each with its four best splits of the shape and dampings."""
    found: dict[Prepared, list[tuple[float, float, float]]] = {}
    for each in sorted((each for each in records if each["dataset"] == dataset), key=lambda each: -each["accuracy"]):
        how = Prepared(**{name: each[name] for name in Prepared.__dataclass_fields__})
        split = each["before"], each["after"], each["damping"]
        if how in found or len(found) < count:
            splits = found.setdefault(how, [])
            if split not in splits and len(splits) < 4:
                splits.append(split)
    return found


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records, best first."""
    return sorted(records, key=lambda each: (each["dataset"], each["epsilon"], -each["accuracy"]))
