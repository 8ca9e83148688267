"""What a step may cost, over plain SGD of the same model in the same process. All goals stand here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adadp_lab.bench.methods import OURS, SHAPES
from adadp_lab.bench.real_models import REAL

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


@dataclass(frozen=True)
class Goal:
    """The most that flat clipping's ordinary step, its replayed step and its peak memory may be over SGD's."""

    ordinary: float
    replayed: float
    memory: float


#: For models that people train, on a GPU. Ordinary and replayed steps have goals of their own: most people record none.
REAL_GOALS: dict[str, Goal] = {
    "gpt2": Goal(1.4, 1.3, 1.3),
    "bert": Goal(1.5, 1.3, 1.3),
    "llama": Goal(1.4, 1.25, 1.2),
    "llama-lora": Goal(1.3, 1.2, 1.1),
    "vit": Goal(1.7, 1.5, 1.3),
    "convnext": Goal(2.0, 1.6, 1.5),
    "resnet50": Goal(2.0, 1.7, 1.4),
}
#: Methods that goals over SGD are made for.
_ORDINARY, _REPLAYED = "adadp", "adadp-graph"


def judge(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The goals of a row of ours, each with the most that is allowed and whether it is `met`.

    "time" and "memory" are ratios to SGD. "opacus" and "fastdp" are ratios of the peer's quickest mode in `rows` that
    trains the same parameters, to be ahead of.
    """
    if not row["method"].startswith("adadp") or row["ratio_to_sgd"] is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    time, memory = _over_sgd(row)
    if time is not None:
        found["time"] = {"most": time, "met": row["ratio_to_sgd"] <= time}
    if memory is not None and row["peak_ratio_to_sgd"] is not None:
        found["memory"] = {"most": memory, "met": row["peak_ratio_to_sgd"] <= memory}
    for peer in ("opacus", "fastdp"):
        ratios = [
            other["ratio_to_sgd"]
            for other in rows
            if other["method"].startswith(peer)
            and other["model"] == row["model"]
            and other["ratio_to_sgd"] is not None
            and other.get("trained") == row.get("trained")
        ]
        if ratios:
            found[peer] = {"most": min(ratios), "met": row["ratio_to_sgd"] < min(ratios)}
    return found


def judged_apart(row: Mapping[str, Any]) -> bool:
    """Whether ordinary steps must reach the goals too, and not only the nearer of ordinary and replayed ones."""
    return row["model"] in REAL


def _over_sgd(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The most that time and memory may be; None where there is no goal."""
    kind, model, clipping, method = row["device"], row["model"], row["clipping"], row["method"]
    if method not in (_ORDINARY, _REPLAYED):
        return None, None
    if model not in REAL:
        return TIME[kind].get(model, {}).get(clipping), MEMORY.get(kind, {}).get(clipping)
    if kind != "cuda" or clipping != "flat":
        return None, None
    goal = REAL_GOALS[model]
    return goal.ordinary if method == _ORDINARY else goal.replayed, goal.memory
