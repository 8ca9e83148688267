"""Where records are kept: one file for each finished item, and one for each job while an item is not finished."""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from adadp.reproduce.item import Item, Record


class Records:
    """A folder of results. `NAME.json` holds an item's records, `.jobs/KEY.json` what was run so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder / ".jobs"

    def keep(self, key: str, record: Record) -> None:
        """Note what a job returned, at once: an interrupted run goes on from here."""
        _write(self.scratch / f"{key}.json", json.dumps({"key": key, **record}))

    def known(self, forget: Iterable[Item] = ()) -> dict[str, Record]:
        """Every record that is here, by its job's key, but for those of the items that are to be run again."""
        found: dict[str, Record] = {}
        for path in sorted(self.scratch.glob("*.json")):
            record = json.loads(path.read_text())
            found[record["key"]] = record
        for path in sorted(self.folder.glob("*.json")):
            found |= {record["key"]: record for record in json.loads(path.read_text()).get("records", ())}
        for item in forget:
            for record in self.of(item):
                found.pop(record["key"], None)
        return found

    def of(self, item: Item) -> list[Record]:
        """A finished item's records; none where it was never finished."""
        path = self.folder / f"{item.name}.json"
        return list(json.loads(path.read_text())["records"]) if path.exists() else []

    def is_quick(self, item: Item) -> bool | None:
        """Whether the item's records are of a quick run; None where there are none."""
        path = self.folder / f"{item.name}.json"
        return bool(json.loads(path.read_text()).get("quick", False)) if path.exists() else None

    def finish(self, item: Item, records: Sequence[Record], *, quick: bool = False) -> None:
        """Write an item's file, one line for each record."""
        head: dict[str, Any] = {
            "item": item.name, "title": item.title, "paper": item.where, "command": item.command, "quick": quick,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }  # fmt: skip
        lines = ",\n  ".join(json.dumps(record, separators=(",", ":")) for record in records)
        text = json.dumps(head, indent=1)[:-2] + f',\n "records": [\n  {lines}\n ]\n}}\n'
        _write(self.folder / f"{item.name}.json", text)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
