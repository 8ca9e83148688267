"""An audit as files: numbers, a picture and a page that a reader can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from adadp.accounting.guarantee import round_up
from adadp.audit.attack import Array
from adadp.audit.bounds import Counts
from adadp.audit.result import Audit
from adadp.extras import require

_IN, _OUT, _CLAIM = "#D55E00", "#0072B2", "#555555"
#: From this ratio of the largest score to the others' spread on, an axis in proportion would show one bar.
_FAR = 50.0


def write(folder: str | Path, found: Audit) -> Path:
    """Write audit.json, audit.svg, audit.png and audit.md into `folder`."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "audit.json").write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    (path / "audit.md").write_text(page(found))
    draw(found, path / "audit.svg", path / "audit.png")
    return path


def page(found: Audit) -> str:
    """The audit in words, with the sum that gives its bound."""
    promise, errors, attack = found.promise, found.finding.errors, found.finding.attack
    counts = errors.counts
    if promise.guaranteed is None:
        held = f"There is no guarantee ({'; '.join(promise.why)}). The claim is epsilon {round_up(promise.epsilon)}"
    else:
        held = f"The guarantee is epsilon {round_up(promise.epsilon)}"
    lines = [
        f"# Audit of {found.target}: {found.verdict}",
        "",
        f"{held} at delta {round_up(promise.delta)}. The audit shows that epsilon is at least "
        f"**{found.epsilon_lower:.3g}** at confidence {errors.confidence:g} ({found.bound}).",
        "",
        "![scores of the two worlds, and the errors against the claim](audit.png)",
        "",
        f"Threat: {found.threat}. Canary: {attack.canary}. Statistic: {attack.statistic}; above "
        f"{attack.threshold:.4g} the attack says that the canary was there. Canary, statistic and threshold were "
        f"chosen on {found.trials - counts.trials:,} trials that are not counted.",
        "",
        "| | trials | wrong guesses |",
        "| --- | --- | --- |",
        f"| without the canary | {counts.out:,} | {counts.false_positives:,} |",
        f"| with the canary | {counts.inside:,} | {counts.false_negatives:,} |",
        "",
        reasoning(found),
        "",
        *([confirmed(found), ""] if found.contradicted else []),
        *([f"This settles it: `{found.settled_by}`.", ""] if found.suspicious else []),
        f"Privacy of this page: {found.privacy}.",
    ]
    return "\n".join(lines) + "\n"


def confirmed(found: Audit) -> str:
    """What a second set of trials says of the same attack, where there was one."""
    second = found.finding.confirmation
    assert second is not None
    counts, claim = second.counts, found.promise.claim
    if second.together:
        sides = f"at most {second.mean:.4g} of all guesses are wrong, {_side(second.mean, claim.least_error())}"
    else:
        alpha, beta = second.false_positives, second.false_negatives
        side = _side(beta, claim.false_negatives(alpha))
        sides = f"false positives are at most {alpha:.4g} and false negatives at most {beta:.4g}, {side}"
    text = (
        f"In {counts.trials:,} fresh trials the same attack erred in {counts.false_positives:,} of {counts.out:,} "
        f"without the canary and {counts.false_negatives:,} of {counts.inside:,} with it. At confidence "
        f"{second.confidence:g} {sides} what the promise allows."
    )
    if found.violated:
        return f"{text} So the promise is broken: where it holds, at most 0.1% of audits say so."
    return (
        f"{text} So the first trials may have been an accident, which up to {1 - found.finding.errors.confidence:.2g} "
        f"of audits of sound targets have."
    )


def reasoning(found: Audit) -> str:
    """From the counts to the bound, and what the first set says of the promise, in numbers."""
    errors, claim, delta = found.finding.errors, found.promise.claim, found.promise.delta
    if errors.together:
        wrong = errors.counts.false_positives + errors.counts.false_negatives
        error, allowed = errors.mean, claim.least_error()
        return (
            f"{wrong:,} of {errors.counts.trials:,} guesses were wrong, so at most {error:.4g} of all guesses are "
            "(Clopper-Pearson). A mechanism that kept its promise would have every attack err at least "
            f"{allowed:.4g} of the time: the attack is {_side(error, allowed)} that. Whatever the mechanism, epsilon "
            f"is at least ln((1 - delta - e) / e) = {errors.epsilon(delta):.3g} for e = {error:.4g}."
        )
    alpha, beta = errors.false_positives, errors.false_negatives
    allowed = claim.false_negatives(alpha)
    return (
        f"By Clopper-Pearson false positives are at most {alpha:.4g} and false negatives at most {beta:.4g}, both at "
        "once. With so few false positives a mechanism that kept its promise would have at least "
        f"{allowed:.4g} false negatives: the attack is {_side(beta, allowed)} that. Whatever the mechanism, epsilon is "
        f"at least ln((1 - delta - {beta:.4g}) / {alpha:.4g}) = {errors.epsilon(delta):.3g} (or the other way round, "
        "whichever is larger)."
    )


def _side(value: float, allowed: float) -> str:
    return "below" if value < allowed else "not below"


def draw(found: Audit, *paths: Path) -> None:
    """Left: the statistic in both worlds. Right: what no test may reach if the promise holds, and what this one did."""
    require("matplotlib", "plots", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    out, inside = np.array(found.finding.out), np.array(found.finding.inside)
    both = np.concatenate([out, inside])
    bins, scale = _bins(both)
    left.set_xscale(scale)
    left.hist(out, bins=bins, alpha=0.6, color=_OUT, label=f"without the canary ({len(out):,} trials)")
    left.hist(inside, bins=bins, alpha=0.5, color=_IN, hatch="///", label=f"with the canary ({len(inside):,} trials)")
    left.axvline(found.finding.attack.threshold, color="black", linewidth=1, linestyle="--", label="threshold")
    statistic = f"the attack's statistic: {found.finding.attack.statistic}"
    left.set(xlabel=statistic, ylabel="trials", title="What the auditor saw")
    _draw_errors(right, found, out, inside)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.suptitle(
        f"{found.target}, {found.threat}: {found.verdict}; epsilon at least {found.epsilon_lower:.3g}, "
        f"{round_up(found.promise.epsilon)} {'claimed' if found.promise.guaranteed is None else 'guaranteed'}",
        fontsize=10,
    )
    for path in paths:
        figure.savefig(path, dpi=150)


def _bins(scores: Array) -> tuple[Array, str]:
    """Bounds of bars and the axis's scale: by powers of ten where a few scores are far beyond all others."""
    low, high = float(scores.min()), float(scores.max())
    if low > 0 and high > _FAR * float(np.median(scores)):
        return np.geomspace(low, high, 41), "log"
    return np.linspace(low, high if high > low else low + 1, 41), "linear"


def _draw_errors(axes: Any, found: Audit, out: Array, inside: Array) -> None:
    errors = found.finding.errors
    rates = np.linspace(0, 1, 401)
    curve = [found.promise.claim.false_negatives(float(rate)) for rate in rates]
    promised = "claimed" if found.promise.guaranteed is None else "guaranteed"
    axes.fill_between(rates, curve, alpha=0.12, color=_CLAIM)
    axes.plot(rates, curve, color=_CLAIM, label=f"no test lies below, if the {promised} epsilon holds")
    thresholds = np.unique(np.concatenate([out, inside]))
    positives = [float((out > threshold).mean()) for threshold in thresholds]
    negatives = [float((inside <= threshold).mean()) for threshold in thresholds]
    axes.plot(positives, negatives, color=_IN, linewidth=1, label="the statistic, at every threshold")
    counts: Counts = errors.counts
    alpha, beta = counts.false_positives / counts.out, counts.false_negatives / counts.inside
    axes.plot(alpha, beta, "o", color=_IN, label="the attack", clip_on=False, zorder=4)
    if errors.together:
        ends = np.array([0.0, min(1.0, 2 * errors.mean)])
        axes.plot(ends, 2 * errors.mean - ends, "--", color=_IN, label="upper bound on its errors")
    else:
        corner = errors.false_positives, errors.false_negatives
        axes.plot(
            [0, corner[0], corner[0]], [corner[1], corner[1], 0], "--", color=_IN, label="upper bounds on its errors"
        )
    axes.set(
        xlabel="false positives",
        ylabel="false negatives",
        xlim=(0, 1),
        ylim=(0, 1),
        title="Telling whether the canary was there",
    )
    axes.grid(alpha=0.3)
