"""What several processes refuse together, and what becomes of a lot when one of them fails."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from adadp import PrivacyEngine, Units, training
from adadp.accounting.ledger import Ledger
from adadp.algorithms import Task, create
from adadp.errors import ConfigurationError
from distributed.team import TIMEOUT, start, values, wait_for_releases
from distributed.work import LOT, cross_entropy, data, mlp, train


def attempt(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def make(module: nn.Module, loader: DataLoader[Any] | None = None, **settings: Any) -> Any:
    engine = PrivacyEngine(**settings.pop("engine", {}))
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | settings
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=LOT) if loader is None else loader
    return engine, *engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **settings)


class Files(Dataset[Any]):
    """Reads its rows in an order of its own, as a listing of files may; and perhaps another view each time."""

    def __init__(self, turn: int, *, noise: bool = False, own: bool = False) -> None:
        self.rows, self.turn, self.noise = data().tensors, turn, noise
        self.generator = torch.Generator().manual_seed(torch.seed() % 2**30 + dist.get_rank()) if own else None

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, *rest = (rows[index - self.turn] for rows in self.rows)
        return inputs + self.noise * torch.randn(inputs.shape, generator=self.generator), *rest


def turned(rank: int) -> TensorDataset:
    """The same rows, in another order in each process."""
    return TensorDataset(*(rows.roll(rank, 0) for rows in data().tensors))


def make_second(module: nn.Module, rank: int) -> Any:
    """The engine of one process has made something private before: the noise of its second run would be another."""
    engine, loader = PrivacyEngine(), DataLoader(data(), batch_size=LOT)
    if rank == 1:
        next(engine._numbers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )


# ---- what make_private refuses ---------------------------------------------------------------------------------------


def refusals(rank: int, size: int, damaged: str) -> dict[str, str]:
    """Each process gives something else, or all of them what is not covered."""
    own = list(range(rank, 240, size))

    def sharded() -> nn.Module:
        module = nn.Sequential(nn.Linear(6, 4))
        mesh = init_device_mesh("cpu", (size,))
        module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh, [Shard(0)]))
        return module

    def hooked() -> nn.Module:
        module = DistributedDataParallel(mlp())
        module.register_comm_hook(None, fp16_compress_hook)
        return module

    def other_weights() -> nn.Module:
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(6, 2))

    def line_search() -> None:
        model, algorithm = mlp(), create("agd")
        algorithm.settle(lot=LOT, steps=10, noise_multiplier=1.0, weights=100)
        algorithm.make_private(
            PrivacyEngine(),
            module=model,
            optimizer=algorithm.optimizer(model.parameters()),
            data_loader=DataLoader(data(), batch_size=LOT),
            noise_multiplier=1.0,
            task=Task(LOT, 10, lambda count, generator: torch.randn(count, 6, generator=generator)),
        )

    def wrapped_with_more() -> None:
        _, model, _, loader = make(mlp())
        DistributedDataParallel(nn.Sequential(model, nn.Linear(2, 2)))(next(iter(loader))[0])

    def made_before_the_group() -> None:
        with mock.patch.object(dist, "is_initialized", return_value=False):
            _, model, _, loader = make(mlp())
        DistributedDataParallel(model)(next(iter(loader))[0])

    cases: dict[str, Any] = {
        "noise": lambda: make(mlp(), noise_multiplier=1.0 + rank),
        "lot": lambda: make(mlp(), DataLoader(data(), batch_size=24 + rank)),
        "bound": lambda: make(mlp(), max_grad_norm=1.0 + rank),
        "seed": lambda: make(mlp(), engine={"seed": rank}),
        "weights": lambda: make(other_weights()),
        "own part": lambda: make(mlp(), DataLoader(Subset(data(), own), batch_size=8)),
        "order": lambda: make(mlp(), DataLoader(turned(rank), batch_size=24)),
        "items": lambda: make(mlp(), DataLoader(Files(rank), batch_size=24)),
        "views": lambda: make(mlp(), DataLoader(Files(0, noise=True), batch_size=24)),
        "views of its own": lambda: make(mlp(), DataLoader(Files(0, noise=True, own=True), batch_size=24)),
        "shown": lambda: make(mlp(), expose_raw=rank == 1),
        "whose rows": lambda: make(mlp(), unit=[max(row, 30 + rank) for row in range(240)]),
        "rows of each": lambda: make(mlp(), unit=Units(range(240), max_rows=4 + rank)),
        "augmentations": lambda: make(mlp(), augmentations=2 + rank),
        "line search": line_search,
        "wrapped with more": wrapped_with_more,
        "made before the group": made_before_the_group,
        "number": lambda: make_second(mlp(), rank),
        "sampler": lambda: make(mlp(), DataLoader(data(), batch_size=24, sampler=DistributedSampler(data()))),
        "tensor parallel": lambda: make(sharded()),
        "static graph": lambda: make(DistributedDataParallel(mlp(), static_graph=True)),
        "hook": lambda: make(hooked()),
        "inner": lambda: make(nn.Sequential(DistributedDataParallel(mlp()))),
        "ledger": lambda: make(mlp(), engine={"ledger": damaged, "dataset": "made"}),
    }
    return {name: attempt(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("team")
    (folder / "damaged.jsonl").write_text("not a ledger\n")
    return values(2, folder, refusals, str(folder / "damaged.jsonl"))


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "noise": "noise_multiplier",
        "lot": "batch_size",
        "bound": "the clipping",
        "seed": "the seed",
        "weights": "the weights",
        "own part": "the dataset",
        "order": "the dataset",
        "items": "the dataset",
        "views": "nothing was raised",
        "views of its own": "nothing was raised",
        "shown": "expose_raw",
        "whose rows": "unit or augmentations",
        "rows of each": "unit or augmentations",
        "augmentations": "unit or augmentations",
        "wrapped with more": "around the whole of it",
        "made before the group": "init_process_group() before make_private",
        "line search": "train with agd in one process",
        "number": "the run",
        "sampler": "would count twice",
        "tensor parallel": "tensor parallelism",
        "static graph": "static_graph",
        "hook": "communication hook",
        "inner": "around a part of the model",
        "ledger": "is refused",
    }.items(),
)
def test_make_private_refuses_in_every_process(refused: list[dict[str, str]], name: str, says: str) -> None:
    for found in refused:
        assert says in found[name]


def test_processes_that_do_not_know_of_one_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    make(mlp())  # a number of workers of something else
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(ConfigurationError, match="init_process_group"):
        make(mlp())


def test_a_plan_of_one_of_several_processes_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = training.plan(dataset="digits", noise_multiplier=3.0, out=str(tmp_path / "run"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="a plan of its own"):
        training.run(plan)
    with pytest.raises(ConfigurationError, match="MASTER_PORT not where the others are"):
        training.train(dataset="digits", noise_multiplier=3.0, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# ---- a lot fails in all processes if it fails in one -----------------------------------------------------------------


class MixesOn(nn.Module):
    """Mixes examples in one process alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inside, self.rank = mlp(), rank

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.inside(inputs)
        return made - made.mean(0) if dist.get_rank() == self.rank else made


def failures(rank: int, size: int, folder: str) -> dict[str, Any]:
    """One thing after the other goes wrong in process 1; a budget ends in all of them."""

    def steps(made: Any, change: Any = None, lots: int = 12) -> None:
        _, model, optimizer, loader = made
        for lot, (inputs, targets, _) in zip(range(lots), loader, strict=False):
            if change is not None and rank == 1:
                change(lot, model, optimizer)
            optimizer.zero_grad()
            optimizer.backward(cross_entropy(model, inputs, targets))
            optimizer.step()

    def cannot_bound() -> None:
        def change(lot: int, model: Any, optimizer: Any) -> None:
            if lot == 3:
                optimizer._step.clipping.bound = lambda gradients: 1 / 0

        found["bounding"], *_ = made = make(mlp())
        steps(made, change)

    def leaves_a_lot() -> None:
        made = make(mlp())
        if rank == 1:
            next(iter(made[3]))
        steps(made)

    def changes_weights() -> None:
        def change(lot: int, model: Any, optimizer: Any) -> None:
            if lot == 5:
                with torch.no_grad():
                    model[0].bias[0] += 1e-6

        steps(make(mlp(), DataLoader(data(), batch_size=12)), change, lots=20)

    def mixes() -> None:
        found["mixes: engine"], *_ = made = make(MixesOn(1))
        steps(made)

    found: dict[str, Any] = {}
    for case in (cannot_bound, leaves_a_lot, changes_weights, mixes):
        found[case.__name__] = attempt(case)
    found["after bounding"] = sum(count for _, count in found.pop("bounding")._open().charged())
    found["reasons"] = list(found.pop("mixes: engine").guarantee(1e-5).reasons)
    ledger = {"ledger": f"{folder}/budget.jsonl", "dataset": "made", "budget": (4.0, 1e-5)}
    result = train(rank, size, lots=1000, seed=None, engine=ledger)
    found["budget"] = len(result.lots), result.epsilon
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("team")
    return folder, values(2, folder, failures, str(folder))


Failed = tuple[Path, list[dict[str, Any]]]


def test_what_cannot_be_bounded_in_one_process_is_released_in_none(failed: Failed) -> None:
    first, second = failed[1]
    assert second["cannot_bound"].startswith("ZeroDivisionError")
    assert first["cannot_bound"].startswith("DistributedError: process 1 could not work on its part of lot 3")
    assert first["after bounding"] in (3, 4)


def test_processes_at_different_lots_stop(failed: Failed) -> None:
    for found in failed[1]:
        assert found["leaves_a_lot"].startswith("DistributedError: process")
        assert "at lot 1" in found["leaves_a_lot"]


def test_weights_that_were_changed_in_one_process_are_found(failed: Failed) -> None:
    for found in failed[1]:
        assert found["changes_weights"].startswith("DistributedError: the weights are no longer the same")
        assert "lot 10" in found["changes_weights"]


def test_a_refusal_in_one_process_stops_all_and_reaches_the_ledger(failed: Failed) -> None:
    first, second = failed[1]
    assert second["mixes"].startswith("UnsupportedModuleError")
    assert first["mixes"].startswith("DistributedError: process 1 could not work on its part of lot 0")
    assert any("mixes examples" in reason for reason in first["reasons"])


def test_a_budget_ends_training_in_all_processes_at_the_same_lot(failed: Failed) -> None:
    folder, (first, second) = failed
    assert first["budget"] == second["budget"]
    lots, epsilon = first["budget"]
    assert 1 < lots < 1000
    assert epsilon <= 4.0
    charged = sum(count for _, count in Ledger(folder / "budget.jsonl").charged())
    assert charged == lots - 1  # the last one that was drawn was not released


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def trains_on(rank: int, size: int, folder: str) -> None:
    """Train without end; each release leaves a byte in a file of this process."""
    released = os.open(f"{folder}/released-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    engine = {"ledger": f"{folder}/ledger.jsonl", "dataset": "made"}
    for _ in range(1000):
        _, model, optimizer, loader = made = make(mlp(), engine=engine)
        for _ in range(1000):
            for inputs, targets, _indices in loader:
                optimizer.zero_grad()
                optimizer.backward(cross_entropy(model, inputs, targets))
                optimizer.step()
                os.write(released, b"x")
        made[0].close()


def kill_at_random(folder: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    for round_ in range(times):
        members = start(2, folder, trains_on, str(folder), timeout=10)
        victim = round_ % 2
        wait_for_releases(folder / f"released-{victim}")
        time.sleep(chance.uniform(0, 0.3))
        members[victim].process.kill()
        began = time.monotonic()
        answer = members[1 - victim].answer()
        assert time.monotonic() - began < TIMEOUT
        assert answer.error.startswith("DistributedError: the processes could not"), answer
        members[victim].answer()
        charged = sum(count for _, count in Ledger(folder / "ledger.jsonl").charged())
        for rank in range(2):
            assert (folder / f"released-{rank}").stat().st_size <= charged


def test_nothing_released_is_missing_from_the_ledger_after_5_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 5, seed=1)


@pytest.mark.slow
def test_nothing_released_is_missing_from_the_ledger_after_30_kills_of_each(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 60, seed=2)
