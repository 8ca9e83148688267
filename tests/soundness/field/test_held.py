"""What the attacks could not break, and what is refused already. It stays so."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from adadp import (
    Automatic,
    Clipping,
    Diagonal,
    Ellipsoid,
    Flat,
    Grouped,
    Kronecker,
    Paid,
    PerLayer,
    PrivacyEngine,
    Probe,
    Released,
)
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian
from adadp.errors import ConfigurationError, NoGuaranteeError, PrivacyError, TrainingLoopError, UnsupportedModuleError
from adadp.preprocessing import DPPCA, DPStandardScaler, TablePreprocessor, moments
from adadp.preprocessing.pca import second_moments
from soundness.field.stand import DELTA, Bounded, Refused, World, compare, end, run

# ---- accounting ---------------------------------------------------------------------------------------------------


def gaussian_delta(mu: float, epsilon: float) -> float:
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(min(700.0, epsilon + norm.logcdf(-mu / 2 - epsilon / mu))))


def solved(excess: Callable[[float], float], most: float = 600.0) -> float:
    return float(brentq(excess, 0, most)) if excess(0.0) > 0 else 0.0


@pytest.mark.parametrize(("sigma", "count"), [(0.5, 1), (1, 1), (1, 100), (8, 1520), (30, 3), (0.9, 10)])
def test_gaussian_releases_cost_at_least_what_they_cost(sigma: float, count: int) -> None:
    exact = solved(lambda epsilon: gaussian_delta(math.sqrt(count) / sigma, epsilon) - DELTA)
    for name in ("pld", "rdp"):
        assert get_accountant(name).epsilon([(Gaussian(sigma), count)], DELTA).epsilon >= exact - 1e-9


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 0.5), (0.1, 1.0), (0.5, 0.7), (0.001, 0.3), (0.9, 2.0)])
def test_one_poisson_step_costs_at_least_what_it_costs(rate: float, sigma: float) -> None:
    """By integration, in both directions."""
    grid = np.linspace(-30 * sigma, 30 * sigma + 1, 400_001)
    without = norm.pdf(grid, 0, sigma)
    present = (1 - rate) * without + rate * norm.pdf(grid, 1, sigma)

    def delta(epsilon: float) -> float:
        pairs = ((present, without), (without, present))
        width = grid[1] - grid[0]
        return max(float(np.maximum(one - math.exp(epsilon) * other, 0).sum()) * width for one, other in pairs)

    exact = solved(lambda epsilon: delta(epsilon) - DELTA, 60)
    assert get_accountant("pld").epsilon([(PoissonGaussian(sigma, rate), 1)], DELTA).epsilon >= exact - 1e-4


@pytest.mark.parametrize(("rate", "sigma", "count"), [(0.1, 2.0, 300), (0.3, 5.0, 50)])
def test_many_poisson_steps_cost_at_least_an_optimistic_estimate(rate: float, sigma: float, count: int) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    optimistic = pld.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        value_discretization_interval=1e-3,
        pessimistic_estimate=False,
        use_connect_dots=False,
    ).self_compose(count)
    found = get_accountant("pld").epsilon([(PoissonGaussian(sigma, rate), count)], DELTA).epsilon
    assert found >= optimistic.get_epsilon_for_delta(DELTA) - 1e-9


def test_lots_of_fixed_size_cost_at_least_what_they_cost() -> None:
    rdp = get_accountant("rdp")
    whole = rdp.epsilon([(FixedSizeGaussian(2.0, 10, 10), 5)], DELTA, Neighbours.REPLACE_ONE).epsilon
    assert whole >= solved(lambda epsilon: gaussian_delta(math.sqrt(5) * 2 / 2.0, epsilon) - DELTA)
    half = rdp.epsilon([(FixedSizeGaussian(1.0, 2, 1), 1)], DELTA, Neighbours.REPLACE_ONE).epsilon
    grid = np.linspace(-40, 40, 400_001)
    for other in (-1, 0, 1):  # the other example's gradient
        one = 0.5 * norm.pdf(grid, 1) + 0.5 * norm.pdf(grid, other)
        two = 0.5 * norm.pdf(grid, -1) + 0.5 * norm.pdf(grid, other)

        def excess(epsilon: float, one: Any = one, two: Any = two) -> float:
            pairs = ((one, two), (two, one))
            return max(np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in pairs) * 2e-4 - DELTA

        assert half >= solved(excess, 100)


# ---- everything that a step releases ------------------------------------------------------------------------------


def synthetic(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 6, generator=generator)


CLIPPINGS: dict[str, Callable[[], Clipping]] = {
    "flat": lambda: Flat(0.5),
    "per layer": lambda: PerLayer(0.5),
    "automatic": lambda: Automatic(0.5),
    "diagonal, paid": lambda: Ellipsoid(0.5, shape=Diagonal(), source=Paid(every=1, share=0.3)),
    "Kronecker, paid": lambda: Ellipsoid(0.5, shape=Kronecker(), source=Paid(every=1, share=0.3)),
    "Kronecker of rank 0, paid": lambda: Ellipsoid(0.5, shape=Kronecker(rank=0), source=Paid(every=2, share=0.9)),
    "Kronecker, released": lambda: Ellipsoid(0.5, shape=Kronecker(), source=Released()),
    "diagonal, released": lambda: Ellipsoid(0.5, shape=Diagonal(1.0, 0.3), source=Released()),
    "Kronecker, probe": lambda: Ellipsoid(0.5, shape=Kronecker(0.5, 0.2), source=Probe(synthetic, count=32, every=2)),
    "grouped": lambda: Grouped({"0.*": Ellipsoid(0.5, source=Paid(every=1, share=0.2)), "*": Flat(2.0)}),
}

#: one example's inputs, label and weight
EXAMPLES: dict[str, tuple[Tensor, int, float]] = {
    "ordinary": (torch.linspace(-1, 1, 6), 1, 1.0),
    "huge": (torch.full((6,), 1e6), 2, 1.0),
    "of huge weight": (torch.linspace(-1, 1, 6), 0, 1e8),
    "tiny": (torch.linspace(-1, 1, 6), 1, 1e-20),
    "not a number": (torch.full((6,), float("nan")), 1, 1.0),
    "infinite": (torch.tensor([float("inf"), 0, 0, 0, 0, 0]), 1, 1.0),
    "near overflow": (torch.full((6,), 1e30), 1, 1.0),
}


def last_sums(make: Callable[[], Clipping], example: tuple[Tensor, int, float]) -> tuple[dict[str, Tensor], Any]:
    """What the third lot releases before its noise, and that noise. Its last example is this one."""
    clipping = make()
    sums: list[dict[str, Tensor]] = []
    complete = clipping.complete

    def keep(given: Any) -> Any:
        found = complete(given)
        sums.append({name: value.detach().double().clone() for name, value in found.items()})
        deviations.append({name: torch.as_tensor(value).double() for name, value in clipping.stddev(1.0).items()})
        return found

    deviations: list[dict[str, Tensor]] = []
    clipping.complete = keep  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)

    def three_lots(world: World) -> None:
        for lot, (features, wanted) in enumerate(itertools.chain(*itertools.repeat(world.loader, 3))):
            weights = torch.ones(12)
            weights[-1] = example[2] if lot == 2 else 0.0
            if lot == 2:
                features, wanted = features.clone(), wanted.clone()
                features[-1], wanted[-1] = example[0], example[1]
            world.optimizer.zero_grad()
            (functional.cross_entropy(world.model(features), wanted, reduction="none") * weights).mean().backward()
            world.optimizer.step()

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    world = run(TensorDataset(inputs, labels), net, loop=three_lots, clipping=clipping, lr=0.01, seed=11)
    assert world.error is None, world.error
    return sums[-1], deviations[-1]


@pytest.mark.parametrize("name", CLIPPINGS)
def test_all_that_a_step_releases_is_bounded(name: str) -> None:
    """Gradients and paid statistics together, in units of their noise."""
    nothing, _ = last_sums(CLIPPINGS[name], (torch.zeros(6), 0, 0.0))
    for kind, example in EXAMPLES.items():
        sums, deviations = last_sums(CLIPPINGS[name], example)
        parts = [((sums[key] - nothing[key]) / deviations[key]).square().sum() for key in sums]
        effect = float(torch.stack(parts).sum().sqrt())
        assert effect <= 1.0 + 1e-5, (kind, effect)


# ---- every kind of layer ------------------------------------------------------------------------------------------


class Summed(nn.Module):
    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).flatten(1).sum(1)


class Attention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        padding = torch.zeros(inputs.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        seen = self.attention(inputs, inputs, inputs, key_padding_mask=padding, attn_mask=later, need_weights=False)
        return seen[0].flatten(1).sum(1)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.recurrent, self.packed = kind(6, 5, batch_first=True, **settings), packed

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.packed:
            return self.recurrent(inputs)[0].flatten(1).sum(1)
        lengths = (inputs[:, :, 0] != 0).sum(1).clamp(min=1)  # each its own
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        outputs = nn.utils.rnn.pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=inputs.shape[1]
        )
        return outputs[0].flatten(1).sum(1)


class Words(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6, **settings), nn.Linear(6, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words)).tanh().flatten(1).sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words)).tanh().flatten(1).sum(1)


class Bag(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(11, 6, **settings)

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words).square().sum(1)


#: the model, the shape of an example, whether it is of words
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "linear, 64 tokens": (lambda: Summed(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), (64, 8), False),
    "linear, one token": (lambda: Summed(nn.Linear(8, 6)), (1, 8), False),
    "linear, no token": (lambda: Summed(nn.Linear(8, 6)), (0, 8), False),
    "linear, wide": (lambda: Summed(nn.Linear(64, 48)), (3, 64), False),
    "linear, many tokens": (lambda: Summed(nn.Linear(4, 4)), (1000, 4), False),
    "convolution": (lambda: Summed(nn.Conv2d(3, 4, 3)), (3, 9, 9), False),
    "convolution, strides": (lambda: Summed(nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=1)), (4, 11, 11), False),
    "convolution, groups": (lambda: Summed(nn.Conv2d(4, 8, (3, 2), groups=2, stride=(1, 2))), (4, 8, 8), False),
    "convolution, depthwise": (
        lambda: Summed(nn.Conv2d(4, 4, 3, groups=4, padding="same", padding_mode="circular")),
        (4, 8, 8),
        False,
    ),
    "convolution, reflecting": (
        lambda: Summed(nn.Conv2d(3, 4, 4, padding="same", padding_mode="reflect")),
        (3, 8, 8),
        False,
    ),
    "convolution, replicating": (
        lambda: Summed(nn.Conv2d(3, 4, 3, padding=2, padding_mode="replicate", stride=3)),
        (3, 8, 8),
        False,
    ),
    "convolution in 1d": (lambda: Summed(nn.Conv1d(3, 4, 5, padding=4, dilation=2)), (3, 30), False),
    "convolution in 3d": (lambda: Summed(nn.Conv3d(2, 3, 2, stride=2)), (2, 5, 5, 5), False),
    "convolution of one pixel": (lambda: Summed(nn.Conv2d(8, 8, 1)), (8, 5, 5), False),
    "layer norm": (lambda: Summed(nn.LayerNorm(8), nn.Linear(8, 4), nn.Tanh()), (5, 8), False),
    "RMS norm": (lambda: Summed(nn.RMSNorm(8), nn.Linear(8, 4), nn.Tanh()), (5, 8), False),
    "group norm": (lambda: Summed(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 2), nn.Tanh()), (4, 6, 6), False),
    "instance norm": (
        lambda: Summed(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 2), nn.Tanh()),
        (4, 6, 6),
        False,
    ),
    "attention, masked": (Attention, (7, 8), False),
    "attention without bias": (lambda: Attention(bias=False), (7, 8), False),
    "LSTM": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (6, 6), False),
    "LSTM, packed": (lambda: Recurrent(nn.LSTM, packed=True, bidirectional=True), (6, 6), False),
    "GRU, packed": (lambda: Recurrent(nn.GRU, packed=True), (6, 6), False),
    "RNN": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), (6, 6), False),
    "LSTM, projected": (lambda: Recurrent(nn.LSTM, proj_size=3), (6, 6), False),
    "embedding": (Words, (20,), True),
    "embedding with padding": (lambda: Words(padding_idx=0), (20,), True),
    "tied": (Tied, (9,), True),
    "tied, long": (Tied, (200,), True),
    "bag of means": (lambda: Bag(mode="mean", padding_idx=0), (9,), True),
    "bag of sums": (lambda: Bag(mode="sum"), (9,), True),
}


def harmful(shape: tuple[int, ...], words: bool, how: str, count: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ordinary examples, but for the last."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(count, generator=generator)
    if words:
        inputs = torch.randint(0, 11, (count, *shape), generator=generator)
        if how == "cancelling":
            inputs[-1] = 3
        return inputs, weights
    inputs = torch.randn(count, *shape, generator=generator)
    last = inputs[-1]
    if how == "large":
        last *= 1e6
    elif how == "mixed":
        last.flatten()[0::2] *= 1e8
    elif how == "cancelling" and len(shape) == 2 and shape[0] % 2 == 0:
        last[1::2] = -last[0::2]
    return inputs, weights


def weighted_mean(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) * batch[1]).mean()


def of_a_layer(kind: str, how: str, bound: float, seed: int = 0) -> Any:
    make, shape, words = KINDS[kind]
    inputs, weights = harmful(shape, words, how, seed=seed)
    worlds = [TensorDataset(inputs[:count], weights[:count]) for count in (5, 4)]
    return end(*worlds, make, weighted_mean, bounds=(bound,))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_bounded(kind: str) -> None:
    for how, bound in (("large", 1.0), ("mixed", 1e-3), ("cancelling", 1e-3)):
        ended = of_a_layer(kind, how, bound)
        assert isinstance(ended, Bounded), (how, ended)
        assert ended.effect <= 1.0 + 1e-3, (how, ended)


class ByPlace(nn.Module):
    """Packs rows whose lengths follow from their place in the batch, and not from the examples."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent = kind(6, 5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = torch.tensor([inputs.shape[1] - place % 3 for place in range(len(inputs))])
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0].flatten(1).sum(1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_lengths_by_place_in_the_batch_are_refused(kind: Any) -> None:
    """Where the last row is left out nothing moves; where the first is, everybody's length does."""
    inputs, weights = harmful((6, 6), False, "large")
    worlds = [TensorDataset(inputs[first:], weights[first:]) for first in (0, 1)]
    ended = end(*worlds, lambda: ByPlace(kind), weighted_mean, bounds=(1e-3,))
    assert isinstance(ended, Refused), ended


def test_attention_with_mixed_tokens_is_bounded() -> None:
    """Where float32 itself is far from float64, what is clipped is what was computed."""
    for seed in range(6):
        ended = of_a_layer("attention without bias", "mixed", 1e-3, seed)
        assert isinstance(ended, Bounded), (seed, ended)


# ---- preprocessing ------------------------------------------------------------------------------------------------

EXTREME = [0.0, 1.0, -1.0, 1e-320, 1e30, -1e30, 1e308, -1e308, np.inf, -np.inf, np.nan, 2.0**-126, 3.4e38, 5e-324]


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_one_row_moves_statistics_by_at_most_their_sensitivity(columns: int) -> None:
    rng = np.random.default_rng(columns)
    base = rng.normal(size=(20, columns)) * 10.0 ** rng.integers(-5, 6, size=(20, columns))
    twice = np.where(np.equal(*np.triu_indices(columns)), 1.0, 2**0.5)
    for trial in range(60):
        extreme = rng.choice(EXTREME, size=(1, columns))
        row = extreme if trial % 2 else rng.normal(size=(1, columns)) * 10.0 ** rng.integers(-200, 200)
        whole = np.vstack([base, row])
        centre, scale = rng.normal(size=columns), np.exp(rng.normal(size=columns) * 20)
        moved = second_moments(whole) - second_moments(base)
        assert np.linalg.norm(moved * twice) <= 1 + 1e-6
        for statistic, sensitivity in (
            (lambda rows: moments.signed_histogram(rows, centre), moments.histogram_sensitivity(columns)),  # noqa: B023
            (lambda rows: moments.bounded_sums(rows, centre, scale), moments.mean_sensitivity(columns)),  # noqa: B023
            (lambda rows: moments.bounded_moments(rows, centre, scale), moments.moments_sensitivity(columns)),  # noqa: B023
        ):
            assert np.linalg.norm(statistic(whole) - statistic(base)) <= sensitivity * (1 + 1e-6), row


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", [[1e30] * 3, [np.nan] * 3, [np.inf, 0, 0], [1e308, -1e308, 1e308]], ids=str)
@pytest.mark.parametrize("estimator", [DPStandardScaler(2.0, random_state=1), DPPCA(2, 2.0, random_state=1)], ids=type)
def test_extreme_rows_leave_no_trace(estimator: Any, row: list[float]) -> None:
    """No error and no warning that the others would not have had, and finite numbers for all."""
    table = np.vstack([np.random.default_rng(0).normal(size=(500, 3)), [row]])
    fitted = copy.deepcopy(estimator).fit(table)
    assert np.isfinite(fitted.transform(table[:2])).all()
    assert fitted.events_


def test_words_of_one_person_are_in_nothing_that_was_fitted() -> None:
    columns = {"a": np.arange(50.0), "c": np.array(["x"] * 49 + ["ONLY ALICE"], dtype=object)}
    fitted = TablePreprocessor(2.0, random_state=1).fit(columns)
    assert "ALICE" not in repr([getattr(value, "__dict__", value) for value in vars(fitted).values()])
    assert fitted.transform(columns).shape[0] == 50


# ---- what is refused, accepted, or gives no number ----------------------------------------------------------------

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(2, (60,), generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, TARGETS)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def line() -> nn.Module:
    return nn.Linear(4, 2)


def trained(data: Dataset[Any] = DATA, loop: Any = None, **settings: Any) -> World:
    settings.setdefault("lot", 10)
    return run(data, line, cross_entropy, *([] if loop is None else [loop]), **settings)


def step(world: World, batch: Any) -> None:
    world.optimizer.zero_grad()
    world.loss(batch).backward()
    world.optimizer.step()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_loaders_from_which_no_lots_can_be_drawn_are_refused() -> None:
    weights = WeightedRandomSampler([1.0] * 60, 60)
    for world in (trained(lot=100), trained(loader={"sampler": weights}), trained(Stream(), lot=1)):
        assert isinstance(world.error, ConfigurationError), world.error


class Growing(Dataset[Any]):
    rows = 60

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index % 60], TARGETS[index % 60]


def test_a_dataset_that_grows_is_drawn_from_as_it_was() -> None:
    data = Growing()

    def loop(world: World) -> None:
        for _ in range(2):
            for batch in world.loader:
                step(world, batch)
            data.rows = 600

    world = trained(data, loop)
    assert world.error is None, world.error
    guarantee = world.engine.guarantee(DELTA)
    assert guarantee.epsilon is not None
    assert "12 steps" in guarantee.sampling
    assert world.loader.sampling.examples == 60


def test_the_noise_cannot_be_turned_down() -> None:
    def loop(world: World) -> None:
        world.optimizer.noise_multiplier = 0.1

    assert isinstance(trained(loop=loop).error, AttributeError | PrivacyError)


def test_a_bound_that_changes_within_a_lot_is_refused() -> None:
    clipping = Flat(1.0)

    def loop(world: World) -> None:
        for batch in world.loader:
            step(world, batch)
            clipping.max_grad_norm *= 10

    world = trained(loop=loop, clipping=clipping, max_physical_batch_size=4)
    assert isinstance(world.error, TrainingLoopError), world.error


def test_a_bound_may_change_between_lots() -> None:
    clipping = Flat(1.0)

    def loop(world: World) -> None:
        for batch in world.loader:
            step(world, batch)
            clipping.max_grad_norm *= 0.5

    world = trained(loop=loop, clipping=clipping)
    assert world.error is None, world.error
    assert world.engine.get_epsilon(DELTA) > 0


def test_epsilon_may_be_asked_for_on_the_way() -> None:
    found: list[float] = []

    def loop(world: World) -> None:
        for batch in world.loader:
            step(world, batch)
            found.append(world.engine.get_epsilon(DELTA))

    assert trained(loop=loop).error is None
    assert found == sorted(found)
    assert len(set(found)) == 6


@pytest.mark.parametrize("settings", [{"sampling": "shuffle"}, {"clipping": "local"}, {"expose_raw": True}], ids=str)
def test_settings_without_a_proof_give_no_number(settings: dict[str, Any]) -> None:
    world = trained(**settings)
    assert world.error is None, world.error
    guarantee = world.engine.guarantee(DELTA)
    assert guarantee.epsilon is None
    assert guarantee.reasons
    with pytest.raises(NoGuaranteeError):
        world.engine.get_epsilon(DELTA)


def test_a_gradient_scaler_is_refused() -> None:
    def loop(world: World) -> None:
        scaler = torch.amp.GradScaler("cpu")
        for batch in world.loader:
            world.optimizer.zero_grad()
            scaler.scale(world.loss(batch)).backward()
            scaler.step(world.optimizer)
            scaler.update()

    assert isinstance(trained(loop=loop).error, TrainingLoopError)


def test_batch_norm_is_refused() -> None:
    world = run(DATA, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), cross_entropy)
    assert isinstance(world.error, UnsupportedModuleError), world.error


def test_a_module_that_was_detached_is_not_trained_on() -> None:
    ended = trained(before=lambda world: world.engine.detach(world.model))
    assert isinstance(ended.error, TrainingLoopError), ended.error


def test_a_module_is_made_private_once() -> None:
    world = trained()
    with pytest.raises(ConfigurationError):
        PrivacyEngine().make_private(
            module=world.model,
            optimizer=torch.optim.SGD(world.model.parameters(), 0.1),
            data_loader=DataLoader(DATA, batch_size=10),
            noise_multiplier=1.0,
        )


def test_a_copy_of_the_model_is_not_what_is_trained() -> None:
    """Its gradients are nobody's: the private optimizer moves the model by noise, or says so."""

    def loop(world: World) -> None:
        other = copy.deepcopy(world.model)
        for inputs, targets in world.loader:
            world.optimizer.zero_grad()
            functional.cross_entropy(other(inputs), targets).backward()
            world.optimizer.step()

    smaller = TensorDataset(INPUTS[:-1], TARGETS[:-1])
    ended = compare(*(run(data, line, cross_entropy, loop) for data in (DATA, smaller)))
    assert isinstance(ended, Bounded | Refused), ended


def test_lots_of_fixed_size_that_do_not_divide_the_data() -> None:
    world = trained(lot=7, sampling="fixed")
    assert world.error is None, world.error
    guarantee = world.engine.guarantee(DELTA)
    assert guarantee.epsilon is not None
    assert "8 steps on lots of 7 of 60" in guarantee.sampling
