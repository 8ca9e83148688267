"""The models that step times are measured on, each with a batch: sizes for a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, Tensor, Tensor]


def mlp(device: str) -> Case:
    """The paper's MNIST net after DP-PCA."""
    model = nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))
    return model, torch.randn(600, 60), torch.randint(10, (600,))


def alexnet(device: str) -> Case:
    """The paper's CIFAR-10 net with everything trained."""
    count = 512 if device == "cuda" else 32
    model = nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.LocalResponseNorm(4),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    )
    return model, torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


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
        return self.body(x) + self.skip(x)


def wrn(device: str) -> Case:
    """WRN-16-4 with GroupNorm."""
    count = 256 if device == "cuda" else 16
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    width = 16
    for outputs, stride in ((64, 1), (128, 2), (256, 2)):
        layers += [_Residual(width, outputs, stride), _Residual(outputs, outputs, 1)]
        width = outputs
    layers += [nn.GroupNorm(16, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers), torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


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
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[_Block(width, width // 64) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))).mean(1))


def transformer(device: str) -> Case:
    width, layers, length = (768, 12, 256) if device == "cuda" else (256, 2, 64)
    return _Transformer(width, layers, length), torch.randint(1000, (32, length)), torch.randint(10, (32,))


MODELS: dict[str, Callable[[str], Case]] = {"mlp": mlp, "alexnet": alexnet, "wrn": wrn, "transformer": transformer}
