"""Table 2 from its records, as ratios to DPSGD: the machines are not the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from adadp_lab.paper.contenders import NAME
from adadp_lab.paper.item import Finding, Record, Report, Word
from adadp_lab.paper.summary import word
from adadp_lab.report.figures import COLOURS, NAMES, canvas, legend_outside, styled
from adadp_lab.report.tables import paragraph, table

#: Seconds an iteration, as printed.
PRINTED = {
    "mnist": {"adadp": 0.5, "dpsgd": 0.3, "agd": 12.0, "dpopt": 15.5},
    "cifar10": {"adadp": 1.2, "dpsgd": 0.9, "agd": 23.7, "dpopt": 19.1},
}
#: A ratio agrees with the printed one within this factor; "much" more efficient is at most half the time of a rival,
#: and "close to" DPSGD at most twice its time (the paper's own 1.7 and 1.3 are).
AGREES, MUCH, CLOSE = 1.5, 0.5, 2.0
LABELS = {
    "adadp/sound": "AdaDP, sound", "adadp/lot": "AdaDP, lot", "adadp/example": "AdaDP, example", "agd": "AGD",
    "dpopt/sound": "DPOPT, sound", "dpopt/published": "DPOPT, published", "dpsgd": "DPSGD", "sgd": "SGD, no privacy",
}  # fmt: skip
#: The contender that stands for an algorithm in a reading.
AS = {
    "lot": {"adadp": "adadp/lot", "agd": "agd", "dpopt": "dpopt/published"},
    "example": {"adadp": "adadp/example", "agd": "agd", "dpopt": "dpopt/published"},
    "sound": {"adadp": "adadp/sound", "agd": "agd", "dpopt": "dpopt/sound"},
}


def timing_report(records: Sequence[Record]) -> Report:
    """Milliseconds and ratios on every machine that was measured."""
    machines = list(dict.fromkeys(_machine(record) for record in records))
    ordinary = [record for record in records if not record["settings"].get("replayed")]  # those are like with like
    parts, findings = [], []
    for dataset, printed in PRINTED.items():
        own = {_machine(r): r for r in records if r["settings"]["dataset"] == dataset}
        rows = []
        for who, label in LABELS.items():
            name = who.partition("/")[0]
            ratio = f"{printed[name] / printed['dpsgd']:.1f}" if name in printed else ""
            cells = [f"{_ms(own[m], who):.2f} ms ({_ratio(own[m], who):.2f}x)" for m in machines]
            rows.append([label, f"{printed[name]:g} s ({ratio}x)" if ratio else "", *cells])
        batch = next(iter(own.values()))["settings"]["batch"]
        parts.append(table([f"{NAME[dataset]}, batches of {batch}", "paper", *machines], rows))
        findings += _findings(dataset, {_machine(r): r for r in ordinary if r["settings"]["dataset"] == dataset})
    text = paragraph(
        "Mean time of a step (a shape's refresh every 50 steps is counted in) and, in brackets, over DPSGD's in the",
        "same process. AdaDP's sound form has its default shape, Kronecker.",
        *{f"CPU threads: {r['threads']}." for r in records if r["device"] == "cpu"},
        *(["Replayed: as in training, from a recording on the GPU, where an algorithm allows it (neither AGD's search",
           "nor SGD's step here does)."] if len(ordinary) < len(records) else []),
    )  # fmt: skip
    return Report("\n\n".join([text, *parts]), {"table2": _figure(ordinary)}, findings)


def _machine(record: Record) -> str:
    return f"{record['device']}, replayed" if record["settings"].get("replayed") else str(record["device"])


_OWN = "; how many steps AGD tries is not said, here 5"


def _ms(record: Record, who: str) -> float:
    return float(record["mean_ms"][who])


def _ratio(record: Record, who: str) -> float:
    return _ms(record, who) / _ms(record, "dpsgd")


def _findings(dataset: str, own: dict[str, Record]) -> list[Finding]:
    made = []
    readings: dict[str, tuple[Word, str]]
    for name, seconds in PRINTED[dataset].items():
        if name == "dpsgd":
            said = ", ".join(f"{1e-3 * _ms(record, 'dpsgd'):.4f} s ({machine})" for machine, record in own.items())
            readings = {"as printed": ("cannot be known", f"{said}: another machine")}
            made.append(Finding(f"time-{dataset}-dpsgd", readings))
            continue
        wanted = seconds / PRINTED[dataset]["dpsgd"]
        readings = {}
        for reading, names in AS.items():
            ratios = {machine: _ratio(record, names[name]) for machine, record in own.items()}
            good = all(wanted / AGREES <= ratio <= wanted * AGREES for ratio in ratios.values())
            said = ", ".join(f"{ratio:.2f}x ({machine})" for machine, ratio in ratios.items())
            verdict: Word = "cannot be known" if name == "agd" else word(good)
            readings[reading] = verdict, f"{said}, printed {wanted:.1f}x{_OWN if name == 'agd' else ''}"
        if readings["lot"] == readings["example"]:
            readings = {"as printed": readings["lot"], "sound": readings["sound"]}
        made.append(Finding(f"time-{dataset}-{name}", readings))
    much: dict[str, tuple[Word, str]] = {}
    close: dict[str, tuple[Word, str]] = {}
    for reading, names in AS.items():
        shares = {
            (machine, rival): _ms(record, names["adadp"]) / _ms(record, names[rival])
            for machine, record in own.items()
            for rival in ("agd", "dpopt")
        }
        said = ", ".join(f"{share:.2f} of {NAMES[rival]}'s ({machine})" for (machine, rival), share in shares.items())
        much[reading] = word(all(share <= MUCH for share in shares.values())), said
        ratios = {machine: _ratio(record, names["adadp"]) for machine, record in own.items()}
        told = ", ".join(f"{ratio:.2f}x ({machine})" for machine, ratio in ratios.items())
        close[reading] = word(all(ratio <= CLOSE for ratio in ratios.values())), told
    return [*made, Finding(f"time-{dataset}-much", much), Finding(f"time-{dataset}-close", close)]


@styled
def _figure(records: Sequence[Record]) -> Figure:
    """Points, not bars: on a scale of ratios a bar's length says nothing."""
    figure, axes = canvas(1, 2, width=8.6, height=3.8, sharex=True, sharey=True)
    machines = list(dict.fromkeys(record["device"] for record in records))
    order = [who for who in LABELS if who not in ("sgd", "dpsgd")][::-1]
    for axis, (dataset, printed) in zip(axes, PRINTED.items(), strict=True):
        own = {r["device"]: r for r in records if r["settings"]["dataset"] == dataset}
        axis.axvline(1, color=COLOURS["dpsgd"], linewidth=1.2, linestyle="--", label="DPSGD")
        for place, (machine, mark) in enumerate(zip(machines, "osD^", strict=False)):
            heights = [rank + 0.12 - 0.24 * place for rank in range(len(order))]
            axis.plot([_ratio(own[machine], who) for who in order], heights, mark, color=COLOURS["adadp"],
                      markerfacecolor="white" if place else COLOURS["adadp"], markeredgewidth=1.4, markersize=6.5,
                      label=f"here: {_shown(machine)}")  # fmt: skip
        values = [printed[who.partition("/")[0]] / printed["dpsgd"] for who in order]
        axis.plot(values, range(len(order)), "|", color="black", markersize=13, markeredgewidth=2, label="the paper")
        axis.set_yticks(range(len(order)), [LABELS[who] for who in order])
        axis.set(xscale="log", xlabel="time of a step over DPSGD's", title=NAME[dataset], ylim=(-0.6, len(order) - 0.4))
        axis.set_xticks((1, 2, 5, 10, 20, 50), ["1", "2", "5", "10", "20", "50"])
        axis.minorticks_off()
    legend_outside(figure, axes[0], columns=4)
    return figure


def _shown(machine: str) -> str:
    return "CPU" if machine == "cpu" else machine
