"""How much of MNIST's energy DP-PCA's 60 directions hold, by noise multiplier: as published and isometric.

python -m adadp_lab.experiments.dp_pca --data DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from adadp.data import load
from adadp.preprocessing import DPPCA


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    rows = load("mnist", "train", data_dir=parser.parse_args().data).inputs().flatten(1).numpy().astype(np.float64)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def energy(directions: np.ndarray) -> float:
        return 100 * float(np.square(unit @ directions.T).sum() / len(unit))

    exact = np.linalg.eigh(unit.T @ unit)[1][:, -60:].T
    print(f"without noise {energy(exact):.1f}%\n\n| noise multiplier | as published | isometric |\n| --- | --- | --- |")
    for noise in (16.0, 7.0, 4.0):
        kept = [
            energy(DPPCA(60, noise, isometric=isometric, random_state=0).fit(rows).components_)
            for isometric in (False, True)
        ]
        print(f"| {noise:g} | {kept[0]:.1f}% | {kept[1]:.1f}% |")


if __name__ == "__main__":
    main()
