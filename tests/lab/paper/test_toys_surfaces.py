"""The test functions are what they are called: known minima, and gradients that are theirs."""

import pytest
import torch
from adadp_lab.paper.surfaces import BEALE_AS_PRINTED, SURFACES, surface

ASKED = {
    "beale", "rosenbrock", "himmelblau", "booth", "matyas", "rastrigin", "ackley", "goldstein-price",
    "three-hump-camel", "mccormick",
}  # fmt: skip


def test_all_that_were_asked_for_are_there():
    assert set(SURFACES) >= ASKED


@pytest.mark.parametrize("name", SURFACES)
def test_known_minima(name):
    ground = SURFACES[name]
    minima = torch.tensor(ground.minima, dtype=torch.float64)
    assert ground.value(minima).tolist() == pytest.approx([ground.lowest] * len(minima), abs=1e-9)
    # Nothing lower anywhere in the box, at 250,000 points and closely around each minimum.
    left, right, bottom, top = ground.box
    x, y = torch.meshgrid(torch.linspace(left, right, 500), torch.linspace(bottom, top, 500), indexing="ij")
    assert ground.value(torch.stack([x, y], dim=-1).double()).min() >= ground.lowest - 1e-9
    near = minima[:, None] + 1e-3 * torch.randn(len(minima), 1000, 2, dtype=torch.float64)
    assert ground.value(near).min() >= ground.lowest - 1e-9


@pytest.mark.parametrize("name", [*SURFACES, "beale-as-printed"])
def test_gradients_by_differences(name):
    ground = surface(name)
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 2, dtype=torch.float64, generator=generator) * 3 - 1.5
    step = 1e-6
    shifts = step * torch.eye(2, dtype=torch.float64)
    differences = torch.stack(
        [(ground.value(points + shift) - ground.value(points - shift)) / (2 * step) for shift in shifts], dim=-1
    )
    torch.testing.assert_close(ground.gradient(points), differences, rtol=1e-5, atol=1e-4)


def test_the_misprint_is_the_last_exponent_and_has_no_minimum():
    true, printed = SURFACES["beale"], BEALE_AS_PRINTED
    # Where the last bracket is 0 or 1 a square and a cube are the same.
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for bracket in (0.0, 1.0):
        y = ((bracket - 2.625 + x) / x) ** (1 / 3)
        points = torch.stack([x, y], dim=-1)
        torch.testing.assert_close(true.value(points), printed.value(points))
    assert printed.value(torch.tensor([4.5, -4.5])) < -1e6
    assert printed.lowest is None


def test_values_worked_out_by_hand():
    at = {
        "beale": ((0.0, 0.0), 1.5**2 + 2.25**2 + 2.625**2),
        "rosenbrock": ((-1.0, 2.0), 4 + 100),
        "himmelblau": ((0.0, 0.0), 121 + 49),
        "booth": ((0.0, 0.0), 49 + 25),
        "matyas": ((1.0, 2.0), 0.26 * 5 - 0.96),
        "rastrigin": ((0.5, 0.0), 0.25 + 20),
        "goldstein-price": ((0.0, 0.0), (1 + 19) * 30),
        "three-hump-camel": ((1.0, 1.0), 2 - 1.05 + 1 / 6 + 2),
        "mccormick": ((0.0, 0.0), 1.0),
    }
    for name, (point, value) in at.items():
        found = SURFACES[name].value(torch.tensor(point, dtype=torch.float64))
        assert float(found) == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("name", SURFACES)
def test_starts_lie_in_the_box_and_not_at_a_minimum(name):
    ground = SURFACES[name]
    left, right, bottom, top = ground.box
    assert left < ground.start[0] < right
    assert bottom < ground.start[1] < top
    assert float(ground.value(torch.tensor(ground.start, dtype=torch.float64))) > ground.lowest + 0.5
