"""Where the examples are in what a layer or an operation is given: learnt once, from runs with different lots.

A length may equal the number of examples by chance, so no shape of one run tells. `Readings` compares what the same
place of the model saw with n examples and with n - 1: rows that follow the number of examples are examples (alone, or
folded with the tokens of each), and what stays the same has none (positions, tables, masks).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from adadp.errors import PrivacyError, UnsupportedModuleError

Kind = Literal["rows", "free", "at"]
Reading = tuple[Kind, int]
"""`("rows", m)`: m rows for each example, one after the other. `("free", 0)`: no examples. `("at", d)`: an expansion
over the examples, which become dimension d."""

FREE: Reading = ("free", 0)
ONE_ROW: Reading = ("rows", 1)


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


@dataclass(frozen=True)
class Situation:
    """What decides how a pass goes through the model, the number of examples apart.

    Attributes:
        module: the outermost module's name.
        shapes: of the tensors that it is given, without their first dimension.
        trained: for each parameter whether it is trained.
    """

    module: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    trained: tuple[bool, ...] = ()


@dataclass
class _Session:
    seen: dict[Hashable, list[Reading]] = field(default_factory=dict)  # what all runs so far allow
    grown: bool = False  # whether a run met something free of examples, which the next one makes a shared value


class Readings:
    """The readings of one module tree, by situation.

    Attributes:
        situation: that of the pass that runs.
        plain: every place that was learnt was given one row for each example, in every situation.
    """

    def __init__(self) -> None:
        self._known: dict[Situation, dict[Hashable, Reading]] = {}
        self._calls: dict[Situation, dict[str, int]] = {}  # how often runs to learn from called a module
        self._rows: list[tuple[str, Tensor | None]] | None = None
        self._session: _Session | None = None
        self.situation = Situation()
        self.plain = True

    @property
    def learning(self) -> bool:
        """Whether runs are made to learn from; nothing is expanded in them."""
        return self._session is not None

    @property
    def learnt(self) -> bool:
        """Whether anything was learnt."""
        return bool(self._known)

    def covers(self) -> bool:
        """Whether the situation was learnt: this one or, where readings are plain, one with other lengths."""
        if self.situation in self._known:
            return True
        return self.plain and self._like_this() is not None

    def _like_this(self) -> Situation | None:
        """A situation with other lengths that serves for this one: no module is called more than once in it."""
        here = self.situation
        if here in self._known:
            return here
        for known in self._known:
            if (here.module, here.trained) == (known.module, known.trained):
                return known if max(self._calls.get(known, {}).values(), default=1) == 1 else None
        return None

    def called(self, module: str, calls: int) -> None:
        """Note how often a module was called in a run to learn from."""
        counts = self._calls.setdefault(self.situation, {})
        counts[module] = max(counts.get(module, 0), calls)

    def tried(self, module: str, call: int) -> bool:
        """Whether runs to learn from had this call of a module (from 0 on)."""
        situation = self._like_this()
        return situation is not None and call < self._calls.get(situation, {}).get(module, 0)

    @contextmanager
    def rows_seen(self) -> Iterator[list[tuple[str, Tensor | None]]]:
        """Collect what is read as the examples' rows in the runs inside, [n, ...]; None for what cannot be theirs."""
        self._rows = []
        try:
            yield self._rows
        finally:
            self._rows = None

    def saw(self, module: str, rows: Tensor | None) -> None:
        """Note what is read as the examples' rows."""
        if self._rows is not None:
            self._rows.append((module, None if rows is None else rows.detach().clone()))

    def begin(self) -> None:
        """The runs that follow are to be learnt from."""
        self._session, self.plain = _Session(), False

    def settled(self) -> bool:
        """Whether the runs since the last call told nothing that others depend on."""
        assert self._session is not None
        grown, self._session.grown = self._session.grown, False
        return not grown

    def end(self) -> None:
        """Keep what was learnt, for the situation of the last run; what is known of it already stays."""
        session, self._session = self._session, None
        assert session is not None
        found = {key: possible[0] for key, possible in session.seen.items()}
        self._known[self.situation] = found | self._known.get(self.situation, {})
        self._see_whether_plain()

    def abandon(self) -> None:
        """Forget the runs that were to be learnt from."""
        self._session = None
        self._see_whether_plain()

    def known(self) -> Mapping[Situation, dict[Hashable, Reading]]:
        """What was learnt so far."""
        return dict(self._known)

    def forget_since(self, known: Mapping[Situation, dict[Hashable, Reading]]) -> None:
        """Keep only what was known then: the runs since were made with something else taken for the examples."""
        self._known = dict(known)
        self._calls = {situation: calls for situation, calls in self._calls.items() if situation in known}
        self._see_whether_plain()

    def _see_whether_plain(self) -> None:
        self.plain = all(reading == ONE_ROW for known in self._known.values() for reading in known.values())

    def read(self, key: Hashable, possible: Sequence[Reading], *, trial: bool, sure: bool) -> Reading:
        """The reading of a place, of those that the shapes allow (the likeliest first).

        Args:
            key: the place: a module's name first.
            possible: what the shapes allow.
            trial: whether a trial runs, which may begin again.
            sure: whether nothing may be guessed: the examples are those of a lot, and trials come before lots.

        Raises:
            UnlearntError: a trial must learn it first.
            UnreadError: the place was not tried, or the shapes contradict what was learnt.
        """
        if self._session is not None:
            return self._narrowed(self._session, key, possible)
        known = self._known.get(self.situation, {}).get(key)
        if known is None and self.plain:  # lengths do not matter then
            known = next((places[key] for places in self._known.values() if key in places), None)
        if known is not None:
            if known in possible and not (sure and self._ambiguous(key, possible)):
                return known
            raise UnreadError(_CHANGED.format(_name(key)))
        if trial:
            raise UnlearntError(UNTRIED.format(_name(key)))
        if sure:
            raise UnreadError(UNTRIED.format(_name(key)))
        return possible[0]

    def _ambiguous(self, key: Hashable, possible: Sequence[Reading]) -> bool:
        """Whether other calls of the same place are read otherwise, in a way that is possible here: it may be one."""
        assert isinstance(key, tuple)
        known = self._known.get(self.situation, {})
        alike = {reading for other, reading in known.items() if isinstance(other, tuple) and other[:2] == key[:2]}
        return len(alike) > 1 and sum(reading in possible for reading in alike) > 1

    def _narrowed(self, session: _Session, key: Hashable, possible: Sequence[Reading]) -> Reading:
        before = session.seen.get(key)
        both = list(possible) if before is None else [one for one in before if one in possible] or [FREE]
        if both != before:
            session.seen[key] = both
            session.grown |= both[0][0] != "rows"
        return both[0]


def _name(key: Hashable) -> str:
    return str(key[0]) if isinstance(key, tuple) else str(key)


UNTRIED = (
    "{}: an operation on its parameters, or an input without a row for each example, comes at a place that no trial "
    "has seen, so it is not known where its examples are. Name the module in make_private(through_func=[...]), or let "
    "the model take the same path for every batch."
)
_CHANGED = (
    "{}: what it is given has its examples elsewhere than in the lots it was tried on, so its gradients cannot be told "
    "apart by example. Keep examples in the first dimension, or name the module in make_private(through_func=[...])."
)
