"""Persons with several rows and views of one example, from ids to what is released and what may be said of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adadp import Ledger, PrivacyEngine, TrainingStep, Units
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import PoissonGaussian
from adadp.algorithms import Task, create
from adadp.errors import ConfigurationError, LedgerError
from adadp.gradients.collection import Gradients
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.segments import Segments
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.sums import NoisedSums
from adadp.persons import key_of
from adadp.randomness import Randomness
from adadp.sampling.lot import Microbatch
from adadp.sampling.units import Grouping

SIGMA, BOUND = 1.0, 0.5


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.arange(rows) % 3)


class Sums(Observer):
    """Keeps what is released before the noise, and releases it as it is."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.lots: list[float] = []

    def noising(self, release: Unnoised) -> NoisedSums:
        self.found.append({name: value.clone() for name, value in release.sums.items()})
        self.lots.append(release.expected_lot)
        return NoisedSums(release.sums)


def made_private(dataset: Dataset[Any], lot: int, engine: PrivacyEngine | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": BOUND, **options}
    engine = engine or PrivacyEngine(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay: every lot is bounded alike
    loader = DataLoader(dataset, batch_size=lot)
    return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def trained(dataset: Dataset[Any], lot: int, lots: int = 1, **options: Any) -> tuple[Sums, list[Microbatch]]:
    """What an ordinary loop releases, and the parts of lots that it was given."""
    model, optimizer, loader = made_private(dataset, lot, **options)
    sums, seen = Sums(), []
    optimizer.observe(sums)
    while len(sums.found) < lots:
        for inputs, targets in loader:
            seen.append(loader.current)
            optimizer.zero_grad()
            optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
            optimizer.step()
    return sums, seen


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))


# ---- the attack: somebody with a hundred rows -----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 100, 300])
def test_a_person_of_a_hundred_rows_moves_a_release_by_the_bound(reduction: str, size: int | None) -> None:
    rows = data(120)
    inputs, targets = rows.tensors
    inputs[20:], targets[20:] = 5.0, 1
    ids = [*range(20), *["somebody"] * 100]

    def released(count: int, persons: bool) -> dict[str, Tensor]:
        dataset = TensorDataset(inputs[:count], targets[:count])
        if not persons:
            return trained(dataset, count)[0].found[0]
        unit = Units(ids[:count], max_rows=100, reduction=reduction, declared=21)
        return trained(dataset, 21, unit=unit, max_physical_batch_size=size)[0].found[0]

    assert distance(released(120, True), released(20, True)) == pytest.approx(BOUND, rel=1e-4)
    assert distance(released(120, False), released(20, False)) == pytest.approx(100 * BOUND, rel=1e-4)


# ---- lots are lots of persons ----------------------------------------------------------------------------------------


IDS = [f"p{number}" for number in range(30) for _ in range(1 + number % 4)] + [None, float("nan"), ""]


def test_each_lot_holds_whole_persons_and_the_denominator_is_their_expected_number() -> None:
    rows = data(len(IDS))
    sums, parts = trained(rows, 6, lots=20, unit=IDS, max_physical_batch_size=16)
    assert set(sums.lots) == {6}
    lots: dict[int, list[int]] = {}
    for part in parts:
        assert part.count <= 16
        assert len(part.segments) <= 2  # 16 // 8, whatever rows the persons have
        for number in range(len(part.segments)):
            rows_of = part.indices[part.segments.rows_of(slice(number, number + 1))]
            assert len({key_of(IDS[row]) for row in rows_of}) <= 1  # a segment is one person
        lots.setdefault(part.lot, []).extend(part.indices)
    whole = Counter(str(key) for key in IDS[:-3])
    for drawn in lots.values():
        assert len(set(drawn)) == len(drawn)
        for key, count in Counter(str(IDS[row]) for row in drawn if row < len(IDS) - 3).items():
            assert count == whole[key]  # none of them has more than eight rows
        without = [row for row in drawn if row >= len(IDS) - 3]
        assert len(without) in (0, 3)  # rows without an id are one person


def test_persons_are_drawn_with_the_declared_rate() -> None:
    units = Units(IDS, declared=62)
    drawn = units.sampling("poisson", 31)
    assert units.there == 31
    assert len(drawn) == 2
    randomness = Randomness(5)
    sizes = [len(drawn.draw(number, randomness)) for number in range(400)]
    assert np.mean(sizes) == pytest.approx(15.5, abs=0.6)  # q = 31 / 62 of the 31 that are there
    assert drawn.event(1.0).rate == 0.5


def test_rows_of_persons_who_have_more_are_drawn_anew_for_each_lot() -> None:
    grouping, randomness = Grouping(Units(["a"] * 5 + ["b"], max_rows=2)), Randomness(5)
    seen = Counter()
    for lot in range(2000):
        first, second = grouping.rows_of([0, 1], lot, randomness)
        assert len(set(first)) == 2
        assert second == [5]
        assert grouping.rows_of([0, 1], lot, randomness) == [first, second]
        seen.update(first)
    assert all(abs(seen[row] - 800) < 100 for row in range(5))


def test_pieces_and_padding_change_nothing_that_is_released() -> None:
    whole = trained(data(len(IDS)), 6, lots=4, unit=IDS)[0].found
    for options in (
        {"max_physical_batch_size": 16},
        {"pad_lots": True},
        {"pad_lots": True, "max_physical_batch_size": 24},
    ):
        found = trained(data(len(IDS)), 6, lots=4, unit=IDS, **options)[0].found
        assert max(map(distance, whole, found)) < 1e-9


def test_an_empty_lot_is_released_too() -> None:
    sums, parts = trained(data(40), 1, lots=30, unit=list(range(20)) * 2)
    empty = [number for number, part in enumerate(parts) if not part.indices]
    assert empty
    assert all(float(value.abs().max()) == 0 for number in empty for value in sums.found[number].values())


def test_a_training_step_cuts_lots_between_persons() -> None:
    def losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda inputs, targets: nn.functional.cross_entropy(model(inputs), targets, reduction="none")

    found = []
    for size in (None, 16):
        model, optimizer, loader = made_private(data(len(IDS)), 6, unit=IDS, max_physical_batch_size=size)
        sums = Sums()
        optimizer.observe(sums)
        step = TrainingStep(optimizer, losses(model))
        for batch in loader:
            step(*batch)
        found.append(sums.found)
    assert max(map(distance, *found)) < 1e-9
    assert max(map(distance, found[0], trained(data(len(IDS)), 6, lots=len(found[0]), unit=IDS)[0].found)) < 1e-9


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_persons_of_one_row_are_examples(sampling: str) -> None:
    plain = trained(data(30), 5, lots=3, sampling=sampling)[0]
    persons = trained(data(30), 5, lots=3, sampling=sampling, unit=range(30))[0]
    assert max(map(distance, plain.found, persons.found)) < 1e-9
    assert plain.lots == persons.lots


# ---- views of one example --------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Items that are another view at each call."""

    def __init__(self, base: TensorDataset) -> None:
        self.base, self.calls = base, 0

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        inputs, target = self.base[index]
        return inputs + 0.1 * torch.randn(4, dtype=torch.float64), target


def test_views_of_an_example_are_one_contribution() -> None:
    torch.manual_seed(0)
    dataset = Noisy(data(30))
    model, optimizer, loader = made_private(dataset, 6, augmentations=4, max_grad_norm=1e6)
    sums = Sums()
    optimizer.observe(sums)
    for inputs, targets in loader:
        part = loader.current
        assert part.segments.sizes == (4,) * (len(inputs) // 4)
        assert list(part.indices) == [row for row in part.indices[::4] for _ in range(4)]
        assert len(inputs.unique(dim=0)) == len(inputs)
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        optimizer.backward(losses)
        optimizer.step()
        values = [value.detach().clone().requires_grad_() for value in model.parameters()]
        outputs = inputs @ values[0].T + values[1]
        (nn.functional.cross_entropy(outputs, targets, reduction="sum") / 4).backward()
        wanted = dict(zip(("weight", "bias"), (value.grad for value in values), strict=True))
        assert distance(sums.found[-1], wanted) < 1e-9
    assert len(loader) == 5


def test_views_of_equal_rows_change_nothing() -> None:
    plain = trained(data(30), 6, lots=3)[0].found
    views = trained(data(30), 6, lots=3, augmentations=3)[0].found
    assert max(map(distance, plain, views)) < 1e-9


def test_views_and_persons_go_together() -> None:
    for reduction in ("mean", "sum"):
        units = Units(IDS, reduction=reduction)
        once = trained(data(len(IDS)), 6, lots=3, unit=units)[0].found
        twice = trained(data(len(IDS)), 6, lots=3, unit=units, augmentations=2)[0].found
        assert max(map(distance, once, twice)) < 1e-9


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_the_guarantee_is_for_persons() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = made_private(data(len(IDS)), 6, engine, unit=Units(IDS, name="patient", max_rows=4))
    for inputs, targets in loader:
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
        optimizer.step()
    found = engine.guarantee(1e-3)
    assert json.loads(found.to_json())["unit"] == "one person"
    assert found.sentence().startswith("Whether or not one person is in the data")
    text = "a person is all rows with one value of patient, however many; each person has one id"
    assert any(assumption.startswith(text) for assumption in found.assumptions)
    assert any("number of persons N" in assumption for assumption in found.assumptions)
    assert any("at most 4 rows" in assumption for assumption in found.assumptions)
    wanted = get_accountant("pld").epsilon([(PoissonGaussian(SIGMA, 6 / 31), len(loader))], 1e-3).epsilon
    assert found.epsilon == pytest.approx(wanted)


def test_persons_and_examples_are_not_mixed_in_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with PrivacyEngine(ledger=path, dataset="visits") as engine:
        made_private(data(len(IDS)), 6, engine, unit=IDS)
        with pytest.raises(LedgerError, match="one person"):
            made_private(data(len(IDS)), 6, engine)
    with PrivacyEngine(ledger=path, dataset="visits") as engine, pytest.raises(LedgerError, match="one person"):
        made_private(data(len(IDS)), 6, engine)
    with PrivacyEngine(ledger=path, dataset="visits") as engine:
        made_private(data(len(IDS)), 6, engine, unit=IDS)
    assert Ledger(path).guarantee(1e-3).unit == "one person"


def test_a_run_for_persons_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def begun(unit: object, **options: Any) -> Any:
        engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl", dataset="visits", **options)
        return engine, *made_private(data(len(IDS)), 6, engine, unit=unit, steps=4)

    engine, model, optimizer, loader = begun(IDS)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
        optimizer.step()
        if number == 1:
            break
    engine.save_checkpoint(tmp_path / "run", module=model, optimizer=optimizer)
    planned = engine.guarantee(1e-3).epsilon
    engine.close()
    with pytest.raises(LedgerError):
        begun(None, resume=tmp_path / "run")
    engine, model, optimizer, loader = begun(IDS, resume=tmp_path / "run")
    assert engine.resumed.lot == 2
    found = engine.guarantee(1e-3)
    assert (found.epsilon, found.unit) == (pytest.approx(planned), "one person")


def test_noise_for_a_target_is_that_for_persons() -> None:
    torch.manual_seed(0)
    engine, model = PrivacyEngine(), nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, private, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(len(IDS)), batch_size=6),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=3,
        unit=IDS,
    )
    assert len(loader) == 31 // 6
    for _ in range(3):
        for inputs, targets in loader:
            private.zero_grad()
            private.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
            private.step()
    assert 1.9 < engine.get_epsilon(1e-3) <= 2.0


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unit": [1, 2]}, "2 ids, but the dataset has 30 rows"),
        ({"unit": "patient"}, "one for each row"),
        ({"unit": np.zeros((30, 2))}, "shape"),
        ({"unit": [0] * 30}, "counts persons"),
        ({"unit": range(30), "max_physical_batch_size": 4}, "no room for the 8 rows"),
        ({"augmentations": 8, "max_physical_batch_size": 4}, "never split"),
        ({"augmentations": 0}, "at least 1"),
        ({"unit": Units(range(30), declared=40), "sampling": "fixed"}, "cannot be declared"),
    ],
)
def test_what_cannot_be_kept_together_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        made_private(data(30), 6, **options)


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"reduction": "max"}, {"declared": 0}, {"max_rows": True}])
def test_units_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Units([1, 2], **settings)


def test_a_line_search_is_refused() -> None:
    algorithm = create("agd")
    algorithm.settle(lot=6, steps=5, noise_multiplier=1.0, weights=15)
    model = nn.Linear(4, 3)
    with pytest.raises(ConfigurationError, match="line search"):
        algorithm.make_private(
            PrivacyEngine(),
            module=model,
            optimizer=algorithm.optimizer(model.parameters()),
            data_loader=DataLoader(data(30), batch_size=6),
            noise_multiplier=1.0,
            task=Task(6, 5, lambda count, generator: torch.randn(count, 4, generator=generator), 1e-3),
            unit=range(30),
        )


def test_ids_are_compared_as_texts() -> None:
    assert Units([1, 1.0, "1", " 1 ", np.int64(1), torch.tensor(1)]).there == 1
    assert Units([None, math.nan, "", "NaN", np.float32("nan")]).there == 1
    assert Units(np.array([3.0, 3.5, 4.0])).there == 3
    assert Units(torch.tensor([3, 3, 4])).there == 2


# ---- the checks above see what they are for --------------------------------------------------------------------------


def _rows_alone(
    forms: dict[str, PerExample], segments: Segments, *, scale: float, keep: Tensor, some: bool
) -> Gradients:
    """As if each row were a contribution."""
    return Gradients(forms, len(keep), scale=scale, keep=keep)


def test_rows_that_count_for_themselves_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradients, "of_segments", _rows_alone)
    with pytest.raises(AssertionError):
        test_a_person_of_a_hundred_rows_moves_a_release_by_the_bound("sum", None)
    with pytest.raises(AssertionError):
        test_views_of_equal_rows_change_nothing()
