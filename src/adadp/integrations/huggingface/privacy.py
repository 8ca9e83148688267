"""The arguments that a private trainer takes beside its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from adadp.accounting.budget import Budget
from adadp.accounting.ledger import Ledger
from adadp.clipping import Clipping, PaidFigures
from adadp.clipping.base import clipping_of
from adadp.distributed.sharded import refuse_settings
from adadp.engine import PrivacyEngine
from adadp.errors import ConfigurationError
from adadp.gradients.collection import LOSS
from adadp.sampling.loader import sampling_of
from adadp.sampling.units import Units, grouping_of

LossOfRows = Callable[[Any, Mapping[str, Any]], Tensor]
"""`loss(outputs, inputs)`: one loss for each row, [n], from the model's outputs and the batch with its labels."""


#: Entries of a trainer's log that are not figures.
_TAKEN = (LOSS, "learning_rate", "epoch", "step", "epsilon", "train_runtime")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What `private(Trainer)` takes beside the trainer's own arguments.

    Attributes:
        target_delta: the delta at which the guarantee is stated.
        target_epsilon: of everything in the ledger, together with the planned steps: the noise is chosen for it. With
            `noise_multiplier` it is a budget: training stops before it is exceeded.
        noise_multiplier: the noise's standard deviation over the bound, in place of a noise chosen for the target.
        max_grad_norm: the bound on each example's gradient, for a clipping given by name (1.0 unless given). The
            `max_grad_norm` of TrainingArguments is something else, and is not used.
        clipping: as in `PrivacyEngine.make_private`.
        max_physical_batch_size: the most examples that the model is run on at once. A lot, which is
            `per_device_train_batch_size` on average (times the number of processes, which share it), comes in as many
            pieces as that takes.
        per_example_loss: `loss(outputs, inputs)` with one loss for each row, [n], where the model's head is none of
            those that are known. The model is called without the labels.
        public_examples: items of public data with the training set's structure: what can be tried is tried on them,
            and on private examples only where they cannot be run.
        public_evaluation: the evaluation set is public, or its people have agreed, and none of it is in the training
            set. Then evaluation may decide what is kept (`load_best_model_at_end`), when training stops and the rate.
            The guarantee states this as an assumption.
        logged_loss_most: log the training loss: the mean over the lot of losses cut to 0..this number. It is one more
            coordinate of each step's release (`adadp.clipping.PaidFigures`); a hundredth of the step's privacy cost is
            its share, and its noise has a standard deviation of 5 noise multipliers times this number over the lot.
        logged_figures: log means of other figures in the same way: by name (low, high, function), where
            `function(outputs, inputs)` returns one number for each row, [n], as `per_example_loss` does. The hundredth
            is split: with k of them, and the loss, the noise of each is sqrt(k) times what it has alone.
        ledger, dataset, seed, accountant, secure_mode, strict: as in `PrivacyEngine`.
        unit: whose each row of the training set is: ids, or `Units`, or the name of a column of a datasets.Dataset. The
            guarantee is then for all rows of one person, and `per_device_train_batch_size` counts persons.
        sampling, normalize_clipping, pad_lots, through_func, func_chunk: as in `PrivacyEngine.make_private`.

    """

    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    clipping: str | Clipping = "flat"
    max_physical_batch_size: int | None = None
    per_example_loss: LossOfRows | None = None
    public_examples: Any = None
    public_evaluation: bool = False
    logged_loss_most: float | None = None
    logged_figures: Mapping[str, tuple[float, float, LossOfRows]] | None = None
    ledger: Ledger | str | Path | None = None
    dataset: str | None = None
    seed: int | None = None
    accountant: str = "pld"
    secure_mode: bool = False
    strict: bool = False
    unit: Units | Iterable[Any] | None = None
    sampling: str = "poisson"
    normalize_clipping: bool = False
    pad_lots: bool = False
    through_func: Iterable[str] = ()
    func_chunk: int = 32

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ConfigurationError(
                "a private trainer needs target_epsilon=, for which the noise is chosen, or noise_multiplier="
            )
        if self.target_epsilon is not None:
            Budget(self.target_epsilon, self.target_delta)  # which says what is wrong with them
        self._refuse_figures()

    def engine(self) -> PrivacyEngine:
        """A new engine; it has a budget where both a target and a noise are given."""
        budget = None
        if self.noise_multiplier is not None and self.target_epsilon is not None:
            budget = Budget(self.target_epsilon, self.target_delta)
        return PrivacyEngine(
            accountant=self.accountant,
            secure_mode=self.secure_mode,
            seed=self.seed,
            ledger=self.ledger,
            dataset=self.dataset,
            budget=budget,
            strict=self.strict,
        )

    def units(self, dataset: Any) -> Units | None:
        """Whose each row of the training set is."""
        if self.unit is None or isinstance(self.unit, Units):
            return self.unit
        if isinstance(self.unit, str):
            if self.unit not in getattr(dataset, "column_names", ()):
                raise ConfigurationError(f"unit={self.unit!r} is no column of train_dataset: give the ids themselves")
            return Units(list(dataset[self.unit]), name=self.unit)
        return Units(self.unit)

    def lots(self, loader: DataLoader[Any], units: Units | None) -> int:
        """How many lots an epoch has."""
        return len(sampling_of(loader, self.sampling, None, grouping_of(units, 1, loader)))

    def _clipping(self) -> dict[str, Any]:
        bounds = {} if self.logged_loss_most is None else {LOSS: (0.0, self.logged_loss_most)}
        bounds |= {name: (low, high) for name, (low, high, _) in (self.logged_figures or {}).items()}
        if not bounds:
            return {"clipping": self.clipping, "max_grad_norm": self.max_grad_norm}
        return {"clipping": PaidFigures(clipping_of(self.clipping, self.max_grad_norm), bounds)}

    def figures(self) -> dict[str, LossOfRows]:
        """The functions of `logged_figures`."""
        return {name: function for name, (_, _, function) in (self.logged_figures or {}).items()}

    def _refuse_figures(self) -> None:
        for name, given in (self.logged_figures or {}).items():
            if not (isinstance(given, tuple | list) and len(given) == 3 and callable(given[2])):
                raise ConfigurationError(
                    f"logged_figures[{name!r}] must be (low, high, function), function(outputs, inputs) returning [n]"
                )
            if name in _TAKEN:
                instead = ": give logged_loss_most= for the loss" if name == LOSS else ": call the figure otherwise"
                raise ConfigurationError(f"logged_figures[{name!r}]: the log has an entry of that name{instead}")

    def make_private(
        self, engine: PrivacyEngine, *, steps: int, noise_multiplier: float | None = None, **parts: Any
    ) -> Any:
        """Model, optimizer and loader (`parts`), private for `steps` planned lots.

        `noise_multiplier` is that of an interrupted run, which goes on under the same target.
        """
        refuse_settings(parts["module"], {"a trainer of Hugging Face": True})
        parts |= {
            "steps": steps,
            **self._clipping(),
            "normalize_clipping": self.normalize_clipping,
            "sampling": self.sampling,
            "max_physical_batch_size": self.max_physical_batch_size,
            "pad_lots": self.pad_lots,
            "through_func": self.through_func,
            "func_chunk": self.func_chunk,
            "public_examples": self.public_examples,
        }
        if self.target_epsilon is None or self.noise_multiplier is not None:
            return engine.make_private(noise_multiplier=self.noise_multiplier, **parts)  # type: ignore[arg-type]
        if noise_multiplier is None:
            target = {"target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
            return engine.make_private_with_epsilon(**target, **parts)  # type: ignore[arg-type]
        engine._join(parts["module"])
        engine._open()  # before it has a budget: that would be one of the whole ledger
        engine.budget = Budget(self.target_epsilon, self.target_delta)
        return engine.make_private(noise_multiplier=noise_multiplier, **parts)


def taken_from(arguments: dict[str, Any]) -> Privacy:
    """The privacy arguments among a trainer's keyword arguments, which are taken out of them."""
    own = {field.name: arguments.pop(field.name) for field in fields(Privacy) if field.name in arguments}
    if "target_delta" not in own:
        raise ConfigurationError("a private trainer needs target_delta=, for instance 1 / (10 * len(train_dataset))")
    return Privacy(**own)
