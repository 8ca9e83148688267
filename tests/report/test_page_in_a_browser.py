"""Reports as a browser shows them: drawn, quiet, without a request, on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import MISSING, PROGRAM, Browser, browser

from adadp.report import report
from adadp.training.loop import train

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
LONG = "a-very-long-name-of-a-class-without-any-place-to-break-it-" * 3


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, several, and one without a guarantee whose names are long and hostile."""
    folder = tmp_path_factory.mktemp("pages")
    rows = "\n".join(f"{LONG if i % 2 else '<script>document.title = 1</script>'},{i % 9}" for i in range(300))
    (folder / "own.csv").write_text(f"label,{LONG}\n{rows}\n")
    quick = {"steps": 12, "lot": 60, "model": "linear", "evaluations": 3, "epsilon": 2.0, "delta": 1e-3}
    for name, options in (
        ("sound", {"dataset": "digits"}),
        ("dpsgd", {"dataset": "digits", "algorithm": "dpsgd"}),
        ("own", {"dataset": str(folder / "own.csv"), "reading": "lot"}),
    ):
        train(**{**quick, **options}, out=str(folder / name))
    each = [folder / name for name in ("sound", "dpsgd", "own")]
    return {
        "one": report(each[0]),
        "several": report(*each, out=folder / "several.html"),
        "none": report(each[2]),
        "public": report(each[0], public=True),
    }


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["one", "several", "none", "public"])
def test_it_is_drawn_quietly(name: str, width: int, dark: bool, pages: dict[str, Path], chromium: Browser) -> None:
    chromium.open(pages[name], width=width, dark=dark)
    assert chromium.complaints == []
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []
    assert chromium.value("document.title") not in ("", "1"), "no script of a class name ran"
    assert chromium.value("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
    charts = chromium.value("[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect().width)")
    assert charts
    assert all(width / 4 < found <= width for found in charts)
    luminance = chromium.value("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (luminance < 60) == dark


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_its_ground(dark: bool, pages: dict[str, Path], chromium: Browser) -> None:
    chromium.open(pages["several"], width=1280, dark=dark)
    contrasts = chromium.value(CONTRASTS)
    assert len(contrasts) > 100
    assert [text for text, contrast in contrasts if contrast < 4.5] == [], "WCAG's contrast for text"


def test_no_text_of_a_chart_lies_on_another_or_outside(pages: dict[str, Path], chromium: Browser) -> None:
    for width in (360, 1280):
        chromium.open(pages["several"], width=width)
        assert chromium.value(OVERLAPS) == []


CONTRASTS = """
(() => {
  const light = c => { const p = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126*p[0] + 0.7152*p[1] + 0.0722*p[2]; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
  const texts = [...document.querySelectorAll('p, li, td, th, h1, h2, h3, summary, code, text')];
  return texts.filter(e => e.textContent.trim())
    .map(e => { const s = getComputedStyle(e), own = e.tagName === 'text' ? s.fill : s.color;
      const [a, b] = [light(own), light(ground(e))].sort((x, y) => y - x);
      return [e.textContent.slice(0, 40), (a + 0.05) / (b + 0.05)]; });
})()
"""
OVERLAPS = """
[...document.querySelectorAll('figure > svg')].flatMap(svg => {
  const frame = svg.parentElement.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const wrong = boxes.filter(([, b]) => b.left < frame.left || b.right > frame.right).map(([t]) => 'outside: ' + t);
  boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
    const across = a.left < b.right - 1 && b.left < a.right - 1;
    if (across && a.top < b.bottom - 3 && b.top < a.bottom - 3) wrong.push(t + ' / ' + u); }));
  return wrong;
})
"""
