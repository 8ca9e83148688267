"""accounting-example: the paper's worked example of Theorem 1, by four ways of accounting and as misprinted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from adadp.accounting import renyi, theorem1
from adadp.accounting.accountants import get_accountant
from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian
from adadp_lab.paper.item import Finding, Item, Job, Options, Record, Report, register
from adadp_lab.paper.summary import word
from adadp_lab.paper.workbench import Workbench
from adadp_lab.report.figures import canvas, legend_outside, styled
from adadp_lab.report.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOT, EXAMPLES, DELTA = 600, 60_000, 1e-5
EXAMPLE: dict[str, Any] = {"sigma": 0.9, "at": 1800, "steps": [300 * count for count in range(1, 9)]}
"""What the paper works out."""
TRAINING: dict[str, Any] = {"sigma": 8.0, "at": 1520, "steps": [190 * count for count in range(1, 11)]}
"""MNIST at the paper's high privacy level, for as long as it trains."""
PRINTED_EPSILON, PRINTED_ORDER = 4.0, 6
LARGE_RATE = 0.5
"""A sampling rate above the 1 / (16 sigma) up to which the moments accountant's theorem goes."""

WAYS = {
    "theorem1": "Theorem 1, as printed",
    "classic": "Poisson Rényi bound, classic conversion",
    "rdp": "Poisson Rényi bound, improved conversion",
    "pld": "privacy loss distribution",
}
MISPRINTS = {
    "lemma": "with the subsampling lemma's e^{1/sigma^2 - 1}",
    "sigma": "with the Gaussian lemma's alpha / (2 sigma)",
    "replaced": "where its source proves it: lots without replacement, one example replaced",
}
_MARKS = {"theorem1": "s", "classic": "D", "rdp": "^", "pld": "o"}
_COLOURS = {"theorem1": "#D55E00", "classic": "#E69F00", "rdp": "#56B4E9", "pld": "#0072B2"}


def classic(divergence: Callable[[int], float], steps: int, delta: float) -> tuple[float, int]:
    """(epsilon, order) of `steps` releases by the paper's conversion, over its orders."""
    return min((steps * divergence(order) - math.log(delta) / (order - 1), order) for order in theorem1.ORDERS)


def misprinted(rate: float, sigma: float, order: int) -> float:
    """Theorem 1's divergence with the subsampling lemma's 4 e^{1/sigma^2 - 1} for 4 (e^{1/sigma^2} - 1)."""
    divergence, inverse = theorem1.renyi_divergence(rate, sigma, order), 1 / sigma**2
    if (order - 1) * divergence > 100:
        return divergence  # the second term is nothing beside the others
    other = 2 * math.exp(inverse)
    true, printed = min(4 * math.expm1(inverse), other), min(4 * math.exp(inverse - 1), other)
    moment = math.expm1((order - 1) * divergence) + rate**2 * math.comb(order, 2) * (printed - true)
    return math.log1p(moment) / (order - 1)


def cost(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """(epsilon, order) after each number of steps, by each way; after the last, what the misprints would give."""
    rate, sigma, delta = settings["lot"] / settings["examples"], settings["sigma"], settings["delta"]
    event = PoissonGaussian(sigma, rate)
    orders = tuple(float(order) for order in theorem1.ORDERS)
    poisson = dict(zip(theorem1.ORDERS, renyi.divergences(event, Neighbours.ADD_REMOVE, orders), strict=True))
    found: dict[str, list[Any]] = {name: [] for name in WAYS}
    for steps in settings["steps"]:
        found["classic"].append(_rounded(*classic(poisson.__getitem__, steps, delta)))
        for name in ("theorem1", "rdp", "pld"):
            found[name].append(_spent(name, event, steps, delta))
    at = settings["at"]
    fixed = FixedSizeGaussian(sigma, settings["examples"], settings["lot"])
    return {
        "device": "cpu",
        "ways": found,
        "beyond": _spent("theorem1", PoissonGaussian(sigma, LARGE_RATE), at, delta),
        "misprints": {
            "lemma": _rounded(*classic(lambda order: misprinted(rate, sigma, order), at, delta)),
            "sigma": _rounded(
                *classic(lambda order: theorem1.renyi_divergence(rate, math.sqrt(sigma), order), at, delta)
            ),
            "replaced": _spent("theorem1", fixed, at, delta, Neighbours.REPLACE_ONE),
        },
    }


def _spent(
    name: str, event: Event, steps: int, delta: float, neighbours: Neighbours = Neighbours.ADD_REMOVE
) -> list[float | None]:
    spent = get_accountant(name).epsilon([(event, steps)], delta, neighbours)
    return _rounded(spent.epsilon, spent.order)


def _rounded(epsilon: float, order: float | None) -> list[float | None]:
    return [float(f"{epsilon:.6g}"), order]


def jobs(options: Options) -> list[Job]:
    """The worked example and the training run; in short, only at their ends."""
    shared = {"lot": LOT, "examples": EXAMPLES, "delta": DELTA}
    points = [EXAMPLE, TRAINING]
    if options.quick:
        points = [{**point, "steps": [point["at"]]} for point in points]
    return [Job(cost, {**shared, **point}, cost=5.0) for point in points]


def report(records: Sequence[Record]) -> Report:
    """Every way at the two points, the misprints, and epsilon as the steps go on."""
    example, training = (
        next(record for record in records if record["settings"]["sigma"] == point["sigma"])
        for point in (EXAMPLE, TRAINING)
    )
    both = (example, training)
    points = [f"sigma {r['settings']['sigma']:g}, {r['settings']['at']:,} steps" for r in both]
    rows = [[title, "", *(_written(at(record, name)) for record in both)] for name, title in WAYS.items()]
    rows[0][1] = f"{PRINTED_EPSILON} ({PRINTED_ORDER})"
    rows += [
        [f"Theorem 1 {title}", "", *(_written(record["misprints"][name]) for record in both)]
        for name, title in MISPRINTS.items()
    ]
    head = f"epsilon (order) at delta = {DELTA:g}, lots of {LOT} of {EXAMPLES:,} examples."
    text = f"{head}\n\n{table(['accounting', 'paper', *points], rows)}"
    return Report(text, {"accounting-example": _figure((example, training))}, _findings(*both))


def at(record: Record, name: str) -> tuple[float, float | None]:
    """(epsilon, order) at the point of interest."""
    settings = record["settings"]
    epsilon, order = record["ways"][name][settings["steps"].index(settings["at"])]
    return epsilon, order


def _written(value: Sequence[float | None]) -> str:
    epsilon, order = value
    return f"{epsilon:.3f}" + ("" if order is None else f" ({order:g})")


def _findings(example: Record, training: Record) -> list[Finding]:
    """What the text says of its formulas; "sound" is the tightest true bound for the algorithm's sampling."""
    (epsilon, order), (poisson, poisson_order) = at(example, "theorem1"), at(example, "classic")
    exact = at(example, "pld")[0]
    lemma, gaussian, replaced = (example["misprints"][name][0] for name in MISPRINTS)
    beyond = example["beyond"][0]
    bounds = all(
        theorem >= least
        for record in (example, training)
        for (theorem, _), (least, _) in zip(record["ways"]["theorem1"], record["ways"]["pld"], strict=True)
    )
    said = (
        ("theorem-1", bounds, f"for Poisson lots, one example added or removed: {epsilon:.2f}, by PLD {exact:.2f}; "
         f"for lots without replacement, one example replaced, as in its source: {replaced:.2f}"),
        ("gaussian-lemma", _same(gaussian, epsilon), f"with alpha / (2 sigma) {gaussian:.2f}, Theorem 1 {epsilon:.2f}"),
        ("subsampling-lemma", _same(lemma, epsilon), f"with the lemma's term {lemma:.2f}, Theorem 1 {epsilon:.2f}"),
        ("no-assumption", math.isfinite(beyond), f"it bounds sigma {EXAMPLE['sigma']:g} at q = {LARGE_RATE:g} too (at "
         f"epsilon {beyond:,.0f}); at the paper's q it gives {epsilon / exact:.1f} times PLD"),
        ("example-epsilon", round(epsilon, 1) == PRINTED_EPSILON,
         f"{epsilon:.2f}; {poisson:.3f} by the Poisson Rényi bound, which is not Theorem 1"),
        ("example-order", order == PRINTED_ORDER, f"{order:g}; {poisson_order:g} for the Poisson Rényi bound"),
    )  # fmt: skip
    sound = {"example-epsilon": {"sound": (word(exact <= PRINTED_EPSILON), f"{exact:.3f} (PLD)")}}
    return [Finding(claim, {"as printed": (word(holds), text), **sound.get(claim, {})}) for claim, holds, text in said]


def _same(one: float, other: float) -> bool:
    """To two digits after the point."""
    return f"{one:.2f}" == f"{other:.2f}"


@styled
def _figure(records: Sequence[Record]) -> Figure:
    """epsilon against steps, by each way, with what the paper prints."""
    figure, axes = canvas(1, len(records), width=8.4, height=3.8)
    for axis, record in zip(axes, records, strict=True):
        settings = record["settings"]
        for name, title in WAYS.items():
            epsilons = [epsilon for epsilon, _ in record["ways"][name]]
            style = "--" if name == "theorem1" else "-"
            axis.plot(settings["steps"], epsilons, style, marker=_MARKS[name], markersize=4, color=_COLOURS[name],
                      label=title)  # fmt: skip
        axis.axvline(settings["at"], color="black", linewidth=0.8, linestyle=":", label="the paper's number of steps")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set(xlabel="steps", ylabel=r"$\varepsilon$ at $\delta = 10^{-5}$", ylim=(0, None), xlim=(0, None))
        axis.set_title(rf"$\sigma_* = {settings['sigma']:g}$")
    axes[0].plot(
        EXAMPLE["at"], PRINTED_EPSILON, "*", color="black", markersize=11, label="the paper's epsilon", zorder=4
    )
    legend_outside(figure, *axes, columns=2)
    return figure


ITEM = register(Item("accounting-example", "The worked example of Theorem 1", "§ III-C", jobs, report))
