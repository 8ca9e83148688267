"""One mechanism over several processes: the lots, noise and weights of one process, and one event on one ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adadp.distributed.share import Share
from adadp.randomness import Randomness, Stream
from adadp.sampling.schemes import Poisson
from distributed.team import values
from distributed.work import (
    BUGS,
    CLIPPINGS,
    EXAMPLES,
    LOT,
    PERSONS,
    Checkpointed,
    Result,
    each,
    in_bfloat16,
    mean,
    nothing,
    train,
)

CASES: dict[str, dict[str, Any]] = {
    "flat": {},
    "a plain module": {"wrap": None},
    "wrapped when it is private": {"wrap": "after", "max_physical_batch_size": 5},
    "pieces": {"max_physical_batch_size": 5},
    "padded": {"pad_lots": True},
    "hardly any examples": {"lot": 2},
    "Adam": {"optimizer": torch.optim.Adam, "lr": 0.01},
    "fixed size": {"sampling": "fixed"},
    "a scalar loss": {"loss": mean},
    "bfloat16": {"loss": in_bfloat16},
    "checkpointed": {"model": Checkpointed},
    "a recorded step": {"recorded": True, "max_physical_batch_size": 6},
    "persons": {"unit": PERSONS},
    "persons in pieces": {"unit": PERSONS, "max_physical_batch_size": 24},
    "persons in a recorded step": {"unit": PERSONS, "recorded": True, "max_physical_batch_size": 16},
    "persons, padded and of a fixed number": {"unit": PERSONS, "pad_lots": True, "sampling": "fixed"},
    "views": {"augmentations": 3},
    "views of persons, clamped early": {
        "unit": PERSONS,
        "augmentations": 2,
        "clipping": CLIPPINGS["local with probes"],
        "max_physical_batch_size": 40,
    },
    **{name: {"clipping": clipping} for name, clipping in CLIPPINGS.items()},
}
#: Larger gradients without clipping, so that rounding to bfloat16 shows.
LARGE = {"noise": 0.0001, "max_grad_norm": 1000.0, "lots": 4, "lr": 1.0}
#: What four processes do, too: for them the rest is the same.
FOUR = ("flat", "pieces", "hardly any examples", "local with probes", "persons in pieces")
NOISE = {"loss": nothing, "lots": 8, "keep_gradients": True, "noise": 2.0}


UNSEEDED = {"noise": {**NOISE, "seed": None}, "secure": {**NOISE, "seed": None, "engine": {"secure_mode": True}}}
OTHERS = {"large": LARGE, **UNSEEDED}


def alone(case: dict[str, Any]) -> Result:
    return train(0, 1, **case)


def check_same(one: Result, several: list[Result]) -> None:
    """The processes did together what one process does alone."""
    for number, lot in enumerate(one.lots):
        assert sorted(index for each in several for index in each.lots[number]) == sorted(lot)
    for result in several:
        assert result.epsilon == one.epsilon
        assert torch.equal(result.weights, several[0].weights)
        torch.testing.assert_close(result.weights, one.weights, rtol=0, atol=1e-5)


def check_noise(several: list[Result]) -> None:
    """What is released where no example has a gradient: noise of the stated size, once, new for each lot."""
    drawn = torch.stack(several[0].gradients).double() * LOT / 2.0
    count = drawn.numel()
    assert abs(float(drawn.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert len({float(lot[0]) for lot in drawn}) == len(drawn)
    for result in several[1:]:
        assert torch.equal(torch.stack(result.gradients), torch.stack(several[0].gradients))


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = CASES | OTHERS if request.param == 2 else {name: CASES[name] for name in FOUR}
    return values(request.param, tmp_path_factory.mktemp("team"), each, cases)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes of a team come to with each planted bug."""
    cases = {bug: {"plant": bug, **(NOISE if check == "noise" else LARGE)} for bug, (*_, check) in BUGS.items()}
    return values(2, tmp_path_factory.mktemp("team"), each, cases)


@pytest.mark.parametrize("name", [*CASES, "large"])
def test_several_processes_do_what_one_does(together: list[dict[str, Any]], name: str) -> None:
    if name not in together[0]:
        pytest.skip("two processes do it")
    one = alone((CASES | OTHERS)[name])
    results = [found[name] for found in together]
    assert all(isinstance(result, Result) for result in results), results
    check_same(one, results)
    assert len({result.batches for result in results}) == 1  # all call the loop equally often
    if name == "hardly any examples":  # lots of which a process has none
        assert any(not part for result in results for part in result.lots)
    for result in results:
        assert sum(f"all {len(results)} processes that trained together" in text for text in result.assumptions) == 1


@pytest.mark.parametrize("name", UNSEEDED)
def test_noise_is_added_once(together: list[dict[str, Any]], name: str) -> None:
    if name not in together[0]:
        pytest.skip("two processes do it")
    check_noise([found[name] for found in together])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(broken: list[dict[str, Any]], bug: str) -> None:
    results, check = [found[bug] for found in broken], BUGS[bug][3]
    if check == "engine":
        assert all(str(result).startswith("DistributedError: the weights are no longer the same") for result in results)
        return
    assert all(isinstance(result, Result) for result in results)
    with pytest.raises(AssertionError):
        check_noise(results) if check == "noise" else check_same(alone(LARGE), results)


def test_drawing_a_lot_takes_numbers_for_the_lot_and_not_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    sound = Stream.uniform

    def counted(stream: Stream, count: int) -> torch.Tensor:
        drawn.append(count)
        return sound(stream, count)

    monkeypatch.setattr(Stream, "uniform", counted)
    for examples in (10**3, 10**6, 10**12):
        drawn.clear()
        lots = [Poisson(examples, LOT).draw(number, Randomness(1)) for number in range(20)]
        assert sum(drawn) < 20 * 5 * LOT
        assert 10 * LOT < sum(map(len, lots)) < 40 * LOT
        for lot in lots:  # and who works on what follows from the index
            assert sorted(torch.cat([lot[Share(rank, 3).places(lot)] for rank in range(3)]).tolist()) == lot.tolist()


def test_every_example_is_drawn_at_the_rate() -> None:
    drawn = sum(len(lot) for lot in alone({"lots": 40}).lots)
    expected = 40 * LOT
    assert abs(drawn - expected) < 5 * math.sqrt(expected * (1 - LOT / EXAMPLES))
