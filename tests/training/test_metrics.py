"""Figures on held-out rows: against scikit-learn's, and with noise that is paid for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adadp.accounting.events import Gaussian
from adadp.data import HELD_OUT_NOTE, Table
from adadp.training import held_out
from adadp.training.metrics import auc, confusion, of_classes, of_confusion, of_numbers


class Charged(list):
    def charge(self, event):
        self.append(event)


def test_against_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    actual = rng.choice(4, 500, p=[0.5, 0.3, 0.15, 0.05])
    scores = rng.random((500, 4)) + 0.6 * np.eye(4)[actual]
    shares = scores / scores.sum(1, keepdims=True)
    found, guess = of_classes(shares, actual, list("abcd")), shares.argmax(1)
    assert found.values["accuracy"] == pytest.approx(metrics.accuracy_score(actual, guess))
    assert found.values["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(actual, guess))
    assert found.values["f1"] == pytest.approx(metrics.f1_score(actual, guess, average="macro"))
    assert found.values["auc"] == pytest.approx(metrics.roc_auc_score(actual, shares, multi_class="ovr"))
    assert found.baseline == pytest.approx(np.bincount(actual).max() / 500)
    assert found.by_class["d"]["recall"] == pytest.approx(metrics.recall_score(actual, guess, average=None)[3])
    two = rng.integers(0, 2, 300)
    share = np.round(rng.random(300) * 0.7 + 0.3 * two, 1)  # ties
    both = np.stack([1 - share, share], 1)
    assert of_classes(both, two, ["n", "y"]).values["auc"] == pytest.approx(metrics.roc_auc_score(two, share))
    assert auc(share, np.zeros(300, dtype=bool)) is None
    numbers, guessed = rng.normal(size=200), rng.normal(size=200)
    found = of_numbers(guessed, numbers)
    assert found.values["r2"] == pytest.approx(metrics.r2_score(numbers, guessed))
    assert found.values["mae"] == pytest.approx(metrics.mean_absolute_error(numbers, guessed))


@pytest.mark.parametrize("names", [["a", "b"], [f"c{i}" for i in range(20)]])
def test_a_constant_guess_learnt_nothing_and_a_right_one_did(names):
    rng = np.random.default_rng(1)
    actual = rng.choice(len(names), 400, p=np.linspace(1, 2, len(names)) / np.linspace(1, 2, len(names)).sum())
    most = np.full(400, np.bincount(actual).argmax())
    constant = of_confusion(confusion(most, actual, len(names)), names)
    assert not constant.learnt
    assert "learnt nothing" in held_out.remark(constant, names)
    right = of_confusion(confusion(actual, actual, len(names)), names)
    assert right.learnt
    assert held_out.remark(right, names) is None


def test_a_weighted_run_is_judged_by_balanced_accuracy():
    names, actual = ["no", "yes"], np.array([0] * 900 + [1] * 100)
    half = np.array([0] * 600 + [1] * 300 + [0] * 30 + [1] * 70)  # balanced accuracy 0.68, accuracy 0.67
    for guess, learnt in (
        (half, True),
        (np.zeros(1000, dtype=np.int64), False),
        (np.ones(1000, dtype=np.int64), False),
    ):
        counts = confusion(guess, actual, 2)
        assert not of_confusion(counts, names).learnt
        found = of_confusion(counts, names, balanced=True)
        assert found.learnt is learnt
        assert (held_out.remark(found, names, balanced=True) is None) is learnt
    assert "a constant guess has 50.0%" in held_out.remark(found, names, balanced=True)
    rng = np.random.default_rng(0)
    wrong = sum(
        of_confusion(
            confusion(rng.integers(0, 2, 1000), actual, 2) + rng.normal(0, 20, (2, 2)), names, noise=20, balanced=True
        ).learnt
        for _ in range(200)
    )
    assert wrong < 20  # of 200 tosses of coins, counted with noise


def test_numbers_that_are_no_better_than_the_median_are_said():
    actual = np.random.default_rng(2).normal(size=300)
    assert not of_numbers(np.full(300, np.median(actual)), actual).learnt
    assert of_numbers(actual + 0.1, actual).learnt
    assert "constant guess" in held_out.remark(of_numbers(np.zeros(300), actual), ())


def classes(labels):
    return Table("t", {"x": np.zeros(len(labels))}, torch.tensor(labels), ("a", "b", "c"))


def numbers(labels):
    columns = {"x": np.zeros(len(labels))}
    return Table("t", columns, torch.tensor(labels, dtype=torch.float32), (), target=(0.0, 10.0))


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_paid_figures_are_charged_and_one_row_moves_them_by_at_most_one_unit(monkeypatch, kind):
    seen = []

    def watch(statistic, *, sensitivity, noise_multiplier, random_state, purpose, ledger):
        ledger.charge(Gaussian(noise_multiplier))
        seen.append(statistic / sensitivity)
        return statistic, None

    monkeypatch.setattr(held_out, "release", watch)
    generator = torch.Generator().manual_seed(3)
    for trial in range(60):
        ends = torch.tensor([-1.0, 1.0, 0.3])[torch.randint(3, (8,), generator=generator)]
        labels = ends.tolist() if kind == "numbers" else torch.randint(3, (8,), generator=generator).tolist()
        outputs = 50 * torch.randn(8, 1 if kind == "numbers" else 3, generator=generator)
        charged = Charged()
        make = numbers if kind == "numbers" else classes
        whole = held_out.paid(make(labels), outputs, 5.0, seed=trial, ledger=charged)
        held_out.paid(make(labels[:-1]), outputs[:-1], 5.0, seed=trial, ledger=charged)
        assert charged == [Gaussian(5.0)] * 2
        assert np.linalg.norm(seen[-2] - seen[-1]) <= 1 + 1e-9
        assert whole.rows == 8


def test_paid_figures_carry_noise_and_come_near_the_exact_ones():
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(3, (20_000,), generator=generator).tolist()
    outputs = torch.nn.functional.one_hot(torch.tensor(labels), 3) * 2.0 + torch.randn(20_000, 3, generator=generator)
    exact = held_out.exact(classes(labels), outputs)
    noised = held_out.paid(classes(labels), outputs, 20.0, seed=None, ledger=Charged())
    assert noised.values["accuracy"] != exact.values["accuracy"]
    assert noised.values["accuracy"] == pytest.approx(exact.values["accuracy"], abs=0.02)
    assert "auc" not in noised.values
    one = held_out.paid(numbers([0.5] * 5000), torch.full((5000, 1), 0.1), 5.0, seed=None, ledger=Charged())
    assert one.values["mae"] == pytest.approx(2.0, abs=0.1)


def test_paid_figures_of_many_classes_are_right_on_average():
    """Twenty classes have four hundred counts: their noise must not add up to rows that are not there."""
    rng = np.random.default_rng(6)
    actual = rng.integers(0, 20, 10_000)
    guess = np.where(rng.random(10_000) < 0.8, actual, rng.integers(0, 20, 10_000))
    names, counts = [f"c{i}" for i in range(20)], confusion(guess, actual, 20)
    exact = of_confusion(counts, names)
    runs = [of_confusion(counts + rng.normal(0, 29, (20, 20)), names, noise=29, rows=10_000) for _ in range(200)]
    found = np.array([run.values["accuracy"] for run in runs])
    assert found.mean() == pytest.approx(exact.values["accuracy"], abs=0.004)
    assert found.std() == pytest.approx(runs[0].noise, rel=0.2)
    assert np.mean([run.values["balanced_accuracy"] for run in runs]) == pytest.approx(0.81, abs=0.04)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_person_of_a_hundred_rows_moves_paid_figures_by_at_most_one_unit(monkeypatch, kind):
    seen = []

    def watch(statistic, *, sensitivity, **given):
        seen.append(statistic / sensitivity)
        return statistic, None

    monkeypatch.setattr(held_out, "release", watch)
    ids = np.array([*range(20), *[99] * 100])
    labels = [0] * 120 if kind == "classes" else [1.0] * 120
    outputs = torch.full((120, 1), -1.0) if kind == "numbers" else torch.tensor([[0.0, 1.0, 0.0]]).repeat(120, 1)
    make = numbers if kind == "numbers" else classes
    for rows in (120, 20):
        data = replace(make(labels[:rows]), persons=ids[:rows])
        found = held_out.paid(data, outputs[:rows], 5.0, seed=1, ledger=Charged())
        assert found.rows == len(set(ids[:rows]))
    assert 0.9 < np.linalg.norm(seen[0] - seen[1]) <= 1


def test_noise_alone_is_not_taken_for_learning():
    labels = [0] * 150 + [1] * 100 + [2] * 50
    outputs = torch.zeros(300, 3)
    outputs[:, 0] = 1.0
    learnt = [held_out.paid(classes(labels), outputs, 30.0, seed=s, ledger=Charged()).learnt for s in range(40)]
    assert sum(learnt) <= 6
    found = held_out.paid(numbers([0.5] * 90), torch.full((90, 1), 0.49), 30.0, seed=1, ledger=Charged())
    assert not found.learnt  # 90 rows are lost in such a noise, and that is what is said: not that nothing was learnt
    assert "noise alone has a standard error of 5" in held_out.remark(found, ())


def test_one_output_that_is_no_number_moves_paid_figures_as_any_other():
    """Otherwise they would be NaN, which tells that the row is there."""
    data = Table("t", {"x": np.zeros(50)}, torch.zeros(50), (), target=(0.0, 1.0))
    outputs = torch.zeros(50, 1)
    with_one = outputs.clone()
    with_one[7] = float("nan")
    first, second = (held_out.paid(data, given, 5.0, seed=3, ledger=Charged()) for given in (outputs, with_one))
    assert np.isfinite(list(second.values.values())).all()
    assert abs(second.values["mae"] - first.values["mae"]) <= 1.001 / first.rows


@pytest.mark.parametrize(
    ("dataset", "test", "paid", "said"),
    [
        ("mnist", None, False, held_out.PUBLISHED),
        ("digits", None, False, held_out.PUBLISHED),
        ("cifar10", None, False, held_out.PUBLISHED),
        ("cifar100", None, False, HELD_OUT_NOTE),  # no digest: test-*.parquet of one's own would pass for it
        ("mnist", "own.csv", False, HELD_OUT_NOTE),
        ("own.csv", None, False, HELD_OUT_NOTE),
        ("mnist", None, True, held_out.COVERED),
        ("own.csv", None, True, held_out.COVERED),
    ],
)
def test_a_note_tells_published_examples_from_private_rows(dataset, test, paid, said):
    assert held_out.note(dataset, test, paid=paid) == said
