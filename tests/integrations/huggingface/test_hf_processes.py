"""Private trainers under torchrun: two processes make the run of one, on one ledger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.team import values
from integrations.huggingface.tiny import (
    COUNT,
    DELTA,
    LOT,
    STEPS,
    Rows,
    arguments,
    gpt2,
    texts,
    transformers,
    untried,
    weights,
)
from torch.utils.data import DataLoader

from adadp import PrivacyEngine, losses
from adadp.accounting.ledger import Ledger
from adadp.checks.schedule import Schedule
from adadp.integrations.huggingface import private

accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")

PrivateTrainer = private(transformers.Trainer)
PERSONS = [row // 2 for row in range(COUNT)]


def under_torchrun(rank: int, size: int) -> None:
    """The environment that torchrun gives, and no trials, which other tests make."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    Schedule.due = Schedule.any_due = lambda self, *_: False  # type: ignore[method-assign,assignment]


def trainer(folder: Path, *, processes: int = 1, model: Any = None, **more: Any) -> Any:
    """The same lot however many processes there are."""
    settings = {"per_device_train_batch_size": LOT // processes, **more.pop("settings", {})}
    given = {"noise_multiplier": 1.0, "target_delta": DELTA, **more}
    data, model = texts(), gpt2() if model is None else model
    return PrivateTrainer(model=model, args=arguments(folder, **settings), train_dataset=data, **given)


def evaluated() -> Rows:
    columns = texts(10).columns
    return Rows(**{name: column.roll(1, 1) for name, column in columns.items()})


CASES: dict[str, dict[str, Any]] = {
    "pieces, evaluated in between": {
        "seed": 3,
        "max_physical_batch_size": 2,
        "eval_dataset": evaluated(),
        "settings": {"eval_strategy": "steps", "eval_steps": 1},
    },
    "persons": {"seed": 4, "unit": PERSONS},
}


def train_each(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every case, and what goes on over several calls."""
    under_torchrun(rank, size)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        made = trainer(Path(folder) / name, processes=size, **case)
        made.train()
        made.save_model()
        found[name] = weights(made.model), made.guarantee.require(), made.state.global_step
    found["accelerate"] = {order: weights(by_accelerate(order)) for order in ("before", "after")}
    found["a new head"] = _heads(Path(folder), rank, size)
    found["budget"] = _until_the_budget(Path(folder), size)
    found["resumed"] = _resumed(Path(folder), size)
    return found


def by_accelerate(order: str) -> torch.nn.Module:
    """A loop of one's own, prepared by accelerate before or after it is made private."""
    accelerator, model = accelerate.Accelerator(cpu=True), gpt2()
    if order == "before":
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ordinary = DataLoader(texts(), batch_size=LOT, collate_fn=transformers.default_data_collator)
    parts = PrivacyEngine(seed=6).make_private(
        module=model, optimizer=optimizer, data_loader=ordinary, noise_multiplier=1.0, max_physical_batch_size=2
    )
    model, stepped, loader = parts if order == "before" else accelerator.prepare(*parts)
    for batch in loader:
        stepped.zero_grad()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        rows = losses.causal_lm(logits, batch["labels"])
        (stepped if order == "before" else stepped.optimizer).backward(rows)
        stepped.step()
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


def _heads(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(rank)  # as where each process makes a new head at random
    made = trainer(folder / "heads", processes=size, model=model, seed=3)
    made.train()
    return weights(made.model)


def _until_the_budget(folder: Path, size: int) -> tuple[int, float]:
    kept = {"ledger": str(folder / "budget.jsonl"), "dataset": "tickets"}
    made = trainer(folder / "budget", processes=size, target_epsilon=6.0, settings={"max_steps": 100}, **kept)
    made.train()
    return made.state.global_step, made.guarantee.require()


def _resumed(folder: Path, size: int) -> tuple[int, float]:
    given: dict[str, Any] = {"ledger": str(folder / "resumed.jsonl"), "dataset": "tickets", "target_epsilon": 8.0}
    given |= {"noise_multiplier": None, "settings": {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}}
    given["processes"] = size
    made = trainer(folder / "resumed", callbacks=[_StopsAfter(3)], **{**given, "settings": dict(given["settings"])})
    made.train()
    made = trainer(folder / "resumed", **given)
    made.train(resume_from_checkpoint=str(folder / "resumed" / "checkpoint-2"))
    return made.state.global_step, made.guarantee.require()


class _StopsAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("team")
    return folder, values(2, folder, train_each, str(folder))


Trained = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_run_of_one(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    untried(monkeypatch)
    alone = trainer(tmp_path, **{**CASES[name], "settings": dict(CASES[name].get("settings", {}))})
    alone.train()
    first, second = (found[name] for found in trained[1])
    assert first[1:] == second[1:] == (alone.guarantee.require(), STEPS)
    for key, value in weights(alone.model).items():
        assert torch.equal(first[0][key], second[0][key])
        assert torch.allclose(first[0][key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_may_prepare_before_and_after(trained: Trained, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    untried(monkeypatch)
    alone = weights(by_accelerate(order))
    first, second = (found["accelerate"][order] for found in trained[1])
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, rtol=0, atol=1e-5)


def test_every_process_begins_with_the_weights_of_the_first(trained: Trained) -> None:
    first, second = (found["a new head"] for found in trained[1])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_main_process_saves_model_card_and_checkpoints(trained: Trained) -> None:
    folder = trained[0] / "pieces, evaluated in between"
    assert (folder / "README.md").read_text().count("## Privacy") == 1
    assert (folder / "model.safetensors").exists()
    saved = trained[0] / "resumed" / "checkpoint-2"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 2
    assert (saved / "adadp.pt").exists()
    assert not list(saved.glob("rng_state*"))


def test_the_budget_ends_training_in_all_processes(trained: Trained) -> None:
    (steps, epsilon), other = (found["budget"] for found in trained[1])
    assert (steps, epsilon) == other
    assert 1 < steps < 100
    assert epsilon <= 6.0
    assert sum(count for _, count in Ledger(trained[0] / "budget.jsonl").charged()) == steps


def test_a_run_of_two_processes_goes_on_from_its_checkpoint(trained: Trained) -> None:
    first, second = (found["resumed"] for found in trained[1])
    assert first == second
    steps, epsilon = first
    assert epsilon <= 8.0
    # Of four planned lots the third was made before the interruption, and again: it is charged twice.
    assert steps == 3
    assert sum(count for _, count in Ledger(trained[0] / "resumed.jsonl").charged()) == 4
