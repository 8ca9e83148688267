"""A model under `fully_shard` (FSDP2): the lots, noise and weights of one process, and each planted bug caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.sharding import layers, sharded
from distributed.team import values
from distributed.test_one_mechanism import LARGE, NOISE, PERSONS, alone, check_noise, check_same
from distributed.work import BUGS, FEATURES, Checkpointed, Result, each, in_bfloat16, mean

LOTS = 5


class Scaled(nn.Module):
    """Has weights that no layer answers for, in what is left for the root to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = layers()
        self.scale, self.shift = nn.Parameter(torch.ones(FEATURES)), nn.Parameter(torch.full((1, FEATURES), 0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.inside(inputs * self.scale + self.shift)
        return made


class Mixed(nn.Module):
    """Layers of other kinds: two weights of one tensor, a layer that computes with a list of its own, attention."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.norm, self.tied, self.last = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(3, 2)
            self.attend = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
            self.remember, self.second = nn.GRU(FEATURES, 3, batch_first=True), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.tied.weight

    def forward(self, inputs: Tensor) -> Tensor:
        long = self.second(self.tied(self.norm(inputs)).tanh()).unsqueeze(1).expand(-1, 3, -1)
        made: Tensor = self.last(self.remember(self.attend(long, long, long)[0])[0].mean(1))
        return made


class Prompted(nn.Module):
    """Gives a sharded layer a weight for its input: fully_shard hides it, and torch.func takes the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.inside = nn.Parameter(torch.full((1, 3), 0.2)), layers()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Linear(3, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.inside(inputs + self.embed(self.prompt).expand(len(inputs), -1))
        return made


def frozen() -> nn.Module:
    model = layers()
    model[0].requires_grad_(False)
    return model


def of(made: Callable[[], nn.Module], **rest: Any) -> Callable[[], nn.Module]:
    return lambda: sharded(made, **rest)


def shrinking(module: nn.Module) -> Tensor:
    made: Tensor = 0.1 * sum((weight.square().sum() for weight in module.parameters()), torch.zeros(()))
    return made


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum": {"optimizer": momentum},
    "Adam": {"optimizer": torch.optim.Adam, "lr": 0.01},
    "pieces": {"max_physical_batch_size": 5},
    "padded": {"pad_lots": True},
    "hardly any examples": {"lot": 2},
    "a scalar loss": {"loss": mean},
    "bfloat16": {"loss": in_bfloat16},
    "a step that cuts lots": {"recorded": True, "max_physical_batch_size": 6},
    "persons in pieces": {"unit": PERSONS, "max_physical_batch_size": 24},
    "views": {"augmentations": 3},
    "a penalty": {"penalty": shrinking},
    "through torch.func": {"through_func": ["0"]},
    "all of it through torch.func": {"through_func": [""]},
    "the root alone": {"model": of(layers, each_layer=False)},
    "weights without a layer": {"model": of(Scaled)},
    "a weight for a layer's input": {"model": of(Prompted)},
    "other layers": {"model": of(Mixed, each_layer=False)},
    "checkpointed": {"model": of(lambda: Checkpointed(layers))},
    "frozen": {"model": of(frozen)},
    "large": LARGE,
}
CASES = {name: {"model": sharded, "wrap": None, "lots": LOTS, "noise": 0.3, **case} for name, case in CASES.items()}
OTHERS = {"noise": {**NOISE, "seed": None}, **{bug: NOISE if BUGS[bug][3] == "noise" else LARGE for bug in BUGS}}
OTHERS = {
    name: {"model": sharded, "wrap": None, **case, "plant": name if name in BUGS else None}
    for name, case in OTHERS.items()
}
FOUR = ("SGD", "pieces", "weights without a layer")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(2, tmp_path_factory.mktemp("team"), work, [*CASES], [*OTHERS])


def work(rank: int, size: int, cases: list[str], others: list[str]) -> dict[str, Any]:
    return each(rank, size, {name: CASES[name] for name in cases} | {name: OTHERS[name] for name in others})


@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_what_one_does(together: list[dict[str, Any]], name: str) -> None:
    results = [found[name] for found in together]
    assert all(isinstance(result, Result) for result in results), results
    check_same(alone(CASES[name]), results)  # nobody's .grad held anything before a release: see `work.train`
    assert all(any("all 2 processes" in text for text in result.assumptions) for result in results)


@pytest.mark.parametrize("size", [1, 4])
def test_one_process_and_four_do_it_too(size: int, tmp_path: Path) -> None:
    found = values(size, tmp_path, work, [*FOUR], [])
    for name in FOUR:
        check_same(alone(CASES[name]), [results[name] for results in found])


def test_the_noise_is_in_the_release_once(together: list[dict[str, Any]]) -> None:
    check_noise([found["noise"] for found in together])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(together: list[dict[str, Any]], bug: str) -> None:
    results, check = [found[bug] for found in together], BUGS[bug][3]
    if check == "engine":  # though weights that are put together from shards are the same everywhere
        assert all(str(result).startswith("DistributedError: the weights are no longer the same") for result in results)
        return
    assert all(isinstance(result, Result) for result in results), results
    with pytest.raises(AssertionError):
        check_noise(results) if check == "noise" else check_same(alone(CASES["large"]), results)
