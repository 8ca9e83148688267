"""What a worker process keeps between jobs: its device, and everything that it has loaded or computed, once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from adadp.data import load
from adadp.preprocessing import DPPCA
from adadp_lab.paper.feature_scaling import scaled
from adadp_lab.pretraining import load_features, pretrain, untrained

T = TypeVar("T")
#: Training inputs and labels, test inputs and labels, on the device.
Split = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Workbench:
    """One worker's. `data_dir` is where data sets lie; `scratch` is a folder that all workers share."""

    device: str = "cpu"
    data_dir: Path | None = None
    scratch: Path | None = None
    _kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """As it is written into records."""
        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def images(self, name: str) -> Split:
        """A data set as it is."""

        def make() -> Split:
            parts = [load(name, split, data_dir=self.data_dir) for split in ("train", "test")]
            tensors = [tensor.to(self.device) for part in parts for tensor in (part.inputs(), part.labels)]
            return cast(Split, tuple(tensors))

        return self._once(name, make)

    def public_images(self) -> Tensor:
        """CIFAR-100's training images."""
        return self._once("public", lambda: load("cifar100", data_dir=self.data_dir).inputs().to(self.device))

    def basis(self, noise_multiplier: float, seed: int) -> Tensor:
        """MNIST's 60 noisy principal components, [60, 784]. Five seconds of one core, so workers share them."""

        def make() -> Tensor:
            path = None if self.scratch is None else self.scratch / f"pca-{noise_multiplier:g}-{seed}.npy"
            if path is not None and path.exists():
                return torch.from_numpy(np.load(path)).to(self.device)
            # As `adadp train` does it: isometric, which the paper does not say.
            pca = DPPCA(60, noise_multiplier, isometric=True, random_state=seed)
            rows = load("mnist", data_dir=self.data_dir).inputs().flatten(1).numpy()
            components = pca.fit(rows).components_.astype(np.float32)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{secrets.token_hex(4)}.npy")
                np.save(part, components)
                os.replace(part, path)
            return torch.from_numpy(components).to(self.device)

        return self._once(("basis", noise_multiplier, seed), make)

    def features(
        self, net: str, scaling: str = "none", blocks: int = 1
    ) -> tuple[Split, Callable[[Tensor], Tensor], Tensor]:
        """CIFAR-10 through convolutions pre-trained on CIFAR-100, the map itself, and some public features.

        `scaling` is one of `adadp_lab.paper.feature_scaling`; `blocks` is of how many of a wide net's last blocks.
        """

        def make() -> tuple[Split, Callable[[Tensor], Tensor], Tensor]:
            (images, labels, tested, answers), of, public = self._pretrained(net)
            first = 0 if net != "wide" or blocks == 2 else public.shape[1] // 2
            rows = scaled(scaling, public[:, first:])

            def through(some: Tensor) -> Tensor:
                return rows(of(some)[:, first:])

            split = (rows(images[:, first:]), labels, rows(tested[:, first:]), answers)
            return split, through, rows(public[:, first:])

        return self._once(("features", net, scaling, blocks), make)

    def _pretrained(self, net: str) -> tuple[Split, Callable[[Tensor], Tensor], Tensor]:
        """As `features`, of all blocks and not scaled: what takes seconds."""

        def make() -> tuple[Split, Callable[[Tensor], Tensor], Tensor]:
            kept = pretrain(net, data_dir=self.data_dir, device=self.device)
            model = untrained(net)
            load_features(model, kept)
            # Evaluation mode makes batch normalisation a constant: no example feels another.
            convolutions = cast(torch.nn.Module, model.features).to(self.device).eval()

            @torch.no_grad()
            def of(images: Tensor) -> Tensor:
                return torch.cat([looked(part.to(self.device)) for part in torch.split(images, 1000)])

            def looked(part: Tensor) -> Tensor:
                if net != "wide":
                    return cast(Tensor, convolutions(part))
                # Twice, since an image and its mirror image show the same. Half precision on a GPU is finer than what
                # the net was trained in, and every worker does this.
                both = torch.cat([part, part.flip(3)]).contiguous(memory_format=torch.channels_last)
                kind = torch.device(self.device).type
                with torch.autocast(kind, torch.float16, enabled=kind == "cuda"):
                    return cast(Tensor, convolutions(both).float().unflatten(0, (2, -1)).mean(0))

            images, labels, tested, answers = self.images("cifar10")
            return (of(images), labels, of(tested), answers), of, of(self.public_images()[:10_000])

        return self._once(("pretrained", net), make)
