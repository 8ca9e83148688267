"""The paper's tables and figures, run again: `adadp reproduce`.

An item is one module (or a part of one) that registers itself; `load()` imports all of them.
"""

from __future__ import annotations

import importlib

from adadp_lab.paper.item import ITEMS, Item

#: In the order in which `--list` prints their items; a new module is one name here.
MODULES: tuple[str, ...] = (
    *("table1", "table2", "fig2_fig3_accuracy", "fig4_distributions", "fig5_parameters"),
    *("cosine", "beale", "functions", "accounting_example"),
)


def load() -> dict[str, Item]:
    """All items by name."""
    for name in MODULES:
        importlib.import_module(f"adadp_lab.paper.{name}")
    place = {f"adadp_lab.paper.{name}": index for index, name in enumerate(MODULES)}
    return dict(sorted(ITEMS.items(), key=lambda pair: place[pair[1].jobs.__module__]))
