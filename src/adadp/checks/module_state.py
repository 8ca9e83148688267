"""The plain attributes of modules, which persist between calls: read, compared and restored.

A queue of features, a running centre or a hidden state would carry examples from one lot to the next without noise. A
counter or a table of positions does not depend on examples and is allowed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Attributes that belong to torch.nn, to the engine, and to Lightning, whose modules know their trainer.
_NOT_OURS = {
    *nn.Module().__dict__,
    *("_flat_weights", "_flat_weight_refs", "_watched_by", "_compiled_call_impl"),
    *("_trainer", "_fabric"),
}
_DEEP, _MANY, _LARGE = 4, 5000, 10**8


class ModuleState:
    """The attributes of a module and of those below it, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._undo: list[Callable[[], None]] = []
        self.values: dict[str, Any] = {}  # by module's name and path inside it; tensors are copies
        self._seen: set[int] = set()
        self.generators: list[Any] = []
        for name, part in module.named_modules():
            own = {key: value for key, value in part.__dict__.items() if key not in _NOT_OURS}
            self._undo.append(_put_back(part.__dict__, own))
            for key, value in own.items():
                self._read(f"{name or type(part).__name__}:{key}", value, 0)

    def restore(self) -> None:
        """Restore everything, also the contents of containers and tensors."""
        for undo in self._undo:
            undo()

    def reseed(self, seed: int) -> None:
        """Seed the generators that modules own, until `restore`."""
        for generator in self.generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed)

    def changed_from(self, other: ModuleState) -> str | None:
        """The name of a module whose attributes differ from `other`; None if they are equal."""
        for path in self.values.keys() | other.values.keys():
            if path not in self.values or path not in other.values or not _equal(self.values[path], other.values[path]):
                return path.split(":")[0]
        return None

    def _read(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Parameter | nn.Module) or id(value) in self._seen or len(self.values) > _MANY:
            return
        if isinstance(value, bool | int | float | str | complex):
            self.values[path] = value
            return
        if value is None or depth > _DEEP:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._read_tensor(path, value)
        elif isinstance(value, np.ndarray):
            copied = value.copy()
            self.values[path] = copied
            self._undo.append(lambda: np.copyto(value, copied) if value.shape == copied.shape else None)
        elif isinstance(value, torch.Generator | np.random.RandomState | np.random.Generator | random.Random):
            self._undo.append(_rewind(value))
            self.generators.append(value)
        else:
            for key, entry in self._entries(value):
                self._read(f"{path}.{key}", entry, depth + 1)

    def _entries(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """What a container or a plain object holds; what restores it is noted."""
        if isinstance(value, tuple):
            return enumerate(value)
        if isinstance(value, list | deque | set) and len(value) < _MANY:
            self._undo.append(_refill(value))
            return enumerate(value)
        if isinstance(value, MutableMapping) and len(value) < _MANY:
            self._undo.append(_refill_mapping(value))
            return value.items()
        if _is_plain_object(value):
            inside: dict[str, Any] = vars(value)
            self._undo.append(_put_back(inside, dict(inside)))
            return inside.items()
        return ()

    def _read_tensor(self, path: str, value: Tensor) -> None:
        if value.numel() * value.element_size() > _LARGE:
            self.values[path] = (value._version, value.shape)  # too large to copy: whether it was changed is enough
            return
        copied, version = value.detach().clone(), value._version
        self.values[path] = copied

        def undo() -> None:
            if value._version != version and value.shape == copied.shape:
                with torch.no_grad():
                    value.copy_(copied)

        self._undo.append(undo)


def _put_back(place: dict[str, Any], was: dict[str, Any]) -> Callable[[], None]:
    ours = {key for key in place if key in was}

    def undo() -> None:
        for key in [key for key in place if key not in _NOT_OURS and key not in ours]:
            if not isinstance(place[key], bool):  # a flag set at the first call ("is set up") stays
                del place[key]
        place.update(was)

    return undo


def _refill(container: Any) -> Callable[[], None]:
    entries = list(container)

    def undo() -> None:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(entries)

    return undo


def _refill_mapping(container: MutableMapping[Any, Any]) -> Callable[[], None]:
    entries = dict(container)

    def undo() -> None:
        if dict.fromkeys(container) != dict.fromkeys(entries) or any(container[k] is not entries[k] for k in entries):
            container.clear()
            container.update(entries)

    return undo


def _rewind(generator: Any) -> Callable[[], None]:
    """Returns what sets a generator back, so that it draws the same numbers in each run."""
    if isinstance(generator, np.random.Generator):
        state: Any = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", state)
    if isinstance(generator, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    state = generator.get_state()  # of torch, or numpy's RandomState
    return lambda: generator.set_state(state)


def _is_plain_object(value: Any) -> bool:
    known = type(value).__module__.split(".")[0] in ("torch", "numpy", "builtins", "adadp", "functools", "weakref")
    return isinstance(getattr(value, "__dict__", None), dict) and not known and not isinstance(value, type | Mapping)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        return torch.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return type(one) is type(other) and bool(one == other or one != one)
