"""The assumptions of a guarantee, in words: those of every run, and what is known at its start to be untried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adadp.accounting.guarantee import PUBLIC_NUMBER
from adadp.sampling.schemes import NO_NOISE
from adadp.sampling.units import Units

#: The assumptions of every guarantee, the most often violated first.
_STANDING = (
    "nothing computed from a batch decides what the loop does next (skip, stop, rate, curriculum, checkpoint, log): "
    "losses and metrics of private batches may be seen by the curator only, and must not stop training",
    "row i of the losses is computed from example i and the weights alone, not divided by a number of tokens, a length "
    "or a maximum of the batch; a scalar loss is a {reduction} over examples of such terms",
    "row i of what the module is given is example i of the loader's batch, and weights meet data in its calls only",
    "item i of the dataset is made from record i alone, and no record is in it twice",
    "the initial weights, buffers, tokenizer and preprocessing were made without this data, or their cost is in this "
    "ledger; other runs on this data are in this ledger too, or cost extra",
    "{number}",
    "all settings are public, and none was chosen by looking at the private data",
    "floating-point numbers stand for real ones, but for the rounding that the clipping norms allow for: as the model "
    "computes it, an example's gradient does not depend on the others of its batch",
)
_ONE_BY_ONE = "the batches hold one example each: whether the model and the loss keep examples apart could not be tried"
_PENALTY = "penalty= is a function of the weights alone: no private data is in it"
_IN_PIECES = (
    "schedulers and counters of the loop count lots (optimizer.stepped) and not batches: how many batches a lot comes "
    "in depends on how many examples were drawn"
)
#: The reason that a refusal leaves. It is decided by the model, the loss and the collate function.
REFUSED = "refused while training: {}"
_LEFT_BEFORE = (
    "an earlier run of this engine handed out lots and released none of them: that it was not given up because of what "
    "was in them cannot be seen"
)
_TRAINED_BEFORE = (
    "the weights were changed many times, or had gradients, before make_private: if they were trained on this data "
    "without privacy, no number here holds for the model"
)


def standing(loss_reduction: str, *, penalty: bool, in_pieces: bool, units: Units | None = None) -> list[str]:
    """What the guarantee of a run rests on whatever its clipping and randomness are. `units`: whose the rows are."""
    number = PUBLIC_NUMBER if units is None else PUBLIC_NUMBER.replace("examples", "persons")
    texts = [text.format(reduction=loss_reduction, number=number) for text in _STANDING]
    texts += [] if units is None else units.assumptions()
    return [*texts, *([_IN_PIECES] if in_pieces else []), *([_PENALTY] if penalty else [])]


def untried_at_start(trained_before: bool, largest_batch: int) -> list[str]:
    """What is known to be untried before the first batch is drawn."""
    return [*([_TRAINED_BEFORE] if trained_before else []), *([_ONE_BY_ONE] if largest_batch == 1 else [])]


def untried_before(waiting: Iterable[Sequence[str]]) -> list[str]:
    """What is untried because of earlier runs of the engine; `waiting` has each one's reasons that were never written.

    A refused model or loss may be mended and made private again: that says nothing about a lot.
    """
    given_up = any(not reason.startswith(REFUSED.format("")) for reasons in waiting for reason in reasons)
    return [_LEFT_BEFORE] if given_up else []


def against(expose_raw: bool, noise_multiplier: float) -> list[str]:
    """Why there is no guarantee for a run with these settings, whatever its clipping and sampling."""
    shown = ["expose_raw shows counts over private examples without noise"] if expose_raw else []
    return [*shown, *([] if noise_multiplier else [NO_NOISE])]
