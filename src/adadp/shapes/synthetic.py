"""Sources that send inputs of their own through the model: synthetic (`Probe`) or public (`Public`)."""

from __future__ import annotations

import math
from abc import abstractmethod
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


class _Synthetic(Source):
    """Sources that send inputs of their own through the model."""

    learns_first = True

    def __init__(self, count: int, every: int, loss: OutputLoss, batch: int, decay: float) -> None:
        super().__init__()
        if count < 1 or batch < 1:
            raise ConfigurationError(f"count and batch must be at least 1, not {count} and {batch}")
        self.count, self.every, self.loss, self.batch = count, checked_interval(every), loss, batch
        self.decay = checked_decay(decay)
        self.generator = torch.Generator().manual_seed(0)  # public randomness: synthetic inputs hold no secret

    def steady(self) -> bool:
        return (self.step + 1) % self.every != 0

    @abstractmethod
    def _batches(self) -> Iterator[tuple[Any, Callable[[Any], Tensor]]]:
        """Inputs and the loss to use on their outputs, until about `count` examples are made."""

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().before_lot(shape, parameters, model)
        if self.step % self.every:
            return
        totals: dict[str, Statistics] = {}
        count = 0
        for inputs, loss in self._batches():
            gradients = model.gradients_of(inputs, loss)
            count += gradients.count
            finite = gradients.finite()
            gradients.bring_squares()
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


class Probe(_Synthetic):
    """Synthetic inputs through the current weights, with targets drawn from the model's own prediction.

    `inputs` is a callable (count, generator) -> inputs (see `adadp.shapes.probes` for ready ones) or an iterable of
    batches that is gone through again and again. `every` is the number of steps between refreshes, `batch` bounds the
    memory.
    """

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
        super().__init__(count, every, loss, batch, decay)
        self.inputs = inputs
        self._iterator: Iterator[Any] | None = None

    def _batches(self) -> Iterator[tuple[Any, Callable[[Any], Tensor]]]:
        made = 0
        while made < self.count:
            inputs = self._next(min(self.batch, self.count - made))
            made += max(1, _length(inputs))
            yield inputs, lambda outputs: self.loss(outputs, self.generator)

    def _next(self, count: int) -> Any:
        if callable(self.inputs):
            return self.inputs(count, self.generator)
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.inputs)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise ConfigurationError("the iterable of probes is empty")


class Public(_Synthetic):
    """Batches of public data through the current weights. `batches` is an iterable that can be gone through again.

    Targets are drawn from the model's own prediction, or `loss` makes them of the outputs.
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
        super().__init__(count, every, loss, count, decay)
        self._probe = Probe(batches, count=count, every=every, loss=loss, batch=count)

    def _batches(self) -> Iterator[tuple[Any, Callable[[Any], Tensor]]]:
        return self._probe._batches()


def _length(inputs: Any) -> int:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves:
        raise ConfigurationError("a probe's inputs hold no tensor with examples in its first dimension")
    return len(leaves[0])
