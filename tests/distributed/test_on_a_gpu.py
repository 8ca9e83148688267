"""Several processes on a GPU: NCCL in a group of one, which does all that several do, and gloo with two on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine, training
from adadp.distributed.group import Group, Processes
from adadp.mechanism.replay import TrainingStep
from distributed.team import values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

EXAMPLES, FEATURES, LOT = 400, 20, 40
KINDS = {"half": torch.bfloat16, "single": torch.float32, "double": torch.float64}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 3)).to("cuda", dtype)


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    inputs = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs.to("cuda", dtype), (torch.arange(EXAMPLES) % 3).cuda())


def train(
    *, wrap: bool = False, recorded: bool = False, lots: int = 12, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Tensor, float | None, TrainingStep | None]:
    """Weights, epsilon, and the step that was recorded or not."""
    inner = mlp(dtype)
    model = DistributedDataParallel(inner) if wrap else inner
    engine = PrivacyEngine(seed=5)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(dtype), batch_size=LOT),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **settings,
    )

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(private(inputs).float(), targets, reduction="none")

    step = TrainingStep(optimizer, losses) if recorded else None
    done = 0
    while done < lots:
        for inputs, targets in loader:
            if step is not None:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                optimizer.backward(losses(inputs, targets))
                optimizer.step()
            done += optimizer.stepped
            if done == lots:
                break
    weights = torch.cat([parameter.detach().flatten().float().cpu() for parameter in inner.parameters()])
    return weights, engine.guarantee(1e-5).epsilon, step


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, over NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def several(nccl: None, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """One process that agrees and adds up over NCCL as several do; the engine would take it for one alone."""
    made = Processes(dist.group.WORLD)

    def group_of(module: nn.Module) -> Group:
        return made

    monkeypatch.setattr("adadp.distributed.together.group_of", group_of)
    return made


def test_a_group_of_one_changes_nothing(nccl: None) -> None:
    alone, wrapped = train(), train(wrap=True)
    assert torch.equal(alone[0], wrapped[0])
    assert alone[1] == wrapped[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 16}, {"clipping": "automatic"}])
def test_sums_that_went_through_nccl_are_the_same(
    several: Processes, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    together = train(wrap=True, dtype=dtype, **settings)
    monkeypatch.undo()
    alone = train(wrap=True, dtype=dtype, **settings)
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-6)
    assert together[1] == alone[1]


def test_collectives_over_nccl(several: Processes) -> None:
    sums = {name: torch.ones(5, 7, dtype=kind, device="cuda") for name, kind in KINDS.items()}
    found = several.totals(sums)
    assert {name: value.dtype for name, value in found.items()} == {
        "half": torch.float32, "single": torch.float32, "double": torch.float64
    }  # fmt: skip
    assert all(bool((value == 1).all()) and value.shape == (5, 7) for value in found.values())
    before = {name: value.clone() for name, value in sums.items()}
    several.copy_first(list(sums.values()))
    assert all(torch.equal(sums[name], before[name]) for name in sums)
    assert several.rows([1, -2]) == [[1, -2]]
    assert several.from_first(lambda: "said") == "said"


def test_a_step_alone_is_replayed_and_one_of_several_says_why_not(
    several: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, epsilon, together = train(recorded=True, pad_lots=True, wrap=True, lots=40)
    assert together is not None
    assert together.replays == 0
    assert "several processes" in str(together.why_not)
    monkeypatch.undo()
    alone, same, step = train(recorded=True, pad_lots=True, lots=40)
    assert step is not None
    assert step.why_not is None
    assert step.replays > 20
    assert same == epsilon
    torch.testing.assert_close(weights, alone, rtol=2e-2, atol=2e-3)  # a replay may add in another order


def both(rank: int, size: int) -> tuple[Tensor, float | None]:
    return train(wrap=True)[:2]


def test_two_processes_on_one_gpu_do_what_one_does(tmp_path: Path) -> None:
    alone = train()
    for weights, epsilon in values(2, tmp_path, both):
        assert epsilon == alone[1]
        torch.testing.assert_close(weights, alone[0], rtol=0, atol=1e-5)


# ---- the command -----------------------------------------------------------------------------------------------------


def torchrun(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "adadp", "train", "--dataset", "digits", "--steps", "40", "--out", str(folder / "run"), *options]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=dict(os.environ), timeout=300)


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 1, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 40
    assert result["epsilon"] <= 1.0
    assert "cuda" in json.loads((tmp_path / "run" / "config.json").read_text())["device"]


def test_more_processes_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    done = torchrun(tmp_path, count, "--json")
    assert done.returncode != 0
    assert f"torchrun started {count} processes on this machine, which has {count - 1} of the GPUs" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_does_over_nccl_what_several_do(
    several: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trained(out: str) -> tuple[Tensor, float | None]:
        result = training.train(
            dataset="digits", algorithm="dpsgd", noise_multiplier=2.0, steps=12, seed=3, device="cuda",
            pca_noise_multiplier=10.0, out=str(tmp_path / out),
        )  # fmt: skip
        return torch.cat([p.detach().flatten().cpu() for p in result.plan.model.parameters()]), result.guarantee.epsilon

    monkeypatch.setattr("adadp.training.loop.launched", lambda: nullcontext(several))
    weights, epsilon = trained("several")
    monkeypatch.undo()
    alone, same = trained("alone")
    assert epsilon == same
    torch.testing.assert_close(weights, alone, rtol=2e-2, atol=2e-3)  # a replay may add in another order
