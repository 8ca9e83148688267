"""What a worker process keeps between jobs: its device, and every data set that it has loaded, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adadp.data import load


@dataclass
class Bench:
    """One worker's. `data_dir` is where data sets lie; `scratch` is a folder that all workers share."""

    device: str = "cpu"
    data_dir: Path | None = None
    scratch: Path | None = None
    _kept: dict[Any, Any] = field(default_factory=dict)

    def images(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training inputs and labels, test inputs and labels, on the device."""
        if name not in self._kept:
            parts = [load(name, split, data_dir=self.data_dir) for split in ("train", "test")]
            tensors = [tensor.to(self.device) for part in parts for tensor in (part.inputs(), part.labels)]
            self._kept[name] = tuple(tensors)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self._kept[name]
        return found

    @property
    def device_name(self) -> str:
        """As it is written into records."""
        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"
