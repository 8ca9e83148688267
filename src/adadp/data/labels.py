"""Class labels: from a column of values to 0..k-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.data.errors import DataError

_MOST_CLASSES = 1_000


def encode(
    values: np.ndarray[Any, Any], where: str, classes: Sequence[object] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Number the classes: labels int64 of shape (n,), and the names of the classes in order.

    `classes` declares them; without it they are the values that occur, and count as public. Refused: missing
    labels, values that are no declared class, numbers with a fraction, and a single class.
    """
    texts = [_text(value, where, row) for row, value in enumerate(np.asarray(values).tolist())]
    names = (
        _names(set(texts))
        if classes is None
        else tuple(_text(c, "classes", i) for i, c in enumerate(classes))
    )
    if len(names) < 2:
        raise DataError(
            f"{where} holds one class only ({', '.join(names) or 'none'}): there is nothing to learn"
        )
    if len(names) > _MOST_CLASSES:
        raise DataError(f"{where} holds {len(names)} different values: is it a class label?")
    place = {name: index for index, name in enumerate(names)}
    if len(place) != len(names):
        raise DataError("a class is declared twice")
    for row, text in enumerate(texts):
        if text not in place:
            known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise DataError(f"{where}: the label {text!r} of row {row + 1} is none of the classes ({known})")
    return torch.tensor([place[text] for text in texts], dtype=torch.int64), names


def _text(value: object, where: str, row: int) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or value == "" or (isinstance(value, float) and not np.isfinite(value)):
        raise DataError(f"{where}: row {row + 1} has no label")
    if isinstance(value, float):
        if not value.is_integer():
            raise DataError(f"{where}: row {row + 1} is the number {value!r}, which is no class label")
        value = int(value)
    return str(value)


def _names(texts: set[str]) -> tuple[str, ...]:
    # 2 before 10 where all are numbers; alphabetical otherwise.
    if all(text.lstrip("-").isdigit() for text in texts):
        return tuple(sorted(texts, key=int))
    return tuple(sorted(texts))
