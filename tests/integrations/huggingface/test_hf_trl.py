"""TRL's SFTTrainer, made private."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.huggingface.tiny import (
    DELTA,
    NOISE,
    STEPS,
    WORDS,
    arguments,
    assert_same,
    gpt2,
    own_loop,
    transformers,
    twins,
    untried,
)

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
trl: Any = pytest.importorskip("trl", reason="trl is not installed")
datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")

from adadp import losses  # noqa: E402
from adadp.errors import ConfigurationError  # noqa: E402
from adadp.integrations.huggingface import private  # noqa: E402
from adadp.integrations.huggingface.trainer import PRIVATE_FIGURES  # noqa: E402

datasets.disable_progress_bars()
SFTTrainer = private(trl.SFTTrainer)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, WORDS))])
    }
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def conversations(count: int = 24) -> Any:
    """Prompts and completions of unlike lengths: only completions are trained on."""
    numbers = torch.randint(3, WORDS, (count, 8), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [[f"w{number}" for number in row] for row in numbers]
    return datasets.Dataset.from_dict({
        "prompt": [" ".join(row[:3]) for row in rows],
        "completion": [" " + " ".join(row[3 : 5 + place % 4]) for place, row in enumerate(rows)],
    })  # fmt: skip


def settings(folder: Path, **more: Any) -> Any:
    given = {"bf16": False, "gradient_checkpointing": False, "max_length": 16, **more}
    return arguments(folder, trl.SFTConfig, **given)


def trainer(folder: Path, model: Any = None, *, args: Any = None, **more: Any) -> Any:
    given = {"noise_multiplier": NOISE, "target_delta": DELTA, "seed": 5, "train_dataset": conversations(), **more}
    return SFTTrainer(
        model=gpt2() if model is None else model, args=args or settings(folder),
        processing_class=tokenizer(), **given,
    )  # fmt: skip


def test_a_private_sft_trainer_equals_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With evaluation in between, whose metrics TRL computes; of the training rows it logs none."""
    untried(monkeypatch)
    start = gpt2()
    mine, its = twins(start)
    args = settings(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=STEPS)
    found = trainer(tmp_path, its, args=args, eval_dataset=conversations(4), max_physical_batch_size=3)
    found.train()
    columns = [name for name in found.train_dataset.column_names if name in ("input_ids", "labels")]

    def words(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return losses.causal_lm(logits, batch["labels"])

    data = found.train_dataset.select_columns(columns)
    own_loop(mine, data, words, seed=5, largest=3, collate=found.data_collator)
    assert_same(mine, its, start)
    logged = {name for entry in found.state.log_history for name in entry}
    assert not logged & set(PRIVATE_FIGURES)
    assert "eval_loss" in logged
    for folder in (tmp_path, tmp_path / f"checkpoint-{STEPS}"):
        assert found.guarantee.sentence() in (folder / "README.md").read_text()


def test_with_adapters_bfloat16_and_checkpointing(tmp_path: Path) -> None:
    """As TRL does it unless told otherwise, with everything tried."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    args = settings(tmp_path, bf16=True, gradient_checkpointing=True)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    found = trainer(tmp_path, gpt2(n_positions=64), args=args, peft_config=config, target_epsilon=20.0)
    assert found.train().global_step == STEPS
    assert found.guarantee.epsilon is not None


@pytest.mark.parametrize(
    "more",
    [
        {"packing": True},
        {"padding_free": True, "max_length": None},
        {"loss_type": "dft"},
        {"activation_offloading": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_settings_of_trl_that_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"TrainingArguments\({next(iter(more))}="):
        trainer(tmp_path, args=settings(tmp_path, **more))


def test_persons_may_be_a_column_of_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    rows = conversations().add_column("customer", [f"c{place // 2}" for place in range(24)])
    args = settings(tmp_path, per_device_train_batch_size=4, max_steps=-1, num_train_epochs=1)
    found = trainer(tmp_path, args=args, train_dataset=rows, unit="customer")
    assert found.train().global_step == 12 // 4  # lots of persons
    assert found.guarantee.unit == "one person"
    with pytest.raises(ConfigurationError, match="is no column of train_dataset"):
        trainer(tmp_path, unit="patient").train()


def test_other_trainers_of_trl_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"DPOTrainer\.\w+ is its own"):
        private(trl.DPOTrainer)
