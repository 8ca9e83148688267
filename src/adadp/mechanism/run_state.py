"""What a private run is between two lots, as plain values: what a checkpoint holds, and how a run goes on from it.

| key of the values | |
| --- | --- |
| `run`, `lot` | the run in the ledger, by uid, and the number of the lot that comes next |
| `number` | which of its engine's runs it is |
| `charged` | how many steps it was charged for: a ledger that holds fewer of them is refused |
| `clipping` | state of clipping, shape and source; and with which numbers they were made |
| `spending` | what was spent on the weights (`accounting.spending`) |
| `ledger` | all records, of a ledger that has no file |
| `module`, `optimizer`, `scheduler` | parameters and buffers, the optimizer's state, the learning-rate schedule's |
| `extra` | what the caller adds: JSON |

Weights, state and shapes follow from released values. A checkpoint is made between two lots, when no sum of a lot is
kept anywhere; no key, seed or state of a generator is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adadp.accounting.ledger import Ledger
from adadp.accounting.planned import steps_in
from adadp.checkpoint import Checkpoint
from adadp.clipping.base import Clipping, settings_of
from adadp.errors import CheckpointError, NotFiniteError, TrainingLoopError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.plain_values import Unpackable, pack, pack_object, unpack, unpack_objects
from adadp.sampling.lot import Lots, State

VERSION = 1


def refuse_within_lot(lots: Lots) -> None:
    """Raise where a lot is out: its sums are private data, and weights do not stand between two lots."""
    over = (State.RELEASED, State.LEFT, State.FAILED) if lots.stopped else (State.RELEASED, State.LEFT)
    if lots.current is not None and lots.current.of.state not in over:  # a refused charge fails its lot: it is gone
        raise TrainingLoopError(
            f"lot {lots.current.lot} is out ({lots.current.of.state.value}): a checkpoint is made between lots, after "
            "optimizer.step() and where optimizer.stepped is True"
        )


def of_run(optimizer: PrivateOptimizer, ledger: Ledger, made_with: list[object], number: int) -> Checkpoint:
    """The run's position and what its clipping keeps; without weights, optimizer and schedule."""
    step, lots = optimizer._step, optimizer._loader.lots
    if not step.resumable:
        raise CheckpointError(
            f"a run of {type(step).__name__} (a line search, such as agd) is not resumed: how much of its privacy "
            "filter it has used is in memory alone. Save its weights when it has ended"
        )
    refuse_within_lot(lots)
    tensors: dict[str, Tensor] = {}
    references = _references(optimizer._parameters, step.clipping)
    parts = step.clipping.objects()
    values = {
        "version": VERSION,
        "run": optimizer._run.uid,
        "lot": lots.next,
        "number": number,
        "charged": steps_in(optimizer._run.charged()),
        "clipping": {
            "made_with": pack(made_with, tensors, "made_with"),
            "kept": [pack_object(part, tensors, f"clipping.{n}", references) for n, part in enumerate(parts)],
        },
        "ledger": ledger.records(),
        "spending": ledger.spending(),
    }
    return Checkpoint(values, tensors)


def refuse_other_clipping(values: Mapping[str, Any], clipping: Clipping) -> None:
    """Raise unless a new clipping has the classes of the one in the checkpoint, and was made with the same numbers."""
    before = [each["class"] for each in values["clipping"]["kept"]]
    now = [type(part).__name__ for part in clipping.objects()]
    if before != now:
        raise CheckpointError(
            f"the run that is resumed clips with {', '.join(before)}, and this one with {', '.join(now)}"
        )
    made_with, mine = unpack(values["clipping"]["made_with"], {}, torch.device("cpu")), settings_of(clipping)
    if made_with != mine:
        raise CheckpointError(f"the run that is resumed was made with the clipping's numbers {made_with}, not {mine}")


def put_into(values: Mapping[str, Any], tensors: Mapping[str, Tensor], clipping: Clipping, module: nn.Module) -> None:
    """Give a new clipping the state of the one in the checkpoint."""
    kept, device = values["clipping"], next(module.parameters()).device
    references = _references(dict(module.named_parameters()), clipping)
    unpack_objects(clipping.objects(), kept["kept"], tensors, device, references)


def _references(parameters: Mapping[str, Tensor], clipping: Clipping) -> dict[str, object]:
    parts = {f"part {number}": part for number, part in enumerate(clipping.objects())}
    return {**{f"parameter {name}": value for name, value in parameters.items()}, **parts}


# ---- the module ---------------------------------------------------------------------------------------------------


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def refuse_unless_finite(module: nn.Module, lot: int) -> None:
    """Raise where a weight is NaN or infinite. Weights are released: looking at them costs nothing."""
    wrong = [
        name
        for name, value in module.named_parameters()
        if value.is_floating_point() and not bool(torch.isfinite(value.detach()).all())
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
        raise NotFiniteError(
            f"after {lot:,} lots {wrong[0]}{more} holds values that are not finite. Gradients are clipped and noised, "
            "so the step is too long: lower the learning rate (it scales with 1/max_grad_norm), or weigh down what "
            "overflows in the model. What was released stays charged."
        )


def pack_module(module: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Put the module's tensors into `tensors`; returns their names."""
    found = tensors_of(module)
    tensors.update({f"module.{name}": value for name, value in found.items()})
    return list(found)


def refuse_other_module(names: list[str], tensors: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raise unless the tensors in the checkpoint are the module's, by name and shape."""
    found = tensors_of(module)
    if set(names) != set(found):
        raise CheckpointError(
            f"the checkpoint is of another model: {', '.join(sorted(set(names) ^ set(found))[:3])} are not in both"
        )
    for name, value in found.items():
        if value.shape != tensors[f"module.{name}"].shape:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} has shape {list(tensors[f'module.{name}'].shape)} there "
                f"and {list(value.shape)} here"
            )


@torch.no_grad()
def unpack_module(names: list[str], tensors: Mapping[str, Tensor], module: nn.Module) -> None:
    """Copy the tensors into the module in place, all or none."""
    refuse_other_module(names, tensors, module)
    for name, value in tensors_of(module).items():
        value.copy_(tensors[f"module.{name}"])


# ---- optimizer and schedule ---------------------------------------------------------------------------------------


def pack_state(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """The state dict of an optimizer or a scheduler."""
    try:
        return pack(value, tensors, name)
    except Unpackable as error:
        raise CheckpointError(
            f"the {name}'s state holds a {error}, which cannot be kept in a checkpoint without pickle"
        ) from None


def unpack_optimizer(packed: Any, tensors: Mapping[str, Tensor], optimizer: Optimizer, device: torch.device) -> None:
    """Load the state into a torch optimizer."""
    try:
        optimizer.load_state_dict(unpack(packed, tensors, device))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's optimizer is another one: {error}") from error


def plain_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a caller adds, if it is JSON."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra= of a checkpoint holds JSON values only: {error}") from None
    return plain
