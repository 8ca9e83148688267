"""From data to the rows that a model is trained on: private preprocessing, and probes that go the same way.

What is learned from the data here is one of the estimators of `adadp.preprocessing`, or nothing; whatever it releases
is known before it is fitted (`planned_events`), so that training can be calibrated against the same budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from adadp import features, preprocessing
from adadp.accounting.events import Gaussian
from adadp.data import Dataset, Table
from adadp.errors import ConfigurationError
from adadp.shapes import InputMaker, Known
from adadp.shapes.probes import PinkNoise

if TYPE_CHECKING:
    from adadp.preprocessing import DPPCA, Charges, ShapedFeatures, TablePreprocessor

Estimator: TypeAlias = "DPPCA | ShapedFeatures | TablePreprocessor"


@dataclass(frozen=True)
class OfFeatures:
    """What `ShapedFeatures` is to be, with shares of the budget in place of its noise."""

    directions: int = 1500
    mean_share: float = 0.0
    moments_share: float = 0.0
    power: float = 0.5

    def estimator(self, data: Dataset, noise_for_share: Callable[[float], float], seed: int | None) -> ShapedFeatures:
        """For images of this form; `noise_for_share` gives the noise multiplier of a share of the budget."""
        shares = self.mean_share, self.moments_share
        return preprocessing.ShapedFeatures(
            min(self.directions, features.most_directions(data.input_shape)),
            *(noise_for_share(share) if share else None for share in shares),
            power=self.power,
            random_state=seed,
        )


def estimator_for(
    data: Dataset | Table,
    *,
    pca_noise_multiplier: float | None,
    pca_components: int,
    table_noise_multiplier: float,
    missing: bool = False,
    of_features: OfFeatures | None = None,
    noise_for_share: Callable[[float], float] | None = None,
    seed: int | None,
) -> Estimator | None:
    """What has to be fitted before training: DP-PCA or features for images if asked for, private scales for tables."""
    if of_features is not None:
        if isinstance(data, Table):
            raise ConfigurationError(f"features are for images and {data.name} is a table: leave features out")
        assert noise_for_share is not None
        return of_features.estimator(data, noise_for_share, seed)
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
    if isinstance(estimator, preprocessing.ShapedFeatures):
        return estimator.planned_events()
    assert isinstance(data, Table)
    return estimator.planned_events(data.columns)


def fit(estimator: Estimator, data: Dataset | Table, *, ledger: Charges | None, keep: bool = False) -> Estimator:
    """Fit it to the data; `ledger` is charged for what it releases. With `keep`, features stay in the user's cache."""
    given: dict[str, Any] = {"ledger": ledger, "persons": data.persons}
    if isinstance(estimator, preprocessing.ShapedFeatures):
        assert isinstance(data, Dataset)
        given["public"] = features.public_directions(data.input_shape, estimator.directions, estimator.power)
    return estimator.fit(raw(data, estimator, keep=keep), **given)


def shape_of(data: Dataset | Table, estimator: Estimator | None) -> tuple[int, ...]:
    """The shape of one of the model's inputs, known before anything is fitted: a table's follows from its types."""
    if isinstance(data, Dataset):
        if isinstance(estimator, preprocessing.ShapedFeatures):
            return (estimator.directions,)
        assert estimator is None or isinstance(estimator, preprocessing.DPPCA)
        return data.input_shape if estimator is None else (estimator.n_components,)
    assert isinstance(estimator, preprocessing.TablePreprocessor)
    return (estimator.width(data.columns),)


def raw(data: Dataset | Table, estimator: Estimator, *, keep: bool = False) -> object:
    """What an estimator is fitted on and transforms. With `keep`, features stay in the user's cache."""
    if isinstance(data, Table):
        return data.columns
    if isinstance(estimator, preprocessing.ShapedFeatures):
        return features.features_of(data, keep=keep)
    return data.inputs().flatten(1).numpy()


def rows(data: Dataset | Table, estimator: Estimator | None, *, keep: bool = False) -> Tensor:
    """The model's inputs, float32: images (n, channels, height, width), or what the estimator makes (n, features)."""
    if estimator is None:
        assert isinstance(data, Dataset)
        return data.inputs()
    return torch.from_numpy(estimator.transform(raw(data, estimator, keep=keep))).to(torch.float32)


def probes_for(data: Dataset | Table, estimator: Estimator | None) -> InputMaker:
    """Synthetic inputs of the same form, through the same fitted preprocessing. They hold nothing of the data."""
    if estimator is not None and isinstance(estimator, preprocessing.TablePreprocessor):
        return _TableRows(estimator)
    assert isinstance(data, Dataset)
    shape = data.input_shape
    images = PinkNoise(shape)
    if estimator is None:
        return images
    if isinstance(estimator, preprocessing.ShapedFeatures):
        scattering = features.Scattering.for_images(shape)

        def mapped(count: int, generator: torch.Generator) -> Tensor:
            made = features.made_images(shape, count, generator)
            return torch.from_numpy(estimator.transform(scattering(made).numpy()))

        return mapped
    components = torch.from_numpy(estimator.components_).to(torch.float32)

    def projected(count: int, generator: torch.Generator) -> Tensor:
        return images(count, generator).flatten(1) @ components.T

    return projected


def known_shape(estimator: Estimator | None) -> Known | None:
    """A source for shapes of a linear layer on what the estimator makes, where it knows second moments."""
    if estimator is None or not isinstance(estimator, preprocessing.ShapedFeatures):
        return None
    return Known(torch.from_numpy(estimator.moments_).to(torch.float32))


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
