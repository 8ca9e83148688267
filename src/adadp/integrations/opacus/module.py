"""What Opacus does to a model: validation, repair, rules for layers, and attributes of the wrapper that it makes.

Here the model stays what it is. `model._module` is the model itself, so that `model._module.state_dict()` has the names
that it always had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from adadp.checks.repair import fix
from adadp.checks.validation import check_module, problems
from adadp.checks.weights import capture_of_private
from adadp.distributed.wrapped import inside, switch_on, wrapper_of
from adadp.errors import ConfigurationError
from adadp.integrations.opacus.notice import say

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ModuleValidator:
    """Whether a model can be trained privately, and what to do if not."""

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        """True where nothing is in the way."""
        return not problems(module)

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[str]:
        """What is in the way, in words; raised instead where `strict`."""
        if strict:
            check_module(module)
        return problems(module)

    @staticmethod
    def fix(module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """A copy with cross-example layers replaced."""
        if replace_bn_with_in:
            raise ConfigurationError(
                "fix(replace_bn_with_in=True) is not here: BatchNorm becomes GroupNorm, which keeps the scale and "
                "shift that were learnt. Replace it by nn.InstanceNorm yourself before make_private"
            )
        return fix(module)

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **settings: Any) -> nn.Module:
        """`fix`, and raise where something is still in the way."""
        module = cls.fix(module, **settings)
        cls.validate(module, strict=True)
        return module


def register_grad_sampler(kinds: type[nn.Module] | Sequence[type[nn.Module]]) -> Callable[[_Function], _Function]:
    """Not used: gradients of a module without a rule are found without one. The function is returned as it is."""
    names = ", ".join(kind.__name__ for kind in ([kinds] if isinstance(kinds, type) else kinds))
    say(
        f"the gradient sampler for {names} is not used: a rule that is wrong would make the guarantee false, and "
        "modules without one are followed operation by operation. adadp.register_layer takes a rule and compares it"
    )
    return lambda function: function


register_norm_sampler = register_grad_sampler


def remove_hooks(module: nn.Module) -> None:
    """Make the private module an ordinary one again. What was spent stays charged."""
    capture = capture_of_private(module)
    if capture is not None:
        capture.detach()
        switch_on(module)


def to_standard_module(module: nn.Module) -> nn.Module:
    """Make the private module an ordinary one again, and take Opacus' names off it."""
    remove_hooks(module)
    for name in ("_module", *_NAMES):
        vars(module).pop(name, None)
    return module


def _nothing(module: nn.Module) -> None:
    """There is nothing to do: no example's gradient is stored, and lots are added up by the loader's count."""


_NAMES: dict[str, Callable[[nn.Module], Any]] = {
    "remove_hooks": remove_hooks,
    "to_standard_module": to_standard_module,
    "forbid_grad_accumulation": _nothing,
    "allow_grad_accumulation": _nothing,
    "set_grad_sample_to_none": _nothing,
    "del_grad_sample": _nothing,
}


def name_as_opacus_does(module: nn.Module) -> None:
    """Give a model the attributes that Opacus' wrapper has, unless it has its own by these names."""
    for part in (inside(module), wrapper_of(module)):
        if part is None:
            continue
        # Not through nn.Module's own __setattr__: the model is not a part of itself.
        names = {"_module": part, **{name: partial(function, part) for name, function in _NAMES.items()}}
        vars(part).update({name: value for name, value in names.items() if not hasattr(part, name)})
