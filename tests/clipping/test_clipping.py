"""adadp.clipping: settings, the switch of Local, how noise is shared out. What is bounded is in tests/soundness."""

from __future__ import annotations

import math

import pytest
import torch

from adadp import Automatic, Diagonal, Ellipsoid, Flat, Grouped, Local, Paid, PerLayer, Raw, Released
from adadp.clipping import BY_NAME, by_name
from adadp.errors import ConfigurationError
from adadp.gradients import Gradients
from adadp.gradients.forms.dense import Dense
from adadp.shapes.paid import split_noise


class Nowhere:
    expected_lot = 4.0


def gradients(*rows: list[float], keep: list[bool] | None = None) -> Gradients:
    values = torch.tensor(rows, dtype=torch.float64)
    kept = torch.tensor(keep if keep is not None else [True] * len(rows))
    return Gradients({"a": Dense(values[:, :2]), "b": Dense(values[:, 2:])}, len(rows), keep=kept)


PARAMETERS = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}


def test_names() -> None:
    assert set(BY_NAME) == {"flat", "per_layer", "automatic", "adaptive", "ellipsoid", "local"}
    assert all(type(by_name(name, 2.0)).__module__.startswith("adadp.clipping.") for name in BY_NAME)
    with pytest.raises(ConfigurationError, match="not one of"):
        by_name("oval", 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flat(True),
        lambda: Automatic(1.0, gamma=0.0),
        lambda: Local(beta=-1.0),
        lambda: Local(threshold=math.nan),
        lambda: Grouped({}),
        lambda: PerLayer({"*": 0.0}),
        lambda: Ellipsoid(math.inf, source=Released()),
    ],
)
def test_settings_that_are_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_a_placeholder_and_a_missing_parameter_add_zero() -> None:
    for clipping in (Flat(1.0), Automatic(1.0), PerLayer(1.0), Ellipsoid(source=Paid(every=1)), Local(source=Raw())):
        clipping.begin(PARAMETERS | {"unused": torch.zeros(3, 2)}, Nowhere())
        bounded = clipping.bound(gradients([1.0, 2.0, 3.0, math.nan], keep=[False]))
        assert all(not value.any() for value in bounded.values())
        assert bounded["unused"].shape == (3, 2)
        assert bounded.keys() == clipping.stddev(1.0).keys()


def test_local_switches_on_once_and_stays_on() -> None:
    clipping = Local(1.0, beta=2.0, threshold=0.01, source=Released())
    clipping.begin(PARAMETERS, Nowhere())
    assert not clipping.local
    assert clipping.stddev(3.0) == {"a": 3.0, "b": 3.0}
    clipping.shape.learn("a", {"square": torch.tensor([4.0, 4.0])})
    clipping.shape.learn("b", {"square": torch.tensor([4.0, 4.0])})
    clipping.begin(PARAMETERS, Nowhere())
    assert not clipping.local  # the roots are all alike: no spread
    clipping.shape.learn("b", {"square": torch.tensor([1.0, 0.0])})
    clipping.begin(PARAMETERS, Nowhere())
    assert clipping.local
    noise = clipping.stddev(3.0)
    assert torch.equal(noise["a"], 3.0 * 2.0 * torch.tensor([4.0, 4.0]))  # sigma sqrt(m) beta sqrt(E')
    assert torch.equal(noise["b"], 3.0 * 2.0 * torch.tensor([2.0, 0.0]))
    bounded = clipping.bound(gradients([9.0, -1.0, 9.0, 9.0], [-9.0, -1.0, 0.5, 9.0]))
    assert bounded["a"].tolist() == [0.0, -2.0]
    assert bounded["b"].tolist() == [2.5, 0.0]
    clipping.shape.learn("b", {"square": torch.tensor([4.0, 4.0])})
    clipping.begin(PARAMETERS, Nowhere())
    assert clipping.local


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_shape_and_its_gradient_are_one_event(share: float) -> None:
    gradient, statistics = split_noise(2.0, share)
    assert 1 / gradient**2 + 1 / statistics**2 == pytest.approx(1 / 4)
    assert split_noise(2.0, 0.0)[0] == 2.0


def test_paid_statistics_are_released_in_their_turn_only() -> None:
    clipping = Ellipsoid(1.0, shape=Diagonal(), source=Paid(share=0.36, every=3))
    keys, noise = [], []
    for _ in range(7):
        clipping.begin(PARAMETERS, Nowhere())
        bounded = clipping.bound(gradients([1.0, 0.0, 0.0, 0.0]))
        stddev = clipping.stddev(2.0)
        assert bounded.keys() == stddev.keys()
        keys.append("shape/a/square" in bounded)
        noise.append(stddev["a"])
        clipping.release(dict(bounded), stddev)
    assert keys == [True, False, False, True, False, False, True]
    assert noise == pytest.approx([2.5, 2.0, 2.0, 2.5, 2.0, 2.0, 2.5])


def test_first_pattern_counts_and_every_parameter_needs_one() -> None:
    one, rest = Flat(1.0), Flat(2.0)
    clipping = Grouped({"a*": one, "*": rest})
    clipping.check(["a", "b"])
    clipping.begin(PARAMETERS, Nowhere())
    assert (list(one.parameters), list(rest.parameters)) == (["a"], ["b"])
    assert clipping.stddev(1.0) == pytest.approx({"a": math.sqrt(2), "b": 2 * math.sqrt(2)})
    clipping.begin({"b": PARAMETERS["b"]}, Nowhere())  # one group alone needs no more noise than its own
    assert clipping.stddev(1.0) == pytest.approx({"b": 2.0})
    with pytest.raises(ConfigurationError, match="no group"):
        Grouped({"a": Flat(1.0)}).check(["a", "b"])


def test_a_member_that_asks_for_more_noise_gets_it() -> None:
    class Wary(Flat):
        def stddev(self, noise_multiplier: float) -> dict[str, float]:
            return {name: 10 * value for name, value in super().stddev(noise_multiplier).items()}

    clipping = Grouped({"a": Wary(1.0), "*": Flat(1.0)})
    clipping.begin(PARAMETERS, Nowhere())
    assert clipping.stddev(1.0) == pytest.approx({"a": 10 * math.sqrt(2), "b": math.sqrt(2)})
    assert clipping.sensitivity() == pytest.approx({"a": math.sqrt(2), "b": math.sqrt(2)})


def test_reasons_come_up_from_the_groups() -> None:
    assert Grouped({"a": Flat(1.0), "*": Local()}).reasons == Raw.reasons
    assert Grouped({"a": Flat(1.0), "*": Ellipsoid(source=Released())}).reasons == ()
