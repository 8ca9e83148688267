"""The figures of a report, for one run or for several on common axes."""

from __future__ import annotations

from collections.abc import Sequence

from adadp.report.blocks import Figure
from adadp.report.charts import Curves, Line, Ratios, Rule
from adadp.report.facts import Facts
from adadp.report.scales import Axis, thinned
from adadp.report.signal import distribution, ratios, thirds

RELEASED = "Computed from released gradients and the size of their noise: no private value is in it."
NOISE_BY_COORDINATE = "noise_by_coordinate"
"""Key of lines of history.jsonl."""

_SHOWN = 200


def learning(facts: Sequence[Facts]) -> list[Figure]:
    """Accuracy (or error) and loss on held-out rows, as far as they are there; for numbers, the mean absolute error."""
    found = []
    for key, title, axis in (
        ("accuracy", "Accuracy on held-out rows", Axis("accuracy", percent=True)),
        ("mae", "Error on held-out rows", Axis("mean absolute error", low=0.0)),
        ("loss", "Loss on held-out rows", Axis("loss", low=0.0)),
    ):
        lines = []
        for number, each in enumerate(facts):
            curve = () if each.run.figures is None else each.run.figures.curve
            points = [(line["step"], line[key]) for line in curve if key in line]
            if points:
                lines.append(Line(_name(facts, number), thinned(points, _SHOWN), number, dots=len(points) <= 30))
        if lines:
            chart = Curves(Axis("step", low=0.0), axis, lines, description=f"{axis.label} over steps")
            private, said = _who(facts)
            found.append(Figure(title, chart, "" if private else said, said if private else ""))
    return found


def _who(facts: Sequence[Facts]) -> tuple[bool, str]:
    """Whether there are figures for the curator alone, and what stands beside: what the guarantee does not cover."""
    found: dict[str, list[str]] = {}
    private = False
    for each in facts:
        if each.run.figures is not None and each.run.figures.curve:
            found.setdefault(each.run.figures.why, []).append(each.run.label)
            private = private or not each.run.figures.public
    if len(found) < 2:
        return private, "".join(found)
    return private, " ".join(f"{', '.join(runs)}: {why}" for why, runs in found.items())


def epsilon(facts: Sequence[Facts]) -> list[Figure]:
    """Epsilon over steps, with the budget."""
    lines, rules = [], []
    for number, each in enumerate(facts):
        name = _name(facts, number)
        if each.spending.own:
            label = name if len(facts) > 1 else "this run" if each.spending.together else ""
            lines.append(Line(label, each.spending.own, number, filled=len(facts) == 1))
        if each.spending.together:
            label = f"{name}, with earlier runs" if len(facts) > 1 else "with the earlier runs on the data"
            lines.append(Line(label, each.spending.together, number, broken=True))
    for each in facts:
        settings = each.run.settings
        if each.spending.own and isinstance(settings.get("epsilon"), int | float):
            rules.append(Rule(f"planned: {settings['epsilon']:g}", settings["epsilon"]))
        if each.spending.own and isinstance(settings.get("budget"), int | float):
            rules.append(Rule(f"budget of all runs: {settings['budget']:g}", settings["budget"]))
    if not lines:
        return []
    rules = list({rule.name: rule for rule in rules}.values())
    shown = rules if len(rules) <= 3 else []  # many plans would be many lines across: the table has them
    chart = Curves(Axis("step", low=0.0), Axis("epsilon", low=0.0), lines, shown, "epsilon over steps")
    note = "Upper bounds, from kinds and numbers of releases alone. Releases beside the steps count from the start."
    return [Figure("Epsilon over time", chart, note)]


def attack(facts: Sequence[Facts]) -> list[Figure]:
    """The trade-off curve: who is found, over who is wrongly accused."""
    lines = [
        Line(_name(facts, number) or "no attack is above", each.attacker.curve, number, filled=len(facts) == 1)
        for number, each in enumerate(facts)
        if each.attacker is not None
    ]
    if not lines:
        return []
    luck = Line("luck", ((0.0, 0.0), (1.0, 1.0)), colour=None, broken=True)
    across = Axis("wrongly accused, of those who are not in the data", percent=True, low=0.0, high=1.0)
    chart = Curves(
        across, Axis("found", percent=True, low=0.0, high=1.0), [*lines, luck], description="found by attacks"
    )
    by_releases = all(each.attacker is None or each.attacker.from_releases for each in facts)
    source = "from all releases on record" if by_releases else "from epsilon and delta"
    return [
        Figure("What any attack can find", chart, f"Share of those in the data who are found. Upper bounds, {source}.")
    ]


def noise(facts: Sequence[Facts]) -> list[Figure]:
    """Noise over signal for each layer."""
    if len(facts) == 1:
        parts = [(name, number, ratios(lines)) for number, (name, lines) in enumerate(thirds(facts[0].run.history))]
    else:
        parts = [
            (_name(facts, number), number, ratios(each.run.history))
            for number, each in enumerate(facts)
            if each.run.history
        ]
    if not any(each for _, _, each in parts):
        return []
    chart = Ratios("noise over signal, in one release", parts, "noise over signal for each layer")
    note = (
        "How many times longer the noise of one released gradient is than what steps have in common. Bars are two "
        "standard errors; an arrow: not told apart from no signal. Noise averages out over steps."
    )
    return [Figure("Noise and signal by layer", chart, f"{note} {RELEASED}")]


def sigma(facts: Sequence[Facts]) -> list[Figure]:
    """How the noise is spread over coordinates: the paper's figure of sigma_i."""
    looks: list[tuple[str, int, list[tuple[float, float]]]] = []
    for number, each in enumerate(facts):
        history = each.run.history
        for place, line in enumerate(history[-1:] if len(facts) > 1 else [*history[:1], *history[1:][-1:]]):
            points = distribution(line)
            if points is not None:
                looks.append((_name(facts, number) or f"step {line['step']:,}", number + place, points))
    if len(facts) == 1 and len(looks) == 2 and looks[0][2] == looks[1][2]:
        looks = [("all steps", 0, looks[0][2])]  # a clipping whose noise stays the same
    if not looks:
        return []
    lines = [Line(name, _outline(points), number, filled=True) for name, number, points in looks]
    across = Axis("sigma_i: deviation of the noise on the sum of a lot", log=True)
    chart = Curves(across, Axis("share", percent=True, low=0.0), lines, description="noise over coordinates")
    rows = [[name, *(f"{_quantile(points, part):.3g}" for part in (0.05, 0.5, 0.95))] for name, _, points in looks]
    note = f"Share of the coordinates in bins of a twentieth of a decade. {RELEASED}"
    numbers = ["sigma_i", "5%", "median", "95%"], rows
    return [Figure("How the noise is spread over coordinates", chart, note, numbers=numbers)]


def _quantile(points: Sequence[tuple[float, float]], part: float) -> float:
    below = 0.0
    for centre, share in points:
        below += share
        if below >= part:
            return centre
    return points[-1][0]


def _outline(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A histogram as an outline: from bin to bin, down to 0 at both ends."""
    half = 10 ** (0.5 / 20)
    found = [(points[0][0] / half, 0.0)]
    for centre, share in points:
        found += [(centre / half, share), (centre * half, share)]
    return [*found, (points[-1][0] * half, 0.0)]


def _name(facts: Sequence[Facts], number: int) -> str:
    return facts[number].run.label if len(facts) > 1 else ""
