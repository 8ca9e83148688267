"""Preprocessing whose cost is known: every statistic of the data passes a bound, then noise, then a charge.

The estimators follow scikit-learn's conventions. After `fit`, `events_` lists what has to be accounted for
and `assumptions_` what the guarantee rests on; `fit(X, ledger=run)` calls `run.charge(event)` before each
release. They need scikit-learn (`pip install 'adadp[preprocessing]'`), which is imported when one is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from adadp.extras import require

if TYPE_CHECKING:
    from adadp.preprocessing.encoding import DeclaredOneHot, HashedOneHot
    from adadp.preprocessing.noise_share import noise_multiplier_for_share
    from adadp.preprocessing.pca import DPPCA
    from adadp.preprocessing.persistence import load, save
    from adadp.preprocessing.release import Charges
    from adadp.preprocessing.scaler import DPStandardScaler
    from adadp.preprocessing.table_preprocessor import TablePreprocessor, kind_of

_HOME_OF = {
    "DPPCA": "pca",
    "Charges": "release",
    "DPStandardScaler": "scaler",
    "DeclaredOneHot": "encoding",
    "HashedOneHot": "encoding",
    "TablePreprocessor": "table_preprocessor",
    "kind_of": "table_preprocessor",
    "load": "persistence",
    "noise_multiplier_for_share": "noise_share",
    "save": "persistence",
}

__all__ = [
    "DPPCA",
    "Charges",
    "DPStandardScaler",
    "DeclaredOneHot",
    "HashedOneHot",
    "TablePreprocessor",
    "kind_of",
    "load",
    "noise_multiplier_for_share",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sklearn", "preprocessing", "private preprocessing")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
