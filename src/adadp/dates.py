"""Dates in tables: as numbers of days since the start of 2000, whatever way they are written."""

from __future__ import annotations

import datetime

import numpy as np
import numpy.typing as npt

EPOCH = datetime.datetime(2000, 1, 1)
_DAY = datetime.timedelta(days=1)


SEASONS = tuple(f"{part} of {turn}" for part in ("sine", "cosine") for turn in ("year", "week", "day"))
"""Names of the columns of `seasons`."""


def day_of(text: str) -> float:
    """Days since 2000-01-01, with the time of day as a fraction.

    Read are ISO dates and times (2024-03-01, 2024/03/01, 20240301, 2024-03-01T12:30, with or without a time zone, which
    is applied), and day.month.year (1.3.2024). Month/day/year is not: which is which cannot be told.

    Raises:
        ValueError: it is none of them.

    """
    text = text.strip()
    if text.count(".") == 2 and ":" not in text:
        day, month, year = (int(part) for part in text.split("."))
        found = datetime.datetime(year, month, day)
    else:
        iso = text.replace("/", "-") if text[4:5] == "/" else text
        found = datetime.datetime.fromisoformat(iso)
    if found.tzinfo is not None:
        found = found.astimezone(datetime.UTC).replace(tzinfo=None)
    return (found - EPOCH) / _DAY


def day_of_time(value: datetime.date | datetime.datetime) -> float:
    """Days since 2000-01-01 of a date or time."""
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return (value - EPOCH) / _DAY


def seasons(days: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where each day stands in its year, its week and its day: sine and cosine of each, shape (n, 6). NaN stays NaN."""
    turns = np.stack([days / 365.2425, (days + 5) / 7, days], axis=1)  # 2000-01-01 was a Saturday
    angles = 2 * np.pi * (turns % 1)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
