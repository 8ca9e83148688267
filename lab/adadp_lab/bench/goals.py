"""What a step may cost, over plain SGD of the same model in the same process. All goals stand here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adadp_lab.bench.methods import OURS, SHAPES

#: The most that a step's time may be over SGD's, refreshes of shapes counted in; by kind of device, model, clipping.
TIME: dict[str, dict[str, dict[str, float]]] = {
    "cuda": {
        "mlp": dict.fromkeys(OURS, 1.7),
        "alexnet": dict.fromkeys(OURS, 2.0),
        "wrn": dict.fromkeys(OURS, 2.0),
        "transformer": {
            "flat": 1.35, **dict.fromkeys(SHAPES, 1.35), "ellipsoid-kronecker": 1.8, "local": 1.4,
        },
    },
    "cpu": {
        "mlp": {"flat": 1.2, "local": 2.5},
        "alexnet": {"flat": 2.0, "local": 3.0},
        "transformer": {"flat": 1.4, "local": 2.0},
    },
}  # fmt: skip
#: The most that its peak memory may be over SGD's; by kind of device and clipping.
MEMORY: dict[str, dict[str, float]] = {"cuda": {"flat": 1.8, "local": 1.3}}


def judge(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The goals of a row of ours, each with the most that is allowed and whether it is `met`.

    "time" and "memory" are ratios to SGD. "opacus" is the ratio of its quickest mode in `rows`, to be ahead of.
    """
    if not row["method"].startswith("adadp") or row["ratio_to_sgd"] is None:
        return {}
    kind = row["device"]
    found: dict[str, dict[str, Any]] = {}
    most = TIME[kind].get(row["model"], {}).get(row["clipping"])
    if most is not None:
        found["time"] = {"most": most, "met": row["ratio_to_sgd"] <= most}
    most = MEMORY.get(kind, {}).get(row["clipping"])
    if most is not None and row["peak_ratio_to_sgd"] is not None:
        found["memory"] = {"most": most, "met": row["peak_ratio_to_sgd"] <= most}
    peers = [
        other["ratio_to_sgd"]
        for other in rows
        if other["method"].startswith("opacus") and other["model"] == row["model"] and other["ratio_to_sgd"] is not None
    ]
    if peers:
        found["opacus"] = {"most": min(peers), "met": row["ratio_to_sgd"] < min(peers)}
    return found
