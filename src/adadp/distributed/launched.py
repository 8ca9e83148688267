"""The processes that one command was started as: `torchrun --nproc-per-node 2 -m adadp train` starts two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from adadp.distributed.group import Group, group_of_all
from adadp.errors import ConfigurationError

_PLACE = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def launched_as() -> int:
    """Of how many processes this one says that it is, by the environment."""
    return int(os.environ.get("WORLD_SIZE") or "1")


@contextmanager
def launched() -> Iterator[Group]:
    """All processes of this command: this one alone, or those that torchrun started.

    Within the block torch.distributed is initialised, with NCCL for tensors on GPUs and gloo for others. A process
    group that is there already is taken, and left there.

    Raises:
        ConfigurationError: the environment says that there are several processes, and not how they find one another.

    """
    if dist.is_available() and dist.is_initialized():
        yield group_of_all()
        return
    size = launched_as()
    if size == 1:
        yield Group()
        return
    missing = [name for name in _PLACE if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"WORLD_SIZE says that this is one of {size} processes, and {', '.join(missing)} not where the others are: "
            "each would spend by itself. Start all of them with torchrun, or one without WORLD_SIZE"
        )
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield group_of_all()
    finally:
        dist.destroy_process_group()


def refuse_device(device: torch.device) -> None:
    """Raise where not every process that torchrun started on this machine can have a device of its own."""
    if device.type != "cuda":
        return
    if device.index is not None:
        raise ConfigurationError(
            f"device {device} would be that of all {launched_as()} processes: leave device out, and each takes the GPU "
            "of its number on its machine"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > torch.cuda.device_count():
        raise ConfigurationError(
            f"torchrun started {here} processes on this machine, which has {torch.cuda.device_count()} of the GPUs "
            "that they need: start fewer with --nproc-per-node, or train with device cpu"
        )


def take_device(device: torch.device) -> None:
    """Make the GPU of this process's number on its machine the current one; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def refuse_restart() -> None:
    """Raise where torchrun started the command again after a failure: it would pay for a second run."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        raise ConfigurationError(
            "torchrun started this command again after a failure, and that would be another run, which is paid for "
            "again. Go on with the first one: adadp train --resume FOLDER (torchrun may restart that)"
        )
