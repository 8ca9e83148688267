"""Private training through Lightning's Trainer: equal to the engine's own loop, or refused by name."""

from __future__ import annotations

import csv
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Subset, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")

from lightning.pytorch import callbacks, strategies  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from adadp import PrivacyEngine  # noqa: E402
from adadp.accounting.ledger import Ledger  # noqa: E402
from adadp.checks.held_out import shares_examples  # noqa: E402
from adadp.checks.trial import Trial  # noqa: E402
from adadp.errors import ConfigurationError, PrivacyError, TrainingLoopError, UnsupportedModuleError  # noqa: E402
from adadp.gradients import Capture  # noqa: E402
from adadp.integrations.lightning import Private  # noqa: E402
from adadp.integrations.lightning.metrics import PrivateMetricWarning  # noqa: E402
from adadp.integrations.lightning.refusals import refuse_trainer  # noqa: E402
from adadp.testing import influence  # noqa: E402

EXAMPLES, LOT = 96, 16  # six lots an epoch
INPUTS = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
DATA = TensorDataset(INPUTS, LABELS)
HELD_OUT = TensorDataset(1 - INPUTS, LABELS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning speaks through a logger and many warnings that are not about privacy."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.simplefilter("ignore", PrivateMetricWarning)
        yield
    logger.setLevel(before)


class Module(lightning.LightningModule):
    """A classifier as people write them: it logs its loss."""

    def __init__(self, reduction: str = "none") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.reduction = reduction
        self.calls: list[str] = []
        self.batch_size = LOT  # which Lightning's BatchSizeFinder changes

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        losses = F.cross_entropy(self(inputs), labels, reduction=self.reduction)
        self.log("train_loss", losses.mean(), prog_bar=True, on_step=True, on_epoch=True)
        return losses

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", F.cross_entropy(self(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batch_size: int = LOT, **settings: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=batch_size, **settings)


def made(kind: type[Module] = Module, **settings: Any) -> Module:
    torch.manual_seed(0)
    return kind(**settings)


def private(**settings: Any) -> Private:
    return Private(**{"noise_multiplier": 1.0, "target_delta": 1e-5, "seed": 7, **settings})


def trainer(callback: Private, *others: Any, **settings: Any) -> Any:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 2,
    }
    return lightning.Trainer(**{**quiet, **settings, "callbacks": [callback, *others]})


def own_loop(module: Module, lots: int, **settings: Any) -> PrivacyEngine:
    """The same training, written with the engine alone."""
    engine = PrivacyEngine(seed=7)
    configured = module.configure_optimizers()
    model, optimizer, batches = engine.make_private(
        module=module, optimizer=configured["optimizer"], data_loader=loader(), noise_multiplier=1.0, **settings
    )
    done = 0
    while done < lots:
        for inputs, labels in batches:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(inputs), labels, reduction=model.reduction)
            optimizer.backward(losses) if losses.ndim else losses.backward()
            optimizer.step()
            if optimizer.stepped:
                configured["lr_scheduler"]["scheduler"].step()
                done += 1
            if done == lots:
                break
    return engine


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# ---- the same as our own loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 5}, {"clipping": "per_layer"}], ids=str)
def test_training_equals_the_engines_own_loop_bit_for_bit(reduction: str, settings: dict[str, Any]) -> None:
    module, callback = made(reduction=reduction), private(**settings)
    run = trainer(callback)
    run.fit(
        module, loader(), DataLoader(HELD_OUT, batch_size=40)
    )  # with validation, and Lightning's sanity check of it
    other = made(reduction=reduction)
    engine = own_loop(other, 12, **settings)
    assert run.global_step == 12
    assert same(module, other)
    assert callback.guarantee.epsilon == engine.guarantee(1e-5).epsilon
    assert callback.guarantee.untried == ()  # training_step is a function: it is tried, whatever it returns
    assert not same(module, made())


@pytest.mark.parametrize(
    "limits", [{"max_epochs": -1, "max_steps": 7}, {"limit_train_batches": 3}, {"fast_dev_run": 2}]
)
def test_steps_are_lots_however_they_are_limited(limits: dict[str, Any]) -> None:
    lots = limits.get("fast_dev_run") or (6 if "limit_train_batches" in limits else 7)
    module, callback = made(), private(max_physical_batch_size=5)
    run = trainer(callback, **limits)
    run.fit(module, loader())
    other = made()
    engine = own_loop(other, lots, max_physical_batch_size=5)
    assert run.global_step == lots
    assert same(module, other)
    assert callback.guarantee.epsilon == engine.guarantee(1e-5).epsilon


def test_bfloat16_autocast_is_the_plugins() -> None:
    """Autocast covers training_step as it would cover the loss in an own loop."""
    module = made()
    trainer(private(), precision="bf16-mixed", max_epochs=1).fit(module, loader())
    other, engine = made(), PrivacyEngine(seed=7)
    configured = other.configure_optimizers()
    model, optimizer, batches = engine.make_private(
        module=other, optimizer=configured["optimizer"], data_loader=loader(), noise_multiplier=1.0
    )
    for inputs, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
        optimizer.backward(losses)
        optimizer.step()
        configured["lr_scheduler"]["scheduler"].step()
    assert same(module, other)


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(HELD_OUT, batch_size=40)


class AsDict(Module):
    """Returns a dict, whose other entries Lightning hands to hooks; asks for the number of steps beforehand."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1], reduction="none"), "rows": len(batch[0])}

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 12  # which makes Lightning set up the ordinary loader
        return super().configure_optimizers()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"{outputs['rows']} rows")


class Compiled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


@pytest.mark.parametrize("kind", [AsDict, Compiled])
def test_data_modules_dicts_and_compiled_parts(kind: type[Module]) -> None:
    module = made(kind)
    trainer(private()).fit(module, datamodule=Data())
    other = made()
    own_loop(other, 12)
    assert same(module, other)
    assert len(module.calls) == (12 if kind is AsDict else 0)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Watched(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Manual(Module):
    automatic_optimization = False


class Backward(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.sum().backward()


class Clips(Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None: ...


class Ahead(Module):
    def training_step(self, dataloader_iter: Any) -> Any: ...  # type: ignore[override]


class AfterTransfer(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + batch[0].mean(0), batch[1]


class BeforeTransfer(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].roll(1, 0), batch[1]


class NoOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return None


class Whole(Module):
    def __init__(self) -> None:
        super().__init__()
        self._compiler_ctx = {"compiler": "dynamo"}  # as Lightning marks a module that torch.compile was given


REFUSED: dict[str, tuple[dict[str, Any], list[Any], type[Module], str]] = {
    "accumulation": ({"accumulate_grad_batches": 2}, [], Module, "batch_size the lot"),
    "clipping": ({"gradient_clip_val": 1.0}, [], Module, "max_grad_norm"),
    "float16": ({"precision": "16-true"}, [], Module, "bf16-mixed"),
    "overfit": ({"overfit_batches": 2}, [], Module, "limit_train_batches"),
    "reloading": ({"reload_dataloaders_every_n_epochs": 1}, [], Module, "fit once for each"),
    "anomalies": ({"detect_anomaly": True}, [], Module, "not finite"),
    "accumulation callback": ({}, [callbacks.GradientAccumulationScheduler({0: 2})], Module, "max_physical_batch_size"),
    "batch size": ({}, [callbacks.BatchSizeFinder()], Module, "max_physical_batch_size"),
    "rate": ({}, [callbacks.LearningRateFinder()], Module, "same ledger"),
    "swa": ({}, [callbacks.StochasticWeightAveraging(0.1)], Module, "checkpoints"),
    "averaging": ({}, [callbacks.EMAWeightAveraging()], Module, "checkpoints"),
    "finetuning": ({}, [callbacks.BackboneFinetuning()], Module, "each phase"),
    "pruning": ({}, [callbacks.ModelPruning("l1_unstructured")], Module, "before fit"),
    "memory": ({}, [callbacks.DeviceStatsMonitor()], Module, "how many examples"),
    "after transfer": ({}, [], AfterTransfer, "Do it in training_step"),
    "before transfer": ({}, [], BeforeTransfer, "Do it in training_step"),
    "throughput": ({}, [callbacks.ThroughputMonitor(len)], Module, "how many examples"),
    "early stopping": ({}, [callbacks.EarlyStopping("val_loss")], Module, "public_validation"),
    "best checkpoint": (
        {"enable_checkpointing": True},
        [callbacks.ModelCheckpoint(monitor="train_loss")],
        Module,
        "monitor=None",
    ),
    "plateau": ({}, [], Watched, "fixed beforehand"),
    "manual": ({}, [], Manual, "Lightning optimize"),
    "backward": ({}, [], Backward, "Backward.backward"),
    "clipping hook": ({}, [], Clips, "max_grad_norm"),
    "look-ahead": ({}, [], Ahead, "take one batch"),
    "no optimizer": ({}, [], NoOptimizer, "0 optimizers"),
    "compiled whole": ({}, [], Whole, "module.net = torch.compile"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_refused_by_name_with_the_way_out(case: str) -> None:
    settings, others, kind, way_out = REFUSED[case]
    module, callback = made(kind), private()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError, match=way_out):
        trainer(callback, *others, **settings).fit(module, datamodule=Data())
    assert callback.guarantee.sampling == "nothing"
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_processes_that_this_one_starts_are_refused() -> None:
    run = trainer(private())
    run._accelerator_connector.strategy = strategies.DDPStrategy(start_method="spawn")
    with pytest.raises(ConfigurationError, match="strategy='ddp'"):
        refuse_trainer(run, made(), public_validation=False)


def test_a_sharded_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp.integrations.lightning.refusals.sharded_parts", lambda module: [module])
    with pytest.raises(ConfigurationError, match="fully_shard"):
        trainer(private()).fit(made(), loader())


def test_a_public_validation_set_may_decide() -> None:
    module, callback = made(Watched), private(public_validation=True)
    others = callbacks.EarlyStopping("val_loss", patience=9)
    trainer(callback, others).fit(module, loader(), DataLoader(HELD_OUT, batch_size=40))
    guarantee = callback.guarantee
    assert guarantee.epsilon is not None
    assert any("validation set is public" in text for text in guarantee.assumptions)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([loader(), loader()], "must be a torch DataLoader"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "batch_size"),
    ],
    ids=["two loaders", "batch sampler"],
)
def test_data_that_lots_cannot_be_drawn_from_is_refused(data: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        trainer(private()).fit(made(), data)


class TokenMean(Module):
    """Row i of the losses is divided by a count of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        losses = 9 * losses / batch[0][:, 0].abs().sum()
        return losses if self.reduction == "none" else losses.mean()


class Normalised(Module):
    def __init__(self, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Skips(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


class BreaksOff(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class NoStep(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure() if batch_idx == 3 else optimizer.step(closure=closure)


@pytest.mark.parametrize(
    ("kind", "settings", "error", "why"),
    [
        (TokenMean, {}, TrainingLoopError, "mixes examples"),
        (TokenMean, {"reduction": "mean"}, TrainingLoopError, "mixes examples"),
        (Normalised, {}, UnsupportedModuleError, "BatchNorm1d"),
        (Skips, {}, TrainingLoopError, "returned no loss"),
        (BreaksOff, {}, TrainingLoopError, "returned -1"),
        (NoStep, {}, TrainingLoopError, "optimizer.step"),
    ],
)
def test_what_training_step_must_not_do_is_refused(
    kind: type[Module], settings: dict[str, Any], error: type[PrivacyError], why: str
) -> None:
    callback = private()
    with pytest.raises(error, match=why):
        trainer(callback).fit(made(kind, **settings), loader())
    guarantee = callback.guarantee
    assert guarantee.epsilon is None or guarantee.sampling == "nothing"


class MixesInPlace(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].add_(batch[0].mean(0))


class MixesInTheList(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0] + batch[0].roll(1, 0)


@pytest.mark.parametrize("kind", [MixesInPlace, MixesInTheList])
def test_batches_that_callbacks_change_are_refused(kind: type[lightning.Callback]) -> None:
    callback, other = private(), kind()
    found = trainer(callback)
    found.callbacks.insert(0, other)  # wherever it stands
    with pytest.raises(TrainingLoopError, match="changed the batch"):
        found.fit(made(), loader())
    assert callback.guarantee.sampling == "nothing"


def test_the_training_set_is_no_validation_set() -> None:
    callback = private()
    found = trainer(callback, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(ConfigurationError, match="read examples of the training set"):
        found.fit(made(), loader(), loader(4))
    module = made()
    found = trainer(callback := private(), max_epochs=1)
    found.fit(module, loader(), DataLoader(TensorDataset(INPUTS[:4], LABELS[:4])))
    for data in (loader(4), [loader(4)], DataLoader(Subset(DATA, [3]))):
        with pytest.raises(ConfigurationError, match="read examples of the training set"):
            found.validate(module, data, verbose=False)


def test_parts_of_one_dataset_may_be_apart() -> None:
    train, held_out = Subset(DATA, range(80)), Subset(DATA, range(80, 96))
    assert not shares_examples(train, held_out)
    assert shares_examples(train, DATA)
    assert shares_examples(train, Subset(Subset(DATA, range(70, 96)), [0]))
    assert not shares_examples(train, Subset(Subset(DATA, range(70, 96)), [11]))
    assert not shares_examples(train, None)


# ---- what is logged --------------------------------------------------------------------------------------------------


class Says(lightning.Callback):
    """A callback that logs what training_step returned, and the batch's size."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("largest_loss", outputs["loss"].max(), on_epoch=True)
        self.log("rate", trainer.optimizers[0].param_groups[0]["lr"])


def test_training_metrics_reach_no_logger_and_epsilon_does(tmp_path: Path) -> None:
    module, callback = made(), private(public_metrics=["rate"])
    logger = CSVLogger(tmp_path)
    run = trainer(callback, Says(), logger=logger, log_every_n_steps=1)
    with pytest.warns(PrivateMetricWarning, match=r"train_loss was not logged.*public_metrics"):
        run.fit(module, loader(), DataLoader(HELD_OUT, batch_size=40))
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert set(rows[0]) - {"epoch", "step"} == {"epsilon", "rate", "val_loss"}
    shown = [float(row["epsilon"]) for row in rows if row["epsilon"]]
    assert len(shown) == 12
    assert shown == sorted(shown)
    assert shown[-1] >= callback.guarantee.require()  # an upper bound
    assert "train_loss" not in {**run.callback_metrics, **run.progress_bar_metrics}
    assert "epsilon" in run.progress_bar_metrics
    run.fit_loop.epoch_loop._results.log("training_step", "x", torch.tensor(1.0), batch_size=1)  # as before the fit
    assert "x" in str(run.fit_loop.epoch_loop._results)


def test_a_loss_that_is_paid_for_is_logged_and_no_other(tmp_path: Path) -> None:
    """With so little noise it is the mean of the lot's own losses; what training_step logs is dropped as ever."""
    module = made()
    with torch.no_grad():
        mean = float(F.cross_entropy(module(INPUTS), LABELS))
    callback = private(noise_multiplier=1e-3, logged_loss_most=4.0, max_physical_batch_size=40)
    logger = CSVLogger(tmp_path)
    run = trainer(callback, logger=logger, log_every_n_steps=1, max_epochs=1)
    with pytest.warns(PrivateMetricWarning, match="train_loss was not logged"):
        run.fit(module, loader(EXAMPLES))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert set(rows[0]) - {"epoch", "step"} <= {"epsilon", "train_loss_paid"}
    assert [float(row["train_loss_paid"]) for row in rows if row["train_loss_paid"]] == [pytest.approx(mean, abs=0.01)]
    assert {"train_loss_paid"} <= set(run.progress_bar_metrics)
    assert not [name for name in run.callback_metrics if name.startswith("train_loss") and name != "train_loss_paid"]
    plain = private(noise_multiplier=1e-3)
    trainer(plain, max_epochs=1).fit(made(), loader(EXAMPLES))
    assert plain.guarantee.sampling == callback.guarantee.sampling


def test_a_mean_cannot_be_paid_for_without_losses_for_each_row() -> None:
    with pytest.raises(ConfigurationError, match="losses for each example"):
        trainer(private(logged_loss_most=4.0)).fit(made(reduction="mean"), loader())


# ---- budget and spending ---------------------------------------------------------------------------------------------


def test_the_noise_follows_from_the_trainers_plan_and_the_target() -> None:
    module, callback = made(), Private(target_epsilon=2.0, target_delta=1e-5, seed=7)
    trainer(callback, max_epochs=3, limit_train_batches=0.5).fit(module, loader())
    guarantee = callback.guarantee
    assert "9 steps" in guarantee.sampling
    assert 1.9 < guarantee.require() <= 2.0
    assert callback.epsilon == guarantee.epsilon


def test_the_epsilon_that_is_shown_counts_other_runs_on_the_ledger() -> None:
    ledger = Ledger()
    first = Private(target_epsilon=1, target_delta=1e-5, ledger=ledger)
    other = private(ledger=ledger, seed=None)
    for callback in (first, other):
        trainer(callback, max_epochs=1).fit(made(), loader())
    for callback in (first, other):
        assert callback.epsilon is not None
        assert callback.epsilon >= callback.guarantee.require() * (1 - 1e-3) > 3


def test_training_ends_at_the_budget_whatever_least_number_of_steps_was_asked_for() -> None:
    engine = PrivacyEngine(seed=7, budget=(4.0, 1e-5))
    module, callback = made(), private(engine=engine, seed=None)
    run = trainer(callback, max_epochs=-1, min_steps=1000)
    run.fit(module, loader())
    steps = run.global_step
    other = made()
    own_loop(other, steps)
    assert 2 < steps < 100
    assert f"{steps} steps" in callback.guarantee.sampling
    assert callback.guarantee.require() <= 4.0
    assert same(module, other)


def test_a_second_fit_is_charged_too_and_what_was_replaced_is_given_back() -> None:
    module, callback = made(), private()
    run = trainer(callback)
    run.fit(module, loader())
    assert not {"training_step", "backward"} & {*vars(run.strategy), *vars(run.precision_plugin)}
    once = callback.guarantee.require()
    run.fit_loop.max_epochs = 3
    run.fit(module, loader())
    assert "18 steps" in callback.guarantee.sampling
    assert callback.guarantee.require() > once
    run.validate(module, DataLoader(HELD_OUT, batch_size=40), verbose=False)
    trainer(private(), max_epochs=1).fit(module, loader())


def test_arguments_are_checked() -> None:
    for settings in ({"target_epsilon": 1.0}, {"noise_multiplier": None}):
        with pytest.raises(ConfigurationError, match="not both"):
            private(**settings)
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        private(engine=PrivacyEngine())
    with pytest.raises(ConfigurationError, match="list of names"):
        private(public_metrics="rate")
    with pytest.raises(ConfigurationError, match="no limit"):
        trainer(Private(target_epsilon=1, target_delta=1e-5), max_epochs=-1).fit(made(), loader())


# ---- what one example does to a release ------------------------------------------------------------------------------


def through_the_trainer(kind: type[Module], **settings: Any) -> Any:
    def train(dataset: Any) -> None:
        callback = Private(noise_multiplier=1.0, target_delta=1e-5, **settings)
        trainer(callback).fit(kind(), DataLoader(dataset, batch_size=8), DataLoader(HELD_OUT, batch_size=40))

    return train


@pytest.mark.parametrize(
    ("kind", "tries", "settings", "verdict"),
    [
        (Module, True, {"max_physical_batch_size": 3}, "within"),
        (TokenMean, True, {}, "refused"),
        (TokenMean, False, {}, "exceeded"),  # so the measurement sees through the trainer what the trial refuses
        (TokenMean, False, {"max_physical_batch_size": 3}, "exceeded"),
    ],
)
def test_one_example_moves_a_release_by_its_bound_at_most(
    kind: type[Module], tries: bool, settings: dict[str, Any], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tries:
        monkeypatch.setattr(Trial, "of_loss", lambda *arguments: None)
        monkeypatch.setattr(Trial, "before_call", lambda *arguments: None)
        monkeypatch.setattr(Capture, "sure", False)
    few = TensorDataset(INPUTS[:32], LABELS[:32])
    found = influence(through_the_trainer(kind, **settings), few, examples=["large"], among="own", lots=6)
    assert found.verdict == verdict, str(found)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def straight(lots_and_epochs: int, **settings: Any) -> tuple[Module, Private]:
    module, callback = made(), private(**settings)
    trainer(callback, max_epochs=lots_and_epochs).fit(module, loader())
    return module, callback


class Interrupted(lightning.Callback):
    """Training is broken off in the middle of an epoch, after this lot and its checkpoint."""

    def __init__(self, lot: int) -> None:
        self.lot = lot

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.lot:
            trainer.save_checkpoint("at.ckpt")
            raise RuntimeError("interrupted")


@pytest.mark.parametrize("lot", [6, 8], ids=["between epochs", "within an epoch"])
def test_a_resumed_fit_ends_in_the_same_weights_and_costs_the_same(
    lot: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, once = straight(3, ledger="whole.jsonl", dataset="d")
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer(private(ledger="spent.jsonl", dataset="d"), Interrupted(lot), max_epochs=3).fit(made(), loader())
    module, callback = Module(), private(ledger="spent.jsonl", dataset="d")  # as in another process, with other weights
    run = trainer(callback, max_epochs=3)
    run.fit(module, loader(), ckpt_path="at.ckpt")
    assert run.global_step == 18
    assert same(module, whole)
    assert callback.guarantee.epsilon == once.guarantee.epsilon
    assert "18 steps" in callback.guarantee.sampling


def test_a_resumed_fit_keeps_the_plan_and_the_noise_of_its_target(tmp_path: Path) -> None:
    def target(**settings: Any) -> Private:
        return Private(target_epsilon=2.0, target_delta=1e-5, **settings)

    first = target()
    run = trainer(first, limit_train_batches=4)
    run.fit(made(), loader())
    run.save_checkpoint(tmp_path / "at.ckpt")
    assert "8 steps" in first.guarantee.sampling
    run.validate(Module(), DataLoader(HELD_OUT, batch_size=40), ckpt_path=str(tmp_path / "at.ckpt"), verbose=False)
    assert first.guarantee.sampling.startswith("8 steps")
    second = target()  # its ledger is in memory: what the first one's held comes with the checkpoint
    run = trainer(second, limit_train_batches=4, max_epochs=3)
    run.fit(Module(), loader(), ckpt_path=str(tmp_path / "at.ckpt"))
    assert second.optimizer is not None
    assert first.optimizer is not None
    assert second.optimizer.noise_multiplier == first.optimizer.noise_multiplier
    assert run.global_step == 8  # the plan is made, so the budget allows nothing more
    assert second.guarantee.require() == first.guarantee.require() <= 2.0
    with pytest.raises(ConfigurationError, match="noise multiplier"):
        trainer(private()).fit(Module(), loader(), ckpt_path=str(tmp_path / "at.ckpt"))


def test_one_callback_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    module, callback = straight(1, seed=None)
    run = trainer(callback, max_epochs=1)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "at.ckpt")
    run = trainer(callback, max_epochs=2)
    run.fit(module, loader(), ckpt_path=str(tmp_path / "at.ckpt"))
    assert "18 steps" in callback.guarantee.sampling


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_under_torchrun_make_the_run_of_one(tmp_path: Path) -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(here), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    module, callback = made(), private(max_physical_batch_size=5)
    trainer(callback).fit(module, loader())
    assert first["epsilon"] == second["epsilon"] == callback.guarantee.require()
    for name, value in module.state_dict().items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        assert torch.allclose(first["weights"][name], value, atol=1e-5)  # sums are added up in another order


def one_process(folder: Path) -> None:
    """What each of the two does."""
    module, callback = made(), private(max_physical_batch_size=5)
    run = trainer(callback, strategy="ddp", devices=2)
    run.fit(module, loader(), DataLoader(HELD_OUT, batch_size=40))
    assert run.global_step == 12
    found = {"weights": module.state_dict(), "epsilon": callback.guarantee.require()}
    torch.save(found, folder / f"{run.global_rank}.pt")


if __name__ == "__main__":
    one_process(Path(sys.argv[1]))
