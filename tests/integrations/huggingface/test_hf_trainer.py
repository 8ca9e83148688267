"""A private Trainer: equal to a loop of one's own, and what it logs, saves and refuses."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.huggingface.tiny import (
    COUNT,
    DELTA,
    LOT,
    NOISE,
    SPECIAL,
    STEPS,
    WORDS,
    Rows,
    arguments,
    assert_same,
    gpt2,
    own_loop,
    texts,
    transformers,
    twins,
    untried,
)
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from adadp import losses
from adadp.errors import ConfigurationError, TrainingLoopError
from adadp.integrations.huggingface import private
from adadp.integrations.huggingface.trainer import PRIVATE_FIGURES
from adadp.mechanism.optimizer import BudgetWarning

Trainer = transformers.Trainer
PrivateTrainer = private(Trainer)


def trainer(folder: Path, model: nn.Module | None = None, data: Any = None, kind: Any = None, **more: Any) -> Any:
    args = more.pop("args", None) or arguments(folder, **more.pop("settings", {}))
    given = {"noise_multiplier": NOISE, "target_delta": DELTA, "seed": 5, **more}
    return (kind or PrivateTrainer)(
        model=gpt2() if model is None else model, args=args, train_dataset=texts() if data is None else data, **given
    )


def lm_losses(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return losses.causal_lm(logits, batch["labels"])


# ---- the same as a loop of one's own ------------------------------------------------------------------------------


def test_a_private_trainer_equals_a_loop_of_ones_own(tmp_path: Path) -> None:
    """With everything tried, and lots in pieces."""
    start = gpt2()
    mine, its = twins(start)
    engine = own_loop(mine, texts(), lm_losses, seed=5, largest=3)
    found = trainer(tmp_path, its, max_physical_batch_size=3)
    output = found.train()
    assert output.global_step == STEPS
    assert_same(mine, its, start)
    assert found.guarantee.epsilon == engine.guarantee(DELTA).epsilon
    assert f"{STEPS} steps" in found.guarantee.sampling


def test_evaluation_in_between_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    start = gpt2()
    quiet, looking = twins(start)
    trainer(tmp_path, quiet).train()
    found = trainer(
        tmp_path,
        looking,
        eval_dataset=texts(4),
        settings={"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    )
    found.train()
    assert_same(quiet, looking, start)
    evaluated = [entry for entry in found.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == STEPS + 1
    assert found.guarantee.epsilon is not None


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
            pad_token_id=0,
        )
    )  # fmt: skip


def labelled_texts() -> Rows:
    data = texts()
    return Rows(**{**data.columns, "labels": torch.arange(COUNT) % 3})


def test_a_classifier_with_smoothed_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    start = classifier()
    mine, its = twins(start)

    def smoothed(model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return losses.classification(logits, batch["labels"], label_smoothing=0.2)

    own_loop(mine, labelled_texts(), smoothed, seed=5)
    trainer(tmp_path, its, labelled_texts(), settings={"label_smoothing_factor": 0.2}).train()
    assert_same(mine, its, start)


def pairs() -> Rows:
    generator = torch.Generator().manual_seed(2)
    words, answers = (torch.randint(2, WORDS, (COUNT, 5), generator=generator) for _ in range(2))
    answers[::3, 3:] = -100
    return Rows(input_ids=words, attention_mask=torch.ones_like(words), labels=answers)


def t5() -> nn.Module:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **SPECIAL, vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0,
            relative_attention_num_buckets=8, decoder_start_token_id=0,
        )
    )  # fmt: skip


def test_seq2seq_trainer_with_generation_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    start = t5()
    mine, its = twins(start)

    def translated(model: Any, batch: Any) -> Tensor:
        given = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=given
        ).logits
        return losses.seq2seq(logits, batch["labels"])

    own_loop(mine, pairs(), translated, seed=5)
    args = arguments(
        tmp_path, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, eval_strategy="steps",
        eval_steps=2, generation_max_length=4,
    )  # fmt: skip
    found = trainer(tmp_path, its, pairs(), private(transformers.Seq2SeqTrainer), args=args, eval_dataset=pairs())
    found.train()
    assert_same(mine, its, start)


def test_a_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that are not transformers', too; evaluation has its mean."""
    untried(monkeypatch)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, features: Tensor) -> dict[str, Tensor]:
            return {"scores": self.layer(features)}

    data = Rows(features=torch.randn(COUNT, 4), labels=torch.arange(COUNT) % 2)
    start = Plain()
    mine, its = twins(start)
    own_loop(mine, data, lambda m, b: losses.classification(m(b["features"])["scores"], b["labels"]), seed=5)
    settings = {"remove_unused_columns": False, "label_names": ["labels"]}
    found = trainer(
        tmp_path, its, data, settings=settings, eval_dataset=Rows(**data.columns),
        per_example_loss=lambda outputs, batch: losses.classification(outputs["scores"], batch["labels"]),
    )  # fmt: skip
    found.train()
    assert_same(mine, its, start)
    assert 0 < found.evaluate()["eval_loss"] < 10


# ---- what is logged and saved -------------------------------------------------------------------------------------


def test_nothing_private_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    untried(monkeypatch)
    found = trainer(tmp_path, target_epsilon=50.0)
    output = found.train()
    assert math.isnan(output.training_loss)
    logged = {name for entry in found.state.log_history for name in entry}
    assert not logged & set(PRIVATE_FIGURES)
    assert {"learning_rate", "epsilon", "train_runtime"} <= logged
    assert "train_loss" not in output.metrics
    assert "'loss'" not in capsys.readouterr().out


def test_how_many_rows_persons_have_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer logs examples a second: times the seconds, that is the number of rows."""
    untried(monkeypatch)
    persons = [min(row, 11) for row in range(COUNT)]  # the last has many
    found = trainer(tmp_path, unit=persons, settings={"max_steps": -1, "num_train_epochs": 1})
    assert found.num_examples(found.get_train_dataloader()) == 12
    found.train()
    last = found.state.log_history[-1]
    assert last["train_samples_per_second"] / last["train_steps_per_second"] == pytest.approx(12, rel=0.1)


def test_a_loss_that_is_paid_for_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one coordinate of each step's release: with so little noise it is the mean of the lot's own losses."""
    untried(monkeypatch)
    model = gpt2()
    with torch.no_grad():
        whole = texts().columns
        expected = float(lm_losses(model, whole).mean())
    settings = {"per_device_train_batch_size": COUNT, "learning_rate": 0.0}
    found = trainer(
        tmp_path, model, settings=settings, logged_loss_most=8.0, noise_multiplier=1e-3, max_physical_batch_size=5
    )
    found.train()
    logged = [entry["loss"] for entry in found.state.log_history if "loss" in entry]
    assert logged == [pytest.approx(expected, abs=0.01)] * STEPS
    plain = trainer(tmp_path, noise_multiplier=1e-3, settings=settings)
    plain.train()
    assert plain.guarantee.sampling == found.guarantee.sampling  # the same events


def last_word_is_right(outputs: Any, inputs: Any) -> Tensor:
    return outputs.logits[:, -2].argmax(1) == inputs["labels"][:, -1]


def test_figures_that_are_paid_for_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so little noise they are the means over the lot, in pieces; the events are the same."""
    untried(monkeypatch)
    model, whole = gpt2(), texts().columns
    with torch.no_grad():
        outputs = model(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"])
        right = float(last_word_is_right(outputs, whole).double().mean())
        spread = float(outputs.logits.std((1, 2)).mean())
    settings = {"per_device_train_batch_size": COUNT, "learning_rate": 0.0, "logging_steps": STEPS}
    found = trainer(
        tmp_path, model, settings=settings, noise_multiplier=1e-3, max_physical_batch_size=5, logged_loss_most=8.0,
        logged_figures={
            "accuracy": (0, 1, last_word_is_right),
            "spread": (0, 2, lambda outputs, inputs: outputs.logits.std((1, 2))),
        },
    )  # fmt: skip
    found.train()
    entry = next(entry for entry in found.state.log_history if "accuracy" in entry)
    assert entry["accuracy"] == pytest.approx(right, abs=0.01)
    assert entry["spread"] == pytest.approx(spread, abs=0.02)
    assert entry["loss"] > 1
    assert any("(accuracy, spread)" in each for each in found.guarantee.assumptions)
    plain = trainer(tmp_path, noise_multiplier=1e-3, settings=settings)
    plain.train()
    assert plain.guarantee.sampling == found.guarantee.sampling


def test_figures_that_are_not_one_for_each_row_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    for figures, message in (
        ({"loss": (0, 1, last_word_is_right)}, "logged_loss_most"),
        ({"epsilon": (0, 1, last_word_is_right)}, "has an entry of that name"),
        ({"accuracy": (0, 1)}, "low, high, function"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            trainer(tmp_path, logged_figures=figures)
    mean = {"accuracy": (0, 1, lambda outputs, inputs: last_word_is_right(outputs, inputs).float().mean())}
    with pytest.raises(TrainingLoopError, match="'accuracy' must be"):
        trainer(tmp_path, logged_figures=mean).train()


def test_the_guarantee_is_in_card_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    found = trainer(tmp_path, settings={"save_strategy": "steps", "save_steps": STEPS})
    found.train()
    found.save_model(str(tmp_path / "model"))
    found.create_model_card()
    found.save_state()
    sentence = found.guarantee.sentence()
    for folder in (tmp_path / "model", tmp_path / f"checkpoint-{STEPS}", tmp_path):
        card = (folder / "README.md").read_text()
        assert card.count(sentence) == card.count("## Privacy") == 1, folder
    for folder in (tmp_path / f"checkpoint-{STEPS}", tmp_path):
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["stateful_callbacks"]["adadp"]["attributes"]["guarantee"]["epsilon"] == found.guarantee.epsilon
    assert not list(tmp_path.glob("checkpoint-*/rng_state*"))


def test_the_progress_bar_shows_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    untried(monkeypatch)
    trainer(tmp_path, settings={"disable_tqdm": False}).train()
    assert "epsilon=2.8" in capsys.readouterr().err


def test_the_budget_ends_training_before_it_is_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    own = trainer(tmp_path, settings={"max_steps": 2})
    own.train()
    budget = own.guarantee.epsilon + 1e-3
    found = trainer(tmp_path, target_epsilon=budget, settings={"max_steps": 20})
    with pytest.warns(BudgetWarning):
        output = found.train()
    assert 1 <= output.global_step < 20
    assert found.guarantee.epsilon <= budget
    assert re.match(rf"{output.global_step} steps? on", found.guarantee.sampling)
    assert found.state.global_step == output.global_step


def test_training_again_is_charged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    found = trainer(tmp_path, seed=None)
    found.train()
    once = found.guarantee.epsilon
    found.train()
    assert found.guarantee.epsilon > once
    assert f"{2 * STEPS} steps" in found.guarantee.sampling


def test_the_public_seed_of_the_arguments_draws_no_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`args.seed` is in every saved model, and which numbers a row gets depends on the rows before it."""
    untried(monkeypatch)
    found = trainer(tmp_path, seed=None, settings={"max_steps": 1, "seed": 42})
    assert torch.initial_seed() == 42  # as the trainer's class sets it
    found.train()
    assert torch.initial_seed() != 42


def test_private_classes_are_made_once_and_have_names(tmp_path: Path) -> None:
    assert private(Trainer) is PrivateTrainer
    assert private(PrivateTrainer) is PrivateTrainer
    assert issubclass(PrivateTrainer, Trainer)
    assert PrivateTrainer.__name__ == "PrivateTrainer"
    assert pickle.loads(pickle.dumps(arguments(tmp_path))).max_steps == STEPS


# ---- refused, with the way out ------------------------------------------------------------------------------------

REFUSED_SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length",
    "auto_find_batch_size": True,
    "fp16": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp": True,
    "parallelism_config": object(),
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "include_num_input_tokens_seen": "all",
    "skip_memory_metrics": False,
    "debug": ["underflow_overflow"],
    "data_seed": 1,
    "dataloader_in_order": False,
    "optim": "lomo",
    "packing": True,
    "padding_free": True,
    "loss_type": "dft",
    "activation_offloading": True,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "save_strategy": "best",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "max_grad_norm": 0.5,
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_settings_that_are_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, REFUSED_SETTINGS[name])  # some need packages or a GPU to be made
    with pytest.raises(ConfigurationError, match=rf"TrainingArguments\({name}="):
        trainer(tmp_path, args=args)


@pytest.mark.parametrize("name", ["optim", "train_sampling_strategy", "lr_scheduler_type", "save_strategy"])
def test_settings_are_refused_as_the_enums_they_become(name: str, tmp_path: Path) -> None:
    more = {"save_strategy": {"metric_for_best_model": "loss"}, "lr_scheduler_type": {"eval_strategy": "steps"}}.get(
        name, {}
    )
    args = arguments(tmp_path, **{name: REFUSED_SETTINGS[name], **more})
    with pytest.raises(ConfigurationError, match=r"TrainingArguments\("):
        trainer(tmp_path, args=args)


class Unending(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from iter(texts())


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Mixes(Trainer):
    """Puts examples together after the data collator, where nothing is tried."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "labels": inputs["labels"].roll(1, 0)}


class Masks:
    """A collator that masks tokens with a generator of its own, as DataCollatorForLanguageModeling(seed=3) does."""

    def __init__(self, **own: Any) -> None:
        vars(self).update(own)

    def __call__(self, rows: Any) -> Any:
        return transformers.default_data_collator(rows)


same = texts()
REFUSED_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "model_init": ({"model_init": gpt2}, "model_init= makes new weights"),
    "iterable": ({"data": Unending()}, "map-style dataset"),
    "evaluation on the training set": ({"data": same, "eval_dataset": same}, "eval_dataset is the training set"),
    "early stopping": ({"callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback is refused"),
    "flattening": ({"data_collator": transformers.DataCollatorWithFlattening()}, "one row of all documents"),
    "a known seed": ({"data_collator": Masks(seed=3)}, "Masks draws from a generator of its own"),
    "known draws": ({"data_collator": Masks(draws=torch.Generator())}, "Masks draws from a generator of its own"),
    "no target": ({"noise_multiplier": None}, "needs target_epsilon="),
    "unknown clipping": ({"clipping": "magic"}, "clipping 'magic'"),
}


@pytest.mark.parametrize("name", REFUSED_PARTS)
def test_parts_that_are_refused(name: str, tmp_path: Path) -> None:
    parts, text = REFUSED_PARTS[name]
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        trainer(tmp_path, **parts).train()


def test_a_sharded_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp.distributed.sharded.sharded_parts", lambda module: [module])
    with pytest.raises(ConfigurationError, match="a trainer of Hugging Face"):
        trainer(tmp_path).train()


def test_unknown_arguments_and_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="target_epsilom"):
        trainer(tmp_path, target_epsilom=3)
    with pytest.raises(ConfigurationError, match="needs target_delta="):
        PrivateTrainer(model=gpt2(), args=arguments(tmp_path), train_dataset=texts(), noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match=r"OwnLoss\.compute_loss is its own"):
        private(OwnLoss)
    with pytest.raises(ConfigurationError, match=r"Mixes\._prepare_inputs is its own"):
        private(Mixes)
    with pytest.raises(ConfigurationError, match=r"Late\.compute_loss is its own"):
        type("Late", (PrivateTrainer,), {"compute_loss": OwnLoss.compute_loss})
    with pytest.raises(ConfigurationError, match="hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()


def test_evaluation_on_the_training_set_is_refused_whenever_it_is_asked_for(tmp_path: Path) -> None:
    found = trainer(tmp_path)
    for data in (found.train_dataset, {"one": found.train_dataset}):
        with pytest.raises(ConfigurationError, match="eval_dataset is the training set"):
            found.evaluate(data)
    assert not found.state.log_history
    assert "eval_loss" in found.evaluate(texts(4))


def test_early_stopping_that_is_added_later_is_refused(tmp_path: Path) -> None:
    found = trainer(tmp_path)
    found.add_callback(transformers.EarlyStoppingCallback())
    with pytest.raises(ConfigurationError, match="EarlyStoppingCallback is refused"):
        found.train()


def test_public_evaluation_may_decide_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    settings = {
        "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    found = trainer(
        tmp_path, settings=settings, eval_dataset=texts(4), public_evaluation=True,
        callbacks=[transformers.EarlyStoppingCallback(2)],
    )  # fmt: skip
    found.train()
    assert found.guarantee.epsilon is not None
    assert "none of it is in the training set" in str(found.guarantee)


def test_a_scalar_loss_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return losses.causal_lm(outputs.logits, labels).mean()

    with pytest.raises(ConfigurationError, match="compute_loss_func returned a scalar"):
        trainer(tmp_path, compute_loss_func=mean).train()
    rows = trainer(tmp_path, compute_loss_func=lambda o, y, num_items_in_batch=None: losses.causal_lm(o.logits, y))
    assert rows.train().global_step == STEPS


class Weighted(transformers.GPT2LMHeadModel):
    """Its own loss is another than its head's."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        if outputs.loss is not None:
            outputs.loss = 2 * outputs.loss
        return outputs


class Backbone(transformers.GPT2LMHeadModel):
    """A head of which nothing is known."""


def test_losses_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="loss of each example is not known for a Backbone"):
        trainer(tmp_path, Backbone(gpt2().config)).train()
    model = type("WeightedLMHeadModel", (Weighted,), {})(gpt2().config)
    with pytest.raises(ConfigurationError, match="is not the one that is known for its head"):
        trainer(tmp_path, model).train()


def test_a_lot_is_what_a_lot_of_the_trainer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried(monkeypatch)
    found = trainer(tmp_path, settings={"max_steps": -1, "num_train_epochs": 2})
    assert found.train().global_step == 2 * (COUNT // LOT)
    assert f"rate {LOT / COUNT:g}" in found.guarantee.sampling
