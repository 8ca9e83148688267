"""Data sets by name and users' own data, scaled by public constants and never by statistics of the data."""

from adadp.data.dataset import Dataset
from adadp.data.folders import cache_folder
from adadp.data.own import HELD_OUT_NOTE, HeldOut, read, read_held_out
from adadp.data.standard import NAMES, PUBLISHED_TESTS, load
from adadp.data.table import Table
from adadp.errors import CorruptDataError, DataError, DataNotFoundError, MissingExtraError

__all__ = [
    "HELD_OUT_NOTE",
    "NAMES",
    "PUBLISHED_TESTS",
    "CorruptDataError",
    "DataError",
    "DataNotFoundError",
    "Dataset",
    "HeldOut",
    "MissingExtraError",
    "Table",
    "cache_folder",
    "load",
    "read",
    "read_held_out",
]
