"""A random stream belongs to one process and one run.

Two releases with the same noise are one without noise: their difference shows the data.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.errors import ConfigurationError, PrivacyError


def private(engine: PrivacyEngine, bound: float = 1.0) -> tuple[Any, Any, Any]:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(10, 4)), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=bound,
    )


def train(model: Any, optimizer: Any, loader: Any) -> list[float]:
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    return model.weight.detach().double().flatten().tolist()


def noise(engine: PrivacyEngine, bound: float = 1.0) -> list[float]:
    """One step on examples of zeros: what it leaves in the weights is noise, here in units of the bound."""
    torch.manual_seed(0)
    return [value / bound for value in train(*private(engine, bound))]


def alike(one: list[float], other: list[float]) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-3, atol=1e-9)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, or the adadp error or other that it raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                answer = work()
            except ConfigurationError as error:
                answer = ConfigurationError(str(error))
            except PrivacyError as error:  # as itself it may hold what cannot be sent
                answer = PrivacyError(str(error))
            except BaseException as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            os.write(writing, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


# ---- engines that are forked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True], ids=["by torch", "secure"])
def test_workers_of_a_sweep_draw_noise_of_their_own(secure: bool) -> None:
    """multiprocessing.Pool, with the engine made at module level and two settings of the bound."""
    engine = PrivacyEngine(secure_mode=secure)
    first = in_child(lambda: noise(engine, 1.0))
    second = in_child(lambda: noise(engine, 2.0))
    here = noise(engine)
    drawn = [first, second, here]
    assert all(isinstance(each, list | PrivacyError) for each in drawn), drawn
    lists = [each for each in drawn if isinstance(each, list)]
    assert len(lists) >= 2, drawn  # an unseeded engine may be taken along
    assert not any(alike(one, other) for i, one in enumerate(lists) for other in lists[i + 1 :]), drawn


def test_a_worker_does_not_use_a_seed_that_was_given_elsewhere() -> None:
    engine = PrivacyEngine(seed=5)
    assert isinstance(in_child(lambda: noise(engine)), ConfigurationError)
    assert isinstance(noise(engine), list)


def test_a_worker_may_have_an_engine_of_its_own() -> None:
    assert isinstance(in_child(lambda: noise(PrivacyEngine(seed=5))), list)


@pytest.mark.parametrize("secure", [False, True], ids=["by torch", "secure"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_runs_are_not_taken_along(on_disk: bool, secure: bool, tmp_path: Path) -> None:
    """Forked after make_private."""
    ledger = {"ledger": tmp_path / "ledger.jsonl", "dataset": "d"} if on_disk else {}
    engine = PrivacyEngine(secure_mode=secure, **ledger)
    parts = private(engine)
    drawn = [in_child(lambda: train(*parts)) for _ in range(2)]
    assert all(isinstance(each, list | PrivacyError) for each in drawn), drawn
    here = train(*parts)
    lists = [here, *(each for each in drawn if isinstance(each, list))]
    assert not any(alike(one, other) for i, one in enumerate(lists) for other in lists[i + 1 :]), drawn
    assert engine.get_epsilon(1e-5) > 4
    engine.close()


def test_workers_with_one_ledger_add_up_and_draw_noise_of_their_own(tmp_path: Path) -> None:
    engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl", dataset="d")

    def work() -> tuple[list[float], float]:
        found = noise(engine), engine.get_epsilon(1e-5)
        engine.close()
        return found

    first, second = in_child(work), in_child(work)
    assert all(isinstance(each, tuple | PrivacyError) for each in (first, second)), (first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        assert not alike(first[0], second[0])
        assert second[1] > first[1] + 1


# ---- engines that are copied --------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda what: pickle.loads(pickle.dumps(what)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_an_engine_draw_noise_of_their_own(copied: Callable[[Any], Any]) -> None:
    """spawn, joblib and Ray pickle what a job needs; hyperparameter searches deepcopy it."""
    engine = PrivacyEngine()
    drawn = [noise(copied(engine)), noise(copied(engine)), noise(engine)]
    assert not any(alike(one, other) for i, one in enumerate(drawn) for other in drawn[i + 1 :]), drawn


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_seeded_engine_are_refused(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError):
        noise(copied(PrivacyEngine(seed=5)))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_an_engine_with_runs_is_not_copied(copied: Callable[[Any], Any]) -> None:
    engine = PrivacyEngine()
    noise(engine)
    with pytest.raises(PrivacyError):
        copied(engine)


@pytest.mark.parametrize("copied", [COPIES["deepcopy"], COPIES["pickle"]], ids=["deepcopy", "pickle"])
def test_all_of_a_run_is_not_copied(copied: Callable[[Any], Any]) -> None:
    engine = PrivacyEngine()
    parts = private(engine)
    with pytest.raises(PrivacyError):
        copied((engine, *parts))


def test_all_of_a_run_is_not_sent_by_cloudpickle() -> None:
    cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    engine = PrivacyEngine()
    parts = private(engine)
    with pytest.raises(PrivacyError):
        pickle.loads(cloudpickle.dumps((engine, *parts)))


def saved(what: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [*COPIES.values(), saved], ids=[*COPIES, "torch.save"])
def test_a_copied_optimizer_releases_nothing(copied: Callable[[Any], Any]) -> None:
    """Refused in words, or a copy without the engine behind it."""
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    try:
        other = copied(optimizer)
    except PrivacyError:
        return
    before = model.weight.detach().clone()
    for (inputs,) in loader:
        model(inputs).mean().backward()
        with pytest.raises(Exception, match=r".+"):
            other.step()
        break
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


# ---- what holds ---------------------------------------------------------------------------------------------------


def test_engines_do_not_follow_torchs_seed() -> None:
    assert not alike(noise(PrivacyEngine()), noise(PrivacyEngine()))


def test_runs_of_one_engine_have_streams_of_their_own() -> None:
    for engine in (PrivacyEngine(), PrivacyEngine(seed=5)):
        assert not alike(noise(engine), noise(engine))


def test_one_seed_is_one_stream_and_the_guarantee_says_so() -> None:
    """A cell that is run again. A ledger refuses the seed; without one it is an assumption."""
    engine = PrivacyEngine(seed=5)
    assert noise(engine) == noise(PrivacyEngine(seed=5))
    assert any("seed" in text and "secret" in text for text in engine.guarantee(1e-5).assumptions)


def test_a_ledger_refuses_a_seed_that_it_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with PrivacyEngine(seed=5, ledger=path, dataset="d") as engine:
        noise(engine)
    with pytest.raises(PrivacyError), PrivacyEngine(seed=5, ledger=path, dataset="d") as again:
        noise(again)
