"""Launches of Triton kernels, most of them past Triton's own machinery.

Triton asks of every argument of every launch what it specialises kernels on, and makes texts of that to look the
compiled kernel up: tens of microseconds, of which a step without a recording has hundreds. Here a compiled kernel is
found by a tuple of all that Triton looks at, and launched with bare addresses. The first launch of a kind is Triton's
own: it compiles, checks the arguments and returns what is launched from then on. So is every launch that is not like
those known here: in the interpreter, while a profiler listens, of another version's launcher.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

from adadp.gradients.kernels.reference import MOST_ALIKE

_KNOWN = triton.__version__.split(".")[:2] == ["3", "6"]  # whose `CompiledKernel.run` takes what is passed below
_SMALLEST, _LARGEST = -(2**31), 2**31 - 1

_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)`, on the current device and stream.

    Args:
        kernel: made by `triton.jit`, a global of a module.
        programs: how many programs there are.
        arguments: tensors, tuples of tensors, integers and floats; nothing known when the kernel is compiled.
        constants: the rest, which is.
    """
    plain = _KNOWN and isinstance(kernel, triton.JITFunction) and not _listened_to()
    found = _described(arguments) if plain else None
    if found is None:
        kernel[(programs,)](*arguments, **constants)
        return
    described, passed = found
    device = driver.active.get_current_device()
    key = (id(kernel), device, *constants, *constants.values(), *described)
    known = _compiled.get(key)
    if known is None:
        _remember(key, kernel, kernel[(programs,)](*arguments, **constants), len(arguments), constants)
        return
    compiled, rest = known
    stream = driver.active.get_current_stream(device)
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *passed, *rest
    )  # fmt: skip


def _described(arguments: tuple[Any, ...]) -> tuple[list[object], list[object]] | None:
    """All of the arguments that Triton specialises kernels on, and what is passed; None if one is of another kind."""
    described: list[object] = []
    passed: list[object] = []
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            address = argument.data_ptr()
            described += (argument.dtype, argument.get_device(), address % 16 == 0)
            passed.append(address)
        elif kind is int:
            if not _SMALLEST <= argument <= _LARGEST:
                return None
            described.append("one" if argument == 1 else "sixteens" if argument % 16 == 0 else "integer")
            passed.append(argument)
        elif kind is float:
            described.append("float")
            passed.append(argument)
        elif kind is tuple:
            inner = _described(argument)
            if inner is None:
                return None
            described.append(len(argument))
            described += inner[0]
            passed.append(tuple(inner[1]))
        else:
            return None
    return described, passed


def _listened_to() -> bool:
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _remember(key: tuple[object, ...], kernel: Any, compiled: Any, arguments: int, constants: dict[str, Any]) -> None:
    """Keep what Triton launched, where it is launched with the parameters in their order and nothing else happens."""
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return
    rest = kernel.arg_names[arguments:]
    if kernel.constexprs == list(range(arguments, len(kernel.arg_names))) and constants.keys() >= set(rest):
        _compiled[key] = compiled, tuple(constants[name] for name in rest)


def one_or_most(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Tensors for a kernel that takes a tuple: of one, or of `MOST_ALIKE`, so that it is compiled for two lengths."""
    if len(tensors) > MOST_ALIKE:
        raise ValueError(f"{len(tensors)} tensors are more than a launch takes, {MOST_ALIKE}")
    missing = 0 if len(tensors) == 1 else MOST_ALIKE - len(tensors)
    return (*tensors, *tensors[:1] * missing)
