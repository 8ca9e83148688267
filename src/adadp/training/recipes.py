"""Recipes: settings that go together, by name, and which one suits data of a declared form.

Numbers were chosen on public data sets, on rows of the training part set aside (`results/recipes`). Choosing follows
what is declared or public (images or a table, their size, how many rows, epsilon), never a value of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from adadp.algorithms.defaults import default_lot
from adadp.data import Dataset, Table
from adadp.errors import ConfigurationError
from adadp.sampling.units import Units
from adadp.training.settings import Settings

AUTO, NONE = "auto", "none"
FEW = 5_000
"""Rows: with fewer, directions are few and none are paid for."""


@dataclass(frozen=True)
class Recipe:
    """Settings that go together.

    Attributes:
        about: what it does, in one line.
        settings: by name, as in `Settings`.
        rate: the part of the rows that a lot is expected to hold; None leaves the lot to its default.

    """

    about: str
    settings: Mapping[str, Any]
    rate: float | None = None


_LINEAR = {"features": "scattering", "model": "linear"}
_SHAPE = {"before": 0.375, "after": 0.125, "damping": 0.01}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "scattering": Recipe(
            "a linear layer on scattering features, in 1,500 directions of synthetic images, with a paid mean",
            {**_LINEAR, "directions": 1500, "mean_share": 0.03, "steps": 1600, "max_grad_norm": 0.65,
             "noise_walk": 0.06, "algorithm_settings": _SHAPE},
            rate=4096 / 60000,
        ),
        "scattering-small": Recipe(
            "a linear layer on scattering features, in 120 directions of synthetic images",
            {**_LINEAR, "directions": 120, "steps": 600, "max_grad_norm": 2.3, "noise_walk": 0.025,
             "algorithm_settings": {**_SHAPE, "damping": 0.1}},
            rate=256 / 1438,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Settings with a recipe's in the places that were left open, and what to say of it (None: nothing)."""

    settings: Settings
    said: str | None


def resolve(settings: Settings, data: Dataset | Table) -> Chosen:
    """Fill in the recipe that was asked for, or that suits the form of `data`. What was given stays.

    Guarantee: of the data only its form is used: images or a table, the size of an image, the number of rows.
    """
    name = settings.recipe
    if name == NONE or (name is None and (isinstance(data, Table) or _says_how(settings))):
        return Chosen(settings, None)
    if name not in (None, AUTO, *RECIPES):
        raise ConfigurationError(f"no recipe is called {name!r}; there are {AUTO}, {NONE}, {', '.join(RECIPES)}")
    if isinstance(data, Table):
        raise ConfigurationError(f"recipes are for images and {data.name} is a table: leave recipe out")
    why, rows = "", len(data) if data.persons is None else Units(data.persons).declared
    if name in (None, AUTO):
        name, why = choose(data.input_shape, rows)
    recipe = RECIPES[name]
    changes = {key: value for key, value in recipe.settings.items() if _open(settings, key)}
    if "algorithm_settings" in changes:
        changes["algorithm_settings"] = {**changes["algorithm_settings"], **settings.algorithm_settings}
    if recipe.rate is not None and settings.lot is None:
        changes["lot"] = max(default_lot(rows), round(recipe.rate * rows))
    kept = [key for key in recipe.settings if key not in changes]
    said = f"recipe {name}{why}: {recipe.about}"
    if kept:
        said += f" (given and kept: {', '.join(kept)})"
    return Chosen(replace(settings, recipe=name, **changes), said)


def choose(shape: tuple[int, ...], rows: int) -> tuple[str, str]:
    """The recipe for so many images (or persons) of a shape (channels, height, width), and why."""
    name = "scattering-small" if rows < FEW else "scattering"
    return name, f" (chosen: images of {'x'.join(map(str, shape))}, N = {rows:,})"


def _says_how(settings: Settings) -> bool:
    """Whether the settings say themselves what is trained and how."""
    named = settings.algorithm, settings.reading, settings.features, settings.pca_noise_multiplier
    return settings.model != "auto" or any(value is not None for value in named) or bool(settings.algorithm_settings)


def _open(settings: Settings, key: str) -> bool:
    """Whether a setting was left open."""
    if key in ("steps", "epochs"):
        return settings.steps is None and settings.epochs is None
    if key in ("lr", "noise_walk"):
        return settings.lr is None and settings.noise_walk is None
    if key in settings.algorithm_settings:
        return False
    if key == "algorithm_settings":
        return settings.algorithm in (None, "adadp") and settings.reading in (None, "sound")
    value = getattr(settings, key)
    return value is None or (key == "model" and value == "auto")
