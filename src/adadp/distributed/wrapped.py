"""DistributedDataParallel around a private model: its own reduction of gradients is switched off."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adadp.errors import ConfigurationError, UnsupportedModuleError


def inside(module: nn.Module) -> nn.Module:
    """The module inside torch.compile and DistributedDataParallel, in whatever order; `module` itself without them."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that `module` is, compiled or not; None if it is none."""
    module = getattr(module, "_orig_mod", module)
    return module if isinstance(module, DistributedDataParallel) else None


def sharded_parts(module: nn.Module) -> list[Any]:
    """The parts of `module`, itself included, that fully_shard (FSDP2) was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has not imported it has sharded nothing
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def check_wrapper(module: nn.Module) -> None:
    """Raise where the way in which `module` is spread over processes is not covered.

    What fully_shard sharded has checks of its own (`adadp.distributed.sharded`).
    """
    sharded = bool(sharded_parts(inside(module)))
    if sharded and module is not inside(module):
        raise UnsupportedModuleError(
            f"{type(module).__name__} is around a model that fully_shard (FSDP2) sharded: pass the model itself, "
            "neither compiled nor in DistributedDataParallel"
        )
    for name, parameter in inside(module).named_parameters():
        if isinstance(parameter, DTensor) and not sharded:
            raise UnsupportedModuleError(
                f"{name} is a DTensor, spread over processes as {parameter.placements}: tensor parallelism splits one "
                "example's gradient over processes, so that no process knows its norm. Use DistributedDataParallel, "
                "which keeps the whole model in each process."
            )
    ddp = wrapper_of(module)
    if ddp is None:
        return
    if ddp.static_graph or ddp.mixed_precision is not None or getattr(ddp, "_comm_hooks", []):
        raise ConfigurationError(
            "DistributedDataParallel with static_graph, mixed_precision or a communication hook changes how gradients "
            "are computed or sent. Bounded sums are reduced by the engine, in float32: leave these options out, and "
            "use autocast for bfloat16."
        )


def switch_off(module: nn.Module) -> None:
    """Have DistributedDataParallel reduce no gradients and send no buffers: the engine reduces bounded sums itself."""
    _switch(module, False)


def switch_on(module: nn.Module) -> None:
    """Have it reduce gradients again: the module inside is an ordinary one."""
    _switch(module, True)


def switch_off_caller(module: nn.Module, processes: int) -> None:
    """Switch off the DistributedDataParallel whose forward calls `module`, if it was put around a private one.

    Args:
        module: the private one.
        processes: how many train it, as its engine knows.

    Raises:
        ConfigurationError: there is more in it than `module`, which nobody would reduce the gradients of; or it is for
            other processes than those whose sums the engine adds up.

    """
    caller = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if caller is None or not caller.require_backward_grad_sync:
        return
    if inside(caller) is not module:
        raise ConfigurationError(
            "DistributedDataParallel is around a private model and something else, or around a part of one: the engine "
            "would add up the gradients of the private model alone. Make one model of all that is trained, and put "
            "DistributedDataParallel around the whole of it."
        )
    if dist.get_world_size(caller.process_group) != processes:
        raise ConfigurationError(
            f"DistributedDataParallel is for {dist.get_world_size(caller.process_group)} processes, and the model was "
            f"made private for {processes}: each would draw lots from all of the data, train a model of its own and "
            "spend by itself. Call torch.distributed.init_process_group() before make_private."
        )
    check_wrapper(caller)
    switch_off(caller)


def _switch(module: nn.Module, on: bool) -> None:
    ddp = wrapper_of(module)
    if ddp is not None:
        # As under its no_sync(), for good: outside of it the reducer would wait for gradients that never come.
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = on


def checksum(values: list[torch.Tensor]) -> int:
    """A number that differs where any bit of these tensors does (but for coincidence), the same on every machine."""
    total = torch.zeros((), dtype=torch.int64)
    for value in values:
        if not value.numel():
            continue
        raw = value.detach().contiguous().view(-1).view(_WORDS[value.element_size()])
        total = total.to(value.device) * 1_000_003 + raw.sum(dtype=torch.int64)
    return int(total)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
