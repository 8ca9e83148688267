"""Every claim that the paper makes in numbers or in italics, where it stands, and the figure that it prints.

Whether it holds is computed from the records of an item (`Finding.claim` is `Claim.name` here), or from other claims
that it sums up, or, for what no run can decide, argued here with a reference to the test or command that shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adadp_lab.paper.fig2_fig3_accuracy_report import LEVELS, PRINTED_GAINS
from adadp_lab.paper.item import Finding
from adadp_lab.paper.table1_report import PRINTED as COSTS
from adadp_lab.paper.table1_report import PRINTED_REDUCTION
from adadp_lab.paper.table2_report import PRINTED as TIMES


@dataclass(frozen=True)
class Claim:
    """`printed` is the paper's figure. `sums_up` names claims that decide it; `argued` is decided without a run."""

    name: str
    where: str
    text: str
    printed: str = ""
    sums_up: tuple[str, ...] = ()
    argued: Finding | None = None
    command: str = ""


_DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
_WHO = {"dpsgd": "DPSGD", "adadp": "AdaDP", "agd": "AGD", "dpopt": "DPOPT"}
_RAW = "E' is computed from raw gradients, so clip bounds and noise scales show data that was never noised"
_AVERAGE = "one example moves a clipped average by up to 2 s_i, the noise is made for s_i / L; and " + _RAW


def _privacy() -> Iterator[Claim]:
    yield Claim(
        "private", "Abstract; Theorem 1", "AdaDP has a provable privacy guarantee", "(epsilon, delta)-DP",
        argued=Finding("private", {
            "lot": ("does not hold", _AVERAGE),
            "example": ("does not hold", _RAW),
            "sound": ("holds", "each step is one Gaussian release on a Poisson lot; tests/soundness attacks the bound"),
        }),
        command="adadp audit --reading lot",
    )  # fmt: skip
    yield Claim(
        "lemma-1", "Lemma 1", "Noise with sum of s_i^2 / sigma_i^2 <= 1 / sigma_*^2 is as private as sigma_*", "",
        argued=Finding("lemma-1", {
            "as printed": ("holds", "the privacy loss is N(H/2, H) with H that sum; tested for every clipping"),
        }),
        command="pytest tests/soundness",
    )  # fmt: skip
    yield Claim("whole-cost", "Section IV-A", "The privacy cost is the pair (epsilon, delta_*) of Theorem 1")
    yield Claim("lemma-1-example", "Section III-B", "(17, 8.5) and (13.5, 13.5) meet Lemma 1 for s = (12, 6)", "<= 1")
    yield Claim("theorem-1", "Theorem 1", "Noise that meets Lemma 1 costs at most what Theorem 1 says")
    yield Claim("gaussian-lemma", "Lemma 3", "The Gaussian lemma as printed gives Theorem 1", "alpha / (2 sigma_2)")
    yield Claim("subsampling-lemma", "Lemma 6", "The subsampling lemma as printed gives Theorem 1", "e^(1/sigma^2 - 1)")
    yield Claim("no-assumption", "Sections I-D, III-C", "Theorem 1 needs no assumption on sigma or q")
    yield Claim("example-epsilon", "Section III-C", "L = 600, sigma = 0.9, 1,800 steps: epsilon at delta = 1e-5", "4.0")
    yield Claim("example-order", "Section III-C", "The best order in the same example", "alpha = 6")


def _toys() -> Iterator[Claim]:
    where = "Section III-B"
    for name, shape, printed in (
        ("proportional", "(17, 8.5)", "0.52"), ("equal", "(13.5, 13.5)", "0.36"), ("inverse", "(12.4, 24.8)", "0.28"),
    ):  # fmt: skip
        yield Claim(f"cosine-{name}", where, f"Average cosine similarity with noise {shape}", printed)
    order = "0.52 > 0.36 > 0.28"
    yield Claim("cosine-order", where, "Noise in proportion to sensitivity disturbs the direction least", order)
    yield Claim("beale-dpsgd", where, "Beale, 150 steps: distance of DPSGD to its noise-free twin", "0.90")
    yield Claim("beale-adadp", where, "Beale, 150 steps: distance of AdaDP to its noise-free twin", "0.21")
    yield Claim("beale-closer", where, "AdaDP stays closer to its noise-free twin than DPSGD", "0.21 < 0.90")
    yield Claim("beale-noise", where, "It is adaptive noise that keeps it there")
    yield Claim("toy-functions", where, "Similar results on all widely used test functions")


def _costs() -> Iterator[Claim]:
    for dataset, rows in COSTS.items():
        for target, pair in rows.items():
            for name, printed in zip(("dpsgd", "adadp"), pair, strict=True):
                yield Claim(
                    f"table1-{dataset}-{target}-{name}", "Table I",
                    f"{_DATA[dataset]}: epsilon of {_WHO[name]} for {target}% at delta = 1e-4", f"{printed:.2f}",
                )  # fmt: skip
    for dataset, printed in PRINTED_REDUCTION.items():
        yield Claim(
            f"table1-{dataset}-average", "Section IV-B, in italics",
            f"{_DATA[dataset]}: average reduction of the privacy cost against DPSGD", f"{printed}%",
        )  # fmt: skip
    yield Claim(
        "half-cost", "Section I-E", "50% less privacy cost than the state of the art", "50%",
        sums_up=("table1-mnist-average", "table1-cifar10-average"),
    )  # fmt: skip


def _gains() -> Iterator[Claim]:
    for dataset, rivals in PRINTED_GAINS.items():
        for level in LEVELS:
            yield Claim(
                f"best-{dataset}-{level}", "Section IV-C, in italics",
                f"{_DATA[dataset]}, {level} privacy: AdaDP significantly outperforms DPSGD, AGD and DPOPT",
            )  # fmt: skip
        for rival, printed in rivals.items():
            for level, gain in zip(LEVELS, printed, strict=True):
                yield Claim(
                    f"gain-{dataset}-{level}-{rival}", "Section IV-C",
                    f"{_DATA[dataset]}, {level} privacy: final accuracy above {_WHO[rival]}", f"+{gain} points",
                )  # fmt: skip
        for level in LEVELS:
            yield Claim(
                f"comparable-{dataset}-{level}", "Section I-C",
                f"{_DATA[dataset]}, {level} privacy: accuracy comparable to training without privacy",
            )  # fmt: skip
            yield Claim(
                f"agd-budget-{dataset}-{level}", "Section IV-C",
                f"{_DATA[dataset]}, {level} privacy: AGD consumes its budget too fast",
            )  # fmt: skip
    yield Claim("plot-96", "Fig. 2a", "MNIST at (0.5, 1e-5): accuracy of AdaDP after 15 epochs", "about 96%")
    for dataset, level, most in (("mnist", "high", 4.3), ("cifar10", "medium", 3.5)):
        yield Claim(
            f"improvement-{dataset}", "Section I-E", f"{_DATA[dataset]}: up to so much above the state of the art",
            f"+{most} points", sums_up=(f"gain-{dataset}-{level}-dpopt",),
        )  # fmt: skip


def _times() -> Iterator[Claim]:
    for dataset, rows in TIMES.items():
        for name, seconds in rows.items():
            yield Claim(
                f"time-{dataset}-{name}", "Table II",
                f"{_DATA[dataset]}: time of an iteration of {_WHO[name]} (here: over DPSGD's)", f"{seconds:g} s",
            )  # fmt: skip
        yield Claim(
            f"time-{dataset}-much", "Section IV-D, in italics",
            f"{_DATA[dataset]}: AdaDP is much more efficient than AGD and DPOPT",
        )  # fmt: skip
        yield Claim(f"time-{dataset}-close", "Section IV-D", f"{_DATA[dataset]}: AdaDP's time is close to DPSGD's")


def _benchmarks() -> Iterator[Claim]:
    where = "Section IV-E, in italics"
    for dataset, name in _DATA.items():
        yield Claim(f"ablation-both-{dataset}", where, f"{name}: both components contribute to the gain")
        yield Claim(f"ablation-order-{dataset}", where, f"{name}: adaptive noise contributes more (AdaN above AdaL)")
    yield Claim("estimate-accurate", where, "sqrt(E') estimates |g_t| accurately at steps 100 and 1,000")
    yield Claim("estimate-declines", where, "Both |g_t| and its estimate decline from step 100 to step 1,000")
    yield Claim("sigma-falls", where, "Most sigma_i decrease as training progresses")
    yield Claim("sigma-10-to-20", "Section IV-E", "Many sigma_i are between 10 and 20 at step 100", "10 to 20")
    yield Claim("sigma-below-10", "Section IV-E", "Most sigma_i are below 10 at step 1,000", "< 10")


def _studies() -> Iterator[Claim]:
    where = "Section IV-F"
    yield Claim("lr-93", where, "Above 93% for learning rates from 0.0008 to 0.005", "93%")
    yield Claim("lr-peak-printed", where, "Accuracy rises up to a learning rate of 2e-2 and falls beyond it", "0.02")
    yield Claim("lr-peak", where, "The same with 2e-3, which must be meant: 2e-2 is outside the studied range", "0.002")
    yield Claim("beta-flat", where, "Relatively resistant to beta")
    yield Claim("beta-above-one", where, "A value of beta slightly above one is reasonable", "1.2")
    yield Claim("noise-best-7", where, "Best at sigma = 7", "7")
    yield Claim("noise-dpsgd-4", where, "DPSGD reaches its best at sigma = 4", "4")
    yield Claim("lot-best-800", where, "Best at L = 800", "800")
    yield Claim("lot-peak", where, "Accuracy rises with the lot, peaks at 800 and declines")


CLAIMS: tuple[Claim, ...] = (
    *_privacy(), *_toys(), *_costs(), *_gains(), *_times(), *_benchmarks(), *_studies(),
)  # fmt: skip
