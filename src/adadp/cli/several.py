"""A command that torchrun started as several processes: process 0 speaks for all of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING

import typer

from adadp.cli.messages import say_error
from adadp.errors import ConfigurationError, PrivacyError

if TYPE_CHECKING:
    from adadp.distributed.group import Group


def refuse_several(command: str | None) -> None:
    """Raise where torchrun started several processes of a command that is the work of one."""
    size = os.environ.get("WORLD_SIZE", "1")
    if command not in (None, "train") and "TORCHELASTIC_RUN_ID" in os.environ and size != "1":
        raise ConfigurationError(
            f"adadp {command} is the work of one process, and torchrun started {size}: start it without torchrun "
            "(adadp train may have several)"
        )


@contextmanager
def speaking_for_all() -> Iterator[Group]:
    """Within, a process other than the first prints nothing but an error of its own."""
    from adadp.distributed.launched import launched

    with launched() as group:
        if group.alone:
            yield group
            return
        with nullcontext() if group.first else _silence(), saying_errors(group):
            yield group


@contextmanager
def saying_errors(group: Group) -> Iterator[None]:
    """Within, one of several processes says its errors at once: as soon as one ends, torchrun ends the others."""
    try:
        yield
    except PrivacyError as error:
        if group.alone:
            raise
        if not _told(error):
            say_error(f"{error}" if group.first else f"process {group.rank}: {error}")
        raise typer.Exit(2) from None


@contextmanager
def _silence() -> Iterator[None]:
    """Within, neither standard output nor warnings are printed."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _told(error: BaseException | None) -> bool:
    """Whether process 0 has raised it, and says so itself."""
    while error is not None:
        if getattr(error, "told", False):
            return True
        error = error.__cause__
    return False
