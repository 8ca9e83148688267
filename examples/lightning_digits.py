"""Train with Lightning on digits to (epsilon <= 3, delta = 1e-4): a program for Lightning, and one callback.

`docs/lightning.md` tells what the callback does. With ADADP_SHORT in the environment it trains for two epochs only.
"""

from __future__ import annotations

import os

import lightning as L  # noqa: N812
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset, random_split

from adadp.integrations.lightning import Private

EPOCHS = 2 if "ADADP_SHORT" in os.environ else 20


class Digits(L.LightningDataModule):
    """1,797 images of handwritten digits, 8 x 8; a tenth is held out."""

    def setup(self, stage: str) -> None:
        images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
        images = images.float().reshape(-1, 1, 8, 8) / 16  # a fixed, public scale: never a statistic of private data
        split = torch.Generator().manual_seed(0)
        self.train, self.held_out = random_split(TensorDataset(images, labels), [0.9, 0.1], split)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=128)  # the lot: how many images a step takes on average

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.held_out, batch_size=256)


class Classifier(L.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels, reduction="none")  # one loss for each image, [n]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)  # on held-out people: not noised, and not covered

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


private = Private(target_epsilon=3.0, target_delta=1e-4, max_grad_norm=0.5, max_physical_batch_size=64)
trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[private], accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Classifier(), Digits())

print(f"accuracy  {trainer.callback_metrics['accuracy']:.1%} on images held out, after {trainer.global_step} steps")
print(private.guarantee.to_text(80))
