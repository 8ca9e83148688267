"""Class labels: from a column of values to 0..k-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adadp.errors import DataError

_MOST_CLASSES = 1_000


UNLISTED = -1
"""What `encode` gives a row that a declared rule leaves out."""


def declared(classes: Sequence[object]) -> tuple[str, ...]:
    """The names of declared classes. Refused: fewer than two, one without a name, and one twice."""
    names = tuple(_plain(name) for name in classes)
    if "" in names:
        raise DataError("a class is declared without a name")
    if len(names) < 2:
        raise DataError(f"classes must name two or more, not {len(names)}: there is nothing to learn")
    if len(set(names)) != len(names):
        raise DataError("a class is declared twice")
    return names


def encode(
    values: np.ndarray[Any, Any], where: str, classes: Sequence[object] | None = None, *, drop: bool = False
) -> tuple[Tensor, tuple[str, ...]]:
    """Number the classes: labels int64 of shape (n,), and the names of the classes in order.

    `classes` declares them; without it they are the values that occur, and count as public. Refused: missing
    labels, values that are no declared class, numbers with a fraction, and a single class. With `drop` a row
    without a declared class gets `UNLISTED` instead: a rule that looks at each row by itself and refuses nothing.
    """
    found = np.asarray(values).tolist()
    if classes is not None:
        return _among(found, where, declared(classes), drop)
    texts = [_text(value, where, row) for row, value in enumerate(found)]
    names = _names(set(texts))
    if len(names) < 2:
        raise DataError(f"{where} holds one class only ({', '.join(names) or 'none'}): there is nothing to learn")
    if len(names) > _MOST_CLASSES:
        raise DataError(f"{where} holds {len(names)} different values: is it a class label?")
    place = {name: index for index, name in enumerate(names)}
    return torch.tensor([place[text] for text in texts], dtype=torch.int64), names


def scaled(values: np.ndarray[Any, Any], where: str, target: tuple[float, float]) -> Tensor:
    """Return the numbers to be predicted as float32 in [-1, 1], shape (n,): those beyond `target` are clipped to it.

    Raises:
        DataError: the range is empty, or a row has no number.

    """
    low, high = target
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise DataError(f"{where}: the range of what is predicted must go from a finite number to a larger one")
    if values.dtype.kind not in "fiu":
        raise DataError(f"{where} does not hold numbers, so none can be predicted")
    numbers = values.astype(np.float64)
    if np.isnan(numbers).any():
        raise DataError(f"{where}: row {int(np.isnan(numbers).argmax()) + 1} has no number to be predicted")
    return torch.from_numpy(np.clip((numbers - (low + high) / 2) / ((high - low) / 2), -1, 1)).float()


def listed(names: Sequence[str]) -> str:
    """The names of classes in a sentence: all, or the first ten of many."""
    return ", ".join(names[:10]) + (f", ... ({len(names):,} in all)" if len(names) > 10 else "")


def public_names(names: Sequence[str], declared: bool, drop: bool = False) -> str:
    """What is public about the classes, as a sentence for the reader of a guarantee."""
    how = "declared" if declared else "as they occur in the data"
    rule = "; rows with another label are left out, by a rule declared beforehand" if drop else ""
    return f"the class names, {how} ({listed(names)}){rule}"


def _among(found: list[object], where: str, names: tuple[str, ...], drop: bool) -> tuple[Tensor, tuple[str, ...]]:
    place = {name: index for index, name in enumerate(names)}
    numbers = []
    for row, value in enumerate(found):
        number = place.get(_plain(value))
        if number is None and isinstance(value, str):
            number = place.get(_as_whole_number(value))  # "1.0" where a column of numbers was read as text
        if number is None and not drop:
            text = _text(value, where, row)  # refuses what is no label at all
            raise DataError(
                f"{where}: the label {text!r} of row {row + 1} is none of the classes ({listed(names)}). Correct it, "
                "declare its class, or have such rows left out by rule (drop_other_labels)"
            )
        numbers.append(UNLISTED if number is None else number)
    return torch.tensor(numbers, dtype=torch.int64), names


def _plain(value: object) -> str:
    """A label as text, whatever it is: 1.0 and b"1" are "1"."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def _as_whole_number(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return ""
    return str(int(number)) if number.is_integer() else ""


def _text(value: object, where: str, row: int) -> str:
    """As `_plain`, for a value that has to be a label."""
    text = _plain(value)
    if text == "" or (isinstance(value, float) and not np.isfinite(value)):
        raise DataError(f"{where}: row {row + 1} has no label")
    if isinstance(value, float) and not value.is_integer():
        raise DataError(f"{where}: row {row + 1} is the number {value!r}, which is no class label")
    return text


def _names(texts: set[str]) -> tuple[str, ...]:
    # 2 before 10 where all are numbers; alphabetical otherwise.
    if all(text.lstrip("-").isdigit() for text in texts):
        return tuple(sorted(texts, key=int))
    return tuple(sorted(texts))
