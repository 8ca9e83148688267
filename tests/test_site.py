"""The site that `make docs` builds: without a warning, without anything from other hosts, with the whole public API."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
API = sorted((ROOT / "docs/api").glob("*.md"))

#: Packages whose `__all__` is public as a whole: each of its names has a place on a page of the API.
PUBLIC = ("adadp", "adadp.losses", "adadp.preprocessing", "adadp.testing", "adadp.training")


def test_the_api_pages_have_every_public_name() -> None:
    described = {name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
    missing = []
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not {f"{package}.{name}", value.__module__} & described:
                missing.append(f"{package}.{name}")
    assert missing == []


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site is built with the extra docs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(ROOT.glob("docs/*.md")))
    loaded = {address for page in pages for address in _loaded(page.read_text())}
    assert loaded, "pages load a style sheet at least"
    assert not [address for address in loaded if re.match(r"(\w+:)?//", address)]


class _Loads(HTMLParser):
    """Collects the addresses that a browser fetches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(given.get("href") or "")
        elif tag != "a":
            self.addresses.append(given.get("src") or "")


def _loaded(html: str) -> list[str]:
    parser = _Loads()
    parser.feed(html)
    return [address for address in parser.addresses if address and not address.startswith("data:")]
