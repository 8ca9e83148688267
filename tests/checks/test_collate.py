"""adadp.checks: collate functions, and padding that reaches a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checks.trials import Run, collated, normal
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import default_collate

from adadp.errors import ConfigurationError, PrivacyError, TrainingLoopError, UnsupportedModuleError


def sequences(lengths: list[int]) -> list[Tensor]:
    return [torch.arange(length) % 7 + 1 + i % 3 for i, length in enumerate(lengths)]


ALIKE, OTHERS = [6] * 12, [5, 9, 4, 7, 6, 3, 8, 5, 6, 7, 4, 9]


def pad(items: list[Tensor]) -> Tensor:
    return pad_sequence(items, batch_first=True)


class Words(nn.Module):
    """Reads padded words, in one way or another."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.f, self.how = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 3), how
        self.r = nn.GRU(8, 8, batch_first=True)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.f(self.how(self, x, *rest))


def own_length(x: Tensor) -> Tensor:
    return (x > 0).sum(1)


def attended(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    hidden = m.drop(m.e(x))
    return m.a(hidden, hidden, hidden, key_padding_mask=mask)[0]


def packed(m: Any, x: Tensor) -> Tensor:
    given = pack_padded_sequence(m.e(x), own_length(x).cpu(), batch_first=True, enforce_sorted=False)
    return m.r(given)[1][0]


REACHED = {
    "mean over the padded length": lambda m, x: m.e(x).mean(1),
    "the last state over the padded length": lambda m, x: m.r(m.e(x))[1][0],
    "attention without a mask": lambda m, x: attended(m, x, None)[:, 0],
    "the length itself": lambda m, x: m.e(x).sum(1) / x.shape[1],
}
MASKED = {
    "mean over own words": lambda m, x: m.drop(m.e(x)).sum(1) / own_length(x).unsqueeze(1),
    "packed": packed,
    "attention with a mask": lambda m, x: attended(m, x, x == 0)[:, 0],
    "words one by one": lambda m, x: m.drop(m.e(x)),
    "from left to right": lambda m, x: m.r(m.e(x))[0],
}


@pytest.mark.parametrize("lengths", [ALIKE, OTHERS], ids=["alike", "others"])
@pytest.mark.parametrize("how", REACHED)
def test_padding_that_reaches_the_result(how: str, lengths: list[int]) -> None:
    with pytest.raises(UnsupportedModuleError, match="Words: padding reaches the result"):
        collated(Words(REACHED[how]), sequences(lengths), pad, lambda m, b: m(b))


@pytest.mark.parametrize("lengths", [ALIKE, OTHERS], ids=["alike", "others"])
@pytest.mark.parametrize("how", MASKED)
def test_padding_that_is_masked(how: str, lengths: list[int]) -> None:
    trial = collated(Words(MASKED[how]), sequences(lengths), pad, lambda m, b: m(b))
    assert trial.untried == {}


def test_padding_on_the_left() -> None:
    def left(items: list[Tensor]) -> Tensor:
        return pad_sequence([item.flip(0) for item in items], batch_first=True).flip(1)

    collated(Words(MASKED["words one by one"]), sequences(OTHERS), left, lambda m, b: m(b))
    collated(Words(MASKED["mean over own words"]), sequences(OTHERS), left, lambda m, b: m(b))
    with pytest.raises(UnsupportedModuleError, match="padding reaches"):
        collated(
            Words(lambda m, x: m.e(x) + torch.arange(x.shape[1])[:, None]), sequences(OTHERS), left, lambda m, b: m(b)
        )


def test_a_batch_is_recognised_after_what_loops_do_to_it() -> None:
    def dicts(items: list[Tensor]) -> dict[str, Tensor]:
        return {"ids": pad(items), "labels": torch.zeros(len(items), dtype=torch.long)}

    for give in (
        lambda m, b: m(b["ids"].clone()),
        lambda m, b: m(b["ids"][:, :-1]),
        lambda m, b: m(b["ids"][:, 1:]),
    ):
        with pytest.raises(UnsupportedModuleError, match="padding reaches"):
            collated(Words(REACHED["mean over the padded length"]), sequences(OTHERS), dicts, give)
        assert collated(Words(MASKED["words one by one"]), sequences(OTHERS), dicts, give).untried == {}
    unknown = collated(Words(MASKED["words one by one"]), sequences(OTHERS), dicts, lambda m, b: m(b["ids"] % 5))
    assert unknown.untried.keys() == {"padding", "inputs"}


def test_what_the_loop_makes_of_a_batch_is_said() -> None:
    for give, said in (
        (lambda m, b: m(b[0]), False),
        (lambda m, b: m(b[0].double().view(-1, 6).float()), False),
        (lambda m, b: m((b[0] - b[0].mean(0)) / b[0].std(0)), True),
        (lambda m, b: m(b[0] + b[0].roll(1, 0)), True),
    ):
        trial = collated(nn.Linear(6, 3), VECTORS, default_collate, give)
        assert ("inputs" in trial.untried) == said


# ---- collate functions ------------------------------------------------------------------------


Item = tuple[Tensor, Tensor]
VECTORS = [(normal(12, 6)[i], torch.tensor(i % 3)) for i in range(12)]


def mixup(items: list[Item]) -> list[Tensor]:
    x, y = default_collate(items)
    return [x + 0.5 * x.roll(1, 0), y]


def random_mixup(items: list[Item]) -> list[Tensor]:
    x, y = default_collate(items)
    share = torch.rand(())
    return [share * x + (1 - share) * x[torch.randperm(len(x))], y]


def cut_mix_of_labels(items: list[Item]) -> list[Tensor]:
    x, y = default_collate(items)
    return [x, F.one_hot(y, 3).float() * 0.9 + 0.1 * F.one_hot(y.flip(0), 3)]


def standardised(items: list[Item]) -> list[Tensor]:
    x, y = default_collate(items)
    return [(x - x.mean(0)) / (x.std(0) + 1e-6), y]


@pytest.mark.parametrize("collate", [mixup, random_mixup, cut_mix_of_labels, standardised])
def test_collate_functions_that_mix(collate: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="the collate function mixes examples"):
        collated(nn.Linear(6, 3), VECTORS, collate, lambda m, b: m(b[0]))


def packing(items: list[Tensor]) -> Tensor:
    tokens = torch.cat(items)
    each = len(tokens) // len(items)
    return tokens[: each * len(items)].view(len(items), each)


def to_the_shortest(items: list[Tensor]) -> Tensor:
    shortest = min(map(len, items))
    return torch.stack([item[:shortest] for item in items])


@pytest.mark.parametrize("lengths", [ALIKE, OTHERS], ids=["alike", "others"])
@pytest.mark.parametrize("collate", [packing, to_the_shortest])
def test_collate_functions_that_pack_and_cut(collate: Callable[..., Any], lengths: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="the collate function mixes examples"):
        collated(Words(MASKED["words one by one"]), sequences(lengths), collate, lambda m, b: m(b))


def test_once_refused_always_refused() -> None:
    run = Run(nn.Linear(6, 3), dataset=VECTORS, collate=mixup)
    for lot in range(3):
        batch = mixup(VECTORS[:8])
        run.out(lot, 8, list(range(8)), batch)
        with pytest.raises(ConfigurationError, match="mixes"):
            run.model(batch[0])


def masked_words(items: list[Tensor]) -> dict[str, Tensor]:
    ids = pad(items)
    labels = ids.clone()
    hidden = torch.bernoulli(torch.full(ids.shape, 0.3)).bool() & (ids > 0)
    labels[~hidden] = -100
    ids[hidden] = 11
    return {"ids": ids, "labels": labels}


def masked_one_by_one(items: list[Tensor]) -> dict[str, Tensor]:
    """Numbers are drawn as each item needs them: those that follow draw others."""
    items = [item.clone() for item in items]
    for item in items:
        for place in range(len(item)):
            if item[place] % 2 and random.random() < 0.5:
                item[place] = 11
    return {"ids": pad(items)}


def with_noise(items: list[Tensor]) -> dict[str, Tensor]:
    ids = pad(items)
    return {"ids": (ids + torch.from_numpy(np.random.randint(0, 2, tuple(ids.shape)))) * (ids > 0)}


@pytest.mark.parametrize("collate", [masked_words, masked_one_by_one, with_noise])
@pytest.mark.parametrize("lengths", [ALIKE, OTHERS], ids=["alike", "others"])
def test_random_numbers_are_no_mixing(collate: Callable[..., Any], lengths: list[int]) -> None:
    before = torch.get_rng_state(), random.getstate()
    batch = collate(sequences(lengths)[:8])
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    run = Run(Words(MASKED["attention with a mask"]), dataset=sequences(lengths), collate=collate)
    run.out(0, 8, list(range(8)), batch)
    state = torch.get_rng_state(), random.getstate()
    run.model.eval()(batch["ids"])
    assert set(run.trial.untried) <= {"random collate"}
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    with pytest.raises(UnsupportedModuleError, match="padding reaches"):
        collated(Words(REACHED["mean over the padded length"]), sequences(lengths), collate, lambda m, b: m(b["ids"]))


def test_texts_lists_and_records() -> None:
    class Fresh(list[dict[str, Any]]):
        def __getitem__(self, index: Any) -> Any:
            return dict(super().__getitem__(index))

    texts = Fresh(
        {"text": " ".join("ab"[j % 2] * (1 + (i + j) % 3) for j in range(2 + i % 4)), "label": i % 2} for i in range(10)
    )

    def tokens(items: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [[1 + len(word) for word in item.pop("text").split()] for item in items]
        longest = max(map(len, ids))
        return {
            "ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
            "label": torch.tensor([item["label"] for item in items]),
            "row": [len(row) for row in ids],
        }

    tried = collated(Words(MASKED["mean over own words"]), texts, tokens, lambda m, b: m(b["ids"]))
    assert set(tried.untried) == {"dataset"}  # which makes its items itself
    with pytest.raises(UnsupportedModuleError, match="padding reaches"):
        collated(Words(REACHED["mean over the padded length"]), texts, tokens, lambda m, b: m(b["ids"]))


def test_hugging_faces_collators() -> None:
    tr = pytest.importorskip("transformers")

    class Tokenizer(tr.PreTrainedTokenizer):
        """Enough of one to pad and to mask."""

        vocab_size = 12

        def __init__(self) -> None:
            super().__init__(pad_token="p", mask_token="m", unk_token="u")

        def get_vocab(self) -> dict[str, int]:
            return {c: i for i, c in enumerate("pmuabcdefghi")}

        def _convert_token_to_id(self, token: str) -> int:
            return self.get_vocab().get(token, 2)

        def _convert_id_to_token(self, index: int) -> str:
            return "pmuabcdefghi"[index]

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

    items = [{"input_ids": [3 + j % 8 for j in range(n)], "attention_mask": [1] * n} for n in OTHERS]
    config = tr.BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    model = tr.BertForMaskedLM(config)
    model.bert.embeddings.position_embeddings.requires_grad_(False)  # a table, the same for all examples
    for collate in (
        tr.DataCollatorWithPadding(Tokenizer()),
        tr.DataCollatorForLanguageModeling(Tokenizer(), mlm_probability=0.3),
    ):

        def masked(m: nn.Module, b: Any) -> Any:
            return m(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits

        assert set(collated(model, items, collate, masked).untried) <= {"random collate"}
        with pytest.raises(UnsupportedModuleError, match="padding reaches"):
            collated(model, items, collate, lambda m, b: m(input_ids=b["input_ids"]).logits)


def test_a_function_that_cannot_be_tried_is_said() -> None:
    def eight(items: list[Item]) -> list[Tensor]:
        if len(items) != 8:
            raise ValueError("8")
        return default_collate(items)

    trial = collated(nn.Linear(6, 3), VECTORS, eight, lambda m, b: m(b[0]))
    assert "collate function could not be tried" in trial.untried["collate"]
    assert "8" not in trial.untried["collate"]


# ---- losses ---------------------------------------------------------------------------------------


def losses(
    loss: Callable[..., Tensor], model: nn.Module, batch: Any, *, reduction: str = "mean", **settings: Any
) -> None:
    run = Run(model, loss_reduction=reduction, **settings)
    parts = batch if isinstance(batch, tuple) else (batch,)
    run.out(0, len(parts[0]), list(range(len(parts[0]))), batch)
    run.trial.of_loss(lambda *given: loss(model, *given), parts, run.part)


def cross_entropy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


X, Y = normal(12, 6), torch.arange(12) % 3
WEIGHTS = torch.tensor([1.0, 1.0, 100.0])


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none", weight=WEIGHTS),
        lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
        lambda m, x, y: (m(x) - m(x + 1)).square().sum(1),
        lambda m, x, y: F.cross_entropy(m(x), y) + 0.01 * m.weight.square().sum(),
    ],
)
def test_losses_that_are_means(loss: Callable[..., Tensor]) -> None:
    losses(loss, nn.Linear(6, 3), (X, Y))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / (y > 0).sum().clamp_min(1),
        lambda m, x, y: F.cross_entropy(m(x) @ m(x + 0.1).T, torch.arange(len(x))),
        lambda m, x, y: torch.logsumexp(F.cross_entropy(m(x), y, reduction="none"), 0),
        lambda m, x, y: F.cross_entropy(m((x - x.mean(0)) / x.std(0)), y),
        lambda m, x, y: F.cross_entropy(m(0.5 * x + 0.5 * x.roll(1, 0)), y, reduction="none"),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").max(),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none") / (y > 0).sum().clamp_min(1),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").flip(0),
        lambda m, x, y: m(x),
    ],
)
def test_losses_that_mix(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(PrivacyError):
        losses(loss, nn.Linear(6, 3), (X, Y))


def test_a_mean_where_a_sum_was_said() -> None:
    losses(lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), nn.Linear(6, 3), (X, Y), reduction="sum")
    with pytest.raises(TrainingLoopError, match="the loss mixes"):
        losses(cross_entropy, nn.Linear(6, 3), (X, Y), reduction="sum")


@pytest.mark.parametrize("lengths", [ALIKE, OTHERS], ids=["alike", "others"])
def test_a_loss_over_the_padded_length(lengths: list[int]) -> None:
    def each(m: nn.Module, b: Tensor) -> Tensor:
        return F.cross_entropy(m(b).transpose(1, 2), b.clamp_max(2), ignore_index=0, reduction="none")

    items = sequences(lengths)
    settings = {"dataset": items, "collate": pad}

    def tried(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        losses(loss, Words(MASKED["words one by one"]), pad(items[:8]), **settings)

    tried(lambda m, b: each(m, b).sum(1) / own_length(b))
    with pytest.raises(PrivacyError, match="the loss: padding reaches"):
        tried(lambda m, b: each(m, b).mean(1))
    with pytest.raises(PrivacyError, match="the loss"):
        tried(lambda m, b: each(m, b).sum() / (b > 0).sum())


def test_rows_of_a_pass_that_has_run() -> None:
    for mix in (False, True):
        run = Run(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
        made = F.cross_entropy(run(X), Y, reduction="none")
        made = made + 0.1 * made.mean() if mix else made
        if mix:
            with pytest.raises(UnsupportedModuleError, match="arrives as another's"):
                run.trial.of_rows(made, run.part)
            continue
        run.trial.of_rows(made, run.part)
        assert all(p.grad is None for p in run.model.parameters())
        found = run.gradients(made.sum())  # the pass is there still
        assert torch.allclose(found["2.bias"].dense(slice(0, 12)).sum(1), torch.zeros(12), atol=1e-5)
        with pytest.raises(TrainingLoopError, match=r"\[n\]"):
            run.trial.of_rows(made.mean(), run.out(1, 12))
