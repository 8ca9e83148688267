"""An audit through a private Trainer: one very long text among short ones, in or out of the training set."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.huggingface.tiny import DELTA, Rows, arguments, gpt2, transformers, untried
from integrations.huggingface.tiny import texts as ordinary_texts
from torch import Tensor, nn

from adadp.audit import many_runs
from adadp.audit.attack import Transcript
from adadp.audit.promise import of_guarantee
from adadp.audit.verdict import CONSISTENT, VIOLATED
from adadp.errors import UnsupportedModuleError, UntriedWarning
from adadp.integrations.huggingface import private
from adadp.testing import influence

PrivateTrainer = private(transformers.Trainer)
WORDS, LENGTH, OTHERS, NOISE, BOUND = 12, 96, 40, 4.0, 4.0
TRIALS = 40


class TinyForCausalLM(nn.Module):
    """A language model whose own loss is a mean over all words of the batch, as transformers' models compute it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        flat, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": nn.functional.cross_entropy(flat, wanted, ignore_index=-100), "logits": logits}


class WithItsOwnLoss(PrivateTrainer):  # type: ignore[misc,valid-type]
    """The trainer's loss put back: what a mean over all words does to bounded gradients."""


def _own_loss_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    for batch in self._lots.next_lot():
        self._private.zero_grad()
        model(**batch)["loss"].backward()
        self._private.step()
    return torch.zeros(())


WithItsOwnLoss.training_step = _own_loss_step  # past the check that refuses a subclass with one


def texts(long: bool) -> Rows:
    """Of everybody's text one word counts; of the canary's all do."""
    words = torch.randint(1, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(1)).repeat(OTHERS + 1, 1)
    labels = torch.full_like(words, -100)
    labels[:, -1] = words[:, -1]
    labels[OTHERS] = words[OTHERS]
    count = OTHERS + 1 if long else OTHERS
    return Rows(input_ids=words[:count], labels=labels[:count])


@dataclass
class LongText:
    """Trains one step on everybody; the auditor sees the weights."""

    trainer: type[Any]
    folder: Path
    name: str = "long-text"
    canaries: tuple[str, ...] = ("long",)

    def trained(self, inside: bool, seed: int | None) -> Any:
        # Both worlds state the same public number of examples: each is in the lot.
        data = texts(inside)
        args = arguments(self.folder, max_steps=1, learning_rate=1.0, per_device_train_batch_size=len(data),
                         lr_scheduler_type="constant", logging_strategy="no")  # fmt: skip
        found = self.trainer(
            model=TinyForCausalLM(), args=args, train_dataset=data, noise_multiplier=NOISE, max_grad_norm=BOUND,
            target_delta=DELTA, seed=seed,
        )  # fmt: skip
        found.train()
        return found

    def trial(self, canary: str, inside: bool, seed: int | None) -> Transcript:
        found = self.trained(inside, seed)
        before = TinyForCausalLM()
        directions = {}
        for name, row in (("crowd", 0), ("canary", OTHERS)):
            data = texts(True)
            one = {key: column[row : row + 1] for key, column in data.columns.items()}
            directions[name] = torch.autograd.grad(before(**one)["loss"], list(before.parameters()))
        moved = [a - b for a, b in zip(before.parameters(), found.model.parameters(), strict=True)]
        count = OTHERS + inside  # the step was divided by the number of examples
        scores = {
            f"{name} {sign:+d}": sign
            * count
            * sum(float((m * d).detach().sum()) for m, d in zip(moved, direction, strict=True))
            for name, direction in directions.items()
            for sign in (1, -1)
        }
        return Transcript(scores, tuple(scores.values()))


def verdict(threat: LongText, trials: int) -> str:
    guarantee, composition = (found := threat.trained(True, 0)).guarantee, found.engine._open().composition()
    promise = of_guarantee(composition, guarantee.require(), DELTA, guarantee.neighbours)
    finding = many_runs.run(threat, promise.claim, trials=trials, confidence=0.95, seed=1)
    if not finding.errors.contradicts(promise.claim):
        return CONSISTENT
    assert finding.confirmation is not None
    return VIOLATED if finding.confirmation.contradicts(promise.claim) else "suspicious"


@pytest.fixture
def _checks_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checks are off."""
    untried(monkeypatch)
    monkeypatch.setattr(gc, "collect", lambda *args: 0)  # train() collects garbage, which takes most of a trial's time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntriedWarning)
        yield


@pytest.mark.usefixtures("_checks_off")
def test_a_long_text_hides_in_the_private_trainer(tmp_path: Path) -> None:
    assert verdict(LongText(PrivateTrainer, tmp_path), TRIALS) == CONSISTENT


@pytest.mark.usefixtures("_checks_off")
def test_with_its_own_loss_put_back_a_long_text_is_found(tmp_path: Path) -> None:
    assert verdict(LongText(WithItsOwnLoss, tmp_path), TRIALS) == VIOLATED


def test_with_the_checks_on_its_own_loss_is_refused(tmp_path: Path) -> None:
    threat = LongText(WithItsOwnLoss, tmp_path)
    with pytest.raises(UnsupportedModuleError, match="computes a loss inside that mixes examples"):
        threat.trained(True, None)


@pytest.mark.slow
def test_no_example_moves_a_release_by_more_than_its_bound(tmp_path: Path) -> None:
    def train(dataset: Any) -> None:
        args = arguments(tmp_path, max_steps=2)
        model, privacy = gpt2(n_layer=1), {"noise_multiplier": 1.0, "target_delta": DELTA}
        PrivateTrainer(model=model, args=args, train_dataset=dataset, **privacy).train()

    found = influence(train, ordinary_texts())
    assert found.verdict == "within"
    assert found.value == pytest.approx(1.0, abs=0.01)
