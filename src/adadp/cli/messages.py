"""Every mistake of a user's is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from adadp.errors import PrivacyError


class OneLineGroup(TyperGroup):
    """A group of commands that reports bad input in one line, whether typer or adadp found it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        kwargs["standalone_mode"] = False
        try:
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


def _fail(message: str, code: int = 2) -> None:
    typer.echo("adadp: " + " ".join(message.split()), err=True)
    sys.exit(code)


def warn(message: str) -> None:
    """One line on stderr; the command goes on."""
    typer.echo("adadp: warning: " + " ".join(message.split()), err=True)
