"""What differs from Opacus and does no harm is said in a warning of its own kind."""

from __future__ import annotations

import warnings


class OpacusNotice(UserWarning):
    """A setting that Opacus has is not needed here, or means something else. The message says what is done."""


def say(text: str) -> None:
    """Warn whoever called the public function."""
    warnings.warn(text, OpacusNotice, stacklevel=3)
