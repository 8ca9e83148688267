"""From data to the rows that a model is trained on: private preprocessing, and probes that go the same way.

What is learned from the data here is one of the estimators of `adadp.preprocessing`, or nothing; whatever it releases
is known before it is fitted (`planned_events`), so that training can be calibrated against the same budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from adadp import preprocessing
from adadp.accounting.events import Gaussian
from adadp.data import Dataset, Table
from adadp.errors import ConfigurationError
from adadp.shapes import InputMaker
from adadp.shapes.probes import PinkNoise

if TYPE_CHECKING:
    from adadp.preprocessing import DPPCA, TablePreprocessor

Estimator: TypeAlias = "DPPCA | TablePreprocessor"


def estimator_for(
    data: Dataset | Table,
    *,
    pca_noise_multiplier: float | None,
    pca_components: int,
    table_noise_multiplier: float,
    missing: bool = False,
    seed: int | None,
) -> Estimator | None:
    """What has to be fitted before training: DP-PCA for images if asked for, private scales for tables."""
    if isinstance(data, Table):
        if pca_noise_multiplier is not None:
            raise ConfigurationError(f"DP-PCA is for images and {data.name} is a table: leave pca_noise_multiplier out")
        found = preprocessing.TablePreprocessor(
            table_noise_multiplier,
            categories=data.declared.values,
            ranges={name: ends for name, ends in data.declared.ranges.items() if name in data.columns},
            text=[name for name, kind in data.kinds.items() if kind == "text"],
            dates=[name for name, kind in data.kinds.items() if kind == "date"],
            missing=missing,
            random_state=seed,
        )
        found.width(data.columns)  # what it cannot take is refused here, before any data is touched
        return found
    if pca_noise_multiplier is None:
        return None
    Gaussian(pca_noise_multiplier)  # refused here, before any data is touched
    pixels = data.images[0].numel()
    if not 1 <= pca_components <= pixels:
        raise ConfigurationError(f"pca_components must be in 1..{pixels} (the pixels), not {pca_components}")
    # Isometric: at the same cost half the variance off the diagonal of what is published.
    return preprocessing.DPPCA(pca_components, pca_noise_multiplier, isometric=True, random_state=seed)


def needs_scales(data: Dataset | Table) -> bool:
    """Whether fitting will release anything for this table: only numbers without declared ranges cost something."""
    return isinstance(data, Table) and any(
        kind in ("number", "date") and name not in data.declared.ranges for name, kind in data.kinds.items()
    )


def planned_events(estimator: Estimator | None, data: Dataset | Table) -> tuple[Gaussian, ...]:
    """What fitting will charge, known before any data is touched."""
    if estimator is None:
        return ()
    if isinstance(estimator, preprocessing.DPPCA):
        return (Gaussian(estimator.noise_multiplier),)
    assert isinstance(data, Table)
    return estimator.planned_events(data.columns)


def shape_of(data: Dataset | Table, estimator: Estimator | None) -> tuple[int, ...]:
    """The shape of one of the model's inputs, known before anything is fitted: a table's follows from its types."""
    if isinstance(data, Dataset):
        return data.input_shape if estimator is None else (estimator.n_components,)
    assert isinstance(estimator, preprocessing.TablePreprocessor)
    return (estimator.width(data.columns),)


def raw(data: Dataset | Table) -> object:
    """What an estimator is fitted on."""
    return data.columns if isinstance(data, Table) else data.inputs().flatten(1).numpy()


def rows(data: Dataset | Table, estimator: Estimator | None) -> Tensor:
    """The model's inputs, float32: images (n, channels, height, width), or what the estimator makes (n, features)."""
    if estimator is None:
        assert isinstance(data, Dataset)
        return data.inputs()
    return torch.from_numpy(estimator.transform(raw(data))).to(torch.float32)


def probes_for(data: Dataset | Table, estimator: Estimator | None) -> InputMaker:
    """Synthetic inputs of the same form, through the same fitted preprocessing. They hold nothing of the data."""
    if estimator is not None and isinstance(estimator, preprocessing.TablePreprocessor):
        return _TableRows(estimator)
    assert isinstance(data, Dataset)
    images = PinkNoise(data.input_shape)
    if estimator is None:
        return images
    components = torch.from_numpy(estimator.components_).to(torch.float32)

    def projected(count: int, generator: torch.Generator) -> Tensor:
        return images(count, generator).flatten(1) @ components.T

    return projected


class _TableRows:
    """Rows as a fitted table preprocessor makes them, of made cells.

    Numbers have deviation 1, flags are tossed, each category is one bucket, and a text is made of random words.
    """

    def __init__(self, table: TablePreprocessor) -> None:
        self._table = table
        self._numbers = len(table.numeric_) + len(table.ranged_)
        self._categories = [len(values) for values in table.one_hot_.categories]
        self._categories += [table.buckets] * len(table.categories_)

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        table = self._table
        parts = [torch.randn(count, self._numbers, generator=generator)]
        if table.missing:
            parts.append((torch.rand(count, self._numbers, generator=generator) < 0.1).float())
        parts.append(torch.randint(2, (count, len(table.flags_)), generator=generator).float())
        for _ in table.dates_:
            turns = torch.rand(count, 3, generator=generator) * (2 * torch.pi)
            parts.append(torch.cat([turns.sin(), turns.cos()], 1))
        for size in self._categories:
            drawn = torch.randint(size, (count,), generator=generator)
            parts.append(torch.nn.functional.one_hot(drawn, size).float())
        if table.free_text_ is not None:
            made = [table.free_text_.of_made_texts(count, _seed(generator)) for _ in table.text_]
            parts += [torch.from_numpy(one) * preprocessing.TEXT_LENGTH for one in made]
        return torch.cat(parts, 1)


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))
