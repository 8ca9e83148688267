"""A clipping of its own for each group of parameters, or for each layer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from adadp.clipping.base import Clipping, register
from adadp.clipping.flat import Flat, positive
from adadp.clipping.shaped import parameter_of
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.source import ModelGradients


class Grouped(Clipping):
    """Different clippings for different parameters: {"embed.*": Flat(0.1), "*": Ellipsoid(...)}.

    Args:
        groups: a clipping for each pattern of parameter names (as in shells). The first pattern that matches counts.

    Guarantee:
        Each of the K groups that have parameters gets sqrt(K) times its own radii. One example then has length at most
        1 / sqrt(K) in each group, and 1 in all of them together: the lot stays one event of the same noise multiplier.

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

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reason for member in self.groups.values() for reason in member.reasons))

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for member in self.groups.values() for text in member.assumptions))

    def objects(self) -> list[object]:
        return [self, *(part for member in self.groups.values() for part in member.objects())]

    def steady(self, begun: bool = False) -> bool:
        return all(member.steady(begun) for member in self.groups.values())

    def check(self, names: Iterable[str]) -> None:
        for group, own in self._members(names).items():
            if group in self.groups:
                self.groups[group].check(own)

    def _members(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The names in each group that has any."""
        members: dict[str, list[str]] = {}
        for name in names:
            members.setdefault(self._group_of(name), []).append(name)
        return members

    def _group_of(self, name: str) -> str:
        for pattern in self.groups:
            if fnmatch.fnmatchcase(name, pattern):
                return pattern
        raise ConfigurationError(f"no group of the clipping matches parameter {name}: add '*' as the last pattern")

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        super().begin(parameters, model)
        members = self._members(parameters)
        self._active = [self.groups[group] for group in members]
        for member, names in zip(self._active, members.values(), strict=True):
            member.begin({name: parameters[name] for name in names}, model)

    def bound(self, gradients: Gradients) -> BoundedSums:
        sums = BoundedSums()
        for member in self._active:
            sums.update(member.bound(gradients.only(member.parameters)))
        return sums

    def complete(self, sums: BoundedSums) -> BoundedSums:
        whole = BoundedSums()
        for member in self._active:
            whole.update(member.complete(BoundedSums(_own(member, sums))))
        return whole

    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        own = scale * math.sqrt(len(self._active))
        return {key: value for member in self._active for key, value in member.radii(own).items()}

    def norm_bound(self) -> float | Tensor:
        squares = [member.norm_bound() ** 2 for member in self._active or self.groups.values()]
        total: float | Tensor = sum(squares) ** 0.5
        return total

    def stddev(self, noise_multiplier: float) -> Stddev:
        own = noise_multiplier * math.sqrt(
            len(self._active)
        )  # asked of members, which may add more noise than radii say
        return {key: value for member in self._active for key, value in member.stddev(own).items()}

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        released = ReleasedGradient()
        for member in self._active:
            own = NoisedSums(_own(member, noisy))
            released.update(member.release(own, {key: stddev[key] for key in own}))
        return released

    def noise_of_release(self, noise_multiplier: float) -> Stddev:
        own = noise_multiplier * math.sqrt(len(self._active))
        return {key: value for member in self._active for key, value in member.noise_of_release(own).items()}

    def noise_of_gradient(self, noise_multiplier: float) -> Stddev:
        own = noise_multiplier * math.sqrt(len(self._active))
        return {key: value for member in self._active for key, value in member.noise_of_gradient(own).items()}


@register("per_layer")
class PerLayer(Grouped):
    """One L2 ball for each layer, of radius C / sqrt(layers), so that an example's whole gradient stays within C.

    Args:
        max_grad_norm: C; or a radius for each pattern of parameter names.

    Guarantee:
        That of `Grouped`.

    """

    def __init__(self, max_grad_norm: float | Mapping[str, float] = 1.0) -> None:
        if isinstance(max_grad_norm, Mapping):
            super().__init__({pattern: Flat(radius) for pattern, radius in max_grad_norm.items()})
            self._radius: float | None = None
        else:
            self._radius = positive("max_grad_norm", max_grad_norm)
            super().__init__({"": Flat(self._radius)})

    @property
    def max_grad_norm(self) -> float | None:
        """C; None where each pattern has a radius of its own."""
        return self._radius

    def _group_of(self, name: str) -> str:
        return super()._group_of(name) if self._radius is None else name.rpartition(".")[0]

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        if self._radius is not None:
            layers = {self._group_of(name) for name in parameters}
            if self.groups.keys() != layers:
                self.groups = {layer: Flat(self._radius / math.sqrt(len(layers))) for layer in layers}
        super().begin(parameters, model)


def _own(member: Clipping, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in sums.items() if parameter_of(key) in member.parameters}
