"""From records to pages: every item's table and figures, and CLAIMS.md. Nothing is run here."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.image import imread

from adadp import algorithms
from adadp_lab.paper import claims_page
from adadp_lab.paper.item import Finding, Item, Options, Record
from adadp_lab.paper.paper_records import Records
from adadp_lab.report.figures import save


def render(items: Mapping[str, Item], records: Records, out: Path, claims: Path) -> list[str]:
    """Write NAME.md, and the figures as SVG and PNG, for every item that has records; then CLAIMS.md.

    Returns the names of the items that have none.
    """
    found: list[Finding] = []
    owners: dict[str, str] = {}
    missing = []
    for item in items.values():
        kept = records.of(item)
        if not kept:
            missing.append(item.name)
            continue
        report = item.report(kept)
        found += report.findings
        owners |= {finding.claim: item.name for finding in report.findings}
        figures = "".join(f"\n![{name}]({name}.svg)\n" for name in report.figures)
        page = f"# {item.title} ({item.where})\n\n`{item.command}`\n\n{report.text}\n{figures}"
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{item.name}.md").write_text(page)
        for name, figure in report.figures.items():
            save(figure, out, name)
    claims.parent.mkdir(parents=True, exist_ok=True)
    claims.write_text(claims_page.write(found, owners))
    return missing


def check(items: Mapping[str, Item], records: Records, claims: Path) -> list[str]:
    """What differs when everything is made again from the records: an empty list where nothing does.

    Records have to be those of the jobs that an item has today. Pages are compared letter by letter; SVGs, but for
    embedded bitmaps, number by number (places on the page, in points) to a tenth; in PNGs two pixels of a thousand may
    differ by more than an eighth: libraries round differently.
    """
    differing = [f"{item.name}: {found}" for item in items.values() if (found := _stale(item, records))]
    with tempfile.TemporaryDirectory() as folder:
        anew = Path(folder)
        render(items, records, anew, anew / "CLAIMS.md")
        for path in sorted(anew.iterdir()):
            committed = claims if path.name == "CLAIMS.md" else records.folder / path.name
            if not committed.exists():
                differing.append(f"{committed} is missing")
            elif not _SAME[path.suffix](path, committed):
                differing.append(f"{committed} differs")
        known = {path.name for path in anew.iterdir()} | {f"{name}.json" for name in items}
        differing += [
            f"{path} belongs to no item" for path in sorted(records.folder.glob("*.*"))
            if path.name not in known and not path.name.startswith(".")
        ]  # fmt: skip
    return differing


_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_BITMAP = re.compile(r'data:image/png;base64,[^"]*')
_NAME = re.compile(r'(id="|url\(#|href="#)[\w-]*')


def same_drawing(one: str, other: str) -> bool:
    """Whether two SVGs show the same, number by number to a tenth of a point."""
    texts = [_NAME.sub(r"\1", _BITMAP.sub("", text)) for text in (one, other)]
    if _NUMBER.sub("#", texts[0]) != _NUMBER.sub("#", texts[1]):
        return False
    pairs = zip(*(map(float, _NUMBER.findall(text)) for text in texts), strict=True)
    return all(abs(a - b) <= 0.1 for a, b in pairs)


def _same_pixels(one: Path, other: Path) -> bool:
    images = [imread(path) for path in (one, other)]
    if images[0].shape != images[1].shape:
        return False
    return float((abs(images[0] - images[1]).max(-1) > 32 / 255).mean()) <= 0.002


_SAME: dict[str, Callable[[Path, Path], bool]] = {
    ".md": lambda one, other: one.read_text() == other.read_text(),
    ".svg": lambda one, other: same_drawing(one.read_text(), other.read_text()),
    ".png": _same_pixels,
}


def _stale(item: Item, records: Records) -> str:
    """Whether records are those of other settings than today's."""
    kept = records.of(item)
    if not kept:
        return ""
    devices = ("cpu", "cuda") if item.by_device else ("cpu",)
    seeds = 1 + max(record["seed"] for record in kept)
    wanted = [{job.key for job in item.jobs(Options(seeds, device=device))} for device in devices]
    found = {record["key"] for record in kept}
    known = set().union(*wanted)
    whole = any(keys <= found for keys in wanted)
    if not (found <= known and whole):
        return "its records were made with other settings than today's"
    other = sorted({r["settings"]["who"] for r in kept if r["work"] == "train" and not _of_today(r)})
    return f"{', '.join(other)} ran with other defaults than today's: run it again with --force" if other else ""


def _of_today(record: Record) -> bool:
    """Whether a run's settings, all of them, are those that its algorithm would have now."""
    said, used = record["settings"], record["used"]
    now = algorithms.create(said["algorithm"], said.get("reading"), said.get("set")).settings
    return all(value is None or used[key] == _rounded(value) for key, value in now.items()) and set(now) == set(used)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
