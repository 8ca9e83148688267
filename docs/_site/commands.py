"""The site's hook for docs/api/commands.md: every command with its options, read from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.pages import Page
from typer.main import get_command

from adadp.cli import app


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str | None:
    if page.file.src_uri != "api/commands.md":
        return None
    return "\n".join([markdown, *_described(get_command(app), "adadp", None)])


def _described(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=name)
    for child_name in command.list_commands(context):
        child = command.get_command(context, child_name)
        called = f"{name} {child_name}"
        if hasattr(child, "list_commands"):
            yield from _described(child, called, context)
            continue
        arguments = [f" {p.name.upper()}" for p in child.params if p.param_type_name == "argument"]
        yield f"\n## {called}{''.join(arguments)}\n\n{_line(child.help or '')}\n"
        options = [p for p in child.params if p.param_type_name == "option" and not p.hidden]
        if options:
            yield "| option | meaning |\n| --- | --- |"
            yield from (_row(option) for option in options)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    meaning = option.help or ""
    told = meaning.endswith("]") or option.is_flag or option.default in (None, []) or callable(option.default)
    return f"| {names} | {_line(meaning if told else f'{meaning} [{option.default}]')} |"


def _line(text: str) -> str:
    return re.sub(r"([|<\[\]*])", r"\\\1", " ".join(text.split()))
