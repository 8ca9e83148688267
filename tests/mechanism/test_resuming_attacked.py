"""Resuming, attacked: what users do with checkpoints and ledgers must never make an epsilon too small."""

from __future__ import annotations

import hmac
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mechanism.test_resuming import LOT, Seen, Training, rows, steps_charged, training
from torch import nn
from torch.utils.data import DataLoader

from adadp import Ledger, PrivacyEngine
from adadp.accounting.events import PoissonGaussian
from adadp.accounting.unused import boot_id
from adadp.errors import CheckpointError, ConfigurationError, NotTheSameRunError
from adadp.randomness import Randomness


def released(made: Training, until: int, **settings: Any) -> dict[int, torch.Tensor]:
    """Train until then and end the run; returns each lot's noise."""
    seen = Seen()
    made.optimizer.observe(seen)
    made.go(until, **settings).engine.close()
    return seen.noise


def test_lots_that_another_resumed_run_paid_for_are_not_free(tmp_path: Path) -> None:
    """Of a run with a seed, resumed without it for two lots, and then with it."""
    ledger, settings = tmp_path / "ledger.jsonl", {"ledger": tmp_path / "ledger.jsonl", "steps": None}
    first = released(training(seed=7, **settings), 14, save=tmp_path / "c")
    shutil.copy(tmp_path / "c", tmp_path / "ten")
    between = released(training(resume=tmp_path / "ten", **settings), 12)
    last = released(training(seed=7, resume=tmp_path / "ten", **settings), 20)
    repeated = [lot for lot in last if lot in first and torch.equal(first[lot], last[lot])]
    assert repeated == [10, 11, 12, 13]
    assert steps_charged(ledger) == len(first) + len(between) + len(last) - len(repeated)


def test_equal_sums_with_other_noise_are_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, or another processor, may make other numbers of the same seed."""
    settings: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl", "steps": None, "seed": 7}
    released(training(**settings), 14, save=tmp_path / "c")
    shutil.copy(tmp_path / "c", tmp_path / "ten")
    sound = Randomness.normal
    monkeypatch.setattr(Randomness, "normal", lambda self, like: -sound(self, like))
    resumed = training(resume=tmp_path / "ten", **settings)
    with pytest.raises(NotTheSameRunError, match="lot 10 was released"):  # the first one
        resumed.go(20)
    resumed.engine.close()
    charged = steps_charged(tmp_path / "ledger.jsonl")
    released(training(resume=tmp_path / "ten", **settings), 20)
    assert steps_charged(tmp_path / "ledger.jsonl") == charged + 10


@pytest.mark.parametrize("seed", [7, None])
def test_a_ledger_that_was_put_back_is_refused_by_a_newer_checkpoint(tmp_path: Path, seed: int | None) -> None:
    settings: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl", "steps": None, "seed": seed}
    made = training(**settings).go(3, save=tmp_path / "c", every=3)
    (tmp_path / "old").mkdir()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.copy(tmp_path / name, tmp_path / "old" / name)
    made.go(40, save=tmp_path / "c").engine.close()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.copy(tmp_path / "old" / name, tmp_path / name)
    (tmp_path / "ledger.jsonl.left").unlink()
    with pytest.raises(CheckpointError, match="put back to an earlier state"):
        training(resume=tmp_path / "c", **settings)
    # A run of its own on these weights is charged for what the checkpoint knows of.
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    engine = PrivacyEngine(dataset="rows", ledger=tmp_path / "ledger.jsonl")
    engine.load_checkpoint(tmp_path / "c", module=model)
    assert sum(count for _, count in engine._open().composition()) >= 40


def test_digests_of_more_releases_than_the_ledger_holds_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl", "steps": None, "seed": 7}
    training(**settings).go(5, save=tmp_path / "c").engine.close()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.copy(tmp_path / name, tmp_path / f"old.{name}")
    training(resume=tmp_path / "c", **settings).go(8).engine.close()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.copy(tmp_path / f"old.{name}", tmp_path / name)
    with pytest.raises(CheckpointError, match="3 releases of this run, and its ledger holds 3 fewer"):
        training(resume=tmp_path / "c", **settings)


def test_a_copied_folder_goes_on_with_other_noise(tmp_path: Path) -> None:
    """The original goes on, too, on other data: the same noise on both sums would come off by subtraction."""
    original, copied = tmp_path / "original", tmp_path / "copied"
    original.mkdir()
    settings: dict[str, Any] = {"seed": 7, "steps": None}
    released(training(ledger=original / "l.jsonl", **settings), 8, save=original / "c", every=8)
    shutil.copytree(original, copied)
    first = training(resume=original / "c", ledger=original / "l.jsonl", **settings)
    second = training(resume=copied / "c", ledger=copied / "l.jsonl", data=rows(changed=100), **settings)
    one, other = released(first, 12), released(second, 12)
    assert set(one) == set(other)
    assert not any(torch.equal(one[lot], other[lot]) for lot in one)
    assert steps_charged(copied / "l.jsonl") == 8 + len(other)


@pytest.mark.skipif(boot_id() is None, reason="the system does not say when it was started")
def test_nothing_is_given_back_by_a_copy_of_the_count_of_what_is_left(tmp_path: Path) -> None:
    """A folder is copied while a run has releases reserved, and put back when the run was killed."""
    with Ledger(tmp_path / "l.jsonl", dataset="rows") as ledger:
        event = PoissonGaussian(1.0, 0.1)
        run = ledger.start({"neighbours": "add-or-remove-one"})
        run.charge(event, 10)
        run._reserve(event, 11)  # what a quick run reserves ahead
        run.charge(event)
        (tmp_path / "copied").mkdir()
        for file in tmp_path.glob("l.jsonl*"):
            shutil.copy(file, tmp_path / "copied")
        reserved = sum(run._reserved.values())
        assert reserved > 12
    copy = Ledger(tmp_path / "copied" / "l.jsonl", dataset="rows")
    copy.start({"neighbours": "add-or-remove-one"}).close()
    assert sum(count for _, count in copy.charged()) == reserved


def test_no_seed_is_found_by_trying_with_a_checkpoint(tmp_path: Path) -> None:
    """A ledger in memory goes into the checkpoint, which people show to others."""
    training(seed=42, steps=None).go(5, save=tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    records = json.loads(header["values"])["ledger"]
    fingerprint = hmac.new(bytes.fromhex(records[0]["key"]), b"seed 42", "sha256").hexdigest()
    assert fingerprint.encode() not in data
    resumed = training(seed=42, steps=None, resume=tmp_path / "c").go(8)  # its noise is new all the same
    assert resumed.optimizer._step._randomness.attempt != 0


def test_weights_that_one_engine_loads_are_charged_to_another_that_trains_them(tmp_path: Path) -> None:
    training(ledger=tmp_path / "l.jsonl", steps=None).go(5, save=tmp_path / "c").engine.close()
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    PrivacyEngine(dataset="rows").load_checkpoint(tmp_path / "c", module=model)
    engine = PrivacyEngine(dataset="rows")
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(rows(), batch_size=LOT), noise_multiplier=1.0,
    )  # fmt: skip
    assert sum(count for _, count in engine._open().composition()) == 5
    with pytest.raises(ConfigurationError, match="made private by another engine"):
        PrivacyEngine(dataset="rows").load_checkpoint(tmp_path / "c", module=model)


def test_a_run_whose_budget_is_spent_is_saved(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = training(steps=None, budget=(4.0, 1e-5)).go(2000)
    assert made.loader.stopped
    made.save(tmp_path / "c")
    assert not made.optimizer._loader.lots.current.of.sums
