"""adadp.randomness: where noise and lots come from."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.randomness import Randomness, with_tails


def test_engines_without_a_seed_draw_differently() -> None:
    like = torch.zeros(50)
    assert not torch.equal(Randomness().normal(like), Randomness().normal(like))
    assert not torch.equal(Randomness(secure=True).normal(like), Randomness(secure=True).normal(like))


def test_a_seed_repeats_and_draws_do_not() -> None:
    like = torch.zeros(50)
    one, other = Randomness(7), Randomness(7)
    first, second = one.normal(like), one.normal(like)
    assert torch.equal(first, other.normal(like))
    assert torch.equal(second, other.normal(like))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("other", [7 + 2**32, 7 + 2**64, 8, -7])
def test_every_bit_of_a_seed_counts(other: int) -> None:
    # torch's own manual_seed(7) and manual_seed(7 + 2**32) are the same stream on a CPU: 32 bits can be tried out.
    assert not torch.equal(Randomness(7).stream("lot 0").uniform(20), Randomness(other).stream("lot 0").uniform(20))
    assert not torch.equal(Randomness(7).normal(torch.zeros(20)), Randomness(other).normal(torch.zeros(20)))


def test_the_generator_starts_with_more_than_a_seed_of_32_bits() -> None:
    generator = Randomness().generator(torch.device("cpu"))
    words = generator.get_state().view(torch.int64)[3 : 3 + 624]
    from_seed = torch.Generator().manual_seed(generator.initial_seed()).get_state().view(torch.int64)[3 : 3 + 624]
    assert (words != from_seed).float().mean() > 0.99
    assert (words >= 0).all()
    assert (words < 2**32).all()
    assert len(words.unique()) > 620


@pytest.mark.parametrize("secure", [False, True])
def test_uniform_and_permutation(secure: bool) -> None:
    source = Randomness(None if secure else 5, secure=secure).stream("lot 0")
    values = source.uniform(20_000).numpy()
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-6
    orders = torch.stack([source.permutation(4) for _ in range(2400)])
    assert (orders.sort(1).values == torch.arange(4)).all()
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-6


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (15,), (16, 33)])
def test_normal_has_the_shape_asked_for(shape: tuple[int, ...], secure: bool) -> None:
    source = Randomness(secure=secure)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        drawn = source.normal(torch.zeros(shape, dtype=dtype))
        assert drawn.shape == shape
        assert drawn.dtype in (torch.float32, torch.float64)
        assert drawn.isfinite().all()


def test_short_draws_are_normal_too() -> None:
    # PyTorch fills fewer than 16 values in another way than more.
    source = Randomness(5)
    values = torch.cat([source.normal(torch.zeros(3)) for _ in range(4000)]).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(values[::3], values[1::3])[0, 1]) < 0.08


def test_what_it_assumes() -> None:
    assert "seed" in Randomness(1).assumption
    assert "not a cryptographic" in Randomness().assumption
    assert "cryptographic randomness" in Randomness(secure=True).assumption
    assert "seed" in Randomness(1, secure=True).assumption  # a seed is a seed, whatever else was asked for


def test_a_renewed_generator_draws_what_no_recording_can_draw_again() -> None:
    """A recording that was made earlier holds the old generator, and goes on with it."""
    randomness, device, like = Randomness(7), torch.device("cpu"), torch.zeros(50)
    randomness.normal(like)
    held = randomness.generator(device)
    randomness.generator(device)  # for another recording, which fails
    randomness.renew(device)
    replayed = torch.empty(50).normal_(generator=held)
    first = randomness.normal(like)
    assert not torch.equal(first, replayed)
    randomness.renew(device)
    assert not torch.equal(first, randomness.normal(like))
    assert not torch.equal(first, Randomness(7).normal(like))


# ---- one stream belongs to one run in one process -------------------------------------------------------------------


def _in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, in a forked process."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            result: Any = work()
        except BaseException as error:
            result = error
        os.write(write, pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return result


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_a_forked_process_draws_anew(secure: bool, used_before: bool) -> None:
    source = Randomness(secure=secure)

    def draw(lot: int = 0) -> list[float]:
        run = source.spawn("run 0")
        return [*source.normal(torch.zeros(4)).tolist(), *run.stream(f"lot {lot}").uniform(4).tolist(),
                *source.stream(f"lot {lot}").uniform(4).tolist()]  # fmt: skip

    drawn = [draw()] if used_before else []
    drawn += [_in_a_child(draw), _in_a_child(draw), draw(1)]
    values = [value for row in drawn for value in row]
    assert len(set(values)) == len(values)


def test_a_seeded_stream_is_refused_in_another_process() -> None:
    source = Randomness(7)
    for work in (lambda: source.normal(torch.zeros(4)), lambda: source.stream("lot 0"), lambda: source.spawn("run 0")):
        assert isinstance(_in_a_child(work), ConfigurationError)
    source.normal(torch.zeros(4))  # it is still this process's


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda source: pickle.loads(pickle.dumps(source)),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_draws_anew_or_refuses(way: str) -> None:
    source = Randomness()
    source.normal(torch.zeros(4))
    rows = [COPIES[way](source).normal(torch.zeros(4)) for _ in range(2)] + [source.normal(torch.zeros(4))]
    assert len(torch.cat(rows).unique()) == 12
    with pytest.raises(ConfigurationError, match="copied, pickled or carried"):
        COPIES[way](Randomness(7)).normal(torch.zeros(4))


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_engine_draws_anew_or_refuses(way: str) -> None:
    def noise(engine: PrivacyEngine) -> Tensor:
        model = nn.Linear(4, 1, bias=False)
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(torch.zeros(10, 4)), batch_size=10),
        )  # fmt: skip
        for (batch,) in loader:
            optimizer.backward(model(batch)[:, 0])
            optimizer.step()
        return model.weight.grad.flatten()

    engine = PrivacyEngine()
    drawn = [noise(COPIES[way](engine)), noise(COPIES[way](engine)), noise(engine)]
    assert len(torch.cat(drawn).unique()) == 12
    with pytest.raises(ConfigurationError, match="is not copied or pickled"):
        COPIES[way](engine)  # it has a record now
    with pytest.raises(ConfigurationError, match="another seed"):
        noise(COPIES[way](PrivacyEngine(seed=3)))


def test_two_runs_of_one_engine_share_neither_lots_nor_noise() -> None:
    engine = PrivacyEngine(seed=3)
    drawn = []
    for _ in range(2):
        model = nn.Linear(4, 1, bias=False)
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(torch.arange(40.0).view(10, 4)), batch_size=5),
        )  # fmt: skip
        lots = [loader.sampling.draw(number, loader._randomness).tolist() for number in range(8)]
        drawn.append((optimizer._step._randomness.normal(torch.zeros(6)).tolist(), lots))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_float32_noise_has_the_tails_of_a_normal_distribution() -> None:
    """PyTorch's own end at 5.77, which is the square root of 2 log(2^24)."""
    count = 1_000_000
    generator = torch.Generator().manual_seed(0)
    given = torch.tensor([4.5, -4.5, 3.99, -1.0]).repeat(count)
    drawn = with_tails(given.clone(), generator).view(count, 4)
    assert torch.equal(drawn[:, 2:], given.view(count, 4)[:, 2:])
    assert (drawn[:, 0] >= 4).all()
    assert (drawn[:, 1] <= -4).all()
    for far in (4.5, 5.0, 5.5):
        expected = 2 * count * math.erfc(far / math.sqrt(2)) / math.erfc(4 / math.sqrt(2))
        found = int((drawn[:, :2].abs() > far).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected)
    assert drawn.abs().max() > 6.2  # of two million values beyond 4, sixty are beyond this one


def test_noise_on_a_cpu_is_drawn_with_tails() -> None:
    randomness = Randomness(seed=5)
    drawn = randomness.normal(torch.empty(2_000_000))
    plain = torch.empty(2_000_000).normal_(generator=Randomness(seed=5).generator(torch.device("cpu")))
    near = plain.abs() <= 4
    assert torch.equal(drawn[near], plain[near])
    assert not torch.equal(drawn[~near], plain[~near])


# ---- the noise of a lot ----------------------------------------------------------------------------------------------


def test_with_a_seed_a_lots_noise_follows_from_its_number_and_attempt() -> None:
    like = torch.zeros(50)
    one, other = Randomness(7), Randomness(7)
    one.begin_lot(3)
    first, more = one.normal(like), one.normal(like)
    other.normal(like)  # whatever was drawn before does not matter
    other.begin_lot(3)
    assert torch.equal(first, other.normal(like))
    assert not torch.equal(first, more)
    for number, attempt in ((4, 0), (3, 1), (31, 0)):
        other.begin_lot(number, attempt)
        assert not torch.equal(first, other.normal(like))


def test_without_a_seed_a_lot_restarts_nothing() -> None:
    like = torch.zeros(50)
    source = Randomness()
    source.begin_lot(3)
    first = source.normal(like)
    source.begin_lot(3)
    assert not torch.equal(first, source.normal(like))


def test_generators_that_were_renewed_share_no_noise_of_any_lot() -> None:
    source, device, drawn = Randomness(7), torch.device("cpu"), []
    old = source.generator(device)
    for number in range(3):
        source.begin_lot(number)
        if number == 1:
            source.renew(device)
            source.begin_lot(number)
        drawn += [
            torch.empty(20).normal_(generator=each)
            for each in {id(g): g for g in (old, source.generator(device))}.values()
        ]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn) == 5


def test_a_seeded_run_adds_the_same_noise_to_a_lot_whatever_came_before() -> None:
    def weights(skip: bool) -> list[Tensor]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.zeros(40, 4), torch.zeros(40, 1))
        _, private, loader = PrivacyEngine(seed=3).make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0
        )
        found = []
        for number, (inputs, _) in enumerate(loader):
            optimizer.zero_grad()
            if skip and number == 0:
                private._step._randomness.normal(torch.zeros(17))
            private.backward(model(inputs).squeeze(1))
            private.step()
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
        return found

    one, other = weights(False), weights(True)
    assert all(map(torch.equal, one[1:], other[1:]))
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


def test_the_noise_of_a_gpu_is_that_of_its_place_and_not_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has a GPU of its own index, and all must draw the same; two GPUs of one process must not."""
    started: list[str] = []

    def start(generator: Any, key: bytes, name: str) -> Any:
        started.append(name)
        return generator

    monkeypatch.setattr("adadp.randomness._start", start)
    monkeypatch.setattr("adadp.randomness.torch.Generator", lambda device: object())
    for devices in ([0, 1], [5, 3]):
        randomness = Randomness(7)
        for index in devices:
            randomness.generator(torch.device("cuda", index))
        randomness.renew(torch.device("cuda", devices[1]))
    assert started[:3] == started[3:]
    assert len(set(started[:3])) == 3
