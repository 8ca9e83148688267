"""From records to pages: every item's table and figures, and CLAIMS.md. Nothing is run here."""

from __future__ import annotations

import operator
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from adadp.reproduce import drawing, ledger_of_claims
from adadp.reproduce.item import Finding, Item
from adadp.reproduce.records import Records


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
            drawing.save(figure, out, name)
    claims.parent.mkdir(parents=True, exist_ok=True)
    claims.write_text(ledger_of_claims.write(found, owners))
    return missing


def check(items: Mapping[str, Item], records: Records, claims: Path) -> list[str]:
    """What differs when everything is made again from the records: an empty list where nothing does.

    Pages are compared letter by letter. SVGs are compared after embedded bitmaps are taken out, with numbers (places on
    the page, in points) to a tenth: libraries round differently. PNGs are not compared, only that they are there.
    """
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        anew = Path(folder)
        render(items, records, anew, anew / "CLAIMS.md")
        for path in sorted(anew.iterdir()):
            committed = claims if path.name == "CLAIMS.md" else records.folder / path.name
            if not committed.exists():
                differing.append(f"{committed} is missing")
            elif path.suffix in _SAME and not _SAME[path.suffix](path.read_text(), committed.read_text()):
                differing.append(f"{committed} differs")
        known = {path.name for path in anew.iterdir()} | {f"{name}.json" for name in items}
        differing += [
            f"{path} belongs to no item" for path in sorted(records.folder.glob("*.*"))
            if path.name not in known and not path.name.startswith(".")
        ]  # fmt: skip
    return differing


_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_BITMAP = re.compile(r'data:image/png;base64,[^"]*')
_NAME = re.compile(r'(id="|#)[\w-]*')


def same_drawing(one: str, other: str) -> bool:
    """Whether two SVGs show the same, number by number to a tenth of a point."""
    texts = [_NAME.sub(r"\1", _BITMAP.sub("", text)) for text in (one, other)]
    if _NUMBER.sub("#", texts[0]) != _NUMBER.sub("#", texts[1]):
        return False
    pairs = zip(*(map(float, _NUMBER.findall(text)) for text in texts), strict=True)
    return all(abs(a - b) <= 0.1 for a, b in pairs)


_SAME = {".md": operator.eq, ".svg": same_drawing}
