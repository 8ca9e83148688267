"""What `make_private` does together with the other processes that train a model, if there are any."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from adadp.accounting.ledger import Ledger
from adadp.accounting.run import Run
from adadp.distributed.agreement import ALONE, Agreement, AgreementOfAll
from adadp.distributed.books import Books
from adadp.distributed.group import Group, group_of
from adadp.distributed.settings import ASSUMPTION, refuse_differences
from adadp.distributed.sharded import check_sharded, sharded_of
from adadp.distributed.wrapped import check_wrapper
from adadp.randomness import Randomness


class Together:
    """The processes that train the models of one engine. A process alone does nothing here.

    Attributes:
        group: the processes.
        books: the ledger that they keep; None for a process alone, whose engine keeps its own.

    """

    def __init__(self, group: Group, books: Books | None) -> None:
        self.group, self.books = group, books

    @classmethod
    def training(cls, module: nn.Module, earlier: Together | None, open_ledger: Callable[[], Ledger]) -> Together:
        """The processes that train `module`, with the ledger that process 0 opens. All of them call this."""
        check_wrapper(module)
        check_sharded(module)
        group = group_of(module)
        if earlier is not None and earlier.group is group:
            return earlier
        return cls(group, None if group.alone else Books.opened(group, open_ledger))

    @property
    def assumptions(self) -> list[str]:
        """What a guarantee rests on because there are several processes."""
        return [] if self.books is None else [ASSUMPTION.format(self.group.size)]

    def sharing(self, randomness: Randomness) -> Randomness:
        """The randomness of a run, the same in all processes: they draw the same lots and the same noise."""
        if self.books is None:
            return randomness
        return randomness.sharing(self.group.from_first(partial(secrets.token_bytes, 32)))

    def agree(self, module: nn.Module, dataset: Callable[[], object], settings: Mapping[str, object]) -> None:
        """Raise ConfigurationError in all processes where they were not given the same."""
        if self.books is not None:
            refuse_differences(self.group, module, dataset, settings)

    def start(self, begin: Callable[[], Run]) -> Run:
        """The run that `begin` starts: in process 0, whose errors all processes raise."""
        return begin() if self.books is None else self.books.start(begin)

    def agreement(self, run: Run, module: nn.Module) -> Agreement:
        """The agreement on the lots of one run."""
        if self.books is None:
            return ALONE
        sharded = sharded_of(module)
        same = [*module.parameters(), *([] if sharded is None else [sharded.released])]
        return AgreementOfAll(self.books, run, same)


__all__ = ["Together"]
