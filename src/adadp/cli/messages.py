"""Every mistake of a user's is one line on stderr and exit code 2."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from adadp.errors import LedgerNotice, ModelNotice, NoGuaranteeWarning, PrivacyError, UntriedWarning


class OneLineGroup(TyperGroup):
    """A group of commands that reports bad input in one line, whether typer or adadp found it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        kwargs["standalone_mode"] = False
        try:
            with _own_warnings():
                code = super().main(*args, **kwargs)
        except PrivacyError as error:
            _fail(str(error))
        except (OSError, MemoryError) as error:
            _fail(str(error) or type(error).__name__)
        except typer.Abort:
            _fail("interrupted", 130)
        except Exception as error:
            # typer's own errors; their class moved between its versions, their methods did not.
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
                sys.exit(2)
            if not hasattr(error, "format_message"):
                raise
            _fail(error.format_message(), getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


def say_error(message: str) -> None:
    """One line on stderr."""
    typer.echo("adadp: " + " ".join(message.split()), err=True)


def _fail(message: str, code: int = 2) -> None:
    say_error(message)
    sys.exit(code)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Inside, warnings of adadp are one line on stderr, without the line of code that they come from."""
    own = (LedgerNotice, ModelNotice, NoGuaranteeWarning, UntriedWarning)
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, own):
            warn(str(message))
        else:
            usual(message, category, *rest, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


@contextmanager
def as_options(names: Collection[str]) -> Iterator[None]:
    """Inside, a refusal that names settings (`lot must be`, `ledger=`, `dataset_name`) names the options instead."""
    try:
        yield
    except PrivacyError as error:
        words = "|".join(sorted(names, key=len, reverse=True))
        text = re.sub(rf"^({words})(?= )|\b({words})=", lambda found: f"{_option(found[1] or found[2])}", str(error))
        parts = "|".join(name for name in names if "_" in name)
        if parts:
            text = re.sub(rf"(?<![-\w])({parts})\b", lambda found: _option(found[1]), text)
        if text == str(error):
            raise
        raise PrivacyError(text) from error


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def warn(message: str) -> None:
    """One line on stderr; the command goes on."""
    typer.echo("adadp: warning: " + " ".join(message.split()), err=True)
