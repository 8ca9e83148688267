"""The models that steps are measured on, each with one lot of random inputs. Sizes are apart: a CPU gets smaller ones.

Four are made here; those that people train are in `real_models`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from adadp_lab.bench.cases import CLASSES, Case, Sizes, labels
from adadp_lab.bench.real_models import REAL, REAL_SIZES, real_case

VOCABULARY = 1000


def mlp(*, lot: int, width: int = 1000, depth: int = 1) -> Case:
    """The paper's MNIST net after DP-PCA; `depth` hidden layers."""
    layers: list[nn.Module] = [nn.Linear(60, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), torch.randn(lot, 60), labels(lot)


def alexnet(*, lot: int, channels: int = 64, size: int = 32) -> Case:
    """The paper's CIFAR-10 net with everything trained."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.LocalResponseNorm(4),
        nn.Conv2d(channels, channels, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * (size // 4) ** 2, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, CLASSES),
    )
    return model, torch.randn(lot, 3, size, size), labels(lot)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(16, inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(16, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.body(x) + self.skip(x)
        return total


def wrn(*, lot: int, widen: int = 4, size: int = 32) -> Case:
    """WRN-16-`widen` with GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    width = 16
    for outputs, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
        layers += [_Residual(width, outputs, stride), _Residual(outputs, outputs, 1)]
        width = outputs
    layers += [nn.GroupNorm(16, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    return nn.Sequential(*layers), torch.randn(lot, 3, size, size), labels(lot)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        total: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return total


class _Transformer(nn.Module):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[_Block(width, max(1, width // 64)) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))).mean(1))
        return logits


def transformer(*, lot: int, width: int = 768, depth: int = 12, length: int = 256) -> Case:
    """An encoder over `length` tokens that classifies their mean; heads of 64."""
    return _Transformer(width, depth, length), torch.randint(VOCABULARY, (lot, length)), labels(lot)


def _labels(lot: int) -> Tensor:
    return torch.randint(CLASSES, (lot,))


MODELS: dict[str, Callable[..., Case]] = {"mlp": mlp, "alexnet": alexnet, "wrn": wrn, "transformer": transformer}
#: Every name that can be asked for.
NAMES = (*MODELS, *REAL)

#: What the table measures, by kind of device.
SIZES: dict[str, dict[str, Sizes]] = {
    "cpu": {
        "mlp": {"lot": 600, "width": 1000, "depth": 1},
        "alexnet": {"lot": 32, "channels": 64, "size": 32},
        "wrn": {"lot": 16, "widen": 4, "size": 32},
        "transformer": {"lot": 32, "width": 256, "depth": 2, "length": 64},
        **REAL_SIZES["cpu"],
    },
    "cuda": {
        "mlp": {"lot": 600, "width": 1000, "depth": 1},
        "alexnet": {"lot": 512, "channels": 64, "size": 32},
        "wrn": {"lot": 256, "widen": 4, "size": 32},
        "transformer": {"lot": 32, "width": 768, "depth": 12, "length": 256},
        **REAL_SIZES["cuda"],
    },
}


def build(model: str, sizes: Sizes, seed: int, device: torch.device) -> Case:
    """The same weights and the same lot each time, on `device`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs, targets = real_case(model, sizes) if model in REAL else MODELS[model](**sizes)
    return module.to(device), tree_map(lambda part: part.to(device), inputs), targets.to(device)
