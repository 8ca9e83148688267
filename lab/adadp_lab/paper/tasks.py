"""What is trained: the paper's two tasks, and the two of the best sound recipe that we ship.

| task | data | what is trained |
| --- | --- | --- |
| `mnist-pca` | MNIST through DP-PCA, 60 directions | the paper's net, 60 -> 1000 ReLU -> 10 |
| `mnist-cnn` | MNIST as it is | the tanh CNN |
| `cifar10-paper` | CIFAR-10 through convolutions pre-trained on CIFAR-100 | 4096 -> 384 -> 192 -> 10 |
| `cifar10-resnet` | CIFAR-10 through a residual net pre-trained on CIFAR-100 | one linear layer -> 10 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adadp import models
from adadp.shapes import InputMaker
from adadp.shapes.probes import PinkNoise
from adadp_lab.paper.workbench import Split, Workbench


@dataclass(frozen=True)
class Prepared:
    """Rows on the device, a new model, synthetic inputs that went the same way, and public rows where there are any."""

    split: Split
    model: Callable[[], nn.Module]
    probes: InputMaker
    public: Tensor | None = None


def prepare(settings: Mapping[str, Any], seed: int, bench: Workbench) -> Prepared:
    """The task that `settings["task"]` names."""
    return _TASKS[settings["task"]](settings, seed, bench)


def _mnist_pca(settings: Mapping[str, Any], seed: int, bench: Workbench) -> Prepared:
    images, labels, tested, answers = bench.images("mnist")
    basis = bench.basis(float(settings["pca_noise_multiplier"]), seed)
    pixels = basis.T.cpu()
    noise = PinkNoise((1, 28, 28))

    def probes(count: int, generator: torch.Generator) -> Tensor:
        return noise(count, generator).flatten(1) @ pixels

    split = (images.flatten(1) @ basis.T, labels, tested.flatten(1) @ basis.T, answers)
    return Prepared(split, lambda: models.PaperNet(60, 10), probes)


def _mnist_cnn(settings: Mapping[str, Any], seed: int, bench: Workbench) -> Prepared:
    return Prepared(bench.images("mnist"), lambda: models.build("tanh-cnn", (1, 28, 28), 10), PinkNoise((1, 28, 28)))


def _cifar10_paper(settings: Mapping[str, Any], seed: int, bench: Workbench) -> Prepared:
    split, through, _ = bench.features("paper")
    noise = PinkNoise((3, 32, 32))
    return Prepared(
        split,
        lambda: models.PaperCifarNet().head,
        lambda count, generator: through(noise(count, generator)),
    )


def _cifar10_resnet(settings: Mapping[str, Any], seed: int, bench: Workbench) -> Prepared:
    split, through, public = bench.features(**settings["features"])
    aside = settings.get("held_out", 0)
    if aside:  # settings are chosen on these, and the test set is not looked at
        inputs, labels, _, _ = split
        split = (inputs[:-aside], labels[:-aside], inputs[-aside:], labels[-aside:])
    noise = PinkNoise((3, 32, 32))
    return Prepared(
        split,
        lambda: nn.Linear(split[0].shape[1], 10),
        lambda count, generator: through(noise(count, generator)),
        public,
    )


_TASKS: dict[str, Callable[[Mapping[str, Any], int, Workbench], Prepared]] = {
    "mnist-pca": _mnist_pca,
    "mnist-cnn": _mnist_cnn,
    "cifar10-paper": _cifar10_paper,
    "cifar10-resnet": _cifar10_resnet,
}
