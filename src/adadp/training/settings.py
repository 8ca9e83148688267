"""What a training run is asked to do: the options of `adadp train`, for Python and for a configuration file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from adadp.errors import ConfigurationError
from adadp.persons import MOST_ROWS
from adadp.training import class_weights


@dataclass(frozen=True)
class Settings:
    """Everything that can be asked for. None means: chosen for you, from public things alone, and then printed.

    Give either `epsilon` (the noise is calibrated to it; 1.0 unless told otherwise) or `noise_multiplier`, and either
    `epochs` or `steps`. `algorithm_settings` are the algorithm's own numbers (`adadp.algorithms.defaults`), called
    "settings" in files.

    `classes` declares the class names of data of your own; without it those that occur are public by your use of the
    data. `drop_other_labels` leaves out rows of other labels, which are refused otherwise. `number`, `category`,
    `text`, `date` and `ignore` declare what columns hold (`adadp.data.columns.declare`); kinds of others are public.
    With `paid_metrics`, figures on held-out rows are released with noise and charged. `task` "regression" predicts a
    number, whose lowest and highest value `target_range` declares ("0..100"). `class_weights` multiply the losses of
    classes: declared ("no=1,yes=5"), or "paid": from counts that are released with noise and charged.

    `person` names a column that says whose a row is: the guarantee is then for all rows of one person, of which
    `rows_per_person` at most are in a lot, and `lot` counts persons.

    `recipe` names settings that go together (`adadp.training.recipes`); each that is given here wins over the recipe's.
    `features` "scattering" trains on fixed features of images, in `directions` that synthetic images have, of which a
    paid mean and paid second moments take `mean_share` and `moments_share` of the budget. Features are kept in the
    user's cache folder unless `no_cache` is set. `noise_walk` chooses the learning rate: how far noise moves a weight.

    Runs on a file or folder of your own are charged to one ledger beside it, `epsilon` is then for the run alone and
    `budget` for all of them together. With a `ledger` of another place, `epsilon` is for everything in it.
    `dataset_name` declares the data's name in either. A run that what is left allows only with far more noise, or for
    less than half of its steps, is refused unless `spend_the_rest` is set.
    """

    dataset: str = "digits"
    dataset_name: str | None = None
    label: str | None = None
    classes: tuple[str, ...] = ()
    drop_other_labels: bool = False
    test: str | None = None
    test_fraction: float | None = None
    task: str | None = None
    target_range: str | None = None
    number: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    date: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    decimal_comma: bool = False
    missing: bool = False
    person: str | None = None
    rows_per_person: int = MOST_ROWS
    image_size: str | None = None
    data_dir: str | None = None
    recipe: str | None = None
    model: str = "auto"
    algorithm: str | None = None
    reading: str | None = None
    epsilon: float | None = None
    budget: float | None = None
    spend_the_rest: bool = False
    delta: float | None = None
    noise_multiplier: float | None = None
    lot: int | None = None
    epochs: float | None = None
    steps: int | None = None
    lr: float | None = None
    noise_walk: float | None = None
    schedule: str | None = None
    momentum: float | None = None
    max_grad_norm: float | None = None
    algorithm_settings: Mapping[str, Any] = field(default_factory=dict)
    pca_noise_multiplier: float | None = None
    pca_components: int = 60
    features: str | None = None
    directions: int | None = None
    mean_share: float | None = None
    moments_share: float | None = None
    feature_power: float | None = None
    no_cache: bool = False
    preprocessing_share: float = 0.1
    paid_metrics: bool = False
    class_weights: str | None = None
    microbatch: int | None = None
    evaluations: int = 10
    tensorboard: bool = False
    device: str = "auto"
    checkpoint_every: float = 60.0
    seed: int | None = None
    out: str | None = None
    ledger: str | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ConfigurationError("give either epsilon=, to which the noise is calibrated, or noise_multiplier=")
        if self.epochs is not None and self.steps is not None:
            raise ConfigurationError("give either epochs= or steps=")
        for name in ("lot", "steps", "microbatch", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value!r}")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise ConfigurationError(f"epochs must be a finite number above 0, not {self.epochs!r}")
        if not 0 <= self.checkpoint_every < float("inf"):
            raise ConfigurationError(
                f"checkpoint_every must be a number of seconds, or 0 for no checkpoints, not {self.checkpoint_every!r}"
            )
        if self.seed is not None and self.seed < 0:
            raise ConfigurationError(f"seed must not be negative, not {self.seed!r}")
        if self.task not in (None, "classes", "regression"):
            raise ConfigurationError(f"task must be classes or regression, not {self.task!r}")
        if (self.task == "regression") != (self.target_range is not None):
            raise ConfigurationError(
                "task regression and target_range go together: declare the lowest and the highest value of the number "
                "to predict (--task regression --target-range 0..100). Taken from the data they would show who is in it"
            )
        parse_range(self.target_range)
        class_weights.parse(self.class_weights)
        self._check_features()
        if self.delta is not None and not 0 < self.delta < 1:
            raise ConfigurationError(f"delta must be above 0 and below 1, not {self.delta!r}")

    def _check_features(self) -> None:
        if self.features not in (None, "pixels", "scattering"):
            raise ConfigurationError(f"features must be pixels or scattering, not {self.features!r}")
        if self.features == "scattering" and self.pca_noise_multiplier is not None:
            raise ConfigurationError("features and pca_noise_multiplier are two ways to prepare images: leave one out")
        if self.lr is not None and self.noise_walk is not None:
            raise ConfigurationError("give either lr= or noise_walk=, which chooses it")
        for name in ("mean_share", "moments_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigurationError(f"{name} must be in [0, 1), a part of the budget, not {value!r}")
        for name in ("directions", "noise_walk"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"{name} must be a finite number above 0, not {value!r}")

    def for_algorithm(self) -> dict[str, Any]:
        """The numbers that go to the algorithm, without those that were not given."""
        named = {name: getattr(self, name) for name in ("lr", "schedule", "momentum", "max_grad_norm")}
        return {**self.algorithm_settings, **{name: value for name, value in named.items() if value is not None}}

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {_in_files(name): value for name, value in values.items()}


def _in_files(name: str) -> str:
    """What a setting is called in configuration files and run folders."""
    return "settings" if name == "algorithm_settings" else name


def from_mapping(values: Mapping[str, Any], where: str = "settings") -> Settings:
    """Settings from plain values, each checked; `where` is named in what is refused."""
    kinds = {_in_files(name): kind for name, kind in get_type_hints(Settings).items()}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ConfigurationError(f"{where}: there is no setting {key!r}; there are {', '.join(kinds)}")
        checked[name] = _checked(f"{where}: {key}", value, kinds[name])
    return Settings(algorithm_settings=checked.pop("settings", {}), **checked)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a configuration file, names with underscores."""
    try:
        with Path(path).open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or text that is not UTF-8
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    if not isinstance(found.get("settings", {}), dict):
        raise ConfigurationError(f"{path}: settings must be a table, not {found['settings']!r}")
    return {key.replace("-", "_"): value for key, value in found.items()}


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "28x28"."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(f"image_size must look like 28x28 (height x width), not {text!r}")
    return int(parts[0]), int(parts[1])


def parse_range(text: str | None) -> tuple[float, float] | None:
    """(low, high) from "0..100"."""
    if text is None:
        return None
    try:
        low, high = (float(end) for end in text.split(".."))
    except ValueError:
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigurationError(f"target_range must look like 0..100, from a number to a larger one, not {text!r}")
    return low, high


def _checked(name: str, value: Any, kind: Any) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if get_origin(wanted) is tuple and isinstance(value, list | tuple):
        return tuple(str(item) for item in value)
    if get_origin(wanted) is not None and get_origin(wanted) is not tuple and isinstance(value, Mapping):
        return dict(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise ConfigurationError(f"{name} must be {words.get(wanted, 'a list or a table')}, not {value!r}")
