"""Where records are kept: one file for each finished item, and one for each job while an item is not finished."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from adadp_lab.paper.item import Item, Record
from adadp_lab.report.records import version, write


class Records:
    """A folder of results. `NAME.json` holds an item's records, `.jobs/KEY.json` what was run so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder / ".jobs"

    def keep(self, key: str, record: Record) -> None:
        """Note what a job returned, at once: an interrupted run goes on from here."""
        write(self.scratch / f"{key}.json", json.dumps({"key": key, **record}))

    def known(self) -> dict[str, Record]:
        """Every record that is here, by its job's key."""
        found: dict[str, Record] = {}
        for path in sorted(self.scratch.glob("*.json")):
            record = _read(path)
            if "key" in record:
                found[record["key"]] = record
        for path in sorted(self.folder.glob("*.json")):
            found |= {record["key"]: record for record in _read(path).get("records", ())}
        return found

    def of(self, item: Item) -> list[Record]:
        """A finished item's records; none where it was never finished."""
        return list(_read(self._path(item)).get("records", ()))

    def is_quick(self, item: Item) -> bool | None:
        """Whether the item's records are of a quick run; None where there are none."""
        found = _read(self._path(item))
        return bool(found.get("quick", False)) if found else None

    def forget(self, item: Item, keys: Collection[str]) -> None:
        """Drop an item's records, so that they are made again; those of another machine stay."""
        beside = [record for record in self.of(item) if record["key"] not in keys] if item.by_device else []
        self._path(item).unlink(missing_ok=True)
        for key in keys:
            (self.scratch / f"{key}.json").unlink(missing_ok=True)
        if beside:
            self.finish(item, beside)

    def _path(self, item: Item) -> Path:
        return self.folder / f"{item.name}.json"

    def finish(self, item: Item, records: Sequence[Record], *, quick: bool = False) -> None:
        """Write an item's file, one line for each record."""
        head: dict[str, Any] = {
            "item": item.name, "title": item.title, "paper": item.where, "command": item.command, "quick": quick,
            "versions": {
                "adadp": version("adadp") or "not installed", "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }  # fmt: skip
        lines = ",\n  ".join(json.dumps(record, separators=(",", ":")) for record in records)
        text = json.dumps(head, indent=1)[:-2] + f',\n "records": [\n  {lines}\n ]\n}}\n'
        write(self._path(item), text)


def _read(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is not there or was damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError:
        warnings.warn(f"{path} is not readable and is ignored", stacklevel=2)
        return {}
