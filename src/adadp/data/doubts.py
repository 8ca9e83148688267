"""What looks wrong about a table before anything is spent on it: for the user's eyes, read off private rows.

Nothing follows from these remarks but what the user decides. They are neither stored in a run's folder nor part of its
guarantee.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from adadp.data.table import Column
from adadp.data.tablefile import MISSING

_DECIMAL_COMMA = re.compile(r"[-+]?\d{1,3}(\.?\d{3})*,\d+")
_DATE = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}([T ].*)?|\d{1,2}\.\d{1,2}\.\d{4}")
_ENOUGH = 20  # rows from which it means something that all values differ
_MANY_CLASSES = 50
_WORDS, _LENGTH = 3.0, 25.0  # on average, from which a column of words reads like free text


def of_columns(columns: Mapping[str, Column], kinds: Mapping[str, str], declared: Sequence[str]) -> list[str]:
    """Remarks on the columns whose kind was not declared."""
    found: list[str] = []
    for name, values in columns.items():
        if name in declared:
            continue
        if kinds[name] == "category":
            found += _of_words(name, values)
        elif kinds[name] == "number" and _is_id(name, values):
            found.append(
                f"column {name!r} holds whole numbers that are all different, and is named like an id: it says who "
                f"somebody is, and no more. Leave it out with --ignore {name}"
            )
    return found


def of_labels(label: str, classes: Sequence[str], rows: int) -> list[str]:
    """Remarks on classes that were taken from the data."""
    found = []
    empty = [name for name in classes if name.lower() in MISSING]
    if empty:
        found.append(
            f"the class {empty[0]!r} of {label!r} looks like a missing label: declare the classes (--classes), and "
            "leave out other rows with --drop-other-labels"
        )
    whole = all(name.lstrip("-").isdigit() for name in classes)
    if whole and len(classes) > _MANY_CLASSES:
        found.append(
            f"{label!r} has {len(classes)} classes, all of them whole numbers: if it is a quantity, predict it as a "
            "number with --task regression --target-range LOW..HIGH"
        )
    elif len(classes) > max(_MANY_CLASSES, rows // 20):
        found.append(f"{label!r} has {len(classes)} classes for {rows:,} rows: few rows are left to learn each from")
    return found


def _of_words(name: str, values: Column) -> list[str]:
    cells = [str(cell) for cell in values if cell is not None and str(cell).lower() not in MISSING]
    if not cells:
        return [f"column {name!r} is empty: leave it out with --ignore {name}"]
    some = cells[:2000]
    if all(_DECIMAL_COMMA.fullmatch(cell) for cell in some):
        return [
            f"column {name!r} looks like numbers with decimal commas, and is taken as a category: read the file with "
            "--decimal-comma"
        ]
    if all(_DATE.fullmatch(cell) for cell in some):
        return [f"column {name!r} looks like dates, and is taken as a category: declare it with --date {name}"]
    if np.mean([cell.count(" ") + 1 for cell in some]) > _WORDS or np.mean([len(cell) for cell in some]) > _LENGTH:
        return [
            f"column {name!r} looks like free text, and is taken as a category, so that nothing is learnt from its "
            f"words: declare it with --text {name}"
        ]
    if len(cells) >= _ENOUGH and len(set(cells)) > 0.9 * len(cells):
        return [f"column {name!r} holds a different word in almost every row, like an id: --ignore {name}, or --text"]
    return []


def _is_id(name: str, values: Column) -> bool:
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    named = not words or bool({"id", "ids", "index", "row", "rownames", "number", "no", "nr", ""} & set(words[-1:]))
    known = values[~np.isnan(values)]
    different = len(known) >= _ENOUGH and len(np.unique(known)) == len(known)
    return bool(named and different and (known == np.round(known)).all())
