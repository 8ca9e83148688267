"""What a run will do, settled before anything is released.

Making a `Plan` reads the data and releases nothing: every default is chosen from public things alone, and the noise is
calibrated with everything that preprocessing will release, so that one budget is for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adadp import algorithms, data, models
from adadp.accounting.accountants import get_accountant
from adadp.accounting.calibration import calibrate_noise
from adadp.accounting.composition import Composition
from adadp.accounting.events import Event, Gaussian, PoissonGaussian
from adadp.accounting.ledger import Ledger
from adadp.accounting.spending import DEFAULT_UNIT
from adadp.algorithms.defaults import STEPS, default_delta, default_lot, rate_for_walk
from adadp.data import Dataset, HeldOut, Table
from adadp.data.labels import listed
from adadp.distributed.group import Group
from adadp.distributed.launched import refuse_device
from adadp.errors import ConfigurationError
from adadp.persons import PERSON
from adadp.preprocessing.noise_share import noise_multiplier_for_share
from adadp.randomness import derived
from adadp.sampling.units import Grouping, Units
from adadp.training import class_weights, held_out, recipes
from adadp.training import preparation as prepared
from adadp.training.dataset_ledger import Account, account_for, far_more_noise, little_room, nothing_left, standing
from adadp.training.settings import Settings, parse_image_size, parse_range

DEFAULT_ALGORITHM = "adadp"
METRICS_SHARE = 0.02
"""Part of the budget that paid metrics take."""


@dataclass(frozen=True)
class Settled:
    """Numbers of a run that was interrupted, or that process 0 has settled for all.

    `prepared_for` is the epsilon of which the preprocessing has a share, `split` the seed by which rows were held out
    (no secret: it is not derived from the run's).
    """

    noise_multiplier: float | None
    epsilon: float | None
    prepared_for: float | None
    split: int | None = None


class Plan:
    """A run with every number settled. Making one reads the data and releases nothing.

    Args:
        settings: what was asked for.
        settled: numbers that are settled already.
        outline: nothing is read, and the plan is made for data of this form (`adadp.data.outline`).
        resumed: the run goes on in the folder `settings.out`.
        group: the processes that train together (`adadp.training.together`). Process 0 alone knows the ledger.

    """

    def __init__(
        self,
        settings: Settings,
        settled: Settled | None = None,
        outline: HeldOut | None = None,
        *,
        resumed: bool = False,
        group: Group | None = None,
    ) -> None:
        pair = read(settings, None if settled is None else settled.split) if outline is None else outline
        self.train, self.test, self.split_seed = pair.train, pair.test, pair.seed
        chosen = recipes.Chosen(settings, None) if resumed else recipes.resolve(settings, self.train)
        settings = chosen.settings
        self.settings, self._settled, self.resumed = settings, settled, resumed
        self.group = Group() if group is None else group
        self.algorithm = algorithms.create(
            settings.algorithm or DEFAULT_ALGORITHM, settings.reading, settings.for_algorithm()
        )
        self.algorithm.refuse_several(self.group)
        self.device = device_of(settings.device)
        if not self.group.alone:
            refuse_device(self.device)
        if settings.model not in ("auto", *models.MODELS):
            raise ConfigurationError(
                f"no model is called {settings.model!r}; there are auto, {', '.join(sorted(models.MODELS))}"
            )
        self.units = units_of(settings, self.train, self.algorithm)
        if settings.paid_metrics and self.units is not None and self.test.persons is None:
            raise ConfigurationError(
                f"paid_metrics count persons, and the held-out data has no column {settings.person!r} that says whose "
                "a row is: leave one of them out"
            )
        self.class_weights = class_weights.declared(settings.class_weights, self.train.classes)
        if settings.class_weights is not None and "max_grad_norm" not in settings.for_algorithm():
            self.algorithm.widen()
        if settings.class_weights is not None and self.algorithm.looks:
            raise ConfigurationError(f"{self.algorithm} bounds the loss of each row: with class_weights, take adadp")
        examples = self.population
        self.lot = default_lot(examples) if settings.lot is None else settings.lot
        if self.lot > examples:
            raise ConfigurationError(f"lot must be in 1..{examples:,}, the training {self.noun}, not {self.lot:,}")
        self.steps = settings.steps or STEPS
        if settings.epochs is not None:
            self.steps = max(1, round(settings.epochs * examples / self.lot))
        self.delta = default_delta(examples) if settings.delta is None else settings.delta
        self.account = Account(None, of_run=True) if not self.group.first else account_for(
            settings, self.dataset_name, self.algorithm, own_data=self.own_data and bool(settings.dataset),
            delta=self.delta, unit=self.unit,
        )  # fmt: skip
        self.notices: tuple[str, ...] = (
            () if chosen.said is None else (chosen.said,)
        )  # lines to print before the run starts
        self.epsilon: float | None = None
        self.estimator: prepared.Estimator | None = None
        self.noise_multiplier = self._settle()
        planned = [] if self.noise_multiplier is None else self.alone(self.noise_multiplier)
        if settled is None:
            self.notices = (*standing(self.account, self.delta, planned), *self.notices)
        self.input_shape = prepared.shape_of(self.train, self.estimator)
        self.model_name = self._choose_model() if settings.model == "auto" else settings.model
        with torch.random.fork_rng(devices=[]):
            seed = self.seed_for("initial weights")
            if seed is not None:
                torch.manual_seed(seed)
            self.model = models.build(self.model_name, self.input_shape, len(self.train.classes))
        if self.noise_multiplier is not None:
            weights = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            if settings.noise_walk is not None and self.algorithm.settings["lr"] is None:
                bound = self.algorithm.settings["max_grad_norm"]
                self.algorithm.settings["lr"] = rate_for_walk(
                    settings.noise_walk, bound, self.lot, self.steps, self.noise_multiplier
                )
            self.algorithm.settle(
                lot=self.lot, steps=self.steps, noise_multiplier=self.noise_multiplier, weights=weights
            )

    def _choose_model(self) -> str:
        """A linear layer for vectors of text, which a hidden layer would only bury in noise; else by the shape."""
        text = isinstance(self.train, Table) and "text" in self.train.kinds.values()
        return "linear" if text or self.settings.features == "scattering" else models.choose(self.input_shape)

    # ---- how much noise ---------------------------------------------------------------------------------------------

    def _settle(self) -> float | None:
        """The noise of a step, and the preprocessing with its own."""
        settings = self.settings
        if self._settled is not None:
            self.epsilon = self._settled.epsilon
            self._prepare(self._settled.prepared_for)
            return self._settled.noise_multiplier
        if not self.algorithm.private:
            if settings.epsilon is not None or settings.noise_multiplier is not None:
                raise ConfigurationError(f"{self.algorithm} is not private: leave epsilon and noise_multiplier out")
            self._prepare(None)
            return None
        if settings.noise_multiplier is not None:
            sigma = PoissonGaussian(settings.noise_multiplier, self.rate).noise_multiplier
            self._prepare(get_accountant("rdp").epsilon([(self._event(sigma), self.steps)], self.delta).epsilon)
            self._say_room(sigma)
            return sigma
        self.epsilon = 1.0 if settings.epsilon is None else settings.epsilon
        if not self.algorithm.sound:  # there is nothing to keep to but what the paper claims
            self._prepare(self.epsilon)
            found = calibrate_noise(self._training, self.epsilon, self.delta, accountant="theorem1")
            return found.noise_multiplier
        self._prepare(self.epsilon)
        sigma = self._calibrated(self.composition, self.epsilon)
        self._say_room(sigma)
        return sigma

    def _calibrated(self, composition: Callable[[float], Composition], epsilon: float) -> float:
        shared = self.ledger is not None and self.ledger.budget is not None
        accountant = "rdp" if shared else self.accountant  # a shared budget is kept by a Renyi filter
        ledger = None if self.account.of_run else self.ledger
        if ledger is None or not ledger.composition():
            return calibrate_noise(composition, epsilon, self.delta, accountant=accountant).noise_multiplier
        first = calibrate_noise(self.alone, epsilon, self.delta, accountant=accountant).noise_multiplier
        try:
            sigma = calibrate_noise(composition, epsilon, self.delta, accountant=accountant).noise_multiplier
        except ConfigurationError:
            raise nothing_left(ledger, epsilon, self.delta, accountant) from None
        insist = self.settings.spend_the_rest
        self.notices += (far_more_noise(ledger, sigma, first, epsilon, self.delta, accountant, insist=insist),)
        return sigma

    def _say_room(self, noise_multiplier: float) -> None:
        """Note or refuse, before anything is spent, that a shared budget does not hold all of this run."""
        if self.ledger is not None and self.algorithm.sound:
            event, beside = self._event(noise_multiplier), [(event, 1) for event in self.events]
            text = little_room(self.ledger, event, self.steps, beside, insist=self.settings.spend_the_rest)
            self.notices += () if text is None else (text,)

    def _prepare(self, epsilon: float | None) -> None:
        """Settle the preprocessing: for tables with a share of the budget, `epsilon` at the run's delta."""
        settings, self._prepared_for = self.settings, epsilon
        sigma = 10.0
        if epsilon is not None and prepared.needs_scales(self.train):
            sigma = noise_multiplier_for_share(epsilon, self.delta, settings.preprocessing_share)
        self.metrics_noise: float | None = None
        self.counts_noise: float | None = None
        if settings.class_weights == class_weights.PAID:
            if epsilon is None:
                raise ConfigurationError(
                    f"{self.algorithm} is not private: there is no budget to pay class counts from"
                )
            self.counts_noise = noise_multiplier_for_share(epsilon, self.delta, class_weights.SHARE)
        if settings.paid_metrics:
            if epsilon is None:
                raise ConfigurationError(f"{self.algorithm} is not private: there is no budget to pay metrics from")
            self.metrics_noise = noise_multiplier_for_share(epsilon, self.delta, METRICS_SHARE)

        def noise_for_share(share: float) -> float:
            if epsilon is None:
                raise ConfigurationError(f"{self.algorithm} is not private: leave mean_share and moments_share out")
            return noise_multiplier_for_share(epsilon, self.delta, share)

        self.estimator = prepared.estimator_for(
            self.train,
            of_features=of_features(settings),
            noise_for_share=noise_for_share,
            pca_noise_multiplier=settings.pca_noise_multiplier,
            pca_components=settings.pca_components,
            table_noise_multiplier=sigma,
            missing=settings.missing,
            seed=self.seed_for("preprocessing"),
        )

    @property
    def settled(self) -> Settled:
        """What a run that resumes this one must not settle again: the ledger holds this one by then."""
        split = None if self.settings.seed is not None else self.split_seed  # a split by the run's seed gives it away
        return Settled(self.noise_multiplier, self.epsilon, self._prepared_for, split)

    def seed_for(self, purpose: str) -> int | None:
        """The seed of one purpose, where the run has one."""
        return derived(self.settings.seed, purpose)

    @property
    def resumable(self) -> bool:
        """Whether the run makes checkpoints."""
        return bool(self.settings.checkpoint_every) and self.algorithm.private and not self.algorithm.looks

    @property
    def dataset_name(self) -> str:
        """What the data is called in its ledger."""
        return self.settings.dataset_name or self.train.name

    @property
    def ledger(self) -> Ledger | None:
        """What the run is charged to; None for a ledger in its own folder."""
        return self.account.ledger

    @property
    def rate(self) -> float:
        """The probability with which an example is in a lot."""
        return self.lot / self.population

    @property
    def accountant(self) -> str:
        """Whose epsilon is printed."""
        return self.algorithm.accountant

    @property
    def events(self) -> tuple[Gaussian, ...]:
        """What preprocessing, class counts and paid metrics release."""
        scales = prepared.planned_events(self.estimator, self.train)
        return (*scales, *class_weights.planned(self.counts_noise), *held_out.planned(self.metrics_noise))

    def _event(self, noise_multiplier: float) -> Event:
        return PoissonGaussian(noise_multiplier, self.rate)

    def _training(self, noise_multiplier: float) -> list[tuple[Event, int]]:
        return [(self._event(noise_multiplier), self.steps)]

    def beside(self) -> list[tuple[Event, int]]:
        """What shares `epsilon` with the training: the run's other releases, and what a ledger that was given holds."""
        spent = [] if self.ledger is None or self.account.of_run else list(self.ledger.composition())
        return [*spent, *((event, 1) for event in self.events)]

    def alone(self, noise_multiplier: float) -> list[tuple[Event, int]]:
        """What this run releases."""
        return [*((event, 1) for event in self.events), *self._training(noise_multiplier)]

    def composition(self, noise_multiplier: float) -> list[tuple[Event, int]]:
        """Everything that the budget is for."""
        return [*self.beside(), *self._training(noise_multiplier)]

    def claimed_epsilon(self) -> float | None:
        """Theorem 1 on the training steps alone, as the paper counts."""
        if self.noise_multiplier is None:
            return None
        spent = get_accountant("theorem1").epsilon(self._training(self.noise_multiplier), self.delta)
        return spent.epsilon if math.isfinite(spent.epsilon) else None

    # ---- what counts as public --------------------------------------------------------------------------------------

    @property
    def population(self) -> int:
        """N, the number of units that lots are drawn from: examples, or persons."""
        return len(self.train) if self.units is None else self.units.declared

    @property
    def unit(self) -> str:
        """The unit of privacy."""
        return DEFAULT_UNIT if self.units is None else PERSON

    @property
    def noun(self) -> str:
        """What N counts. How many rows persons have is not said."""
        return "examples" if self.units is None else "persons"

    @property
    def _counted(self) -> tuple[str, int, int | None]:
        """What N counts, N, and how many of them are held out (None where that is not known)."""
        if self.units is None:
            return "rows", len(self.train), len(self.test)
        held = self.test.persons
        return f"persons ({self.settings.person})", self.population, None if held is None else Units(held).there

    @property
    def rows_or_persons(self) -> int:
        """How many there are in all, which is public: rows, or persons, and then not their rows."""
        return data.HeldOut(self.train, self.test, None).count

    @property
    def numbers(self) -> str:
        """How many units there are, in words."""
        whose, count, held = self._counted
        return f"N = {count:,} {whose} to train on" + ("" if held is None else f", {held:,} held out")

    @property
    def own_data(self) -> bool:
        """Whether the data is the user's own, of which nothing is public but what the user says."""
        return self.settings.dataset not in data.NAMES

    def public(self) -> tuple[str, ...]:
        """What counts as public about the data, in sentences for the reader of the guarantee."""
        if not self.own_data:
            return self.train.public
        whose, count, held = self._counted
        other = "" if held is None else f", {held:,} held out"
        return (f"the number of {whose}: N = {count:,} to train on{other}", *self.train.public)

    @property
    def undeclared(self) -> tuple[str, ...]:
        """What was read off private rows and counts as public: kinds of columns, and classes."""
        if not self.own_data:
            return ()
        found = []
        if not self.settings.classes and self.train.classes:
            found.append(f"classes: {listed(self.train.classes)}")
        if isinstance(self.train, Table):
            kinds = {name: kind for name, kind in self.train.kinds.items() if name not in self.train.declared.kinds}
            found += [f"column {name}: {kind}" for name, kind in kinds.items()]
        return tuple(found)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What looks wrong about the data, for the user's eyes (`adadp.data.doubts`)."""
        return self.train.doubts if isinstance(self.train, Table) else ()

    # ---- what it looks like -----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Every setting as it will be used."""
        asked = self.settings.to_dict()
        for name in ("lr", "schedule", "momentum", "max_grad_norm"):
            asked.pop(name)
        if isinstance(self.train, Dataset):
            asked.pop("preprocessing_share")
        return {
            **asked,
            "delta": self.delta,
            "model": self.model_name,
            "algorithm": self.algorithm.name,
            "reading": self.algorithm.reading or None,
            "epsilon": self.epsilon,
            "noise_multiplier": self.noise_multiplier,
            "lot": self.lot,
            "steps": self.steps,
            "epochs": self.steps * self.rate,
            "device": str(self.device),
            "settings": dict(self.algorithm.settings),
        }


OF_OWN_DATA = (
    "dataset_name", "label", "classes", "drop_other_labels", "test", "test_fraction", "target_range",
    "number", "category", "text", "date", "ignore", "decimal_comma", "person",
)  # fmt: skip
"""Settings that say how data of one's own is to be read."""


def of_features(settings: Settings) -> prepared.OfFeatures | None:
    """How features are to be prepared; None where pixels are trained on."""
    given: dict[str, Any] = {
        "directions": settings.directions,
        "mean_share": settings.mean_share,
        "moments_share": settings.moments_share,
        "feature_power": settings.feature_power,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if settings.features == "scattering":
        return prepared.OfFeatures(**{name.replace("feature_", ""): value for name, value in given.items()})
    if given:
        raise ConfigurationError(
            f"{next(iter(given))} goes with features: give features= (scattering), or leave it out"
        )
    return None


def read_options(settings: Settings) -> dict[str, Any]:
    """How data of the user's own is read: options of `data.read`."""
    return {
        "label": settings.label,
        "classes": settings.classes or None,
        "drop_other_labels": settings.drop_other_labels,
        "number": settings.number,
        "category": settings.category,
        "text": settings.text,
        "date": settings.date,
        "ignore": settings.ignore,
        "target": parse_range(settings.target_range),
        "decimal_comma": settings.decimal_comma,
        "missing": settings.missing,
        "person": settings.person,
        "size": parse_image_size(settings.image_size),
    }


def read(settings: Settings, split: int | None = None) -> HeldOut:
    """The data that the settings name, with its held-out part: that of an earlier run, if its `split` is given."""
    if settings.dataset in data.NAMES:
        for name in OF_OWN_DATA:
            if getattr(settings, name) not in (None, (), False):
                raise ConfigurationError(f"{name} goes with data of your own: {settings.dataset} has a split")
        return HeldOut(
            data.load(settings.dataset, data_dir=settings.data_dir),
            data.load(settings.dataset, "test", data_dir=settings.data_dir),
            None,
        )
    if not Path(settings.dataset).exists():
        raise ConfigurationError(
            f"dataset {settings.dataset!r} is neither {', '.join(data.NAMES)} nor the path of a file or folder"
        )
    return data.read_held_out(
        settings.dataset,
        test=settings.test,
        test_fraction=settings.test_fraction,
        seed=derived(settings.seed, "split") if split is None else split,
        **read_options(settings),
    )


def units_of(settings: Settings, train: Dataset | data.Table, algorithm: algorithms.Algorithm) -> Units | None:
    """Whose the rows are, where that was said."""
    if train.persons is None:
        return None
    if algorithm.looks:
        raise ConfigurationError(f"{algorithm} bounds the loss of each row: with person, take adadp or dpsgd")
    units = Units(train.persons, max_rows=settings.rows_per_person, name=settings.person)
    if settings.microbatch is not None:
        Grouping(units).at_a_time(settings.microbatch)  # which may refuse
    return units


def device_of(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"device must be auto, cpu or cuda, not {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is cuda, but no CUDA device is to be had here: use cpu or auto")
    return device
