"""Algorithms by name, their settings and their schedules."""

from __future__ import annotations

import pytest
import torch

from adadp import Ellipsoid, Flat, Local, algorithms
from adadp.algorithms import ALGORITHMS, Task, create, schedule
from adadp.algorithms.defaults import DEFAULTS
from adadp.algorithms.update_rule import Normalised
from adadp.errors import ConfigurationError
from adadp.shapes.probes import Vectors

TASK = Task(lot=10, steps=20, probes=Vectors(4))
SOUND = [("adadp", "sound"), ("dpsgd", None), ("adal", None), ("adan", "sound"), ("agd", None), ("dpopt", "sound")]
UNSOUND = [("adadp", "example"), ("adadp", "lot"), ("adan", "example"), ("adan", "lot"), ("dpopt", "published")]


def test_every_algorithm_of_the_paper_is_there_and_has_defaults() -> None:
    assert set(ALGORITHMS) == {"adadp", "dpsgd", "adal", "adan", "agd", "dpopt", "sgd"}
    assert set(DEFAULTS) == {(name, reading) for name, kind in ALGORITHMS.items() for reading in kind.readings}


@pytest.mark.parametrize(("name", "reading"), SOUND)
def test_sound_ones_say_so(name: str, reading: str | None) -> None:
    made = create(name, reading)
    assert made.sound
    assert "differential privacy" in made.guarantee
    assert made.clipping(TASK).reasons == ()


@pytest.mark.parametrize(("name", "reading"), UNSOUND)
def test_readings_of_the_paper_say_why_there_is_no_guarantee(name: str, reading: str) -> None:
    made = create(name, reading)
    assert not made.sound
    assert made.guarantee.startswith("none: ")
    assert made.clipping(TASK).reasons == made.reasons
    if reading == "lot":
        assert "up to twice its bound" in made.guarantee
    assert "raw gradients" in made.guarantee


def test_sgd_is_not_private_and_says_so() -> None:
    made = create("sgd")
    assert not made.private
    assert "without noise" in made.guarantee
    with pytest.raises(ConfigurationError, match="dpsgd"):
        made.clipping(TASK)


def test_what_they_are_made_of() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    sound = create("adadp").clipping(TASK)
    assert isinstance(sound, Ellipsoid)
    assert (sound.shape.before, sound.shape.after) == (0.25, 0.0)
    assert isinstance(create("adadp", None, {"lr": 1}).optimizer(parameters), torch.optim.SGD)
    assert isinstance(create("adadp", "example").clipping(TASK), Local)
    assert isinstance(create("adadp", "example").optimizer(parameters), Normalised)
    noise_only = create("adan").clipping(TASK)
    assert isinstance(noise_only, Ellipsoid)
    assert noise_only.shape.after == -noise_only.shape.before
    assert type(create("adal").clipping(TASK)) is Flat
    assert isinstance(create("adal").optimizer(parameters), Normalised)


def test_settings_are_checked() -> None:
    assert create("adadp", None, {"lr": "0.5", "rank": "16"}).settings["rank"] == 16
    for name, wrong, match in (
        ("adadp", {"beta": 1}, "no setting 'beta'"),
        ("adadp", {"rank": 1.5}, "whole number"),
        ("dpsgd", {"lr": "fast"}, "lr must be a number"),
        ("dpsgd", {"lr": -1}, "lr must be"),
        ("dpsgd", {"schedule": "steep"}, "schedule must be one of"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            create(name, None, wrong)
    with pytest.raises(ConfigurationError, match="its readings are sound, published"):
        create("dpopt", "lot")
    with pytest.raises(ConfigurationError, match="there are adadp"):
        create("adam")
    with pytest.raises(ConfigurationError, match="probes"):
        create("adadp").clipping(Task(lot=1, steps=1))


def test_a_learning_rate_is_chosen_from_public_numbers_unless_it_is_given() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ConfigurationError, match="settle"):
        create("dpsgd").optimizer(parameters)
    rates = []
    for sigma in (4.0, 8.0, 1e-3):
        made = create("dpsgd")
        made.settle(lot=600, steps=1600, noise_multiplier=sigma, weights=71_010)
        rates.append(made.settings["lr"])
    assert rates[0] == 2 * rates[1]
    assert rates[2] == 8.0  # hardly any noise: no larger than a step may be without any
    given = create("dpsgd", None, {"lr": 0.3})
    given.settle(lot=600, steps=1600, noise_multiplier=8.0, weights=71_010)
    assert given.settings["lr"] == 0.3


def test_schedules() -> None:
    def rates(name: str, steps: int, epoch: float, lr: float = 0.1) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        plan = schedule(name, optimizer, steps, epoch)
        seen = []
        for _ in range(steps):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            plan.step()
        return seen

    linear = rates("linear", 200, 10.0)
    assert linear[0] == pytest.approx(0.1)
    assert linear[50] == pytest.approx(0.076)
    assert linear[100] == linear[199] == pytest.approx(0.052)
    assert set(rates("constant", 5, 1.0)) == {0.1}
    cosine = rates("cosine", 100, 10.0)
    assert cosine[50] == pytest.approx(0.05)
    assert cosine[99] < 0.001
    exponential = rates("exponential", 100, 10.0)
    assert exponential[50] == pytest.approx(0.1 * 0.52**0.5)
    with pytest.raises(ConfigurationError, match="schedule"):
        algorithms.schedule("steep", torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 1, 1.0)
