from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from adadp_lab.bench import augmentations


def test_ratios_are_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augmentations, "LOT", 4)
    monkeypatch.setattr(augmentations, "VIEWS", (1, 2))
    out = tmp_path / "augmentations.json"
    monkeypatch.setattr(sys, "argv", ["augmentations", "--rounds", "2", "--models", "mlp", "--out", str(out)])
    augmentations.main()
    found = json.loads(out.read_text())["models"]["mlp"]
    took, held = found["milliseconds"], found["mib"]
    assert found["ratios"]["K=2"]["time over K=1"] == pytest.approx(took["private, K=2"] / took["private, K=1"])
    assert found["ratios"]["K=2"]["memory over SGD on the same rows"] == pytest.approx(
        held["private, K=2"] / held["sgd, K=2"]
    )
    assert set(took) == set(held) == {f"{kind}, K={k}" for kind in ("sgd", "private", "rows apart") for k in (1, 2)}
