"""Everything that claims to be sound, as targets: algorithms, clippings with every source of a shape, ways to run.

python tests/audit/sound.py                # writes results/audit/sound.json and sound.md: the whole grid
python tests/audit/sound.py false-alarms   # writes results/audit/false_alarms.json: 200 audits, and their words
python tests/audit/sound.py digits         # writes results/audit/digits.json: among real examples
python tests/audit/sound.py tightness      # writes results/audit/tightness.json: 2,000 trials, no subsampling
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from adadp import Adaptive, Automatic, Ellipsoid, Flat, Local, Paid, PerLayer, Probe, Public, Released, audit, data
from adadp.algorithms import Task
from adadp.algorithms.defaults import default_lot
from adadp.audit import (
    Audit,
    Examples,
    GradientThreat,
    PreprocessingThreat,
    Setting,
    Target,
    clopper_pearson_upper,
)
from adadp.audit.auditing import promise_of
from adadp.audit.many_runs import least_trials
from adadp.clipping import Clipping
from adadp.shapes import Source

RESULTS = Path("results/audit")
EPSILONS = (0.5, 2.0, 8.0)
STEPS = 2


def _generated(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 16, generator=generator)


SOURCES: dict[str, Callable[[], Source]] = {
    "probe": lambda: Probe(_generated, count=16, every=2),
    "public": lambda: Public([_generated(16, torch.Generator().manual_seed(7))], count=16, every=2),
    "released": lambda: Released(decay=0.5),
    "paid": lambda: Paid(share=0.3, every=2, decay=0.5),
}

_CLIPPINGS: dict[str, Callable[[Task], Clipping]] = {
    "flat": lambda task: Flat(1.0),
    "per layer": lambda task: PerLayer(1.0),
    "automatic": lambda task: Automatic(1.0),
    "adaptive": lambda task: Adaptive(1.0),
    **{
        f"ellipsoid, {name}": lambda task, make=make: Ellipsoid(1.0, source=make())  # type: ignore[misc]
        for name, make in SOURCES.items()
    },
    **{
        f"local, {name}": lambda task, make=make: Local(1.0, threshold=0.0, source=make())  # type: ignore[misc]
        for name, make in SOURCES.items()
    },
}
_FEWER_PROBES = {"probes": 32}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "adadp": _FEWER_PROBES, "adan": _FEWER_PROBES, "dpopt": _FEWER_PROBES, "dpsgd": {}, "adal": {}, "agd": {},
}  # fmt: skip

#: How an engine is used: its options, and how many of the 16 examples a lot has on average.
ENGINES: dict[str, tuple[dict[str, Any], int]] = {
    "whole lots": ({}, 16),
    "microbatches": ({"max_physical_batch_size": 5}, 16),
    "torch.func": ({"through_func": [""]}, 16),
    "a sum as loss": ({"loss_reduction": "sum"}, 16),
    "sampled lots": ({}, 8),
    "lots of a fixed size": ({"sampling": "fixed"}, 8),
}

TARGETS = (*_CLIPPINGS, *_ALGORITHMS)


def runs_on(target: str, engine: str) -> bool:
    """AGD looks at a lot several times and is accounted for Poisson lots."""
    return target != "agd" or engine not in ("microbatches", "lots of a fixed size")


def make(target: str, engine: str, epsilon: float, steps: int = STEPS) -> Target:
    """A target whose noise is calibrated to `epsilon`."""
    options, lot = ENGINES[engine]
    setting = Setting(lot=lot, steps=steps)
    if target in _CLIPPINGS:
        return audit.for_clipping(_CLIPPINGS[target], epsilon=epsilon, setting=setting, **options)
    return audit.for_algorithm(target, settings=_ALGORITHMS[target], epsilon=epsilon, setting=setting, **options)


#: Those that differ where nothing is wrong: alone and opposed, one coordinate and all, steering a shape.
CANARIES = ("flipping", "opposed", "everywhere", "steering")


def attack(target: Target, *, trials: int, confidence: float, seed: int) -> Audit:
    """With more trials where fewer could not contradict anything: a Renyi bound at epsilon 8 has a generous curve."""
    threat = GradientThreat(target, names=CANARIES)
    trials = max(trials, least_trials(len(CANARIES), promise_of(target)[0].claim, confidence))
    return audit.audit(target, threat=threat, trials=trials, confidence=confidence, seed=seed)


# ---- committed runs --------------------------------------------------------------------------------------------------


def survey(trials: int = 136) -> None:
    """Every target on every engine at every epsilon; as one family: confidence 1 - 0.05 / number of audits."""
    cells = [cell for cell in itertools.product(TARGETS, ENGINES, EPSILONS) if runs_on(cell[0], cell[1])]
    estimators = [(name, isometric) for name in audit.ESTIMATORS for isometric in (False, True)][:3]
    number = len(cells) + len(estimators) * len(EPSILONS)
    confidence = 1 - 0.05 / number
    rows = []
    for seed, (target, engine, epsilon) in enumerate(cells):
        rows.append(_row(target, engine, epsilon, attack(
            make(target, engine, epsilon), trials=trials, confidence=confidence, seed=seed)))  # fmt: skip
    for (name, isometric), epsilon in itertools.product(estimators, EPSILONS):
        threat = PreprocessingThreat.for_epsilon(name, epsilon, 1e-5, isometric=isometric)
        found = audit.audit_preprocessing(threat, 1e-5, trials=2000, confidence=confidence, seed=1)
        rows.append(_row(name, "isometric" if isometric else "as it is", epsilon, found))
    violated, suspicious = _having(rows, "violated"), _having(rows, "suspicious")
    values = {"command": "python tests/audit/sound.py", "audits": number, "confidence": confidence, "trials": trials,
              "steps": STEPS, "violated": violated, "suspicious": suspicious, "rows": rows}  # fmt: skip
    _write("sound.json", values)
    text = [
        f"{number} audits of what claims to be sound, {trials} trials or more each (preprocessing: 2,000), all of them "
        f"at once at confidence 95%: **{violated} violated**, {suspicious} suspicious. Cells are lower bounds on "
        "epsilon at delta = 1e-5.",
        "",
        "| target | run on | " + " | ".join(f"epsilon = {epsilon:g}" for epsilon in EPSILONS) + " |",
        "| --- | --- |" + " --- |" * len(EPSILONS),
    ]
    for (target, engine), group in itertools.groupby(rows, lambda row: (row["target"], row["engine"])):
        cells_of = " | ".join(
            f"{row['epsilon_lower']:.2f}" + ("" if row["verdict"] == "consistent" else f" **{row['verdict']}**")
            for row in group
        )
        text.append(f"| {target} | {engine} | {cells_of} |")
    (RESULTS / "sound.md").write_text("\n".join(text) + "\n")


def _row(target: str, engine: str, epsilon: float, found: Audit) -> dict[str, Any]:
    row = {"target": target, "engine": engine, "epsilon": epsilon, "guaranteed": found.promise.guaranteed,
           "epsilon_lower": found.epsilon_lower, "verdict": found.verdict, "trials": found.trials}  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row


def _having(rows: list[dict[str, Any]], verdict: str) -> int:
    return sum(row["verdict"] == verdict for row in rows)


def false_alarms(audits: int = 200, trials: int = 136) -> None:
    """How often a sound target is called violated, at most 0.1% is promised, or suspicious at confidence 95%: 5%."""
    cells = [cell for cell in itertools.product(EPSILONS, ENGINES, TARGETS) if runs_on(cell[2], cell[1])]
    rows = []
    for number in range(audits):
        epsilon, engine, target = cells[number * 37 % len(cells)]
        found = attack(make(target, engine, epsilon), trials=trials, confidence=0.95, seed=10_000 + number)
        rows.append(_row(target, engine, epsilon, found))
    violated, suspicious = _having(rows, "violated"), _having(rows, "suspicious")
    _write("false_alarms.json", {
        "command": "python tests/audit/sound.py false-alarms", "audits": audits, "trials": trials, "confidence": 0.95,
        "violated": violated, "suspicious": suspicious, "rate": (violated + suspicious) / audits, "rows": rows,
    })  # fmt: skip


def digits(trials: int = 5000, lots: int = 8) -> None:
    """How often the likelihood ratio errs among real examples, beside what it must: Poisson lots of plain Gaussians.

    The first set of one audit in twenty may contradict a sound target's guarantee. This tells such an accident from
    a leak.
    """
    found = data.load("digits")
    others = Examples(found.inputs(), found.labels, len(found.classes))
    count = len(others.inputs) + 1
    setting = Setting(examples=count, lot=default_lot(count), steps=lots)
    target = audit.for_algorithm("dpsgd", epsilon=2.0, setting=setting)
    threat, coins = GradientThreat.among(target, others), random.Random(1)
    wrong = 0
    for seed in range(trials):
        inside = coins.random() < 0.5
        wrong += (threat.trial("flipping", inside, seed).scores["likelihood"] > 0) != inside
    rate, sigma, generator = setting.rate, target.setting.noise_multiplier, np.random.default_rng(1)
    members = generator.random(400_000) < 0.5
    hits = members[:, None] & (generator.random((len(members), lots)) < rate)
    projections = generator.normal(size=hits.shape) + hits / sigma
    ratio = np.log1p(rate * np.expm1(projections / sigma - 1 / (2 * sigma**2))).sum(1)
    theory = float(np.mean((ratio > 0) != members))
    least = promise_of(target)[0].claim.least_error()
    _write("digits.json", {
        "command": "python tests/audit/sound.py digits", "trials": trials, "wrong": wrong, "error": wrong / trials,
        "error_in_theory": theory, "least_error_by_guarantee": least,
        "p_value": float(stats.binomtest(wrong, trials, theory).pvalue),
        "chance_of_a_second_set_in_200_trials": float(stats.binom.cdf(_most_errors(140, least), 140, theory)),
    })  # fmt: skip


def _most_errors(counted: int, least: float) -> int:
    """With how many errors in `counted` trials an audit still makes a second set; -1 if with none."""
    return sum(clopper_pearson_upper(errors, counted, 0.95) < least for errors in range(counted)) - 1


def tightness(trials: int = 2000, repeats: int = 5) -> None:
    """The mean lower bound on plain Gaussian steps, as a part of epsilon."""
    rows = []
    for epsilon in EPSILONS:
        target = make("flat", "whole lots", epsilon, steps=2)
        found = [attack(target, trials=trials, confidence=0.95, seed=seed) for seed in range(repeats)]
        bounds = [each.epsilon_lower for each in found]
        mean = sum(bounds) / repeats
        rows.append({"epsilon": epsilon, "mean_epsilon_lower": mean, "part": mean / epsilon, "bounds": bounds})
        print(rows[-1], file=sys.stderr, flush=True)
    _write("tightness.json", {"command": "python tests/audit/sound.py tightness", "trials": trials, "confidence": 0.95,
                              "repeats": repeats, "rows": rows})  # fmt: skip


def _write(name: str, values: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / name).write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    commands = {"false-alarms": false_alarms, "digits": digits, "tightness": tightness}
    commands.get(sys.argv[1] if len(sys.argv) > 1 else "", survey)()
