"""The ways to take a step that are measured: plain SGD, adadp with each clipping, each mode of Opacus, fastDP.

A new way is one entry of `METHODS`: its name, and a function that makes a step of a module and a lot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

from adadp.algorithms.defaults import DEFAULTS
from adadp.clipping import Clipping, Ellipsoid, Flat, Local
from adadp.engine import PrivacyEngine
from adadp.mechanism.replay import WARM_UP, TrainingStep
from adadp.sampling.loader import PrivateLoader
from adadp.sampling.lot import Lot, Microbatch
from adadp.shapes import Diagonal, Kronecker, Probe, Shape
from adadp.shapes.synthetic import own_prediction
from adadp_lab.bench.cases import Inputs, example_losses, logits_of, mean_loss
from adadp_lab.bench.clock import release

#: The shapes of an ellipsoid by the name of the clipping. Rank 0 keeps a number for each row and each column.
SHAPES: dict[str, Callable[[], Shape]] = {
    "ellipsoid-diagonal": Diagonal,
    "ellipsoid-rowcolumn": lambda: Kronecker(rank=0),
    "ellipsoid-kronecker": Kronecker,
}
OURS = ("flat", *SHAPES, "local")
#: Steps from one refresh of a shape to the next, and the most synthetic examples that a refresh takes.
EVERY: int = DEFAULTS["adadp", "sound"]["refresh"]
MOST_PROBES: int = DEFAULTS["adadp", "sound"]["probes"]
#: So small that weights stay what they are: only time is of interest.
RATE = 1e-6


def open_lot(loader: PrivateLoader, count: int) -> None:
    """Open the next lot for `count` rows that the benchmark has, so that drawing them is not timed.

    They were not drawn, so no epsilon holds for such a run.
    """
    if loader.lots.current is None:  # once is enough
        loader.lots.note(reasons=["the benchmark gave rows that the loader did not draw"])
    loader.lots.hand_out(Microbatch(Lot(loader.lots.next), 0, True, count, count, count))


@dataclass(frozen=True)
class TimedStep:
    """A whole training step, from `zero_grad` to the optimizer's. `clear` is its `zero_grad` alone.

    `refresh` makes the next run learn its shape anew from `probes` examples, which makes it and perhaps runs after it
    (`unsettled` in all) longer; None where there is no shape. A step that is replayed from a recording, whose memory is
    held between steps too, names the same step done ordinarily in `unrecorded`: memory is that one's.
    """

    run: Callable[[], None]
    clear: Callable[[], None]
    refresh: Callable[[], None] | None = None
    probes: int | None = None
    unsettled: int = 1
    unrecorded: Callable[[], None] | None = None


@dataclass(frozen=True)
class BenchTask:
    """What a step is made for. `probes` is the number of synthetic examples of a refresh, None for the default."""

    module: nn.Module
    inputs: Inputs
    targets: Tensor
    clipping: str = "none"
    probes: int | None = None

    @property
    def lot(self) -> int:
        """The number of examples."""
        return len(self.targets)

    @property
    def rows(self) -> tuple[Inputs, Tensor]:
        """All that differs from lot to lot."""
        return self.inputs, self.targets

    def loss(self) -> Tensor:
        """The mean over the lot."""
        return mean_loss(logits_of(self.module, self.inputs), self.targets)

    def losses(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """One for each example, a mean over its own tokens."""
        return example_losses(logits_of(self.module, inputs), targets)

    def optimizer(self) -> torch.optim.Optimizer:
        """The same for everybody, of what is to be trained."""
        return torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=RATE)

    def loader(self) -> DataLoader[Any]:
        """The lot as a data set, which engines want to see; nothing is drawn from it."""
        return DataLoader(TensorDataset(*tree_leaves(self.inputs), self.targets), batch_size=self.lot)


def plain(task: BenchTask) -> TimedStep:
    """No privacy."""
    optimizer = task.optimizer()

    def run() -> None:
        optimizer.zero_grad()
        task.loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return TimedStep(run, optimizer.zero_grad)


def plain_replayed(task: BenchTask) -> TimedStep:
    """No privacy, and the whole step recorded as a CUDA graph: what is fair to compare replayed steps with.

    As for ours, each lot is copied into the recorded one's tensors.
    """
    held = replace(task, inputs=tree_map(torch.clone, task.inputs), targets=task.targets.clone())
    ordinary = plain(held)
    for _ in range(WARM_UP):
        ordinary.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ordinary.run()
    copies = list(zip(tree_leaves(held.rows), tree_leaves(task.rows), strict=True))

    def run() -> None:
        for own, given in copies:
            own.copy_(given, non_blocking=True)
        graph.replay()

    return TimedStep(run, ordinary.clear, unrecorded=ordinary.run)


def private(task: BenchTask, replayed: bool = False) -> TimedStep:
    """Ours, ordinarily or replayed."""
    lot = task.lot
    clipping = _clipping(task)
    _, optimizer, loader = PrivacyEngine(seed=0).make_private(
        module=task.module,
        optimizer=task.optimizer(),
        data_loader=task.loader(),
        noise_multiplier=1.0,
        clipping=clipping,
        pad_lots=replayed,
    )

    def ordinarily() -> None:
        open_lot(loader, lot)
        optimizer.zero_grad()
        optimizer.backward(task.losses(task.inputs, task.targets))
        optimizer.step()

    run = ordinarily
    if replayed:
        step = TrainingStep(optimizer, task.losses)
        if step.why_not is not None:
            raise RuntimeError(step.why_not)

        def run() -> None:
            open_lot(loader, lot)
            step(task.inputs, task.targets)
            if step.why_not is not None:
                raise RuntimeError(step.why_not)

    if isinstance(clipping, Local):
        run()  # the first lot has no moments to make a box of, and is clipped flat
        run()
        if not clipping.local:
            raise RuntimeError("the box is not on, so that this would be the time of flat clipping")
    unrecorded = ordinarily if replayed else None
    if replayed:
        ordinarily()  # losses that a loop differentiates itself are tried at their first
    if not isinstance(clipping, Ellipsoid):
        return TimedStep(run, optimizer.zero_grad, unrecorded=unrecorded)
    source = clipping.source
    assert isinstance(source, Probe)

    def refresh() -> None:
        source.step = -1  # the first lot of a source is one with a refresh, and no other comes by itself

    return TimedStep(run, optimizer.zero_grad, refresh, source.count, 1 + WARM_UP if replayed else 1, unrecorded)


def _clipping(task: BenchTask) -> Clipping:
    if task.clipping == "flat":
        return Flat(1.0)
    if task.clipping == "local":
        return Local(4.0, threshold=0.0)
    lot = task.lot
    # The same share of the work for every model: a refresh sees two lots, and no more than training itself takes.
    count = task.probes or min(2 * lot, MOST_PROBES)
    probe = Probe(_like(task.inputs), count=count, every=10**9, batch=min(lot, count), loss=_probe_loss)
    return Ellipsoid(1.0, shape=SHAPES[task.clipping](), source=probe)


def _like(inputs: Inputs) -> Callable[[int, torch.Generator], Inputs]:
    """Probes of the inputs' form. Masks stay as they are: every token of a probe counts."""

    def make(count: int, generator: torch.Generator) -> Inputs:
        if isinstance(inputs, Tensor):
            return _random(inputs, count, generator)
        return {
            name: part[:1].cpu().expand(count, -1) if name == "attention_mask" else _random(part, count, generator)
            for name, part in inputs.items()
        }

    return make


def _random(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    form = (count, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(form, generator=generator)
    return torch.randint(int(like.max()) + 1, form, generator=generator)


def _probe_loss(outputs: Any, generator: torch.Generator) -> Tensor:
    return own_prediction(outputs if isinstance(outputs, Tensor) else outputs.logits, generator)


class Criterion(nn.Module):
    """The loss in the form that peers take: `reduction` is "mean", or "none" for one loss an example."""

    reduction = "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (mean_loss if self.reduction == "mean" else example_losses)(logits, targets)


def opacus(mode: str, task: BenchTask) -> TimedStep:
    """The peer, in one of its modes."""
    from opacus import PrivacyEngine as Peer

    made = Peer().make_private(
        module=task.module,
        optimizer=task.optimizer(),
        data_loader=task.loader(),
        criterion=Criterion(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else Criterion()

    def run() -> None:
        optimizer.zero_grad()
        criterion(logits_of(module, task.inputs), task.targets).backward()
        optimizer.step()

    return TimedStep(run, optimizer.zero_grad)


def fastdp(task: BenchTask) -> TimedStep:
    """The peer whose checkout `--fastdp` names, as it is meant to be used. It trains the layers that it knows."""
    from fastDP import PrivacyEngine as Peer

    optimizer = task.optimizer()

    def run() -> None:
        optimizer.zero_grad()
        task.loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with redirect_stdout(StringIO()):  # it talks when it is made and in its first step
        Peer(
            task.module, batch_size=task.lot, sample_size=100 * task.lot, epochs=1, noise_multiplier=1.0,
            clipping_mode="MixOpt", clipping_fn="automatic",
        ).attach(optimizer)  # fmt: skip
        run()
    return TimedStep(run, optimizer.zero_grad)


def private_as_fastdp(task: BenchTask, replayed: bool = False) -> TimedStep:
    """Ours, with everything frozen that fastDP does not train."""
    other = replace(task, module=copy.deepcopy(task.module))
    fastdp(other)
    known = trained(other.module)
    for name, parameter in task.module.named_parameters():
        parameter.requires_grad_(name in known)
    del other
    release()
    return private(task, replayed)


def trained(module: nn.Module) -> dict[str, int]:
    """The parameters that the last step had a gradient for, and how many numbers each is."""
    return {name: parameter.numel() for name, parameter in module.named_parameters() if parameter.grad is not None}


@dataclass(frozen=True)
class Method:
    """How a step is made, with which clippings, and what it is compared as (`--against`; "" for our own)."""

    make: Callable[[BenchTask], TimedStep]
    clippings: tuple[str, ...]
    peer: str = ""
    only_on: str = ""


METHODS: dict[str, Method] = {
    "sgd": Method(plain, ("none",), "sgd"),
    "sgd-graph": Method(plain_replayed, ("none",), "sgd", only_on="cuda"),
    "adadp": Method(private, OURS),
    "adadp-graph": Method(partial(private, replayed=True), OURS, only_on="cuda"),
    "opacus-hooks": Method(partial(opacus, "hooks"), ("flat",), "opacus"),
    "opacus-ghost": Method(partial(opacus, "ghost"), ("flat",), "opacus"),
    "opacus-functorch": Method(partial(opacus, "functorch"), ("flat",), "opacus"),
    "fastdp": Method(fastdp, ("automatic",), "fastdp"),
    "adadp-as-fastdp": Method(private_as_fastdp, ("flat",), "fastdp"),
    "adadp-graph-as-fastdp": Method(partial(private_as_fastdp, replayed=True), ("flat",), "fastdp", only_on="cuda"),
}
