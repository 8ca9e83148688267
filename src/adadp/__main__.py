"""What the command `adadp` runs, and `python -m adadp` where it is not on the path."""

from __future__ import annotations

import sys

from adadp.errors import MissingExtraError
from adadp.extras import require


def main() -> None:
    """Run the command; without the packages that it needs, say in one line which extra has them."""
    try:
        for package in ("typer", "rich"):
            require(package, "cli", "the command adadp")
    except MissingExtraError as error:
        sys.exit(f"adadp: {error}")
    from adadp.cli import app

    app()


if __name__ == "__main__":
    main()
