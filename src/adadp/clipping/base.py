"""What every clipping does, and their names.

A clipping bounds each example's contribution to the sums that a step releases, and states the sensitivity of those
sums, from which the noise is scaled. One kind of clipping is one file of this package with one `register`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from adadp.accounting.events import Neighbours
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient, Stddev
from adadp.shapes.source import ModelGradients, Source


class Clipping(ABC):
    """Bounds each example's contribution to a lot's sums.

    For each lot a step calls `begin`, then `bound` for each microbatch, `complete` on their total, `stddev`, and after
    the noise `release`. A subclass must have `bound` and `radii`. One object serves one training run.

    Guarantee:
        Write c(g) for what `bound` adds for an example with gradients g, and r for `radii()`. Then, whatever g holds,

            || c(g) / r ||_2 <= 1        (the paper's Lemma 1)

        over everything that a step releases. Sums of lots that differ by one added or removed example therefore differ
        by at most 1 in units of r, and by at most 2 where one example is replaced (`sensitivity`). With noise of
        standard deviation `stddev(z)` = z * r a release is one Gaussian event of noise multiplier z. Examples whose
        gradients are not finite contribute zero; with early clamping (`adadp.clipping.early`) such an example may have
        added at most its bound in layers that the backward pass reached before the one that is not finite.

        State that decides `bound` and `radii` (bounds, shapes) must follow from released values, public values and the
        weights alone. Where it does not, `reasons` must say so: the engine's guarantee is then none.

    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.expected_lot = 1.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no proof covers this clipping; empty if one does."""
        return ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the proof assumes beyond the mechanism itself."""
        return ()

    def check(self, names: Iterable[str]) -> None:  # noqa: B027 - most clippings take any parameters
        """Raise ConfigurationError if this clipping cannot bound parameters of these names."""

    def begin(self, parameters: Mapping[str, Tensor], model: ModelGradients) -> None:
        """Prepare for a lot.

        Args:
            parameters: those whose gradients the lot releases, by name.
            model: gives gradients of synthetic or public inputs. No private data is available here.

        """
        self.parameters = dict(parameters)
        self.expected_lot = model.expected_lot

    @abstractmethod
    def bound(self, gradients: Gradients) -> BoundedSums:
        """Sum the bounded contributions of a microbatch's examples."""

    def complete(self, sums: BoundedSums) -> BoundedSums:
        """Finish the sums of a whole lot, just before the noise. Only readings of the paper without proof need it."""
        return sums

    @abstractmethod
    def radii(self, scale: float = 1.0) -> dict[str, float | Tensor]:
        """Return `scale` times r, the semi-axes of an ellipsoid that contains every example's contribution.

        There is one entry for each entry of `bound`: a number for all its coordinates, or a tensor of its shape.
        """

    def norm_bound(self) -> float | Tensor:
        """Return C of this lot, the largest norm of an example's contribution in the coordinates of the noise.

        It is public: `make_private(normalize_clipping=True)` divides the release by it.

        Raises:
            ConfigurationError: this clipping has no such number.

        """
        raise ConfigurationError(
            f"normalize_clipping divides the release by the clipping's bound, and {type(self).__name__} has no single "
            "bound: leave normalize_clipping out"
        )

    def sensitivity(self, neighbours: Neighbours = Neighbours.ADD_REMOVE) -> dict[str, float | Tensor]:
        """Return how far apart the sums of two neighbouring lots can be, in the current state.

        Args:
            neighbours: the relation between the two lots.

        Returns:
            Semi-axes s, by entry of `bound`. For flat clipping every entry is C (add or remove one) or 2C (replace
            one).

        Guarantee:
            || (bound(X) - bound(X')) / s ||_2 <= 1 for all neighbouring lots X and X'. Replacing an example is removing
            one and adding another, so its s is twice that of adding or removing.

        """
        return self.radii(2.0 if Neighbours(neighbours) is Neighbours.REPLACE_ONE else 1.0)

    def stddev(self, noise_multiplier: float) -> Stddev:
        """Return the noise's standard deviation by entry: `noise_multiplier` times the add-or-remove sensitivity.

        Under replace-one the accountant takes the factor 2 into account (`adadp.accounting.events`).
        """
        return self.radii(noise_multiplier)

    def release(self, noisy: NoisedSums, stddev: Stddev) -> ReleasedGradient:
        """Turn noised sums into one summed gradient for each parameter. Post-processing."""
        return ReleasedGradient(noisy)

    def noise_of_release(self, noise_multiplier: float) -> Stddev:
        """Return the standard deviation of the noise in each coordinate of what `release` returns, by parameter.

        It is that of the lot for which `begin` ran last, as long as no release has changed the bound or the shape.
        Clippings whose `release` changes coordinates override it.
        """
        stddev = self.stddev(noise_multiplier)
        return {name: stddev[name] for name in self.parameters}

    def noise_of_gradient(self, noise_multiplier: float) -> Stddev:
        """Return the same in the gradients' own coordinates (the paper's sigma_i), where `release` returns others."""
        return self.noise_of_release(noise_multiplier)

    def objects(self) -> list[object]:
        """Return this object and all that it holds which keep state between lots."""
        return [self]

    def steady(self, begun: bool = False) -> bool:
        """Whether the next lot is handled exactly as the last one was, so that a recorded step may be replayed.

        True if nothing will be refreshed and Python has no decision to make. `begun=True` asks after `begin` has run.
        """
        return False


def settings_of(clipping: Clipping) -> list[object]:
    """Return all numbers and strings that a user may set on a clipping and its parts; the count of lots is left out."""
    return [
        value
        for part in clipping.objects()
        for name, value in vars(part).items()
        if _is_plain(value) and not (name == "step" and isinstance(part, Source))
    ]


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, int | float | str)


def count_lot(clipping: Clipping) -> None:
    """Count a lot that was handled by replaying the recorded work of an earlier one."""
    for part in clipping.objects():
        if isinstance(part, Source):
            part.step += 1


#: Clippings by the names that `make_private(clipping=...)` takes, each made from `max_grad_norm`.
BY_NAME: dict[str, Callable[[float], Clipping]] = {}
_Maker = TypeVar("_Maker", bound=Callable[[float], Clipping])


def register(name: str) -> Callable[[_Maker], _Maker]:
    """Give a clipping a name: a decorator for its class, or for a function that makes it from `max_grad_norm`.

    The soundness tests try everything that is registered.
    """

    def registered(maker: _Maker) -> _Maker:
        if name in BY_NAME:
            raise ConfigurationError(f"a clipping is called {name!r} already")
        BY_NAME[name] = maker
        return maker

    return registered


def by_name(name: str, max_grad_norm: float) -> Clipping:
    """Make the clipping called `name`.

    Raises:
        ConfigurationError: no clipping has that name.

    """
    if name not in BY_NAME:
        raise ConfigurationError(f"clipping {name!r} is not one of {', '.join(BY_NAME)}; a clipping object will do too")
    return BY_NAME[name](max_grad_norm)


#: Clippings, shapes and sources that serve a run already: they keep its state.
_SERVING: weakref.WeakSet[object] = weakref.WeakSet()


def clipping_of(clipping: str | Clipping, max_grad_norm: float | None) -> Clipping:
    """The clipping that was asked for, by name or as an object that serves no other run."""
    if isinstance(clipping, str):
        return by_name(clipping, 1.0 if max_grad_norm is None else max_grad_norm)
    if not isinstance(clipping, Clipping):
        raise ConfigurationError(f"clipping must be a name or a Clipping, not {type(clipping).__name__}")
    if max_grad_norm is not None:
        raise ConfigurationError("max_grad_norm goes with a clipping's name: a clipping object has its own bound")
    if any(part in _SERVING for part in clipping.objects()):
        raise ConfigurationError(
            "this clipping (or its shape or source) serves another run, whose state it keeps: make a new one"
        )
    return clipping


def note_serving(clipping: Clipping) -> None:
    """Note that a run keeps its state in this clipping from now on."""
    _SERVING.update(clipping.objects())
