"""What goes into a model, and what a dataset gives out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from adadp.errors import ConfigurationError
from soundness.field.stand import Bounded, NoNumber, Refused, World, check_unseen, compare, end, names, plain, run

COUNT = 48

# ---- batches that are no tensors ----------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Batch normalisation by hand: it mixes examples, whatever they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def normalised(self, inputs: Tensor) -> Tensor:
        return self.head(functional.batch_norm(inputs, None, None, training=True))


class Plain(Normalised):
    def normalised(self, inputs: Tensor) -> Tensor:
        return self.head(inputs)


@dataclasses.dataclass
class Batch:
    inputs: Tensor


class Holder:
    """A class of one's own around a batch, such as torchtext's or PyTorch Geometric's."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


def of_a_tensor(self: Normalised, given: Tensor) -> Tensor:
    return self.normalised(given)


def of_a_mapping(self: Normalised, given: Any) -> Tensor:
    return self.normalised(given["inputs"])


def of_a_list(self: Normalised, given: list[Tensor]) -> Tensor:
    return self.normalised(torch.stack(given))


def of_an_object(self: Normalised, given: Any) -> Tensor:
    return self.normalised(given.inputs)


#: how the model reads it, how the loop gives it
FORMS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any]]] = {
    "a tensor": (of_a_tensor, lambda inputs: inputs),
    "a dict": (of_a_mapping, lambda inputs: {"inputs": inputs}),
    "a list with a tensor for each example": (of_a_list, list),
    "a dataclass": (of_an_object, Batch),
    "an object": (of_an_object, Holder),
}


def rows(last: float = 1e3) -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(COUNT + 1, 8, generator=torch.Generator().manual_seed(0))
    inputs[-1] = last
    targets = torch.zeros(COUNT + 1, dtype=torch.long)
    return TensorDataset(inputs, targets), TensorDataset(inputs[:-1], targets[:-1])


def given(form: str, base: type[Normalised], **options: Any) -> Any:
    read, give = FORMS[form]
    model = type("Model", (base,), {"forward": read})
    return end(*rows(), model, lambda net, batch: functional.cross_entropy(net(give(batch[0])), batch[1]), **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_mixes_is_refused_whatever_it_is_given(form: str) -> None:
    ended = given(form, Normalised, bounds=(0.3,))
    assert isinstance(ended, Refused | NoNumber), ended


@pytest.mark.parametrize("form", [form for form in FORMS if form != "an object"])  # which cannot be taken apart
def test_a_model_that_does_not_mix_is_not_refused(form: str) -> None:
    ended = given(form, Plain, bounds=(0.1, 1.0))
    assert isinstance(ended, Bounded), ended


# ---- models that change their ways --------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Mixes examples while it trains, and only after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.warming = nn.Linear(8, 4), False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not self.warming:
            inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)
        return self.head(inputs)


def from_the_start(world: World) -> None:
    two_epochs(world)


def after_a_look_in_evaluation_mode(world: World) -> None:
    """The model is run once on a batch, to see that it works."""
    world.model.eval()
    world.model(next(iter(world.loader))[0])
    world.model.train()
    two_epochs(world)


def after_a_warm_up(world: World) -> None:
    world.model.warming = True
    two_epochs(world)


def two_epochs(world: World) -> None:
    for _ in range(2):
        plain(world)
        world.model.warming = False


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "loop", [from_the_start, after_a_look_in_evaluation_mode, after_a_warm_up], ids=lambda loop: loop.__name__
)
def test_a_model_is_tried_in_every_way_in_which_it_is_trained(loop: Callable[[World], None]) -> None:
    ended = end(*rows(), Sometimes, cross_entropy, loop, bounds=(0.3,))
    assert isinstance(ended, Refused | NoNumber), ended


def test_evaluation_mode_is_not_refused() -> None:
    """Dropout and the like: what differs between modes need not mix."""

    def with_evaluation(world: World) -> None:
        world.model.eval()
        world.model(torch.randn(5, 8))
        world.model.train()
        plain(world)

    ended = end(*rows(), lambda: nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0)), cross_entropy, with_evaluation)
    assert isinstance(ended, Bounded), ended


# ---- datasets -----------------------------------------------------------------------------------------------------


class Standardised(Dataset[Any]):
    """Standardised by its own statistics, as users of scikit-learn do."""

    def __init__(self, data: TensorDataset) -> None:
        inputs, self.targets = data.tensors
        self.inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Retried(Dataset[Any]):
    """Corrupt sample: return another one. Every vision code base has it."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.targets = inputs, torch.zeros(len(inputs), dtype=torch.long)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.inputs[index].isnan().any():
            return self[(index + 1) % len(self)]
        return self.inputs[index], self.targets[index]


def line() -> nn.Module:
    return nn.Linear(8, 4, bias=False)


def test_a_dataset_that_is_standardised_by_itself() -> None:
    present, absent = rows(1e4)
    check_unseen(
        "dataset",
        lambda **given: end(Standardised(present), Standardised(absent), line, cross_entropy, bounds=(0.5,), **given),
    )


def test_a_dataset_that_gives_another_example_for_a_corrupt_one() -> None:
    inputs = torch.randn(COUNT, 8, generator=torch.Generator().manual_seed(1))
    inputs[10:20] = float("nan")
    without = inputs.clone()
    without[20] = 0.0  # the one that stands in for ten: of zeros, it adds nothing
    check_unseen("dataset", lambda **given: end(Retried(inputs), Retried(without), line, cross_entropy, **given))


def test_strict_counts_a_dataset_of_ones_own() -> None:
    """Whether it keeps its examples apart is not known, so it is named; a strict engine does not take it."""
    present, _ = rows()
    world = run(Standardised(present), line, cross_entropy)
    assert world.error is None, world.error
    assert names("dataset", world.engine.guarantee(1e-5).untried)
    plainly = run(present, line, cross_entropy)
    assert not names("dataset", plainly.engine.guarantee(1e-5).untried)


def one_axis() -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def record(present: bool) -> TensorDataset:
    inputs = torch.zeros(32, 4)
    inputs[1:, 1] = 5.0
    inputs[0, 0] = 5.0 if present else 0.0
    return TensorDataset(inputs)


class Virtual(Dataset[Any]):
    """Several random crops of each image in an epoch."""

    def __init__(self, data: TensorDataset, times: int) -> None:
        self.data, self.times = data, times

    def __len__(self) -> int:
        return len(self.data) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def repeated(wrap: Callable[[TensorDataset], Dataset[Any]], **options: Any) -> Any:
    worlds = (wrap(record(True)), wrap(record(False)))
    return end(*worlds, one_axis, lambda model, batch: model(batch[0]).mean(), **options)


TWICE: dict[str, Callable[[TensorDataset], Dataset[Any]]] = {
    "a subset with repeated indices": lambda data: Subset(data, [0] * 10 + list(range(32))),
    "a concatenation of one dataset": lambda data: ConcatDataset([data] * 3),
    "a concatenation of overlapping subsets": lambda data: ConcatDataset(
        [Subset(data, range(32)), Subset(data, range(8))]
    ),
    "a subset of a concatenation": lambda data: Subset(ConcatDataset([data, data]), range(40)),
}


@pytest.mark.parametrize("wrap", TWICE.values(), ids=TWICE)
def test_a_record_that_is_there_twice_is_refused(wrap: Callable[..., Dataset[Any]]) -> None:
    """Oversampling of a rare class, several epochs in one."""
    ended = repeated(wrap)
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, ConfigurationError), ended


def test_a_record_that_is_computed_many_times() -> None:
    check_unseen("dataset", lambda **given: repeated(lambda data: Virtual(data, 20), **given))


ONCE: dict[str, Callable[[TensorDataset], Dataset[Any]]] = {
    "a subset": lambda data: Subset(data, range(0, 32, 2)),
    "a subset of a subset": lambda data: Subset(Subset(data, range(31, -1, -1)), range(16)),
    "a concatenation of parts": lambda data: ConcatDataset([Subset(data, range(16)), Subset(data, range(16, 32))]),
    "a concatenation of two": lambda data: ConcatDataset([data, TensorDataset(torch.ones(8, 4))]),
    "a random split": lambda data: torch.utils.data.random_split(
        data, [24, 8], generator=torch.Generator().manual_seed(0)
    )[0],
}


@pytest.mark.parametrize("wrap", ONCE.values(), ids=ONCE)
def test_parts_of_datasets_are_right(wrap: Callable[..., Dataset[Any]]) -> None:
    ended = repeated(wrap)
    assert isinstance(ended, Bounded), ended


def test_a_dataset_with_text_beside_its_tensors() -> None:
    """File names and captions are not read by the model."""

    class Captioned(Dataset[Any]):
        def __init__(self, data: TensorDataset) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> tuple[Tensor, str, int]:
            return self.data[index][0], "a caption", int(self.data[index][1])

    def loop(world: World) -> None:
        for inputs, _, targets in world.loader:
            world.optimizer.zero_grad()
            functional.cross_entropy(world.model(inputs), targets).backward()
            world.optimizer.step()

    ended = compare(*(run(Captioned(data), line, loop=loop) for data in rows()))
    assert isinstance(ended, Bounded), ended
