"""How many lines of code each package has: `python -m adadp_lab.report.size`, or `make size`.

A line counts if code stands on it. Docstrings, comments and blank lines are no code; a statement that is wrapped over
three lines counts as three.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import adadp
import adadp_lab

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Count the lines of Python source on which code stands."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def by_package(root: Path) -> Counter[str]:
    """Count the lines of code below a package's folder, for each package in it; modules beside them count by name."""
    lines: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        lines[path.relative_to(root).parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    return lines


def main() -> None:
    """Print both packages' lines, largest part first."""
    for package in (adadp, adadp_lab):
        lines = by_package(Path(package.__path__[0]))
        print(f"{package.__name__}: {lines.total()}")
        for name, count in lines.most_common():
            print(f"  {count:6} {name}")


if __name__ == "__main__":
    main()
