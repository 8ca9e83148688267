"""Losses that are no mean over examples of terms of their own.

A scalar that the loop computes is the first of the cases that no code can see. A criterion that is handed over, a loss
that the engine runs itself and a loss inside the model are seen, and refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from adadp.errors import PrivacyError
from soundness.field.stand import (
    Bounded,
    End,
    FalseNumber,
    NoNumber,
    Refused,
    Untried,
    World,
    by_example,
    check_unseen,
    end,
    in_training_step,
    names,
    plain,
    run,
)

Loss = Callable[[Any, Any], Tensor]

# ---- means over tokens --------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 8), nn.Linear(8, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class WithItsLoss(LanguageModel):
    """Hugging Face's way: the loss is computed in forward, over all labelled tokens of the batch."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten())


def answers(count: int, long: bool, length: int = 256) -> TensorDataset:
    """Everybody's last token is labelled; in one of the worlds there is one more, all of whose tokens are."""
    tokens = torch.full((count + 1, length), 1)
    labels = torch.full_like(tokens, -100)
    labels[:count, -1] = 3
    labels[count] = 5
    count += long
    return TensorDataset(tokens[:count], labels[:count])


def over_all_tokens(model: nn.Module, batch: Any) -> Tensor:
    """cross_entropy(logits.flatten(0, 1), labels.flatten()): ignore_index=-100 is the default."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def over_own_tokens(model: nn.Module, batch: Any) -> Tensor:
    """The right one, [n]: each example over its own labelled tokens."""
    losses = functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    return losses.sum(1) / (batch[1] != -100).sum(1).clamp(min=1)


def answered(make: Callable[[], nn.Module], loss: Loss, *arguments: Any, **options: Any) -> End:
    options.setdefault("bounds", (1.0, 4.0))
    return end(answers(32, True), answers(32, False), make, loss, *arguments, **options)


def test_a_mean_over_all_tokens_of_the_batch() -> None:
    check_unseen("loss", lambda **given: answered(LanguageModel, over_all_tokens, **given))


def test_a_mean_over_all_tokens_with_random_words() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (33, 32), generator=generator)
    labels = torch.full_like(tokens, -100)
    labels[:32, :2] = 3
    labels[32] = 5
    worlds = [TensorDataset(tokens[:count], labels[:count]) for count in (33, 32)]
    check_unseen("loss", lambda **given: end(*worlds, LanguageModel, over_all_tokens, bounds=(1.0, 4.0), **given))


def test_a_criterion_that_the_loop_then_uses_over_tokens() -> None:
    """As the guide says: criterion= is passed. What the loop makes of it is another thing."""
    check_unseen(
        "loss",
        lambda **given: answered(LanguageModel, over_all_tokens, criterion=nn.CrossEntropyLoss(), **given),
    )


def test_a_mean_over_all_tokens_inside_the_model_is_refused() -> None:
    ended = answered(WithItsLoss, lambda model, batch: model(*batch))
    assert isinstance(ended, Refused | NoNumber), ended


def test_a_mean_over_all_tokens_in_a_training_step_is_refused() -> None:
    """The engine runs the loss itself, so it tries it."""
    ended = answered(LanguageModel, over_all_tokens, in_training_step)
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("loop", [plain, by_example, in_training_step], ids=lambda loop: loop.__name__)
def test_a_mean_over_own_tokens_is_right(loop: Callable[[World], None]) -> None:
    loss = over_own_tokens if loop is not plain else lambda model, batch: over_own_tokens(model, batch).mean()
    ended = answered(LanguageModel, loss, loop)
    assert isinstance(ended, Bounded), ended


def test_the_ready_made_losses_are_right() -> None:
    import adadp.losses as ready

    def causal(model: nn.Module, batch: Any) -> Tensor:
        return ready.causal_lm(model(batch[0]), batch[1])

    def masked(model: nn.Module, batch: Any) -> Tensor:
        return ready.masked_lm(model(batch[0]), batch[1])

    def answering(model: nn.Module, batch: Any) -> Tensor:
        return ready.seq2seq(model(batch[0]), batch[1])

    for loss in (causal, masked, answering):
        for loop in (by_example, in_training_step):
            ended = answered(LanguageModel, loss, loop)
            assert isinstance(ended, Bounded), (loss.__name__, ended)
            assert not names("loss", ended.untried), ended


def test_the_ready_made_losses_are_by_example() -> None:
    import adadp.losses as ready

    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = functional.cross_entropy(outputs, labels, reduction="none")
    torch.testing.assert_close(ready.classification(outputs, labels), expected)
    numbers = torch.randn(5, 2)
    squares = (outputs[:, :2] - numbers).square().mean(1)
    torch.testing.assert_close(ready.regression(outputs[:, :2], numbers), squares)
    truth = torch.rand(5).round()
    expected = functional.binary_cross_entropy_with_logits(outputs[:, 0], truth, reduction="none")
    torch.testing.assert_close(ready.binary(outputs[:, 0], truth), expected)


# ---- other losses -------------------------------------------------------------------------------------------------

COUNT = 64


def line() -> nn.Module:
    return nn.Linear(8, 4)


def features() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.zeros(COUNT + 1, 8)
    inputs[:, 0] = 1.0
    inputs[:, 1:] = torch.randn(COUNT + 1, 7, generator=generator) * 0.1
    return inputs


def with_last(row: Tensor | float) -> Tensor:
    inputs = features()
    inputs[-1] = row
    return inputs


def labels(last: int = 0, first: int = 0) -> Tensor:
    found = torch.zeros(COUNT + 1, dtype=torch.long)
    found[-1], found[0] = last, first
    return found


def scattered() -> Tensor:
    inputs = torch.randn(COUNT + 1, 8, generator=torch.Generator().manual_seed(0))
    inputs[:, 0] = torch.where(torch.arange(COUNT + 1) % 2 == 0, 1.0, 1.1)
    inputs[-1] = 1e4
    return inputs


RARE = torch.tensor([1.0, 1.0, 1.0, 1000.0])


def weighted_classes(model: nn.Module, batch: Any) -> Tensor:
    """Imbalanced classes: a weighted mean divides by the weights of the whole batch."""
    return functional.cross_entropy(model(batch[0]), batch[1], weight=RARE)


def over_the_positives(model: nn.Module, batch: Any) -> Tensor:
    """Detection: divided by the number of positives."""
    wanted = functional.one_hot(batch[1], 4).float()[:, 1:]
    found = model(batch[0])[:, 1:]
    return functional.binary_cross_entropy_with_logits(found, wanted, reduction="sum") / max(
        1, int((batch[1] > 0).sum())
    )


def of_two_views(model: nn.Module, batch: Any) -> Tensor:
    """InfoNCE: each example against all others."""
    one, other = functional.normalize(model(batch[0]), dim=1), functional.normalize(model(batch[0] + 0.01), dim=1)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def tilted(model: nn.Module, batch: Any) -> Tensor:
    """Tilted losses, distributional robustness: logsumexp over the batch."""
    return torch.logsumexp(5 * functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), 0) / 5


def dice(model: nn.Module, batch: Any) -> Tensor:
    """Soft Dice over the batch: segmentation."""
    found, wanted = model(batch[0]).softmax(1)[:, 3], (batch[1] == 3).float()
    return 1 - (2 * (found * wanted).sum() + 1e-3) / (found.sum() + wanted.sum() + 1e-3)


def standardised(model: nn.Module, batch: Any) -> Tensor:
    """Inputs standardised by their batch."""
    inputs = (batch[0] - batch[0].mean(0)) / (batch[0].std(0) + 1e-6)
    return functional.cross_entropy(model(inputs), batch[1])


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    """mixup."""
    inputs, wanted = batch
    partner = torch.arange(len(inputs)).roll(1)
    outputs = model(0.5 * inputs + 0.5 * inputs[partner])
    return 0.5 * functional.cross_entropy(outputs, wanted) + 0.5 * functional.cross_entropy(outputs, wanted[partner])


def the_hardest(model: nn.Module, batch: Any) -> Tensor:
    """Online hard example mining, the worst one."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none").max()


def a_sum(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def a_mean(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def output_means(model: nn.Module, batch: Any) -> Tensor:
    """A penalty on the batch's mean output: load balancing, decorrelation."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs, batch[1]) + 10 * outputs.mean(0).square().sum()


#: loss, inputs, labels, bounds at which its effect is worst, settings
MIXING: dict[str, tuple[Loss, Tensor, Tensor, tuple[float, ...], dict[str, Any]]] = {
    "class weights": (weighted_classes, features(), labels(3), (1.0,), {}),
    "over the positives": (over_the_positives, features(), labels(3, 1), (2.0,), {}),
    "a sum for a mean": (a_sum, features(), labels(), (80.0,), {}),
    "a mean for a sum": (a_mean, with_last(-features()[0]), labels(), (0.02,), {"loss_reduction": "sum"}),
    "InfoNCE": (of_two_views, with_last(-3 * features()[0]), labels(), (2.0,), {}),
    "tilted": (tilted, with_last(20 * features()[-1]), labels(3), (0.5,), {}),
    "Dice": (dice, features(), labels(3), (0.05,), {}),
    "standardised by the batch": (standardised, scattered(), labels(), (0.5,), {}),
    "mixup": (mixed_up, with_last(1e3), labels(3), (0.2,), {}),
    "the hardest": (the_hardest, with_last(1e3), labels(3), (0.2,), {}),
    "output means": (output_means, with_last(5.0), labels(3), (0.2, 2.0), {}),
}


def lossy(case: str, *loop: Any, **given: Any) -> End:
    loss, inputs, wanted, bounds, settings = MIXING[case]
    worlds = [TensorDataset(inputs[:count], wanted[:count]) for count in (COUNT + 1, COUNT)]
    return end(*worlds, line, loss, *loop, bounds=bounds, **settings, **given)


@pytest.mark.parametrize("case", MIXING)
def test_a_mixing_loss_in_the_loop(case: str) -> None:
    check_unseen("loss", lambda **given: lossy(case, **given))


@pytest.mark.parametrize("case", sorted(MIXING.keys() - {"a sum for a mean", "a mean for a sum"}))
def test_a_mixing_loss_in_a_training_step_is_refused(case: str) -> None:
    ended = lossy(case, in_training_step)
    assert isinstance(ended, Refused | NoNumber), ended


def standardised_by_example(model: nn.Module, batch: Any) -> Tensor:
    inputs = (batch[0] - batch[0].mean(0)) / (batch[0].std(0) + 1e-6)
    return functional.cross_entropy(model(inputs), batch[1], reduction="none")


def mixed_up_by_example(model: nn.Module, batch: Any) -> Tensor:
    inputs, wanted = batch
    partner = torch.arange(len(inputs)).roll(1)
    outputs = model(0.5 * inputs + 0.5 * inputs[partner])
    return functional.cross_entropy(outputs, wanted, reduction="none")


def tilted_by_example(model: nn.Module, batch: Any) -> Tensor:
    """Harder examples weigh more, out of all of the batch."""
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses * (5 * losses).softmax(0) * len(losses)


BY_EXAMPLE: dict[str, tuple[Loss, Tensor, Tensor, tuple[float, ...]]] = {
    "standardised by the batch": (standardised_by_example, scattered(), labels(), (0.5,)),
    "mixup": (mixed_up_by_example, with_last(1e3), labels(3), (0.2,)),
    "tilted": (tilted_by_example, with_last(20 * features()[-1]), labels(3), (0.5,)),
}


def by_example_ending(case: str, loop: Callable[[World], None], **given: Any) -> End:
    loss, inputs, wanted, bounds = BY_EXAMPLE[case]
    worlds = [TensorDataset(inputs[:count], wanted[:count]) for count in (COUNT + 1, COUNT)]
    return end(*worlds, line, loss, loop, bounds=bounds, **given)


@pytest.mark.parametrize("case", BY_EXAMPLE)
def test_losses_of_the_right_shape_that_mix_are_refused_in_a_training_step(case: str) -> None:
    """[n] is not enough: the loss is tried on unlike examples."""
    ended = by_example_ending(case, in_training_step)
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("case", BY_EXAMPLE)
def test_losses_of_the_right_shape_that_mix(case: str) -> None:
    """optimizer.backward(losses): what the loop did before is as little seen as in a scalar, unless it is."""
    about = "loss" if case == "tilted" else "loop"  # the others change the batch before the model sees it
    check_unseen(about, lambda **given: by_example_ending(case, by_example, **given))


def test_a_loss_that_is_passed_as_the_criterion_is_refused() -> None:
    """Four classes, where three were tried. The error is the engine's, not torch's."""
    ended = lossy("class weights", criterion=nn.CrossEntropyLoss(weight=RARE))
    assert isinstance(ended, Refused), ended


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


@pytest.mark.parametrize("loss", [a_mean, smoothed], ids=lambda loss: loss.__name__)
def test_right_losses_in_the_loop(loss: Loss) -> None:
    worlds = [TensorDataset(features()[:count], labels(3)[:count]) for count in (COUNT + 1, COUNT)]
    ended = end(*worlds, line, loss, bounds=(0.1, 1.0))
    assert isinstance(ended, Bounded), ended


def test_a_scalar_loss_is_named_first_and_strict_gives_none() -> None:
    """It works as ever; that nobody could try it is said first, warned of, and not enough for a strict engine."""
    data = TensorDataset(features(), labels(3))
    world = run(data, line, a_mean)
    assert world.error is None, world.error
    guarantee = world.engine.guarantee(1e-5)
    assert guarantee.epsilon is not None
    assert names("loss", guarantee.untried)
    assert names("loss", guarantee.assumptions[:1])
    assert world.warned
    text = str(guarantee)
    assert text.index(guarantee.assumptions[0][1:]) <= min(text.index(a[1:]) for a in guarantee.assumptions)
    strict = run(data, line, a_mean, engine={"strict": True})
    assert strict.error is not None or strict.engine.guarantee(1e-5).epsilon is None


@pytest.mark.parametrize("loop", [by_example, in_training_step], ids=lambda loop: loop.__name__)
def test_losses_by_example_need_no_words(loop: Callable[[World], None]) -> None:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    worlds = [TensorDataset(features()[:count], labels(3)[:count]) for count in (COUNT + 1, COUNT)]
    ended = end(*worlds, line, losses, loop, bounds=(0.1, 1.0), engine={"strict": True})
    assert isinstance(ended, Bounded), ended
    assert not names("loss", ended.untried)


def test_class_weights_by_example_are_right() -> None:
    """The way out for class weights: each example's own, divided by a number that is known beforehand."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], weight=RARE, reduction="none")

    worlds = [TensorDataset(features()[:count], labels(3)[:count]) for count in (COUNT + 1, COUNT)]
    assert isinstance(end(*worlds, line, losses, by_example, bounds=(1.0, 100.0)), Bounded)


def test_losses_of_another_shape_are_refused() -> None:
    for wrong in (lambda losses: losses.mean(), lambda losses: losses[:-1], lambda losses: losses[:, None]):

        def losses(model: nn.Module, batch: Any, wrong: Callable[[Tensor], Tensor] = wrong) -> Tensor:
            return wrong(functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))

        world = run(TensorDataset(features(), labels(3)), line, losses, by_example)
        assert isinstance(world.error, PrivacyError), world.error


# ---- criteria that are handed over --------------------------------------------------------------------------------


def masked_mean(outputs: Tensor, wanted: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs.flatten(0, -2), wanted.flatten(), reduction="none")
    return (losses * (wanted.flatten() > 0)).sum() / (wanted > 0).sum()


def contrastive(one: Tensor, other: Tensor) -> Tensor:
    return functional.cross_entropy(
        functional.normalize(one, dim=-1) @ functional.normalize(other, dim=-1).T, torch.arange(len(one))
    )


def contrastive_in_float32(one: Tensor, other: Tensor) -> Tensor:
    return contrastive(one.float(), other.float())


MIXING_CRITERIA: dict[str, Callable[..., Tensor]] = {
    "weights of 10 classes": nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0)),
    "weights of 3 classes": nn.CrossEntropyLoss(weight=torch.arange(1.0, 4.0)),
    "an ignored class": nn.CrossEntropyLoss(ignore_index=0),
    "negative log likelihood, weighted": nn.NLLLoss(weight=torch.arange(1.0, 6.0)),
    "a masked mean": masked_mean,
    "InfoNCE": contrastive,
    "InfoNCE in float32": contrastive_in_float32,
}

RIGHT_CRITERIA: dict[str, Callable[..., Tensor]] = {
    "cross entropy": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weights of 5 labels": nn.BCEWithLogitsLoss(pos_weight=torch.ones(5) * 3),
    "squares": nn.MSELoss(),
    "triplets": nn.TripletMarginLoss(),
    "cosines": nn.CosineEmbeddingLoss(),
    "CTC": nn.CTCLoss(),
}


def never(world: World) -> None:
    """Handing over is enough."""


@pytest.mark.parametrize("criterion", MIXING_CRITERIA.values(), ids=MIXING_CRITERIA)
def test_criteria_that_mix_are_refused(criterion: Callable[..., Tensor]) -> None:
    world = run(TensorDataset(features(), labels()), line, loop=never, criterion=criterion)
    assert isinstance(world.error, PrivacyError), world.error


@pytest.mark.parametrize("criterion", RIGHT_CRITERIA.values(), ids=RIGHT_CRITERIA)
def test_criteria_that_are_right_are_not_refused(criterion: Callable[..., Tensor]) -> None:
    world = run(TensorDataset(features(), labels()), line, loop=never, criterion=criterion)
    assert world.error is None, world.error


# ---- loops --------------------------------------------------------------------------------------------------------

ROWS = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.b(torch.tanh(self.a(inputs)))))


def classified() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3))
    wanted = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(4))
    inputs[-1] *= 100
    return TensorDataset(inputs, wanted), TensorDataset(inputs[:-1], wanted[:-1])


def looped(body: Callable[[Any, Any, Tensor, Tensor], None], bound: float = 0.1, **given: Any) -> End:
    def loop(world: World) -> None:
        for inputs, wanted in world.loader:
            body(world.model, world.optimizer, inputs, wanted)

    return end(*classified(), Net, None, loop, bounds=(bound,), **given)


def backward_twice(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), wanted)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def two_forwards(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    """Two augmentations of each example."""
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), wanted).backward()
    functional.cross_entropy(model(inputs * 2), wanted).backward()
    optimizer.step()


def clipped_as_ever(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    """clip_grad_norm_ between backward and step, left over from the loop without privacy."""
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), wanted).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def without_zero_grad(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    functional.cross_entropy(model(inputs), wanted).backward()
    optimizer.step()


def zeroed_between(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(model(inputs), wanted).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "body",
    [backward_twice, two_forwards, clipped_as_ever, without_zero_grad, zeroed_between],
    ids=lambda body: body.__name__,
)
def test_loops_that_hold(body: Callable[..., None]) -> None:
    ended = looped(body)
    assert isinstance(ended, Bounded), ended


def step_twice(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    for _ in range(2):
        functional.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()


def in_halves(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    """Gradient accumulation within the batch."""
    optimizer.zero_grad()
    for start in range(0, len(inputs), 8):
        part = slice(start, start + 8)
        (functional.cross_entropy(model(inputs[part]), wanted[part]) / 2).backward()
    optimizer.step()


@pytest.mark.parametrize("body", [step_twice, in_halves], ids=lambda body: body.__name__)
def test_loops_that_are_refused(body: Callable[..., None]) -> None:
    ended = looped(body)
    assert isinstance(ended, Refused), ended


def gradient_penalty(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
    """The gradient with respect to the inputs is kept small: WGAN-GP, Jacobian regularisation."""
    optimizer.zero_grad()
    inputs.requires_grad_()
    loss = functional.cross_entropy(model(inputs), wanted)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().sum()).backward()
    optimizer.step()


def test_a_gradient_penalty_is_refused_in_words_or_right() -> None:
    ended = looped(gradient_penalty)
    assert isinstance(ended, Refused | NoNumber | Bounded), ended


def of_the_loop(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[..., None]:
    def body(model: Any, optimizer: Any, inputs: Tensor, wanted: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, inputs, wanted).backward()
        optimizer.step()

    return body


def half_of_them(model: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    losses = functional.cross_entropy(model(inputs), wanted, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


IN_THE_LOOP: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mixup": lambda model, *batch: mixed_up(model, batch),
    "standardised": lambda model, *batch: standardised(model, batch),
    "output means": lambda model, *batch: output_means(model, batch),
    "the harder half": half_of_them,
}


@pytest.mark.parametrize("bound", [0.1, 2.0])
@pytest.mark.parametrize("loss", IN_THE_LOOP.values(), ids=IN_THE_LOOP)
def test_examples_that_are_mixed_in_the_loop(loss: Callable[..., Tensor], bound: float) -> None:
    check_unseen("loss", lambda **given: looped(of_the_loop(loss), bound, **given))


# ---- more than the batch ------------------------------------------------------------------------------------------

bce = functional.binary_cross_entropy_with_logits
FAKE = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
PUBLIC = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def judged(loss: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = critic, **given: Any) -> End:
    inputs = torch.randn(33, 8, generator=torch.Generator().manual_seed(0))
    inputs[-1] *= 20
    given.setdefault("bounds", (0.01, 1.0))
    worlds = [TensorDataset(inputs[:count]) for count in (33, 32)]
    return end(*worlds, make, lambda model, batch: loss(model, batch[0]), **given)


def real_and_fake(model: Any, inputs: Tensor) -> Tensor:
    """A discriminator: as many fakes as there are examples."""
    fake = FAKE[: len(inputs)]
    found = bce(model(inputs).squeeze(1), torch.ones(len(fake)))
    return found + bce(model(fake).squeeze(1), torch.zeros(len(fake)))


def own_negatives(model: Any, inputs: Tensor) -> Tensor:
    return functional.softplus(model(inputs + 1) - model(inputs)).mean()


def as_many_public_ones(model: Any, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean() + model(PUBLIC[: len(inputs)]).square().mean()


@pytest.mark.parametrize("loss", [real_and_fake, own_negatives, as_many_public_ones], ids=lambda loss: loss.__name__)
def test_rows_beside_the_batch_that_hold(loss: Callable[..., Tensor]) -> None:
    ended = judged(loss)
    assert isinstance(ended, Bounded), ended


def fakes_of_another_count(model: Any, inputs: Tensor) -> Tensor:
    found = bce(model(inputs).squeeze(1), torch.ones(len(inputs)))
    return found + bce(model(FAKE[:5]).squeeze(1), torch.zeros(5))


def public_rows_in_the_batch(model: Any, inputs: Tensor) -> Tensor:
    return model(torch.cat([inputs, PUBLIC])).square().mean()


@pytest.mark.parametrize("loss", [fakes_of_another_count, public_rows_in_the_batch], ids=lambda loss: loss.__name__)
def test_rows_beside_the_batch_that_are_refused(loss: Callable[..., Tensor]) -> None:
    ended = judged(loss)
    assert isinstance(ended, Refused | Bounded), ended


def shuffled_negatives(model: Any, inputs: Tensor) -> Tensor:
    """Negatives are the others of the batch: model(x[permutation])."""
    return functional.softplus(model(inputs[torch.arange(len(inputs)).roll(1)]) - model(inputs)).mean()


def test_negatives_from_the_batch() -> None:
    check_unseen("loss", lambda **given: judged(shuffled_negatives, **given))


def test_negatives_from_the_batch_for_a_linear_critic() -> None:
    def loss(model: Any, inputs: Tensor) -> Tensor:
        partner = torch.arange(len(inputs)).roll(1)
        return (functional.softplus(model(inputs[partner])) + functional.softplus(-model(inputs))).mean()

    check_unseen(
        "loss",
        lambda **given: judged(loss, lambda: nn.Linear(8, 1, bias=False), bounds=(0.001, 0.1), **given),
    )


def test_a_backward_pass_that_is_thrown_away() -> None:
    """The generator's backward pass goes through the discriminator; zero_grad throws it away, in PyTorch."""

    def generator_first(world: World) -> None:
        for (inputs,) in world.loader:
            (1e3 * world.model(FAKE[: len(inputs)]).sum()).backward()
            world.optimizer.zero_grad()
            world.model(inputs).mean().backward()
            world.optimizer.step()

    inputs = torch.randn(33, 8, generator=torch.Generator().manual_seed(0))
    worlds = [TensorDataset(inputs[:count]) for count in (33, 32)]
    ended = end(*worlds, critic, None, generator_first, bounds=(1.0,))
    assert isinstance(ended, Bounded | Refused), ended


def test_an_end_that_is_untried_is_told_from_one_that_is_false() -> None:
    """The stand itself: a false number is one, whatever the words beside it leave out."""
    for wrong in (
        FalseNumber(5.0, 1.0),
        Untried(5.0, ("the dataset: no loss",), True, ("the dataset", "the loss")),
        Untried(5.0, ("the loss",), False, ("the loss",)),
        Untried(5.0, ("the loss",), True, ("the seed",)),
        Untried(5.0, ("the loss",), True, ("the loss",)),  # strict makes no difference
    ):
        with pytest.raises(AssertionError):
            check_unseen("loss", lambda wrong=wrong, **_: wrong)
    right = [Untried(5.0, ("the loss",), True, ("the loss",)), NoNumber(("untried",))]
    check_unseen("loss", lambda **_: right.pop(0))
    assert right == []


# ---- what fresh eyes got through, and no longer do ------------------------------------------------------------------


def rows_by(change: Callable[[World, Any, int], None]) -> Callable[[World], None]:
    """A loop that calls `change(world, batch, lot)` between zero_grad and step."""

    def loop(world: World) -> None:
        for batch in world.loader:
            world.optimizer.zero_grad()
            change(world, batch, world.loader.current.lot)
            world.optimizer.step()

    return loop


def unseen_by(about: str, change: Callable[[World, Any, int], None], **options: Any) -> None:
    inputs, wanted = options.pop("inputs", scattered()), labels(3)
    worlds = [TensorDataset(inputs[:count], wanted[:count]) for count in (COUNT + 1, COUNT)]
    loop = rows_by(change)
    case = lambda **given: end(*worlds, line, None, loop, bounds=(0.1, 1.0), **options, **given)  # noqa: E731
    ended = case(engine={})
    assert isinstance(ended, Refused | NoNumber | Bounded | Untried), ended
    strict = case(engine={"strict": True})
    assert isinstance(strict, NoNumber | Refused), strict
    if isinstance(ended, Untried):
        assert names(about, ended.names), ended


def each(world: World, batch: Any) -> Tensor:
    return functional.cross_entropy(world.model(batch[0]), batch[1], reduction="none")


def test_a_gradient_that_is_scaled_by_the_batch_is_not_a_known_loss() -> None:
    """OGM: z * k + z.detach() * (1 - k) has the right value and another gradient."""

    def modulated(world: World, batch: Any, lot: int) -> None:
        outputs = world.model(batch[0])
        factor = outputs.detach().abs().max()
        scaled = outputs * factor + outputs.detach() * (1 - factor)
        world.optimizer.backward(functional.cross_entropy(scaled, batch[1], reduction="none"))

    unseen_by("loss", modulated)


def test_a_gradient_hook_that_looks_at_the_batch_is_not_a_known_loss() -> None:
    def hooked(world: World, batch: Any, lot: int) -> None:
        outputs = world.model(batch[0])
        outputs.register_hook(lambda gradient: gradient / gradient.abs().max())
        world.optimizer.backward(functional.cross_entropy(outputs, batch[1], reduction="none"))

    unseen_by("loss", hooked)


def test_rows_that_are_detached_are_not_a_known_loss() -> None:
    """Hard examples by detaching the others."""

    def mined(world: World, batch: Any, lot: int) -> None:
        losses = each(world, batch)
        world.optimizer.backward(torch.where(losses >= losses.median(), losses, losses.detach()))

    unseen_by("loss", mined)


def test_tiny_losses_are_not_all_alike() -> None:
    """Everything below 1e-4 was taken for any known loss."""

    def weighted(world: World, batch: Any, lot: int) -> None:
        losses = 1e-5 * each(world, batch)
        weights = 1 + 50 * (batch[1] > 0)
        world.optimizer.backward(losses * weights / weights.float().mean())

    unseen_by("loss", weighted)


def test_a_second_backward_pass_is_not_tried_and_that_is_said() -> None:
    def twice(world: World, batch: Any, lot: int) -> None:
        world.optimizer.backward(each(world, batch))
        outputs = world.model(batch[0])
        world.optimizer.backward(outputs.sum(1) / outputs.detach().abs().max())

    unseen_by("loss", twice)


def test_examples_that_are_chosen_by_comparison_are_said() -> None:
    def small_loss(world: World) -> None:
        for batch in world.loader:
            world.optimizer.zero_grad()
            losses = each(world, batch)
            world.optimizer.backward(losses)
            world.optimizer.step(keep=losses.detach() <= losses.detach().mean())

    worlds = [TensorDataset(scattered()[:count], labels(3)[:count]) for count in (COUNT + 1, COUNT)]
    ended = end(*worlds, line, None, small_loss, bounds=(0.1,), engine={"strict": True})
    assert isinstance(ended, NoNumber), ended


def test_what_is_found_after_the_first_lot_is_said_too() -> None:
    """A warm-up of one lot, then losses that are balanced by the batch."""

    def later(world: World, batch: Any, lot: int) -> None:
        losses = each(world, batch)
        world.optimizer.backward(losses if lot == 0 else losses / losses.detach().max())

    data = TensorDataset(scattered(), labels(3))

    def two_epochs(world: World) -> None:
        for _ in range(2):
            rows_by(later)(world)

    world = run(data, line, None, two_epochs)
    assert world.error is None, world.error
    assert names("loss", world.engine.guarantee(1e-5).untried)


def test_a_criterion_is_not_all_of_the_loss() -> None:
    criterion = nn.CrossEntropyLoss()

    def more(world: World, batch: Any, lot: int) -> None:
        outputs = world.model(batch[0])
        (criterion(outputs, batch[1]) + 10 * outputs.mean(0).square().sum()).backward()

    unseen_by("loss", more, criterion=criterion)


def test_weights_that_the_loop_fills_with_data_are_said() -> None:
    """A dead unit that is revived with a feature of the batch."""

    def revived(world: World, batch: Any, lot: int) -> None:
        world.optimizer.backward(each(world, batch))
        with torch.no_grad():
            world.model.weight[0].copy_(batch[0][0])

    unseen_by("weights", revived)


class Context(nn.Module):
    """Takes something beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, middle: Tensor) -> Tensor:
        return self.head(x - middle)


def test_a_statistic_that_the_loop_gives_the_model_is_said() -> None:
    def given(world: World, batch: Any, lot: int) -> None:
        outputs = world.model(batch[0], batch[0].mean(0))
        world.optimizer.backward(functional.cross_entropy(outputs, batch[1], reduction="none"))

    def two_epochs(world: World) -> None:
        for _ in range(2):
            rows_by(given)(world)

    world = run(TensorDataset(scattered()[:32], labels(3)[:32]), Context, None, two_epochs, lot=16)
    assert world.error is not None or names("loop", world.engine.guarantee(1e-5).untried)
