"""Figure 5: accuracy against one parameter at a time (learning rate, beta, noise, lot) at (0.5, 1e-5) by Theorem 1.

The published readings have the paper's settings. The sound form has no beta and a learning rate of another kind, so
there its own numbers are moved by the same factors: the bound C in place of beta, and multiples of its default rate.
It is given the noise and the number of steps of the published readings, and its true cost is printed beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adadp.algorithms.defaults import DEFAULTS, learning_rate
from adadp_lab.paper.accounts import account_job, steps_for
from adadp_lab.paper.contenders import EXAMPLES, MNIST, PAPER, run_job
from adadp_lab.paper.fig2_fig3_accuracy import mnist_steps
from adadp_lab.paper.item import Item, Job, Options, Record, Report, register

EPSILON, DELTA = 0.5, 1e-5
READINGS = ("adadp/lot", "adadp/example", "adadp/sound")
VALUES: dict[str, tuple[float, ...]] = {
    "lr": (0.0008, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02),
    "beta": (0.6, 0.9, 1.2, 1.5, 2.0, 3.0),
    "noise": (2.0, 4.0, 6.0, 7.0, 8.0, 10.0, 12.0),
    "lot": (300, 400, 600, 800, 1000, 1500),
}
#: Quick runs stop here; at the paper's own value that is a mark of the full run.
QUICK_STEPS = 41
_WEIGHTS = 71_010


def _changes(study: str, who: str, value: float) -> dict[str, Any]:
    """What a value of the parameter changes in a run."""
    lot, sigma = PAPER[MNIST]["lot"], PAPER[MNIST]["noise_multiplier"]
    if study in ("noise", "lot"):
        lot, sigma = (int(value), sigma) if study == "lot" else (lot, value)
        steps = steps_for(EPSILON, DELTA, rate=lot / EXAMPLES[MNIST], noise_multiplier=sigma)
        return {"lot": lot, "noise_multiplier": sigma, "steps": steps}
    steps = mnist_steps()
    if not who.endswith("/sound"):
        return {"steps": steps, "set": {study: value}}
    bound = DEFAULTS["adadp", "sound"]["max_grad_norm"]
    if study == "beta":
        return {"steps": steps, "set": {"max_grad_norm": round(bound * value / 1.2, 6)}}
    rate = learning_rate(bound, lot, steps, sigma, _WEIGHTS)
    return {"steps": steps, "set": {"lr": float(f"{rate * value / 0.002:.6g}")}}


def _is_default(study: str, value: float) -> bool:
    return value == {"lr": 0.002, "beta": 1.2, "noise": 8.0, "lot": 600}[study]


def jobs_of(study: str, options: Options) -> list[Job]:
    """Every value in every reading; DPSGD too where the paper says where its own optimum is."""
    made = []
    values = [v for v in VALUES[study] if _is_default(study, v)] if options.quick else VALUES[study]
    for value in values:
        for who in (*READINGS, "dpsgd/paper") if study == "noise" else READINGS:
            changes = {} if _is_default(study, value) else _changes(study, who, value)
            changes.setdefault("steps", mnist_steps())
            stop: dict[str, Any] = {"stop": QUICK_STEPS} if options.quick else {}
            made += [run_job(who, MNIST, seed, **changes, **stop) for seed in range(options.seeds)]
        setting = {**PAPER[MNIST], **_changes(study, "adadp/lot", value)}
        made.append(
            account_job(
                rate=setting["lot"] / EXAMPLES[MNIST], noise_multiplier=setting["noise_multiplier"],
                steps=[setting["steps"]], delta=DELTA, epsilon=EPSILON, gaussian=PAPER[MNIST]["pca_noise_multiplier"],
            )
        )  # fmt: skip
    return made


def _item(study: str, title: str, number: str) -> Item:
    def jobs(options: Options) -> list[Job]:
        return jobs_of(study, options)

    def report(records: Sequence[Record]) -> Report:
        from adadp_lab.paper.fig5_parameters_report import study_report

        return study_report(study, records)

    return Item(f"fig-{study}", title, number, jobs, report, datasets=("mnist",))


register(_item("lr", "Accuracy against the learning rate", "Fig. 5a"))
register(_item("beta", "Accuracy against the local clipping factor beta", "Fig. 5b"))
register(_item("noise", "Accuracy against the noise level", "Fig. 5c"))
register(_item("lot", "Accuracy against the lot size", "Fig. 5d"))
