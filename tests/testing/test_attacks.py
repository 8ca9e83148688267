"""Loops in other libraries' hands, over several runs, and those whose fault hardly shows: found, or refused.

The loops of `tests/soundness/field/README.md` that `test_influence.py` does not have. What the engine refuses needs no
test to find it, and the verdict says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from adadp import PrivacyEngine
from adadp.checks.inputs import StaleOutputs
from adadp.checks.trial import Trial
from adadp.gradients import Capture
from adadp.testing import influence, spending
from testing import loops
from testing.loops import answers, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore::adadp.errors.ModelNotice")

Loss = Callable[[Any, Any], Tensor]


@pytest.fixture
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    found.logging.set_verbosity_error()
    return found


# ---- losses in the loop ---------------------------------------------------------------------------------------------


def worst_of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").max()


def shuffled_negatives(model: nn.Module, batch: Any) -> Tensor:
    """Each example against its neighbour in the batch."""
    return F.softplus(model(batch[0].roll(1, 0)) - model(batch[0])).mean()


def shuffled_negatives_alone(model: nn.Module, batch: Any) -> Tensor:
    return (F.softplus(model(batch[0].roll(1, 0))) + F.softplus(-model(batch[0]))).mean()


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


LOSSES: dict[str, tuple[Any, Any, str, str]] = {
    "the worst of the batch": (trainer(worst_of_the_batch), rows(), "large", "alike"),
    "a mean taken for a sum": (trainer(loss_reduction="sum"), rows(), "huge", "alike"),
    "with a criterion that is right": (
        trainer(loops.token_mean, loops.LM, criterion=nn.CrossEntropyLoss), answers(), "every label counts", "alike",
    ),
    "negatives from the batch": (
        trainer(shuffled_negatives_alone, lambda: nn.Linear(6, 1, bias=False)), rows(), "huge", "alike",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_mixes_is_found(name: str) -> None:
    train, data, example, among = LOSSES[name]
    found = influence(train, data, examples=[example], among=among)
    assert found.exceeded, str(found)
    assert found.epsilon is not None


def test_examples_that_change_each_other_are_found_although_no_release_moves_far() -> None:
    """With pairs of neighbours in the batch what one example changes is hardly ever more than 1."""
    found = influence(trainer(shuffled_negatives, critic), rows(), examples=["opposite"], among="own")
    assert found.value <= found.bound
    assert found.verdict == "mixed", str(found)
    assert "changes with this one" in found.why
    assert "no proof" in str(found)


def test_fixed_lots_tell_others_from_the_one_that_is_replaced() -> None:
    for loss, verdict in ((shuffled_negatives, "mixed"), (_own_pair, "within")):
        found = influence(trainer(loss, critic, sampling="fixed"), rows(), examples=["opposite"], among="own")
        assert found.verdict == verdict, str(found)


def _own_pair(model: nn.Module, batch: Any) -> Tensor:
    return F.softplus(model(batch[0] + 1) - model(batch[0])).mean()


# ---- other libraries' loops -----------------------------------------------------------------------------------------

WORDS, LENGTH = 20, 12


def prompts() -> TensorDataset:
    words = torch.randint(1, WORDS, (40, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(words, -100)
    labels[:, -2:] = words[:, -2:]
    return TensorDataset(words, labels)


def as_dicts() -> list[dict[str, Tensor]]:
    return [{"input_ids": words, "labels": labels} for words, labels in prompts()]


def llama(transformers: Any) -> nn.Module:
    settings = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(settings)


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss


def over_all_words(model: Any, batch: Any) -> Tensor:
    """The same mean, in the loop: nobody sees it there."""
    words, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else batch
    return F.cross_entropy(model(input_ids=words).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def over_own_words(model: Any, batch: Any) -> Tensor:
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


@pytest.mark.parametrize(("loss", "verdict"), [(own_loss, "refused"), (over_all_words, "exceeded")])
def test_a_language_model_with_a_mean_over_words(loss: Loss, verdict: str, transformers: Any) -> None:
    train = trainer(loss, lambda: llama(transformers))
    found = influence(train, prompts(), examples=["every label counts"], among="alike")
    assert found.verdict == verdict, str(found)


def in_trainer(transformers: Any, folder: Path, loss: Loss | None) -> Callable[[Any], None]:
    """Hugging Face's Trainer around a private loader and optimizer."""

    def train(dataset: Any) -> None:
        model = llama(transformers)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
            data_loader=DataLoader(dataset, batch_size=8),
        )  # fmt: skip

        class Private(transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                return loader

            def compute_loss(self, model: Any, inputs: Any, **settings: Any) -> Any:
                return super().compute_loss(model, inputs, **settings) if loss is None else loss(model, inputs)

        arguments = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=8, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        Private(model=model, args=arguments, train_dataset=dataset, optimizers=(optimizer, None)).train()

    return train


@pytest.mark.parametrize(
    ("loss", "verdict"), [(None, "refused"), (over_all_words, "exceeded"), (over_own_words, "within")]
)
def test_inside_trainer(loss: Loss | None, verdict: str, transformers: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    train = in_trainer(transformers, tmp_path, loss)
    found = influence(train, as_dicts(), examples=["every label counts"], among="alike")
    assert found.verdict == verdict, str(found)


@pytest.mark.parametrize(
    ("loss", "steps", "verdict"),
    [
        (loops.cross_entropy, 1, "within"),
        (loops.class_weights, 1, "exceeded"),
        (loops.cross_entropy, 2, "refused"),
    ],
)
def test_inside_accelerate(loss: Loss, steps: int, verdict: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def train(dataset: Any) -> None:
        model = nn.Linear(6, 4)
        helper = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        made = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
            data_loader=DataLoader(dataset, batch_size=8),
        )  # fmt: skip
        model, optimizer, loader = helper.prepare(*made)
        for _ in range(2):
            for batch in loader:
                with helper.accumulate(model):
                    optimizer.zero_grad()
                    helper.backward(loss(model, batch))
                    optimizer.step()

    found = influence(train, rows(), examples=["other class"], among="alike")
    assert found.verdict == verdict, str(found)


# ---- state ----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Takes and gives states of [n, h], one row an example as it seems."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.recurrent, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, words: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, state = self.recurrent(self.table(words), state.unsqueeze(0))
        return self.head(outputs), state[0]


def handing_on(dataset: Any) -> None:
    model: Any = Recurrent()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, sampling="fixed",
        data_loader=DataLoader(dataset, batch_size=8),
    )  # fmt: skip
    state = torch.zeros(8, 8)
    for _ in range(2):
        for (words,) in loader:
            optimizer.zero_grad()
            outputs, state = model(words, state)
            state = state.detach()
            F.cross_entropy(outputs[:, :-1].transpose(1, 2), words[:, 1:]).backward()
            optimizer.step()


def test_a_state_that_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sees it; where it does not, lots that do not hold the example show it."""
    words = TensorDataset(torch.randint(20, (40, 6), generator=torch.Generator().manual_seed(1)))
    assert influence(handing_on, words, examples=["ordinary"], among="own").verdict == "refused"
    monkeypatch.setattr(StaleOutputs, "note", lambda *arguments: None)
    monkeypatch.setattr(Trial, "before_call", lambda *arguments: None)
    monkeypatch.setattr(Capture, "sure", False)
    found = influence(handing_on, words, examples=["ordinary"], among="own")
    assert found.exceeded, str(found)
    assert "not in this lot" in found.why


# ---- items that are in no lot, or in several ------------------------------------------------------------------------


def with_a_hold_out(decide: Callable[[float, list[float], Any], bool]) -> Callable[[Any], None]:
    """A part of the private rows is kept for validation."""

    def train(dataset: Any) -> None:
        part, kept = Subset(dataset, range(32)), Subset(dataset, range(32, 48))
        _, model, optimizer, loader = private(part, nn.Linear(6, 4))
        seen: list[float] = []
        for _ in range(4):
            one_epoch(model, optimizer, loader)
            with torch.no_grad():
                batch = next(iter(DataLoader(kept, batch_size=len(kept))))
                if decide(float(loops.cross_entropy(model, batch)), seen, optimizer):
                    break

    return train


def no_better(loss: float, seen: list[float], optimizer: Any) -> bool:
    seen.append(loss)
    return not loss <= min(seen)


def follow(loss: float, seen: list[float], optimizer: Any) -> bool:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + loss)
    return False


def watch_only(loss: float, seen: list[float], optimizer: Any) -> bool:
    return False


@pytest.mark.parametrize(("decide", "verdict"), [(no_better, "exceeded"), (follow, "exceeded"), (watch_only, "within")])
def test_a_hold_out_of_the_private_rows_decides(decide: Any, verdict: str) -> None:
    found = influence(with_a_hold_out(decide), rows(), examples=["large"], among="own", lots=12)
    assert found.verdict == verdict, str(found)
    assert [effect.example for effect in found.effects] == ["large", "large (held out)"]
    if verdict == "exceeded":
        assert found.example == "large (held out)"


def test_an_item_that_is_in_no_lot_moves_nothing_in_a_right_loop() -> None:
    train = trainer(wrap=lambda dataset: Subset(dataset, range(10, 40)))
    found = influence(train, rows(), examples=[3], among="own")
    assert found.verdict == "within", str(found)
    assert found.value == 0


class Pasted(Dataset[Any]):
    """Half of each item comes from another one that is drawn."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.dataset[index]
        other, _ = self.dataset[int(torch.randint(len(self), ()))]
        return torch.cat([inputs[:3], other[3:]]), label


@pytest.mark.parametrize("kind", ["tensors", "list", "other"])
def test_one_item_that_is_read_for_several_is_found(kind: str) -> None:
    data: Any = rows()
    data = data if kind == "tensors" else list(data) if kind == "list" else loops.Retry(data)
    found = influence(trainer(wrap=Pasted), data, examples=["ordinary"], among="own", lots=4)
    assert found.verdict in ("mixed", "exceeded"), str(found)
    assert "read for several items" in found.effects[0].mixed
    assert influence(trainer(), data, examples=["ordinary"], among="own", lots=4).verdict == "within"


# ---- several runs ---------------------------------------------------------------------------------------------------


def private(rows_: Any, model: nn.Module, **settings: Any) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine = PrivacyEngine(**settings)
    made = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), noise_multiplier=1.0,
        data_loader=DataLoader(rows_, batch_size=8),
    )  # fmt: skip
    return engine, *made


def one_epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        loops.cross_entropy(model, batch).backward()
        optimizer.step()


def resumed(*, with_optimizer: bool) -> Callable[[Any], None]:
    """Two sessions, with a checkpoint between them that goes through a file."""

    def train(dataset: Any) -> None:
        checkpoint: Any = None
        for _ in range(2):
            engine, model, optimizer, loader = private(dataset, nn.Linear(6, 4))
            if checkpoint is not None:
                model.load_state_dict(checkpoint["model"])
                if with_optimizer:
                    optimizer.load_state_dict(checkpoint["optimizer"])
            one_epoch(model, optimizer, loader)
            engine.get_epsilon(1e-5)
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            buffer.seek(0)
            checkpoint = torch.load(buffer)

    return train


def test_a_run_that_is_resumed_is_paid_for_where_its_state_comes_along() -> None:
    """No release is wrong, so that `influence` has nothing to find; the number is what may be."""
    found = spending(resumed(with_optimizer=True), rows())
    assert found.passed, str(found)
    assert found.largest == pytest.approx(found.total, rel=1e-3)
    alone = spending(resumed(with_optimizer=False), rows())
    assert not alone.passed
    assert alone.runs == 2
    assert "load a checkpoint with its optimizer's state" in str(alone)


def test_weights_that_were_trained_before_without_privacy_are_found() -> None:

    def train(dataset: Any) -> None:
        model = nn.Linear(6, 4)
        plain = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(5):
            for batch in DataLoader(dataset, batch_size=len(dataset)):
                plain.zero_grad()
                loops.cross_entropy(model, batch).backward()
                plain.step()
        one_epoch(*private(dataset, model)[1:])

    found = influence(train, rows(), examples=["opposite"], among="own")
    assert found.exceeded, str(found)
    assert "was not released" in found.why


def sweep(**settings: Any) -> Callable[[Any], None]:
    def train(dataset: Any) -> None:
        for _ in range(2):
            engine, *made = private(dataset, nn.Linear(6, 4), **settings)
            one_epoch(*made)
            engine.close()

    return train


def test_engines_without_a_ledger_are_not_added_up_and_with_one_they_are(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    apart, together = spending(sweep(), rows()), spending(sweep(ledger=path, dataset="d"), rows())
    assert not apart.passed
    assert together.passed, str(together)
    assert together.total == pytest.approx(apart.total)
    assert not path.exists()  # a test charges nobody
