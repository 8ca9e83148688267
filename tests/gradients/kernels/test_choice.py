"""Which version of a kernel is taken, and that it may be asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from adadp.errors import ConfigurationError
from adadp.gradients import kernels
from adadp.gradients.kernels import kernel, reference


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
    for name in ("outer_clamped", "products_clamped", "products_norms", "convolution_clamped", "convolution_norms"):
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
