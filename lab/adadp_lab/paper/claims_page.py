"""CLAIMS.md: one line for each claim of the paper, with what we found, from findings alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adadp_lab.paper.claims import CLAIMS, Claim
from adadp_lab.paper.item import Finding, Word
from adadp_lab.report.tables import table

NOT_RUN = Finding("", {})
_HEAD = """# What the paper claims, and what we found

Made by `make results` from the records in `results/reproduce`; `make results-check` makes it again and compares.

Each claim that the AdaDP paper makes in numbers or in italics has a line. *Published* is its algorithm as the text can
be read: **lot** (the lot's average is clipped; no guarantee), **example** (each example is clipped; E' from raw
gradients; no guarantee), or **as printed** where there is one reading only. *Sound* is the idea with a guarantee, in
our settings. A claim **holds**, **does not hold**, or **cannot be known** from the text.

When a number holds: a gain, if ours is at least as large, less two standard errors; an epsilon of AdaDP, if ours is at
most 1.1 times it, one of DPSGD, if ours is within a fifth of it; an average reduction, if ours is at most five points
less; a time, if its ratio to DPSGD's is within a factor of 1.5 of the printed one on every machine; a best value, if it
does as well as our best within two standard errors. "Significantly" ahead means by more than two standard errors,
"comparable" to training without privacy within one point, "much" faster at most half the time, "close" at most twice,
"resistant" to beta all within two points, "accurate" within a factor of two for half of the coordinates with
logarithms that correlate by 0.5, "many" a fifth, "too fast" before nine tenths of the steps, "declines" by more than
two standard errors. A rival that diverges (below 20%, or ten points below its own best on the way) decides nothing, and
so does a run that ended before it had cost as much as the paper prints. AGD has our settings: the paper gives none.
Accuracies are means over seeds in percent.
"""


def collect(found: Sequence[Finding]) -> dict[str, Finding]:
    """Findings by claim, those that sum up others and those that are argued included."""
    known = {finding.claim: finding for finding in found}
    for claim in CLAIMS:
        if claim.argued is not None:
            known[claim.name] = claim.argued
        elif claim.sums_up and all(name in known for name in claim.sums_up):
            known[claim.name] = _sum_up(claim, [known[name] for name in claim.sums_up])
    return known


def _sum_up(claim: Claim, parts: Sequence[Finding]) -> Finding:
    """Holds where all parts hold; where one does not, neither does the sum."""
    readings: dict[str, tuple[Word, str]] = {}
    for reading in parts[0].readings:
        words = [part.readings[reading][0] for part in parts]
        worst: Word = next((bad for bad in _WORDS[1:] if bad in words), "holds")
        readings[reading] = worst, "; ".join(part.readings[reading][1] for part in parts)
    return Finding(claim.name, readings)


def write(found: Sequence[Finding], owners: Mapping[str, str]) -> str:
    """The page. `owners` are the items that decide claims."""
    known = collect(found)
    rows, counts = [], {"published": dict.fromkeys(_WORDS, 0), "sound": dict.fromkeys(_WORDS, 0)}
    for number, claim in enumerate(CLAIMS, 1):
        finding = known.get(claim.name, NOT_RUN)
        published = {name: value for name, value in finding.readings.items() if not name.startswith("sound")}
        sound = {name: value for name, value in finding.readings.items() if name.startswith("sound")}
        for kind, readings in (("published", published), ("sound", sound)):
            for word, _ in readings.values():
                counts[kind][word] += 1
        command = claim.command or _command(claim, owners)
        cells = [claim.text, claim.where, claim.printed, _cell(published), _cell(sound), f"`{command}`"]
        rows.append([str(number), *cells])
    total = table(["", *_WORDS], [[kind, *(str(count[word]) for word in _WORDS)] for kind, count in counts.items()])
    head = ["", "claim", "where", "paper", "published", "sound", "command"]
    return f"{_HEAD}\n{len(CLAIMS)} claims; a claim counts once for each reading:\n\n{total}\n\n{table(head, rows)}\n"


_WORDS: tuple[Word, ...] = ("holds", "does not hold", "cannot be known")


def _cell(readings: Mapping[str, tuple[Word, str]]) -> str:
    if not readings:
        return "-"
    parts = []
    for name, (word, said) in readings.items():
        label = "" if name in ("as printed", "sound") else name.removeprefix("sound, ") + ": "
        parts.append(f"{label}**{word}** ({said})" if said else f"{label}**{word}**")
    return "<br>".join(parts)


def _command(claim: Claim, owners: Mapping[str, str]) -> str:
    names = dict.fromkeys(owners[name] for name in (claim.name, *claim.sums_up) if name in owners)
    return f"adadp reproduce {' '.join(names)}" if names else "not run"
