"""Where a shape's second moments come from, and what they cost.

| source   | made of                                          | cost                                              |
| -------- | ------------------------------------------------ | ------------------------------------------------- |
| Probe    | synthetic inputs through the current weights     | none: no data, and the weights are released       |
| Public   | public data through the current weights          | none                                              |
| Released | gradients that were released already             | none: post-processing                             |
| Paid     | noisy row and column energies of the same lot    | a share of the step's own Gaussian event          |
| Raw      | the lot's gradients as they are (as published)   | no proof covers it: the guarantee is *none*       |

Moments are means over examples of squared gradients, so that they mean the same from every source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.shapes.shape import THIN, Shape, Statistics

#: Makes `count` synthetic inputs, on the CPU, from a generator.
InputMaker = Callable[[int, torch.Generator], Any]
#: The loss of each example (or their sum) given the model's outputs and a generator.
OutputLoss = Callable[[Any, torch.Generator], Tensor]


class ModelGradients(Protocol):
    """What a source may do with the model between two lots. The private data is not in reach."""

    expected_lot: float

    def gradients_of(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Gradients:
        """Per-example gradients of `loss(model(inputs))`, a sum over examples, at the current weights."""


@dataclass(frozen=True)
class LotRelease:
    """What one lot released.

    `sums` of gradients are in the coordinates of `Shape.apply_before`, with noise of `stddev`; `paid` are low
    statistics, means over the expected lot.
    """

    sums: Mapping[str, Tensor]
    stddev: Mapping[str, float | Tensor]
    paid: Mapping[str, Statistics]
    expected_lot: float

    def mean(self, name: str) -> tuple[Tensor, float | Tensor]:
        """The mean gradient of a parameter over the expected lot, and the standard deviation of its noise."""
        return self.sums[name] / self.expected_lot, self.stddev[name] / self.expected_lot


class Source(ABC):  # noqa: B024 - a source may have nothing to say at any of these points
    """Feeds a shape. One object serves one training run; lots are counted in `step`."""

    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    looks = False  # whether `see` squares the gradients that it is shown
    learns_first = False  # whether all that it learns, it learns before a lot

    def __init__(self) -> None:
        self.step = -1
        self._average: dict[str, Statistics] = {}

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        """Called once before each lot."""
        self.step += 1

    def steady(self) -> bool:
        """Whether the next lot asks nothing of this source but what every lot asks."""
        return True

    @property
    def share(self) -> float:
        """The share of this step's 1/sigma^2 that the shape takes from the gradient; 0 where it is free."""
        return 0.0

    def see(self, shape: Shape, gradients: Gradients) -> None:  # noqa: B027 - only Raw looks
        """Called with each microbatch's own gradients."""

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:  # noqa: B027 - Probe and Public learn before it
        """Called with what the lot released, all of it noised."""

    def _learn(self, shape: Shape, found: Mapping[str, Statistics], decay: float) -> None:
        """Average over time, as the paper does: E' <- decay E' + (1 - decay) new, from zero."""
        self._average |= _averaged(self._average, found, decay)
        shape.learn_all({name: self._average[name] for name in found})


def _averaged(old: Mapping[str, Statistics], new: Mapping[str, Statistics], decay: float) -> dict[str, Statistics]:
    """Of all parameters at once: there may be many, and most of them small."""
    if decay == 0 or not new:
        return dict(new)
    pairs = [
        (old[name][key].to(value.dtype) if name in old else torch.zeros_like(value), value)
        for name, statistics in new.items()
        for key, value in statistics.items()
    ]
    averages = iter(torch._foreach_lerp([before for before, _ in pairs], [value for _, value in pairs], 1 - decay))
    return {name: {key: next(averages) for key in statistics} for name, statistics in new.items()}


def _interval(every: int) -> int:
    if not isinstance(every, int) or every < 1:
        raise ConfigurationError(f"every must be a whole number of steps, at least 1, not {every!r}")
    return every


def _decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise ConfigurationError(f"decay must be in [0, 1), not {decay!r}")
    return decay


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
        self.count, self.every, self.loss, self.batch = count, _interval(every), loss, batch
        self.decay = _decay(decay)
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
            gradients.cache_square_sums()
            for name, form in gradients.forms.items():
                if name in parameters:
                    # Vectors cannot be averaged over time: there would be more and more of them.
                    found = (shape.statistics if self.decay else shape.thin_statistics)(form, finite)
                    _accumulate(totals.setdefault(name, {}), found)
        decay = self.decay if self._average else 0.0  # nothing to average with the first time
        sums = [(key, value) for statistics in totals.values() for key, value in statistics.items()]
        if sums:
            counts = [math.sqrt(count) if key.endswith(THIN) else float(count) for key, _ in sums]
            torch._foreach_div_([value for _, value in sums], counts)
        self._learn(shape, totals, decay)


def _accumulate(total: Statistics, more: Statistics) -> None:
    """Add `more` to `total`, in place: both are ours alone."""
    for key, value in more.items():
        if key not in total:
            total[key] = value
        elif key.endswith(THIN):
            total[key] = torch.cat([total[key], value])
        else:
            total[key] += value


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


class Released(Source):
    """Gradients that were released: their moments less those that the noise has on average."""

    def __init__(self, *, decay: float = 0.99, every: int = 1) -> None:
        super().__init__()
        self.decay, self.every = _decay(decay), _interval(every)

    def steady(self) -> bool:
        return (self.step + 1) % self.every != self.every - 1

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        moments: dict[str, Statistics] = {}
        for name in lot.sums:
            gradient, stddev = lot.mean(name)
            carried = shape.apply(name, gradient, shape.before)
            noise = shape.moments_of_noise(name, gradient, stddev)
            moments[name] = {key: value - noise[key] for key, value in shape.moments_of(carried).items()}
        self._average |= _averaged(self._average, moments, self.decay)
        if self.step % self.every == self.every - 1:
            shape.learn_all(self._average)


class Paid(Source):
    """Noisy squared gradients of the lot itself, released together with the gradient as one Gaussian event.

    At every `every`-th step the shape takes `share` of the step's 1/sigma^2 and the gradient the rest, so the step
    costs what it costs without: 1/sigma^2 = 1/sigma_gradient^2 + 1/sigma_shape^2.
    """

    def __init__(self, *, share: float = 0.1, every: int = 10, decay: float = 0.9) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ConfigurationError(f"share must be in (0, 1), not {share!r}")
        self._share, self.every, self.decay = share, _interval(every), _decay(decay)

    def steady(self) -> bool:
        return (self.step + 1) % self.every != 0

    @property
    def share(self) -> float:
        return self._share if self.step % self.every == 0 else 0.0

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        self._learn(shape, lot.paid, self.decay)


class Raw(Source):
    """The lot's own gradients, squared and averaged, as the paper computes E'. Nothing protects them."""

    looks = True

    reasons = (
        "the shape of the noise (E') is computed from raw gradients: clip bounds and noise scales then depend on "
        "private data that was never privatised, which Theorem 1 does not cover",
    )

    def __init__(self, *, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = _decay(decay)
        self._seen: dict[str, Statistics] = {}
        self._expected_lot = 1.0

    def before_lot(self, shape: Shape, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().before_lot(shape, parameters, model)
        self._expected_lot = model.expected_lot
        self._seen = {}

    def see(self, shape: Shape, gradients: Gradients) -> None:
        finite, share = gradients.finite(), gradients.scale**2 / self._expected_lot
        found = {name: shape.statistics(form, finite) for name, form in gradients.forms.items()}
        values = [value for statistics in found.values() for value in statistics.values()]
        squared = iter(torch._foreach_mul(values, share) if values else ())
        for name, statistics in found.items():
            _accumulate(self._seen.setdefault(name, {}), {key: next(squared) for key in statistics})

    def after_lot(self, shape: Shape, lot: LotRelease) -> None:
        self._learn(shape, self._seen, self.decay)


def split_noise(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Noise multipliers of the gradient and of the shape that together are one event of `noise_multiplier`."""
    return noise_multiplier / math.sqrt(1 - share), noise_multiplier / math.sqrt(share) if share else math.inf
