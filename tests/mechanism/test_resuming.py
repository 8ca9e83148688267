"""Runs that are interrupted and go on: bit for bit with their seed, charged for everything without one."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, Grouped, Ledger, Paid, PrivacyEngine, Probe, Released
from adadp.accounting.unused import boot_id
from adadp.algorithms.agd import AGD
from adadp.algorithms.algorithm import Task
from adadp.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigurationError,
    LedgerError,
    NotFiniteError,
    NotTheSameRunError,
    PrivacyError,
    TrainingLoopError,
)
from adadp.mechanism.attempts import Attempt
from adadp.mechanism.observation import Observer, Unnoised
from adadp.mechanism.optimizer import BudgetWarning
from adadp.mechanism.sums import NoisedSums
from adadp.sampling.loader import PrivateLoader
from adadp.shapes.probes import Vectors

LOTS, LOT, ROWS = 24, 20, 200
CLIPPINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "flat": lambda: {"clipping": "flat", "max_grad_norm": 1.0},
    "probe": lambda: {"clipping": Ellipsoid(1.0, source=Probe(Vectors(8), count=32, every=5))},
    "released": lambda: {"clipping": Ellipsoid(1.0, source=Released())},
    "paid": lambda: {"clipping": Ellipsoid(1.0, source=Paid(every=3))},
    "local": lambda: {"clipping": "local", "max_grad_norm": 1.0},
    "grouped": lambda: {
        "clipping": Grouped({"0.*": Ellipsoid(1.0, source=Released()), "*": Ellipsoid(2.0, source=Paid())})
    },
}


@dataclass
class Training:
    """A model with its engine and loop."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: Any
    loader: PrivateLoader
    scheduler: Any

    @property
    def done(self) -> int:
        return self.loader.lots.next

    def go(self, until: int = LOTS, *, save: Path | None = None, every: int = 5) -> Training:
        while self.done < until and not self.loader.stopped:
            for inputs, labels in self.loader:
                self.optimizer.zero_grad()
                losses = nn.functional.cross_entropy(self.model(inputs), labels, reduction="none")
                self.optimizer.backward(losses)
                self.optimizer.step()
                if self.optimizer.stepped:
                    self.scheduler.step()
                    if save is not None and self.done % every == 0:
                        self.save(save)
                if self.done >= until:
                    break
        return self

    def save(self, path: Path) -> Training:
        self.engine.save_checkpoint(path, module=self.model, scheduler=self.scheduler, extra={"done": self.done})
        return self

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().clone() for parameter in self.model.parameters()])


def rows(changed: int | None = None) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(ROWS, 8, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    if changed is not None:
        inputs[changed:] *= -1
    return TensorDataset(inputs, labels)


def training(
    clipping: str = "flat",
    *,
    data: TensorDataset | None = None,
    steps: int | None = LOTS,
    noise: float = 1.0,
    hidden: int = 6,
    given: dict[str, Any] | None = None,
    **engine_settings: Any,
) -> Training:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = PrivacyEngine(dataset="rows", **engine_settings)
    module, private, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(rows() if data is None else data, batch_size=LOT),
        noise_multiplier=noise,
        steps=steps,
        **(given or CLIPPINGS[clipping]()),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(private, T_max=LOTS)
    engine.restore(scheduler)
    return Training(engine, module, private, loader, scheduler)


def steps_charged(ledger: Path) -> int:
    return sum(count for _, count in Ledger(ledger).charged())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


# ---- with the same seed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_resumed_run_with_its_seed_ends_in_the_same_model(clipping: str, folder: Path) -> None:
    whole = training(clipping, seed=7, ledger=folder / "whole.jsonl").go()
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    training(clipping, **settings).go(13, save=folder / "c").engine.close()
    resumed = training(clipping, resume=folder / "c", **settings)
    assert resumed.engine.resumed is not None
    assert (resumed.engine.resumed.lot, resumed.engine.resumed.extra) == (10, {"done": 10})
    assert resumed.scheduler.last_epoch == 10
    resumed.go()
    assert torch.equal(whole.weights(), resumed.weights())
    # Lots 10 to 12 were the very same releases.
    assert sum(count for _, count in resumed.engine._open().charged()) == LOTS
    if clipping != "local":
        assert resumed.engine.guarantee(1e-5).epsilon == whole.engine.guarantee(1e-5).epsilon


def test_a_run_is_resumed_again_and_again(folder: Path) -> None:
    whole = training("probe", seed=7, ledger=folder / "whole.jsonl").go()
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    training("probe", **settings).go(7, save=folder / "c").engine.close()
    for until in (6, 9, 14, 12, 22):  # two of them get no further than the one before
        training("probe", resume=folder / "c", **settings).go(until, save=folder / "c").engine.close()
    resumed = training("probe", resume=folder / "c", **settings).go()
    assert torch.equal(whole.weights(), resumed.weights())
    assert sum(count for _, count in resumed.engine._open().charged()) == LOTS


def test_changed_data_never_get_the_noise_that_other_sums_had(folder: Path) -> None:
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    seen = Seen()
    first = training(**settings)
    first.optimizer.observe(seen)
    first.go(13, save=folder / "c").engine.close()
    changed = training(resume=folder / "c", data=rows(changed=100), **settings)
    again = Seen()
    changed.optimizer.observe(again)
    with pytest.raises(NotTheSameRunError, match=r"lot 10 was released before .* nothing was released"):
        changed.go()
    assert not again.noise  # what was refused never met its noise
    changed.engine.close()
    # The attempt has ended: the next one has other lots and other noise, and pays for them.
    before = steps_charged(folder / "ledger.jsonl")
    resumed = training(resume=folder / "c", data=rows(changed=100), steps=LOTS, **settings)
    resumed.optimizer.observe(again)
    resumed.go(LOTS)
    resumed.engine.close()
    assert steps_charged(folder / "ledger.jsonl") == before + LOTS - 10
    assert set(seen.noise) & set(again.noise) == {10, 11, 12}
    for lot in set(seen.noise) & set(again.noise):
        assert not torch.equal(seen.noise[lot], again.noise[lot])
        # Two releases on one draw of a lot would cost more than one release on each of two draws.
        drawn = [run.loader.sampling.draw(lot, run.optimizer._step._randomness) for run in (first, resumed)]
        assert not torch.equal(*drawn)
    # And it is interrupted and resumed like any other.
    third = training(resume=folder / "c", data=rows(changed=100), **settings).go()
    assert torch.equal(third.weights(), resumed.weights())


class Seen(Observer):
    """Collects the noise of each lot."""

    def __init__(self) -> None:
        self.noise: dict[int, Tensor] = {}
        self._sums: Tensor | None = None

    def noising(self, release: Unnoised) -> NoisedSums | None:
        self._sums = torch.cat([value.flatten() for value in release.sums.values()]).clone()
        return None

    def noised(self, release: Unnoised, noisy: NoisedSums) -> None:
        assert self._sums is not None
        self.noise[release.lot] = torch.cat([value.flatten() for value in noisy.values()]) - self._sums


def test_digests_that_are_lost_or_damaged_end_the_attempt(folder: Path) -> None:
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    training(**settings).go(13, save=folder / "c").engine.close()
    whole = training(seed=7, ledger=folder / "whole.jsonl").go()
    sums = folder / "ledger.jsonl.sums"
    for damage in (b"", sums.read_bytes().replace(b" 11 ", b" 1x "), sums.read_bytes()[:-200] + b"\0" * 200):
        for name in ("ledger.jsonl", "ledger.jsonl.head"):
            shutil.copy(folder / name, folder / f"copy.{name}")
        copy = folder / "copy.ledger.jsonl"
        (folder / "copy.ledger.jsonl.sums").write_bytes(damage)
        resumed = training(resume=folder / "c", seed=7, ledger=copy).go()
        assert not torch.equal(whole.weights(), resumed.weights())
        resumed.engine.close()
        assert steps_charged(copy) == 13 + LOTS - 10
        for file in folder.glob("copy.*"):
            file.unlink()


def test_a_run_that_may_have_lost_digests_in_a_restart_makes_a_new_attempt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    dying(folder, 13, seed=7)
    monkeypatch.setattr("adadp.accounting.ledger.boot_id", lambda: "another")
    monkeypatch.setattr("adadp.mechanism.resuming.boot_id", lambda: "another")
    before = steps_charged(folder / "ledger.jsonl")
    resumed = training(resume=folder / "c", **settings)
    assert resumed.optimizer._step._randomness.attempt != 0
    resumed.go()
    resumed.engine.close()
    assert steps_charged(folder / "ledger.jsonl") == before + LOTS - 10


def test_a_seed_goes_on_in_the_line_of_its_own_run_alone(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    training(seed=7, ledger=ledger).go(6, save=folder / "c").engine.close()
    with pytest.raises(LedgerError, match="seed has been used"):
        training(seed=7, ledger=ledger)
    training(seed=8, ledger=ledger).go(6, save=folder / "d").engine.close()
    with pytest.raises(LedgerError, match="seed has been used"):
        training(seed=8, resume=folder / "c", ledger=ledger)
    # Another seed, or none, is a new attempt in any case.
    for other in (9, None):
        resumed = training(seed=other, resume=folder / "c", ledger=ledger)
        made = sum(count for _, count in resumed.engine._open().charged())
        resumed.go(8)
        assert sum(count for _, count in resumed.engine._open().charged()) == made + 3
        resumed.engine.close()


def test_a_resumed_engine_with_a_seed_makes_no_second_run(folder: Path) -> None:
    training(seed=7, ledger=folder / "l.jsonl").go(6, save=folder / "c").engine.close()
    resumed = training(seed=7, resume=folder / "c", ledger=folder / "l.jsonl")
    other = nn.Linear(8, 3)
    with pytest.raises(ConfigurationError, match="makes no second run"):
        resumed.engine.make_private(
            module=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            data_loader=DataLoader(rows(), batch_size=LOT), noise_multiplier=1.0,
        )  # fmt: skip


# ---- what it costs --------------------------------------------------------------------------------------------------


def test_without_a_seed_lots_that_are_run_again_are_charged_again(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    training(ledger=ledger, steps=None).go(13, save=folder / "c").engine.close()
    resumed = training(resume=folder / "c", ledger=ledger, steps=None).go()
    resumed.engine.close()
    assert steps_charged(ledger) == 13 + LOTS - 10
    assert Ledger(ledger).runs[1].resumes == "run-1"


def test_a_plan_is_charged_once_and_lots_run_again_come_on_top(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    training(ledger=ledger).go(10, save=folder / "c").engine.close()
    resumed = training(resume=folder / "c", ledger=ledger)
    assert sum(count for _, count in Ledger(ledger).composition()) == LOTS
    resumed.go().engine.close()
    assert sum(count for _, count in Ledger(ledger).composition()) == LOTS
    late = training(resume=folder / "c", ledger=ledger).go(12)
    late.engine.close()
    assert sum(count for _, count in Ledger(ledger).composition()) == LOTS + 2


def test_a_budget_ends_the_resumed_run_where_lots_were_run_twice(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    whole = training(ledger=folder / "whole.jsonl")
    epsilon = whole.go().engine.get_epsilon(1e-5)
    settings: dict[str, Any] = {"ledger": ledger, "budget": (epsilon * 1.0001, 1e-5)}
    training(**settings).go(13, save=folder / "c").engine.close()
    resumed = training(resume=folder / "c", **settings)
    with pytest.warns(BudgetWarning):
        resumed.go()
    assert resumed.done - 1 == LOTS - 3  # the lot that did not fit was handed out
    assert resumed.engine.get_epsilon(1e-5) <= epsilon * 1.0001


DYING = """
import os, sys
sys.path[:0] = sys.argv[5:]
from pathlib import Path
from mechanism.test_resuming import training
folder, until, seed = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
resume = {"resume": folder / "c"} if (folder / "c").exists() else {}
training(seed=seed, ledger=folder / "ledger.jsonl", **resume).save(folder / "c").go(until, save=folder / "c")
os._exit(9)
"""


def dying(folder: Path, until: int, *, seed: int | None) -> None:
    """A run that is killed after so many lots, without a word."""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", DYING, str(folder), str(until), str(seed), "", tests, *sys.path]
    assert subprocess.run(command, check=False).returncode == 9


@pytest.mark.skipif(boot_id() is None, reason="the system does not say when it was started")
@pytest.mark.parametrize("seed", [7, None])
def test_what_a_killed_run_reserved_and_did_not_release_is_inherited(folder: Path, seed: int | None) -> None:
    ledger = folder / "ledger.jsonl"
    dying(folder, 13, seed=seed)
    reserved = steps_charged(ledger)
    assert reserved >= 13
    resumed = training(resume=folder / "c", seed=seed, ledger=ledger).go()
    resumed.engine.close()
    assert steps_charged(ledger) == (LOTS if seed else 13 + LOTS - 10)
    if seed:
        whole = training(seed=seed, ledger=folder / "whole.jsonl").go()
        assert torch.equal(whole.weights(), resumed.weights())


@pytest.mark.parametrize("seed", [7, None])
def test_at_every_moment_the_ledger_holds_what_was_released(
    folder: Path, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at each moment around a release: what the files say then is resumed, and never less than was made."""
    ledger, made, crashes = folder / "ledger.jsonl", [0], []
    monkeypatch.setattr("adadp.accounting.unused.file_number", lambda file: 0)  # copies stand for the files themselves
    names = ("ledger.jsonl", "ledger.jsonl.head", "ledger.jsonl.left", "ledger.jsonl.sums", "c")

    def crash() -> None:
        """Keep the files as they would be found after one."""
        copy = folder / f"crash-{len(crashes)}"
        copy.mkdir()
        for name in names:
            if (folder / name).exists():
                shutil.copy(folder / name, copy / name)
        crashes.append((copy, made[0]))

    from adadp.mechanism import step as step_file

    real = step_file.add_noise

    def watched(*arguments: Any) -> NoisedSums:
        crash()  # charged, and not released
        found = real(*arguments)
        made[0] += 1
        crash()
        return found

    admit = Attempt.admit

    def watched_admission(self: Attempt, lot: int, sums: Any, stddev: Any, event: Any, charge: Any) -> None:
        admit(self, lot, sums, stddev, event, lambda event: (charge(event), crash())[0])  # charged, not written down

    first = training(seed=seed, ledger=ledger, steps=None).save(folder / "c")
    monkeypatch.setattr(step_file, "add_noise", watched)
    monkeypatch.setattr(Attempt, "admit", watched_admission)
    first.go(4, save=folder / "c", every=3)
    monkeypatch.setattr(step_file, "add_noise", real)
    monkeypatch.setattr(Attempt, "admit", admit)
    first.engine.close()
    whole = None if seed is None else training(seed=seed, ledger=folder / "whole.jsonl", steps=None).go(6)
    assert len(crashes) == (12 if seed else 8)
    for copy, released in crashes:
        assert steps_charged(copy / "ledger.jsonl") >= released
        resumed = training(resume=copy / "c", seed=seed, ledger=copy / "ledger.jsonl", steps=None)
        at = resumed.engine.resumed.lot if resumed.engine.resumed is not None else -1
        resumed.go(6).engine.close()
        charged = steps_charged(copy / "ledger.jsonl")
        if whole is not None:
            assert torch.equal(whole.weights(), resumed.weights()), copy
            assert charged == 6
        else:
            assert released + 6 - at <= charged <= released + 1 + 6 - at


def test_the_tests_notice_where_lots_run_again_are_not_charged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: an engine that resumes takes every lot up to the interruption for paid."""
    from adadp.mechanism import resuming

    real = resuming.Resumed.continuation

    def planted(self: Any, ledger: Any, *arguments: Any) -> Any:
        found = real(self, ledger, *arguments)
        free = sum(ledger.line(self._uid)[0].reserved.values()) - self.lot
        started = ledger.start

        def start(*args: Any, **kwargs: Any) -> Any:
            run, left, charge = started(*args, **kwargs), [free], None
            charge = run.charge
            run.charge = lambda event, count=1: left.__setitem__(0, left[0] - 1) if left[0] else charge(event, count)
            return run

        ledger.start = start
        return found

    monkeypatch.setattr(resuming.Resumed, "continuation", planted)
    with pytest.raises(AssertionError):
        test_without_a_seed_lots_that_are_run_again_are_charged_again(folder)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_checkpoint_belongs_to_its_ledger_model_clipping_and_plan(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    training(ledger=ledger).go(5, save=folder / "c").engine.close()
    training(ledger=folder / "other.jsonl").engine.close()

    def refused(error: type[PrivacyError], match: str, **settings: Any) -> None:
        with pytest.raises(error, match=match):
            training(resume=folder / "c", **{"ledger": ledger, **settings})

    refused(CheckpointError, "does not hold the run", ledger=folder / "other.jsonl")
    refused(CheckpointError, "in memory. does not hold the run", ledger=None)
    refused(CheckpointError, "0.weight has shape", hidden=7)
    refused(CheckpointError, "clipping's numbers", given={"clipping": "flat", "max_grad_norm": 2.0})
    refused(CheckpointError, "clips with Flat, and this one with Ellipsoid", clipping="released")
    refused(LedgerError, "noise_multiplier was 1.0 and is 2.0", noise=2.0)
    refused(LedgerError, "steps was 24 and is 25", steps=25)
    refused(LedgerError, "examples was 200 and is 150", data=TensorDataset(*rows()[:150]))
    resumed = training(resume=folder / "c", ledger=ledger)  # after all of it, it still goes on
    assert resumed.done == 5


def test_a_checkpoint_is_made_between_lots(folder: Path) -> None:
    made = training(ledger=folder / "l.jsonl")
    for inputs, labels in made.loader:
        with pytest.raises(TrainingLoopError, match="lot 0 is out"):
            made.save(folder / "c")
        made.optimizer.backward(nn.functional.cross_entropy(made.model(inputs), labels, reduction="none"))
        with pytest.raises(TrainingLoopError, match="between lots"):
            made.save(folder / "c")
        with pytest.raises(TrainingLoopError, match="between lots"):
            made.engine.state_dict()
        made.optimizer.step()
        made.save(folder / "c")
        break
    assert not list(folder.glob(".*.part"))


def test_weights_that_are_not_finite_are_not_saved(folder: Path) -> None:
    made = training(ledger=folder / "l.jsonl").go(5, save=folder / "c")
    good = (folder / "c").read_bytes()
    with torch.no_grad():
        next(made.model.parameters())[0, 0] = float("inf")
    with pytest.raises(NotFiniteError, match=r"after 5 lots 0\.weight .* learning rate"):
        made.save(folder / "c")
    assert (folder / "c").read_bytes() == good


def test_line_searches_are_not_resumed(folder: Path) -> None:
    model = nn.Linear(8, 3)
    engine, algorithm = PrivacyEngine(accountant="rdp", ledger=folder / "l.jsonl", dataset="rows"), AGD(lr=0.1)
    made = algorithm.make_private(
        engine, task=Task(LOT, 5), module=model, optimizer=algorithm.optimizer(model.parameters()),
        data_loader=DataLoader(rows(), batch_size=LOT), noise_multiplier=2.0,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="line search"):
        engine.save_checkpoint(folder / "c", module=model, optimizer=made[1])


def test_what_is_no_plain_value_is_refused(folder: Path) -> None:
    made = training(ledger=folder / "l.jsonl").go(3)
    with pytest.raises(CheckpointError, match=r"extra= .* JSON"):
        made.engine.save_checkpoint(folder / "c", module=made.model, extra={"a": {1, 2}})
    made.optimizer._step.clipping.note = object()
    with pytest.raises(CheckpointError, match=r"Flat\.note holds a object"):
        made.save(folder / "c")
    with pytest.raises(ConfigurationError, match="not one that this engine"):
        made.engine.save_checkpoint(folder / "c", module=made.model, optimizer=torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(ConfigurationError, match="nothing was made private"):
        PrivacyEngine().save_checkpoint(folder / "c", module=made.model)


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(folder: Path) -> None:
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    whole = training(seed=7, ledger=folder / "whole.jsonl").go()
    training(**settings).go(13, save=folder / "c").engine.close()
    (folder / "c").write_bytes((folder / "c").read_bytes()[:-100])
    with pytest.warns(CheckpointWarning, match=r"truncated or changed.*c\.before is used instead"):
        resumed = training(resume=folder / "c", **settings)
    assert resumed.done == 5
    assert torch.equal(resumed.go().weights(), whole.weights())


# ---- other forms ----------------------------------------------------------------------------------------------------


def test_a_state_travels_in_a_frameworks_own_checkpoint(folder: Path) -> None:
    settings: dict[str, Any] = {"seed": 7, "ledger": folder / "ledger.jsonl"}
    whole = training("released", seed=7, ledger=folder / "whole.jsonl").go()
    first = training("released", **settings)
    first.engine.state_dict()  # from the first one on digests are kept
    first.go(10)
    buffer = io.BytesIO()
    parts = (
        first.engine.state_dict(),
        first.model.state_dict(),
        first.optimizer.state_dict(),
        first.scheduler.state_dict(),
    )
    torch.save(parts, buffer)
    first.go(13).engine.close()
    buffer.seek(0)
    state, weights, optimizer, scheduler = torch.load(buffer, weights_only=True)
    for how in ("resume", "load"):
        if how == "load":
            engine = PrivacyEngine()
            engine.load_state_dict(state)
            assert engine.resumed is not None
            assert engine.resumed.lot == 10
            continue
        resumed = training("released", resume=state, **settings)
        resumed.model.load_state_dict(weights)
        resumed.scheduler.load_state_dict(scheduler)
        resumed.optimizer.load_state_dict(optimizer)
        assert torch.equal(resumed.go().weights(), whole.weights())
        assert sum(count for _, count in resumed.engine._open().charged()) == LOTS
        assert "were changed by the loop" in " ".join(resumed.engine.guarantee(1e-5).untried)
        with pytest.raises(ConfigurationError, match="before make_private"):
            resumed.engine.load_state_dict(state)
    with pytest.raises(CheckpointError, match="neither the path"):
        PrivacyEngine(resume={"a": 1})


def test_a_ledger_in_memory_comes_back_with_the_checkpoint(folder: Path) -> None:
    first = training(seed=7, steps=None).go(10, save=folder / "c").go(13)
    resumed = training(seed=7, steps=None, resume=folder / "c")
    assert dict(resumed.engine._open().charged()).popitem()[1] == 10
    resumed.go()
    found = resumed.engine.guarantee(1e-5)
    assert dict(resumed.engine._open().charged()).popitem()[1] == LOTS
    assert any("its ledger was in memory" in text for text in found.assumptions)
    # Nobody knows what was released in between, so the noise is another one, seed or not.
    assert not torch.equal(resumed.weights(), training(seed=7).go().weights())
    del first


def test_weights_are_loaded_into_a_run_of_their_own_with_what_they_cost(folder: Path) -> None:
    training(ledger=folder / "a.jsonl", steps=None).go(10, save=folder / "c").engine.close()
    other = training(ledger=folder / "b.jsonl", steps=None)
    extra = other.engine.load_checkpoint(
        folder / "c", module=other.model, optimizer=other.optimizer, scheduler=other.scheduler
    )
    assert extra == {"done": 10}
    assert other.scheduler.last_epoch == 10
    other.go(3)
    assert sum(count for _, count in other.engine._open().composition()) == 13
    assert not any("were changed by the loop" in text for text in other.engine.guarantee(1e-5).untried)


def test_the_first_pass_over_a_resumed_loader_is_the_rest_of_its_epoch(folder: Path) -> None:
    training(ledger=folder / "l.jsonl").go(13).save(folder / "c").engine.close()
    resumed = training(resume=folder / "c", ledger=folder / "l.jsonl")
    assert len(resumed.loader) == 10
    lengths = []
    for _ in range(2):
        lengths.append(0)
        for inputs, labels in resumed.loader:
            resumed.optimizer.backward(nn.functional.cross_entropy(resumed.model(inputs), labels, reduction="none"))
            resumed.optimizer.step()
            lengths[-1] += 1
    assert lengths == [7, 10]


def test_no_key_and_no_state_of_a_generator_is_in_a_checkpoint(folder: Path) -> None:
    made = training("probe", seed=123456789, ledger=folder / "l.jsonl").go(5, save=folder / "c")
    data = (folder / "c").read_bytes()
    randomness = made.optimizer._step._randomness
    assert b"123456789" not in data
    for secret in (randomness._require_own(), randomness.key_for("digests of sums")):
        assert secret not in data
        assert secret.hex().encode() not in data
    for generator in randomness._generators.values():
        words = generator.get_state().numpy().tobytes()
        assert words[24:256] not in data
