"""A new clipping, shape or source is one file: it has a name, and the soundness tests try it, without another edit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loop import private

import adadp.clipping
import adadp.shapes
from adadp import Flat, Paid, Probe, Public, Raw, Released
from adadp.accounting.events import Neighbours
from adadp.clipping import BY_NAME, by_name, discover, register
from adadp.errors import ConfigurationError
from adadp.shapes import Known, Source
from soundness.stand import WORLDS, Stand, new_clippings, untried
from soundness.test_sensitivity import worst

CLIPPING = """
from adadp.clipping.base import register
from adadp.clipping.flat import Flat

@register("{name}")
class Mine(Flat):
    def radii(self, scale=1.0):
        return super().radii({factor} * scale)
"""
SOURCE = """
from adadp.shapes.released import Released

class Mine(Released):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files are part of both packages, until the test ends."""
    for package in (adadp.clipping, adadp.shapes):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    known = dict(BY_NAME)
    yield tmp_path
    for name in BY_NAME.keys() - known.keys():
        del BY_NAME[name]
    for file in tmp_path.glob("*.py"):
        for package in (adadp.clipping, adadp.shapes):
            sys.modules.pop(f"{package.__name__}.{file.stem}", None)
            vars(package).pop(file.stem, None)


def test_a_clipping_is_one_file(folder: Path) -> None:
    assert not new_clippings()  # all that are there are tried by name
    (folder / "mine.py").write_text(CLIPPING.format(name="mine", factor=1.0))
    discover()
    ((name, maker),) = new_clippings().items()
    assert name == "registered as mine"
    assert 0.5 < worst(maker) <= 1 + 1e-9
    _, _, optimizer, _ = private(clipping="mine", max_grad_norm=0.5)
    assert type(optimizer._step.clipping).__name__ == "Mine"


def test_one_that_understates_its_sensitivity_is_found_out(folder: Path) -> None:
    (folder / "mine.py").write_text(CLIPPING.format(name="mine", factor=0.5))
    discover()
    (maker,) = new_clippings().values()
    assert worst(maker) > 1.5


def test_a_source_is_one_class(folder: Path) -> None:
    named = {Probe, Public, Known, Released, Paid, Raw}
    assert not untried(Source, named)
    (folder / "mine_too.py").write_text(SOURCE)
    assert [kind.__name__ for kind in untried(Source, named)] == ["Mine"]


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigurationError, match="already"):
        register("flat")(Flat)


def test_the_sensitivity_of_flat_clipping_is_its_bound() -> None:
    for name in ("flat", "automatic"):
        stand = Stand(WORLDS["linear"], lambda world, dtype, name=name: by_name(name, 0.8))
        assert set(stand.clipping.sensitivity().values()) == {0.8}
        assert set(stand.clipping.sensitivity(Neighbours.REPLACE_ONE).values()) == {1.6}
        assert set(stand.clipping.sensitivity("replace-one").values()) == {1.6}
        assert stand.clipping.stddev(3.0) == pytest.approx({"weight": 2.4, "bias": 2.4})
        with pytest.raises(ConfigurationError, match="neighbours must be"):
            stand.clipping.sensitivity("any")


def test_the_sensitivity_of_a_layer_is_its_share() -> None:
    stand = Stand(WORLDS["mlp"], lambda world, dtype: by_name("per_layer", 1.0))
    found = stand.clipping.sensitivity()
    assert torch.tensor([found["0.weight"], found["2.bias"]]).tolist() == pytest.approx([1.0, 1.0])
