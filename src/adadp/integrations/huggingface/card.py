"""The guarantee where a model goes: the model card (README.md) and `trainer_state.json`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from adadp.accounting.guarantee import Guarantee

_BEGIN, _END = "<!-- adadp: privacy -->", "<!-- adadp: end of privacy -->"
_SECTION = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
STATE = "adadp"
"""The guarantee's name among a TrainerState's `stateful_callbacks`."""


def write_into_card(folder: str | Path, guarantee: Guarantee) -> None:
    """Write the guarantee into the folder's README.md, in place of an earlier one; all else stays."""
    path = Path(folder) / "README.md"
    before = path.read_text(encoding="utf-8") if path.exists() else "---\ntags:\n- differential-privacy\n---\n"
    section = f"{_BEGIN}\n## Privacy\n\n{guarantee.sentence()}\n\n{guarantee.to_markdown()}\n{_END}\n"
    path.write_text(_SECTION.sub("\n", before).rstrip("\n") + "\n\n" + section, encoding="utf-8")


def write_into_state(state: Any, guarantee: Guarantee) -> None:
    """Put the guarantee where a TrainerState keeps what callbacks export, and saves it."""
    state.stateful_callbacks[STATE] = {"args": {}, "attributes": {"guarantee": guarantee.to_dict()}}
