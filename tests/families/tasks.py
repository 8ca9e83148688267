"""What the families are trained on: batches of unlike examples, a loss for each, and one example without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adadp import losses

Batch = dict[str, Tensor]

WORDS, LENGTH, CLASSES = 23, 7, 5
PAD, START = 0, 1  # no word of an example is either of them
IMAGE = 16  # pixels on a side


@dataclass(frozen=True)
class Task:
    """Examples of one kind.

    Attributes:
        batch: makes so many examples of unlike lengths, padded at the end.
        losses: a model's losses on a batch, [n].
        bare: one example's rows without padding; as they are where there is none.
        crowd: as many examples as a row has tokens: then a table of positions looks like a batch.
    """

    batch: Callable[[int], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    bare: Callable[[Batch], Batch] = dict
    crowd: int = LENGTH


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _texts(count: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words [n, T], and a mask that is 1 where they are. The longest text is the first, the shortest has two words."""
    lengths = [longest - 2 * place % (longest - 1) for place in range(count)]
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(START + 1, WORDS, (count, longest), generator=generator) * mask, mask


def _unlabelled(words: Tensor, mask: Tensor) -> Tensor:
    return words.masked_fill(mask == 0, losses.IGNORED)


def _text_batch(count: int) -> Batch:
    words, mask = _texts(count, LENGTH, _generator())
    return {"input_ids": words, "attention_mask": mask, "labels": _unlabelled(words, mask)}


def _ended_batch(count: int) -> Batch:
    """Texts that end with a token of their own, by which a tower finds the place of their embedding."""
    batch = _text_batch(count)
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    return {**batch, "input_ids": batch["input_ids"].scatter(1, last, START)}


def _masked_batch(count: int) -> Batch:
    batch = _text_batch(count)
    labels = torch.full_like(batch["labels"], losses.IGNORED)
    labels[:, :2] = batch["labels"][:, :2]
    return {**batch, "input_ids": torch.where(labels == losses.IGNORED, batch["input_ids"], START), "labels": labels}


def _pair_batch(count: int) -> Batch:
    generator = _generator()
    words, mask = _texts(count, LENGTH, generator)
    answers, answered = _texts(count, LENGTH - 2, generator)
    given = torch.cat([torch.full((count, 1), START), answers[:, :-1]], 1)
    labels = _unlabelled(answers, answered)
    return {"input_ids": words, "attention_mask": mask, "decoder_input_ids": given, "labels": labels}


def _labels(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def _image_batch(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, IMAGE, IMAGE, generator=_generator()), "labels": _labels(count)}


def _sound_batch(count: int) -> Batch:
    return {"input_values": torch.randn(count, 60, generator=_generator()), "labels": _labels(count)}


def _spectrum_batch(count: int) -> Batch:
    batch = _pair_batch(count)
    features = torch.randn(count, 4, 12, generator=_generator())  # Mel bands, twice as many frames as the encoder has
    return {"input_features": features, "decoder_input_ids": batch["decoder_input_ids"], "labels": batch["labels"]}


def _without_padding(batch: Batch) -> Batch:
    length = int(batch["attention_mask"].sum())
    known = max(1, int((batch["labels"] != losses.IGNORED).sum()))
    inner = {name: batch[name][:, :length] for name in ("input_ids", "attention_mask")}
    if "decoder_input_ids" not in batch:
        return {**inner, "labels": batch["labels"][:, :length]}
    return {**inner, "decoder_input_ids": batch["decoder_input_ids"][:, :known], "labels": batch["labels"][:, :known]}


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
    return getattr(output, "logits", output)


def _causal(model: nn.Module, batch: Batch) -> Tensor:
    logits = _logits(model, batch)
    return losses.causal_lm(logits[:, -batch["labels"].shape[1] :], batch["labels"])  # prompts come before the text


def _tokens(model: nn.Module, batch: Batch) -> Tensor:
    return losses.masked_lm(_logits(model, batch), batch["labels"])


def _class(model: nn.Module, batch: Batch) -> Tensor:
    return losses.classification(_logits(model, batch), batch["labels"])


def _embedding(model: nn.Module, batch: Batch) -> Tensor:
    """Of a tower: the squared distance to a made-up embedding."""
    output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
    names = ("text_embeds", "image_embeds", "pooler_output")
    found = next(output[name] for name in names if name in output)
    return losses.regression(found, torch.linspace(-1, 1, found.shape[1]).expand_as(found))


def _boxes(model: nn.Module, batch: Batch) -> Tensor:
    """Of a detector: every query's class, and its box at the centre."""
    output: Any = model(pixel_values=batch["pixel_values"])
    logits = output.logits
    wanted = batch["labels"][:, None].expand(logits.shape[:2])
    return losses.masked_lm(logits, wanted) + losses.regression(output.pred_boxes, 0.5 * output.pred_boxes.detach())


TEXT = Task(_text_batch, _causal, _without_padding)
MASKED = Task(_masked_batch, _tokens, _without_padding)
PAIRS = Task(_pair_batch, _tokens, _without_padding)
TEXT_TOWER = Task(_ended_batch, _embedding, _without_padding)
IMAGES = Task(_image_batch, _class, crowd=16)  # patches of 4 x 4 pixels
IMAGE_TOWER = Task(_image_batch, _embedding, crowd=17)  # and a class token
DETECTION = Task(_image_batch, _boxes, crowd=3)
SOUNDS = Task(_sound_batch, _class, crowd=14)
SPEECH = Task(_spectrum_batch, _tokens, crowd=6)
