"""Sources of adadp.shapes: where a shape's moments come from, and that they come from nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from loop import cross_entropy, mlp, private, step, weights
from soundness.stand import WORLDS, Stand, linear_loss, losses
from torch import Tensor, nn

from adadp import Diagonal, Ellipsoid, Kronecker, Local, Paid, PrivacyEngine, Probe, Public, Raw, Released
from adadp.errors import ConfigurationError
from adadp.gradients.collection import Gradients
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.products import Products
from adadp.shapes import Shape
from adadp.shapes.shape import Statistics
from adadp.shapes.source import LotRelease
from adadp.shapes.synthetic import own_prediction


def squares(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The mean over examples of squared gradients, one example at a time."""
    total: dict[str, Tensor] = {}
    for x in inputs:
        model.zero_grad()
        losses(model(x.unsqueeze(0))).sum().backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad.square() / len(inputs)
    model.zero_grad()
    return total


@pytest.mark.parametrize("kind", ["probe", "public"])
def test_synthetic_moments_are_means_over_examples(kind: str) -> None:
    inputs = WORLDS["mlp"].inputs(6, torch.Generator().manual_seed(3), torch.float64)
    source = (
        Probe([inputs[:4], inputs[4:]], count=6, loss=linear_loss)
        if kind == "probe"
        else Public([inputs], count=6, loss=linear_loss)
    )
    shape = Diagonal()
    stand = Stand(WORLDS["mlp"], lambda world, dtype: Ellipsoid(shape=shape, source=source), lots=0)
    stand.capture.detach()
    for name, wanted in squares(stand.model, inputs).items():
        torch.testing.assert_close(shape.mean_square(name, wanted), wanted)


def test_raw_moments_are_means_over_the_expected_lot() -> None:
    shape = Diagonal(0.0, 0.0)
    stand = Stand(WORLDS["mlp"], lambda world, dtype: Ellipsoid(shape=shape, source=Raw(decay=0.0)), lots=0)
    inputs, weights = stand.examples(6)
    stand.lot(inputs, weights, 4, 2)
    stand.capture.detach()
    for name, wanted in squares(stand.model, inputs).items():
        torch.testing.assert_close(shape.mean_square(name, wanted), wanted * 6 / 4)


@pytest.mark.parametrize("source", ["probe", "public", "released", "paid", "raw"])
@pytest.mark.parametrize("local", [False, True])
def test_shapes_see_private_data_through_noise_only(source: str, local: bool) -> None:
    """Two datasets, one gradient released: if what is released is the same, so is the shape, whatever the data."""

    def make() -> dict[str, object]:
        vectors = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        return {
            "probe": lambda: Probe([vectors], count=8, every=1),
            "public": lambda: Public([vectors], count=8, every=1),
            "released": lambda: Released(decay=0.5),
            "paid": lambda: Paid(every=1),
            "raw": Raw,
        }

    states = []
    for factor in (1.0, -50.0):
        clipping = (
            Local(source=make()[source](), threshold=0.0)
            if local
            else Ellipsoid(shape=Kronecker(0.25, 0.25), source=make()[source]())
        )
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=1), clipping=clipping, lr=0.0)
        noise = torch.Generator().manual_seed(7)
        # The noise swallows the sum: what comes out is the same for all data.
        optimizer._step._randomness.normal = lambda like, noise=noise: torch.randn(like.shape, generator=noise)
        plain = clipping.bound
        clipping.bound = lambda gradients, plain=plain: {k: 0 * v for k, v in plain(gradients).items()}
        for inputs, targets in loader:
            step(model, optimizer, (factor * inputs, targets))
        clipping.begin(dict(model.named_parameters()), optimizer._step)
        shape = clipping.shape
        if isinstance(shape, Diagonal):
            states.append(torch.cat([shape.mean_square(n, p).flatten() for n, p in model.named_parameters()]))
        else:
            states.append(torch.cat([s.values for s in (*shape._rows.values(), *shape._columns.values())]))
        assert len(states[-1])
    assert torch.equal(*states) == (source != "raw")  # which is why that one has no guarantee


def test_released_moments_are_free_of_the_noise_on_average() -> None:
    shape = Diagonal(0.5, 0.0)
    stand = Stand(WORLDS["linear"], lambda world, dtype: Ellipsoid(shape=shape, source=Released(decay=0.0)), lots=0)
    total = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(800):
        stand.begin()
        sums = {name: torch.zeros_like(p) for name, p in stand.model.named_parameters()}
        noisy = {k: stand.sigma * torch.randn(v.shape, generator=stand.generator).double() for k, v in sums.items()}
        shape._squares.clear()
        plain = {}
        shape.learn_all = lambda given, plain=plain: plain.update({n: found["square"] for n, found in given.items()})
        stand.clipping.release(noisy, dict.fromkeys(noisy, stand.sigma))
        total += plain["weight"] / 800
    variance = (stand.sigma / 4) ** 2
    assert total.abs().max() < 5 * variance * math.sqrt(2 / 800)


def test_probes_leave_no_gradient_and_no_record() -> None:
    probe = Probe(lambda count, generator: torch.randn(count, 3, generator=generator), count=8, every=2)
    _, model, optimizer, loader = private(clipping=Ellipsoid(source=probe), noise_multiplier=1e-9, lr=0.0)
    assert probe.step == -1
    inputs, targets = next(iter(loader))
    cross_entropy(model(inputs), targets).backward()
    assert all(p.grad is None for p in model.parameters())  # nothing of the data either
    optimizer.step()
    assert probe.step == 0
    assert not optimizer._step.capture.recorded


@pytest.mark.parametrize(
    "inputs", [lambda: {"input": torch.randn(5, 3)}, lambda: (torch.randn(5, 3),), lambda: torch.randn(5, 3)]
)
def test_probes_of_any_structure(inputs: object) -> None:
    probe = Probe(lambda count, generator: inputs(), count=5, every=1)
    _, model, optimizer, loader = private(mlp(), clipping=Ellipsoid(source=probe))
    for batch in loader:
        step(model, optimizer, batch)
    assert probe.step == 3


def test_own_prediction() -> None:
    generator = torch.Generator().manual_seed(0)
    assert own_prediction(torch.randn(4, 3), generator).ndim == 0
    assert own_prediction(torch.randn(4, 1), generator) > 0
    assert own_prediction(torch.randn(4, 3, 5, 5), generator) > 0
    assert own_prediction(torch.full((2, 3), math.nan), generator).isnan()
    with pytest.raises(ConfigurationError, match="loss="):
        own_prediction({"logits": torch.zeros(2, 3)}, generator)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Paid(share=0.0),
        lambda: Paid(share=1.0),
        lambda: Paid(every=0),
        lambda: Paid(every=2.5),
        lambda: Released(decay=1.0),
        lambda: Raw(decay=-0.1),
        lambda: Probe([], count=0),
        lambda: Probe([], batch=0),
        lambda: Probe([], every=0),
    ],
)
def test_settings_that_are_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize(("inputs", "words"), [([], "empty"), ([3], "no tensor")])
def test_probes_that_hold_nothing(inputs: list[object], words: str) -> None:
    _, model, optimizer, loader = private(clipping=Ellipsoid(source=Probe(inputs)))
    before = weights(model)
    with pytest.raises(ConfigurationError, match=words):
        step(model, optimizer, next(iter(loader)))
    assert torch.equal(before, weights(model))


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("make", [Diagonal, lambda: Kronecker(rank=0), lambda: Kronecker(rank=None)])
def test_what_was_learnt_stays_as_it_was(make: Callable[[], Shape], decay: float) -> None:
    """Moments are added in place and handed on uncopied: not to whom a later microbatch would change them for."""
    shape, source = make(), Raw(decay=decay)
    taken: list[tuple[Statistics, Statistics]] = []
    learn = shape.learn

    def record(name: str, statistics: Statistics) -> None:
        taken.append((statistics, {key: value.clone() for key, value in statistics.items()}))
        learn(name, statistics)

    shape.learn = record  # type: ignore[method-assign,assignment]
    model = SimpleNamespace(expected_lot=2.0)
    wanted: Statistics = {}
    for _ in range(3):
        source.before_lot(shape, {"weight": torch.zeros(5, 6)}, model)
        lot: Statistics = {}
        for form in (Products(torch.randn(2, 1, 6), torch.randn(2, 1, 5)), Dense(torch.randn(2, 5, 6))):
            gradients = Gradients({"weight": form}, 2, keep=torch.ones(2, dtype=torch.bool))
            source.see(shape, gradients)
            lot = {k: lot.get(k, 0) + v / 2 for k, v in shape.statistics(form, gradients.keep).items()}
        source.after_lot(shape, LotRelease({}, {}, {}, 2.0))
        wanted = {key: decay * wanted.get(key, 0) + (1 - decay) * value for key, value in lot.items()}
        fresh = make()
        fresh.learn("weight", wanted)
        one = torch.randn(5, 6)
        for exponent in (0.5, -0.25):  # made at the lot before as well: none is kept too long
            torch.testing.assert_close(shape.apply("weight", one, exponent), fresh.apply("weight", one, exponent))
    for statistics, then in taken:
        assert all(torch.equal(statistics[key], then[key]) for key in then)
