"""The site's hook (mkdocs.yml): what pages link to outside docs/ becomes part of the site, and links lead there.

Pages are written for readers of the repository: they link to `../results/bench/tables.md` or `../examples/table.py` as
files. Here every such file is added under its path in the repository: Markdown, programs and notebooks as pages,
everything else as it is. A link to a file that does not exist is a warning, and so an error.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?=\))")
NAMED = re.compile(r"\[(?P<text>[\w./-]+\.md)\]\((?P<target>[^)\s#]+\.md)(?P<anchor>#[^)\s]*)?\)")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
FENCED = re.compile(r"^(?P<fence>```+).*?^(?P=fence)$", re.MULTILINE | re.DOTALL)

#: The path in the repository of each page that is not in docs/.
HOMES: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what those pages link to, and so on."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        uri, text = waiting.pop()
        for path in _linked(uri, text):
            added = _uri(path)
            if files.get_file_from_path(added) is not None:
                continue
            HOMES[added] = path
            content = _content(ROOT / path)
            files.append(File.generated(config, added, content=content))
            if isinstance(content, str):
                waiting.append((added, content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        path = _path(here, link["target"])
        if path is None:
            return link[0]
        there = posixpath.relpath(_uri(path), posixpath.dirname(here) or ".")
        return f"{link['before']}{there}{link['anchor'] or ''}"

    def titled(link: re.Match[str]) -> str:
        title = _title(_path(here, link["target"]))
        return f"[{title or link['text']}]({link['target']}{link['anchor'] or ''})"

    return _outside_code(markdown, lambda text: LINK.sub(moved, NAMED.sub(titled, text)))


def _title(path: str | None) -> str | None:
    """What a page is called: a link whose text is its file's name reads better so where there are no files."""
    if path is None or not (ROOT / path).is_file():
        return None
    found = TITLE.search((ROOT / path).read_text())
    return None if found is None else found[1]


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


def _linked(uri: str, markdown: str) -> set[str]:
    """Paths of the files outside docs/ to which a page links."""
    paths = {_path(uri, link["target"]) for link in LINK.finditer(FENCED.sub("", markdown))}
    return {path for path in paths if path is not None and not path.startswith("docs/") and (ROOT / path).is_file()}


def _path(uri: str, target: str) -> str | None:
    """Where in the repository a page's link leads; None for links to elsewhere, and within the page."""
    if not target or ":" in target:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(HOMES.get(uri, f"docs/{uri}")), target))


def _uri(path: str) -> str:
    """The page or file of the site that shows a file of the repository."""
    if path == "README.md":  # a README would be taken for the site's front page, which is docs/index.md
        return "overview.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.md" if path.endswith((".py", ".ipynb")) else path


def _content(file: Path) -> str | bytes:
    if file.suffix == ".ipynb":
        return _notebook(file)
    if file.suffix == ".py":
        return f"# {file.name}\n\n```python\n{file.read_text()}```\n"
    return file.read_text() if file.suffix == ".md" else file.read_bytes()


def _notebook(file: Path) -> str:
    """An executed notebook as Markdown: its texts, its code, and what that printed or drew."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"
