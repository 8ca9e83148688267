"""`adadp train` and interruptions: what a run's folder holds from its start on, and how a run goes on from there.

| file | |
| --- | --- |
| `run.json` | the settings as they were asked for, without the seed, and the numbers that were settled from the ledger |
| `checkpoint.safetensors`, `.before` | the last two checkpoints (`adadp.checkpoint`): before the first lot, every `checkpoint_every` seconds, when the run is stopped, and after the last lot |
| `lock` | held by the process that works in the folder |
"""  # noqa: E501  (a table's rows are one line each)

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from adadp import checkpoint
from adadp.accounting.guarantee import Guarantee, round_up
from adadp.accounting.ledger import Ledger
from adadp.data import NAMES
from adadp.distributed.group import Group
from adadp.engine import PrivacyEngine
from adadp.errors import CheckpointError, ConfigurationError, InterruptedRunError, NotFiniteError
from adadp.mechanism.resuming import Resumed
from adadp.mechanism.run_state import refuse_unless_finite
from adadp.training.planning import Plan, Settled
from adadp.training.settings import from_mapping

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RUN, CHECKPOINT, LOCK = "run.json", "checkpoint.safetensors", "lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only process that works in the folder. Raises where another one does."""
    if fcntl is None:
        yield
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process trains in {folder}: wait for it to end") from None
        yield
    finally:
        os.close(file)


# ---- what is written when a run starts ------------------------------------------------------------------------------


def note_start(folder: Path, plan: Plan) -> None:
    """Write down how the run was asked for, before anything is released."""
    settings = {**plan.settings.to_dict(), "seed": None}  # whoever knows the seed can take the noise off
    for name in ("dataset", "test", "ledger", "data_dir"):
        value = settings[name]
        if value is not None and not (name == "dataset" and value in NAMES):
            settings[name] = str(Path(value).resolve())
    _write(folder, {"settings": settings, "settled": asdict(plan.settled), "seeded": plan.settings.seed is not None})


def note_preprocessing(folder: Path, run: str) -> None:
    """Write down which run of the ledger was charged for the preprocessing."""
    _write(folder, {**_read(folder), "preprocessing": run})


def preprocessing_run(folder: Path) -> str | None:
    """Which run of the ledger was charged for the preprocessing, as far as it was made."""
    return _read(folder).get("preprocessing")


def note_class_counts(folder: Path, run: str, weights: Sequence[float]) -> None:
    """Write down which run of the ledger was charged for class counts, and the weights that follow from them."""
    _write(folder, {**_read(folder), "class_counts": {"run": run, "weights": list(weights)}})


def class_counts(folder: Path) -> tuple[str, list[float]] | None:
    """What `note_class_counts` wrote down; None if class counts were not released yet."""
    kept = _read(folder).get("class_counts")
    return None if kept is None else (str(kept["run"]), [float(weight) for weight in kept["weights"]])


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    part = folder / f".{RUN}.part"
    with part.open("w") as file:
        file.write(json.dumps(values, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / RUN)


def _read(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / RUN).read_text())
        return dict(values)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder} is not the folder of a run that can be resumed: it has no {RUN}. Folders of runs that were made "
            "with checkpoint_every=0, or before checkpoints were written, have none"
        ) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{folder / RUN} is damaged: {error}") from None


# ---- going on -------------------------------------------------------------------------------------------------------


def plan_to_resume(
    path: str | Path, *, seed: int | None = None, checkpoint_every: float | None = None, group: Group | None = None
) -> Plan:
    """The plan of the run in a folder, as it was settled then.

    Args:
        path: the run's folder.
        seed: the run's, if it had one and is to go on with it.
        checkpoint_every: seconds; None is what it was.
        group: the processes that go on with it.

    Raises:
        ConfigurationError: the run has ended, or there is nothing to go on from.

    """
    folder = Path(path)
    values = _read(folder)
    if (folder / "result.json").exists():
        raise ConfigurationError(f"the run in {folder} has ended: result.json says what came out")
    try:
        stored = from_mapping(values["settings"], str(folder / RUN))
        settled = Settled(**values["settled"])
        seeded = bool(values["seeded"])
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder / RUN} is damaged: {error}") from None
    own = stored.dataset not in NAMES and stored.test is None
    if seeded and seed is None and own:
        raise ConfigurationError("this run's seed also chose the rows that were held out: give the same --seed again")
    every = stored.checkpoint_every if checkpoint_every is None else checkpoint_every
    asked = replace(stored, seed=seed, checkpoint_every=every, out=str(folder))
    return Plan(asked, settled, resumed=True, group=group)


def source(folder: Path, ledger: Ledger, seed: int | None) -> Path | dict[str, Any] | None:
    """What the engine goes on from; None if the run had not begun."""
    path = folder / CHECKPOINT
    if path.exists() or checkpoint.before(path).exists():
        return path
    begun = None if seed is None else ledger.unused(seed)
    return None if begun is None else Resumed.beginning(begun)


class Checkpoints:
    """The checkpoints of one run: when they are due, and what is said where they cannot be made.

    Args:
        folder: the run's.
        every: seconds between two of them.
        engine: None for an algorithm that is not private.
        model: what is trained.
        schedule: its learning-rate scheduler.
        on: whether any are made, in this process.

    Attributes:
        last: after how many lots the last one was made; None if there is none.

    """

    def __init__(
        self,
        folder: Path,
        every: float,
        engine: PrivacyEngine | None,
        model: nn.Module,
        schedule: Any,
        *,
        on: bool,
    ) -> None:
        self.path, self.every = folder / CHECKPOINT, every
        self._folder, self._engine, self._model, self._schedule = folder, engine, model, schedule
        self.on = on and engine is not None
        resumed = None if engine is None else engine.resumed
        self.last = None if resumed is None or resumed.path is None else resumed.lot
        self._made = time.monotonic()

    def first(self) -> None:
        """Make one before the first lot, so that there is always one to go on from."""
        if self.on and self.last is None:
            self.make(0)

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self.on and time.monotonic() - self._made >= self.every

    def make(self, lot: int) -> None:
        """Make one after so many lots."""
        if not self.on or self._engine is None:
            return
        self.refuse_unless_finite(lot)
        self._engine.save_checkpoint(self.path, module=self._model, scheduler=self._schedule)
        self.last, self._made = lot, time.monotonic()

    def refuse_unless_finite(self, lot: int) -> None:
        """Raise where a weight is not finite; say which checkpoint is good."""
        try:
            refuse_unless_finite(self._model, lot)
        except NotFiniteError as error:
            rate = max(self._schedule.base_lrs)
            good = "There is no checkpoint." if self.last is None else f"Weights of step {self.last:,}: {self.path}."
            raise NotFiniteError(
                f"step {lot:,}: {error} {good} Train anew with an --lr well below {rate:.3g}, or a smaller "
                "--max-grad-norm"
            ) from None

    def interrupted(self, lot: int, steps: int, spent: Guarantee, *, seeded: bool) -> InterruptedRunError:
        """What to say when the run was stopped after so many lots."""
        epsilon = "no epsilon: there is no guarantee" if spent.epsilon is None else f"epsilon {round_up(spent.epsilon)}"
        cost = f"{epsilon} (delta {round_up(spent.delta)})" if spent.epsilon is not None else epsilon
        text = f"stopped after {lot:,} of {steps:,} steps; charged so far, the rest of the plan included: {cost}. "
        if self.on:
            return InterruptedRunError(
                text + f"Go on with: adadp train --resume {self._folder}{' --seed (the same)' if seeded else ''}"
            )
        return InterruptedRunError(text + "It cannot be gone on with: it makes no checkpoints")


__all__ = ["CheckpointError", "Checkpoints", "held", "note_start", "plan_to_resume"]
