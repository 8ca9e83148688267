"""A report as plain values, for programs: the keys stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from adadp import __version__
from adadp.report import wording
from adadp.report.facts import Facts
from adadp.report.figures import NOISE_BY_COORDINATE
from adadp.report.rerun import rerun
from adadp.report.signal import ratios


def to_values(facts: Sequence[Facts], *, public: bool) -> dict[str, Any]:
    """One table with a list of runs."""
    return {"adadp": __version__, "public": public, "runs": [_json(_run(each, public)) for each in facts]}


def _json(value: Any) -> Any:
    """The value with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(facts: Facts, public: bool) -> dict[str, Any]:
    run, found, left = facts.run, facts.run.current, facts.attacker
    return {
        "run": run.label,
        "dataset": run.dataset,
        "finished": run.finished,
        "remarks": list(run.remarks),
        "epsilon": None if found is None else found.epsilon,
        "delta": None if found is None else found.delta,
        "guarantee": None if found is None else {**found.to_dict(), "assumptions": wording.conditions(facts)},
        "sentence": None if found is None else found.sentence(),
        "run_epsilon": None if run.own is None else run.own.epsilon,
        "dataset_runs": run.counted,
        "later_runs": None if run.since is None else run.since.runs,
        "attacker": None
        if left is None or found is None
        else {
            "right_at_most": left.right,
            "found_at_most": [{"wrongly_accused": rate, "found": share} for rate, share in left.found.items()],
            "from_releases": left.from_releases,
            "in_words": wording.attacks(left, found),
        },
        "figures": None
        if run.figures is None
        else {
            "values": run.figures.values,
            "baseline": run.figures.baseline,
            "learnt": run.figures.learnt,
            "may_be_published": run.figures.public,
            "why": run.figures.why,
            "curve": list(run.figures.curve),
        },
        "epsilon_by_step": [list(point) for point in facts.spending.own],
        "dataset_epsilon_by_step": [list(point) for point in facts.spending.together],
        "noise_over_signal": {
            layer: {"value": ratio.value, "low": ratio.low, "high": ratio.high}
            for layer, ratio in ratios(run.history).items()
        },
        NOISE_BY_COORDINATE: [
            {"step": line["step"], NOISE_BY_COORDINATE: line[NOISE_BY_COORDINATE]}
            for line in run.history
            if NOISE_BY_COORDINATE in line
        ],
        "settings": run.settings,
        "rerun": rerun(run.settings, public=public),
        "files": [{"file": name, "who": str(audience), "why": why} for name, audience, why in run.files],
    }
