"""Features learned from public data: trained once without privacy on CIFAR-100, kept in the user's cache."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from adadp.data import Dataset, cache_folder, load
from adadp.errors import ConfigurationError
from adadp.models.paper import PaperCifarNet
from adadp.models.resnet import ResNet

_NETS: dict[str, Callable[[int], PaperCifarNet | ResNet]] = {
    "paper": lambda classes: PaperCifarNet(classes, frozen=False),
    "resnet": lambda classes: ResNet(3, classes),
}


@dataclass(frozen=True)
class Recipe:
    """How features are trained: SGD with momentum 0.9 on flipped and shifted images, one-cycle rate.

    On a GPU activations are bfloat16: one or two minutes there, hours on a CPU.
    """

    epochs: int = 15
    batch: int = 256
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    seed: int = 0


RECIPES = {"paper": Recipe(epochs=20), "resnet": Recipe(epochs=50, batch=512, learning_rate=0.2)}
"""What `pretrain` does unless told otherwise."""


@dataclass(frozen=True)
class Pretrained:
    """Weights of a net's `features`, and the sentence that a guarantee has to carry when it rests on them."""

    weights: dict[str, Tensor]
    path: Path | None
    assumption: str = "CIFAR-100, on which the features were trained without privacy, is public"


def pretrain(
    name: str = "paper",
    *,
    recipe: Recipe | None = None,
    data: Dataset | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    cache: bool = True,
    progress: Callable[[int, float], None] | None = None,
) -> Pretrained:
    """Train the features of "paper" or "resnet" on CIFAR-100, or take them from the cache.

    `data` replaces CIFAR-100 (it must be public too, and is not cached). `progress(epoch, loss)` is called
    after each epoch. No private data is touched: use the result with `load_features`, and state its
    `assumption`.
    """
    if name not in _NETS:
        raise ConfigurationError(f"only {' and '.join(_NETS)} have features to pre-train, not {name!r}")
    recipe = recipe or RECIPES[name]
    path = None
    if cache and data is None:
        path = weights_path(name, recipe)
        kept = _read(path, name, recipe)
        if kept is not None:
            return Pretrained(kept, path)
    public = data if data is not None else load("cifar100", data_dir=data_dir)
    weights = _train(name, public, recipe, torch.device(device), progress)
    if path is not None:
        _write(path, weights, name, recipe)
    if data is not None:
        return Pretrained(
            weights, None, f"{public.name}, on which the features were trained without privacy, is public"
        )
    return Pretrained(weights, path)


def weights_path(name: str, recipe: Recipe | None = None) -> Path:
    """Where `pretrain` keeps the features of a net, whether they are there or not."""
    settings = "-".join(f"{key}{value:g}" for key, value in asdict(recipe or RECIPES[name]).items())
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


def _train(
    name: str,
    data: Dataset,
    recipe: Recipe,
    device: torch.device,
    progress: Callable[[int, float], None] | None,
) -> dict[str, Tensor]:
    # A generator of its own: pre-training repeats, and leaves the caller's random state as it was.
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = _NETS[name](len(data.classes)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
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
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(data), generator=generator).to(device)
        total = torch.zeros((), device=device)
        for index in torch.split(order, recipe.batch)[:steps]:
            inputs = _augment(images[index].float() / data.maximum, generator)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = functional.cross_entropy(net(inputs), labels[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.detach()
        if progress is not None:
            progress(epoch + 1, float(total) / steps)
    return {key: value.detach().cpu().contiguous() for key, value in net.features.state_dict().items()}


def _augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip half of the images, and shift each by up to four pixels."""
    count, _, height, width = images.shape
    flip = (torch.rand(count, generator=generator) < 0.5).to(images.device)
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    down, right = torch.randint(0, 9, (2, count, 1), generator=generator).to(images.device)
    rows = (down + torch.arange(height, device=images.device))[:, :, None]
    columns = (right + torch.arange(width, device=images.device))[:, None, :]
    padded = functional.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    every = torch.arange(count, device=images.device)[:, None, None]
    return padded[every, rows, columns].permute(0, 3, 1, 2)


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
