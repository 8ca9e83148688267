"""Checks that need no data: which modules and optimizers cannot be trained privately.

What cannot be read off the modules is tried out while the model trains (`adadp.checks.trial`).
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from adadp.checks.configurations import configuration_problems
from adadp.checks.criterion import check_criterion
from adadp.checks.repair import fix
from adadp.distributed.wrapped import inside
from adadp.errors import ConfigurationError, UnsupportedModuleError
from adadp.gradients.layers.normalization import normalises_by_constants

_REPARAMETRIZING = (WeightNorm, SpectralNorm, BasePruningMethod)


def problems(module: nn.Module) -> list[str]:
    """Why `module` cannot be trained privately: a sentence for each cause, with the module's name and the way out."""
    found = []
    for name, part in module.named_modules():
        here = f"{name or 'the model'} ({type(part).__name__})"
        if isinstance(part, _BatchNorm) and not normalises_by_constants(part):
            statistics = part.track_running_stats and part.running_mean is not None
            found.append(
                f"{here} normalises each example by the others of its batch, so no example's gradient is its own. "
                "adadp.fix(model) puts GroupNorm in its place"
                + (", or its .eval() keeps it at its running statistics." if statistics else " (eval() does not help).")
            )
        elif isinstance(part, _InstanceNorm) and part.track_running_stats:
            found.append(
                f"{here} keeps running statistics of the data, which leave training without noise. "
                "adadp.fix(model) turns track_running_stats off."
            )
        elif isinstance(part, DataParallel):
            found.append(
                f"{here} splits batches over the devices of one process: pass the module inside it, or start one "
                "process for each device with torchrun and DistributedDataParallel"
            )
        elif isinstance(part, DistributedDataParallel):
            found.append(f"{here} is around a part of the model: put DistributedDataParallel around the whole")
        elif isinstance(part, torch.jit.ScriptModule):
            found.append(f"{here} is TorchScript, which cannot be watched: pass the nn.Module it was made from")
        elif any(isinstance(hook, _REPARAMETRIZING) for hook in part._forward_pre_hooks.values()):
            found.append(
                f"{here} computes its weights from others before it runs (weight_norm, spectral_norm or pruning): its "
                "per-example gradients are not known. Remove it (torch.nn.utils.remove_weight_norm and its like)."
            )
        elif parametrize.is_parametrized(part) and any(True for _ in part.parametrizations.buffers()):
            found.append(
                f"{here} computes its weights from others and keeps something between calls (spectral_norm of "
                "torch.nn.utils.parametrizations, for instance): its per-example gradients are not known. Remove the "
                "parametrization (parametrize.remove_parametrizations)."
            )
        if any(is_lazy(parameter) for parameter in part.parameters(recurse=False)):
            found.append(f"{here} has no shape yet: run the model once on a dummy input first")
    return [*found, *configuration_problems(module)]


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedModuleError naming everything in `module` that cannot be trained privately."""
    found = problems(module)
    if found:
        raise UnsupportedModuleError("; ".join(found))


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer holds exactly the module's trainable parameters and needs one gradient a step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times a step, each of them a release: use SGD or Adam"
        )
    if hasattr(optimizer, "original_optimizer"):
        raise ConfigurationError("the optimizer is private already: pass the ordinary one (its original_optimizer)")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    strangers = held - set(names)
    if strangers:
        raise ConfigurationError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the module's: build it from "
            "module.parameters() (after fix(module), if you used it)"
        )
    left_out = [names[id(p)] for p in module.parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ConfigurationError(
            f"trainable parameters are missing from the optimizer: {', '.join(left_out[:5])}. Add them, or freeze them "
            "with requires_grad_(False)"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError("the module has no trainable parameter")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside a compiled one or a DistributedDataParallel; `module` itself where it is neither.

    Code that was compiled before the engine's hooks were attached would run without them, so all compiled code is
    discarded and compiled again: also functions that call a part of the module, which the module does not show. From
    now on code is compiled so that a graph can be differentiated more than once, as trials of per-example losses do.
    """
    if "torch._dynamo" in sys.modules:  # not imported where nothing was compiled yet
        torch.compiler.reset()
    if hasattr(functorch_config, "donated_buffer"):  # True: a compiled backward pass writes over what it was given
        functorch_config.donated_buffer = False
    return inside(module)


__all__ = [
    "check_criterion",
    "check_module",
    "check_optimizer",
    "fix",
    "problems",
    "uncompiled",
]
