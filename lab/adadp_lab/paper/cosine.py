"""toy-cosine: how well a gradient's direction survives three shapes of noise of equal privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import integrate, optimize, special

from adadp_lab.paper.item import Finding, Item, Job, Options, Record, Report, register
from adadp_lab.paper.summary import word
from adadp_lab.paper.workbench import Workbench
from adadp_lab.report.figures import COLOURS, GREY, canvas, legend_outside, styled
from adadp_lab.report.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SENSITIVITY = (12.0, 6.0)
GRADIENT = (10.0, 5.0)
DRAWS = 10_000
"""The paper's."""

SHAPES: dict[str, tuple[tuple[float, float], float]] = {
    "proportional": ((17.0, 8.5), 0.52),
    "equal": ((13.5, 13.5), 0.36),
    "inverse": ((12.4, 24.8), 0.28),
}
"""Noise and the average cosine that the paper prints for it."""

READINGS: dict[str, tuple[str, tuple[float, float], str]] = {
    "mean": ("the mean cosine, as the text says", GRADIENT, "mean"),
    "median": ("its median", GRADIENT, "median"),
    "absolute": ("the mean of its absolute value", GRADIENT, "absolute"),
    "bound": ("the mean, with f at its bound (12, 6)", SENSITIVITY, "mean"),
    "swapped": ("the mean, with f = (5, 10)", (5.0, 10.0), "mean"),
    "variance": ("the mean, with sigma read as a variance", GRADIENT, "mean"),
}
"""What the text could mean: title, gradient, statistic of the cosine."""

_NAMES = {"proportional": "like the sensitivity", "equal": "equal", "inverse": "against it"}
_COLOURS = {"proportional": COLOURS["adadp"], "equal": COLOURS["dpsgd"], "inverse": COLOURS["dpopt"]}


def angle_density(angles: np.ndarray, gradient: Sequence[float], sigma: Sequence[float]) -> np.ndarray:
    """The density of the direction of gradient + N(0, diag(sigma^2)) at `angles`, in radians.

    The length is integrated out: along an angle the density is that of a normal cut at zero.
    """
    unit = np.stack([np.cos(angles), np.sin(angles)]) / np.asarray(sigma)[:, None]
    mean = np.asarray(gradient) / np.asarray(sigma)
    square = (unit**2).sum(0)
    along = mean @ unit / np.sqrt(square)
    length = mean @ mean
    # exp(-|m|^2/2) (1 + a Phi(a) / phi(a)), without the quotient that overflows
    tail = along * special.ndtr(along) * math.sqrt(2 * math.pi) * np.exp((along**2 - length) / 2)
    density: np.ndarray = (math.exp(-length / 2) + tail) / (2 * math.pi * sigma[0] * sigma[1] * square)
    return density


def expected(gradient: Sequence[float], sigma: Sequence[float], statistic: str = "mean") -> float:
    """The mean, the mean absolute value or the median of the cosine between gradient and gradient + noise."""
    towards = math.atan2(gradient[1], gradient[0])

    def density(angle: float) -> float:
        """Of the angle between them, in [0, pi], both sides together."""
        return float(angle_density(np.array([towards + angle, towards - angle]), gradient, sigma).sum())

    def integral(weight: Any, end: float = math.pi) -> float:
        breaks = [math.pi / 2] if end > math.pi / 2 else None
        value, _ = integrate.quad(
            lambda angle: weight(angle) * density(angle), 0, end, epsabs=1e-11, limit=200, points=breaks
        )
        return float(value)

    if statistic == "median":
        middle = optimize.brentq(lambda end: integral(lambda _: 1.0, end) - 0.5, 1e-9, math.pi, xtol=1e-10)
        return math.cos(middle)
    return integral(math.cos if statistic == "mean" else lambda angle: abs(math.cos(angle)))


def drawn(gradient: Sequence[float], sigma: Sequence[float], draws: int, seed: int) -> np.ndarray:
    """Cosines of `draws` noisy gradients with the gradient."""
    noise = np.random.default_rng(seed).standard_normal((draws, 2)) * np.asarray(sigma)
    noisy = np.asarray(gradient) + noise
    cosines: np.ndarray = noisy @ np.asarray(gradient) / (np.linalg.norm(noisy, axis=1) * np.linalg.norm(gradient))
    return cosines


def noise_of(share: float) -> tuple[float, float]:
    """The noise that spends `share` of Lemma 1's sum, at sigma_* = 1, on the first coordinate."""
    return SENSITIVITY[0] / math.sqrt(share), SENSITIVITY[1] / math.sqrt(1 - share)


def lemma(sigma: Sequence[float]) -> float:
    """Lemma 1's sum of s_i^2 / sigma_i^2, at most 1 for the privacy of sigma_* = 1."""
    return sum((s / noise) ** 2 for s, noise in zip(SENSITIVITY, sigma, strict=True))


def exact(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """By quadrature: every reading for every shape, and the mean cosine for every split of the privacy."""
    readings: dict[str, dict[str, float]] = {}
    for name, (_, gradient, statistic) in READINGS.items():
        readings[name] = {}
        for shape, (noise, _) in SHAPES.items():
            sigma = tuple(math.sqrt(each) for each in noise) if name == "variance" else noise
            readings[name][shape] = round(expected(gradient, sigma, statistic), 6)
    shares = [round(0.02 * index, 2) for index in range(1, 50)]
    return {
        "device": "cpu",
        "readings": readings,
        "lemma": {shape: round(lemma(noise), 6) for shape, (noise, _) in SHAPES.items()},
        "shares": shares,
        "by_share": [round(expected(GRADIENT, noise_of(share)), 6) for share in shares],
    }


def sample(settings: Mapping[str, Any], seed: int, bench: Workbench) -> dict[str, Any]:
    """As the paper did: the mean of so many draws, with its standard error; some of the draws, to look at."""
    found: dict[str, Any] = {}
    for index, (shape, (noise, _)) in enumerate(SHAPES.items()):
        cosines = drawn(GRADIENT, noise, settings["draws"], 100 * seed + index)
        found[shape] = {"mean": round(float(cosines.mean()), 6), "spread": round(float(cosines.std(ddof=1)), 6)}
    return {"device": "cpu", "shapes": found}


def jobs(options: Options) -> list[Job]:
    """One by quadrature, and the paper's 10,000 draws for each seed."""
    return [Job(exact, {}, cost=1.0), *(Job(sample, {"draws": DRAWS}, seed, 0.1) for seed in range(options.seeds))]


def most_draws(mean: float, spread: float, printed: float) -> int:
    """The most draws with which `printed` is within three standard errors of `mean`."""
    return math.floor((3 * spread / max(abs(mean - printed), 1e-6)) ** 2)


def report(records: Sequence[Record]) -> Report:
    """Ours beside the printed cosines, the other readings, and the best split of the privacy."""
    quadrature = next(record for record in records if "readings" in record)
    samples = [record["shapes"] for record in records if "shapes" in record]
    truth: dict[str, float] = quadrature["readings"]["mean"]
    mean = {shape: float(np.mean([each[shape]["mean"] for each in samples])) for shape in SHAPES}
    spread = {shape: float(np.mean([each[shape]["spread"] for each in samples])) for shape in SHAPES}
    error = {shape: spread[shape] / math.sqrt(DRAWS * len(samples)) for shape in SHAPES}
    first = table(
        ["noise (sigma_1, sigma_2)", "paper", "exact", f"{len(samples)} x {DRAWS:,} draws", "Lemma 1's sum"],
        [
            [f"{noise}, {_NAMES[shape]}", f"{printed}", f"{truth[shape]:.4f}",
             f"{mean[shape]:.4f} ± {error[shape]:.4f}", f"{quadrature['lemma'][shape]:.4f}"]
            for shape, (noise, printed) in SHAPES.items()
        ],
    )  # fmt: skip
    rows, agreeing = [], []
    for name, values in quadrature["readings"].items():
        row = [values[shape] for shape in SHAPES]
        agrees, ordered = all(_agrees(values[shape], shape) for shape in SHAPES), row[0] > row[1] > row[2]
        agreeing += [READINGS[name][0]] * agrees
        rows.append([READINGS[name][0], *(f"{value:.3f}" for value in row), _yes(agrees), _yes(ordered)])
    noises = [str(noise) for noise, _ in SHAPES.values()]
    second = table(["reading of the text", *noises, "as printed", "in the printed order"], rows)
    few = [f"{most_draws(truth[shape], spread[shape], printed):,}" for shape, (_, printed) in SHAPES.items()]
    by_share = dict(zip(quadrature["shares"], quadrature["by_share"], strict=True))
    best = max(by_share, key=by_share.__getitem__)
    said = [
        f"Readings that give the printed numbers: {'; '.join(agreeing) or 'none'}. With {DRAWS:,} draws a mean is "
        f"known to {max(spread.values()) / math.sqrt(DRAWS):.3f}; the printed ones are within three standard errors "
        f"only of means over at most {', '.join(few)} draws.",
        f"Of all splits of the same privacy, spending {best:.0%} of it on the larger coordinate keeps the direction "
        f"best ({by_share[best]:.4f}): between noise like the sensitivity (50%: {by_share[0.5]:.4f}) and equal noise "
        f"(80%: {by_share[0.8]:.4f}).",
    ]
    head = f"Cosine between f = {GRADIENT} and its noised version, sensitivities {SENSITIVITY}, sigma_* = 1."
    text = "\n\n".join([head, first, second, *said])
    return Report(text, {"toy-cosine": _figure(quadrature)}, _findings(quadrature, mean, error))


def _agrees(value: float, shape: str) -> bool:
    """The printed number, which has two digits, to one in the second."""
    return abs(value - SHAPES[shape][1]) < 0.015


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _findings(quadrature: Record, mean: Mapping[str, float], error: Mapping[str, float]) -> list[Finding]:
    truth, median = (quadrature["readings"][name] for name in ("mean", "median"))
    findings = []
    for shape in SHAPES:
        said = f"{truth[shape]:.3f} exactly, {mean[shape]:.3f} ± {error[shape]:.3f} drawn"
        findings.append(Finding(f"cosine-{shape}", {"as printed": (word(_agrees(truth[shape], shape)), said)}))
    ordered = truth["proportional"] > truth["equal"] > truth["inverse"]
    said = " / ".join(f"{truth[shape]:.3f}" for shape in SHAPES) + " on average, medians "
    said += " / ".join(f"{median[shape]:.2f}" for shape in SHAPES)
    findings.append(Finding("cosine-order", {"as printed": (word(ordered), said)}))
    sums = [quadrature["lemma"][shape] for shape in ("proportional", "equal")]
    said = f"{sums[0]:.4f} and {sums[1]:.4f}, at most 1"
    findings.append(Finding("lemma-1-example", {"as printed": (word(max(sums) <= 1), said)}))
    return findings


@styled
def _figure(quadrature: Record) -> Figure:
    """The three shapes around the gradient; the printed cosines beside the true ones; every split of the privacy."""
    figure, (clouds, bars, curve) = canvas(1, 3, width=8.6, height=3.4)
    truth = quadrature["readings"]["mean"]
    hollow: dict[str, Any] = {"markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.6}
    turn = np.linspace(0, 2 * math.pi, 200)
    for row, (shape, (noise, printed)) in enumerate(SHAPES.items()):
        colour, label = _COLOURS[shape], f"noise {_NAMES[shape]} ({noise[0]:g}, {noise[1]:g})"
        clouds.plot(GRADIENT[0] + noise[0] * np.cos(turn), GRADIENT[1] + noise[1] * np.sin(turn), color=colour,
                    label=label)  # fmt: skip
        bars.plot([printed, truth[shape]], [row, row], color=colour, alpha=0.4, linewidth=4, solid_capstyle="round")
        bars.plot(truth[shape], row, "o", color=colour, markersize=8)
        bars.plot(printed, row, "D", color=colour, **hollow)
        share = (SENSITIVITY[0] / noise[0]) ** 2 / quadrature["lemma"][shape]
        curve.plot(share, truth[shape], "o", color=colour, markersize=8, zorder=3)
        curve.plot(share, printed, "D", color=colour, zorder=3, **hollow)
    clouds.annotate("", GRADIENT, (0, 0), arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 1.6})
    clouds.plot(0, 0, "k.", markersize=4)
    clouds.set(title="Noise around f = (10, 5)", xlabel="first coordinate", ylabel="second coordinate",
               aspect="equal", xlim=(-25, 45), ylim=(-34, 34))  # fmt: skip
    bars.set(title="Average cosine", xlabel="cosine", ylim=(2.6, -0.6), xlim=(0.2, 0.6))
    bars.set_yticks(range(3), [_NAMES[shape].replace("like the", "like the\n") for shape in SHAPES])
    for marker, face, label in (("D", "white", "the paper's cosine"), ("o", GREY, "exact cosine")):
        bars.plot([], [], marker, color=GREY, markerfacecolor=face, label=label)
    curve.plot(quadrature["shares"], quadrature["by_share"], color=GREY, zorder=1, label="exact cosine of every split")
    legend_outside(figure, clouds, bars, curve)
    curve.set(title="All splits of the same privacy", xlabel="share spent on the larger coordinate",
              ylabel="average cosine", xlim=(0, 1), ylim=(0.1, 0.6))  # fmt: skip
    return figure


ITEM = register(Item("toy-cosine", "Cosine similarity of three noise shapes", "§ III-B", jobs, report))
