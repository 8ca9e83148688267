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
    seed: int | None,
) -> Estimator | None:
    """What has to be fitted before training: DP-PCA for images if asked for, private scales for tables."""
    if isinstance(data, Table):
        if pca_noise_multiplier is not None:
            raise ConfigurationError(f"DP-PCA is for images and {data.name} is a table: leave pca_noise_multiplier out")
        return preprocessing.TablePreprocessor(table_noise_multiplier, random_state=seed)
    if pca_noise_multiplier is None:
        return None
    Gaussian(pca_noise_multiplier)  # refused here, before any data is touched
    pixels = data.images[0].numel()
    if not 1 <= pca_components <= pixels:
        raise ConfigurationError(f"pca_components must be in 1..{pixels} (the pixels), not {pca_components}")
    # Isometric: at the same cost half the variance off the diagonal of what is published.
    return preprocessing.DPPCA(pca_components, pca_noise_multiplier, isometric=True, random_state=seed)


def needs_scales(data: Dataset | Table) -> bool:
    """Whether fitting will release anything for this table: text and flags alone cost nothing."""
    return isinstance(data, Table) and any(
        preprocessing.kind_of(column) == "number" for column in data.columns.values()
    )


def planned_events(estimator: Estimator | None, data: Dataset | Table) -> tuple[Gaussian, ...]:
    """What fitting will charge, known before any data is touched."""
    if estimator is None:
        return ()
    if isinstance(estimator, preprocessing.DPPCA):
        return (Gaussian(estimator.noise_multiplier),)
    if isinstance(estimator, preprocessing.TablePreprocessor) and needs_scales(data):
        return preprocessing.DPStandardScaler(estimator.noise_multiplier).planned_events()
    return ()


def shape_of(data: Dataset | Table, estimator: Estimator | None) -> tuple[int, ...]:
    """The shape of one of the model's inputs, known before anything is fitted: a table's follows from its types."""
    if isinstance(data, Dataset):
        return data.input_shape if estimator is None else (estimator.n_components,)
    assert isinstance(estimator, preprocessing.TablePreprocessor)
    kinds = [preprocessing.kind_of(column) for column in data.columns.values()]
    return (sum(estimator.buckets if kind == "text" else 1 for kind in kinds),)


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
    """Rows as a fitted table preprocessor makes them: numbers of deviation 1, flags by coin, one bucket a word."""

    def __init__(self, table: TablePreprocessor) -> None:
        self.numbers, self.flags = len(table.numeric_), len(table.flags_)
        self.words = [len(values) for values in table.one_hot_.categories] + [table.buckets] * len(table.text_)

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        parts = [torch.randn(count, self.numbers, generator=generator)]
        parts.append(torch.randint(2, (count, self.flags), generator=generator).float())
        for size in self.words:
            drawn = torch.randint(size, (count,), generator=generator)
            parts.append(torch.nn.functional.one_hot(drawn, size).float())
        return torch.cat(parts, 1)
