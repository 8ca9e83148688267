"""Bounding what one example adds to a lot's sums: one file for each kind of clipping, found by itself.

| file        | clipping              | bound on one example's gradient                                |
| ----------- | --------------------- | -------------------------------------------------------------- |
| `flat`      | `Flat`, `Automatic`   | one L2 ball over all parameters                                |
| `ellipsoid` | `Ellipsoid`           | an L2 ball after a change of basis by a shape                  |
| `adaptive`  | `Adaptive`            | one L2 ball, whose radius follows a quantile of the norms      |
| `local`     | `Local`               | a box, an interval for each coordinate (the paper's)           |
| `paid_figures` | `PaidFigures`      | that of another clipping; means of loss or others are released |
| `grouped`   | `Grouped`, `PerLayer` | a clipping of its own for each group of parameters, or layer   |

`base` has the contract that all of them keep, `shaped` what those with a shape have in common, `early` an optimisation
of `Local`. To add a clipping, add a file with a subclass of `Clipping` and `@register("name")`.
"""

import importlib
import pkgutil

from adadp.clipping.adaptive import Adaptive
from adadp.clipping.base import BY_NAME, Clipping, by_name, register
from adadp.clipping.ellipsoid import Ellipsoid
from adadp.clipping.flat import Automatic, Flat
from adadp.clipping.grouped import Grouped, PerLayer
from adadp.clipping.local import Local
from adadp.clipping.paid_figures import PaidFigures


def discover() -> None:
    """Import every file of this package: clippings register themselves."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()

__all__ = [
    "BY_NAME",
    "Adaptive",
    "Automatic",
    "Clipping",
    "Ellipsoid",
    "Flat",
    "Grouped",
    "Local",
    "PaidFigures",
    "PerLayer",
    "by_name",
    "discover",
    "register",
]
