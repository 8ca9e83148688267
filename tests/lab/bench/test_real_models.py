"""Models that people train, tiny, through the code that measures them; peers that train less; goals."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adadp_lab.bench import compare, profile_step
from adadp_lab.bench.cases import example_losses, mean_loss, next_tokens
from adadp_lab.bench.goals import REAL_GOALS, judge
from adadp_lab.bench.methods import METHODS, BenchTask, trained
from adadp_lab.bench.models import build
from adadp_lab.bench.real_models import NEEDS, REAL, REAL_SIZES
from adadp_lab.bench.report import write_report
from adadp_lab.report.records import write_json
from lab.bench import tiny

CPU = torch.device("cpu")
quick = partial(compare, device="cpu", rounds=2, sizes={**tiny.SIZES, **tiny.REAL})


def _importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # timm needs a torchvision made for this torch
        return False
    return True


def needing(*names: str) -> list[Any]:
    missing = {name: [package for package in NEEDS[name] if find_spec(package) is None] for name in names}
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(missing[name]), reason=f"no {', '.join(missing[name])}"))
        for name in names
    ]


def test_everything_is_said_of_every_model() -> None:
    assert REAL.keys() == NEEDS.keys() == REAL_GOALS.keys() == tiny.REAL.keys()
    assert all(REAL_SIZES[kind].keys() == REAL.keys() for kind in ("cpu", "cuda"))


@pytest.mark.parametrize("model", needing(*REAL))
def test_a_model_is_made_the_same_each_time_and_learns(model: str) -> None:
    if not all(_importable(package) for package in NEEDS[model]):
        pytest.skip(f"{', '.join(NEEDS[model])} cannot be imported here")
    first, second = (BenchTask(*build(model, tiny.REAL[model], 0, CPU)) for _ in range(2))
    assert first.module is not second.module
    for own, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert own is not other
        assert torch.equal(own, other)
    # Nothing is drawn while it runs: dropout is off.
    assert torch.equal(first.losses(first.inputs, first.targets), second.losses(second.inputs, second.targets))
    assert first.loss().item() == pytest.approx(first.losses(first.inputs, first.targets).mean().item(), rel=1e-5)
    METHODS["sgd"].make(first).run()
    wanted = {name: p.numel() for name, p in first.module.named_parameters() if p.requires_grad}
    assert trained(first.module) == wanted
    assert all("lora" in name for name in wanted) == (model == "llama-lora")


@pytest.mark.parametrize("model", needing("llama", "llama-lora"))
def test_rows_of_a_real_model(model: str) -> None:
    sgd, flat, shaped = quick([model], ["sgd"], ["flat", "ellipsoid-rowcolumn"]).rows
    assert (sgd["method"], flat["method"], shaped["clipping"]) == ("sgd", "adadp", "ellipsoid-rowcolumn")
    for row in (sgd, flat, shaped):
        assert "error" not in row, row
        assert row["ratio_to_sgd"] > 0
        assert row["trained"] == sgd["trained"] > 0


@pytest.mark.parametrize("model", needing("gpt2", "bert"))
def test_what_cannot_be_run_is_one_line(model: str) -> None:
    for row in quick([model], ["sgd"], ["flat"]).rows:
        assert row["ms"] is None or row["ms"] > 0
        assert row["ms"] is not None or "\n" not in row["error"]


def test_the_last_token_predicts_nothing() -> None:
    tokens = torch.tensor([[1, 2, 0], [2, 2, 1]])
    targets = next_tokens(tokens)
    assert targets.tolist() == [[2, 0, -100], [2, 1, -100]]
    logits = torch.randn(2, 3, 4)
    changed = logits.clone()
    changed[:, -1] = 9.0
    assert torch.equal(example_losses(logits, targets), example_losses(changed, targets))
    expected = torch.nn.functional.cross_entropy(logits[1, :2], targets[1, :2])
    assert example_losses(logits, targets)[1].item() == pytest.approx(expected.item(), rel=1e-6)
    assert mean_loss(logits, targets).item() == pytest.approx(example_losses(logits, targets).mean().item(), rel=1e-6)


def test_the_profile_of_a_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(profile_step.SIZES, "cpu", tiny.SIZES)
    profile_step.profile("mlp", "flat", CPU, rows=3, functions=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("===== mlp flat: ")
    assert sum("x  aten::" in line or "x  " in line for line in lines[1:4]) == 3
    assert lines[4].startswith("-- Python, ")
    assert len(lines) == 10
    profile_step.profile("mlp", "round", CPU, rows=3, functions=4)
    assert capsys.readouterr().out.startswith("===== mlp round: KeyError")


# ---- fastDP ---------------------------------------------------------------------------------------------------------

#: What stands in for it: it trains the weights of linear layers and nothing else.
ONLY_WEIGHTS = """
__version__ = "0"

class PrivacyEngine:
    def __init__(self, module, *, batch_size, sample_size, epochs, noise_multiplier, clipping_mode, clipping_fn):
        print("I am made")
        self.others = [p for name, p in module.named_parameters() if not name.endswith("weight")]

    def attach(self, optimizer):
        plain = optimizer.step
        def step():
            for parameter in self.others:
                parameter.grad = None
            plain()
        optimizer.step = step
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "peer" / "fastDP").mkdir(parents=True)
    (tmp_path / "peer" / "fastDP" / "__init__.py").write_text(ONLY_WEIGHTS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fastDP", raising=False)
    return tmp_path / "peer"


def test_a_peer_that_trains_less_is_compared_with_ours_that_does(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adadp_lab.bench.report.draw_scaling", lambda *_: [])
    found = quick(["mlp"], ["sgd"], ["flat"], fastdp=checkout)
    sys.modules.pop("fastDP")
    rows = {row["method"]: row for row in found.rows}
    assert list(rows) == ["sgd", "adadp", "fastdp", "adadp-as-fastdp"]
    assert rows["sgd"]["trained"] == rows["adadp"]["trained"] == 60 * 16 + 16 + 16 * 10 + 10
    assert rows["fastdp"]["trained"] == rows["adadp-as-fastdp"]["trained"] == 60 * 16 + 16 * 10
    assert "fastdp" not in rows["adadp"]["goals"]
    assert rows["adadp-as-fastdp"]["goals"].keys() == {"fastdp"}
    assert found.versions["fastdp"] == "0"
    assert capsys.readouterr().out == ""
    write_json(checkout / "cpu.json", found.to_dict())
    page = write_report(checkout)[0].read_text()
    assert "- mlp, fastdp: 1,120 of 1,146" in page
    assert "| fastdp, trains fewer |" in page


def test_without_a_checkout_a_line_says_so() -> None:
    if find_spec("fastDP") is not None:
        pytest.skip("fastDP is installed")
    found = quick(["mlp"], ["sgd", "fastdp"], ["flat"])
    assert {row["method"] for row in found.rows} == {"sgd", "adadp"}
    assert "--fastdp DIR" in found.notes[0]


# ---- goals ----------------------------------------------------------------------------------------------------------


def row(
    model: str, method: str, time: float, memory: float = 1.0, trained: int = 9, kind: str = "cuda"
) -> dict[str, Any]:
    return {
        "device": kind, "model": model, "clipping": "flat", "method": method, "ratio_to_sgd": time,
        "peak_ratio_to_sgd": memory, "trained": trained,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ordinary", "replayed", "memory"),
    [
        ("gpt2", 1.4, 1.3, 1.3), ("bert", 1.5, 1.3, 1.3), ("llama", 1.4, 1.25, 1.2), ("llama-lora", 1.3, 1.2, 1.1),
        ("vit", 1.7, 1.5, 1.3), ("convnext", 2.0, 1.6, 1.5), ("resnet50", 2.0, 1.7, 1.4),
    ],
)  # fmt: skip
def test_goals_of_real_models(model: str, ordinary: float, replayed: float, memory: float) -> None:
    for method, time in (("adadp", ordinary), ("adadp-graph", replayed)):
        found = judge(row(model, method, time, memory), [])
        assert found == {"time": {"most": time, "met": True}, "memory": {"most": memory, "met": True}}
        missed = judge(row(model, method, time + 0.01, memory + 0.01), [])
        assert not any(goal["met"] for goal in missed.values())
    assert judge(row(model, "adadp-as-fastdp", 1.0), []) == {}
    assert judge(row(model, "adadp", 1.0, kind="cpu"), []) == {}
    assert judge({**row(model, "adadp", 1.0), "clipping": "local"}, []) == {}


def test_peers_count_where_they_train_the_same() -> None:
    peers = [row("vit", "fastdp", 1.1, trained=5), row("vit", "opacus-hooks", 5.0), row("vit", "opacus-ghost", 4.0)]
    assert judge(row("vit", "adadp", 3.0), peers)["opacus"] == {"most": 4.0, "met": True}
    assert "fastdp" not in judge(row("vit", "adadp", 3.0), peers)
    assert judge(row("vit", "adadp-as-fastdp", 1.2, trained=5), peers) == {"fastdp": {"most": 1.1, "met": False}}
    assert judge(row("vit", "adadp", 1.0, trained=5), peers)["fastdp"]["met"]


def test_ordinary_and_replayed_steps_of_real_models_are_judged_apart(tmp_path: Path) -> None:
    rows = [
        row(model, method, time)
        for model in ("llama", "mlp")
        for method, time in (("adadp", 9.0), ("adadp-graph", 1.0))
    ]
    rows = [{**found, "lot": 4, "ms": 1.0, "peak_mib": 1.0, "goals": judge(found, [])} for found in rows]
    settings = {"sizes": {"llama": {"lot": 4}, "mlp": {"lot": 4}}}
    write_json(tmp_path / "cuda.json", {"rows": rows, "versions": {}, "settings": settings})
    page = write_report(tmp_path)[0].read_text()
    assert "- llama, adadp flat: time 9.000x of 1.400x" in page
    assert "- mlp, adadp" not in page
