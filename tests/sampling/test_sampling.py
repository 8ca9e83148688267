"""adadp.sampling.schemes: which examples a lot holds, and how the loop sees them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from adadp.accounting.events import FixedSizeGaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.randomness import Randomness, Stream
from adadp.sampling.loader import PrivateLoader, check_loader
from adadp.sampling.lot import State
from adadp.sampling.schemes import FixedSize, Poisson, Shuffle, _bernoulli_positions, scheme


class Numbers(Dataset[int]):
    """Example i is the number i, so that a batch says which examples it holds."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loader(count: int = 20, lot: int = 4, physical: int | None = None, **options: Any) -> PrivateLoader:
    plain = DataLoader(options.pop("dataset", None) or Numbers(count), batch_size=lot, **options)
    return PrivateLoader(plain, Poisson(*check_loader(plain)), Randomness(1), physical)


def memberships(count: int, rate: float, lots: int, seed: int = 0) -> np.ndarray:
    source = Randomness(seed)
    found = np.zeros((lots, count), dtype=bool)
    for number, row in enumerate(found):
        row[_bernoulli_positions(count, rate, source.stream(f"lot {number}")).numpy()] = True
    return found


# ---- Poisson lots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "rate"), [(40, 0.2), (40, 0.9), (7, 0.5), (300, 0.01), (1, 0.3), (2, 0.999)])
def test_poisson_inclusion_sizes_and_independence(count: int, rate: float) -> None:
    lots = 3000
    drawn = memberships(count, rate, lots)
    deviations = (drawn.sum(0) - lots * rate) / math.sqrt(lots * rate * (1 - rate))
    assert stats.chi2.sf((deviations**2).sum(), count) > 1e-5  # rates of all indices together
    assert np.abs(deviations).max() < stats.norm.isf(1e-6 / count)  # and of each, the first and the last among them
    sizes = np.bincount(drawn.sum(1), minlength=count + 1)
    expected = lots * stats.binom.pmf(np.arange(count + 1), count, rate)
    common = expected >= 5
    observed, wanted = (np.append(x[common], x[~common].sum()) for x in (sizes, expected))
    assert ((observed - wanted) ** 2 / np.maximum(wanted, 1)).sum() < stats.chi2.isf(1e-6, len(wanted))
    centred = drawn - rate
    if count > 1:
        pairs = (centred.T @ centred) / (rate * (1 - rate) * math.sqrt(lots))
        off = pairs[~np.eye(count, dtype=bool)]
        if rate * lots > 100:
            assert np.abs(off).max() < stats.norm.isf(1e-6 / off.size)
    across = (centred[1:] * centred[:-1]).sum() / (rate * (1 - rate) * math.sqrt(centred[1:].size))
    assert abs(across) < 5


def test_the_statistics_would_show_an_index_off_by_one() -> None:
    drawn = memberships(40, 0.2, 3000)
    drawn[:, 0] &= memberships(1, 0.6, 3000, seed=9)[:, 0]
    assert abs(drawn[:, 0].sum() - 600) / math.sqrt(3000 * 0.16) > stats.norm.isf(1e-6 / 40)


class _Fixed(Stream):
    """Uniform draws that are given."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def uniform(self, count: int) -> torch.Tensor:
        taken, self.values = self.values[:count], self.values[count:]
        return torch.tensor(taken + [1 - 2.0**-53] * (count - len(taken)), dtype=torch.float64)


def test_geometric_gaps_at_the_edges() -> None:
    assert _bernoulli_positions(10, 0.3, _Fixed(0.0)).tolist() == [0]  # the first index can be drawn
    assert _bernoulli_positions(3, 0.5, _Fixed(0.0, 0.0, 0.0)).tolist() == [0, 1, 2]  # and so can the last
    assert _bernoulli_positions(3, 0.5, _Fixed(0.5, 0.0)).tolist() == [1, 2]  # u = rate is a tail
    assert _bernoulli_positions(3, 0.5, _Fixed(0.4999)).tolist() == [0]
    assert _bernoulli_positions(3, 0.5, _Fixed(0.9375)).tolist() == []  # just beyond the end
    assert _bernoulli_positions(3, 0.5, _Fixed(0.8749)).tolist() == [2]
    assert _bernoulli_positions(5, 1.0, _Fixed()).tolist() == [0, 1, 2, 3, 4]


def test_tiny_rates() -> None:
    source = Randomness(2).stream("lot")
    counts = np.array([len(_bernoulli_positions(10**9, 2e-9, source)) for _ in range(2000)])
    expected = 2000 * stats.poisson.pmf(np.arange(7), 2)
    observed = np.bincount(np.minimum(counts, 6), minlength=7)
    expected[6] = 2000 - expected[:6].sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-5
    positions = torch.cat([_bernoulli_positions(10**9, 2e-9, source) for _ in range(2000)])
    assert stats.kstest(positions.numpy() / 1e9, "uniform").pvalue > 1e-5


def test_a_first_draw_that_is_not_enough_goes_on() -> None:
    # All gaps of length 1: far more heads than expected.
    assert len(_bernoulli_positions(1000, 0.01, _Fixed(*[0.0] * 1000))) == 1000


def test_events_and_neighbours() -> None:
    assert Poisson(100, 10).event(2.0) == PoissonGaussian(2.0, 0.1)
    assert FixedSize(100, 10).event(2.0) == FixedSizeGaussian(2.0, 100, 10)
    assert isinstance(Shuffle(100, 10).event(2.0), Uncovered)
    assert Shuffle(100, 10).event(2.0).claimed is None
    assert [kind.neighbours for kind in (Poisson, FixedSize)] == [Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE]
    assert len(Poisson(100, 30)) == 3
    assert len(Poisson(5, 4)) == 1
    assert len(Poisson(5, 5)) == 1


# ---- other schemes --------------------------------------------------------------------------------------------------


def test_fixed_lots_are_exact_uniform_and_fresh() -> None:
    source = Randomness(3)
    scheme = FixedSize(6, 2)
    lots = [tuple(sorted(scheme.draw(number, source).tolist())) for number in range(4500)]
    assert len(lots) == 4500
    assert all(len(set(lot)) == 2 for lot in lots)
    pairs, counts = np.unique(lots, axis=0, return_counts=True)
    assert len(pairs) == 15
    assert stats.chisquare(counts).pvalue > 1e-5
    # Fresh: an epoch is no partition, and one lot says nothing about the next.
    assert any(set(one) & set(other) for one, other in zip(lots[::3], lots[1::3], strict=True))
    again = sum(one == other for one, other in itertools.pairwise(lots))
    assert abs(again - 300) < 5 * math.sqrt(300)


def test_shuffled_lots_are_a_partition() -> None:
    scheme, source = Shuffle(10, 3), Randomness(1)
    lots = [scheme.draw(number, source) for number in range(3)]
    assert [len(lot) for lot in lots] == [3, 3, 3]
    assert len(torch.cat(lots).unique()) == 9


# ---- the loader ---------------------------------------------------------------------------------------------------


def stepped(private: PrivateLoader) -> Iterator[Any]:
    """The batches of a loop that steps on each of them."""
    for batch in private:
        yield batch
        private.current.of.added = private.current.index + 1
        if private.current.last:
            private.current.of.state = State.RELEASED


def lots_of(private: PrivateLoader, epochs: int = 1) -> list[list[int]]:
    """The lots that a loop sees, put together from their microbatches."""
    lots: dict[int, list[int]] = {}
    for _ in range(epochs):
        for batch in stepped(private):
            now = private.current
            assert len(batch) == now.count
            kept = batch.tolist()[: now.real]
            assert len(lots.setdefault(now.lot, [])) == 0 or now.index > 0
            lots[now.lot] += kept
    return list(lots.values())


@pytest.mark.parametrize("physical", [None, 1, 3, 100])
def test_microbatches_add_up_to_the_same_lots(physical: int | None) -> None:
    reference = lots_of(loader(), epochs=5)
    assert lots_of(loader(physical=physical), epochs=5) == reference
    assert len(reference) == 25 == 5 * len(loader(physical=physical))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    reference = lots_of(loader(physical=2), epochs=2)
    assert lots_of(loader(physical=2, num_workers=workers, persistent_workers=workers == 2), epochs=2) == reference


def test_an_empty_lot_is_a_placeholder_that_does_not_count() -> None:
    private = loader(count=50, lot=1)
    kept, empty = 0, 0
    for _ in range(10):
        for batch in stepped(private):
            assert len(batch) >= 1
            kept, empty = kept + bool(private.current.real), empty + (not private.current.real)
            assert private.current.real or (private.current.count == 1 and private.current.last)
    assert kept + empty == 500
    assert abs(empty - 500 * math.exp(-1)) < 5 * math.sqrt(500 * 0.37 * 0.63)


def test_collate_function_and_flags_are_kept() -> None:
    def collate(batch: list[int]) -> dict[str, Any]:
        return {"count": len(batch), "numbers": tuple(batch)}

    private = loader(collate_fn=collate)
    for batch in stepped(private):
        assert batch["count"] == private.current.count == len(batch["numbers"])
    pinned = loader(pin_memory=True)
    assert pinned._loader.pin_memory
    assert not pinned._in_memory


def test_tensors_in_memory_come_out_as_the_slow_path_gives_them() -> None:
    data = TensorDataset(torch.arange(20.0).view(20, 1), torch.arange(20), torch.arange(40).view(20, 2) > 5)
    fast = loader(dataset=data, physical=3)
    slow = loader(dataset=data, physical=3, collate_fn=lambda batch: torch.utils.data.default_collate(batch))
    assert fast._in_memory
    assert not slow._in_memory
    for one, other in zip(stepped(fast), stepped(slow), strict=True):
        assert type(one) is type(other)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_leaving_an_epoch_leaves_nothing_behind(workers: int) -> None:
    private = loader(physical=2, num_workers=workers)
    seen = []
    for _ in range(4):
        for batch in private:
            now = private.current
            seen.append(now.lot)
            assert now.index == 0
            assert len(batch) == now.count
            break
    assert len(set(seen)) == 4  # every start is a new lot
    assert len(lots_of(private)) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterations_do_not_take_turns(workers: int) -> None:
    private = loader(physical=2, num_workers=workers)  # a worker fetches ahead
    first, second = iter(private), iter(private)
    next(first)
    lot = private.current.of
    next(second)
    assert lot.state is State.LEFT
    private.current.of.added = 1
    with pytest.raises(TrainingLoopError, match="another iteration"):
        next(first)


def test_a_batch_is_not_given_out_before_the_last_one_was_stepped_on() -> None:
    reasons: list[str] = []
    private = loader()
    private.lots.note = lambda reasons=(), notes=(), into=reasons: into.extend(reasons)
    batches = iter(private)
    next(batches)
    for _ in range(2):  # again and again: an error that a loop catches must not let it go on
        with pytest.raises(TrainingLoopError, match=r"step\(\) was not called for it"):
            next(batches)
    assert len(reasons) == 2


def test_a_lot_follows_from_its_number_alone() -> None:
    scheme, source = Poisson(60, 6), Randomness(5)
    ahead = [scheme.draw(number, source).tolist() for number in (3, 1, 4, 1, 5)]
    assert ahead[1] == ahead[3]
    assert ahead == [scheme.draw(number, Randomness(5)).tolist() for number in (3, 1, 4, 1, 5)]
    assert scheme.draw(3, Randomness(6)).tolist() != ahead[0]
    assert scheme.draw(3, source.spawn("run 0")).tolist() != ahead[0]
    secure = Randomness(secure=True)
    assert scheme.draw(7, secure).tolist() == scheme.draw(7, secure).tolist() != scheme.draw(8, secure).tolist()


def test_a_scheme_says_what_a_release_costs() -> None:
    for name, event in (("poisson", PoissonGaussian(2.0, 0.1)), ("fixed", FixedSizeGaussian(2.0, 60, 6))):
        drawn = scheme(name)(60, 6)
        assert drawn.event_despite(2.0, []) == drawn.event(2.0) == event
        assert drawn.event_despite(2.0, ["this", "that"]) == Uncovered("this; that", event)
    assert scheme("shuffle")(60, 6).event_despite(2.0, ["this"]) == Uncovered("this")
    with pytest.raises(ConfigurationError, match="one of poisson, fixed, shuffle"):
        scheme("reservoir")


def test_stopped_gives_out_nothing_more() -> None:
    private = loader()
    for _ in private:
        private.lots.stopped = True
    assert list(private) == []


# ---- what is refused ------------------------------------------------------------------------------------------------


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_loaders_that_are_refused() -> None:
    data = Numbers(10)
    cases = {
        "map-style": DataLoader(_Stream(), batch_size=2),
        "no batch_size": DataLoader(data, batch_size=None),
        "custom batch_sampler": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)),
        "WeightedRandomSampler": DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        "Subset": DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 2])),
        "must be a torch DataLoader": [1, 2],
        "private already": loader(),
    }
    for words, case in cases.items():
        with pytest.raises(ConfigurationError, match=words):
            check_loader(case)
    with pytest.raises(ConfigurationError, match="is empty"):
        Poisson(*check_loader(DataLoader(Numbers(0), batch_size=2)))
    with pytest.raises(ConfigurationError, match=r"must be in 1..3"):
        Poisson(*check_loader(DataLoader(Numbers(3), batch_size=4)))
    with pytest.raises(ConfigurationError, match="max_physical_batch_size"):
        loader(physical=0)
    assert check_loader(DataLoader(data, batch_size=2, shuffle=True, drop_last=True)) == (10, 2)
