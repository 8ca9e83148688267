"""The benchmark of ways to take norms, on sizes that take no time."""

import torch
from adadp_lab.bench.ways import measured


def test_every_way_is_timed_and_the_chosen_one_is_among_them() -> None:
    found = measured(3, 4, 5, 6, torch.device("cpu"))
    assert found["ms"].keys() == {"gram", "again", "stored"}
    assert found["chosen"] in found["ms"]
    assert found["lost"] >= 0
