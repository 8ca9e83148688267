"""A report as Markdown: figures are tables of their numbers. Text from elsewhere is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from adadp.report.blocks import Beside, Block, Cards, Code, Figures, Folded, Items, Notice, Page, Table, Text

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def to_markdown(page: Page) -> str:
    """The whole file."""
    lines = [f"# {_text(page.title)}", "", _text(page.subtitle), ""]
    for section in page.sections:
        if section.title:
            lines += [f"## {_text(section.title)}", ""]
        lines += _blocks(section.blocks)
    return "\n".join([*lines, _text(page.footer)]) + "\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        yield from _block(block)
        yield ""


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield _text(block.text)
    elif isinstance(block, Notice):
        yield f"> **{_text(block.title)}.** {_text(block.text)}".rstrip()
        yield from (f"> - {_text(item)}" for item in block.items)
    elif isinstance(block, Cards):
        rows = [[card.label, card.value, card.text] for card in block.cards]
        yield from _table(["", "", ""], rows)
    elif isinstance(block, Items):
        yield from ([f"{_text(block.title)}:", ""] if block.title else [])
        yield from (f"- {_text(item)}" for item in block.items)
    elif isinstance(block, Table):
        yield from _table(block.columns, block.rows)
    elif isinstance(block, Code):
        yield from (f"    {line}" for line in block.text.splitlines())
    elif isinstance(block, Figures):
        for figure in block.figures:
            yield from (f"### {_text(figure.title)}", "")
            yield from _table(*figure.table)
            yield from ("", *(_text(text) for text in (figure.warning, figure.note) if text), "")
    elif isinstance(block, Beside):
        yield from _blocks([*block.blocks, Figures(block.figures)])
    else:
        assert isinstance(block, Folded)
        yield from (f"### {_text(block.title)}", "")
        yield from _blocks(block.blocks)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(columns)
    yield _row(["---"] * len(columns), escaped=True)
    yield from (_row(row) for row in rows)


def _row(cells: Sequence[str], *, escaped: bool = False) -> str:
    return "| " + " | ".join(cell if escaped else _text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would take for markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
