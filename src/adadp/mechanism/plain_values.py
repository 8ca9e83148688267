"""Objects as plain values, and back: JSON and tensors by name, so that a checkpoint needs no pickle.

packed, tensors = pack([...], references)        # `packed` is JSON, `tensors` a dict of tensors
values = unpack(packed, tensors, references)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adadp.errors import CheckpointError
from adadp.gradients.forms.factors import DiagonalFactor, Factor, Full, Identity, LowRank
from adadp.shapes.spectrum import Spectrum

_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (Spectrum, Identity, DiagonalFactor, Full, LowRank)}

#: Objects that are not packed but named, each by a text.
References = Mapping[str, object]


class Unpackable(Exception):  # noqa: N818  (what packs it says whose it is)
    """A value of a kind that is not kept."""


def pack(value: Any, tensors: dict[str, Tensor], name: str, references: References | None = None) -> Any:
    """`value` as JSON. Its tensors are put into `tensors`, under names that begin with `name`."""
    names = {id(each): label for label, each in (references or {}).items()}

    def packed(value: Any, path: str) -> Any:
        if id(value) in names:
            return {"reference": names[id(value)]}
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):  # numpy's and torch's numbers too
            plain = int(value) if isinstance(value, int) else float(value)
            return plain if math.isfinite(plain) else {"float": repr(plain)}
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path, "cpu": value.device.type == "cpu"}
        if isinstance(value, list | tuple):
            parts = [packed(part, f"{path}.{place}") for place, part in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        if isinstance(value, dict):
            return {
                "dict": [
                    [packed(key, path), packed(part, f"{path}.{n}")] for n, (key, part) in enumerate(value.items())
                ]
            }
        if isinstance(value, Spectrum | Factor) and _CLASSES.get(type(value).__name__) is type(value):
            return {"class": type(value).__name__, "fields": packed(dict(vars(value)), path)}
        raise Unpackable(type(value).__name__)

    return packed(value, name)


def unpack(
    value: Any, tensors: Mapping[str, Tensor], device: torch.device, references: References | None = None
) -> Any:
    """The inverse of `pack`. Tensors that were not on the CPU are put on `device`."""
    if isinstance(value, list):
        return [unpack(part, tensors, device, references) for part in value]
    if not isinstance(value, dict):
        return value

    def inner(part: Any) -> Any:
        return unpack(part, tensors, device, references)

    if "reference" in value:
        return (references or {})[value["reference"]]
    if "float" in value:
        return float(value["float"])
    if "tensor" in value:
        found = tensors[value["tensor"]]
        return found.clone() if value["cpu"] else found.to(device, copy=True)
    if "tuple" in value:
        return tuple(inner(part) for part in value["tuple"])
    if "class" in value:
        made: Any = object.__new__(_CLASSES[value["class"]])
        vars(made).update(inner(value["fields"]))
        return made
    return {inner(key): inner(part) for key, part in value["dict"]}


AS_MADE = "as made"
"""Stands for an attribute that is not kept: the one of the newly made object stays."""


def pack_object(part: object, tensors: dict[str, Tensor], name: str, references: References) -> dict[str, Any]:
    """The attributes of an object that keeps state between lots.

    Functions, and what the object's class names in `as_made`, stay as they are made by the user's code. Anything else
    that is not plain is refused: a checkpoint without it would go on in another way.
    """
    found: dict[str, Any] = {}
    for key, value in vars(part).items():
        if key in getattr(part, "as_made", ()) or isinstance(value, Callable | torch.Generator | Iterator):  # type: ignore[arg-type]
            found[key] = AS_MADE
            continue
        try:
            found[key] = {"value": pack(value, tensors, f"{name}.{key}", references)}
        except Unpackable as error:
            raise CheckpointError(
                f"{type(part).__name__}.{key} holds a {error}, which cannot be kept in a checkpoint without pickle. "
                "Keep numbers, texts, tensors, lists, tuples and dicts of them; name what is only configuration in the "
                "class's as_made = (...)"
            ) from None
    return {"class": type(part).__name__, "attributes": found}


def unpack_objects(
    parts: Sequence[object],
    packed: Sequence[Any],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    references: References,
) -> None:
    """Put packed attributes into newly made objects of the same classes, all or none of them."""
    ready = []
    for part, each in zip(parts, packed, strict=True):
        attributes = {}
        for key, value in each["attributes"].items():
            if value == AS_MADE:
                if key in vars(part):
                    attributes[key] = vars(part)[key]
            else:
                attributes[key] = unpack(value["value"], tensors, device, references)
        ready.append(attributes)
    for part, attributes in zip(parts, ready, strict=True):
        vars(part).clear()
        vars(part).update(attributes)
