"""Modules that have moved: importing one by its old name works for one more version, and warns.

The policy is in CONTRIBUTING.md: a public name that moves keeps its old path, with a DeprecationWarning that names the
new one, until the next minor version.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old name -> new name, both below `adadp`. All of them are removed in 0.3.
MOVED = {
    "batches": "sampling.batches",
    "compat": "integrations.opacus",
    "data.errors": "errors",
    "graphs": "mechanism.replay",
    "loader": "sampling.loader",
    "lot": "sampling.lot",
    "noise": "randomness",
    "observation": "mechanism.observation",
    "optimizer": "mechanism.optimizer",
    "plan": "training.planning",
    "preprocessing.budget": "preprocessing.noise_share",
    "preprocessing.table": "preprocessing.table_preprocessor",
    "probes": "shapes.probes",
    "rules": "algorithms.update_rule",
    "runs": "training.run_folder",
    "settings": "training.settings",
    "shape": "shapes",
    "shapes.sources": "shapes",
    "sources": "shapes",
    "step": "mechanism.step",
    "validation": "checks.validation",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a moved module under its old name: with the objects of the new one, so that classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "adadp" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"adadp.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is now {new}; the old name ends with version 0.3", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name, f"Moved to {new}.")
        names = vars(importlib.import_module(new))
        module.__dict__.update({name: value for name, value in names.items() if not name.startswith("__")})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do: the names are there."""


def install() -> None:
    """Let old names be found, after everything that is really there."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
