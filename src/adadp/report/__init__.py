"""Reports on runs of `adadp train`: one page about one run, or about several side by side.

    report("runs/digits-adadp-1")                           # -> runs/digits-adadp-1/report.html

`run` reads a folder and knows what may be shown; `attacker`, `spending` and `signal` compute what follows from
guarantees and released values; `figures` and `page` say it in blocks; `html`, `markdown` and `values` are the formats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from adadp.errors import ConfigurationError, PrivacyError
from adadp.report.facts import facts_of
from adadp.report.html import to_html
from adadp.report.markdown import to_markdown
from adadp.report.page import page_of
from adadp.report.values import to_values
from adadp.training.run_files import UNKNOWN, run_file

FORMATS = ("html", "md", "json")


def text_of(folders: Sequence[str | Path], *, format: str = "html", public: bool = False) -> str:
    """The report on these runs as text. Arguments as in `report`."""
    if format not in FORMATS:
        raise ConfigurationError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    try:
        facts = facts_of(folders, public=public)
        if format == "json":
            return json.dumps(to_values(facts, public=public), indent=2, allow_nan=False) + "\n"
        page = page_of(facts, public=public)
        return to_html(page) if format == "html" else to_markdown(page)
    except PrivacyError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values that no run writes. Each file is read with care; what is left is refused, not half told.
        names = ", ".join(map(str, folders))
        raise ConfigurationError(f"{names} cannot be told: a file is damaged ({error})") from error


def report(
    *folders: str | Path, out: str | Path | None = None, format: str = "html", public: bool = False
) -> Path:  # fmt: skip
    """Write the report on one run, or on several side by side.

    Args:
        folders: of the runs.
        out: the file. None is `report.html` (.md, .json) in the first folder, or `report-public.html` with `public`.
        format: html (one file that needs nothing else), md or json.
        public: whether it may be published: all that may not be is left out (docs/threat-model.md).

    Returns:
        The file that was written.

    Raises:
        ConfigurationError: a folder is none of a run; a run has not ended and `public` is asked for; or the file cannot
            be written.

    Guarantee:
        With `public`, everything in the file comes from files that may be published, or from figures on held-out rows
        that were paid for or come from a published test set. Without it, it is for the curator only.

    """
    text = text_of(folders, format=format, public=public)
    name = f"report{'-public' if public else ''}.{format}"
    path = Path(folders[0]) / name if out is None else Path(out)
    if path.exists() and not _is_report(path, format):
        raise ConfigurationError(
            f"out must be a new file or an earlier report, and {path} is neither: a ledger or data would be lost"
        )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"out must be a file that can be written, and {path} is not: {error.strerror}"
        ) from None
    return path


def _is_report(path: Path, format: str) -> bool:
    """Whether a file may be an earlier report, by its name: other files of a run and of other types are not."""
    return path.suffix == f".{format}" and (run_file(path.name) is UNKNOWN or path.name.startswith("report"))


__all__ = ["FORMATS", "report", "text_of"]
