"""Features learned from public data: trained once without privacy on CIFAR-100, kept in the user's cache."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from adadp.data import Dataset, cache_folder, load
from adadp.errors import ConfigurationError
from adadp.models.paper import PaperCifarNet
from adadp.models.resnet import ResNet
from adadp_lab.pretraining.wide import WideResNet

T = TypeVar("T")

#: "paper" and "resnet" can go on being trained privately; "wide" has features to freeze, and better ones.
_NETS: dict[str, Callable[[int], PaperCifarNet | ResNet | WideResNet]] = {
    "paper": lambda classes: PaperCifarNet(classes, frozen=False),
    "resnet": lambda classes: ResNet(3, classes),
    "wide": lambda classes: WideResNet(3, classes),
}


@dataclass(frozen=True)
class Recipe:
    """How features are trained: SGD with momentum 0.9 on flipped and shifted images, one-cycle rate.

    On a GPU activations are bfloat16: a minute or three there, hours on a CPU.
    """

    epochs: int = 15
    batch: int = 256
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    seed: int = 0


RECIPES = {
    "paper": Recipe(epochs=20),
    "resnet": Recipe(epochs=50, batch=512, learning_rate=0.2),
    "wide": Recipe(epochs=50, batch=512, learning_rate=0.3),
}
"""What `pretrain` does unless told otherwise."""


@dataclass(frozen=True)
class Pretrained:
    """Weights of a net's `features`, and the sentence that a guarantee has to carry when it rests on them.

    `accuracy` is the whole net's on examples that were set aside, where there were any.
    """

    weights: dict[str, Tensor]
    path: Path | None
    assumption: str = "CIFAR-100, on which the features were trained without privacy, is public"
    accuracy: float | None = None


def pretrain(
    name: str = "paper",
    *,
    recipe: Recipe | None = None,
    data: Dataset | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    cache: bool = True,
    hold_out: float = 0.0,
    progress: Callable[[int, float], None] | None = None,
) -> Pretrained:
    """Train the features of "paper", "resnet" or "wide" on CIFAR-100, or take them from the cache.

    `data` replaces CIFAR-100 (it must be public too, and is not cached). `hold_out` is the part of it that is set aside
    to measure `accuracy` on (then nothing is cached either). `progress(epoch, loss)` is called after each epoch. No
    private data is touched: use the result with `load_features`, and state its `assumption`.
    """
    recipe = recipe or _known(name, RECIPES)
    if not 0 <= hold_out < 1:
        raise ConfigurationError(f"the part that is held out must be in [0, 1), not {hold_out!r}")
    path = None
    if cache and data is None and not hold_out:
        path = weights_path(name, recipe)
        kept = _read(path, name, recipe)
        if kept is not None:
            return Pretrained(kept, path)
    public = data if data is not None else load("cifar100", data_dir=data_dir)
    aside = round(hold_out * len(public))
    order = torch.randperm(len(public), generator=torch.Generator().manual_seed(recipe.seed))
    net = _train(name, public.subset(order[aside:].sort().values), recipe, torch.device(device), progress)
    accuracy = _accuracy(net, public.subset(order[:aside]), torch.device(device)) if aside else None
    weights = _weights(net)
    if path is not None:
        _write(path, weights, name, recipe)
    assumption = Pretrained.assumption.replace("CIFAR-100", "CIFAR-100" if data is None else public.name)
    return Pretrained(weights, path, assumption, accuracy)


def untrained(name: str, classes: int = 10) -> PaperCifarNet | ResNet | WideResNet:
    """A new net of the kind whose features `pretrain(name)` trains."""
    return _known(name, _NETS)(classes)


def weights_path(name: str, recipe: Recipe | None = None) -> Path:
    """Where `pretrain` keeps the features of a net, whether they are there or not."""
    settings = "-".join(f"{key}{value:g}" for key, value in asdict(recipe or _known(name, RECIPES)).items())
    return cache_folder() / "weights" / f"{name}-cifar100-{settings}.safetensors"


def load_features(model: nn.Module, pretrained: Pretrained, *, frozen: bool = True) -> None:
    """Put pre-trained weights into `model.features` and freeze them (or not)."""
    features = getattr(model, "features", None)
    if not isinstance(features, nn.Module):
        raise ConfigurationError(f"{type(model).__name__} has no `features` to put pre-trained weights into")
    try:
        features.load_state_dict(pretrained.weights)
    except RuntimeError as error:
        raise ConfigurationError(f"these weights belong to another model: {error}") from error
    features.requires_grad_(not frozen)


def _known(name: str, table: dict[str, T]) -> T:
    if name not in table:
        raise ConfigurationError(f"only {', '.join(table)} have features to pre-train, not {name!r}")
    return table[name]


def _train(
    name: str,
    data: Dataset,
    recipe: Recipe,
    device: torch.device,
    progress: Callable[[int, float], None] | None,
) -> PaperCifarNet | ResNet | WideResNet:
    # A generator of its own: pre-training repeats, and leaves the caller's random state as it was.
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = untrained(name, len(data.classes)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=recipe.learning_rate,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )
    steps = max(len(data) // recipe.batch, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=max(steps * recipe.epochs, 2), pct_start=0.2
    )
    images, labels = data.images.to(device), data.labels.to(device)
    net.train()
    with _fastest_convolutions():
        for epoch in range(recipe.epochs):
            total = torch.zeros((), device=device)
            for index, flips, shifts in _epoch(len(data), recipe.batch, steps, generator, device):
                inputs = _augment(images[index].float() / data.maximum, flips, shifts)
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = functional.cross_entropy(net(inputs), labels[index])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                total += loss.detach()
            if progress is not None:
                progress(epoch + 1, float(total) / steps)
    return net  # type: ignore[no-any-return]


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms on the first batch: all batches are of one size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _epoch(
    count: int, batch: int, steps: int, generator: torch.Generator, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each batch its examples (b,), which of them are flipped (b,), and by how much each is shifted (2, b).

    Drawn on the CPU, so that every device sees the same, and sent in one piece: a batch waits for no transfer.
    """
    parts = torch.split(torch.randperm(count, generator=generator), batch)[:steps]
    draws = [
        torch.cat([
            part[None],
            (torch.rand(len(part), generator=generator) < 0.5).long()[None],
            torch.randint(0, 9, (2, len(part), 1), generator=generator)[:, :, 0],
        ])
        for part in parts
    ]  # fmt: skip
    sent = torch.cat(draws, 1).to(device)
    return [(piece[0], piece[1] > 0, piece[2:]) for piece in torch.split(sent, batch, dim=1)]


def _augment(images: Tensor, flips: Tensor, shifts: Tensor) -> Tensor:
    """Flip some of the images, and shift each by up to four pixels (a shift of 4 leaves it in place)."""
    count, _, height, width = images.shape
    images = torch.where(flips[:, None, None, None], images.flip(3), images)
    rows = (shifts[0][:, None] + torch.arange(height, device=images.device))[:, :, None]
    columns = (shifts[1][:, None] + torch.arange(width, device=images.device))[:, None, :]
    padded = functional.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    every = torch.arange(count, device=images.device)[:, None, None]
    return padded[every, rows, columns].permute(0, 3, 1, 2)


@torch.no_grad()
def _accuracy(net: nn.Module, data: Dataset, device: torch.device) -> float:
    net.eval()
    guesses = [net(part.to(device)).argmax(1).cpu() for part in torch.split(data.inputs(), 500)]
    return float((torch.cat(guesses) == data.labels).double().mean())


def _weights(net: PaperCifarNet | ResNet | WideResNet) -> dict[str, Tensor]:
    """Of the features, on the CPU. A wide net's kernels in half precision: 12 MB, and bfloat16 has seen no more."""
    half = isinstance(net, WideResNet)
    kept = {key: value.detach().cpu().contiguous() for key, value in net.features.state_dict().items()}
    return {key: value.half() if half and value.ndim == 4 else value for key, value in kept.items()}


def _read(path: Path, name: str, recipe: Recipe) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("recipe") != _describe(name, recipe):
                return None
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        return None


def _write(path: Path, weights: dict[str, Tensor], name: str, recipe: Recipe) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(weights, part, metadata={"recipe": _describe(name, recipe)})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _describe(name: str, recipe: Recipe) -> str:
    return json.dumps({"net": name, **asdict(recipe)}, sort_keys=True)
