"""Figures 2 and 3: accuracy and delta_* against epochs at three privacy levels, MNIST and CIFAR-10.

The ablations of Figures 4a and 4b are curves of the same kind, at the high level, so they are here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adadp_lab.paper.accounts import account_job, steps_for
from adadp_lab.paper.contenders import CIFAR10, EXAMPLES, MNIST, NAME, PAPER, run_job
from adadp_lab.paper.item import Item, Job, Options, Record, Report, register
from adadp_lab.paper.learning import marks

DELTA = 1e-5
#: Level -> (noise multiplier, DP-PCA's, the epsilon at which delta_* is drawn). MNIST: the paper's noise, and as many
#: steps as Theorem 1 allows at (0.5, 1e-5) and the first; the paper says no more.
MNIST_LEVELS = {"high": (8.0, 16.0, 0.5), "medium": (4.0, 7.0, 1.0), "low": (2.0, 4.0, 2.2)}
#: CIFAR-10 has one noise. What separates its levels is not said: here it is the number of steps, for these epsilons.
CIFAR10_LEVELS = {"high": 0.5, "medium": 1.0, "low": 2.0}

ACCURACY = (
    "adadp/lot", "adadp/example", "adadp/sound", "dpsgd/paper", "dpsgd/sound", "agd", "dpopt/published", "dpopt/sound",
    "sgd",
)  # fmt: skip
ABLATION = ("adadp/lot", "adadp/example", "adadp/sound", "adan/lot", "adan/example", "adan/sound", "adal",
            "dpsgd/paper", "dpsgd/sound")  # fmt: skip
#: Steps of a quick run: two marks of the full one's curve.
QUICK = {MNIST: 82, CIFAR10: 12}


def mnist_steps() -> int:
    """As many as Theorem 1 allows at (0.5, 1e-5) with the paper's noise."""
    return steps_for(0.5, DELTA, rate=0.01, noise_multiplier=8.0)


def _level(dataset: str, level: str) -> tuple[dict[str, Any], int, float]:
    """The settings of a level, its number of steps and the epsilon of its delta_*."""
    if dataset == MNIST:
        sigma, pca, epsilon = MNIST_LEVELS[level]
        return {"noise_multiplier": sigma, "pca_noise_multiplier": pca}, mnist_steps(), epsilon
    epsilon = CIFAR10_LEVELS[level]
    sigma = PAPER[CIFAR10]["noise_multiplier"]
    return {}, steps_for(epsilon, DELTA, rate=2000 / EXAMPLES[CIFAR10], noise_multiplier=sigma), epsilon


def curves(dataset: str, level: str, contenders: Sequence[str], options: Options) -> list[Job]:
    """Every contender's runs at one level, and what the level costs along the way."""
    settings, steps, epsilon = _level(dataset, level)
    stop: dict[str, Any] = {"stop": QUICK[dataset]} if options.quick else {}
    made = []
    for who in contenders:
        own: dict[str, Any] = {"set": {"lr": 0.1, "schedule": "exponential"}} if _decays(dataset, level, who) else {}
        own = {"epsilon": epsilon, **own} if who == "agd" else own
        # Without privacy nobody would stop for a level's budget.
        length = _level(dataset, "low")[1] if who == "sgd" else steps
        made += [run_job(who, dataset, seed, steps=length, **settings, **stop, **own) for seed in range(options.seeds)]
    every = marks({"steps": steps, **stop})
    paper = {**PAPER[dataset], **settings}
    made.append(
        account_job(
            rate=paper["lot"] / EXAMPLES[dataset], noise_multiplier=paper["noise_multiplier"], steps=every, delta=DELTA,
            epsilon=epsilon, gaussian=paper.get("pca_noise_multiplier"),
        )
    )  # fmt: skip
    return made


def _decays(dataset: str, level: str, who: str) -> bool:
    """On CIFAR-10, DPSGD and DPOPT have a decaying rate in the first experiment and a constant one in the others."""
    return dataset == CIFAR10 and level == "high" and who in ("dpsgd/paper", "dpopt/published")


def _accuracy_item(dataset: str, level: str, number: str) -> Item:
    def jobs(options: Options) -> list[Job]:
        return curves(dataset, level, ACCURACY, options)

    def report(records: Sequence[Record]) -> Report:
        from adadp_lab.paper.fig2_fig3_accuracy_report import accuracy_report  # drawing is not needed for running

        return accuracy_report(dataset, level, records)

    title = f"Accuracy and delta_* on {NAME[dataset]}, {level} privacy level"
    return Item(f"fig-{dataset}-{level}", title, number, jobs, report, **_NEEDS[dataset])


def _ablation_item(dataset: str, number: str) -> Item:
    def jobs(options: Options) -> list[Job]:
        return curves(dataset, "high", ABLATION, options)

    def report(records: Sequence[Record]) -> Report:
        from adadp_lab.paper.fig2_fig3_accuracy_report import ablation_report

        return ablation_report(dataset, records)

    title = f"Adaptive rate alone (AdaL) and adaptive noise alone (AdaN) on {NAME[dataset]}"
    return Item(f"fig-ablation-{dataset}", title, number, jobs, report, **_NEEDS[dataset])


_NEEDS: dict[str, dict[str, Any]] = {
    MNIST: {"datasets": ("mnist",)},
    CIFAR10: {"datasets": ("cifar10", "cifar100"), "pretrained": ("paper",)},
}

for _level_name in MNIST_LEVELS:
    register(_accuracy_item(MNIST, _level_name, "Fig. 2"))
register(_ablation_item(MNIST, "Fig. 4a"))
for _level_name in CIFAR10_LEVELS:
    register(_accuracy_item(CIFAR10, _level_name, "Fig. 3"))
register(_ablation_item(CIFAR10, "Fig. 4b"))
