"""What was spent, as plain values that travel with weights and optimizer states.

    {"version": 1, "runs": [{"uid": ..., "dataset": ..., "unit": ..., "neighbours": ...,
                             "events": [[event, count], ...], "assumptions": [...], "reasons": [...],
                             "untried": [...], "filter": ...}, ...]}

Only str, int, float, list, dict and None, so that `torch.load(weights_only=True)` and JSON read it. A run is known by
its `uid` wherever it goes. `filter` is None, or the privacy filter that admitted the run: runs that were chosen after
seeing earlier ones cost the whole of their filter's budget, whatever they used of it (an odometer is no filter).

Guarantee: what cannot be read completely is refused, never skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adadp.accounting.composition import Canonical, canonical
from adadp.accounting.events import Event, Neighbours, RenyiBlock, Uncovered, event_from_json, event_to_json
from adadp.accounting.remarks import NO_REMARKS, Remarks
from adadp.errors import ConfigurationError

VERSION = 1
DEFAULT_UNIT = "one example"

_KEYS = {"uid", "dataset", "unit", "neighbours", "events", "assumptions", "reasons", "untried"}


@dataclass(frozen=True)
class FilterOrigin:
    """The filter of the ledger in which a run was made: one for all runs of that ledger, so it is charged once."""

    uid: str
    order: float
    divergence: float

    @property
    def event(self) -> RenyiBlock:
        """Its whole budget."""
        return RenyiBlock(self.order, self.divergence)


@dataclass(frozen=True)
class CarriedRun:
    """One run's cost, wherever it was made."""

    uid: str
    dataset: str | None
    unit: str
    neighbours: Neighbours
    counts: Canonical
    remarks: Remarks = NO_REMARKS
    filter: FilterOrigin | None = None

    def same_as(self, dataset: str | None) -> bool:
        """Whether its data is (or may be) that of `dataset`: without a name it may be any."""
        return self.dataset is None or dataset is None or self.dataset == dataset

    def joined(self, other: CarriedRun) -> CarriedRun:
        """Both copies of one run in one: of each event the larger count, since the later copy holds the earlier."""
        mine = (self.uid, self.dataset, self.unit, self.neighbours, self.filter)
        theirs = (other.uid, other.dataset, other.unit, other.neighbours, other.filter)
        if mine != theirs:
            raise ConfigurationError(f"one run comes in two versions, {mine} and {theirs}: one of them was edited")
        counts = larger(dict(self.counts), dict(other.counts))
        remarks = self.remarks.joined(other.remarks)
        return CarriedRun(self.uid, self.dataset, self.unit, self.neighbours, canonical(counts), remarks, self.filter)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        remarks = self.remarks.to_json()
        del remarks["notes"]  # about the course of a run, not about what its weights rest on
        origin = self.filter
        return {
            "uid": self.uid,
            "dataset": self.dataset,
            "unit": self.unit,
            "neighbours": str(self.neighbours),
            "events": [[event_to_json(event), count] for event, count in self.counts],
            **remarks,
            "filter": None
            if origin is None
            else {"uid": origin.uid, "order": origin.order, "divergence": origin.divergence},
        }

    @classmethod
    def from_json(cls, value: Any) -> CarriedRun:
        """The inverse of `to_json`. Raises `ConfigurationError` for anything else."""
        row = _mapping("a run", value)
        missing, unknown = sorted(_KEYS - set(row)), sorted(set(row) - _KEYS - {"filter"})
        if missing or unknown:
            raise ConfigurationError(f"a run lacks {missing or 'nothing'} and has {unknown or 'nothing'} besides")
        dataset = None if row["dataset"] is None else _text("dataset", row["dataset"])
        pairs = [_pair(each) for each in _list("events", row["events"])]
        return cls(
            _text("uid", row["uid"]),
            dataset,
            _text("unit", row["unit"]),
            Neighbours(row["neighbours"]),
            canonical(pairs),
            Remarks.of(row["assumptions"], row["reasons"], row["untried"]),
            _origin(row.get("filter")),
        )


def larger(first: Mapping[Event, int], second: Mapping[Event, int]) -> dict[Event, int]:
    """Of each event the larger count."""
    return {event: max(first.get(event, 0), second.get(event, 0)) for event in {**first, **second}}


def spending_to_json(runs: Iterable[CarriedRun]) -> dict[str, Any]:
    """All runs as plain values."""
    values = {"version": VERSION, "runs": [run.to_json() for run in runs]}
    plain: dict[str, Any] = json.loads(json.dumps(values))  # numpy's floats are floats, but weights_only knows them not
    return plain


def spending_from_json(value: Any) -> tuple[CarriedRun, ...]:
    """The inverse of `spending_to_json`. Raises `ConfigurationError` with what is wrong."""
    values = _mapping("it", value)
    if set(values) != {"version", "runs"} or type(values["version"]) is not int:
        raise ConfigurationError(f"it has the keys {sorted(map(str, values))}, not 'version' and 'runs'")
    if values["version"] != VERSION:
        raise ConfigurationError(f"it is of version {values['version']}, and this adadp reads version {VERSION}")
    runs = tuple(CarriedRun.from_json(each) for each in _list("runs", values["runs"]))
    if len({run.uid for run in runs}) != len(runs):
        raise ConfigurationError("one run is listed twice")
    origins = {run.filter.uid: run.filter for run in runs if run.filter is not None}
    if any(run.filter is not None and run.filter != origins[run.filter.uid] for run in runs):
        raise ConfigurationError("one privacy filter comes in two versions")
    return runs


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is not a table of values but {value!r}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigurationError(f"{name} must be a list, not {value!r}")
    return list(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be a text that is not empty, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{name} must be a finite number, not {value!r}")
    return value


def _pair(value: Any) -> tuple[Event, int]:
    pair = _list("an event and its count", value)
    if len(pair) != 2 or type(pair[1]) is not int or pair[1] < 1:
        raise ConfigurationError(f"not an event and how often it happened (a whole number >= 1): {value!r}")
    return _event(pair[0]), pair[1]


def _event(value: Any) -> Event:
    event = event_from_json(_mapping("an event", value))
    if isinstance(event, Uncovered):
        _text("the reason of an uncovered event", event.reason)
        if event.claimed is not None:
            _event(value["claimed"])
        return event
    for name, number in value.items():
        if name != "kind":
            _number(name, number)
        if name in ("examples", "lot") and type(number) is not int:
            raise ConfigurationError(f"{name} must be a whole number, not {number!r}")
    return event


def _origin(value: Any) -> FilterOrigin | None:
    if value is None:
        return None
    row = _mapping("filter", value)
    if set(row) != {"uid", "order", "divergence"}:
        raise ConfigurationError(f"filter has the keys {sorted(map(str, row))}")
    origin = FilterOrigin(
        _text("uid", row["uid"]), _number("order", row["order"]), _number("divergence", row["divergence"])
    )
    _ = origin.event  # refuses an order or divergence that has no meaning
    return origin
