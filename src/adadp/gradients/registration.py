"""A rule for a module class of the user's own, compared with torch.func before it is used."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adadp.errors import ConfigurationError, UnsupportedModuleError
from adadp.gradients.capture.capture import Capture
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import _REGISTER, Layer

_TOLERANCE = 1e-6  # of the largest entry, in float64


def register_layer(kind: type[nn.Module], rule: type[Layer] | type[nn.Module], *examples: tuple[Any, ...]) -> None:
    """Have the engine take the per-example gradients of a module class by a rule, once it was compared with torch.func.

    The comparison is made on copies in float64, whose parameters are changed a little so that none is 0 or 1. It covers
    each example's gradient of every parameter, its norm, a weighted sum over examples, and the output.

        adadp.register_layer(MyNorm, nn.LayerNorm, (MyNorm(8), torch.randn(4, 3, 8)))

    Args:
        kind: the class. Its subclasses use the rule too, unless they replace its `forward`.
        rule: a subclass of `adadp.gradients.layers.layer.Layer`; or a module class that has a rule (nn.Linear), if that
            one's is right here: it reads the same attributes and has the same names of parameters.
        examples: each a module of the class, followed by its inputs, with examples in the first dimension: give one for
            each of its settings and each number of dimensions that the rule is meant for.

    Raises:
        ConfigurationError: the rule and torch.func disagree (it names the parameter and the largest difference), the
            rule cannot be used, there is one for this class, or the examples show too little. Nothing is registered
            then.

    """
    if kind in _REGISTER:
        raise ConfigurationError(f"a layer for {kind.__name__} is registered already")
    if not examples:
        raise ConfigurationError("register_layer needs at least one example: a module, followed by its inputs")
    if issubclass(rule, Layer):
        layer, what = rule(), f"{rule.__name__}, the rule for {kind.__name__},"
    elif rule in _REGISTER:
        layer, what = _REGISTER[rule], f"nn.{rule.__name__}'s rule, used for {kind.__name__},"
    else:
        raise ConfigurationError(f"there is no rule for {rule.__name__} that {kind.__name__} could use")
    _REGISTER[kind] = layer
    try:
        for example in examples:
            _compare(kind, what, example)
    except BaseException:
        del _REGISTER[kind]
        raise


def _compare(kind: type[nn.Module], what: str, example: tuple[Any, ...]) -> None:
    """Raise where the rule that is registered for `kind` differs from torch.func on this example."""
    module, inputs, count = _prepared(kind, example)
    plain = [leaf.detach() for leaf in _floating(module(*inputs))]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device) for leaf in plain]
    try:
        _, expected = _captured(Capture(module, through_func=[""]), inputs, directions, count)
    except UnsupportedModuleError as error:
        raise ConfigurationError(
            f"torch.func cannot differentiate the example, so there is nothing to compare the rule with: {error}"
        ) from error
    try:
        outputs, forms = _captured(Capture(module), inputs, directions, count)
        for output, own in zip(outputs, plain, strict=True):
            _refuse_far(output, own, f"{what} returns something else than the module itself: it")
        with torch.no_grad():
            for name, form in expected.items():
                if name not in forms:
                    raise ConfigurationError(f"{what} gives no gradient of {name}")
                _refuse_difference(what, name, forms[name], form.dense(slice(0, count)))
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{what} cannot be used for {kind.__name__}: {type(error).__name__}: {error}"
        ) from error


def _prepared(kind: type[nn.Module], example: tuple[Any, ...]) -> tuple[nn.Module, list[Any], int]:
    """The example in float64, with parameters that are nowhere 0 or 1, and its number of examples."""
    if not example or not isinstance(example[0], kind):
        raise ConfigurationError(f"an example is a tuple: an instance of {kind.__name__} first, then its inputs")
    module, inputs = copy.deepcopy(example[0]).double(), [_in_float64(value) for value in example[1:]]
    count = next((len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), 0)
    if count < 2:
        raise ConfigurationError("an example needs an input with at least two examples in its first dimension")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError("an example's module needs a trainable parameter")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            parameter.add_((0.1 + 0.2 * noise) * (1 + parameter.abs()))
    return module, inputs, count


def _in_float64(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value
    )


def _floating(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _captured(
    capture: Capture, inputs: Sequence[Any], directions: Sequence[Tensor], count: int
) -> tuple[list[Tensor], Mapping[str, PerExample]]:
    """What the module returns while it is watched, and the gradients of its product with `directions`."""
    try:
        outputs = _floating(capture.module(*inputs))
        returned = [leaf.detach().clone() for leaf in outputs]
        terms = [(leaf * way).sum() for leaf, way in zip(outputs, directions, strict=True) if leaf.requires_grad]
        torch.autograd.backward(terms)
        with torch.no_grad():  # as in a step
            return returned, capture.take(count)
    finally:
        capture.detach()


def _refuse_difference(what: str, name: str, form: PerExample, truth: Tensor) -> None:
    if not truth.any():
        raise ConfigurationError(f"the example's gradient of {name} is zero, which shows nothing: give other inputs")
    count = len(truth)
    _refuse_far(form.dense(slice(0, count)), truth, f"{what} is wrong: its per-example gradient of {name}")
    norms, true = form.squared_norms().double().sqrt(), truth.flatten(1).norm(dim=1)
    if bool((norms < true * (1 - _TOLERANCE)).any()):
        worst = float((true - norms).max())
        raise ConfigurationError(f"{what} is wrong: its norms of {name} are up to {worst:.3g} below torch.func's")
    weights = torch.linspace(-1.0, 2.0, count, dtype=truth.dtype, device=truth.device)
    expected = (weights @ truth.flatten(1)).view(truth.shape[1:])
    _refuse_far(form.weighted_sum(weights, None), expected, f"{what} is wrong: its weighted sum of gradients of {name}")


def _refuse_far(found: Tensor, expected: Tensor, what: str) -> None:
    if found.shape != expected.shape:
        raise ConfigurationError(f"{what} has shape {list(found.shape)} instead of {list(expected.shape)}")
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:  # also where it is not a number
        raise ConfigurationError(
            f"{what} differs from torch.func's by {difference:.3g}, where the largest entry is {largest:.3g}"
        )


__all__ = ["register_layer"]
