"""Who is compared, with which settings: the paper's for what it published, ours for what is sound.

A contender is `algorithm/variant`. `dpsgd/paper` is DPSGD with the paper's numbers, `dpsgd/sound` with ours; both are
private. Of AdaDP, AdaN and DPOPT the variants are readings, of which only `sound` has a guarantee. AdaL and AGD have
one form each, and a guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adadp_lab.paper.item import Job
from adadp_lab.paper.learning import train

MNIST, CIFAR10 = "mnist", "cifar10"
NAME = {MNIST: "MNIST", CIFAR10: "CIFAR-10"}
EXAMPLES = {MNIST: 60_000, CIFAR10: 50_000}

#: The paper's evaluation, all of it. What it does not say is in `docs/findings.md`.
PAPER: Mapping[str, dict[str, Any]] = {
    MNIST: {"task": "mnist-pca", "lot": 600, "noise_multiplier": 8.0, "pca_noise_multiplier": 16.0},
    CIFAR10: {"task": "cifar10-paper", "lot": 2000, "noise_multiplier": 6.0},
}
#: CIFAR-10's bounds: C = 3 for the fully connected layers, 6 for the softmax layer.
_LAYERS = {"4.*": 6.0, "*": 3.0}

#: By data set, what a contender adds to the settings of a run.
_MNIST: dict[str, dict[str, Any]] = {
    "adadp/lot": {},
    "adadp/example": {},
    "adadp/sound": {},
    "dpsgd/paper": {"set": {"lr": 0.1, "schedule": "linear", "momentum": 0.0, "max_grad_norm": 4.0}},
    "dpsgd/sound": {},
    "agd": {},
    "dpopt/published": {},
    "dpopt/sound": {},
    "adal": {},
    "adan/lot": {},
    "adan/example": {},
    "adan/sound": {},
    "sgd": {},
}
_BOX = {"max_grad_norm": 3.0}
_CIFAR10: dict[str, dict[str, Any]] = {
    **_MNIST,
    "adadp/lot": {"set": {"lr": 0.001, **_BOX}},
    "adadp/example": {"set": {"lr": 0.001, **_BOX}},
    "dpsgd/paper": {
        "set": {"lr": 0.052, "schedule": "constant", "momentum": 0.0, "max_grad_norm": 3.0}, "clipping": _LAYERS,
    },
    "dpopt/published": {"set": {"lr": 0.052, "schedule": "constant", **_BOX}},
    "adal": {"set": {"lr": 0.001, **_BOX}},
    "adan/lot": {"set": {"lr": 0.05, **_BOX}},
    "adan/example": {"set": {"lr": 0.05, **_BOX}},
    "sgd": {"set": {"lr": 0.01}},  # 0.1 diverges on these features
}  # fmt: skip
_OF = {MNIST: _MNIST, CIFAR10: _CIFAR10}

#: Milliseconds of a step on an H200 that is shared by a dozen runs, roughly: the longest run is started first.
_MS = {"adadp/example": 12, "dpopt/published": 20, "agd": 20, "adadp/sound": 10, "adan/sound": 10, "adan/example": 12}


def run_job(who: str, dataset: str, seed: int, *, steps: int, delta: float = 1e-5, **more: Any) -> Job:
    """A training run of a contender; `more` replaces or adds to its settings ("set" is put together)."""
    name, _, variant = who.partition("/")
    own = _OF[dataset][who]
    reading = variant if variant in ("lot", "example", "published") or (variant and name != "dpsgd") else None
    settings: dict[str, Any] = {
        **PAPER[dataset], "who": who, "algorithm": name, "reading": reading, "steps": steps, "delta": delta,
        **own, **more,
    }  # fmt: skip
    settings["set"] = {**own.get("set", {}), **more.get("set", {})}
    if name == "sgd":
        del settings["noise_multiplier"]
    ran = settings.get("stop", steps)
    cost = 1e-3 * ran * _MS.get(who, 8) * (3 if dataset == CIFAR10 and "sound" not in who else 1)
    return Job(train, settings, seed, cost=cost)
