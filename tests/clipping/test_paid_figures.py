"""Means of loss and other figures that are released beside the gradient: coordinates of one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, PrivacyEngine, TrainingStep, Units
from adadp import Released as FromReleases
from adadp.clipping import Adaptive, Clipping, Flat, PaidFigures, PerLayer
from adadp.errors import CheckpointError, ConfigurationError, TrainingLoopError
from adadp.mechanism.observation import Unnoised
from adadp.shapes import Paid

MOST, NOISE = 4.0, 1.5
LOSS = {"loss": (0.0, MOST)}
SEVERAL = {**LOSS, "accuracy": (0.0, 1.0), "error": (-30.0, 50.0)}


def made_private(
    clipping: Clipping, inputs: Tensor, targets: Tensor, noise: float = NOISE, batch: int | None = None, **more: Any
) -> tuple[nn.Module, Any, Any, PrivacyEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = PrivacyEngine(seed=1)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=batch or len(inputs))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"noise_multiplier": noise, "clipping": clipping, **more}
    return *engine.make_private(module=model, optimizer=optimizer, data_loader=data, **settings), engine


def step(
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    change: Callable[[Tensor], Tensor] = lambda losses: losses,
    figures: Callable[[Tensor, Tensor], Mapping[str, Any]] = lambda outputs, targets: {},
) -> None:
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        losses = change((outputs - targets).square().mean(1))
        optimizer.backward(losses, figures=figures(outputs[:, 0], targets[:, 0]))
        optimizer.step()


class Sums:
    """Takes down what one lot's sums are in units of their noise."""

    def __init__(self) -> None:
        self.lengths: list[float] = []

    def noising(self, seen: Unnoised) -> None:
        scaled = [(value / seen.stddev[name]).double().flatten() for name, value in seen.sums.items()]
        self.lengths.append(float(torch.cat(scaled).norm() * seen.noise_multiplier))

    def noised(self, seen: Unnoised, noisy: Any) -> None: ...

    def stepped(self, lot: int, released: Any) -> None: ...


INNER = {
    "flat": lambda: Flat(0.5),
    "adaptive": lambda: Adaptive(0.5),
    "per layer": lambda: PerLayer(0.5),
    "ellipsoid, released": lambda: Ellipsoid(0.5, source=FromReleases()),
    "ellipsoid, paid": lambda: Ellipsoid(0.5, source=Paid(every=1)),
}


@pytest.mark.parametrize("extreme", [1e-9, 1.0, 1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("name", INNER)
def test_one_example_is_at_most_the_bound_in_all_that_is_released(name: str, extreme: float) -> None:
    """Gradient, the inner clipping's statistics and loss together; an example at the bound of all comes to 1."""
    model, optimizer, loader, _ = made_private(PaidFigures(INNER[name](), LOSS), torch.randn(1, 3), torch.ones(1, 1))
    optimizer.observe(sums := Sums())
    for _ in range(3):
        step(model, optimizer, loader, lambda losses: losses * extreme)
    assert len(sums.lengths) == 3
    assert max(sums.lengths) <= 1 + 1e-6
    if extreme == 1e6:
        assert max(sums.lengths) > 0.95


def test_the_mean_is_that_of_cut_losses() -> None:
    inputs = torch.randn(64, 3)
    clipping = PaidFigures(Flat(1.0), LOSS)
    model, optimizer, loader, engine = made_private(
        clipping, inputs, torch.arange(64.0)[:, None], noise=1e-3, max_physical_batch_size=10
    )
    with torch.no_grad():
        wanted = (model(inputs) - torch.arange(64.0)[:, None]).square().mean(1).clamp(max=MOST).mean()
    step(model, optimizer, loader)
    assert float(clipping.means["loss"]) == pytest.approx(float(wanted), abs=1e-3)
    assert "1 step" in engine.guarantee(1e-5).sampling


def test_its_noise_is_what_is_said() -> None:
    """5 sqrt(k) sigma (high - low) / lot for each of k figures."""
    clipping = PaidFigures(Flat(1.0), SEVERAL, share=0.01)
    model, optimizer, loader, _ = made_private(clipping, torch.randn(8, 3), torch.zeros(8, 1))
    found: dict[str, list[float]] = {name: [] for name in SEVERAL}
    for _ in range(300):
        step(
            model, optimizer, loader, lambda losses: losses * 0,
            lambda outputs, _: {"accuracy": outputs > 9, "error": torch.full_like(outputs, 10.0)},
        )  # fmt: skip
        for name, mean in clipping.means.items():
            found[name].append(float(mean))
    for name, (low, high) in SEVERAL.items():
        values, wanted = torch.tensor(found[name]), 5 * 3**0.5 * NOISE * (high - low) / 8
        assert float(values.std()) == pytest.approx(wanted, rel=0.2)
        assert abs(float(values.mean()) - (10.0 if name == "error" else 0.0)) < 4 * wanted / 300**0.5


def test_it_costs_what_the_step_costs() -> None:
    ordinary = made_private(Flat(1.0), torch.randn(8, 3), torch.zeros(8, 1))
    paid = made_private(PaidFigures(Flat(1.0), LOSS), torch.randn(8, 3), torch.zeros(8, 1))
    for model, optimizer, loader, _ in (ordinary, paid):
        step(model, optimizer, loader)
    assert ordinary[3].get_epsilon(1e-5) == paid[3].get_epsilon(1e-5)
    radii = [one[1]._step.clipping.stddev(1.0) for one in (ordinary, paid)]
    assert radii[1]["0.weight"] == pytest.approx(radii[0]["0.weight"] / 0.99**0.5)


def test_scalar_losses_and_wrong_numbers_are_refused() -> None:
    model, optimizer, loader, _ = made_private(PaidFigures(Flat(1.0), LOSS), torch.randn(8, 3), torch.zeros(8, 1))
    inputs, targets = next(iter(loader))
    (model(inputs) - targets).square().mean().backward()
    with pytest.raises(ConfigurationError, match="losses for each example"):
        optimizer.step()
    for bounds in (
        {},
        {"loss": (0, 0)},
        {"loss": (0, float("inf"))},
        {"loss": (2, 1)},
        {"loss": 8},
        {"x": (0, 5e-324)},
    ):
        with pytest.raises(ConfigurationError, match="figure"):
            PaidFigures(Flat(1.0), bounds)
    with pytest.raises(ConfigurationError):
        PaidFigures(Flat(1.0), LOSS, share=1.0)
    with pytest.raises(ConfigurationError, match="in one"):
        PaidFigures(PaidFigures(Flat(1.0), LOSS), SEVERAL)


# ---- several figures ---------------------------------------------------------------------------------------------


class Released(Sums):
    """Keeps one lot's sums and their noise."""

    def noising(self, seen: Unnoised) -> None:
        self.sums = {name: value.clone().double() for name, value in seen.sums.items()}
        self.stddev = dict(seen.stddev)


OTHERS = [(0.3, 4.0), (0.9, -7.0)]
VALUES = [-1e9, 0.3, 1e9, float("nan"), float("inf")]


def lot_of(rows: list[int], far: float, figures: list[tuple[float, float]], **more: Any) -> Released:
    """What a lot of these rows would release; row i has the figures `figures[i]`, row 0 losses times `far`."""
    inputs = torch.randn(3, 3, generator=torch.Generator().manual_seed(4))[rows]
    numbers = torch.tensor(rows, dtype=torch.float32)[:, None]
    model, optimizer, loader, _ = made_private(PaidFigures(Flat(0.5), SEVERAL, share=0.3), inputs, numbers, **more)
    optimizer.observe(seen := Released())

    def given(_: Tensor, row: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.tensor([figures[int(i)][place] for i in row], dtype=torch.float64)
            for place, name in enumerate(("accuracy", "error"))
        }

    for batch, row in loader:
        optimizer.zero_grad()
        losses = model(batch).square().mean(1) * torch.where(row[:, 0] == 0, far, 1.0)
        optimizer.backward(losses, figures=given(losses, row[:, 0]))
        optimizer.step()
    return seen


def test_neighbouring_lots_differ_by_at_most_the_noise_says() -> None:
    """All that one example changes, over gradient and figures together: at most 1/sigma, and 1/sigma is reached."""
    most = 0.0
    without = lot_of([1, 2], 1.0, [(0.0, 0.0), *OTHERS])
    for far in (0.0, 1e4):
        for first in VALUES:
            for second in VALUES:
                with_it = lot_of([1, 0, 2], far, [(first, second), *OTHERS])
                apart = [(with_it.sums[n] - without.sums[n]) / with_it.stddev[n] for n in without.sums]
                effect = float(torch.cat([part.flatten() for part in apart]).norm())
                assert effect <= 1 / NOISE + 1e-6, (far, first, second)
                most = max(most, effect)
    assert most == pytest.approx(1 / NOISE, rel=1e-3)


def test_pieces_padding_and_rows_left_out() -> None:
    figures = [(0.7, 5.0), *OTHERS]
    key = "shape/0.weight/figures"
    whole = lot_of([0, 1, 2], 1.0, figures).sums[key]
    assert torch.allclose(lot_of([0, 1, 2], 1.0, figures, max_physical_batch_size=2).sums[key], whole)
    assert torch.allclose(lot_of([0, 1, 2], 1.0, figures, max_physical_batch_size=2, pad_lots=True).sums[key], whole)
    accuracy, error = 2 * (0.7 + 0.3 + 0.9) - 3, (5.0 + 4.0 - 7.0 - 3 * 10) / 40
    assert whole[1:].tolist() == pytest.approx([accuracy, error], abs=1e-6)

    clipping = PaidFigures(Flat(1.0), {"accuracy": (0, 1)})
    model, optimizer, loader, _ = made_private(clipping, torch.randn(4, 3), torch.zeros(4, 1))
    optimizer.observe(seen := Released())
    for inputs, _ in loader:
        optimizer.backward(model(inputs)[:, 0], figures={"accuracy": torch.tensor([True, False, True, True])})
        optimizer.step(keep=torch.tensor([True, False, False, True]))
    assert seen.sums[key].tolist() == [2.0]


def test_bounds_whose_middle_is_rounded() -> None:
    """1e16 and 1e16 + 2 have no number between them."""
    clipping = PaidFigures(Flat(1.0), {"far": (1e16, 1e16 + 2)})
    model, optimizer, loader, _ = made_private(clipping, torch.randn(1, 3), torch.zeros(1, 1))
    for value in (0.0, 1e16, 1e16 + 2, 1e20):
        optimizer.observe(seen := Released())
        far = torch.tensor([value], dtype=torch.float64)
        step(model, optimizer, loader, figures=lambda *_, far=far: {"far": far})
        assert seen.sums["shape/0.weight/figures"].abs() <= 1


def test_several_means_are_those_of_the_lot_for_the_cost_of_the_step() -> None:
    inputs, targets = torch.randn(64, 3), torch.arange(64.0)[:, None]
    clipping = PaidFigures(Flat(1.0), SEVERAL)
    assert clipping.means == {}
    model, optimizer, loader, engine = made_private(clipping, inputs, targets, noise=1e-3, max_physical_batch_size=10)
    with torch.no_grad():
        outputs = model(inputs)[:, 0]
    step(
        model, optimizer, loader, lambda losses: losses,
        lambda outputs, targets: {"accuracy": targets > 15.5, "error": targets - outputs},
    )  # fmt: skip
    means = {name: float(mean) for name, mean in clipping.means.items()}
    wanted = {"accuracy": 0.75, "error": float((targets[:, 0] - outputs).clamp(-30, 50).mean())}
    assert {name: means[name] for name in wanted} == pytest.approx(wanted, abs=0.05)
    assert list(means) == list(SEVERAL)
    ordinary = made_private(Flat(1.0), inputs, targets, noise=1e-3)
    step(*ordinary[:3])
    assert engine.get_epsilon(1e-5) == ordinary[3].get_epsilon(1e-5)
    assert any("(accuracy, error)" in each for each in engine.guarantee(1e-5).assumptions)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({}, "no accuracy was given"),
        ({"accuracy": torch.zeros(3)}, "'accuracy' must be .* 8 rows"),
        ({"accuracy": torch.zeros(8, 1)}, "'accuracy' must be"),
        ({"accuracy": torch.tensor(0.5)}, "'accuracy' must be"),
        ({"accuracy": 0.5}, "'accuracy' must be .* not float"),
        ({"accuracy": torch.zeros(8), "loss": torch.zeros(8)}, "'loss' is what backward"),
    ],
)
def test_a_figure_that_is_missing_or_of_another_shape_is_refused(figures: dict[str, Any], message: str) -> None:
    clipping = PaidFigures(Flat(1.0), {"accuracy": (0, 1)})
    model, optimizer, loader, _ = made_private(clipping, torch.randn(8, 3), torch.zeros(8, 1))
    with pytest.raises((ConfigurationError, TrainingLoopError), match=message):
        step(model, optimizer, loader, figures=lambda *_: figures)
    assert clipping.means == {}


def test_the_bounds_cannot_be_changed_within_a_lot() -> None:
    clipping = PaidFigures(Flat(1.0), LOSS)
    model, optimizer, loader, _ = made_private(
        clipping, torch.randn(8, 3), torch.zeros(8, 1), max_physical_batch_size=4
    )
    parts = iter(loader)
    for _ in range(2):
        optimizer.backward(model(next(parts)[0])[:, 0])
        if clipping.figures[0][2] == MOST:
            optimizer.step()
            clipping.figures = (("loss", 0.0, 99.0),)
    with pytest.raises(TrainingLoopError, match="clipping was changed"):
        optimizer.step()


def test_a_training_step_takes_figures_too() -> None:
    """The same as a loop of one's own, in pieces: its loss function returns (losses, figures)."""
    inputs, targets = torch.randn(16, 3), torch.zeros(16, 1)
    bounds = {"loss": (0, 8), "big": (0, 1)}
    plain, stepped = (
        made_private(PaidFigures(Flat(1.0), bounds), inputs, targets, max_physical_batch_size=5) for _ in "ab"
    )
    step(*plain[:3], figures=lambda outputs, _: {"big": outputs > 0})

    def loss(batch: Tensor, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = stepped[0](batch)
        return (outputs - wanted).square().mean(1), {"big": outputs[:, 0] > 0}

    one = TrainingStep(stepped[1], loss)
    for batch in stepped[2]:
        one(*batch)
    first, second = (made[1]._step.clipping.means for made in (plain, stepped))
    assert first == second
    assert len(first) == 2


def test_contributions_of_several_rows_are_refused() -> None:
    unit = Units(["a", "a", "b", "c"])
    model, optimizer, loader, _ = made_private(
        PaidFigures(Flat(1.0), LOSS), torch.randn(4, 3), torch.zeros(4, 1), unit=unit, batch=3
    )
    with pytest.raises(ConfigurationError, match="several rows"):
        step(model, optimizer, loader)


def test_a_resumed_run_goes_on_with_its_means_and_bounds(tmp_path: Path) -> None:
    """Bit for bit, as with any clipping; with other bounds it is another run."""
    inputs, targets = torch.randn(40, 3), torch.zeros(40, 1)
    bounds = {"loss": (0, 4), "big": (0, 1)}

    def given(outputs: Tensor, _: Tensor) -> dict[str, Tensor]:
        return {"big": outputs > 0}

    def made(bounds: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model, clipping = nn.Linear(3, 1), PaidFigures(Flat(1.0), bounds)
        engine = PrivacyEngine(seed=3, ledger=tmp_path / "ledger.jsonl", dataset="numbers", **more)
        data = DataLoader(TensorDataset(inputs, targets), batch_size=8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parts = engine.make_private(
            module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, clipping=clipping
        )
        return engine, clipping, *parts

    engine, clipping, *parts = made(bounds)
    step(*parts, figures=given)
    engine.save_checkpoint(tmp_path / "half", module=parts[0])
    before = clipping.means
    step(*parts, figures=given)
    engine.close()
    with pytest.raises(CheckpointError, match="clipping's numbers"):
        made({**bounds, "loss": (0, 5)}, resume=tmp_path / "half")
    _, resumed, *others = made(bounds, resume=tmp_path / "half")
    assert resumed.means == before
    step(*others, figures=given)
    assert resumed.means == clipping.means
    assert torch.equal(parts[0].weight, others[0].weight)


def test_one_example_less_moves_a_large_sum_by_its_own_value_and_not_by_rounding() -> None:
    from adadp.clipping.paid_figures import _in_half_widths

    values, keep = torch.full((300_001,), 0.9), torch.ones(300_001, dtype=torch.bool)
    whole, less = (_in_half_widths(values[:n], 0.0, 1.0, keep[:n]) for n in (300_001, 300_000))
    assert float(whole - less) == pytest.approx(0.8, abs=1e-6)  # in float32 the step of such a sum is 0.016
