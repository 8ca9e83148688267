"""Reference values from jax_privacy's auditing module (version 2.0.0, which needs no jax itself).

    python tests/audit/references/make_jax_privacy.py PATH/TO/jax_privacy/auditing.py

writes jax_privacy.json beside this file: inputs are counts, outputs what that module says of them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

CASES = [(0, 40, 0, 40), (3, 100, 60, 110), (250, 1000, 210, 1000), (1, 700, 680, 700), (40, 90, 12, 80)]
ONE_RUN = [(100, 60, 55), (1000, 666, 640), (1000, 100, 100), (200, 132, 118), (50, 30, 16)]


def compute(auditing: Any) -> dict[str, Any]:
    many, one = [], []
    for (fp, out, fn, inside), confidence, delta in itertools.product(CASES, (0.9, 0.95, 0.999), (1e-5, 1e-3)):
        auditor = auditing.CanaryScoreAuditor(
            np.array([1.0] * (inside - fn) + [0.0] * fn), np.array([1.0] * fp + [0.0] * (out - fp))
        )
        epsilon = auditor.epsilon_clopper_pearson(
            1 - confidence, delta, one_sided=False, threshold_strategy=auditing.Explicit(0.5)
        )
        many.append({"counts": [fp, out, fn, inside], "confidence": confidence, "delta": delta,
                     "epsilon": float(epsilon)})  # fmt: skip
    for (canaries, guesses, correct), delta in itertools.product(ONE_RUN, (0.0, 1e-6, 1e-4)):
        values = [auditing._one_run_p_value(canaries, guesses, correct, e, delta) for e in (0.0, 0.7, 2.5)]
        bound = auditing._epsilon_one_run(0.0, canaries, guesses, correct, 0.05, delta)
        one.append({"canaries": canaries, "guesses": guesses, "correct": correct, "delta": delta,
                    "p_values": [float(value) for value in values], "epsilon": float(bound)})  # fmt: skip
    return {"source": "jax_privacy 2.0.0, auditing.py", "many_runs": many, "one_run": one}


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("auditing", sys.argv[1])
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["auditing"] = loaded
    spec.loader.exec_module(loaded)
    Path(__file__).with_name("jax_privacy.json").write_text(json.dumps(compute(loaded), indent=1) + "\n")
