"""A model that fully_shard (FSDP2) spread over the processes: whole while a lot is out, in shards at rest.

fully_shard gathers a layer's weights where the layer runs, and reduces gradients as they come. Neither fits a private
step: trials run the model in one process alone, and bounded sums are all that may leave a process. So all weights are
gathered when a lot is handed out, which every process comes to equally often. From then on fully_shard finds nothing to
gather and, as no gradient reaches a weight, nothing to reduce. When the lot's gradient has its noise, each process
keeps its own rows of it and lets go of the whole weights. The optimizer steps on shards, so its state is sharded too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from adadp.distributed.group import answering
from adadp.distributed.wrapped import checksum, sharded_parts
from adadp.errors import ConfigurationError, DistributedError, UnsupportedModuleError

_TORCH = "2.13"  # the torch whose fully_shard is known here


class Sharded:
    """The weights of one model under fully_shard.

    Attributes:
        shards: the parameters at rest, by name: what the optimizer holds.
        released: a number of all that was released so far. Weights that are put together from shards are the same in
            all processes whatever each of them did; this number is not.

    """

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)
        self.shards = dict(module.named_parameters())
        self._whole: list[nn.Parameter] = []
        self._lot: object = None
        self.released = torch.zeros((), dtype=torch.int64)

    @property
    def _module(self) -> Any:
        return self._reference()

    def note(self, gradients: Iterable[Tensor]) -> None:
        """Count what this process is about to step with as released."""
        self.released.mul_(31).add_(checksum(list(gradients)))

    def gather(self, lot: object) -> None:
        """Put whole weights in the places of the shards, once for each lot. All processes call this together."""
        if lot is self._lot:  # work on it goes on in another part
            return
        self.rest()
        self._keep_whole(True)
        with answering("gather the weights"):
            for part in sharded_parts(self._module):
                part.unshard()
        self._whole = list(self._module.parameters())
        if any(isinstance(parameter, DTensor) for parameter in self._whole):
            raise DistributedError("fully_shard did not gather all weights: nothing of the lot was released")
        self._lot = lot

    def forget(self) -> None:
        """Drop gradients that reached whole weights, which only happens past the engine."""
        for parameter in self._whole:
            parameter.grad = None

    def rest(self) -> None:
        """Put the shards back and let go of the whole weights, with whatever reached them."""
        self.forget()
        module, self._lot = self._module, None
        if module._get_fsdp_state()._is_root is not None:  # it has run: a pass that was broken off keeps weights whole
            module.reset_iter_state()
        for part in sharded_parts(module):
            part.reshard()
        self._keep_whole(False)
        if [*map(id, module.parameters())] != [*map(id, self.shards.values())]:
            raise DistributedError(
                "the model's parameters are not the shards that were made private: it was sharded, moved or changed "
                "since. Make the model first, then shard it, then call make_private"
            )

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This process's rows of a whole parameter's value, as the parameter's own kind of tensor."""
        shard: Any = self.shards[name]
        mesh = shard.device_mesh
        rows = -(-len(whole) // mesh.size())
        first = rows * mesh.get_local_rank()
        part = whole[first : first + rows].clone()  # a view would keep the whole in memory
        if part.shape != shard.to_local().shape:
            raise DistributedError(f"fully_shard split {name} in another way than by rows of equal numbers")
        made: Tensor = DTensor.from_local(
            part, mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        return made

    def let_go(self) -> None:
        """Leave the model to fully_shard, which gathers and reduces by itself again."""
        self.rest()
        self._module.set_requires_gradient_sync(True)

    def _keep_whole(self, whole: bool) -> None:
        module = self._module
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_forward(not whole)
        module.set_reshard_after_backward(not whole)


#: Private models under fully_shard.
_SHARDED: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()


def sharded_of(module: nn.Module) -> Sharded | None:
    """How a private model's weights are sharded; None where they are not."""
    return _SHARDED.get(module)


def at_rest(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a private model that its optimizer holds, by name: of a sharded one the shards."""
    sharded = sharded_of(module)
    return dict(module.named_parameters()) if sharded is None else dict(sharded.shards)


def state_of(value: Tensor) -> int:
    """A number that changes where a tensor is written into. A DTensor's version leaves out what is done to its rows."""
    return checksum([value.to_local()]) if isinstance(value, DTensor) else value._version


def may_have_run(module: nn.Module) -> bool:
    """Whether a model under fully_shard has run before: its weights do not tell whether it was trained then."""
    return any(part._get_fsdp_state()._is_root is not None for part in sharded_parts(module))


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Make a sharded model private inside, with whole weights; it is at rest afterwards. Nothing for other models."""
    if not sharded_parts(module):
        yield
        return
    _begin(module)
    sharded = _SHARDED[module] = Sharded(module)
    try:
        sharded.gather(module)
        yield
        sharded.rest()
    except BaseException:
        let_go(module)
        raise


def _begin(module: nn.Module) -> None:
    """Have fully_shard check the model now, as it does when a model first runs: trials would take that for theirs."""
    try:
        sharded_parts(module)[0]._get_fsdp_state()._lazy_init()
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModuleError(f"fully_shard refuses the model: {error}") from error


def let_go(module: nn.Module) -> None:
    """Leave a model that is no longer private to fully_shard."""
    sharded = _SHARDED.pop(module, None)
    if sharded is not None:
        sharded.let_go()


# ---- what is not covered ---------------------------------------------------------------------------------------------


def check_sharded(module: nn.Module) -> None:
    """Raise where the way in which fully_shard spread a model over the processes is not covered."""
    parts = sharded_parts(module)
    if not parts:
        return
    if not hasattr(parts[0], "reset_iter_state"):
        raise UnsupportedModuleError(f"fully_shard is known here as torch {_TORCH} has it: take that or a later torch")
    if parts[0] is not module:
        raise UnsupportedModuleError(
            "fully_shard has sharded parts of the model, and not what is left of it: call fully_shard(model), too"
        )
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnsupportedModuleError(
                f"{name} was left out of fully_shard (ignored_params), or is gathered now: shard all parameters, and "
                "call make_private while they are in shards (model.reshard())"
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise UnsupportedModuleError(
                f"{name} is sharded over a mesh of shape {tuple(mesh.shape)}, and not over all processes in one "
                "dimension (no replicas, no tensor parallelism): fully_shard(model) without mesh= does that"
            )
        if len(placements) != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
            raise UnsupportedModuleError(f"{name} is placed as {placements}: leave shard_placement_fn= out")
        if type(parameter.to_local()) is not Tensor:
            raise UnsupportedModuleError(
                f"{name} is a {type(parameter.to_local()).__name__}, which fully_shard may gather in a way of its own: "
                "shard ordinary parameters"
            )
    for part in parts:
        _check_policies(part)


def _check_policies(part: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    state = part._get_fsdp_state()
    policy, groups = getattr(state, "_mp_policy", None), getattr(state, "_fsdp_param_groups", None)
    if policy != MixedPrecisionPolicy():
        raise UnsupportedModuleError(
            "fully_shard with mp_policy= would run the model in another precision than its gradients are bounded in: "
            "leave it out, and use torch.autocast for bfloat16"
        )
    if groups is None or any(type(group.offload_policy) is not OffloadPolicy for group in groups):
        raise UnsupportedModuleError("fully_shard with offload_policy= is not covered: leave it out")


def refuse_settings(module: nn.Module, uncovered: Mapping[str, bool]) -> None:
    """Raise where something is asked for that is not covered with a sharded model yet.

    Args:
        module: the model.
        uncovered: in words what is not covered, and whether it is asked for.

    """
    asked = [what for what, wanted in uncovered.items() if wanted]
    if asked and sharded_parts(module):
        raise ConfigurationError(
            f"a model under fully_shard (FSDP2) cannot be trained with {', '.join(asked)} yet (docs/distributed.md): "
            "leave that out, or use DistributedDataParallel, which keeps the whole model in each process"
        )


def refuse_checkpoint(module: nn.Module) -> None:
    """Raise where a checkpoint is asked for of a sharded model."""
    refuse_settings(module, {"a checkpoint of the engine's, which holds whole weights": True})
