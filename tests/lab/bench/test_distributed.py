"""What private steps send, beside plain DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adadp_lab.bench import distributed
from distributed.team import values


def counted(rank: int, size: int) -> dict[str, Any]:
    distributed.WARM_UP, distributed.ROUNDS = 12, 1  # the first lots compare weights and exchange records
    return distributed.measure(rank, size, "gloo", distributed.Size(width=64, each=8))


def test_a_private_step_sends_what_a_plain_one_does_and_a_row(tmp_path: Path) -> None:
    for found in values(2, tmp_path, counted):
        assert found["plain_bytes"] == 4 * found["parameters"]
        assert found["private_bytes"] == found["plain_bytes"] + 40
        assert found["private_collectives"] == 2  # the row, and the sums in one piece
        assert found["private_bytes"] < 1.05 * found["plain_bytes"]
