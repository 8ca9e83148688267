"""adadp.mechanism.sums and noise: what has no noise cannot be handed on as if it had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adadp
from adadp.mechanism.noise import add_noise
from adadp.mechanism.sums import BoundedSums, NoisedSums
from adadp.randomness import Randomness

WRONG = """
from adadp.clipping import Clipping
from adadp.mechanism.noise import add_noise
from adadp.mechanism.sums import BoundedSums, NoisedSums, ReleasedGradient
from adadp.randomness import Randomness

def wrong(clipping: Clipping, sums: BoundedSums, noisy: NoisedSums) -> ReleasedGradient:
    clipping.release(sums, {})
    add_noise(noisy, {}, Randomness())
    add_noise({}, {}, Randomness())
    return noisy
"""


@pytest.mark.slow
def test_mypy_refuses_the_wrong_side_of_the_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    source = str(Path(adadp.__file__).parents[1])
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": source}, capture_output=True, text=True)
    for line, given, expected in (
        (8, "BoundedSums", "NoisedSums"),
        (9, "NoisedSums", "BoundedSums"),
        (10, "dict", "BoundedSums"),
        (11, "NoisedSums", "ReleasedGradient"),
    ):
        found = next(text for text in done.stdout.splitlines() if text.startswith(f"wrong.py:{line}:"))
        assert f'"{given}' in found, found
        assert f'expected "{expected}"' in found, found


@pytest.mark.parametrize("kind", ["numbers", "one number", "tensors", "both"])
def test_every_coordinate_gets_noise_of_its_deviation(kind: str) -> None:
    count = 4000
    sums = BoundedSums(a=torch.full((count,), 3.0), b=torch.zeros(2, count, dtype=torch.float64), c=torch.zeros(count))
    before = {name: value.clone() for name, value in sums.items()}
    stddev = {"a": 2.0, "b": 2.0, "c": 2.0 if kind == "one number" else 5.0}
    if kind in ("tensors", "both"):
        stddev["c"] = torch.full((count,), 5.0)
    if kind == "tensors":
        stddev |= {"a": torch.full((count,), 2.0), "b": torch.full((2, count), 2.0, dtype=torch.float64)}
    noisy = add_noise(sums, stddev, Randomness(1))
    assert type(noisy) is NoisedSums
    assert list(noisy) == list(sums)
    for name, value in noisy.items():
        assert torch.equal(sums[name], before[name])  # the sums themselves are not touched
        assert value.dtype == sums[name].dtype
        noise = (value - sums[name]).double() / stddev[name]
        assert noise.std().item() == pytest.approx(1.0, abs=0.06)
        assert noise.mean().item() == pytest.approx(0.0, abs=0.1)
        assert (noise != 0).all()
