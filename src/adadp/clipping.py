"""Bounding what one example adds to a lot's sum. Each clipping knows the noise that hides what it lets through.

The contract (the paper's Lemma 1), for every example's gradient g whatever it holds:

    || clip(g) / stddev ||_2 <= 1 / noise_multiplier

taken over everything that one step releases, in the coordinates in which the noise is independent. The property test in
`tests/soundness` attacks it for every class here. Gradients that are not finite contribute zero.
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients, is_small
from adadp.gradients.forms.clamped import Clamped
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.rounding import accumulation_dtype
from adadp.shapes.shape import Diagonal, Kronecker, Shape, Statistics
from adadp.shapes.sources import LotRelease, ModelGradients, Raw, Released, Source, split_noise

#: What one step releases, by name: a parameter's, or "shape/..." for statistics that are paid for.
Release = dict[str, Tensor]


class Clipping(ABC):
    """Bounds each example's gradient. A step calls `begin`, `bound` for each microbatch, `stddev`, then `release`."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.expected_lot = 1.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no proof covers this clipping; empty when one does."""
        return ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the proof takes for granted beyond the mechanism itself."""
        return ()

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        """Get ready for a lot that releases gradients of `parameters`. `model` can be probed; no data is at hand."""
        self.parameters = dict(parameters)
        self.expected_lot = model.expected_lot

    def early(self) -> bool:
        """Whether a parameter's gradients can be bounded without the others', while the backward pass runs."""
        return False

    def bound_early(self, name: str, form: PerExample, scale: float, keep: Tensor) -> PerExample:
        """What `bound` needs of one parameter's gradients, `scale * form` of the kept examples; after `begin`."""
        return form

    @abstractmethod
    def bound(self, gradients: Gradients) -> Release:
        """The sum of bounded contributions over a microbatch, not noised."""

    @abstractmethod
    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        """The standard deviation of the noise for each entry of `bound`."""

    def complete(self, sums: Release) -> Release:
        """The lot's sum when all its microbatches are in, just before the noise. Nothing sound has work to do here."""
        return sums

    def release(self, noisy: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        """Turn the noised sum into one gradient per parameter. Post-processing."""
        return noisy

    def _zeros(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return torch.zeros(parameter.shape, dtype=accumulation_dtype(parameter.dtype), device=parameter.device)

    def _sums(self, gradients: Gradients, weights: Tensor) -> Release:
        sums = gradients.only(self.parameters).weighted_sums(weights)
        return {name: sums[name] if name in sums else self._zeros(name) for name in self.parameters}

    def _exact(self) -> bool:
        return all(parameter.dtype == torch.float64 for parameter in self.parameters.values())

    def _shrunk(self, bound: float) -> float:
        """A little less than the bound, so that rounding in the sum cannot carry an example outside it."""
        return bound * (1 - (2.0**-44 if self._exact() else 2.0**-20))

    def _least_factor(self) -> float:
        return 4 * float(torch.finfo(torch.float64 if self._exact() else torch.float32).tiny)

    def objects(self) -> list[object]:
        """This and everything below it that keeps state between lots."""
        return [self]

    def settings(self) -> list[object]:
        """All numbers and words that the user may set on this and what is below it; not how many lots there were."""
        return [
            value
            for part in self.objects()
            for name, value in vars(part).items()
            if isinstance(value, int | float | str) and not (name == "step" and isinstance(part, Source))
        ]

    def steady(self) -> bool:
        """Whether the next lot is handled as the last one was: nothing to refresh, nothing for the host to decide."""
        return False

    def steady_once_begun(self) -> bool:
        """Whether it is, after `begin`: whatever there is to refresh is refreshed there."""
        return self.steady()

    def count_lot(self) -> None:
        """Count a lot that was handled by replaying the work of an earlier one."""
        for part in self.objects():
            if isinstance(part, Source):
                part.step += 1

    def check(self, names: Iterable[str]) -> None:  # noqa: B027 - most clippings take any parameters
        """Raise ConfigurationError where this clipping cannot bound parameters of these names."""


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)


class Flat(Clipping):
    """One L2 ball over all parameters: g * min(1, C / |g|). DPSGD's clipping."""

    def __init__(self, max_grad_norm: float = 1.0) -> None:
        super().__init__()
        self.max_grad_norm = _positive("max_grad_norm", max_grad_norm)

    def steady(self) -> bool:
        return True

    def weights(self, gradients: Gradients) -> Tensor:
        """By how much each example's gradient is multiplied; 0 where it is not finite or does not count."""
        factors = self._factor(gradients.norms())
        # A factor below the smallest normal number would be rounded to a third more of itself: too large a gradient is
        # treated like one that is not finite, whose factor is zero or NaN.
        sure = factors * min(gradients.scale, 1.0) >= self._least_factor()
        return torch.where(sure & gradients.keep, factors, 0.0)

    def _factor(self, lengths: Tensor) -> Tensor:
        """What multiplies gradients of these lengths: 0 where they are infinite, NaN where they are NaN."""
        return (self._shrunk(self.max_grad_norm) / lengths).clamp(max=1.0)

    def bound(self, gradients: Gradients) -> Release:
        return self._sums(gradients, self.weights(gradients))

    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        return dict.fromkeys(self.parameters, noise_multiplier * self.max_grad_norm)


class Automatic(Flat):
    """Normalises instead of clipping: g * C / (|g| + gamma). There is no bound to tune: C only scales the step."""

    def __init__(self, max_grad_norm: float = 1.0, *, gamma: float = 0.01) -> None:
        super().__init__(max_grad_norm)
        self.gamma = _positive("gamma", gamma)

    def _factor(self, lengths: Tensor) -> Tensor:
        return self._shrunk(self.max_grad_norm) / (lengths + self.gamma)


class _Shaped(Flat):
    """A clipping whose bound or basis follows a shape, fed by a source."""

    def __init__(self, max_grad_norm: float, shape: Shape, source: Source) -> None:
        super().__init__(max_grad_norm)
        self.shape, self.source = shape, source

    def objects(self) -> list[object]:
        return [self, self.shape, self.source]

    def steady(self) -> bool:
        return self.source.steady()

    def steady_once_begun(self) -> bool:
        return self.steady() or self.source.learns_first

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.source.reasons

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.source.assumptions

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        self.source.before_lot(self.shape, self.parameters, model)

    def bound(self, gradients: Gradients) -> Release:
        sums = self._bounded(gradients)
        if self.source.share:
            sums |= self._statistics(gradients)
        self.source.see(self.shape, gradients)
        return sums

    @abstractmethod
    def _bounded(self, gradients: Gradients) -> Release:
        """The gradient's part of the release."""

    @abstractmethod
    def _gradient_stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        """The gradient's part of the noise."""

    def _statistics(self, gradients: Gradients) -> Release:
        """Squares of gradients clipped to norm 1: one example's have L2 norm at most `low_sensitivity`."""
        weights = self.weights(gradients) * gradients.scale / self.max_grad_norm
        weights = torch.where(weights >= self._least_factor(), weights, torch.zeros_like(weights))
        release: Release = {}
        for name, parameter in self.parameters.items():
            if name in gradients:
                statistics = self.shape.low_statistics(gradients.forms[name], weights)
            else:
                statistics = self.shape.low_statistics_like(parameter)
            release |= {f"shape/{name}/{key}": value for key, value in statistics.items()}
        return release

    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        gradient, statistics = split_noise(noise_multiplier, self.source.share)
        noise = self._gradient_stddev(gradient)
        if self.source.share:
            for name, parameter in self.parameters.items():
                for key in self.shape.low_statistics_like(parameter):
                    noise[f"shape/{name}/{key}"] = statistics * self.shape.low_sensitivity
        return noise

    def release(self, noisy: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        paid: dict[str, Statistics] = {}
        for key in [key for key in noisy if key.startswith("shape/")]:
            name, _, statistic = key.removeprefix("shape/").rpartition("/")
            value = noisy.pop(key) * self.max_grad_norm**2 / self.expected_lot
            paid.setdefault(name, {})[statistic] = value
        released = self._carried(noisy)
        self.source.after_lot(self.shape, LotRelease(noisy, stddev, paid, self.expected_lot))
        return released

    def _carried(self, noisy: Release) -> Release:
        """The released gradient as the optimizer takes it."""
        return noisy


class Ellipsoid(_Shaped):
    """An L2 ball in the space where the gradient was multiplied by S^-before; the release is multiplied by S^-after.

    The idea of AdaDP, done soundly: noise follows the shape, and so does the step.
    """

    def __init__(self, max_grad_norm: float = 1.0, *, shape: Shape | None = None, source: Source) -> None:
        super().__init__(max_grad_norm, shape if shape is not None else Kronecker(), source)

    def _bounded(self, gradients: Gradients) -> Release:
        forms = {name: self.shape.apply_before(name, form) for name, form in gradients.forms.items()}
        inside = gradients.replaced(forms)
        return self._sums(inside, self.weights(inside))

    def _gradient_stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        return dict.fromkeys(self.parameters, noise_multiplier * self.max_grad_norm)

    def _carried(self, noisy: Release) -> Release:
        return {name: self.shape.apply(name, value, -self.shape.after) for name, value in noisy.items()}


class Local(_Shaped):
    """The paper's box: coordinate i is clamped to s_i = beta * sqrt(E'_i) and noised with sigma * s_i * sqrt(m).

    Until the spread of sqrt(E') over coordinates exceeds `threshold`, it clips flat at `max_grad_norm`; then the
    box stays on (the paper does not say whether it may go off again). The sqrt(m), m the number of coordinates,
    is what Lemma 1 needs when every coordinate can be at its bound.
    """

    def __init__(
        self,
        max_grad_norm: float = 4.0,
        *,
        beta: float = 1.2,
        threshold: float = 1e-6,
        source: Source | None = None,
    ) -> None:
        # The shape is only where the moments are kept: its exponents multiply nothing.
        super().__init__(max_grad_norm, Diagonal(0.0, 0.0), source if source is not None else Raw())
        self.beta = _positive("beta", beta)
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ConfigurationError(f"threshold must be a finite number of at least 0, not {threshold!r}")
        self.threshold = threshold
        self.local = False
        self.bounds: dict[str, Tensor] = {}

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        assert isinstance(self.shape, Diagonal)
        self.bounds = {}
        if not self.parameters:
            return
        roots = torch._foreach_sqrt([self.shape.mean_square(name, value) for name, value in self.parameters.items()])
        if not self.local:
            # Read back until the box is on, and never again.
            self.local = bool(torch.cat([root.flatten() for root in roots]).var(correction=0) > self.threshold)
        self.bounds = dict(zip(self.parameters, torch._foreach_mul(roots, self.beta), strict=True))

    def steady(self) -> bool:
        return self.local and super().steady()

    def steady_once_begun(self) -> bool:
        return self.local and super().steady_once_begun()

    def early(self) -> bool:
        # Whoever does more with gradients than this class and its own sources do must see them.
        itself = type(self).bound is _Shaped.bound and type(self)._bounded is Local._bounded
        source = type(self.source)
        return self.local and itself and source.share is Source.share and source.see in (Source.see, Raw.see)

    def bound_early(self, name: str, form: PerExample, scale: float, keep: Tensor) -> PerExample:
        looks = self.source.looks or type(self.source).see is Raw.see
        wanted = name in self.bounds and not is_small(form)
        return Clamped(form, self.bounds[name], scale, keep, looks) if wanted else form

    def _bounded(self, gradients: Gradients) -> Release:
        if not self.local:
            return self._sums(gradients, self.weights(gradients))
        sums = gradients.clamped_sums(self.bounds, self.source.looks)
        return {name: sums[name] if name in sums else self._zeros(name) for name in self.bounds}

    def _gradient_stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        if not self.local:
            return dict.fromkeys(self.parameters, noise_multiplier * self.max_grad_norm)
        coordinates = sum(bound.numel() for bound in self.bounds.values())
        widths = torch._foreach_mul(list(self.bounds.values()), noise_multiplier * math.sqrt(coordinates))
        return dict(zip(self.bounds, widths, strict=True))


class Grouped(Clipping):
    """Different clippings for different parameters: {"embed.*": Flat(0.1), "*": Ellipsoid(...)}, first match counts.

    Each of the K groups gets noise sqrt(K) times its own, so that together they stay one event of noise_multiplier.
    """

    def __init__(self, groups: Mapping[str, Clipping]) -> None:
        super().__init__()
        if not groups:
            raise ConfigurationError("Grouped needs at least one pattern: {'*': Flat(1.0)}")
        self.groups = dict(groups)
        kept = [id(part) for member in self.groups.values() for part in member.objects()]
        if len(set(kept)) < len(kept):
            raise ConfigurationError(
                "one clipping (or its shape or source) stands for two groups, but keeps the state of one: make one for "
                "each pattern"
            )
        self._active: list[Clipping] = []

    def objects(self) -> list[object]:
        return [self, *(part for member in self.groups.values() for part in member.objects())]

    def steady(self) -> bool:
        return all(member.steady() for member in self.groups.values())

    def steady_once_begun(self) -> bool:
        return all(member.steady_once_begun() for member in self.groups.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reason for member in self.groups.values() for reason in member.reasons))

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for member in self.groups.values() for text in member.assumptions))

    def _group_of(self, name: str) -> str:
        for pattern in self.groups:
            if fnmatch.fnmatchcase(name, pattern):
                return pattern
        raise ConfigurationError(f"no group of the clipping matches parameter {name}: add '*' as the last pattern")

    def check(self, names: Iterable[str]) -> None:
        members: dict[str, list[str]] = {}
        for name in names:
            members.setdefault(self._group_of(name), []).append(name)
        for group, own in members.items():
            if group in self.groups:
                self.groups[group].check(own)

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        members: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            members.setdefault(self._group_of(name), {})[name] = parameter
        self._active = [self.groups[group] for group in members]
        for group, own in members.items():
            self.groups[group].begin(own, model)

    def bound(self, gradients: Gradients) -> Release:
        release: Release = {}
        for member in self._active:
            release |= member.bound(gradients.only(member.parameters))
        return release

    def stddev(self, noise_multiplier: float) -> dict[str, float | Tensor]:
        noise: dict[str, float | Tensor] = {}
        for member in self._active:
            noise |= member.stddev(noise_multiplier * math.sqrt(len(self._active)))
        return noise

    def complete(self, sums: Release) -> Release:
        whole: Release = {}
        for member in self._active:
            whole |= member.complete({k: v for k, v in sums.items() if _parameter_of(k) in member.parameters})
        return whole

    def release(self, noisy: Release, stddev: Mapping[str, float | Tensor]) -> Release:
        released: Release = {}
        for member in self._active:
            own = {key: value for key, value in noisy.items() if _parameter_of(key) in member.parameters}
            released |= member.release(own, {key: stddev[key] for key in own})
        return released


def _parameter_of(key: str) -> str:
    return key.removeprefix("shape/").rpartition("/")[0] if key.startswith("shape/") else key


class PerLayer(Grouped):
    """One L2 ball per layer, each of radius C / sqrt(layers), so that an example's whole gradient stays within C.

    A mapping from patterns to radii sets them apart instead.
    """

    def __init__(self, max_grad_norm: float | Mapping[str, float] = 1.0) -> None:
        if isinstance(max_grad_norm, Mapping):
            super().__init__({pattern: Flat(radius) for pattern, radius in max_grad_norm.items()})
            self._radius: float | None = None
        else:
            self._radius = _positive("max_grad_norm", max_grad_norm)
            super().__init__({"": Flat(self._radius)})

    def _group_of(self, name: str) -> str:
        return super()._group_of(name) if self._radius is None else name.rpartition(".")[0]

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        if self._radius is not None:
            layers = {self._group_of(name) for name in parameters}
            if self.groups.keys() != layers:
                self.groups = {layer: Flat(self._radius / math.sqrt(len(layers))) for layer in layers}
        super().begin(parameters, model)


def _ellipsoid(max_grad_norm: float) -> Clipping:
    return Ellipsoid(max_grad_norm, source=Released())


#: Clippings by the names that `make_private(clipping=...)` takes, each made from `max_grad_norm`.
BY_NAME: dict[str, Callable[[float], Clipping]] = {
    "flat": Flat,
    "per_layer": PerLayer,
    "automatic": Automatic,
    "ellipsoid": _ellipsoid,
    "local": Local,
}


def by_name(name: str, max_grad_norm: float) -> Clipping:
    """The clipping called `name`, with its bound."""
    if name not in BY_NAME:
        raise ConfigurationError(f"clipping {name!r} is not one of {', '.join(BY_NAME)}; a clipping object will do too")
    return BY_NAME[name](max_grad_norm)
