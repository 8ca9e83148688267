"""Tiny random models, texts and trainers for tests of private training inside Hugging Face's trainers."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, and TRL asks nobody
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers.logging.set_verbosity_error()

from adadp import PrivacyEngine  # noqa: E402
from adadp.checks.schedule import Schedule  # noqa: E402

gc.collect()
gc.freeze()  # train() collects garbage, which takes a second with all of transformers in memory

WORDS, LENGTH, COUNT, LOT = 23, 6, 24, 8
NOISE, DELTA, STEPS = 1.0, 1e-3, 3
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
Row = dict[str, Tensor]


class Rows(Dataset[Row]):
    """Items by name."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        return {name: column[index] for name, column in self.columns.items()}


def texts(count: int = COUNT) -> Rows:
    words = torch.randint(2, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[::2, : LENGTH // 2] = -100  # answers of unlike lengths
    return Rows(input_ids=words, attention_mask=torch.ones_like(words), labels=labels)


def gpt2(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **dropout, **more}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SPECIAL, **settings))


def arguments(folder: Path, kind: Any = None, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": LOT, "learning_rate": 0.1, "optim": "sgd",
        "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, **more,
    }  # fmt: skip
    return (kind or transformers.TrainingArguments)(output_dir=str(folder), **settings)


def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the engine's trials, which take seconds: for models that other tests try."""
    monkeypatch.setattr(Schedule, "due", lambda self, key, lot: False)
    monkeypatch.setattr(Schedule, "any_due", lambda self, lot: False)


def own_loop(
    model: nn.Module,
    data: Any,
    losses: Callable[[nn.Module, Any], Tensor],
    *,
    seed: int,
    steps: int = STEPS,
    largest: int | None = None,
    collate: Any = None,
    lr: float = 0.1,
) -> PrivacyEngine:
    """What a user would write without a trainer: SGD, and the linear schedule that Trainer has."""
    engine = PrivacyEngine(seed=seed)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    schedule = transformers.get_scheduler("linear", optimizer, 0, steps)
    collate = collate or transformers.default_data_collator
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=LOT, collate_fn=collate),
        noise_multiplier=NOISE,
        steps=steps,
        max_physical_batch_size=largest,
    )
    model.train()
    done = 0
    for batch in _forever(loader):
        optimizer.zero_grad()
        optimizer.backward(losses(model, batch))
        optimizer.step()
        if optimizer.stepped:
            schedule.step()
            done += 1
        if done == steps:
            engine.detach(model)
            return engine
    raise AssertionError("the loop ends above")


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module, before: nn.Module) -> None:
    """Both moved, by the same bits."""
    first, second, start = weights(one), weights(other), weights(before)
    assert any(not torch.equal(first[name], start[name]) for name in start)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(model), copy.deepcopy(model)
