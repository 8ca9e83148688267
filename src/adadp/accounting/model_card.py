"""The part of a model card (README.md) that says what the training promises: one writer for every card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from adadp.accounting.guarantee import Guarantee, plain_markdown, round_up

_BEGIN, _END = "<!-- adadp: privacy -->", "<!-- adadp: end of privacy -->"
_SECTION = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
_NONE = (
    "> **This model has no privacy guarantee.** Nothing is promised to the people whose data it was trained on: its "
    "weights may give their records away. Treat it as you treat the data, and do not publish it."
)


def front_matter(values: Mapping[str, str | Sequence[str]]) -> str:
    """The YAML block at the head of a card. Values are fixed words of this library, never text of a user's."""
    lines = []
    for key, value in values.items():
        lines += [f"{key}: {value}"] if isinstance(value, str) else [f"{key}:", *(f"- {each}" for each in value)]
    return "\n".join(["---", *lines, "---", ""])


def privacy_section(guarantee: Guarantee, own: Guarantee | None = None, *, since: str = "") -> str:
    """What may be said, as Markdown between two marks.

    Args:
        guarantee: for everything that was released on the data.
        own: for this run alone, where there are others on the data.
        since: which releases `guarantee` is about, as a sentence.

    """
    lines = [_BEGIN, "## Privacy", ""]
    if guarantee.epsilon is None:
        lines += [_NONE, ""]
    lines += [plain_markdown(guarantee.sentence()), ""]
    if since:
        lines += [since, ""]
    if own is not None and own.epsilon is not None and guarantee.epsilon is not None:
        lines += [
            f"This run alone, as if nothing else had been released on the data: epsilon {round_up(own.epsilon)} at "
            f"delta {round_up(own.delta)}. The number in the table, for everything on the data, is the one that its "
            "people are promised.",
            "",
        ]
    return "\n".join([*lines, guarantee.to_markdown(), _END, ""])


def write_into(folder: str | Path, guarantee: Guarantee) -> None:
    """Write the guarantee into the folder's README.md, in place of an earlier one; all else stays."""
    path = Path(folder) / "README.md"
    before = path.read_text(encoding="utf-8") if path.exists() else front_matter({"tags": ["differential-privacy"]})
    section = privacy_section(guarantee)
    path.write_text(_SECTION.sub("\n", before).rstrip("\n") + "\n\n" + section, encoding="utf-8")
