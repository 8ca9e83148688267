"""What processes of a team do: an ordinary user's loop, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.clipping import Clipping, Ellipsoid, Flat, Local, PaidFigures
from adadp.distributed.agreement import AgreementOfAll
from adadp.distributed.group import Processes
from adadp.distributed.share import Share
from adadp.mechanism import step as mechanism
from adadp.mechanism.replay import TrainingStep
from adadp.sampling.schemes import Poisson
from adadp.shapes import Diagonal, Paid, Probe, Raw
from adadp.shapes.probes import Vectors

EXAMPLES, FEATURES, LOT = 240, 6, 24
#: Whose each example is: 40 persons of four rows, some of them apart, one of 60, and five rows of nobody.
PERSONS = [None if row < 5 else str(min(row * 7 % 60, 40)) for row in range(EXAMPLES)]


@dataclass
class Result:
    """What a run came to in one process."""

    weights: Tensor
    epsilon: float | None
    lots: list[list[int]]  # this process's examples of each lot
    batches: int
    assumptions: tuple[str, ...] = ()
    gradients: list[Tensor] = field(default_factory=list)  # what was released, where it was kept


def data(scale: float = 1.0) -> TensorDataset:
    """Each example holds its own index, so that a loop shows which ones it saw."""
    generator = torch.Generator().manual_seed(1)
    inputs = scale * torch.randn(EXAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(EXAMPLES))


def _made(kind: Any, source: Callable[[], Any], shape: Callable[[], Any] | None = None) -> Clipping:
    """A clipping of this kind with a source and a shape of its own."""
    rest = {} if shape is None else {"shape": shape()}
    made: Clipping = kind(source=source(), **rest)
    return made


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass."""

    def __init__(self, made: Callable[[], nn.Module] = mlp) -> None:
        super().__init__()
        self.inside = made()

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inside, inputs, use_reentrant=False)
        return made


def probe() -> Probe:
    return Probe(Vectors(FEATURES), count=32, every=3)


def _with_mean_loss() -> Clipping:
    return PaidFigures(Flat(1.0), {"loss": (0.0, 4.0)})


CLIPPINGS: dict[str, Callable[[], Clipping] | str] = {
    "automatic": "automatic",
    "per layer": "per_layer",
    "adaptive": "adaptive",
    "released": "ellipsoid",
    "local, as printed": "local",
    "local with probes": partial(_made, Local, probe),
    "paid": partial(_made, Ellipsoid, partial(Paid, every=2)),
    "probe": partial(_made, Ellipsoid, probe),
    "diagonal": partial(_made, Ellipsoid, probe, Diagonal),
    "raw": partial(_made, Ellipsoid, Raw),
    "with a mean loss": _with_mean_loss,
}


def train(
    rank: int,
    size: int,
    *,
    model: Callable[[], nn.Module] = mlp,
    wrap: str | None = "before",
    lots: int = 12,
    seed: int | None = 5,
    lr: float = 0.1,
    noise: float = 1.0,
    scale: float = 1.0,
    lot: int = LOT,
    keep_gradients: bool = False,
    recorded: bool = False,
    engine: dict[str, Any] | None = None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> Result:
    """Train as a user does under torchrun; alone where there is no process group."""
    inner = model()
    several = dist.is_initialized()
    module = DistributedDataParallel(inner) if wrap == "before" and several else inner
    made = PrivacyEngine(seed=seed, **(engine or {}))
    if callable(settings.get("clipping")):  # made anew in each process, for it keeps the state of one run
        settings["clipping"] = settings["clipping"]()
    else:
        settings.setdefault("max_grad_norm", 1.0)
    private, opt, loader = made.make_private(
        module=module,
        optimizer=optimizer(module.parameters(), lr=lr),
        data_loader=DataLoader(data(scale), batch_size=lot),
        noise_multiplier=noise,
        **settings,
    )
    private = DistributedDataParallel(private) if wrap == "after" and several else private
    seen: list[list[int]] = []
    gradients: list[Tensor] = []
    batches = 0
    whole = TrainingStep(opt, lambda inputs, targets: cross_entropy(private, inputs, targets)) if recorded else None
    while len(seen) < lots or not opt.stepped:
        for inputs, targets, indices in loader:
            microbatch = loader.current
            if microbatch.index == 0:
                seen.append([])
            seen[-1] += indices[: microbatch.real].tolist()
            batches += 1
            if whole is not None:
                whole(inputs, targets)
            else:
                opt.zero_grad()
                losses = cross_entropy(private, inputs, targets) if loss is None else loss(private, inputs, targets)
                opt.backward(losses) if losses.ndim else losses.backward()
                held = [p for group in opt.param_groups for p in group["params"]]  # shards, where the model is sharded
                assert all(p.grad is None for p in (*inner.parameters(), *held))  # what one process knows is no release
                opt.step()
            if opt.stepped and keep_gradients:
                gradients.append(torch.cat([full(p.grad).flatten() for p in inner.parameters()]))
            if opt.stepped and len(seen) == lots:
                break
        if loader.stopped:
            break
    weights = torch.cat([full(parameter.detach()).flatten() for parameter in inner.parameters()])
    assert whole is None or whole.why_not
    assert not getattr(private, "require_backward_grad_sync", False)  # bounded sums are all that is added up
    guarantee = made.guarantee(1e-5)
    return Result(weights, guarantee.epsilon, seen, batches, guarantee.assumptions, gradients)


def full(value: Any) -> Tensor:
    """A parameter or gradient, put together where processes have shards of it."""
    made: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return made


def cross_entropy(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(inputs), targets, reduction="none")


def mean(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(inputs), targets)


def in_bfloat16(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = module(inputs)
    return nn.functional.cross_entropy(outputs.float(), targets, reduction="none")


def nothing(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Losses without a gradient: what is released is noise alone."""
    return module(inputs).sum(1) * 0


def each(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One training after the other in the same processes; an error in place of a result where all of them raise it."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            with planted(case.get("plant")):
                found[name] = train(rank, size, **{key: value for key, value in case.items() if key != "plant"})
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# ---- bugs that the tests must catch ----------------------------------------------------------------------------------


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Break the engine in one way."""
    if name is None:
        yield
        return
    holder, attribute, broken, _ = BUGS[name]
    sound = getattr(holder, attribute)
    setattr(holder, attribute, broken(sound))
    try:
        yield
    finally:
        setattr(holder, attribute, sound)


def _bfloat16(sound: Any) -> Any:
    def totals(self: Any, sums: Any) -> Any:
        found = {name: value.bfloat16() for name, value in sums.items()}
        for value in found.values():
            dist.all_reduce(value)
        return {name: value.float() for name, value in found.items()}

    return totals


def _same_noise_in_shares(sound: Any) -> Any:
    """Shares of the noise that are all drawn from the same stream: they add up, and do not average."""

    def noised(sums: Any, stddev: Any, randomness: Any) -> Any:
        shares = sound({name: torch.zeros_like(value) for name, value in sums.items()}, stddev, randomness)
        parts = dist.get_world_size()
        share = {name: value / math.sqrt(parts) for name, value in shares.items()}
        return type(shares)({name: value + parts * share[name] for name, value in sums.items()})

    return noised


def _no_noise(sound: Any) -> Any:
    return lambda sums, stddev, randomness: sums


def _less_noise(sound: Any) -> Any:
    return lambda sums, stddev, randomness: sound(
        sums, {name: value * math.sqrt(0.5) for name, value in stddev.items()}, randomness
    )


def _noise_of_first(sound: Any) -> Any:
    return lambda sums, stddev, randomness: sound(sums, stddev, randomness) if dist.get_rank() == 0 else sums


def _whole_noise_of_each(sound: Any) -> Any:
    """Every process adds all of the noise to its own part, and then they are added up."""

    def noised(sums: Any, stddev: Any, randomness: Any) -> Any:
        size, rank = dist.get_world_size(), dist.get_rank()
        for _ in range(rank):  # a stream of its own
            sound(sums, stddev, randomness)
        part = sound({name: value / size for name, value in sums.items()}, stddev, randomness)
        for value in part.values():
            dist.all_reduce(value)
        return part

    return noised


def _all_of_the_lot(sound: Any) -> Any:
    return lambda self, drawn: torch.arange(len(drawn))


def _own_lot(sound: Any) -> Any:
    """Each process draws a lot of its own, with the whole rate, from all of the data."""

    def draw(self: Any, lot: int, randomness: Any) -> Tensor:
        return sound(self, lot, randomness.spawn(f"process {dist.get_rank()}"))

    return draw


def _local_lot(sound: Any) -> Any:
    def released(self: Any, lot: Any) -> Any:
        real = max(1, self.capture.tag.real)
        found = sound(self, lot)
        return type(found)({name: value * self.expected_lot / (real * 2) for name, value in found.items()})

    return released


def _not_reduced(sound: Any) -> Any:
    return lambda self, sums: sums


#: By name: what is broken, how, and who has to see it: the check of the noise or of what one process alone does, or the
#: engine itself.
BUGS: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "noise in full on every process": (mechanism, "add_noise", _whole_noise_of_each, "noise"),
    "noise on no process": (mechanism, "add_noise", _no_noise, "noise"),
    "noise on one process": (mechanism, "add_noise", _noise_of_first, "engine"),
    "a share of the noise missing": (mechanism, "add_noise", _less_noise, "noise"),
    "the same stream for each share": (mechanism, "add_noise", _same_noise_in_shares, "noise"),
    "a lot of its own with the whole rate": (Poisson, "draw", _own_lot, "alone"),
    "the whole lot on every process": (Share, "places", _all_of_the_lot, "alone"),
    "divided by the local lot": (mechanism.PrivateStep, "release", _local_lot, "alone"),
    "sums reduced in bfloat16": (Processes, "totals", _bfloat16, "alone"),
    "sums not reduced": (AgreementOfAll, "totals", _not_reduced, "engine"),
}
