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
    from adadp.preprocessing.encoding import DeclaredOneHot as DeclaredOneHot
    from adadp.preprocessing.encoding import HashedOneHot as HashedOneHot
    from adadp.preprocessing.free_text import FreeText as FreeText
    from adadp.preprocessing.noise_share import noise_multiplier_for_share as noise_multiplier_for_share
    from adadp.preprocessing.pca import DPPCA as DPPCA
    from adadp.preprocessing.persistence import load as load
    from adadp.preprocessing.persistence import save as save
    from adadp.preprocessing.release import Charges as Charges
    from adadp.preprocessing.scaler import DPStandardScaler as DPStandardScaler
    from adadp.preprocessing.shaped_features import PublicDirections as PublicDirections
    from adadp.preprocessing.shaped_features import ShapedFeatures as ShapedFeatures
    from adadp.preprocessing.table_preprocessor import TEXT_LENGTH as TEXT_LENGTH
    from adadp.preprocessing.table_preprocessor import TablePreprocessor as TablePreprocessor
    from adadp.preprocessing.table_preprocessor import kind_of as kind_of

_HOME_OF = {
    "DPPCA": "pca",
    "Charges": "release",
    "DPStandardScaler": "scaler",
    "DeclaredOneHot": "encoding",
    "FreeText": "free_text",
    "HashedOneHot": "encoding",
    "PublicDirections": "shaped_features",
    "ShapedFeatures": "shaped_features",
    "TEXT_LENGTH": "table_preprocessor",
    "TablePreprocessor": "table_preprocessor",
    "kind_of": "table_preprocessor",
    "load": "persistence",
    "noise_multiplier_for_share": "noise_share",
    "save": "persistence",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sklearn", "preprocessing", "private preprocessing")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
