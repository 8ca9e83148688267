"""Preprocessing whose cost is known: every statistic of the data passes a bound, then noise, then a charge.

The estimators follow scikit-learn's conventions. After `fit`, `events_` lists what has to be accounted for
and `assumptions_` what the guarantee rests on; `fit(X, ledger=run)` calls `run.charge(event)` before each
release.
"""

from adadp.preprocessing.budget import noise_multiplier_for_share
from adadp.preprocessing.encoding import DeclaredOneHot, HashedOneHot
from adadp.preprocessing.pca import DPPCA
from adadp.preprocessing.persistence import load, save
from adadp.preprocessing.release import Charges
from adadp.preprocessing.scaler import DPStandardScaler
from adadp.preprocessing.table import TablePreprocessor

__all__ = [
    "DPPCA",
    "Charges",
    "DPStandardScaler",
    "DeclaredOneHot",
    "HashedOneHot",
    "TablePreprocessor",
    "load",
    "noise_multiplier_for_share",
    "save",
]
