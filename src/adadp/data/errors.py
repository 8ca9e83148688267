"""What loading data refuses. Every message names the file, the column or the folder, and the way out."""

from __future__ import annotations

from adadp.errors import PrivacyError


class DataError(PrivacyError, ValueError):
    """Data that cannot be used as it is."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A data set is neither here nor to be had. The message says where to put which files."""

    # OSError builds its text from errno and a file name; this one has a message of its own.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CorruptDataError(DataError):
    """A file is damaged or is not what its name says. It was not used."""


class MissingExtraError(DataError, ImportError):
    """A format needs a package that is not installed."""
