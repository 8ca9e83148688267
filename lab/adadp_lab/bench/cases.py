"""What is measured on: a module, one lot of random inputs and their targets. A step's time does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from adadp.losses import IGNORED

#: What the module is called with: a tensor, or keyword arguments.
Inputs = Tensor | dict[str, Tensor]
#: A module, a lot of inputs and their targets.
Case = tuple[nn.Module, Inputs, Tensor]
#: Keyword arguments of the function that makes a case.
Sizes = Mapping[str, int]

CLASSES = 10


def labels(lot: int) -> Tensor:
    """A class for each example."""
    return torch.randint(CLASSES, (lot,))


def text(lot: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Texts of full length, with the mask that tokenizers give."""
    tokens = torch.randint(vocabulary, (lot, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def next_tokens(tokens: Tensor) -> Tensor:
    """The target of each position is the token after it; the last position has none."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], dim=1)


def logits_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """What the module predicts, [n, C], or [n, T, C] for texts."""
    found = module(**inputs) if isinstance(inputs, dict) else module(inputs)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the lot."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def example_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """One for each example, a mean over its own tokens."""
    entries = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    if targets.ndim == 1:
        return entries
    return entries.view(targets.shape).sum(1) / (targets != IGNORED).sum(1)
