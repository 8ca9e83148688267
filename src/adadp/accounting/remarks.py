"""What is known about a run besides its releases, in words: the four lists that a guarantee prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from adadp.errors import ConfigurationError


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    # A single string is a sequence of strings too, of one letter each.
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigurationError(f"{name} must be a list of texts, not {values!r}")
    for text in values:
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"{name} must hold texts that are not empty, not {text!r}")
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class Remarks:
    """Texts in the order in which they came up, each once.

    `assumptions`: what the guarantee rests on. `reasons`: why there is none; one suffices. `untried`: what could not
    be tried before training started. `notes`: anything else that a reader should know.
    """

    assumptions: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _texts(each.name, getattr(self, each.name)))

    @classmethod
    def of(
        cls,
        assumptions: Sequence[str] = (),
        reasons: Sequence[str] = (),
        untried: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> Remarks:
        """From any sequences of texts. A single text is refused: it would be taken for a list of letters."""
        given = {"assumptions": assumptions, "reasons": reasons, "untried": untried, "notes": notes}
        return cls(**{name: _texts(name, values) for name, values in given.items()})

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def joined(self, other: Remarks) -> Remarks:
        """These, and then what `other` adds."""
        return Remarks(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def without(self, other: Remarks) -> Remarks:
        """What `other` does not have."""
        return Remarks(
            **{
                each.name: tuple(text for text in getattr(self, each.name) if text not in getattr(other, each.name))
                for each in fields(self)
            }
        )

    def to_json(self) -> dict[str, list[str]]:
        """Plain lists, by name."""
        return {each.name: list(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Remarks:
        """The inverse of `to_json`; what is missing is empty, and other keys are not looked at."""
        return cls.of(**{each.name: values.get(each.name, ()) for each in fields(cls)})


NO_REMARKS = Remarks()
