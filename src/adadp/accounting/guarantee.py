"""The sentence a user relies on: "this model is (epsilon, delta)-DP", or *none* and why.

Guarantee: `epsilon` is a number if and only if `reasons` is empty, and then every release that was accounted
for is covered by a proof under the stated neighbouring relation, given the stated assumptions. A release
that no proof covers can never yield a number; what a published text claims for it stands beside, marked as a
claim.
"""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adadp.accounting.composition import Canonical, Composition, canonical, uncovered_reasons
from adadp.accounting.events import (
    Event,
    FixedSizeGaussian,
    Gaussian,
    Neighbours,
    PoissonGaussian,
    RenyiBlock,
    Uncovered,
)
from adadp.errors import AccountingError, ConfigurationError, NoGuaranteeError
from adadp.persons import PERSON

if TYPE_CHECKING:
    from adadp.accounting.running import RunningEpsilon

PUBLIC_NUMBER = "the number of examples N in q = L / N is declared, public and the same for both neighbouring datasets"
FIXED_BEFOREHAND = (
    "noise multipliers, sampling rates and numbers of releases were fixed beforehand and did not depend on "
    "earlier outputs"
)

_MARKUP = re.compile(r"([\\`*\[\]#|~])")

LARGE_EPSILON = 10
"""From here on e^epsilon is only a long number, and the guarantee says that it is."""


def round_up(value: float, digits: int = 4) -> str:
    """`value` in `digits` significant digits and never smaller: no epsilon is rounded down for print."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.{digits}g}"
    if float(text) < value:
        step = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
        text = f"{value + step:.{digits}g}"
        # The step is one unit of the last digit; rounding may have carried it one further than needed, never
        # less.
    return text


def large_epsilon(epsilon: float) -> str:
    """The remark on an epsilon of `LARGE_EPSILON` or more."""
    return (
        f"epsilon {round_up(epsilon)} is large: a result may be e^{round_up(epsilon)} times as likely with an example "
        f"as without it. From {LARGE_EPSILON} on the number promises next to nothing by itself: more noise, fewer "
        "steps or more data lower it"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def describe(event: Event, count: int, unit: str = "one example") -> str:
    """One kind of release in words."""
    units = "persons" if unit == PERSON else "examples"
    if isinstance(event, Gaussian):
        releases = _plural(count, "Gaussian release")
        return f"{releases} on all {units} (noise multiplier {event.noise_multiplier:g})"
    if isinstance(event, PoissonGaussian):
        return (
            f"{_plural(count, 'step')} on Poisson lots (rate {event.rate:g}, noise multiplier "
            f"{event.noise_multiplier:g})"
        )
    if isinstance(event, FixedSizeGaussian):
        return (
            f"{_plural(count, 'step')} on lots of {event.lot:,} of {event.examples:,} {units} drawn without "
            f"replacement (noise multiplier {event.noise_multiplier:g})"
        )
    if isinstance(event, RenyiBlock):
        return (
            f"{_plural(count, 'block')} of adaptively chosen releases under a privacy filter (Renyi "
            f"divergence {event.divergence:g} at order {event.order:g})"
        )
    return f"{_plural(count, 'release')} that no proof covers"


@dataclass(frozen=True)
class Guarantee:
    """What may be said about everything that was released.

    `epsilon` is None exactly when `reasons` says why there is no guarantee; `claimed_epsilon` is then what
    the published analysis would claim, if there is one. `sampling` says what was released and how lots were
    drawn. `untried` is what nobody could try before training, which a reader has to know before the assumptions.
    """

    epsilon: float | None
    delta: float
    neighbours: Neighbours
    accountant: str
    sampling: str
    unit: str = "one example"
    order: float | None = None
    assumptions: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    claimed_epsilon: float | None = None
    notes: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.epsilon is None) != bool(self.reasons):
            raise ConfigurationError("a guarantee has either an epsilon or the reasons why it has none")
        if not 0 < self.delta < 1:
            raise ConfigurationError(f"delta must be above 0 and below 1, not {self.delta!r}")
        if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ConfigurationError(f"epsilon must be a finite number >= 0, not {self.epsilon!r}")

    def promises_more_than(self, computed: Guarantee) -> bool:
        """Whether this, read from a file, says more than `computed` from the releases themselves, at the same delta."""
        if self.epsilon is None:
            return False
        less = computed.epsilon is None or self.epsilon < computed.epsilon * (1 - 1e-6)
        return less or (self.unit, self.neighbours) != (computed.unit, computed.neighbours)

    def require(self) -> float:
        """The epsilon, or `NoGuaranteeError` with every reason."""
        if self.epsilon is None:
            raise NoGuaranteeError("there is no guarantee: " + "; ".join(self.reasons))
        return self.epsilon

    def __str__(self) -> str:
        return self.to_text()

    def sentence(self) -> str:
        """The guarantee for a reader who knows no differential privacy: what it promises, to whom, in numbers.

        It is the definition in words: for all datasets D and D' that differ by the unit and every set S of results,
        P[M(D) in S] <= e^epsilon P[M(D') in S] + delta.
        """
        delta = round_up(self.delta)
        if self.epsilon is None:
            return "Guarantee: none. Nothing is promised to those whose data was used."
        epsilon, unit = round_up(self.epsilon), _line(self.unit)
        factor = f"e^{epsilon}"
        if self.epsilon <= LARGE_EPSILON:
            factor = f"{round_up(math.exp(self.epsilon))} ({factor})"
        likely = f"no result is more than {factor} times as likely"
        if self.neighbours is Neighbours.REPLACE_ONE:
            promise = f"If {unit} is replaced by another, {likely} with the one as with the other"
        else:
            promise = f"Whether or not {unit} is in the data, {likely} in one case as in the other"
        return (
            f"{promise}, plus {delta}: ({epsilon}, {delta})-differential privacy for {unit} under {self.neighbours} "
            "neighbours."
        )

    def to_text(self, width: int | None = None) -> str:
        """The sentence, what was released, and lists: the conditions, what nobody could try, why there is none.

        Args:
            width: columns to wrap at; None leaves every item on one line.
        """
        by = self.accountant if self.order is None else f"{self.accountant}, order {self.order:g}"
        lines = [self.sentence()]
        if self.claimed_epsilon is not None:
            claim = f"({round_up(self.claimed_epsilon)}, {round_up(self.delta)})-differential privacy"
            lines.append(f"The published analysis would claim {claim}: claimed, not guaranteed.")
        lines.append(f"Released: {_sentence(self.sampling)} Accountant: {by}.")
        rests_on = "It would rest on" if self.epsilon is None else "This rests on"
        for title, items in self._lists(f"{rests_on} these conditions"):
            lines += [f"{title}:", *(f"- {_sentence(item)}" for item in items)]
        if width is not None:
            lines = [textwrap.fill(line, width, subsequent_indent="  " * line.startswith("- ")) for line in lines]
        return "\n".join(lines)

    def _lists(self, rests_on: str) -> list[tuple[str, Sequence[str]]]:
        """Titles and items, in the order in which a reader needs them; empty ones left out."""
        found: tuple[tuple[str, Sequence[str]], ...] = (
            ("Why there is no guarantee", self.reasons),
            ("Not tried", self.untried),
            (rests_on, self._tried),
            ("Notes", self.notes),
        )
        return [(title, items) for title, items in found if items]

    @property
    def _tried(self) -> list[str]:
        """The assumptions less those that are printed before them because nobody could try them."""
        return [text for text in self.assumptions if text not in self.untried]

    def to_json(self) -> str:
        """One JSON object. `epsilon` is null where the guarantee is *none*."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Any) -> Guarantee:
        """What `to_dict` wrote. Raises `ConfigurationError` where it is no guarantee."""
        try:
            kept = {**values, "neighbours": Neighbours(values["neighbours"])}
            for name in ("untried", "assumptions", "reasons", "notes"):
                kept[name] = tuple(str(text) for text in values.get(name, ()))  # older versions wrote fewer
            if not all(isinstance(kept.get(name, ""), str) for name in ("unit", "accountant", "sampling")):
                raise TypeError("unit, accountant and sampling are texts")
            return cls(**kept)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"this is no guarantee: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The guarantee as plain values."""
        values: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "neighbours": str(self.neighbours),
            "unit": self.unit,
            "sampling": self.sampling,
            "accountant": self.accountant,
            "untried": list(self.untried),
            "assumptions": list(self.assumptions),
            "reasons": list(self.reasons),
            "claimed_epsilon": self.claimed_epsilon,
            "notes": list(self.notes),
        }
        if self.order is not None:
            values["order"] = self.order
        return values

    def _repr_markdown_(self) -> str:
        """In a notebook."""
        return self.to_markdown()

    def _repr_html_(self) -> str:
        """In a notebook: the sentence, and what it rests on under a line that opens."""
        colour = "#b3261e" if self.epsilon is None else "#2e7d32"
        lines = [
            f'<div style="border-left: 4px solid {colour}; padding: 0.2em 0 0.2em 0.8em; max-width: 50em">',
            f"<p><strong>{html.escape(self.sentence())}</strong></p>",
        ]
        if self.claimed_epsilon is not None:
            claim = f"({round_up(self.claimed_epsilon)}, {round_up(self.delta)})-differential privacy"
            lines.append(f"<p>The published analysis would claim {claim}: claimed, not guaranteed.</p>")
        for title, items in (*self._lists("What it rests on"), ("Released", [self.sampling])):
            opened = " open" if title == "Why there is no guarantee" else ""
            inside = "".join(f"<li>{html.escape(_sentence(item))}</li>" for item in items)
            lines.append(f"<details{opened}><summary>{title}</summary><ul>{inside}</ul></details>")
        return "\n".join([*lines, "</div>"])

    def to_markdown(self) -> str:
        """A table, and lists of what it rests on or why there is none."""
        if self.epsilon is None:
            epsilon = "**none**"
            if self.claimed_epsilon is not None:
                epsilon += f" ({round_up(self.claimed_epsilon)} claimed, not guaranteed)"
        else:
            epsilon = round_up(self.epsilon)
        order = "" if self.order is None else f", order {self.order:g}"
        lines = [
            "| guarantee | |",
            "| --- | --- |",
            f"| epsilon | {epsilon} |",
            f"| delta | {round_up(self.delta)} |",
            f"| neighbours | {self.neighbours} |",
            f"| unit of privacy | {plain_markdown(self.unit)} |",
            f"| released | {plain_markdown(self.sampling)} |",
            f"| accountant | {self.accountant}{order} |",
        ]
        for title, items in self._lists("What it rests on"):
            lines += ["", f"{title}:", "", *(f"- {plain_markdown(item)}" for item in items)]
        return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    """Without line breaks: names and reasons come from elsewhere and must not end a paragraph or a list."""
    return " ".join(text.split())


def plain_markdown(text: str) -> str:
    """Text from elsewhere (names of classes and columns) for Markdown: on one line, and no markup or HTML in it."""
    return _MARKUP.sub(r"\\\1", html.escape(_line(text), quote=False))


def _sentence(text: str) -> str:
    text = _line(text)
    first = text.split(" ", 1)[0]
    if first.replace("-", "").isalpha():  # a name from code ("penalty=") stays as it is written
        text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."


def _claimed(composition: Canonical) -> Canonical | None:
    """The composition with what is claimed in place of uncovered events; None if one has no claim."""
    pairs: list[tuple[Event, int]] = []
    for event, count in composition:
        if not isinstance(event, Uncovered):
            pairs.append((event, count))
        elif event.claimed is None:
            return None
        else:
            pairs.append((event.claimed, count))
    return canonical(pairs)


def make_guarantee(
    composition: Composition,
    delta: float,
    *,
    accountant: str | None = None,
    neighbours: Neighbours = Neighbours.ADD_REMOVE,
    unit: str = "one example",
    assumptions: Sequence[str] = (),
    reasons: Sequence[str] = (),
    untried: Sequence[str] = (),
    notes: Sequence[str] = (),
    running: RunningEpsilon | None = None,
) -> Guarantee:
    """What may be said about a composition at `delta`.

    `accountant` None means `pld`, or `rdp` where no distribution is known. `reasons` are the caller's own
    grounds for *none*, such as a value that left the training loop unnoised; `untried` is what could not be
    tried, `notes` what else a reader should know. `running` answers quickly where a loop asks. A composition that only
    this accountant refuses raises `AccountingError`; one that no proof covers gives a guarantee of *none*.
    """
    # Imported here so that reading and recording events needs no numerical library.
    from adadp.accounting.accountants import covering_accountant, get_accountant, require_delta

    require_delta(delta)
    neighbours = Neighbours(neighbours)
    releases = canonical(composition)
    name = accountant or covering_accountant(releases, neighbours)
    chosen, broadest = get_accountant(name), get_accountant("rdp")
    # What neither this accountant nor the broadest covers, no proof does: that is *none*, not a mistake in the call.
    refusals = (
        chosen.refusal(event, neighbours) and broadest.refusal(event, neighbours)
        for event, _ in releases
        if not isinstance(event, Uncovered)
    )
    why = tuple(dict.fromkeys((*reasons, *uncovered_reasons(releases), *filter(None, refusals))))
    sampling = "; ".join(describe(event, count, unit) for event, count in releases) or "nothing"
    untried, notes = tuple(dict.fromkeys(untried)), tuple(dict.fromkeys(notes))
    if why:
        # A claim stands for what no proof covers. Where the loop did something else, nobody claims anything.
        claimed = _claimed(releases) if uncovered_reasons(releases) else None
        try:
            claim = None if claimed is None else chosen.epsilon(claimed, delta, neighbours).epsilon
        except AccountingError:
            claim = None  # the claim is about something this accountant does not know: no number beside it
        return Guarantee(
            None, delta, neighbours, name, sampling, unit, None, tuple(assumptions), why,
            claim if claim is not None and math.isfinite(claim) else None, notes, untried,
        )  # fmt: skip
    if running is None:
        spent = chosen.epsilon(releases, delta, neighbours)
    else:
        spent = running.epsilon(chosen, releases, delta, neighbours)
    fixed = FIXED_BEFOREHAND
    if any(isinstance(event, RenyiBlock) for event, _ in releases):
        fixed += ", but for what a privacy filter admitted, whose order and budget were"
    rests_on = tuple(dict.fromkeys((*assumptions, *((fixed,) if releases else ()))))
    if not math.isfinite(spent.epsilon):
        too_small = f"no finite epsilon was found at delta {delta:g}: it is too small for these releases"
        return Guarantee(
            None, delta, neighbours, spent.accountant, sampling, unit, None, rests_on, (too_small,),
            notes=notes, untried=untried,
        )  # fmt: skip
    large = [large_epsilon(spent.epsilon)] if spent.epsilon >= LARGE_EPSILON else []
    return Guarantee(
        spent.epsilon, delta, neighbours, spent.accountant, sampling, unit, spent.order, rests_on,
        notes=tuple(dict.fromkeys((*large, *spent.notes, *notes))), untried=untried,
    )  # fmt: skip
