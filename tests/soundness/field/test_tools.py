"""Loops that others wrote: Hugging Face's models and Trainer, and accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import PrivacyError, TrainingLoopError
from soundness.field.stand import DELTA, Bounded, NoNumber, Refused, World, by_example, compare, end, run

WORDS, LENGTH, COUNT = 20, 24, 32


@pytest.fixture(scope="module")
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    found.logging.set_verbosity_error()
    return found


@pytest.fixture(scope="module")
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="accelerate is not installed")


# ---- models that compute their loss -------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(transformers: Any) -> nn.Module:
    settings = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=LENGTH, **SMALL
    )
    return transformers.LlamaForCausalLM(settings)


def gpt2(transformers: Any) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **dropout
    )
    return transformers.GPT2LMHeadModel(settings)


def bert(transformers: Any) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SMALL, **dropout)
    return transformers.BertForMaskedLM(settings)


def answers(long: bool) -> TensorDataset:
    """Everybody's last word is labelled; in one of the worlds there is one more, all of whose words are."""
    words = torch.randint(1, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(1)).repeat(COUNT + 1, 1)
    labels = torch.full_like(words, -100)
    labels[:COUNT, -1] = 3
    labels[COUNT] = words[COUNT]
    count = COUNT + long
    return TensorDataset(words[:count], labels[:count])


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss


def over_own_words(model: Any, batch: Any) -> Tensor:
    """The way out, [n]: the labels stay outside."""
    logits = model(input_ids=batch[0]).logits[:, :-1]
    labels = batch[1][:, 1:]
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1) / (labels != -100).sum(
        1
    ).clamp(min=1)


@pytest.mark.parametrize("make", [llama, gpt2, bert], ids=lambda make: make.__name__)
def test_a_models_own_mean_over_words_is_refused(make: Callable[[Any], nn.Module], transformers: Any) -> None:
    ended = end(answers(True), answers(False), lambda: make(transformers), own_loss, bounds=(4.0,))
    assert isinstance(ended, Refused | NoNumber), ended


def test_losses_by_example_of_a_language_model_are_right(transformers: Any) -> None:
    ended = end(answers(True), answers(False), lambda: llama(transformers), over_own_words, by_example, bounds=(4.0,))
    assert isinstance(ended, Bounded), ended


def test_a_classifiers_own_loss_is_not_refused(transformers: Any) -> None:
    """A mean over examples of one label each, computed inside the model: right."""
    settings = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=0, num_labels=2, **SMALL
    )
    words = torch.randint(1, WORDS, (COUNT, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(COUNT) % 2
    worlds = [TensorDataset(words[:count], labels[:count]) for count in (COUNT, COUNT - 1)]
    ended = end(*worlds, lambda: transformers.LlamaForSequenceClassification(settings), own_loss, bounds=(0.1,))
    assert isinstance(ended, Bounded), ended


# ---- BatchEncoding ------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, mixing: bool = True) -> None:
        super().__init__()
        self.head, self.mixing = nn.Linear(8, 4), mixing

    def forward(self, batch: Any) -> Tensor:
        inputs = batch["inputs"]
        return self.head(functional.batch_norm(inputs, None, None, training=True) if self.mixing else inputs)


@pytest.mark.parametrize("mixing", [True, False])
def test_a_batch_encoding_is_looked_into(mixing: bool, transformers: Any) -> None:
    inputs = torch.randn(COUNT + 1, 8, generator=torch.Generator().manual_seed(0))
    inputs[-1] = 1e3
    targets = torch.zeros(COUNT + 1, dtype=torch.long)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(transformers.BatchEncoding({"inputs": batch[0]})), batch[1])

    worlds = [TensorDataset(inputs[:count], targets[:count]) for count in (COUNT + 1, COUNT)]
    ended = end(*worlds, lambda: Normalised(mixing), loss, bounds=(0.3,))
    assert isinstance(ended, (Refused | NoNumber) if mixing else Bounded), ended


# ---- Trainer ------------------------------------------------------------------------------------------------------


def in_trainer(transformers: Any, folder: Path) -> Callable[[World], None]:
    """Trainer around a private loader and optimizer."""

    class Private(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.private_loader

    def loop(world: World) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=1,
            per_device_train_batch_size=world.lot,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        trainer = Private(
            model=world.model,
            args=arguments,
            train_dataset=world.loader.dataset,
            optimizers=(world.optimizer, None),
        )
        trainer.private_loader = world.loader
        trainer.train()

    return loop


class Named(torch.utils.data.Dataset[Any]):
    """Items by name, as Trainer wants them."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, labels = self.data[index]
        return {"input_ids": words, "labels": labels}


def test_trainers_mean_over_words_is_refused(transformers: Any, accelerate: Any, tmp_path: Path) -> None:
    worlds = [
        run(Named(answers(long)), lambda: llama(transformers), loop=in_trainer(transformers, tmp_path), bound=4.0)
        for long in (True, False)
    ]
    ended = compare(*worlds)
    assert isinstance(ended, Refused | NoNumber), ended


# ---- accelerate ---------------------------------------------------------------------------------------------------


def accelerated(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch, *, first: bool = False, accumulate: int = 1, **settings: Any
) -> PrivacyEngine:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
    model: Any = nn.Linear(6, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(data, batch_size=8)
    by = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    engine = PrivacyEngine(seed=3)
    if first:
        model, optimizer, loader = by.prepare(model, optimizer, loader)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, **settings
    )
    if not first:
        model, optimizer, loader = by.prepare(model, optimizer, loader)
    try:
        for inputs, targets in loader:
            with by.accumulate(model):
                optimizer.zero_grad()
                by.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()
    except TrainingLoopError:
        assert engine.guarantee(DELTA).epsilon is None
        raise
    return engine


@pytest.mark.parametrize("settings", [{}, {"pad_lots": True}], ids=["unpadded", "padded"])
def test_accelerate_after_make_private_is_right(
    settings: dict[str, Any], accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = accelerated(accelerate, monkeypatch, **settings)
    guarantee = engine.guarantee(DELTA)
    assert guarantee.epsilon is not None
    assert "8 steps" in guarantee.sampling


def test_accelerate_before_make_private_is_refused(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivacyError):
        accelerated(accelerate, monkeypatch, first=True)


def test_accelerates_accumulation_is_refused(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingLoopError):
        accelerated(accelerate, monkeypatch, accumulate=2)
