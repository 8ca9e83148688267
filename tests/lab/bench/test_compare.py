"""What `adadp bench` measures: rows that are complete, failures that are rows, ratios that are what they say."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from adadp_lab.bench import clock, compare, methods
from adadp_lab.bench.compare import NO_OPACUS, Comparison
from adadp_lab.bench.goals import judge
from adadp_lab.bench.methods import EVERY, METHODS, OURS, BenchTask, Method, TimedStep, plain
from adadp_lab.bench.models import MODELS, build
from lab.bench import tiny

from adadp.errors import ConfigurationError

KEYS = {"model", "method", "clipping", "device", "ms", "ratio_to_sgd", "peak_mib", "peak_ratio_to_sgd"}
quick = partial(compare, device="cpu", rounds=2, sizes=tiny.SIZES)


@pytest.fixture(scope="module")
def everything() -> Comparison:
    return quick(against=["sgd"])


def test_every_model_with_every_clipping(everything: Comparison) -> None:
    found = [(row["model"], row["method"], row["clipping"]) for row in everything.rows]
    ways = [("sgd", "none"), *(("adadp", clipping) for clipping in OURS)]
    assert found == [(model, *way) for model in MODELS for way in ways]
    for row in everything.rows:
        assert row.keys() >= KEYS
        assert "error" not in row, row
        assert row["ms"] > 0
        assert row["peak_mib"] >= 0
        assert row["device"] == "cpu"
        assert row["rounds"] == 2
        assert row["lot"] == tiny.SIZES[row["model"]]["lot"]
    assert json.loads(json.dumps(everything.to_dict())) == everything.to_dict()
    assert everything.versions.keys() >= {"python", "torch", "threads", "processor", "kernels"}


def test_ratios_are_over_sgd_of_the_same_model(everything: Comparison) -> None:
    for row in everything.rows:
        base = next(r for r in everything.rows if r["model"] == row["model"] and r["method"] == "sgd")
        assert row["ratio_to_sgd"] == pytest.approx(row["ms"] / base["ms"], abs=1e-3)
        if base["peak_mib"]:
            assert row["peak_ratio_to_sgd"] == pytest.approx(row["peak_mib"] / base["peak_mib"], abs=1e-3)


def test_a_refresh_is_counted_in(everything: Comparison) -> None:
    shaped = [row for row in everything.rows if row["clipping"].startswith("ellipsoid")]
    assert len(shaped) == 3 * len(tiny.SIZES)
    for row in shaped:
        assert row["ms"] == pytest.approx(row["step_ms"] + row["refresh_ms"] / EVERY, abs=1e-3)
        assert row["refresh_probes"] == 2 * row["lot"]
    # A refresh is at least two more backward passes; at these sizes only the sum over models is beyond doubt.
    assert sum(row["refresh_ms"] for row in shaped) > 0
    assert all("refresh_ms" not in row for row in everything.rows if not row["clipping"].startswith("ellipsoid"))


def test_a_step_refreshes_when_asked_and_at_no_other_time() -> None:
    task = BenchTask(*build("mlp", tiny.SIZES["mlp"], 0, torch.device("cpu")), "ellipsoid-diagonal", probes=4)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    step = METHODS["adadp"].make(task)
    for _ in range(4):
        step.run()  # lots on which the module is tried
    task.module.register_forward_hook(count)
    step.run()
    step.run()
    assert calls == 2
    assert step.refresh is not None
    step.refresh()
    step.run()
    assert calls == 4  # four probes are one microbatch of the lot's size
    step.run()
    assert calls == 5


def test_the_box_of_local_clipping_is_on() -> None:
    # Where it is off, local clipping is flat clipping, and its time would be flat's.
    module, inputs, targets = build("mlp", tiny.SIZES["mlp"], 0, torch.device("cpu"))
    inputs = torch.zeros_like(inputs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    targets[: len(targets) // 2], targets[len(targets) // 2 :] = 0, 1
    METHODS["adadp"].make(BenchTask(module, inputs, targets, "local"))  # some coordinates move: enough
    silent = torch.nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="box is not on"):
        METHODS["adadp"].make(BenchTask(silent, torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), "local"))


def test_a_replayed_step_is_measured_with_what_it_takes_to_record_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"slow": 0, "now": 0.0}
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: state["now"]))

    def recorded(task: BenchTask) -> TimedStep:
        def run() -> None:
            state["now"] += 0.001
            if state["slow"]:
                state["slow"] -= 1
                state["now"] += 0.02

        def refresh() -> None:
            state["slow"] = 3

        def unrecorded() -> None:
            torch.ones(2**20)

        return TimedStep(run, lambda: None, refresh, 7, unsettled=3, unrecorded=unrecorded)

    monkeypatch.setitem(METHODS, "adadp-replayed", Method(recorded, ("ellipsoid-diagonal",)))
    found = quick(["mlp"], ["sgd"], ["ellipsoid-diagonal"]).rows[-1]
    assert found["method"] == "adadp-replayed"
    assert found["refresh_ms"] == pytest.approx(60)
    assert found["ms"] == pytest.approx(1 + 60 / EVERY, abs=1e-4)
    assert found["peak_mib"] == pytest.approx(4.0, abs=0.1)
    assert found["refresh_probes"] == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_replayed_sgd_is_sgd_of_the_lot_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "RATE", 0.1)
    trained = []
    for name in ("sgd", "sgd-graph"):
        task = BenchTask(*build("mlp", tiny.SIZES["mlp"], 0, torch.device("cuda")))
        assert isinstance(task.inputs, torch.Tensor)
        start = copy.deepcopy(task.module.state_dict())
        step = METHODS[name].make(task)
        task.module.load_state_dict(start)
        task.inputs.mul_(-1)  # another lot than the one that was recorded
        for _ in range(3):
            step.run()
        trained.append(task.module.state_dict())
    for key, value in trained[0].items():
        assert not torch.equal(value, start[key])
        torch.testing.assert_close(trained[1][key], value, rtol=1e-4, atol=1e-5)


def test_a_failing_method_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(task: BenchTask) -> TimedStep:
        raise NotImplementedError("this model is beyond me\nand more lines")

    def runs_out(task: BenchTask) -> TimedStep:
        step, taken = plain(task), iter(range(10**9))

        def run() -> None:
            if next(taken) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")
            step.run()

        return TimedStep(run, step.clear)

    monkeypatch.setitem(METHODS, "refuses", Method(refuses, ("flat",), "sgd"))
    monkeypatch.setitem(METHODS, "runs-out", Method(runs_out, ("flat",), "sgd"))
    found = quick(["mlp"], ["sgd"], ["flat"])
    rows = {row["method"]: row for row in found.rows}
    assert rows["refuses"]["error"] == "NotImplementedError: this model is beyond me"
    assert rows["runs-out"]["error"] == "out of memory"
    for name in ("refuses", "runs-out"):
        assert rows[name].keys() >= KEYS
        assert rows[name]["ms"] is rows[name]["peak_mib"] is rows[name]["ratio_to_sgd"] is None
        assert rows[name]["goals"] == {}
    assert rows["adadp"]["ratio_to_sgd"] > 0


def test_where_sgd_fails_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(task: BenchTask) -> TimedStep:
        raise MemoryError

    monkeypatch.setitem(METHODS, "sgd", Method(refuses, ("none",), "sgd"))
    sgd, flat = quick(["mlp"], ["sgd"], ["flat"]).rows
    assert sgd["error"] == "out of memory"
    assert flat["ms"] > 0
    assert flat["ratio_to_sgd"] is None


def test_without_opacus_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    said: list[str] = []
    found = quick(["mlp"], ["sgd", "opacus"], ["flat"], say=said.append)
    assert {row["method"] for row in found.rows} == {"sgd", "adadp"}
    assert found.notes == [NO_OPACUS]
    assert NO_OPACUS in said
    assert "pip install" in NO_OPACUS


def test_beside_opacus() -> None:
    pytest.importorskip("opacus")
    found = quick(["mlp"], ["opacus"], ["flat"])
    rows = {row["method"]: row for row in found.rows}
    assert list(rows) == ["sgd", "adadp", "opacus-hooks", "opacus-ghost", "opacus-functorch"]
    peers = [row["ratio_to_sgd"] for name, row in rows.items() if name.startswith("opacus")]
    assert rows["adadp"]["goals"]["opacus"] == {"most": min(peers), "met": rows["adadp"]["ratio_to_sgd"] < min(peers)}
    assert "opacus" in found.versions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ["lenet"]}, "'lenet'; there are mlp, alexnet, wrn, transformer"),
        ({"against": ["jax"]}, "'jax'; there are sgd, opacus"),
        ({"clipping": ["round"]}, "'round'; there are flat, ellipsoid, local"),
        ({"device": "abacus"}, "device must be auto, cpu or cuda, not 'abacus'"),
        ({"device": "meta"}, "device must be auto, cpu or cuda, not 'meta'"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"probes": 0}, "probes must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        compare(**{"device": "cpu", **options})  # type: ignore[arg-type]


def test_an_ellipsoid_can_be_named_by_its_shape() -> None:
    found = quick(["mlp"], ["sgd"], ["ellipsoid-rowcolumn", "flat", "ellipsoid-rowcolumn"])
    assert [row["clipping"] for row in found.rows] == ["none", "flat", "ellipsoid-rowcolumn"]


# ---- goals ----------------------------------------------------------------------------------------------------------


def row(
    device: str, model: str, clipping: str, ratio: float, memory: float, method: str = "adadp"
) -> dict[str, object]:
    return {
        "device": device, "model": model, "clipping": clipping, "method": method, "ratio_to_sgd": ratio,
        "peak_ratio_to_sgd": memory,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "model", "clipping", "time", "memory"),
    [
        ("cuda", "transformer", "flat", 1.35, 1.8),
        ("cuda", "transformer", "ellipsoid-diagonal", 1.35, None),
        ("cuda", "transformer", "ellipsoid-rowcolumn", 1.35, None),
        ("cuda", "transformer", "ellipsoid-kronecker", 1.8, None),
        ("cuda", "transformer", "local", 1.4, 1.3),
        ("cuda", "mlp", "ellipsoid-kronecker", 1.7, None),
        ("cuda", "alexnet", "local", 2.0, 1.3),
        ("cuda", "wrn", "flat", 2.0, 1.8),
        ("cpu", "mlp", "flat", 1.2, None),
        ("cpu", "mlp", "local", 2.5, None),
        ("cpu", "alexnet", "flat", 2.0, None),
        ("cpu", "alexnet", "local", 3.0, None),
        ("cpu", "transformer", "flat", 1.4, None),
        ("cpu", "transformer", "local", 2.0, None),
        ("cpu", "transformer", "ellipsoid-diagonal", None, None),
        ("cpu", "wrn", "flat", None, None),
    ],
)
def test_goals(device: str, model: str, clipping: str, time: float | None, memory: float | None) -> None:
    found = judge(row(device, model, clipping, 1.0, 1.0), [])
    assert {name: goal["most"] for name, goal in found.items()} == {
        name: most for name, most in (("time", time), ("memory", memory)) if most is not None
    }
    missed = judge(row(device, model, clipping, 9.0, 9.0), [])
    assert all(goal["met"] for goal in found.values())
    assert not any(goal["met"] for goal in missed.values())


def test_ahead_of_the_best_mode_of_opacus_on_the_same_model() -> None:
    ours = row("cpu", "wrn", "flat", 2.0, 1.0)
    peers = [
        row("cpu", "wrn", "flat", 3.0, 1.0, "opacus-hooks"),
        row("cpu", "wrn", "flat", 2.0, 1.0, "opacus-ghost"),
        row("cpu", "mlp", "flat", 1.0, 1.0, "opacus-ghost"),
    ]
    assert judge(ours, [ours, *peers]) == {"opacus": {"most": 2.0, "met": False}}  # as fast is not ahead
    assert judge({**ours, "ratio_to_sgd": 1.99}, [ours, *peers])["opacus"]["met"]
    assert judge(peers[0], [ours, *peers]) == {}
    assert judge({**ours, "method": "adadp-graph"}, peers)["opacus"]["most"] == 2.0


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_steps_take_turns_and_warm_ones_do_not_count() -> None:
    order: list[str] = []
    times = clock.milliseconds({name: partial(order.append, name) for name in "ab"}, 3, warm=1)
    assert "".join(order) == "abababab"
    assert [len(found) for found in times.values()] == [3, 3]


def test_rounds_end_early_but_not_before_five() -> None:
    times = clock.milliseconds({"a": lambda: None}, 1000, limit=0.0)
    assert len(times["a"]) == 5


def test_peak_is_what_a_step_holds_beyond_what_was_held_before() -> None:
    gradients: list[torch.Tensor] = []

    def step() -> None:
        gradients.clear()
        large = torch.ones(3 * 2**18)
        gradients.append(torch.ones(2**18))
        del large
        gradients.append(torch.ones(2**18))

    # What is left for the next step is this one's, not something that was there before it.
    assert clock.peak_mib(step, gradients.clear, "cpu") == pytest.approx(4.0, abs=0.05)
