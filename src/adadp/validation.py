"""Whether a model, a loss and a loop keep examples apart. What does not is refused before anything is released.

Some of it can be read off the modules (`problems`), and mended (`fix`). The rest is tried out once, on the first
batch: examples are taken away and replaced, and nothing may change for the others.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from adadp.errors import ConfigurationError, TrainingLoopError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.arithmetic import full_precision
from adadp.gradients.capture import Observed

_REPARAMETRIZING = (WeightNorm, SpectralNorm, BasePruningMethod)


def problems(module: nn.Module) -> list[str]:
    """What stands in the way of training `module` privately, each with the module's name and the way out."""
    found = []
    for name, part in module.named_modules():
        here = f"{name or 'the model'} ({type(part).__name__})"
        if isinstance(part, _BatchNorm):
            found.append(
                f"{here} normalises each example by the others of its batch, so no example's gradient is its own. "
                "adadp.fix(model) puts GroupNorm in its place."
            )
        elif isinstance(part, _InstanceNorm) and part.track_running_stats:
            found.append(
                f"{here} keeps running statistics of the data, which leave training without noise. "
                "adadp.fix(model) turns track_running_stats off."
            )
        elif isinstance(part, DataParallel | DistributedDataParallel):
            found.append(f"{here} splits batches over devices: pass the module inside it")
        elif isinstance(part, torch.jit.ScriptModule):
            found.append(f"{here} is TorchScript, which cannot be watched: pass the nn.Module it was made from")
        elif any(isinstance(hook, _REPARAMETRIZING) for hook in part._forward_pre_hooks.values()):
            found.append(
                f"{here} computes its weights from others before it runs (weight_norm, spectral_norm or pruning): its "
                "per-example gradients are not known. Remove it (torch.nn.utils.remove_weight_norm and its like)."
            )
        elif parametrize.is_parametrized(part):
            found.append(
                f"{here} computes its weights from others (torch.nn.utils.parametrize): its per-example gradients are "
                "not known. Remove the parametrization (parametrize.remove_parametrizations)."
            )
        if any(is_lazy(parameter) for parameter in part.parameters(recurse=False)):
            found.append(f"{here} has no shape yet: run the model once on a dummy input first")
    return found


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedModuleError naming everything in `module` that cannot be trained privately."""
    found = problems(module)
    if found:
        raise UnsupportedModuleError("; ".join(found))


def fix(module: nn.Module) -> nn.Module:
    """A copy of the model in which cross-example layers are replaced: BatchNorm by GroupNorm of up to 32 groups.

    BatchNorm1d may stand on plain features, where a group of one channel would leave nothing of it: its groups have
    eight channels or more. The new layers have affine parameters where the old had; their values are fresh. Build the
    optimizer afterwards.
    """
    fixed = copy.deepcopy(module)
    replacement = _replacement(fixed)
    if replacement is not None:
        return replacement
    for part in list(fixed.modules()):
        for name, child in list(part.named_children()):
            new = _replacement(child)
            if new is not None:
                setattr(part, name, new)
    return fixed


def _replacement(part: nn.Module) -> nn.Module | None:
    if isinstance(part, _BatchNorm):
        channels = part.num_features
        most = max(1, channels // 8) if isinstance(part, nn.BatchNorm1d) else channels
        groups = max(group for group in range(1, min(32, most) + 1) if channels % group == 0)
        new: nn.Module = nn.GroupNorm(groups, channels, eps=part.eps, affine=part.affine)
        if part.affine:
            new = new.to(part.weight.device, part.weight.dtype)
        return new.train(part.training)
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        plain = type(part)(part.num_features, eps=part.eps, affine=part.affine)
        if part.affine:
            plain = plain.to(part.weight.device, part.weight.dtype)
            plain.load_state_dict({"weight": part.weight.detach(), "bias": part.bias.detach()})
        return plain.train(part.training)
    return None


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold exactly the trainable parameters of the module, and ask for one gradient a step."""
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
    """The module that torch.compile was given, itself where it was given none.

    What was compiled before the engine's hooks were on would run without them, so all of it is compiled anew: a
    function that calls a part of the module may be compiled too, and nothing about the module shows that.
    """
    if "torch._dynamo" in sys.modules:  # what compiles: not there where nothing was compiled yet
        torch.compiler.reset()
    inner = getattr(module, "_orig_mod", module) if type(module).__name__ == "OptimizedModule" else module
    assert isinstance(inner, nn.Module)
    return inner


class IndependenceCheck:
    """Tries out, on the first batch that a model sees, that its examples do not influence each other.

    A few examples go through: as they are, with each of them replaced, and with one of them left out. For the others,
    nothing may change anywhere in the model, and every layer must see one example less. Modules that keep
    statistics of what they saw are found by their buffers.
    """

    def __init__(self, capture: Capture, batch_first: bool) -> None:
        self._capture = capture
        self._dimensions = (0,) if batch_first else (1, 0)
        self._done: set[int] = set()
        self._refused: dict[int, str] = {}
        self.undecided: set[int] = set()  # modules whose examples were too much alike so far

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        """Check `module`, once, on a few of the `count` examples in its arguments."""
        if id(module) in self._refused:  # another batch may hide what this one showed
            raise UnsupportedModuleError(self._refused[id(module)])
        if id(module) in self._done or count < 2:  # one example has nothing to mix with
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise TrainingLoopError(f"{self._capture.module_name(module)} was not tried out before it was recorded")
        leaves, form = pytree.tree_flatten((args, kwargs))
        batched = [self._batch_dimension(leaf, count) for leaf in leaves]
        if all(dimension is None for dimension in batched):
            return
        try:
            with full_precision():  # with fewer bits, another number of examples may well be another result
                conclusive = self._read_and_try(module, leaves, form, batched, count)
        except UnsupportedModuleError as error:
            self._refused[id(module)] = str(error)
            raise
        if conclusive:
            self._done.add(id(module))
            self.undecided.discard(id(module))
        else:
            self.undecided.add(id(module))

    def _read_and_try(
        self, module: nn.Module, leaves: Sequence[Any], form: pytree.TreeSpec, batched: Sequence[int | None], count: int
    ) -> bool:
        """Try the module out as its arguments may be read: a length may be the number of examples by chance."""
        try:
            return self._try_out(module, leaves, form, batched, count)
        except UnsupportedModuleError:
            # Sequences of as many steps as there are examples, [n, T, ...] or [T, n, ...]?
            turned = [
                0 if dimension == 1 and leaf.shape[0] == count else dimension
                for leaf, dimension in zip(leaves, batched, strict=True)
            ]
            if turned == list(batched):
                raise
            return self._try_out(module, leaves, form, turned, count)
        except Exception as error:
            # An argument that is the same for all examples, such as a mask of [T, T]?
            for place, dimension in enumerate(batched):
                if dimension is not None and sum(d is not None for d in batched) > 1:
                    with suppress(RuntimeError, ValueError, IndexError):
                        others = [None if i == place else d for i, d in enumerate(batched)]
                        return self._try_out(module, leaves, form, others, count)
            raise UnsupportedModuleError(
                f"{self._capture.module_name(module)} cannot be tried out on a few examples of a batch ({error}), so "
                "it is not known whether it keeps them apart. Let it take batches of any size."
            ) from error

    def _try_out(
        self, module: nn.Module, leaves: Sequence[Any], form: pytree.TreeSpec, batched: Sequence[int | None], count: int
    ) -> bool:
        """Refuse the module if it mixes these examples. False if they are too much alike to tell."""
        keep = list(range(min(count, 4)))
        other = self._unlike_the_first(leaves, batched, count)

        def run(indices: Sequence[int], seed: int = 0, shift: bool = False) -> Observed:
            chosen = [
                leaf if dimension is None else _chosen(leaf, dimension, indices, shift)
                for leaf, dimension in zip(leaves, batched, strict=True)
            ]
            some_args, some_kwargs = pytree.tree_unflatten(chosen, form)
            with torch.random.fork_rng(), self._capture.observing() as seen:
                torch.manual_seed(seed)  # the same dropout in each run
                module(*some_args, **some_kwargs)
            return seen

        buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        whole, redrawn, fewer = run(keep), run(keep, seed=1), run(keep[:-1])
        self._refuse_statistics(module, buffers)
        for place in keep:  # each in turn: one of them may be what the others are measured against
            stranger = (other or 1) if place == 0 else 0
            self._refuse_mixing(whole, run([stranger if i == place else i for i in keep]), fewer, place)
        try:
            shifted = run(keep, shift=True)  # larger than all others: what looks at the largest sees it
        except Exception:
            shifted = whole  # the model does not take such an input: no less was learnt
        self._refuse_mixing(whole, shifted, fewer, 0)
        self._refuse_tables(whole, fewer, len(keep))
        self._refuse_counting(whole, redrawn, fewer)
        return other is not None

    def _batch_dimension(self, leaf: Any, count: int) -> int | None:
        if not isinstance(leaf, Tensor):
            return None
        return next((d for d in self._dimensions if leaf.ndim > d and leaf.shape[d] == count), None)

    @staticmethod
    def _unlike_the_first(leaves: Sequence[Any], batched: Sequence[int | None], count: int) -> int | None:
        """An example that is not the first one over again, if there is one."""
        unlike = torch.zeros(count, dtype=torch.bool)
        for leaf, dimension in zip(leaves, batched, strict=True):
            if dimension is not None:
                rows = leaf.detach().movedim(dimension, 0).reshape(count, -1)
                unlike |= (rows != rows[:1]).any(1).cpu()
        found = unlike.nonzero().flatten()
        return int(found[0]) if len(found) else None

    def _refuse_statistics(self, module: nn.Module, before: dict[str, tuple[Tensor, int]]) -> None:
        for name, buffer in module.named_buffers():
            known, version = before.get(name, (None, 0))
            if buffer is not known or buffer._version != version:
                raise UnsupportedModuleError(
                    f"the buffer {name} changes when the model runs: statistics of the data that leave training "
                    "without noise. Freeze it, or replace the module that keeps it."
                )

    def _refuse_mixing(self, whole: Observed, replaced: Observed, fewer: Observed, place: int) -> None:
        given = {
            name  # given mixed examples, so it is not the one that mixed them
            for (name, one, _), (_, other, _), (_, less, _) in zip(
                whole.inputs, replaced.inputs, fewer.inputs, strict=False
            )
            if self._differs(one, other, self._examples(one, less), place)
        }
        for name, one, other, less in _together(whole, replaced, fewer):
            if self._differs(one, other, self._examples(one, less), place):
                who = f"{name.rpartition('.')[0] or 'the model'} (what it gives to {name})" if name in given else name
                raise UnsupportedModuleError(
                    f"{who} mixes examples: replacing one example of a batch changes the output for the others, so a "
                    "bound on one example's gradient does not bound its influence. Use layers that work on each "
                    "example alone."
                )

    def _refuse_counting(self, whole: Observed, redrawn: Observed, fewer: Observed) -> None:
        for name, one, twin, less in _together(whole, redrawn, fewer):
            dimension = self._examples(one, less)
            if dimension is None or self._differs(one, twin, dimension):
                continue  # it draws random numbers, and draws others for fewer examples
            # Other shapes are summed in another order, so this is a coarser comparison.
            rest = one.narrow(dimension, 0, less.shape[dimension])
            if self._differs(rest, less, dimension, None, 1e-2, 1e-4):
                raise UnsupportedModuleError(
                    f"{name} mixes examples: its output for an example depends on how many others there are. Leave the "
                    "mean over examples to the loss."
                )

    def _examples(self, one: Tensor, less: Tensor) -> int | None:
        """The dimension of examples: the one that is shorter by one where there is one example less.

        Not one that happens to have the same length, such as the layers of a recurrent network.
        """
        if one.ndim != less.ndim:
            return None
        shorter = [d for d in range(one.ndim) if one.shape[d] == less.shape[d] + 1]
        return shorter[0] if shorter else None

    def _differs(
        self,
        one: Tensor,
        other: Tensor,
        dimension: int | None,
        but: int | None = None,
        relative: float = 1e-4,
        least: float = 0.0,
    ) -> bool:
        """Whether two outputs differ for any example but one."""
        if dimension is None or one.shape != other.shape:
            return False
        rows = [row for row in range(one.shape[dimension]) if row != but]
        first, second = one.movedim(dimension, 0)[rows], other.movedim(dimension, 0)[rows]
        finite = first[first.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 1.0  # small outputs are compared at their own size
        absolute = max(relative * 1e-2 * min(size, 1.0), least)
        return not torch.allclose(first, second, rtol=relative, atol=absolute, equal_nan=True)

    def _refuse_tables(self, whole: Observed, fewer: Observed, count: int) -> None:
        for (name, _, before), (_, _, after) in zip(whole.inputs, fewer.inputs, strict=False):
            if not any(
                before.ndim > d and after.ndim > d and before.shape[d] == count and after.shape[d] == count - 1
                for d in self._dimensions
            ):
                raise UnsupportedModuleError(
                    f"{name} does not see one row less when there is one example less (a table of positions, for "
                    "instance, or examples folded into another dimension): its gradients cannot be told apart by "
                    "example. Keep examples in the first dimension (batch_first=False for [T, N, ...]), expand a table "
                    "over the batch before the layer, or freeze the layer."
                )


def _chosen(leaf: Tensor, dimension: int, indices: Sequence[int], shift: bool) -> Tensor:
    """Some examples of a batch; with `shift`, the first of them larger than anything in it, if it has real numbers."""
    some = leaf.index_select(dimension, torch.tensor(indices, device=leaf.device))
    if shift and leaf.is_floating_point():
        first = some.detach().clone()
        first.narrow(dimension, 0, 1).add_(1 + 2 * leaf.detach().nan_to_num(0.0, 0.0, 0.0).abs().max())
        return first
    return some


def _together(*runs: Observed) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The outputs of each module in three runs, side by side."""
    for (name, first), (_, second), (_, third) in zip(*(run.outputs for run in runs), strict=False):
        for one, other, another in zip(first, second, third, strict=False):
            yield name, one, other, another


def check_criterion(criterion: Callable[..., Tensor], loss_reduction: str) -> bool:
    """Refuse a loss that mixes examples. False where it takes other arguments than were tried: it was not checked.

    The gradient of an example's own output, times the number of examples for a mean, may depend neither on the
    other examples nor on how many there are.
    """
    declared = getattr(criterion, "reduction", None)
    if declared in ("mean", "sum") and declared != loss_reduction:
        raise ConfigurationError(
            f"the criterion's reduction is {declared!r} but loss_reduction is {loss_reduction!r}: make them agree"
        )
    ignored = getattr(criterion, "ignore_index", -100)
    if declared == "mean" and ignored != -100:
        raise ConfigurationError(
            f"the criterion ignores label {ignored} and divides by how many labels of the whole batch are left, which "
            "mixes examples: average within each example, then over examples"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that do not fit: they are only tried
        return _check_outputs(criterion, loss_reduction)


def _check_outputs(criterion: Callable[..., Tensor], loss_reduction: str) -> bool:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(3, (4,), generator=generator)
    candidates: list[tuple[Tensor, Tensor]] = [
        (normal(4, 3), labels),
        (normal(4, 3), torch.softmax(normal(4, 3), 1)),
        (normal(4, 1), torch.rand(4, 1, generator=generator, dtype=torch.float64)),
        (normal(4), torch.rand(4, generator=generator, dtype=torch.float64)),
    ]
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).double()  # the user's own stays as it is
    for outputs, targets in candidates:
        try:
            reference = _output_gradients(criterion, outputs, targets, loss_reduction)
        except Exception:
            continue
        replaced_outputs, replaced_targets = outputs.clone(), targets.clone()
        replaced_outputs[0], replaced_targets[0] = outputs[1], targets[1]
        for other in (
            _output_gradients(criterion, replaced_outputs, replaced_targets, loss_reduction)[1:],
            _output_gradients(criterion, outputs[1:], targets[1:], loss_reduction),
        ):
            if not torch.allclose(reference[1:], other, rtol=1e-6, atol=1e-9):
                raise ConfigurationError(
                    "the criterion mixes examples: the gradient of one example's loss changes with the others. "
                    "Weighted means divide by the batch's weights and contrastive losses compare examples; use a loss "
                    f"that is a plain {loss_reduction} over examples."
                )
        return True
    return False


def _output_gradients(criterion: Callable[..., Tensor], outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    leaf = outputs.clone().requires_grad_()
    loss = criterion(leaf, targets)
    # A loss for each example is put together by the loop, as loss_reduction says.
    total = loss.mean() if reduction == "mean" and loss.ndim else loss.sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient * (len(outputs) if reduction == "mean" else 1)
