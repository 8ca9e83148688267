"""Figures 2, 3, 4a and 4b: accuracy against epochs and the ablations, from their records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adadp_lab.paper.contenders import EXAMPLES, NAME, PAPER
from adadp_lab.paper.item import Finding, Record, Report, Word
from adadp_lab.paper.summary import accuracy, curve, only, trained, word
from adadp_lab.report.figures import COLOURS, GREY, MARKS, NAMES, canvas, legend_below, styled
from adadp_lab.report.tables import Mean, paragraph, table

#: By how many points AdaDP is ahead, as the paper prints it.
PRINTED_GAINS = {
    "mnist": {"dpsgd": (5.9, 2.7, 1.0), "agd": (8.8, 9.5, 6.7), "dpopt": (4.3, 1.5, 0.7)},
    "cifar10": {"dpsgd": (3.2, 5.3, 4.8), "agd": (8.5, 8.0, 6.9), "dpopt": (2.1, 3.5, 3.2)},
}
LEVELS = ("high", "medium", "low")
#: Each rival as published, and as we run it soundly.
RIVALS = {"dpsgd": ("dpsgd/paper", "dpsgd/sound"), "agd": ("agd", "agd"), "dpopt": ("dpopt/published", "dpopt/sound")}
#: Diverged: below the first, in percent, or this much below its own best on the way.
CHANCE, FALLEN = 20.0, 10.0
#: "Comparable" to training without privacy: within this many points.
COMPARABLE = 1.0
STYLES = {
    "adadp/lot": "--", "adadp/example": ":", "dpsgd/paper": "--", "agd": "-.", "dpopt/published": "--",
    "adan/lot": "--", "adan/example": ":",
}  # fmt: skip
LABELS = {
    "adadp/lot": "AdaDP, lot reading", "adadp/example": "AdaDP, example reading", "adadp/sound": "AdaDP, sound",
    "dpsgd/paper": "DPSGD, paper's settings", "dpsgd/sound": "DPSGD, our settings", "agd": "AGD",
    "dpopt/published": "DPOPT, published", "dpopt/sound": "DPOPT, sound", "adal": "AdaL",
    "adan/lot": "AdaN, lot reading", "adan/example": "AdaN, example reading", "adan/sound": "AdaN, sound",
    "sgd": "SGD, no privacy",
}  # fmt: skip


def accuracy_report(dataset: str, level: str, records: Sequence[Record]) -> Report:
    """One privacy level: who ends where, and by how much AdaDP is ahead."""
    ends = {who: accuracy(trained(records, who)) for who in LABELS if trained(records, who)}
    published = f"lot {ends['adadp/lot']}; example {ends['adadp/example']}"
    rows = [["AdaDP", "", published, "", str(ends["adadp/sound"]), ""]]
    findings = []
    for rival, (published, sound) in RIVALS.items():
        printed = PRINTED_GAINS[dataset][rival][LEVELS.index(level)]
        gains = {name: ends[f"adadp/{name}"].less(ends[published]) for name in ("lot", "example")}
        gains["sound"] = ends["adadp/sound"].less(ends[sound])
        rows.append([
            NAMES[rival], f"+{printed}", str(ends[published]), f"lot {_signed(gains['lot'])}; example "
            f"{_signed(gains['example'])}", str(ends[sound]), _signed(gains["sound"]),
        ])  # fmt: skip
        findings.append(
            Finding(f"gain-{dataset}-{level}-{rival}", {
                name: _gain(gain, printed, trained(records, sound if name == "sound" else published))
                for name, gain in gains.items()
            })
        )  # fmt: skip
    rows.append(["SGD, no privacy", "", str(ends["sgd"]), "", str(ends["sgd"]), ""])
    findings += _summary_findings(dataset, level, ends, records)
    cost = only(records, "account")
    head = [NAME[dataset] + ", " + level, "paper: AdaDP ahead by", "published: accuracy", "AdaDP ahead by",
            "sound: accuracy", "AdaDP ahead by"]  # fmt: skip
    return Report(
        "\n\n".join([_setting(dataset, records), table(head, rows), _notes(records)]),
        {f"fig-{dataset}-{level}": _figure(dataset, level, records, cost)},
        findings,
    )


def _signed(gain: Mean) -> str:
    return f"{'+' if gain.value >= 0 else ''}{gain}"


def _gain(gain: Mean, printed: float, rival: Sequence[Record]) -> tuple[Word, str]:
    said = f"{_signed(gain)} points"
    if diverged(rival):
        return "cannot be known", f"{said}, over a rival that diverges with the printed settings ({accuracy(rival)}%)"
    if gain.value > 2 * printed:
        said += ", more than twice as much"
    return word(gain.value >= printed - gain.slack), said


def diverged(runs: Sequence[Record]) -> bool:
    """Whether they learnt next to nothing, or lost much of what they had learnt."""
    end = accuracy(runs).value
    return end < CHANCE or end < max(m.value for _, m in curve(runs)) - FALLEN


def _summary_findings(dataset: str, level: str, ends: dict[str, Mean], records: Sequence[Record]) -> list[Finding]:
    """Claims in words about the same curves."""
    best: dict[str, tuple[Word, str]] = {}
    near: dict[str, tuple[Word, str]] = {}
    for name in ("lot", "example", "sound"):
        rivals = {rival: ends[pair[name == "sound"]] for rival, pair in RIVALS.items()}
        gains = {rival: ends[f"adadp/{name}"].less(end) for rival, end in rivals.items()}
        lost = [rival for rival, pair in RIVALS.items() if diverged(trained(records, pair[name == "sound"]))]
        ahead = all(gain.value > gain.slack for gain in gains.values())
        said = "; ".join(f"{NAMES[r]} {_signed(g)}" + (" (diverges)" if r in lost else "") for r, g in gains.items())
        best[name] = "cannot be known" if ahead and lost else word(ahead), said
        gap = ends["sgd"].less(ends[f"adadp/{name}"])
        verdict: Word = "cannot be known" if gap.error > COMPARABLE else word(gap.value <= COMPARABLE)
        near[name] = verdict, f"{ends[f'adadp/{name}']}% against {ends['sgd']}% without privacy"
    found = [Finding(f"best-{dataset}-{level}", best), Finding(f"comparable-{dataset}-{level}", near)]
    agd, planned = trained(records, "agd"), int(records[0]["settings"]["steps"])
    done = max(record["steps_done"] for record in agd)
    said = f"{min(r['steps_done'] for r in agd)} to {done} of {planned} steps were in its budget"
    found.append(Finding(f"agd-budget-{dataset}-{level}", {"as printed": (word(done < 0.9 * planned), said)}))
    if (dataset, level) == ("mnist", "high"):
        found.append(_whole_cost(only(records, "account")))
        named = {
            name: [m for step, m in curve(trained(records, f"adadp/{name}")) if step <= 1500][-1]
            for name in ("lot", "example", "sound")
        }
        found.append(
            Finding("plot-96", {n: (word(m.value >= 96 - 0.5), f"{m}% after 15 epochs") for n, m in named.items()})
        )
    return found


def _whole_cost(cost: Record) -> Finding:
    """DP-PCA sees the same data, and Theorem 1 is asked about the training steps only."""
    alone, whole = cost["pld"][-1], cost["pld_with_pca"][-1]
    said = f"DP-PCA is never charged: by PLD the steps cost {alone:.3f}, with it {whole:.3f}"
    return Finding("whole-cost", {
        "as printed": ("does not hold", said),
        "sound": ("holds", "every release is in one ledger, DP-PCA included"),
    })  # fmt: skip


def _setting(dataset: str, records: Sequence[Record]) -> str:
    """What was run and what it cost, in words."""
    cost = only(records, "account")
    settings = trained(records, "adadp/lot")[0]["settings"]
    steps = cost["claimed"]["steps"][-1]
    epochs = steps * settings["lot"] / EXAMPLES[dataset]
    noise = f"sigma = {settings['noise_multiplier']:g}"
    pca = settings.get("pca_noise_multiplier")
    seeds = len(trained(records, "adadp/lot"))
    with_pca = f" ({cost['pld_with_pca'][-1]:.3f} with DP-PCA, which the paper does not charge)" if pca else ""
    return paragraph(
        f"{noise}{f', sigma_p = {pca:g}' if pca else ''}, lots of {settings['lot']}, {steps:,} steps",
        f"({epochs:.1f} epochs),",
        f"{seeds} seeds; test accuracy in percent, mean ± standard error. Theorem 1 claims epsilon",
        f"{cost['claimed']['epsilon'][-1]:.3f} at delta = {cost['settings']['delta']:g}; by PLD the same noise costs",
        f"{cost['pld'][-1]:.3f}{with_pca} where there is a guarantee. The lot and example readings, and DPOPT as",
        "published, have none.",
    )


def _notes(records: Sequence[Record]) -> str:
    """What the table does not show: who stopped early, who diverged, whether local clipping came on."""
    notes = []
    for who in ("adadp/lot", "adadp/example", "adan/lot", "adan/example", "dpopt/published"):
        runs = trained(records, who)
        if runs:
            on = [run.get("local_from") for run in runs]
            where = "never came on" if not any(on) else "came on at step " + ", ".join(str(step) for step in on)
            notes.append(f"{LABELS[who]}: local clipping {where}.")
    for who in LABELS:
        runs = trained(records, who)
        if runs and diverged(runs):
            notes.append(f"{LABELS[who]}: diverged ({accuracy(runs)}% at the end, {_peak(runs)}% on the way).")
    agd = trained(records, "agd")
    if agd and min(run["steps_done"] for run in agd) < int(agd[0]["settings"]["steps"]):
        notes.append(f"AGD ended after {', '.join(str(run['steps_done']) for run in agd)} steps: its budget was spent.")
    return paragraph(*notes)


def _peak(runs: Sequence[Record]) -> str:
    """The best mean accuracy along the way."""
    return str(max((m for _, m in curve(runs)), key=lambda m: m.value))


def ablation_report(dataset: str, records: Sequence[Record]) -> Report:
    """AdaL and AdaN beside AdaDP and DPSGD."""
    ends = {who: accuracy(trained(records, who)) for who in LABELS if trained(records, who)}
    rows = [
        ["AdaDP", f"lot {ends['adadp/lot']}; example {ends['adadp/example']}", str(ends["adadp/sound"])],
        ["AdaN (noise alone)", f"lot {ends['adan/lot']}; example {ends['adan/example']}", str(ends["adan/sound"])],
        ["AdaL (rate alone)", str(ends["adal"]), str(ends["adal"])],
        ["DPSGD", str(ends["dpsgd/paper"]), str(ends["dpsgd/sound"])],
    ]
    order: dict[str, tuple[Word, str]] = {}
    both: dict[str, tuple[Word, str]] = {}
    for name in ("lot", "example", "sound"):
        noise, rate = ends[f"adan/{name}"], ends["adal"]
        base = ends["dpsgd/sound" if name == "sound" else "dpsgd/paper"]
        said = f"AdaN {noise}, AdaL {rate}"
        if diverged(trained(records, f"adan/{name}")):
            peak = _peak(trained(records, f"adan/{name}"))
            said += f" (with the printed learning rate AdaN diverges; {peak} on the way)"
        order[name] = word(noise.less(rate).value > noise.less(rate).slack), said
        helps = min(noise.value, rate.value) > base.value and ends[f"adadp/{name}"].value > max(noise.value, rate.value)
        both[name] = word(helps), f"AdaDP {ends[f'adadp/{name}']}, {said}, DPSGD {base}"
    text = [_setting(dataset, records), table(["", "published: accuracy", "sound: accuracy"], rows), _notes(records)]
    findings = [Finding(f"ablation-order-{dataset}", order), Finding(f"ablation-both-{dataset}", both)]
    return Report("\n\n".join(text), {f"fig-ablation-{dataset}": _ablation_figure(dataset, records)}, findings)


# ---- drawing ------------------------------------------------------------------------------------------------------


@styled
def _figure(dataset: str, level: str, records: Sequence[Record], cost: Record) -> Figure:
    """The paper's layout twice: as published, and soundly. Accuracy above, delta_* below, over the same epochs."""
    figure, axes = canvas(2, 2, width=8.6, height=6.6, sharex="col", sharey="row", height_ratios=(3, 1))
    shown = (
        ("as published", ("adadp/lot", "adadp/example", "dpopt/published", "dpsgd/paper", "agd")),
        ("sound", ("adadp/sound", "dpopt/sound", "dpsgd/sound", "agd")),
    )
    every = list(dict.fromkeys(who for _, contenders in shown for who in contenders))
    low = _floor(records, every)
    end = accuracy(trained(records, "sgd")).value
    for axis, below, (title, contenders) in zip(axes[:2], axes[2:], shown, strict=True):
        _draw_curves(axis, dataset, records, contenders, low)
        axis.axhline(end, color=GREY, linewidth=1.2, linestyle=(0, (1, 2)), label=LABELS["sgd"] + " (at the end)")
        _draw_delta(below, dataset, records, cost)
        axis.set_title(f"{NAME[dataset]}, {level} privacy level: {title}")
        below.set_xlabel("epochs")
        legend_below(below, beside=[axis], offset=0.5)
    top = max(accuracy(trained(records, who)).value for who in (*every, "sgd"))
    axes[0].set_ylim(low, min(100, 10 * math.ceil((top + 1) / 10)))
    axes[0].set_ylabel(_ACCURACY)
    axes[2].set_ylabel(rf"$\delta_*$ at $\epsilon$ = {cost['settings']['epsilon']:g}")
    return figure


_ACCURACY = "test accuracy (%), mean ± standard error"


def _floor(records: Sequence[Record], contenders: Sequence[str]) -> float:
    """Below what is worth seeing: a little under the lowest end of those that learn."""
    learnt = [who for who in contenders if not diverged(trained(records, who))] or contenders
    ends = [accuracy(trained(records, who)).value for who in learnt]
    return max(0.0, 10 * math.floor((min(ends) - 25) / 10))


def _draw_curves(
    axis: Axes, dataset: str, records: Sequence[Record], contenders: Sequence[str], low: float = 0.0
) -> None:
    """Accuracy against epochs. Of a contender that is never above `low` the legend says so; it is not drawn."""
    lot = PAPER[dataset]["lot"]
    for place, who in enumerate(contenders):
        runs = trained(records, who)
        points = curve(runs)
        epochs = [step * lot / EXAMPLES[dataset] for step, _ in points]
        values = [m.value for _, m in points]
        name = who.partition("/")[0]
        label = LABELS[who] + (" (diverged)" if diverged(runs) else "")
        if max(values) < low:
            axis.plot([], [], " ", label=f"not shown, never above {max(values):.0f}%:\n{label}")
            continue
        errors = [0.0 if math.isnan(m.error) else m.error for _, m in points]
        every = max(1, len(points) // 6)
        axis.plot(
            epochs, values, color=COLOURS[name], linestyle=STYLES.get(who, "-"), label=label, marker=MARKS[name],
            markersize=4.5, markevery=(place * every // len(contenders), every),
        )  # fmt: skip
        axis.fill_between(
            epochs, [v - e for v, e in zip(values, errors, strict=True)],
            [v + e for v, e in zip(values, errors, strict=True)], color=COLOURS[name], alpha=0.18, linewidth=0,
        )  # fmt: skip
    axis.set_xlim(left=0)


def _draw_delta(axis: Axes, dataset: str, records: Sequence[Record], cost: Record) -> None:
    """delta_* at a fixed epsilon by Theorem 1: that of AGD apart, whose noise falls as it goes."""
    lot = PAPER[dataset]["lot"]
    agd = trained(records, "agd")[0]["claimed"]
    for claimed, colour, style, label in (
        (cost["claimed"], "black", "-", r"$\delta_*$ by Theorem 1"),
        (agd, COLOURS["agd"], ":", r"$\delta_*$ by Theorem 1, AGD"),
    ):
        epochs = [step * lot / EXAMPLES[dataset] for step in claimed["steps"]]
        axis.plot(epochs, claimed["delta"], style, color=colour, linewidth=2.2 if style == ":" else 1.2, label=label)
    axis.set_yscale("log")
    axis.set_ylim(1e-10, 1e-4)
    axis.set_yticks((1e-10, 1e-8, 1e-6, 1e-4))
    axis.minorticks_off()


@styled
def _ablation_figure(dataset: str, records: Sequence[Record]) -> Figure:
    figure, panels = canvas(1, 2, width=8.6, height=4.8, sharey=True)
    shown = (
        ("as published", ("adadp/lot", "adadp/example", "adan/lot", "adan/example", "adal", "dpsgd/paper")),
        ("sound", ("adadp/sound", "adan/sound", "adal", "dpsgd/sound")),
    )
    for axis, (title, contenders) in zip(panels, shown, strict=True):
        _draw_curves(axis, dataset, records, contenders)
        axis.set(title=f"{NAME[dataset]}: {title}", xlabel="epochs")
        legend_below(axis)
    panels[0].set_ylabel(_ACCURACY)
    top = max(m.value for who in LABELS for _, m in curve(trained(records, who)))
    panels[0].set_ylim(0, min(100, 10 * math.ceil((top + 1) / 10)))
    return figure
