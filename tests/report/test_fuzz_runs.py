"""Folders with strange files: a report is made or refused, and nothing strange becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adadp.errors import ConfigurationError
from adadp.report import FORMATS, text_of
from adadp.training.loop import train

FILES = ("config.json", "guarantee.json", "releases.json", "result.json", "history.jsonl", "metrics.jsonl")
STRANGE = st.sampled_from(
    [None, True, -1, 0, 1e308, float("nan"), float("inf"), "", "<script>alert(1)</script>", [], {}, [[1, 2]],
     {"<b>": "<b>"}, "9" * 400, 10**30]
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "run"
    options: dict[str, Any] = {"dataset": "digits", "model": "linear", "steps": 6, "lot": 60, "evaluations": 2}
    train(**options, epsilon=1.0, delta=1e-3, out=str(out))
    return out


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=100)
@given(data=st.data())
def test_strange_values_are_told_or_refused(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    lines = (folder / name).read_text().splitlines() if name.endswith("l") else [(folder / name).read_text()]
    number = data.draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[number])
    lines[number] = json.dumps(_changed(value, data.draw(st.sampled_from(_places(value))), data.draw(STRANGE)))
    public = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "run"
        shutil.copytree(folder, copy)
        (copy / name).write_text("\n".join(lines) + "\n")
        try:
            texts = {format: text_of([copy], format=format, public=public) for format in FORMATS}
        except ConfigurationError:
            return
    assert not re.search(r"<(script|b)\b", texts["html"])
    assert "nan" not in re.findall(r'(?:\bd|cx|cy|x|y)="([^"]*)"', texts["html"])
    json.loads(texts["json"], parse_constant=pytest.fail)
