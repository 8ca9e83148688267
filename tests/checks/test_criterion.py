"""adadp.checks: criteria on the shapes really used, and what can be seen of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks.trials import Run, normal
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, random_split

from adadp.checks.criterion import check_criterion
from adadp.checks.dataset_records import problems_of, unseen_parts
from adadp.errors import ConfigurationError


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.f(self.e(ids))


IDS = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
SOME = IDS.masked_fill(IDS > 5, -100)


def used(criterion: nn.Module, give: Callable[[nn.Module, Tensor], Tensor], reduction: str = "mean") -> None:
    run = Run(Tokens(), loss_reduction=reduction)
    watched = run.trial.of_criterion(criterion)
    logits = run(IDS)
    assert watched.used is None
    give(criterion, logits)
    assert watched.used is run.part
    run.out(1, 8)
    assert watched.used is not run.part
    watched.detach()


def test_criteria_on_the_shapes_of_their_calls() -> None:
    used(nn.CrossEntropyLoss(), lambda c, logits: c(logits[:, 0], IDS[:, 0]))
    used(nn.CrossEntropyLoss(), lambda c, logits: c(input=logits.transpose(1, 2), target=IDS))  # all have five
    used(nn.CrossEntropyLoss(reduction="sum"), lambda c, logits: c(logits.transpose(1, 2), SOME), "sum")
    used(nn.CrossEntropyLoss(reduction="none"), lambda c, logits: c(logits.transpose(1, 2), SOME))
    used(nn.CrossEntropyLoss(reduction="sum"), lambda c, logits: c(logits.flatten(0, 1), SOME.flatten()), "sum")
    used(nn.TripletMarginLoss(), lambda c, logits: c(logits[:, 0], logits[:, 1], logits[:, 2]))
    used(nn.CosineEmbeddingLoss(), lambda c, logits: c(logits[:, 0], logits[:, 1], torch.ones(8)))
    used(nn.CTCLoss(), lambda c, logits: c(logits.log_softmax(2).transpose(0, 1), IDS[:, :2] % 8 + 1, [5] * 8, [2] * 8))


@pytest.mark.parametrize(
    ("criterion", "give"),
    [
        (nn.CrossEntropyLoss(), lambda c, logits: c(logits.flatten(0, 1), IDS.flatten())),
        (nn.CrossEntropyLoss(), lambda c, logits: c(logits.transpose(1, 2), SOME)),
        (nn.CrossEntropyLoss(reduction="none", weight=torch.arange(1.0, 10.0)), None),
    ],
)
def test_criteria_that_mix_as_they_are_used(criterion: nn.Module, give: Any) -> None:
    if give is None:
        used(criterion, lambda c, logits: c(logits[:, 0], IDS[:, 0]))
        return
    with pytest.raises(ConfigurationError):
        used(criterion, give)


class Contrastive(nn.Module):
    def forward(self, one: Tensor, other: Tensor, scale: float) -> Tensor:
        return F.cross_entropy(F.normalize(one) @ F.normalize(other).T * scale, torch.arange(len(one)))


def test_modules_of_other_arguments_are_tried_where_they_are_called() -> None:
    with pytest.raises(ConfigurationError, match="mixes examples"):
        used(Contrastive(), lambda c, logits: c(logits[:, 0], logits[:, 1], 0.1))


def test_class_weights_of_any_number() -> None:
    for number in (3, 10):
        with pytest.raises(ConfigurationError, match="Weighted means"):
            check_criterion(nn.CrossEntropyLoss(weight=torch.arange(1.0, number + 1)), "mean")
        assert check_criterion(nn.CrossEntropyLoss(weight=torch.ones(number) * 2, reduction="sum"), "sum")
    assert check_criterion(nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 3.0)), "mean")


def test_a_function_that_cannot_be_tried_is_refused() -> None:
    run = Run(Tokens())

    def triplet(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return F.triplet_margin_loss(anchor, positive, negative)

    with pytest.raises(ConfigurationError, match=r"cannot be tried.*optimizer.backward"):
        run.trial.of_criterion(triplet)
    run.trial.of_criterion(lambda outputs, targets: F.cross_entropy(outputs, targets))


def test_copies_of_a_criterion_are_not_watched() -> None:
    import copy

    criterion = nn.CrossEntropyLoss()
    run = Run(Tokens())
    watched = run.trial.of_criterion(criterion)
    logits = run(IDS)
    copy.deepcopy(criterion)(logits.flatten(0, 1), IDS.flatten())
    assert watched.used is None
    with torch.no_grad():
        criterion(logits.flatten(0, 1), IDS.flatten())  # a metric
    assert watched.used is None


# ---- datasets --------------------------------------------------------------------------------------


class Computed(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3)


PLAIN = TensorDataset(normal(10, 3))


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(PLAIN, [0, 0, 1]),
        Subset(PLAIN, [1, -9]),
        ConcatDataset([PLAIN, PLAIN]),
        ConcatDataset([ConcatDataset([PLAIN]), Subset(PLAIN, [3])]),
        Subset(ConcatDataset([PLAIN, Computed()]), [3, 12, 3]),
        StackDataset(Subset(PLAIN, [0, 0]), Subset(PLAIN, [1, 2])),
        ConcatDataset([PLAIN, TensorDataset(PLAIN.tensors[0])]),
    ],
)
def test_records_that_are_several_rows(dataset: Any) -> None:
    (problem,) = problems_of(dataset)[:1]
    assert "one record would be several rows" in problem


@pytest.mark.parametrize(
    "dataset",
    [
        PLAIN,
        [1, 1, 1],
        Subset(PLAIN, range(3)),
        ConcatDataset(random_split(PLAIN, [4, 6])),
        ConcatDataset([PLAIN, TensorDataset(normal(10, 3))]),
        StackDataset(PLAIN, PLAIN),
        Computed(),
    ],
)
def test_records_that_are_rows(dataset: Any) -> None:
    assert problems_of(dataset) == []


def test_what_cannot_be_seen_of_a_dataset_is_said() -> None:
    assert unseen_parts(PLAIN) is None
    assert unseen_parts([1, 2]) is None
    assert unseen_parts(ConcatDataset([Subset(PLAIN, [1]), PLAIN])) is None
    assert unseen_parts(StackDataset(a=PLAIN, b=[1] * 10)) is None
    for dataset in (Computed(), Subset(Computed(), [1]), ConcatDataset([PLAIN, Computed()])):
        assert "the dataset (Computed) computes its items itself" in str(unseen_parts(dataset))
    assert Run(Tokens(), dataset=Computed()).trial.untried.keys() == {"dataset"}
