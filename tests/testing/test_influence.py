"""Loops whose printed epsilon is false are found; right ones are within their bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.utils.data import DataLoader, Subset

from adadp import Diagonal, Ellipsoid, Kronecker, Ledger, Paid, PrivacyEngine, Probe
from adadp.algorithms import Task
from adadp.algorithms.agd import AGD
from adadp.checks.trial import Trial
from adadp.errors import ConfigurationError
from adadp.gradients import Capture
from adadp.testing import Influence, influence
from testing import loops
from testing.loops import Texts, answers, rows, trainer

# ---- found --------------------------------------------------------------------------------------------------------

#: The loop, its data, and an example (with others around it) that shows the fault: (train, data, example, among).
FALSE: dict[str, tuple[Any, Any, str, str]] = {
    "mean over all tokens": (trainer(loops.token_mean, loops.LM), answers(), "every label counts", "alike"),
    "class weights": (trainer(loops.class_weights), rows(), "other class", "alike"),
    "mixup in the loop": (trainer(loops.mixup), rows(), "large", "own"),
    "inputs standardised by the batch": (trainer(loops.standardised), rows(), "large", "own"),
    "InfoNCE": (trainer(loops.infonce), rows(), "not a number", "alike"),
    "Dice over the batch": (trainer(loops.dice), rows(), "large", "alike"),
    "over the number of positives": (trainer(loops.positives), rows(), "ordinary", "alike but one"),
    "logsumexp over the batch": (trainer(loops.tilted), rows(), "large", "alike"),
    "hardest half of the batch": (trainer(loops.hardest), rows(), "ordinary", "own"),
    "penalty on the mean output": (trainer(loops.batch_mean_penalty), rows(), "large", "alike"),
    "a sum taken for a mean": (trainer(loops.whole_sum), rows(), "huge", "alike"),
    "over the padded length": (trainer(loops.over_padding, loops.LM, collate=loops.pad), Texts(), "long", "alike"),
    "mean pooling of padding": (
        trainer(loops.first_class, loops.Pooled, collate=loops.pad), Texts(), "long", "alike",
    ),
    "collate packs": (trainer(loops.packed_loss, loops.LM, collate=loops.packing), Texts(), "long", "alike"),
    "collate mixes": (trainer(collate=loops.mixing_collate), rows(), "large", "own"),
    "standardised by its own statistics": (trainer(wrap=loops.Standardised), rows(), "large", "own"),
    "corrupt items replaced by the next": (trainer(wrap=loops.Retry), rows(), "ordinary", "corrupt"),
    "every item four times": (trainer(wrap=loops.Virtual), rows(), "ordinary", "alike"),
    "one index several times": (
        trainer(wrap=lambda dataset: Subset(dataset, [0] * 5 + list(range(len(dataset))))), rows(), "opposite", "own",
    ),
    "a buffer of what was seen": (trainer(make=loops.Centred), rows(), "large", "own"),
    "a queue in an attribute": (trainer(loops.against_queue, loops.Queue), rows(), "large", "own"),
    "a plain head": (loops.plain_head, rows(), "large", "own"),
    "skipped batches": (loops.skipping, rows(), "not a number", "own"),
    "an epoch ends with a loss": (loops.breaking, rows(), "not a number", "own"),
    "the bound follows the losses": (loops.adaptive, rows(), "opposite", "own"),
    "the rate follows the loss": (loops.plateau, rows(), "other class", "own"),
}  # fmt: skip


REFUSED = {"skipped batches", "one index several times"}
NO_NUMBER = {"an epoch ends with a loss"}  # the engine sees that the lot was left after it was worked on


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tries nothing out, so that it refuses little and the test has to find what there is."""
    monkeypatch.setattr(Trial, "before_call", lambda *arguments: None)
    monkeypatch.setattr(Trial, "of_rows", lambda *arguments: None)
    monkeypatch.setattr(Capture, "sure", False)  # so that what was not tried is not refused for that


@pytest.mark.parametrize("name", FALSE)
@pytest.mark.usefixtures("untried")
def test_a_loop_whose_epsilon_is_false_is_found(name: str) -> None:
    train, data, example, among = FALSE[name]
    found = influence(train, data, examples=[example], among=among)
    expected = "refused" if name in REFUSED else "no number" if name in NO_NUMBER else "exceeded"
    assert found.verdict == expected, str(found)
    if found.exceeded:
        assert found.value > 1.001
        assert found.epsilon is not None  # which is the point: the engine would have printed it


def test_what_the_engine_refuses_is_said() -> None:
    found = influence(trainer(make=loops.Centred), rows(), examples=["large"], among="own")
    assert found.verdict == "refused"
    assert "centre" in str(found.refused)


# ---- not found ----------------------------------------------------------------------------------------------------


def agd(dataset: Any) -> None:
    algorithm = AGD()
    model = loops.net()
    algorithm.settle(lot=8, steps=20, noise_multiplier=2.0, weights=70)
    model, optimizer, loader = algorithm.make_private(
        PrivacyEngine(), module=model, optimizer=algorithm.optimizer(model.parameters()), noise_multiplier=2.0,
        data_loader=DataLoader(dataset, batch_size=8), task=Task(8, 20, lambda count, generator: torch.zeros(0), 1e-5),
    )  # fmt: skip
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loops.cross_entropy(model, (inputs, labels)).backward()
            algorithm.see(optimizer, model, inputs, labels)
            optimizer.step()


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def paid(shape: type[Any], every: int) -> Any:
    return trainer(bound=None, clipping=lambda: Ellipsoid(0.5, shape=shape(), source=Paid(every=every, share=0.3)))


def probe() -> Any:
    def inputs(count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(count, 6, generator=generator)

    return trainer(bound=None, clipping=lambda: Ellipsoid(0.5, source=Probe(inputs, count=16, every=2)))


RIGHT: dict[str, tuple[Any, Any]] = {
    "classes, with dropout": (trainer(), rows()),
    "one loss for each example": (trainer(losses, rows_=True), rows()),
    "augmentation": (trainer(wrap=loops.Augmented), rows()),
    "workers": (trainer(wrap=loops.Augmented, workers=2), rows()),
    "a part of the data": (trainer(wrap=lambda dataset: Subset(dataset, range(10, 40))), rows()),
    "masks drawn by collate": (trainer(loops.per_text, loops.LM, collate=loops.masked), Texts()),
    "packed sequences": (trainer(loops.first_class, loops.Packed, collate=loops.pad), Texts()),
    "each text over its own length": (trainer(loops.over_length, loops.LM, collate=loops.pad), Texts()),
    "fixed-size lots": (trainer(sampling="fixed"), rows()),
    "lots in pieces": (trainer(max_physical_batch_size=3), rows()),
    "padded lots": (trainer(pad_lots=True), rows()),
    "per layer": (trainer(clipping="per_layer"), rows()),
    "normalised": (trainer(clipping="automatic"), rows()),
    "a released shape": (trainer(clipping="ellipsoid"), rows()),
    "a paid diagonal shape": (paid(Diagonal, 1), rows()),
    "a paid Kronecker shape": (paid(Kronecker, 2), rows()),
    "a probed shape": (probe(), rows()),
    "a line search": (agd, rows()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_within_its_bound(name: str) -> None:
    train, data = RIGHT[name]
    texts = isinstance(data, Texts)
    examples = ["long"] if texts else ["large", "not a number"]
    found = influence(train, data, examples=examples, among=["own", "alike"], lots=5)
    assert found.verdict == "within", str(found)
    assert 0 < found.value <= found.bound * 1.001
    assert found.bound == (2 if name == "fixed-size lots" else 1)
    assert not found.skipped
    assert "proves nothing" in str(found)


@pytest.mark.usefixtures("untried")
def test_rows_that_collate_sorts_keep_their_own_dropout() -> None:
    train = trainer(loops.first_class, loops.Packed, collate=loops.by_length)
    found = influence(train, Texts(), examples=["long"], among="own", lots=3)
    assert found.verdict == "within", str(found)


def test_every_made_example_runs_in_an_ordinary_loop() -> None:
    found = influence(trainer(), rows(), lots=3)
    assert found.verdict == "within"
    assert {effect.example for effect in found.effects} > {"ordinary", "zeros (others alike)", "large (others corrupt)"}


def test_another_key_draws_other_lots() -> None:
    one, other = (influence(trainer(), rows(), examples=["ordinary"], among="own", key=key) for key in (1, 2))
    assert one.verdict == other.verdict == "within"
    assert one.value != other.value


# ---- what can be given ----------------------------------------------------------------------------------------------


def test_examples_may_be_given_by_index_and_as_items() -> None:
    item = (torch.full((6,), 50.0), torch.tensor(1))
    found = influence(trainer(loops.class_weights), rows(), examples=[3, item], among=["own"])
    assert [effect.example for effect in found.effects] == ["item 3", "given 1"]


def test_a_list_of_dicts_is_a_dataset() -> None:
    data = [{"x": np.ones(6, dtype=np.float32) * (i % 5), "y": i % 4} for i in range(40)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    found = influence(trainer(loss), data, examples=["large", "other class"], among="own")
    assert found.verdict == "within", str(found)
    assert found.value == pytest.approx(1, abs=1e-3)


def test_an_example_that_the_loop_cannot_take_is_skipped_with_its_error() -> None:
    def picky(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].isnan().any():
            raise ValueError("no NaN here")
        return loops.cross_entropy(model, batch)

    found = influence(trainer(picky), rows(), examples=["not a number", "ordinary"], among="own")
    assert found.verdict == "within"
    assert [effect.error for effect in found.skipped] == ["ValueError: no NaN here"]


def test_bad_arguments_say_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="can be made from this data; there are ordinary"):
        influence(trainer(), rows(), examples="enormous")
    with pytest.raises(ConfigurationError, match="among= is one of own, alike"):
        influence(trainer(), rows(), among="friends")


# ---- what it says where there is no number --------------------------------------------------------------------------


def test_a_function_that_releases_nothing_has_no_number() -> None:
    found = influence(lambda dataset: None, rows())
    assert found.verdict == "no number"
    assert "released nothing" in str(found.effects[0].error)


def test_a_loop_that_draws_for_itself_is_told_so() -> None:
    generator = np.random.default_rng()

    def jittered(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0] * float(generator.random())), batch[1])

    found = influence(trainer(jittered), rows(), examples=["ordinary"], among="own")
    assert found.verdict == "no number"
    assert "Seed it inside the function" in found.reasons[-1]


def test_a_loop_without_a_guarantee_has_no_number() -> None:
    found = influence(trainer(sampling="shuffle"), rows(), examples=["ordinary"], among="own")
    assert found.verdict == "no number"
    assert found.epsilon is None


# ---- it leaves nothing behind ---------------------------------------------------------------------------------------


def printing(path: Any) -> Any:
    def train(dataset: Any) -> None:
        engine, model = PrivacyEngine(ledger=path, dataset="mine"), loops.net()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0,
            data_loader=DataLoader(dataset, batch_size=8),
        )  # fmt: skip
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                loops.cross_entropy(model, batch).backward()
                optimizer.step()
            engine.get_epsilon(1e-5)

    return train


def test_no_ledger_is_written_and_the_guarantee_inside_is_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    found = influence(printing(path), rows(), examples=["large"], among="own")
    assert found.verdict == "within"
    assert max(effect.lots for effect in found.effects) == 6  # the epoch's end, where an epsilon was asked for
    assert not path.exists()
    held = Ledger(tmp_path / "held.jsonl", dataset="mine", neighbours=None)
    assert "give the engine the path" in str(influence(printing(held), rows(), examples=["large"], among="own").refused)


def test_global_generators_are_given_back() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    influence(trainer(), rows(), examples=["ordinary"], among="own", lots=1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_test_inside_a_test_is_refused() -> None:
    def nested(dataset: Any) -> None:
        influence(trainer(), dataset)

    assert "cannot test another one" in str(influence(nested, rows(), among="own").refused)


def test_as_json_an_infinite_value_is_a_word() -> None:
    found = influence(loops.plain_head, rows(), examples=["large"], among="own")
    assert isinstance(found, Influence)
    assert math.isinf(found.value)
    values = found.to_dict()
    assert values["value"] == "infinite"
    assert values["verdict"] == "exceeded"
    assert "Adam" in values["why"]
