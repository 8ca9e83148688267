"""`make_private(normalize_clipping=True)`: the release is divided by the bound after the noise, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loop import epoch, private, released, step, weights

from adadp import (
    Adaptive,
    Automatic,
    Clipping,
    Ellipsoid,
    Flat,
    Grouped,
    Kronecker,
    Local,
    PerLayer,
    PrivacyEngine,
    Probe,
    Released,
)
from adadp.errors import ConfigurationError
from adadp.shapes.probes import Vectors

CLIPPINGS: dict[str, Callable[[float], Clipping]] = {
    "flat": Flat,
    "automatic": Automatic,
    "per layer": PerLayer,
    "adaptive": Adaptive,
    "per layer, a bound for each": lambda bound: PerLayer({"0.*": bound, "2.*": bound / 2}),
    "ellipsoid": lambda bound: Ellipsoid(bound, shape=Kronecker(0.25, 0.25), source=Probe(Vectors(3), count=16)),
    "released shape": lambda bound: Ellipsoid(bound, source=Released(every=1)),
    "grouped": lambda bound: Grouped({"0.*": Flat(0.6 * bound), "*": Automatic(0.8 * bound)}),
}


def trained(make: Callable[[float], Clipping], bound: float, lr: float, normalize: bool) -> tuple[torch.Tensor, ...]:
    """The first release, the weights after an epoch, and the noise multiplier's epsilon."""
    engine, model, optimizer, loader = private(
        engine=PrivacyEngine(seed=3), lr=lr, clipping=make(bound), normalize_clipping=normalize
    )
    step(model, optimizer, next(iter(loader)))
    first = released(model)
    epoch(model, optimizer, loader)
    return first, weights(model), torch.tensor(engine.get_epsilon(1e-5))


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_normalised_release_is_the_release_over_the_bound(name: str) -> None:
    make, bound = CLIPPINGS[name], 0.25
    unit = float(make(bound).norm_bound())
    plain, ordinary, cost = trained(make, bound, 0.1, normalize=False)
    normal, same, same_cost = trained(make, bound, 0.1 * unit, normalize=True)
    torch.testing.assert_close(normal * unit, plain)
    if name != "adaptive":  # its bound moves
        torch.testing.assert_close(same, ordinary, rtol=1e-4, atol=1e-6)  # a rate of 0.1 C where it was 0.1
    assert same_cost == cost


def test_what_is_bounded_noised_and_charged_is_the_same() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen: list[tuple[dict[str, torch.Tensor], dict[str, float], object]] = []

        def noising(self, release: object) -> None:
            self.seen.append((dict(release.sums), dict(release.stddev), release.event))

        def noised(self, *_: object) -> None: ...

        def stepped(self, *_: object) -> None: ...

    found = []
    for normalize in (False, True):
        _, model, optimizer, loader = private(
            engine=PrivacyEngine(seed=3), clipping=Flat(0.25), normalize_clipping=normalize
        )
        watching = Watching()
        optimizer.observe(watching)
        step(model, optimizer, next(iter(loader)))
        found.append(watching.seen[0])
    (sums, stddev, event), (same_sums, same_stddev, same_event) = found
    assert (stddev, event) == (same_stddev, same_event)
    assert all(torch.equal(sums[name], same_sums[name]) for name in sums)


def test_a_bound_that_is_changed_between_lots_is_the_one_that_divides() -> None:
    norms = []
    for bound in (0.01, 0.001):
        clipping = Flat(1.0)
        _, model, optimizer, loader = private(
            engine=PrivacyEngine(seed=3), clipping=clipping, normalize_clipping=True, noise_multiplier=1e-3
        )
        clipping.max_grad_norm = bound
        step(model, optimizer, next(iter(loader)))
        norms.append(released(model))
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-5)  # every example is clipped under both


@pytest.mark.parametrize("clipping", ["local", Local(source=Released())])
def test_a_clipping_without_one_bound_is_refused(clipping: str | Clipping) -> None:
    with pytest.raises(ConfigurationError, match="Local has no single bound: leave normalize_clipping out"):
        private(clipping=clipping, normalize_clipping=True)
