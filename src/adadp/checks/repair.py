"""`fix`: a copy of a model in which what mixes examples is replaced by what does not."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from adadp.checks.notes import keep_notes, some
from adadp.errors import ModelNotice, UnsupportedModuleError

#: What a BatchNorm may go on with after it has normalised (timm), by the names of its children, in this order.
_AFTERWARDS = ("drop", "act")


@dataclass(frozen=True)
class _Replacement:
    """What comes in the place of a part."""

    new: nn.Module
    kind: str  # in words, for the summary
    details: str


def fix(module: nn.Module) -> nn.Module:
    """A copy of the model in which BatchNorm is replaced by GroupNorm of up to 32 groups, and running statistics go.

    GroupNorm takes over the scale and shift that BatchNorm had learnt, with dtype, device and requires_grad. It takes
    mean and variance from each example itself, so BatchNorm's running statistics have no place in it, and a pretrained
    model needs some training afterwards. BatchNorm1d may normalise plain features, where a group of one channel would
    always give 0: its groups have eight channels or more. A BatchNorm whose forward goes on with its children `drop`
    and `act` (timm) becomes a Sequential of GroupNorm and those. InstanceNorm loses its running statistics. Modules
    that hang in several places, and parameters that several modules share, stay shared.

    One `ModelNotice` sums up what was replaced; `adadp.notes(model)` has all of it. Build the optimizer afterwards.

    Args:
        module: the model; it is not changed.

    Returns:
        The copy.

    Raises:
        UnsupportedModuleError: a subclass of BatchNorm computes something that GroupNorm would not, or a lazy module
            has no shape yet.

    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):  # which torch cannot copy
            raise UnsupportedModuleError(f"{name} has no shape yet: run the model once on a dummy input first")
    fixed = copy.deepcopy(module)
    found: dict[int, _Replacement] = {}
    lines: list[str] = []
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, part in fixed.named_modules():
        here, old = name or "the model", type(part).__name__
        replacement = _replacement(part, f"{here} ({old})")
        if replacement is not None:
            found[id(part)] = replacement
            lines.append(f"{here}: {old}({part.num_features}) replaced by {replacement.details}")
            kinds.setdefault((old, replacement.kind), []).append(here)
    for part in list(fixed.modules()):
        for key, child in part._modules.items():
            if id(child) in found:
                part._modules[key] = found[id(child)].new
    result = found[id(fixed)].new if id(fixed) in found else fixed
    if lines:
        keep_notes(result, lines)
        said = " and ".join(f"{len(names)} {old} by {new} ({some(names)})" for (old, new), names in kinds.items())
        warnings.warn(f"adadp.fix replaced {said}; adadp.notes(model) has all of them", ModelNotice, stacklevel=2)
    return result


def _replacement(part: nn.Module, here: str) -> _Replacement | None:
    if isinstance(part, _BatchNorm):
        return _of_batch_norm(part, here)
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        part.track_running_stats = False
        part.running_mean = part.running_var = part.num_batches_tracked = None
        kind = f"{type(part).__name__} without running statistics"
        return _Replacement(part, kind, kind)
    return None


def _of_batch_norm(part: _BatchNorm, here: str) -> _Replacement:
    afterwards = {name: child for name in _AFTERWARDS if (child := part._modules.get(name)) is not None}
    if not _computes_plainly(part, list(afterwards.values())):
        raise UnsupportedModuleError(
            f"{here} is a BatchNorm that computes something else as well, which GroupNorm would not: replace it by "
            "hand, then call adadp.fix for the others"
        )
    channels = part.num_features
    most = max(1, channels // 8) if isinstance(part, nn.BatchNorm1d) else channels
    groups = max(group for group in range(1, min(32, most) + 1) if channels % group == 0)
    norm = nn.GroupNorm(groups, channels, eps=part.eps, affine=False)
    # The parameters themselves: whatever shares them goes on sharing them.
    norm.weight, norm.bias, norm.affine = part.weight, part.bias, part.affine
    norm.train(part.training)
    kept = [word for word, parameter in (("scale", part.weight), ("shift", part.bias)) if parameter is not None]
    details = f"GroupNorm({groups}, {channels})" + (f", with its {' and '.join(kept)}" if kept else "")
    if not afterwards:
        return _Replacement(norm, "GroupNorm", details)
    chain = nn.Sequential(OrderedDict[str, nn.Module]([("norm", norm), *afterwards.items()]))
    chain.training = part.training
    return _Replacement(chain, "GroupNorm", f"{details}, then its own {' and '.join(afterwards)}")


def _computes_plainly(part: _BatchNorm, afterwards: Sequence[nn.Module]) -> bool:
    """Whether a BatchNorm computes what torch's does and then `afterwards`: subclasses are tried on random numbers."""
    if type(part).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and not afterwards:
        return True
    tried, *then = copy.deepcopy([part, *afterwards])
    for module in (tried, *then):
        module.eval()
    like = next((tensor for tensor in [*part.parameters(), *part.buffers()] if tensor.is_floating_point()), None)
    like = torch.zeros(()) if like is None else like
    if like.is_meta:
        return True  # there are no numbers to try it with
    places = 0 if isinstance(part, nn.BatchNorm1d) else 3 if isinstance(part, nn.BatchNorm3d) else 2
    inputs = torch.randn(4, part.num_features, *[2] * places, generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        mean, variance = part.running_mean, part.running_var
        expected = F.batch_norm(inputs, mean, variance, part.weight, part.bias, mean is None, 0.0, part.eps)
        for module in then:
            expected = module(expected)
        try:
            found = tried.forward(inputs.clone())
        except Exception:
            return False
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, 1e-2, 1e-3)


__all__ = ["fix"]
