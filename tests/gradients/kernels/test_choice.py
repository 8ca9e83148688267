"""Which version of a kernel is taken, and that it may be asked for."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from adadp.errors import ConfigurationError
from adadp.gradients import Gradients, kernels
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.kernels import kernel, reference
from adadp.gradients.layers.convolution import Convolution, Geometry


def test_the_reference_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADADP_KERNELS", "reference")
    assert kernel("outer_clamped", torch.zeros(1)) is reference.outer_clamped


def test_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADADP_KERNELS", "fastest")
    with pytest.raises(ConfigurationError, match="fastest"):
        kernel("outer_clamped", torch.zeros(1))


def test_float64_takes_the_reference() -> None:
    assert kernel("outer_clamped", torch.zeros(1, dtype=torch.float64)) is reference.outer_clamped


def test_numba_on_a_cpu() -> None:
    with_numba = pytest.importorskip("adadp.gradients.kernels.with_numba")
    sums = ("outer_clamped", "products_clamped", "convolution_clamped", "dense_clamped")
    for name in (*sums, "products_norms", "convolution_norms", "dense_norms"):
        assert kernel(name, torch.zeros(1)) is getattr(with_numba, name)


def test_without_numba_the_reference_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    kernels._backend.cache_clear()
    try:
        assert kernel("outer_clamped", torch.zeros(1)) is reference.outer_clamped
    finally:
        kernels._backend.cache_clear()


def test_importing_adadp_imports_no_numba() -> None:
    code = "import sys, adadp\nadadp.PrivacyEngine, adadp.Local\nassert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _forms() -> dict[str, PerExample]:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size((4, 2, 3, 3)), (2, 1), (1, 0), (1, 2), 2)
    return {
        "vectors": Products(torch.randn(5, 1, 7), torch.randn(5, 1, 18)),
        "sequences": Products(torch.randn(5, 6, 7), torch.randn(5, 6, 3)),
        "convolutions": Convolution(torch.randn(5, 4, 9, 8), torch.randn(5, 4, 5, 4), geometry),
        "stored": Dense(torch.randn(5, 9)),
    }


@pytest.mark.parametrize("name", _forms())
@pytest.mark.parametrize("first", [1.0, math.nan, math.inf, 1e35])
def test_forms_answer_the_same_with_either(monkeypatch: pytest.MonkeyPatch, name: str, first: float) -> None:
    """Clamped sums, and the moments that come with them, over the examples that are finite."""
    answers = {}
    for choice in kernels.CHOICES:
        monkeypatch.setenv("ADADP_KERNELS", choice)
        form = _forms()[name]
        (form.gradients if isinstance(form, Dense) else form.outputs)[0].flatten()[0] = first
        gradients = Gradients({"w": form}, 5, scale=0.5, keep=torch.tensor([True, True, True, False, True]))
        bound = torch.rand(form.shape, generator=torch.Generator().manual_seed(1))
        total = gradients.clamped_sums({"w": bound}, moments=True)["w"]
        squares, finite = form.square_sum(gradients.finite()), gradients.finite()
        torch.testing.assert_close(squares, form._square_sum(finite), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(form.square_sum(finite.clone()), squares, rtol=1e-4, atol=1e-5)
        assert finite[1:].tolist() == [True, True, False, True]
        assert bool(finite[0]) == (first == 1.0 or (first == 1e35 and name == "stored"))
        answers[choice] = (total, squares)
    for found, expected in zip(answers["auto"], answers["reference"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_moments_of_one_choice_of_examples_are_not_those_of_another() -> None:
    form = _forms()["vectors"]
    some, all_of_them = torch.tensor([True, False, True, True, True]), torch.ones(5, dtype=torch.bool)
    form.clamped_sum(torch.ones(form.shape), 2.0, some, moments=True)
    expected = form.dense(slice(0, 5)).square().sum(0)
    torch.testing.assert_close(form.square_sum(all_of_them), expected, rtol=1e-5, atol=1e-6)
