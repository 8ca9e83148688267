"""How cost grows: every point or the reason why it is missing, slopes, figures; and Local's memory over lots."""

from __future__ import annotations

import json
import math
import time
import weakref
from pathlib import Path

import pytest
import torch
from adadp_lab.bench import plots, scaling
from adadp_lab.bench.compare import Contender
from adadp_lab.bench.methods import METHODS, BenchTask, Method, TimedStep
from adadp_lab.bench.plots import draw_scaling
from adadp_lab.bench.report import write_report
from adadp_lab.bench.scaling import SERIES, Sweep, beyond_sgd, scale, slope
from lab.bench import tiny

from adadp.errors import ConfigurationError
from adadp.gradients.kernels import reference
from adadp.mechanism.replay import WARM_UP


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of time: a slow or busy machine measures every point too. Tests of a limit set their own."""
    for limit in (scaling.STEP, scaling.SWEEP):
        monkeypatch.setitem(limit, "cpu", math.inf)


def test_points_slopes_and_figures(tmp_path: Path) -> None:
    kept: list[int] = []
    found = scale(device="cpu", sweeps=tiny.SWEEPS, keep=lambda so_far: kept.append(len(so_far["sweeps"])))
    assert kept == list(range(1, len(tiny.SWEEPS) + 1))
    assert json.loads(json.dumps(found)) == found
    for sweep, made in zip(tiny.SWEEPS, found["sweeps"], strict=True):
        expected = {(series, value) for series in SERIES["cpu"] for value in sweep.values}
        assert {(point["series"], point["value"]) for point in made["points"]} == expected
        assert all(point["ms"] > 0 for point in made["points"])
        # Plain SGD of so small a net needs no more than the gradients that it gives back first.
        assert all(point["peak_mib"] > 0 for point in made["points"] if point["series"] != "sgd")
        assert made["slopes"].keys() == SERIES["cpu"].keys()
    assert [model["model"] for model in found["local_memory"]] == ["mlp"]
    paths = draw_scaling(found, tmp_path, "scaling-cpu")
    assert [path.name for path in paths] == [
        f"scaling-cpu-{what}.{kind}" for what in ("time", "memory") for kind in ("svg", "png")
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


@pytest.mark.parametrize(("power", "factor"), [(1.0, 3.0), (2.0, 0.5), (0.0, 7.0)])
def test_slope_is_the_exponent(power: float, factor: float) -> None:
    sizes = [2.0**n for n in range(8)]
    assert slope(sizes, [factor * size**power for size in sizes]) == pytest.approx(power, abs=1e-3)
    # What it costs to start at all flattens the small end; only the larger half is fitted.
    late = [5.0] * 4 + [factor * size**power for size in sizes[4:]]
    assert slope(sizes, late) == pytest.approx(power, abs=1e-3)
    assert slope([1.0], [1.0]) is None


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = METHODS["sgd"].make

    def small_lots_only(task: BenchTask) -> TimedStep:
        if len(task.inputs) > 64:
            raise MemoryError
        return plain(task)

    monkeypatch.setitem(METHODS, "adadp", Method(small_lots_only, METHODS["adadp"].clippings))
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    flat = [point for point in sweep["points"] if point["series"] == "flat"]
    assert "ms" in flat[0]
    assert [point.get("left_out") for point in flat[1:]] == ["out of memory", "128: out of memory"]
    assert all("ms" in point for point in sweep["points"] if point["series"] == "sgd")


def test_what_takes_too_long_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.STEP, "cpu", 1e-6)
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    assert all(("ms" in point) == (point["value"] == 64) for point in sweep["points"])
    assert "a step would take about" in sweep["points"][-1]["left_out"]
    monkeypatch.setitem(scaling.STEP, "cpu", math.inf)
    monkeypatch.setitem(scaling.SWEEP, "cpu", -1.0)
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    assert all("were spent" in point["left_out"] for point in sweep["points"])


def test_on_a_busy_machine_time_is_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = METHODS["sgd"].make

    def waits(task: BenchTask) -> TimedStep:
        step = plain(task)

        def run() -> None:
            time.sleep(0.02)  # as where others have the processor
            step.run()

        return TimedStep(run, step.clear)

    monkeypatch.setitem(METHODS, "sgd", Method(waits, METHODS["sgd"].clippings))
    times = {}
    for busy in (False, True):
        found = scale(device="cpu", sweeps=[Sweep("mlp", "lot", (8,), {"width": 4})], busy=busy)
        times[found["clock"]] = found["sweeps"][0]["points"][0]["ms"]
    assert times["wall"] >= 20 > times["processor"] > 0
    monkeypatch.setattr("adadp_lab.bench.machine.device_for", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigurationError, match="only a processor's own time"):
        scale(device="cuda", sweeps=[], busy=True)


@pytest.mark.parametrize("before", range(6, 10))
def test_memory_is_not_that_of_a_step_which_is_tried(before: int) -> None:
    """Lot 10 is: whatever number of steps was timed before, memory is the same."""
    contender = Contender("adadp", "flat")
    contender.make("mlp", {"lot": 64, "width": 64}, 0, torch.device("cpu"), warm=before)
    peak = contender.peak_mib("cpu")
    assert peak is not None
    assert peak < 0.1


def test_what_memory_has_no_room_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp_lab.bench.machine.free_mib", lambda device: 1e-9)
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    assert all(("ms" in point) == (point["value"] == 64) for point in sweep["points"])
    assert "it would need about" in sweep["points"][-1]["left_out"]


LOTS = Sweep("mlp", "lot", (256, 512, 1024, 2048), {"width": 64})


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is not of interest: two rounds of each point."""
    monkeypatch.setitem(scaling.POINT, "cpu", 0.0)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_memory_of_local_does_not_grow_with_the_lot_beyond_activations(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADADP_KERNELS", kernels)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 2**18)  # lots are small here, and so is this
    (found,) = scale(device="cpu", sweeps=[LOTS])["local_memory"]
    grows = found["mib_per_1000"]
    # An example's gradient is 20 times its activations here, so that keeping any part of them would show.
    assert found["gradient_mib_per_1000"] > 20 * grows["sgd"]
    assert grows["local_less_sgd"] < 0.6 * grows["sgd"]


@pytest.mark.usefixtures("memory")
def test_gradients_that_are_kept_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADADP_KERNELS", "reference")
    monkeypatch.setattr(reference, "CHUNK_BYTES", 2**40)  # the whole lot's gradients at once
    (found,) = scale(device="cpu", sweeps=[LOTS])["local_memory"]
    assert found["mib_per_1000"]["local_less_sgd"] >= found["gradient_mib_per_1000"]


def test_memory_beyond_sgd_is_compared_at_lots_that_both_have() -> None:
    points = [{"series": "sgd", "value": lot, "ms": 1.0, "peak_mib": 2.0 * lot} for lot in (1, 2, 3)]
    points += [{"series": "local", "value": lot, "ms": 1.0, "peak_mib": 3.0 * lot + 5} for lot in (1, 2)]
    points += [{"series": "local", "value": 3, "left_out": "out of memory"}]
    found = beyond_sgd({"model": "mlp", "others": {"width": 4}, "points": points})
    assert found["lots"] == [1, 2]
    assert found["local_less_sgd_mib"] == [6.0, 7.0]
    assert found["mib_per_1000"] == {"local_less_sgd": 1000.0, "sgd": 2000.0}


# ---- replayed steps: the series of a GPU ----------------------------------------------------------------------------


def test_on_a_gpu_ours_are_replayed_and_sgd_stays_as_it_is() -> None:
    assert SERIES["cuda"]["sgd"] == SERIES["cpu"]["sgd"] == ("sgd", "none")
    ours = [series for series in SERIES["cpu"] if series != "sgd"]
    assert [SERIES["cpu"][series] for series in ours] == [("adadp", series) for series in ours]
    assert [SERIES["cuda"][series] for series in ours] == [("adadp-graph", series) for series in ours]
    for kind, ways in SERIES.items():
        for series, (method, clipping) in ways.items():
            assert METHODS[method].only_on in ("", kind)
            assert clipping in METHODS[method].clippings
            assert all(series in known for known in (plots.NAMES, plots.COLOURS, plots.MARKS))
    assert scaling._turns("cpu") == [["sgd", *ours]]
    assert scaling._turns("cuda") == [["sgd"], ["sgd-graph"], *([series] for series in ours)]


class _Recording:
    """A stand-in: it takes ordinary steps."""

    def __init__(self, ordinary: TimedStep) -> None:
        self.ordinary, self.played = ordinary, 0

    def play(self) -> None:
        self.ordinary.run()
        self.played += 1


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERIES, "cpu", SERIES["cuda"])


@pytest.mark.usefixtures("as_on_a_gpu", "memory")
def test_recordings_are_measured_one_by_one_and_let_go_before_memory_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    living: weakref.WeakSet[_Recording] = weakref.WeakSet()
    played: list[int] = []

    def recorded(ordinarily: str) -> Method:
        def make(task: BenchTask) -> TimedStep:
            assert not living
            ordinary = METHODS[ordinarily].make(task)
            recording = _Recording(ordinary)
            living.add(recording)
            weakref.finalize(recording, lambda steps: played.append(steps["played"]), vars(recording))

            def unrecorded() -> None:
                assert not living
                ordinary.run()

            return TimedStep(recording.play, ordinary.clear, unrecorded=unrecorded)

        return Method(make, METHODS[ordinarily].clippings, only_on="cuda")

    monkeypatch.setitem(METHODS, "sgd-graph", recorded("sgd"))
    monkeypatch.setitem(METHODS, "adadp-graph", recorded("adadp"))
    (sweep,) = (found := scale(device="cpu", sweeps=tiny.SWEEPS[:1]))["sweeps"]
    assert {point.get("left_out") for point in sweep["points"]} == {None}
    assert {point["series"] for point in sweep["points"]} == sweep["slopes"].keys() == SERIES["cuda"].keys()
    assert len(played) == 4 * len(tiny.SWEEPS[0].values)
    assert set(played) == {WARM_UP + 3 + 1 + 2}  # a recording is made in the first, which do not count
    assert found["replayed"] == ["sgd-graph", "flat", "ellipsoid-kronecker", "local"]
    assert [model["lots"] for model in found["local_memory"]] == [[64, 128, 256]]
    # Whoever reads the page or a figure is told; a file from before there was anything to tell is drawn as it was.
    said = plots._names(found, "time")
    assert (said["sgd"], said["sgd-graph"]) == ("SGD", "SGD, replayed")
    assert said["local"] == "local, replayed"
    assert plots._names(found, "memory").keys() == SERIES["cuda"].keys() - {"sgd-graph"}
    (tmp_path / "scaling-cuda.json").write_text(json.dumps(found))
    write_report(tmp_path)
    page = (tmp_path / "tables.md").read_text()
    assert "Steps of sgd-graph, flat, ellipsoid-kronecker, local are replayed" in page
    assert "|  | sgd | sgd-graph | flat |" in page
    del found["replayed"], sweep["slopes"]["sgd-graph"]
    (tmp_path / "scaling-cuda.json").write_text(json.dumps(found))
    write_report(tmp_path)
    page = (tmp_path / "tables.md").read_text()
    assert "replayed" not in page
    assert "|  | sgd | flat |" in page
    assert plots._names(found, "time")["local"] == "local"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_cannot_be_replayed_says_why() -> None:
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    for point in sweep["points"]:
        if point["series"] == "sgd":
            assert point["ms"] > 0
        elif point["series"] != "sgd-graph":
            assert "the model is on cpu: only CUDA replays" in point["left_out"]
        else:
            assert point["left_out"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_recording_needs_room_beside_ordinary_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp_lab.bench.machine.free_mib", lambda device: 300.0)
    points = [{"series": series, "value": 64, "ms": 1.0, "peak_mib": 100.0} for series in ("sgd", "local")]
    assert scaling._too_large("sgd", points, 128, torch.device("cpu")) == {}
    assert "it would need about 0.4 GiB" in scaling._too_large("local", points, 128, torch.device("cpu"))["local"]
