"""How cost grows: every point or the reason why it is missing, slopes, figures; and Local's memory over lots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adadp.bench import scaling
from adadp.bench.methods import METHODS, Method, Step, Task
from adadp.bench.plots import draw_scaling
from adadp.bench.scaling import SERIES, Sweep, beyond_sgd, scale, slope
from adadp.gradients.kernels import reference
from tests.bench import tiny


def test_points_slopes_and_figures(tmp_path: Path) -> None:
    kept: list[int] = []
    found = scale(device="cpu", sweeps=tiny.SWEEPS, keep=lambda so_far: kept.append(len(so_far["sweeps"])))
    assert kept == list(range(1, len(tiny.SWEEPS) + 1))
    assert json.loads(json.dumps(found)) == found
    for sweep, made in zip(tiny.SWEEPS, found["sweeps"], strict=True):
        assert {(p["series"], p["value"]) for p in made["points"]} == {(s, v) for s in SERIES for v in sweep.values}
        assert all(point["ms"] > 0 for point in made["points"])
        # Plain SGD of so small a net needs no more than the gradients that it gives back first.
        assert all(point["peak_mib"] > 0 for point in made["points"] if point["series"] != "sgd")
        assert made["slopes"].keys() == SERIES.keys()
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

    def small_lots_only(task: Task) -> Step:
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
    monkeypatch.setitem(scaling.SWEEP, "cpu", -1.0)
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    assert all("were spent" in point["left_out"] for point in sweep["points"])


def test_what_memory_has_no_room_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adadp.bench.machine.free_mib", lambda device: 1e-9)
    (sweep,) = scale(device="cpu", sweeps=tiny.SWEEPS[:1])["sweeps"]
    assert all(("ms" in point) == (point["value"] == 64) for point in sweep["points"])
    assert "it would need about" in sweep["points"][-1]["left_out"]


LOTS = Sweep("mlp", "lot", (256, 512, 1024, 2048), {"width": 64})


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only memory is of interest: two rounds of each point."""
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
