"""The sentence: a number exactly where a proof stands behind it."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adadp.accounting.events import (
    Event,
    FixedSizeGaussian,
    Gaussian,
    Neighbours,
    PoissonGaussian,
    RenyiBlock,
    Uncovered,
    event_from_json,
    event_to_json,
)
from adadp.accounting.guarantee import Guarantee, make_guarantee, round_up
from adadp.errors import AccountingError, ConfigurationError, NoGuaranteeError

STEP = PoissonGaussian(4.0, 0.05)


def test_a_covered_composition_has_a_number() -> None:
    found = make_guarantee([(STEP, 100), (Gaussian(16.0), 1)], 1e-5, assumptions=("N is public",))
    assert found.epsilon is not None
    assert found.reasons == ()
    text = str(found)
    assert text.splitlines()[0] == found.sentence()
    assert "- N is public." in text.splitlines()
    for part in (round_up(found.epsilon), "1e-05", "one example", "add-or-remove-one", "N is public", "pld", "0.05"):
        assert part in text
        assert part in found.to_markdown() or part == "1e-05"
    values = json.loads(found.to_json())
    assert values["epsilon"] == found.epsilon
    assert values["reasons"] == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.epsilon = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("others", [[], [(STEP, 100)]])
def test_an_uncovered_release_never_has_a_number(others: list[tuple[Event, int]]) -> None:
    event = Uncovered("E' comes from raw gradients", STEP)
    found = make_guarantee([(event, 100), *others], 1e-5, assumptions=("N is public",))
    assert found.epsilon is None
    assert found.claimed_epsilon is not None
    assert "claimed, not guaranteed" in str(found)
    assert "claimed, not guaranteed" in found.to_markdown()
    assert "E' comes from raw gradients" in str(found)
    assert json.loads(found.to_json())["epsilon"] is None
    with pytest.raises(NoGuaranteeError, match="raw gradients"):
        found.require()


def test_a_reason_of_the_callers_takes_the_number_away() -> None:
    found = make_guarantee([(STEP, 100)], 1e-5, reasons=("raw_norms were logged",))
    assert found.epsilon is None
    assert found.reasons == ("raw_norms were logged",)
    assert make_guarantee([], 1e-5, reasons=("why",)).epsilon is None


def test_a_claim_without_an_event_shows_no_number_at_all() -> None:
    found = make_guarantee([(Uncovered("nobody knows"), 1), (STEP, 5)], 1e-5)
    assert found.epsilon is None
    assert found.claimed_epsilon is None


@pytest.mark.parametrize(
    ("epsilon", "reasons"), [(None, ()), (1.0, ("why",)), (math.nan, ()), (math.inf, ()), (-1.0, ())]
)
def test_number_and_reasons_exclude_each_other(epsilon: float | None, reasons: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        Guarantee(epsilon, 1e-5, Neighbours.ADD_REMOVE, "pld", "nothing", reasons=reasons)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_no_guarantee_without_a_delta(delta: float) -> None:
    with pytest.raises(ConfigurationError, match="delta"):
        Guarantee(1.0, delta, Neighbours.ADD_REMOVE, "pld", "nothing")


def test_text_from_elsewhere_stays_in_its_place() -> None:
    found = make_guarantee(
        {Gaussian(1.0): 1}, 1e-5, unit="one | patient\n| epsilon | 0.1 |", reasons=["a\n\n# epsilon 0.1"]
    )
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["Guarantee:", "Released:", "Why", "-"]
    for line in found.to_text(80).splitlines():
        assert len(line) <= 80
    number = make_guarantee({Gaussian(1.0): 1}, 1e-5, unit="one | patient\n(0.1, 1e-9)-differential privacy")
    assert [line.split()[0] for line in str(number).splitlines()] == ["Whether", "Released:", "This", "-"]
    markup = make_guarantee({Gaussian(1.0): 1}, 1e-5, assumptions=["# a [b](c) <img src=x> `d` **e** <!-- f --> | g"])
    assert r"- \# a \[b\](c) &lt;img src=x&gt; \`d\` \*\*e\*\* &lt;!-- f --&gt; \| g" in markup.to_markdown()
    rows = found.to_markdown().splitlines()
    assert sum(row.startswith("| epsilon |") for row in rows) == 1
    assert not any(row.startswith("#") for row in rows)
    assert json.loads(found.to_json())["reasons"] == ["a\n\n# epsilon 0.1"]


def test_the_sentence_is_the_definition_in_numbers_that_are_not_rounded_down() -> None:
    found = Guarantee(0.99901, 1e-5, Neighbours.ADD_REMOVE, "pld", "nothing")
    assert found.sentence() == (
        "Whether or not one example is in the data, no result is more than 2.716 (e^0.9991) times as likely in one "
        "case as in the other, plus 1e-05: (0.9991, 1e-05)-differential privacy for one example under "
        "add-or-remove-one neighbours."
    )
    assert math.exp(0.99901) <= 2.716
    replaced = Guarantee(800.0, 1e-5, Neighbours.REPLACE_ONE, "rdp", "nothing", unit="one patient").sentence()
    assert replaced.startswith("If one patient is replaced by another, no result is more than e^800 times as likely")
    none = Guarantee(None, 1e-5, Neighbours.ADD_REMOVE, "pld", "nothing", reasons=("norms were logged",))
    assert none.sentence().startswith("Guarantee: none.")


def test_a_relation_given_by_its_name_is_that_relation() -> None:
    by_name = make_guarantee({Gaussian(1.0): 1}, 1e-5, neighbours="replace-one")  # type: ignore[arg-type]
    assert by_name == make_guarantee({Gaussian(1.0): 1}, 1e-5, neighbours=Neighbours.REPLACE_ONE)


def test_fixed_sizes_and_filters_use_rdp_by_default() -> None:
    found = make_guarantee([(FixedSizeGaussian(4.0, 1000, 10), 5)], 1e-5, neighbours=Neighbours.REPLACE_ONE)
    assert (found.accountant, found.order is not None) == ("rdp", True)
    assert "replace-one" in str(found)
    assert make_guarantee([(RenyiBlock(10.0, 1.0), 1), (STEP, 5)], 1e-5).accountant == "rdp"


def test_a_relation_without_a_proof_is_none_and_another_accountant_an_error() -> None:
    found = make_guarantee([(STEP, 5)], 1e-5, neighbours=Neighbours.REPLACE_ONE)
    assert found.epsilon is None
    assert "add-or-remove-one" in found.reasons[0]
    with pytest.raises(AccountingError, match="rdp"):
        make_guarantee(
            [(FixedSizeGaussian(4.0, 1000, 10), 5)], 1e-5, accountant="pld", neighbours=Neighbours.REPLACE_ONE
        )


def test_nothing_released_is_free() -> None:
    assert make_guarantee([], 1e-5).epsilon == 0


@given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_print_never_rounds_down(value: float, digits: int) -> None:
    shown = float(round_up(value, digits))
    assert shown >= value
    assert shown <= value * (1 + 2 * 10.0 ** (1 - digits))


EVENTS = st.one_of(
    st.builds(Gaussian, st.floats(1e-3, 1e3)),
    st.builds(PoissonGaussian, st.floats(1e-3, 1e3), st.floats(1e-9, 1.0)),
    st.builds(FixedSizeGaussian, st.floats(1e-3, 1e3), st.integers(100, 10**9), st.integers(1, 100)),
    st.builds(RenyiBlock, st.floats(1.1, 1e3), st.floats(0, 1e3)),
)


@given(st.one_of(EVENTS, st.builds(Uncovered, st.text(), st.one_of(st.none(), EVENTS))))
def test_events_survive_json(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@pytest.mark.parametrize("value", [{}, {"kind": "laplace"}, {"kind": "gaussian"}, {"kind": "gaussian", "x": 1}])
def test_what_is_not_an_event_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        event_from_json(value)


@pytest.mark.parametrize("event", [STEP, Uncovered("raw", STEP)])
def test_a_guarantee_survives_json(event: Event) -> None:
    found = make_guarantee([(event, 5)], 1e-5, assumptions=["a"], notes=["b"], untried=["c"], accountant="rdp")
    assert Guarantee.from_dict(json.loads(found.to_json())) == found


WRITTEN = make_guarantee([(STEP, 5)], 1e-5).to_dict()


@pytest.mark.parametrize(
    "value",
    [{}, None, {"neighbours": "none"}, {**WRITTEN, "epsilon": "1"}, {**WRITTEN, "x": 1}, {**WRITTEN, "epsilon": None}],
)
def test_what_is_not_a_guarantee_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError):
        Guarantee.from_dict(value)


HOSTILE = '<script>alert(1)</script> & "x"'


def test_a_guarantee_shows_itself_in_a_notebook() -> None:
    some = Guarantee(
        0.5001, 1e-5, Neighbours.ADD_REMOVE, "pld", HOSTILE, unit=HOSTILE, assumptions=(HOSTILE,), untried=(HOSTILE,)
    )
    none = Guarantee(None, 1e-5, Neighbours.ADD_REMOVE, "pld", "x", reasons=(HOSTILE,), claimed_epsilon=0.25)
    for found in (some, none):
        for shown in (found._repr_html_(), found._repr_markdown_()):
            assert "<script" not in shown
            assert "&lt;script&gt;" in shown
    assert "(0.5001, 1e-05)-differential privacy" in some._repr_html_()
    assert none._repr_html_().index("Guarantee: none.") < none._repr_html_().index("claimed, not guaranteed")
    assert "<details open><summary>Why there is no guarantee" in none._repr_html_()
