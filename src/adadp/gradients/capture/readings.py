"""Where the examples are in what a layer or an operation is given: learnt once, from runs with different lots.

A length may equal the number of examples by chance, so no shape of one run tells. `Readings` compares what the same
place of the model saw with n examples and with n - 1: rows that follow the number of examples are examples (alone, or
folded with the tokens of each), and what stays the same has none (positions, tables, masks).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from adadp.errors import PrivacyError, UnsupportedModuleError

Kind = Literal["rows", "free", "at"]
Reading = tuple[Kind, int]
"""`("rows", m)`: m rows for each example, one after the other. `("free", 0)`: no examples. `("at", d)`: an expansion
over the examples, which become dimension d."""

FREE: Reading = ("free", 0)


class UnreadError(UnsupportedModuleError):
    """Where the examples are is not known: gradients that come through there must not be used."""


class UnlearntError(PrivacyError):
    """A trial met a place of the model whose reading is not known yet. The trial learns it and begins again."""


def of_rows(length: int | None, count: int) -> list[Reading]:
    """The readings of something with `length` rows where there are `count` examples; `length` is None for no rows."""
    if length is None or count == 0:
        return [("rows", 1), FREE] if length == 0 else [FREE]
    return [("rows", length // count), FREE] if length and length % count == 0 else [FREE]


def of_sizes(sizes: Iterable[tuple[int, int]], count: int) -> list[Reading]:
    """The readings of an expansion that makes (dimension, size): which of them may be that of the examples."""
    return [*(("at", place) for place, size in sizes if size == count), FREE]


@dataclass
class _Session:
    seen: dict[Hashable, list[Reading]] = field(default_factory=dict)  # what all runs so far allow
    grown: bool = False  # whether a run met a new place, or ruled something out


class Readings:
    """The readings of one module tree. With `strict` nothing is guessed on a lot: the engine's trials come first.

    `learnt` says whether runs were learnt from. While the readings are `plain`, nothing was, nor is: every layer was
    given a row for each example so far.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Kind | Reading] = {}
        self._session: _Session | None = None
        self.strict = self.learnt = False
        self.plain = True

    @property
    def learning(self) -> bool:
        """Whether runs are made to learn from; nothing is expanded in them."""
        return self._session is not None

    def begin(self) -> None:
        """The runs that follow are to be learnt from."""
        self._session, self.plain = _Session(), False

    def settled(self) -> bool:
        """Whether the runs since the last call told nothing new."""
        assert self._session is not None
        grown, self._session.grown = self._session.grown, False
        return not grown

    def end(self) -> None:
        """Keep what was learnt.

        Raises:
            UnsupportedModuleError: earlier lots were read in another way.
        """
        session, self._session = self._session, None
        assert session is not None
        self.learnt = True
        for key, possible in session.seen.items():
            best = possible[0]
            kept: Kind | Reading = best if best[0] == "at" else best[0]
            if self._known.setdefault(key, kept) != kept:
                raise UnsupportedModuleError(_CHANGED.format(_name(key)))

    def abandon(self) -> None:
        """Forget the runs that were to be learnt from."""
        self._session, self.plain = None, not self._known

    def known(self) -> Mapping[Hashable, Kind | Reading]:
        """What was learnt so far."""
        return dict(self._known)

    def forget_since(self, known: Mapping[Hashable, Kind | Reading]) -> None:
        """Keep only what was known then: the runs since were made with something else taken for the examples."""
        self._known, self.learnt, self.plain = dict(known), bool(known), not known

    def read(self, key: Hashable, possible: Sequence[Reading], *, trial: bool, lot: bool) -> Reading:
        """The reading of a place, of those that the shapes allow (the likeliest first).

        Args:
            key: the place: a module's name first.
            possible: what the shapes allow.
            trial: whether a trial runs, which may begin again.
            lot: whether the examples are those of a lot.

        Raises:
            UnlearntError: a trial must learn it first.
            UnreadError: the place was not tried, or the shapes contradict what was learnt.
        """
        if self._session is not None:
            return self._narrowed(self._session, key, possible)
        known = self._known.get(key)
        if known is None:
            if possible[0] == ("rows", 1):
                return possible[0]  # as layers usually get their input; a trial checks that rows follow the examples
            if trial:
                raise UnlearntError(f"{_name(key)}: not known where its examples are")
            if self.strict and lot:
                raise UnreadError(_UNTRIED.format(_name(key)))
            return possible[0]
        for reading in possible:
            if known in (reading, reading[0]):
                return reading
        raise UnreadError(_CHANGED.format(_name(key)))

    def _narrowed(self, session: _Session, key: Hashable, possible: Sequence[Reading]) -> Reading:
        before = session.seen.get(key)
        if before is None:
            session.seen[key], session.grown = list(possible), True
        else:
            both = [reading for reading in before if reading in possible] or [FREE]
            session.grown |= both != before
            session.seen[key] = both
        return session.seen[key][0]


def _name(key: Hashable) -> str:
    return str(key[0]) if isinstance(key, tuple) else str(key)


_UNTRIED = (
    "{}: an operation on its parameters, or an input without a row for each example, comes at a place that no trial "
    "has seen, so it is not known where its examples are. Name the module in make_private(through_func=[...]), or let "
    "the model take the same path for every batch."
)
_CHANGED = (
    "{}: what it is given has its examples elsewhere than in the lots it was tried on, so its gradients cannot be told "
    "apart by example. Keep examples in the first dimension, or name the module in make_private(through_func=[...])."
)
