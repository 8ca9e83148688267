"""The results of `influence`: the effect of each example, the verdict, and what the verdict does not say."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

ROUNDING = 1e-3
"""Relative tolerance on the bound: sums are in float32."""

_VERDICTS = {
    "within": "no example that was tried moved a release by more than its bound",
    "exceeded": "one example moves a release by more than its noise hides: the printed epsilon is false",
    "mixed": "one example is in what others add: nothing bounds its effect, and the printed epsilon has no proof",
    "refused": "the engine refused the loop: no epsilon is printed",
    "no number": "nothing could be measured against a printed epsilon",
}


@dataclass(frozen=True)
class Effect:
    """The effect of one example.

    `value` is the largest sigma |difference / stddev| over all that a lot releases, between the sums before noise with
    the example and without it; infinite where the worlds differ in anything but a sum (`why` says in what). `mixed`
    says where the gradients of others changed with the example, "" where they did not. `error` is what the engine
    refused with, or why the example could not be used.
    """

    example: str
    value: float = 0.0
    lot: int | None = None
    parameter: str | None = None
    kind: str | None = None
    why: str = ""
    mixed: str = ""
    refused: bool = False
    skipped: bool = False
    error: str | None = None
    lots: int = 0


@dataclass(frozen=True)
class Influence:
    """The largest effect that one example had on a release. A small one proves nothing.

    `bound` is the effect that the guarantee allows: 1 where an example is added, 2 where it is replaced (lots of a
    fixed size). `epsilon` is what the engine would print for the lots that ran, at `delta`; None where it would print
    none, for `reasons`. `effects` has every example that was tried.
    """

    value: float
    bound: float
    verdict: str
    epsilon: float | None
    delta: float
    example: str | None
    lot: int | None
    parameter: str | None
    kind: str | None
    why: str
    refused: str | None
    reasons: tuple[str, ...]
    effects: tuple[Effect, ...]

    @property
    def exceeded(self) -> bool:
        """Whether a release moved by more than the guarantee allows."""
        return self.verdict == "exceeded"

    @property
    def says(self) -> str:
        """The meaning of the verdict, in words."""
        return _VERDICTS[self.verdict]

    @property
    def caveat(self) -> str:
        """What no verdict can say."""
        return (
            "A pass proves nothing: only these examples, weights and lots were tried, and what leaves the loop by "
            "other ways (prints, files, choices) is not seen."
        )

    @property
    def skipped(self) -> tuple[Effect, ...]:
        """Examples that the loop could not take, each with its error."""
        return tuple(effect for effect in self.effects if effect.skipped)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite value is the text "infinite"."""
        values = {key: _plain(value) for key, value in asdict(self).items()}
        return {**values, "says": self.says, "caveat": self.caveat}

    def __str__(self) -> str:
        tried = [effect for effect in self.effects if not effect.skipped]
        lots = max((effect.lots for effect in tried), default=0)
        printed = "none" if self.epsilon is None else f"{self.epsilon:.4g}"
        lines = [
            f"{self.verdict}: {self.says}",
            f"largest effect of one example on one release: {self.value:.4g}, where {self.bound:g} is promised",
        ]
        if self.example is not None:
            place = f", lot {self.lot}" if self.lot is not None else ""
            part = f", {self.kind or 'weights'} {self.parameter}" if self.parameter else ""
            lines.append(f"by the example {self.example!r}{place}{part}")
        lines += [f"because {self.why}"] if self.why else []
        if self.refused:
            which = "refused" if self.verdict == "refused" else "refused with another example"
            lines.append(f"{which}: {self.refused}")
        lines.append(f"epsilon printed for these lots: {printed} at delta {self.delta:g}")
        lines += [f"no number because {reason}" for reason in self.reasons]
        lines.append(f"tried: {len(tried)} examples, {lots} lots each; {len(self.skipped)} could not be used")
        return "\n".join([*lines, self.caveat])


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "infinite"
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


__all__ = ["ROUNDING", "Effect", "Influence"]
