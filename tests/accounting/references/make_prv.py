"""Writes prv.json: epsilons of Opacus' PRV accountant (bounds from both sides) on a grid. Needs `.[bench]`.

python tests/accounting/references/make_prv.py
"""

import json
from pathlib import Path

import opacus
from opacus.accountants import PRVAccountant

GRID = [
    (0.9, 0.01, 1800, 1e-5),
    (8.0, 0.01, 1520, 1e-5),
    (4.0, 0.01, 5000, 1e-5),
    (6.0, 0.04, 400, 1e-5),
    (0.6, 0.001, 1000, 1e-6),
    (0.7, 0.02, 300, 1e-7),
    (1.0, 0.001, 10000, 1e-6),
    (1.0, 0.1, 100, 1e-5),
    (1.5, 0.3, 50, 1e-5),
    (2.0, 0.05, 2000, 1e-8),
    (5.0, 0.5, 200, 1e-4),
    (20.0, 0.2, 1000, 1e-5),
]


def main() -> None:
    rows = []
    for sigma, rate, steps, delta in GRID:
        accountant = PRVAccountant()
        accountant.history = [(sigma, rate, steps)]
        composed = accountant._get_dprv(eps_error=0.01, delta_error=delta / 1000)
        low, estimate, high = composed.compute_epsilon(delta, delta / 1000, 0.01)
        rows.append(
            {
                "noise_multiplier": sigma,
                "rate": rate,
                "steps": steps,
                "delta": delta,
                "epsilon_low": float(low),
                "epsilon": float(estimate),
                "epsilon_high": float(high),
            }
        )
        print(rows[-1], flush=True)
    content = {"made_by": f"opacus {opacus.__version__}, make_prv.py", "rows": rows}
    Path(__file__).with_name("prv.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
