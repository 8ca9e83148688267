"""A private run that was interrupted goes on from the trainer's own checkpoints, and nothing is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integrations.huggingface.tiny import DELTA, arguments, assert_same, gpt2, texts, transformers, untried
from torch import nn

from adadp.errors import CheckpointError, ConfigurationError
from adadp.integrations.huggingface import private

PrivateTrainer = private(transformers.Trainer)
STEPS, SAVED = 6, 2


class Crash(transformers.TrainerCallback):
    """The process dies after this step, or just after its checkpoint, if there is one."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after and state.global_step % SAVED:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)


def trainer(folder: Path, model: nn.Module, steps: int = STEPS, crash: int | None = None, **more: Any) -> Any:
    args = arguments(
        folder / "out",
        max_steps=steps,
        save_strategy="steps",
        save_steps=SAVED,
        optim="adamw_torch",
        learning_rate=0.01,
    )
    callbacks = [] if crash is None else [Crash(crash)]
    given = {"target_epsilon": 4.0, "target_delta": DELTA, **more}
    return PrivateTrainer(model=model, args=args, train_dataset=texts(), callbacks=callbacks, **given)


def interrupted(folder: Path, after: int, **more: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(folder, gpt2(), crash=after, **more).train()


def durable(folder: Path) -> dict[str, Any]:
    return {"ledger": str(folder / "spent.jsonl"), "dataset": "tickets"}


@pytest.mark.parametrize("kept", [False, True], ids=["ledger in memory", "ledger in a file"])
def test_a_resumed_run_keeps_noise_and_plan(kept: bool, tmp_path: Path) -> None:
    """Interrupted just after a checkpoint: the plan is charged once, with the noise that it had."""
    more = durable(tmp_path) if kept else {}
    whole = trainer(tmp_path / "whole", gpt2())
    whole.train()
    interrupted(tmp_path, SAVED, **more)
    found = trainer(tmp_path, gpt2(), **more)
    assert found.train(resume_from_checkpoint=True).global_step == STEPS
    assert not list(tmp_path.glob("out/checkpoint-*/rng_state*"))
    assert found.guarantee.epsilon == pytest.approx(whole.guarantee.epsilon)
    assert found.guarantee.sampling == whole.guarantee.sampling
    rates = [entry["learning_rate"] for entry in found.state.log_history if "learning_rate" in entry]
    assert rates == [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]


def test_lots_after_the_checkpoint_are_charged_again(tmp_path: Path) -> None:
    """With a noise of one's own they come on top; with a target they use it up earlier."""
    more = {"target_epsilon": None, "noise_multiplier": 1.0, **durable(tmp_path)}
    interrupted(tmp_path, 3, **more)
    found = trainer(tmp_path, gpt2(), **more)
    found.train(resume_from_checkpoint=True)
    assert f"{STEPS + 1} steps" in found.guarantee.sampling


def test_a_seed_resumes_bit_for_bit(tmp_path: Path) -> None:
    start = gpt2()
    whole, resumed = gpt2(), gpt2()
    trainer(tmp_path / "whole", whole, seed=3, **durable(tmp_path)).train()
    more = {"seed": 4, **durable(tmp_path / "out")}
    (tmp_path / "out").mkdir()
    interrupted(tmp_path, 3, **more)
    found = trainer(tmp_path, resumed, **more)
    found.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{SAVED}"))
    reference = gpt2()
    again = {"seed": 4, "ledger": str(tmp_path / "again.jsonl"), "dataset": "tickets"}
    trainer(tmp_path / "again", reference, **again).train()
    assert_same(reference, resumed, start)
    assert f"{STEPS} steps" in found.guarantee.sampling


def test_the_same_trainer_may_resume(tmp_path: Path) -> None:
    found = trainer(tmp_path, gpt2())
    found.add_callback(crash := Crash(3))
    with pytest.raises(KeyboardInterrupt):
        found.train()
    crash.after = 99
    assert found.train(resume_from_checkpoint=True).global_step >= SAVED
    assert found.guarantee.epsilon <= 4.0


def test_training_on_is_another_run_on_top(tmp_path: Path) -> None:
    more = {"target_epsilon": None, "noise_multiplier": 1.0, **durable(tmp_path)}
    trainer(tmp_path, gpt2(), steps=4, **more).train()
    found = trainer(tmp_path, gpt2(), steps=6, **more)
    assert found.train(resume_from_checkpoint=True).global_step == 6
    assert "6 steps" in found.guarantee.sampling
    with pytest.raises(ConfigurationError, match="all 6 steps were made already"):
        trainer(tmp_path, gpt2(), steps=6, **more).train(resume_from_checkpoint=True)


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=2)
    transformers.Trainer(model=gpt2(), args=args, train_dataset=texts()).train()
    with pytest.raises(CheckpointError, match="is not the checkpoint of a private trainer"):
        trainer(tmp_path, gpt2()).train(resume_from_checkpoint=True)


def test_another_ledger_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 3, **durable(tmp_path))
    other = {"ledger": str(tmp_path / "other.jsonl"), "dataset": "tickets"}
    with pytest.raises(CheckpointError, match="does not hold the run of this checkpoint"):
        trainer(tmp_path, gpt2(), **other).train(resume_from_checkpoint=True)
