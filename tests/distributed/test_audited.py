"""The attacks on one process, on two: two worlds in lockstep, and an audit by canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.audit import many_runs
from adadp.audit.attack import Transcript
from adadp.audit.promise import of_guarantee
from adadp.testing import influence
from distributed.team import values
from distributed.work import LOT, data, mlp, planted


def trained(dataset: Any, lots: int = 6, noise: float = 1.0, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: nn.Module = DistributedDataParallel(mlp())
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=LOT),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        **settings,
    )
    for _, (inputs, targets, _indices) in zip(range(10 * lots), loader, strict=False):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(private(inputs), targets, reduction="none"))
        optimizer.step()
    return engine


def lockstep(rank: int, size: int, bug: str | None) -> tuple[str, float]:
    with planted(bug):
        found = influence(trained, data(), examples=["large"], among="own", lots=4)
    return found.verdict, found.value


def test_one_example_moves_a_release_of_two_processes_by_at_most_the_bound(tmp_path: Path) -> None:
    for verdict, value in values(2, tmp_path, lockstep, None):
        assert verdict == "within"
        assert 0.5 < value <= 1 + 1e-3


def test_an_example_that_counts_in_both_processes_is_caught(tmp_path: Path) -> None:
    for verdict, value in values(2, tmp_path, lockstep, "the whole lot on every process"):
        assert verdict == "exceeded"
        assert value > 1.5


# ---- an audit: is one example in the data? ---------------------------------------------------------------------------

OTHERS, NOISE, DELTA = 8, 4.0, 1e-5


class Canary:
    """One released gradient over everybody; all but the canary have none."""

    name, canaries = "one-example", ("canary",)

    def released(self, inside: bool, seed: int | None) -> tuple[PrivacyEngine, torch.Tensor]:
        inputs = torch.zeros(OTHERS, 4)
        inputs[OTHERS - 1, 0] = 1e6 * inside
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine = PrivacyEngine(seed=seed)
        private, optimizer, loader = engine.make_private(
            module=DistributedDataParallel(model),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(inputs), batch_size=OTHERS),  # each example is in the lot
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
        )
        for (batch,) in loader:
            optimizer.backward(private(batch)[:, 0])
            optimizer.step()
        assert model.weight.grad is not None
        return engine, OTHERS * model.weight.grad[0]

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        found = float(self.released(inside, seed)[1][0])
        return Transcript({"coordinate": found}, (found,))


def audited(rank: int, size: int, bug: str | None) -> str:
    with planted(bug):
        engine, _ = Canary().released(True, 0)
        guarantee, composition = engine.guarantee(DELTA), engine._open().composition()
        promise = of_guarantee(composition, guarantee.require(), DELTA, guarantee.neighbours)
        finding = many_runs.run(Canary(), promise.claim, trials=40, confidence=0.95, seed=1)
    if not finding.errors.contradicts(promise.claim):
        return "consistent"
    assert finding.confirmation is not None
    return "violated" if finding.confirmation.contradicts(promise.claim) else "suspicious"


def test_an_audit_of_two_processes_is_consistent(tmp_path: Path) -> None:
    assert values(2, tmp_path, audited, None) == ["consistent"] * 2


def test_an_audit_finds_that_the_noise_is_missing(tmp_path: Path) -> None:
    assert values(2, tmp_path, audited, "noise on no process") == ["violated"] * 2
