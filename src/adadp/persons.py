"""Whose rows are whose: ids of persons, who may have several rows of a dataset. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from adadp.errors import ConfigurationError

#: The unit of privacy where rows belong to persons.
PERSON = "one person"
#: How many of a person's rows are in a lot at most, unless it is given.
MOST_ROWS = 8
_NONE = frozenset({"", "na", "n/a", "nan", "nat", "<na>", "null", "none", "?"})


def key_of(value: Any) -> str:
    """An id as a text; "" for what says that there is none. 3.0 and 3 read alike.

    Raises:
        ConfigurationError: it has no text of its own.

    """
    if hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except (RuntimeError, ValueError, TypeError):
            raise ConfigurationError(f"an id is one value, and not a {type(value).__name__} of several") from None
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:  # its address
        raise ConfigurationError(
            f"ids are compared as texts, and a {kind.__name__} has none of its own: each of somebody's rows would pass "
            "for another person. Give the texts or numbers that name the persons"
        )
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return "" if text.lower() in _NONE else text


def keys_of(ids: Any) -> list[str]:
    """The ids of all rows as texts.

    Raises:
        ConfigurationError: these are no ids, one for each row.

    """
    if isinstance(ids, str | bytes | Mapping | Set) or not isinstance(ids, Iterable):  # the last two have no rows
        raise ConfigurationError(f"ids of persons are one for each row of the dataset, not {type(ids).__name__}")
    shape = getattr(ids, "shape", (0,))
    if len(shape) != 1:
        raise ConfigurationError(f"ids of persons have the shape [rows], not {list(shape)}")
    return list(map(key_of, ids.tolist() if hasattr(ids, "tolist") else ids))


def rows_by_person(ids: Any) -> list[list[int]]:
    """The rows of each person, in order. All rows without an id are one person's."""
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys_of(ids)):
        rows.setdefault(key, []).append(row)
    return list(rows.values())


def row_weights(ids: Any) -> list[float]:
    """1 / the number of its person's rows, for each row, and a little less: a person's weights add up to at most 1."""
    persons = rows_by_person(ids)
    weights = [0.0] * sum(map(len, persons))
    for rows in persons:
        for row in rows:
            weights[row] = (1 - 2.0**-40) / len(rows)
    return weights
