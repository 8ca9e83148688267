"""A report as one HTML file: no script, nothing from elsewhere, all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from adadp.report.blocks import (
    Beside,
    Block,
    Cards,
    Code,
    Figure,
    Figures,
    Folded,
    Items,
    Notice,
    Page,
    Section,
    Table,
    Text,
)

# No request leaves the page, whatever came into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_html(page: Page) -> str:
    """The whole file."""
    sections = "\n".join(_section(section) for section in page.sections)
    robots = "" if page.public else '\n<meta name="robots" content="noindex">'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">{robots}
<title>{escape(page.title)}</title>
<link rel="icon" href="data:,">
<style>
{_style()}</style>
</head>
<body class="{"public" if page.public else "curator"}">
<header>
<p class="eyebrow">Privacy report</p>
<h1>{escape(page.title)}</h1>
<p class="subtitle">{escape(page.subtitle)}</p>
</header>
<main>
{sections}
</main>
<footer>{escape(page.footer)}</footer>
</body>
</html>
"""


@cache
def _style() -> str:
    return files("adadp.report").joinpath("page.css").read_text(encoding="utf-8")


def _section(section: Section) -> str:
    title = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    return f"<section>\n{title}{_blocks(section.blocks)}\n</section>"


def _blocks(blocks: Sequence[Block]) -> str:
    return "\n".join(_block(block) for block in blocks)


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Notice):
        text = f"<p>{escape(block.text)}</p>" if block.text else ""
        return f'<div class="notice {block.tone}"><h3>{escape(block.title)}</h3>{text}{_list(block.items)}</div>'
    if isinstance(block, Cards):
        cards = "".join(
            f'<div class="card {card.tone}"><p class="name">{escape(card.label)}</p>'
            f'<p class="value">{escape(card.value)}</p><p class="under">{escape(card.text)}</p></div>'
            for card in block.cards
        )
        return f'<div class="cards">{cards}</div>'
    if isinstance(block, Items):
        return (f"<h3>{escape(block.title)}</h3>" if block.title else "") + _list(block.items)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Code):
        return f"<pre><code>{escape(block.text)}</code></pre>"
    if isinstance(block, Figures):
        return f'<div class="figures">{"".join(map(_figure, block.figures))}</div>'
    if isinstance(block, Beside):
        figures = "".join(map(_figure, block.figures))
        return f'<div class="beside"><div>{_blocks(block.blocks)}</div><div>{figures}</div></div>'
    assert isinstance(block, Folded)
    return f"<details><summary>{escape(block.title)}</summary>\n{_blocks(block.blocks)}\n</details>"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _table(table: Table) -> str:
    def cell(text: str, column: int, tag: str = "td") -> str:
        inside = f"<code>{escape(text)}</code>" if column in table.code and tag == "td" and text else escape(text)
        return f"<{tag}>{inside}</{tag}>"

    head = "".join(cell(text, number, "th") for number, text in enumerate(table.columns))
    rows = []
    for number, row in enumerate(table.rows):
        style = ' class="marked"' if number in table.marked else ""
        rows.append(f"<tr{style}>{''.join(cell(text, column) for column, text in enumerate(row))}</tr>")
    shown = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    style = {2: ' class="pairs"', 3: ' class="triples"' if table.code else ""}.get(len(table.columns), "")
    return f'<div class="scroll"><table{style}>{shown}<tbody>{"".join(rows)}</tbody></table></div>'


def _figure(figure: Figure) -> str:
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><path class="{style} line" d="M1 4H21"/></svg>'
        f"{escape(name)}</li>"
        for style, name in figure.chart.legend
    )
    parts = [
        f"<figcaption><h3>{escape(figure.title)}</h3></figcaption>",
        f'<ul class="legend">{legend}</ul>' if legend else "",
        figure.chart.svg(),
        f'<p class="warn">{escape(figure.warning)}</p>' if figure.warning else "",
        f"<p>{escape(figure.note)}</p>" if figure.note else "",
        f"<details><summary>Numbers</summary>{_table(Table(*figure.table))}</details>",
    ]
    return f"<figure>{''.join(parts)}</figure>"
