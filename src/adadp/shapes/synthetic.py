"""Sources that send inputs of their own through the model: synthetic (`Probe`) or public (`Public`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.shapes.shape import THIN, Shape, Statistics
from adadp.shapes.source import ModelGradients, Source, accumulate, checked_decay, checked_interval

#: Makes `count` synthetic inputs, on the CPU, from a generator.
InputMaker = Callable[[int, torch.Generator], Any]
#: The loss of each example (or their sum) given the model's outputs and a generator.
OutputLoss = Callable[[Any, torch.Generator], Tensor]


def own_prediction(outputs: Any, generator: torch.Generator) -> Tensor:
    """The loss of outputs against targets drawn from the model's own prediction.

    The last dimension (the second for images of classes) holds the logits of classes. A single output is a mean, its
    target drawn from a unit normal around it.
    """
    if not isinstance(outputs, Tensor):
        raise ConfigurationError(
            f"the model returns {type(outputs).__name__}, not a tensor of logits: give the probe a loss=(outputs, "
            "generator) -> tensor of its own"
        )
    logits = outputs.movedim(1, -1) if outputs.ndim > 3 else outputs
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if logits.shape[-1] == 1:
        noise = torch.randn(logits.shape, generator=generator).to(logits)
        return 0.5 * (logits - (logits.detach() + noise)).square().sum()
    flat = logits.flatten(0, -2)
    chances = flat.detach().softmax(-1).cpu().double().nan_to_num(nan=0.0) + 1e-12
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1).to(flat.device)
    loss: Tensor = torch.nn.functional.cross_entropy(flat, labels, reduction="sum")
    return loss


class Probe(Source):
    """Synthetic inputs through the current weights, with targets drawn from the model's own prediction.

    Args:
        inputs: a callable (count, generator) -> inputs (`adadp.shapes.probes` has some), or an iterable of batches,
            which is iterated over again when it ends.
        count: examples for one refresh of the shape.
        every: steps between refreshes.
        loss: (outputs, generator) -> the loss of each example, or their sum.
        batch: most examples at a time, which bounds the memory.
        decay: weight of earlier refreshes in a moving average; 0 forgets them.

    Guarantee:
        No private data is used: the inputs are synthetic, and the weights are released.

    """

    learns_first = True
    as_made = ("inputs", "loss", "generator", "_iterator")
    assumptions = ("the probes that shape the noise are synthetic: they hold nothing of the private data",)

    def __init__(
        self,
        inputs: InputMaker | Iterable[Any],
        *,
        count: int = 512,
        every: int = 50,
        loss: OutputLoss = own_prediction,
        batch: int = 128,
        decay: float = 0.0,
    ) -> None:
        super().__init__()
        if count < 1 or batch < 1:
            raise ConfigurationError(f"count and batch must be at least 1, not {count} and {batch}")
        self.inputs, self.loss = inputs, loss
        self.count, self.every, self.batch, self.decay = count, checked_interval(every), batch, checked_decay(decay)
        self.generator = torch.Generator().manual_seed(0)  # public randomness: synthetic inputs hold no secret
        self._iterator: Iterator[Any] | None = None

    def steady(self) -> bool:
        return (self.step + 1) % self.every != 0

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().before_lot(shape, parameters, model)
        if self.step % self.every:
            return
        self.generator.manual_seed(self.step)  # a run that is resumed goes on with the same inputs
        totals: dict[str, Statistics] = {}
        count = made = 0
        while made < self.count:
            inputs = self._next(min(self.batch, self.count - made))
            made += max(1, _length(inputs))
            gradients = model.gradients_of(inputs, lambda outputs: self.loss(outputs, self.generator))
            count += gradients.count
            finite = gradients.finite()
            gradients.cache_square_sums()
            for name, form in gradients.forms.items():
                if name in parameters:
                    # Vectors cannot be averaged over time: there would be more and more of them.
                    found = (shape.statistics if self.decay else shape.thin_statistics)(form, finite)
                    accumulate(totals.setdefault(name, {}), found)
        decay = self.decay if self._average else 0.0  # nothing to average with the first time
        sums = [(key, value) for statistics in totals.values() for key, value in statistics.items()]
        if sums:
            counts = [math.sqrt(count) if key.endswith(THIN) else float(count) for key, _ in sums]
            torch._foreach_div_([value for _, value in sums], counts)
        self._learn(shape, totals, decay)

    def _next(self, count: int) -> Any:
        if callable(self.inputs):
            return self.inputs(count, self.generator)
        if self._iterator is None:
            self._iterator = _again_and_again(self.inputs)
        found = next(self._iterator, None)
        if found is None:
            raise ConfigurationError("the iterable of probes is empty")
        return found


class Public(Probe):
    """Batches of public data through the current weights.

    Args:
        batches: an iterable of batches that can be iterated over more than once.
        count: examples for one refresh of the shape.
        every: steps between refreshes.
        loss: (outputs, generator) -> the loss of each example, or their sum; by default targets are drawn from the
            model's own prediction.
        decay: weight of earlier refreshes in a moving average; 0 forgets them.

    Guarantee:
        No private data is used, if the data is public as the caller says.

    """

    assumptions = ("the data that shapes the noise is public",)

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        count: int = 512,
        every: int = 50,
        loss: OutputLoss = own_prediction,
        decay: float = 0.0,
    ) -> None:
        super().__init__(batches, count=count, every=every, loss=loss, batch=count, decay=decay)


def _again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, from the start again when they end; ends where there is none."""
    empty = False
    while not empty:
        empty = True
        for batch in batches:
            empty = False
            yield batch


def _length(inputs: Any) -> int:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves:
        raise ConfigurationError("a probe's inputs hold no tensor with examples in its first dimension")
    return len(leaves[0])
