"""Figures 4c and 4d: distributions of gradients, estimate and noise at steps 100 and 1,000 (MNIST, high level)."""

from __future__ import annotations

from collections.abc import Sequence

from adadp_lab.paper.contenders import MNIST, run_job
from adadp_lab.paper.fig2_fig3_accuracy import mnist_steps
from adadp_lab.paper.item import Item, Job, Options, Record, Report, register

READINGS = ("adadp/lot", "adadp/example", "adadp/sound")


def jobs(options: Options) -> list[Job]:
    """One run in each reading, looked at on the way; both figures are drawn from the same runs."""
    at, stop = ((20, 40), 41) if options.quick else ((100, 1000), 1000)
    return [
        run_job(who, MNIST, seed, steps=mnist_steps(), stop=stop, snapshots=list(at))
        for who in READINGS
        for seed in range(options.seeds)
    ]


def _estimates(records: Sequence[Record]) -> Report:
    from adadp_lab.paper.fig4_distributions_report import estimate_report

    return estimate_report(records)


def _sigmas(records: Sequence[Record]) -> Report:
    from adadp_lab.paper.fig4_distributions_report import sigma_report

    return sigma_report(records)


register(Item("fig-estimate", "|g_t| and its estimate sqrt(E')", "Fig. 4c", jobs, _estimates, datasets=("mnist",)))
register(Item("fig-sigma", "The distribution of sigma_i", "Fig. 4d", jobs, _sigmas, datasets=("mnist",)))
