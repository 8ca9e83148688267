"""What every process must have been given alike: the dataset, the settings, the model and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

import adadp
from adadp.distributed.group import Group, number_of
from adadp.distributed.wrapped import checksum
from adadp.errors import ConfigurationError

ASSUMPTION = (
    "all {} processes that trained together, their machines and the network between them are the curator's: sums "
    "without noise, the key of lots and noise, and counts of batches travel there in the clear; every process was "
    "given the same dataset in the same order"
)


def refuse_differences(
    group: Group, module: nn.Module, dataset: Callable[[], object], settings: Mapping[str, object]
) -> None:
    """Raise in all processes where they were not given the same.

    Args:
        group: the processes.
        module: the model, whose weights are compared bit for bit.
        dataset: returns what the dataset looks like (`checks.same_dataset`).
        settings: everything else, by the name under which a difference is reported, or a function that returns it. Only
            hashes are compared.

    Raises:
        ConfigurationError: something differs; the message names it and the process.

    """
    parameters = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()}
    whole = {
        "the versions of adadp and torch": (adadp.__version__, torch.__version__),
        "the dataset (its kind, length, items or their order)": dataset(),
        "the model's parameters": parameters,
        "the kind of device": sorted({p.device.type for p in module.parameters()}),
        **settings,
    }
    mine = {name: number_of(value() if callable(value) else value) for name, value in whole.items()}
    mine["the weights"] = checksum([*module.parameters(), *module.buffers()])
    found = group.objects(mine)
    for rank, theirs in enumerate(found):
        different = [name for name in found[0] if theirs.get(name) != found[0][name]]
        if different:
            raise ConfigurationError(
                f"process {rank} and process 0 were not given the same: {', '.join(different)}. Give each process the "
                "same whole dataset (each works on its own part of every lot), the same settings and the same weights: "
                "DistributedDataParallel(model) copies those of process 0 to all, or seed all of them alike."
            )
