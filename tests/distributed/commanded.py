"""What processes of a team do: `adadp train`, watched for what it releases and where."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from adadp import training
from adadp.cli import app
from adadp.distributed.group import Processes
from adadp.distributed.launched import launched
from adadp.distributed.share import Share
from adadp.errors import InterruptedRunError
from adadp.mechanism import step as mechanism
from adadp.preprocessing import release
from adadp.training import class_weights, held_out, loop, planning, preparation, together
from adadp.training.settings import Settings

STEPS = 12
QUICK: dict[str, Any] = {
    "dataset": "digits", "model": "linear", "steps": STEPS, "lot": 100, "evaluations": 2, "checkpoint_every": 0.001,
}  # fmt: skip


@dataclass
class Seen:
    """What one process did in a run, and what the run said of itself."""

    rows: list[bytes] = field(default_factory=list)  # digests of what it trains on, and of what it held out
    noise: int = 0  # how often it drew noise for something else than a step
    lots: list[list[int]] = field(default_factory=list)  # its part of each
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    result: dict[str, Any] = field(default_factory=dict)


def table(path: Path, rows: int = 400, seed: int = 0) -> str:
    """Columns without declared kinds, so that their scales have to be paid for."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, rows)
    amount = generator.normal(5_000 + 4_000 * labels, 1_000)
    lines = ["amount,year,colour,label"]
    lines += [f"{amount[i]:.2f},{1950 + i % 50},{'red' if i % 3 else 'green'},{labels[i]}" for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@contextmanager
def replaced(holder: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Within, an attribute is what `made` makes of it."""
    before = getattr(holder, name)
    setattr(holder, name, made(before))
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Within, note what this process trains on, its lots, and its draws of noise beside the steps."""

    def rows(sound: Any) -> Any:
        def made(*given: Any, **more: Any) -> Tensor:
            found: Tensor = sound(*given, **more)
            seen.rows.append(hashlib.sha256(found.numpy().tobytes()).digest())
            return found

        return made

    def noise(sound: Any) -> Any:
        def drawn(*given: Any) -> Any:
            seen.noise += 1
            return sound(*given)

        return drawn

    def places(sound: Any) -> Any:
        def found(share: Share, drawn: Tensor) -> Tensor:
            kept: Tensor = sound(share, drawn)
            seen.lots.append(drawn[kept].tolist())
            return kept

        return found

    beside = replaced(release, "standard_normal", noise)
    with replaced(preparation, "rows", rows), beside, replaced(Share, "places", places):
        yield


def trained(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Seen | str]:
    """One run after the other; the text of an error in place of what was seen."""
    found: dict[str, Seen | str] = {}
    for name, case in cases.items():
        found[name] = one(rank, **case)
    return found


def one(rank: int = 0, bug: str | None = None, folders: list[str] | None = None, **options: Any) -> Seen | str:
    """A run, with a planted bug or without; `folders` are those that the processes are in."""
    seen = Seen()
    if folders is not None:
        os.chdir(folders[rank])
    try:
        with watching(seen), planted(bug):
            result = training.train(**{**QUICK, **options})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seen.weights = torch.cat([value.detach().flatten() for value in result.plan.model.parameters()]).cpu()
    seen.result = {**result.to_dict(), "seconds": None}
    return seen


def commanded(rank: int, size: int, lines: dict[str, list[str]]) -> dict[str, tuple[int, str, str]]:
    """Exit code, standard output and standard error of one command after the other."""
    found = {}
    for name, line in lines.items():
        said, complained = io.StringIO(), io.StringIO()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(name == "restarted"))
        with redirect_stdout(said), redirect_stderr(complained):
            try:
                app(line)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        found[name] = code, said.getvalue(), complained.getvalue()
    return found


@contextmanager
def noting_releases(note: Callable[[bytes], object]) -> Iterator[None]:
    """Within, `note` gets a digest of each release of this process, before anything follows from it."""

    def steps(sound: Any) -> Any:
        def drawn(*given: Any) -> Any:
            found = sound(*given)
            note(hashlib.sha256(b"".join(value.numpy().tobytes() for value in found.values())).digest())
            return found

        return drawn

    def beside(sound: Any) -> Any:
        def drawn(*given: Any) -> Any:
            found = sound(*given)
            note(hashlib.sha256(found.tobytes()).digest())
            return found

        return drawn

    with replaced(mechanism, "add_noise", steps), replaced(release, "standard_normal", beside):
        yield


def stopped(rank: int, size: int, folder: str, who: int, seed: int | None) -> tuple[str, list[bytes]]:
    """A run that process `who` alone is asked to stop; what it said, and its releases."""
    asked, released = [0], []

    def stop() -> bool:
        asked[0] += 1
        return rank == who and asked[0] > 5

    settings = Settings(**QUICK, algorithm="dpsgd", noise_multiplier=3.0, out=folder, seed=seed)
    with launched() as group, noting_releases(released.append):
        plan = together.settled_together(group, lambda: planning.Plan(settings, group=group))
        try:
            loop.run(plan, None, stop)
        except InterruptedRunError as error:
            return str(error), released
    return "not stopped", released


def resumed(rank: int, size: int, folder: str, seed: int | None) -> tuple[int, list[bytes]]:
    """How many steps it came to, and the releases since."""
    released: list[bytes] = []
    with noting_releases(released.append):
        return training.resume(folder, seed=seed).steps, released


def until_killed(rank: int, size: int, folder: str, number: int) -> None:
    """Train in a folder of this number or go on there; each release leaves a byte in a file of this process."""
    released = os.open(f"{folder}/released-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    place = Path(folder) / f"run-{number}"
    with noting_releases(lambda digest: os.write(released, b"x")):
        if (place / "run.json").exists():
            training.resume(place)
        else:
            options = {"dataset": f"{folder}/table.csv", "paid_metrics": True, "lot": 40, "out": str(place)}
            training.train(**{**QUICK, "algorithm": "dpsgd", "noise_multiplier": 5.0, **options})


# ---- bugs that the tests must catch ---------------------------------------------------------------------------------


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Within, several processes do one thing wrong."""
    if name is None:
        yield
        return
    with replaced(*BUGS[name]):
        yield


def _each_fits(sound: Any) -> Any:
    """Every process draws noise of its own for the preprocessing: charged once, released twice."""

    def from_first(self: Processes, make: Any) -> Any:
        found = sound(self, make)
        if getattr(make, "__name__", "") == "_fit" and found is not None and not self.first:
            execution = make.__self__
            return preparation.fit(execution.plan.estimator, execution.plan.train, ledger=None)
        return found

    return from_first


def _each_counts(sound: Any) -> Any:
    """Every process releases the class counts, and weighs its own examples by its own."""

    def from_first(self: Processes, make: Any) -> Any:
        found = sound(self, make)
        if getattr(make, "__name__", "") == "_class_weights" and not self.first:
            plan = make.__self__.plan
            return class_weights.paid(
                plan.train.labels, len(plan.train.classes), plan.counts_noise, persons=None, seed=None, ledger=None
            )
        return found

    return from_first


def _fits_twice(sound: Any) -> Any:
    """Released twice, with other noise, and charged twice: somebody may take the mean."""

    def fit(self: Any) -> Any:
        sound(self)
        return sound(self)

    return fit


def _fits_uncharged(sound: Any) -> Any:
    """A second release that the ledger does not know of."""

    def fit(self: Any) -> Any:
        found = sound(self)
        return preparation.fit(found, self.plan.train, ledger=None)

    return fit


def _each_splits(sound: Any) -> Any:
    """Every process holds out rows of its own choice: what one tests on another trains on."""

    def read(settings: Any, split: int | None = None) -> Any:
        return sound(settings, split if dist.get_rank() == 0 else None)

    return read


def _each_measures(sound: Any) -> Any:
    """Every process releases the figures on the held-out rows."""

    def from_first(self: Processes, make: Any) -> Any:
        found = sound(self, make)
        work = getattr(make, "func", None)
        if getattr(work, "__name__", "") == "_finish" and not self.first:
            execution = work.__self__
            outputs = held_out.outputs_of(make.args[0], execution.test)
            metrics = held_out.paid(execution.plan.test, outputs, execution.plan.metrics_noise, seed=None, ledger=None)
            return (metrics, *found[1:])
        return found

    return from_first


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "each fits": (Processes, "from_first", _each_fits),
    "each counts": (Processes, "from_first", _each_counts),
    "fits twice": (loop._Execution, "_fit", _fits_twice),
    "fits uncharged": (loop._Execution, "_fit", _fits_uncharged),
    "each splits": (planning, "read", _each_splits),
    "each measures": (Processes, "from_first", _each_measures),
}
