"""What the properties are tried on: small models, every clipping, and examples that mean harm."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import adadp.shapes
from adadp import (
    Adaptive,
    Automatic,
    Clipping,
    Diagonal,
    Ellipsoid,
    Flat,
    Grouped,
    Kronecker,
    Local,
    Paid,
    PerLayer,
    Probe,
    Public,
    Raw,
    Released,
)
from adadp.accounting.events import PoissonGaussian
from adadp.clipping import BY_NAME, by_name
from adadp.gradients import Capture, Gradients
from adadp.mechanism.step import PrivateStep
from adadp.randomness import Randomness
from adadp.sampling.lot import Lot, Microbatch
from adadp.shapes import Known, Shape, Source

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}

# ---- models -------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Linear layers on sequences [n, T, columns]; an example's output is the sum over its tokens."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(columns, rows), nn.Linear(rows, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh()).sum(1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).sum(1))


class Bare(nn.Module):
    """Parameters of its own, one of them a single number: torch.func takes their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.randn(3, 2) / 2), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).tanh() * self.scale


class Twice(nn.Module):
    """One layer called twice: two contributions to one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()))


@dataclass(frozen=True)
class World:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0

    def inputs(self, count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.words:
            return torch.randint(self.words, (count, *self.shape), generator=generator)
        return torch.randn(count, *self.shape, generator=generator, dtype=torch.float64).to(dtype)


WORLDS = {
    "linear": World(lambda: nn.Linear(3, 2), (3,)),
    "mlp": World(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "tokens": World(lambda: Tokens(3, 4), (5, 3)),
    "wide tokens": World(lambda: Tokens(40, 30), (2, 40)),  # norms by Gram products
    "convolution": World(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2)), (1, 4, 4)
    ),
    "words": World(Words, (4,), words=5),
    "bare": World(Bare, (3,)),
    "twice": World(Twice, (3,)),
}

# ---- clippings ----------------------------------------------------------------------------------------------------


def linear_loss(outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A sum over examples, not random; also the loss of the examples themselves (times their weights)."""
    return losses(outputs).sum()


def losses(outputs: Tensor) -> Tensor:
    return (outputs * torch.tensor([1.0, -0.6], dtype=outputs.dtype)).sum(-1)


def _source(kind: str, world: World, dtype: torch.dtype) -> Source:
    if kind in NEW_SOURCES:
        return NEW_SOURCES[kind]()

    def synthetic(count: int, generator: torch.Generator) -> Tensor:
        return world.inputs(count, generator, dtype)

    if kind == "probe":
        return Probe(synthetic, count=6, every=1)
    if kind == "public":
        return Public([world.inputs(6, torch.Generator().manual_seed(5), dtype)], count=6, every=2, loss=linear_loss)
    if kind == "known":
        return Known(torch.linspace(0, 2, world.shape[-1]))
    if kind == "released":
        return Released(decay=0.5)
    if kind == "paid":
        return Paid(share=0.3, every=1, decay=0.5)
    return Raw(decay=0.5)


def _shape(kind: str) -> Shape:
    if kind in NEW_SHAPES:
        return NEW_SHAPES[kind]()
    if kind == "diagonal":
        return Diagonal(0.5, 0.25)
    if kind == "full":
        return Kronecker(0.25, 0.25, rank=None)
    if kind == "low rank":
        return Kronecker(0.25, 0.0, rank=1)
    if kind == "rows and columns":
        return Kronecker(0.25, 0.0, rank=0)
    return Kronecker(0.5, -0.5, rank=2, widest=3, damping=1e-3)


def untried(base: type[Any], tried: set[type[Any]]) -> list[type[Any]]:
    """The concrete subclasses of a shape or a source in `adadp.shapes` that are not tried by name below."""
    for module in pkgutil.iter_modules(adadp.shapes.__path__):
        importlib.import_module(f"adadp.shapes.{module.name}")
    found: list[type[Any]] = []
    for kind in base.__subclasses__():
        ours = kind.__module__.startswith("adadp.shapes.") and not kind.__name__.startswith("_")
        found += [kind] if ours and not inspect.isabstract(kind) and kind not in tried else []
        found += untried(kind, tried)
    return found


SHAPES = ("diagonal", "full", "low rank", "rows and columns", "partly wide")
SOURCES = ("probe", "public", "released", "paid", "raw")
NEW_SHAPES = {kind.__name__: kind for kind in untried(Shape, {Diagonal, Kronecker})}
NEW_SOURCES = {kind.__name__: kind for kind in untried(Source, {Probe, Public, Known, Released, Paid, Raw})}
Maker = Callable[[World, torch.dtype], Clipping]


def _ellipsoid(shape: str, source: str, bound: float = 0.8) -> Maker:
    return lambda world, dtype: Ellipsoid(bound, shape=_shape(shape), source=_source(source, world, dtype))


def _local(source: str, threshold: float) -> Maker:
    return lambda world, dtype: Local(1.5, threshold=threshold, source=_source(source, world, dtype))


def new_clippings() -> dict[str, Maker]:
    """Clippings that are registered, and are not of a class that is tried by name below."""
    tried = {Adaptive, Flat, PerLayer, Automatic, Local, Ellipsoid}
    new = [name for name, make in BY_NAME.items() if type(make(0.8)) not in tried]
    return {f"registered as {name}": lambda world, dtype, name=name: by_name(name, 0.8) for name in new}


#: Every clipping, by name, each made anew for a world. New ones, new shapes and new sources are found by themselves.
CLIPPINGS: dict[str, Maker] = {
    "flat": lambda world, dtype: Flat(0.8),
    "tiny flat": lambda world, dtype: Flat(1e-6),
    "per layer": lambda world, dtype: PerLayer(0.8),
    "per layer, radii": lambda world, dtype: PerLayer({"*bias": 0.1, "*": 2.0}),
    "automatic": lambda world, dtype: Automatic(0.8),
    "adaptive": lambda world, dtype: Adaptive(0.8, share=0.3),
    **{f"local, {source}, off": _local(source, 1e9) for source in ("raw", "paid")},
    **{f"local, {source}, on": _local(source, 0.0) for source in SOURCES},
    **{f"ellipsoid, {shape}, {source}": _ellipsoid(shape, source) for shape in SHAPES for source in SOURCES},
    # It knows of weights alone, so that a box, which is one for each parameter, stays off elsewhere.
    **{f"ellipsoid, {shape}, known": _ellipsoid(shape, "known") for shape in SHAPES},
    "grouped": lambda world, dtype: Grouped({"*bias": Flat(0.3), "*": Automatic(2.0)}),
    "grouped, adaptive": lambda world, dtype: Grouped({"*bias": Adaptive(0.3), "*": Adaptive(2.0, share=0.5)}),
    "grouped, shaped": lambda world, dtype: Grouped(
        {
            "*bias": _ellipsoid("full", "released")(world, dtype),
            "*": _ellipsoid("diagonal", "paid", 2.0)(world, dtype),
        }
    ),
    "grouped, local": lambda world, dtype: Grouped(
        {"*bias": _local("paid", 0.0)(world, dtype), "*": _ellipsoid("rows and columns", "paid")(world, dtype)}
    ),
    "grouped in groups": lambda world, dtype: Grouped(
        {"*bias": Flat(0.5), "*": Grouped({"*": _local("probe", 0.0)(world, dtype)})}
    ),
    **{f"ellipsoid, {shape}, released": _ellipsoid(shape, "released") for shape in NEW_SHAPES},
    **{f"ellipsoid, diagonal, {source}": _ellipsoid("diagonal", source) for source in NEW_SOURCES},
    **new_clippings(),
}


def switched_on(clipping: Clipping) -> bool:
    """Whether every Local in it that is meant to be on is on."""
    members = clipping.groups.values() if isinstance(clipping, Grouped) else [clipping]
    meant = [member for member in members if isinstance(member, Local) and member.threshold < 1 and member.parameters]
    return all(member.local for member in meant)


# ---- a step, taken apart ------------------------------------------------------------------------------------------


class Stand:
    """A model with a clipping in the state that it has after a few lots."""

    def __init__(
        self,
        world: World,
        maker: Maker,
        dtype: torch.dtype = torch.float64,
        *,
        sigma: float = 0.7,
        seed: int = 0,
        lots: int = 3,
        randomness: Randomness | None = None,
    ) -> None:
        self.world, self.dtype, self.sigma = world, dtype, sigma
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = world.make().to(dtype)
        self.clipping = maker(world, dtype)
        self.capture = Capture(self.model)
        self.step = PrivateStep(
            self.capture,
            self.clipping,
            noise_multiplier=sigma,
            expected_lot=4,
            event=PoissonGaussian(sigma, 0.5),
            charge=lambda event: None,
            randomness=randomness or Randomness(seed),
        )
        self._lots = 0
        for _ in range(lots):
            self.lot(*self.examples(4))
        self.begin()

    def examples(self, count: int) -> tuple[Tensor, Tensor]:
        return self.world.inputs(count, self.generator, self.dtype), torch.ones(count, dtype=self.dtype)

    def lot(self, inputs: Tensor, weights: Tensor, *pieces: int) -> dict[str, Tensor]:
        """A whole step on these examples, in pieces of these sizes; what it releases."""
        sizes = list(pieces) or [len(inputs)]
        start, lot = 0, Lot(self._lots)
        for index, size in enumerate(sizes):
            part = slice(start, start + size)
            start += size
            self._backward(inputs[part], weights[part])
            self.step.add(Microbatch(lot, index, index == len(sizes) - 1, size, size, size))
        self._lots += 1
        return self.step.release(lot)

    def begin(self) -> None:
        self.clipping.begin({name: p for name, p in self.model.named_parameters() if p.requires_grad}, self.step)

    def _backward(self, inputs: Tensor, weights: Tensor) -> None:
        (losses(self.model(inputs)) * weights).mean().backward()

    def gradients(self, inputs: Tensor, weights: Tensor) -> Gradients:
        count = len(inputs)
        self._backward(inputs, weights)
        keep = torch.ones(count, dtype=torch.bool)
        return Gradients(self.capture.take(count), count, scale=float(count), keep=keep)

    def bound(self, inputs: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The un-noised release of these examples, in the state that the clipping is in."""
        if not len(inputs):
            return {}
        return self.clipping.bound(self.gradients(inputs, weights))

    def distance(self, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        return distance(one, other, self.clipping.stddev(self.sigma))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], stddev: Mapping[str, Any]) -> float:
    """How far two un-noised releases are apart, in standard deviations of the noise; a missing entry is zero."""
    total = 0.0
    for name in {*one, *other}:
        present = one[name] if name in one else other[name]
        difference = (one.get(name, 0 * present) - other.get(name, 0 * present)).double()
        noise = torch.as_tensor(stddev[name], dtype=torch.float64).expand(difference.shape)
        ratio = torch.where(difference == 0, 0.0, difference / noise)  # 0 / 0 hides nothing that is there
        total += float(ratio.square().sum())
    return math.sqrt(total) if not math.isnan(total) else math.inf


def without(tensor: Tensor, index: int) -> Tensor:
    return torch.cat([tensor[:index], tensor[index + 1 :]])
