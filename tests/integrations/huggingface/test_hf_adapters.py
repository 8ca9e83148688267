"""Adapters, low precision, checkpointed activations and compiled models inside a private Trainer; accelerate alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.huggingface.tiny import (
    COUNT,
    DELTA,
    LOT,
    NOISE,
    Rows,
    arguments,
    assert_same,
    gpt2,
    own_loop,
    texts,
    transformers,
    twins,
    untried,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from adadp import PrivacyEngine, losses
from adadp.integrations.huggingface import private

Trainer = private(transformers.Trainer)


def lora(model: nn.Module, **more: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, **more}
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def trainer(
    folder: Path, model: nn.Module, data: Any = None, settings: dict[str, Any] | None = None, **more: Any
) -> Any:
    given = {"noise_multiplier": NOISE, "target_delta": DELTA, "seed": 5, **more}
    args = arguments(folder, **(settings or {}))
    return Trainer(model=model, args=args, train_dataset=texts() if data is None else data, **given)


def lm_losses(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return losses.causal_lm(logits, batch["labels"])


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_equal_a_loop_of_ones_own(dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    start = lora(gpt2(), use_dora=dora)
    mine, its = twins(start)
    own_loop(mine, texts(), lm_losses, seed=5)
    found = trainer(tmp_path, its)
    found.train()
    assert_same(mine, its, start)
    moved = [name for name, value in weights(its).items() if not torch.equal(value, start.state_dict()[name])]
    assert moved
    assert all("lora_" in name for name in moved)
    found.save_model(str(tmp_path / "adapter"))
    assert found.guarantee.sentence() in (tmp_path / "adapter" / "README.md").read_text()


def test_checkpointed_activations_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    start = lora(gpt2())
    plain, saving = twins(start)
    trainer(tmp_path, plain).train()
    saving.enable_input_require_grads()
    trainer(tmp_path, saving, settings={"activation_checkpointing": True}).train()
    assert_same(plain, saving, start)


def test_bfloat16_is_tried_as_it_is_rounded(tmp_path: Path) -> None:
    """With everything tried: autocast is inside the model's forward, where accelerate puts it."""
    start = gpt2()
    full, half = twins(start)
    trainer(tmp_path, half, settings={"bf16": True}).train()
    ahead = own_loop(full, texts(), lm_losses, seed=5)
    differences = [
        (one - other).abs().max() for one, other in zip(weights(full).values(), weights(half).values(), strict=True)
    ]
    assert 0 < max(differences) < 0.05  # of steps of 0.1
    assert ahead.guarantee(DELTA).epsilon is not None


def test_one_device_may_be_chosen_by_a_device_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    gpt2().save_pretrained(tmp_path / "start")
    start = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "start", device_map="auto")
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "start")
    before = copy.deepcopy(plain)
    trainer(tmp_path, start).train()
    own_loop(plain, texts(), lm_losses, seed=5)
    assert_same(plain, start, before)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_models(tmp_path: Path, backend: str) -> None:
    """Inductor makes code for each piece between the layers: two minutes for this model."""
    start = gpt2()
    plain, compiled = twins(start)
    trainer(tmp_path, plain).train()
    trainer(tmp_path, compiled, settings={"torch_compile": True, "torch_compile_backend": backend}).train()
    assert all(
        torch.allclose(one, other, atol=1e-5)
        for one, other in zip(weights(plain).values(), weights(compiled).values(), strict=True)
    )


# ---- accelerate without a trainer ---------------------------------------------------------------------------------


def test_accelerate_prepares_what_make_private_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is accelerate's own, with losses by example, equals the loop without it."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    data = Rows(features=torch.randn(COUNT, 4), labels=torch.arange(COUNT) % 2)

    def run(prepared: bool) -> tuple[nn.Module, PrivacyEngine]:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        engine = PrivacyEngine(seed=3)
        parts = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=LOT), noise_multiplier=NOISE,
            max_physical_batch_size=3,
        )  # fmt: skip
        model, optimizer, loader = accelerate.Accelerator(cpu=True).prepare(*parts) if prepared else parts
        private_optimizer = parts[1]
        for batch in loader:
            optimizer.zero_grad()
            rows = functional.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")
            private_optimizer.backward(rows)
            optimizer.step()
        return model, engine

    (one, first), (other, second) = run(False), run(True)
    assert torch.equal(one.weight, other.weight)
    assert first.guarantee(DELTA).epsilon == second.guarantee(DELTA).epsilon


def test_lots_of_numbers_may_be_skipped_and_fetched_ahead() -> None:
    """What accelerate and Trainer do to loaders does not reach the lots."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from adadp.integrations.huggingface.lots import LotNumbers

    state = torch.get_rng_state()
    assert len(list(LotNumbers(5))) == 5
    assert torch.equal(torch.get_rng_state(), state)  # dropout's stream goes on as without it
    assert len(list(accelerate.skip_first_batches(LotNumbers(5), 3))) == 2
