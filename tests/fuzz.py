"""Damage for files: what disks, copies, editors and strangers do to bytes. For tests of whatever reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st

from adadp.errors import PrivacyError

Result = TypeVar("Result")

#: Bytes that formats give a meaning.
TELLING = [
    b"",
    b"\0",
    b"\xff" * 4,
    b"\x7f\xff\xff\xff",
    b"\n",
    b'"',
    b",",
    b"[" * 3000,
    b"{",
    b"NaN",
    b"-1",
    b"9" * 30,
    b"PAR1",
]

KINDS = ["cut", "flip", "flip", "replace", "put in", "remove", "double", "swap", "stranger"]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` after one to three accidents: cut short, bits flipped, parts replaced, doubled, moved or put in."""
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            break
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        kind = draw(st.sampled_from(KINDS))
        if kind == "cut":
            content = content[:first]
        elif kind == "flip":
            place = min(first, len(content) - 1)
            content = content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
        elif kind == "replace":
            content = content[:first] + draw(st.binary(max_size=40)) + content[last:]
        elif kind == "put in":
            content = content[:first] + draw(st.sampled_from(TELLING)) + content[first:]
        elif kind == "remove":
            content = content[:first] + content[last:]
        elif kind == "double":
            content = content[:last] + content[first:]
        elif kind == "swap":
            content = content[last:] + content[first:last] + content[:first]
        else:
            content = draw(st.binary(max_size=200))
    return content


def read_or_refused(read: Callable[[], Result], path: Path) -> Result | None:
    """What `read` returns, or None if it refused with an error of `adadp.errors` that names the file or its folder."""
    try:
        return read()
    except PrivacyError as error:
        text = str(error)
        assert path.name in text or path.parent.name in text, f"the refusal does not name the file: {text}"
        assert len(text) > len(str(path)) + 10, f"the refusal gives no cause: {text}"
        return None
