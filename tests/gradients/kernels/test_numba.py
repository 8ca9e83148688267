"""The CPU kernels against the plain torch ones: odd sizes, values that are not finite, threads and processes."""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adadp.gradients.kernels import reference
from adadp.gradients.kernels import threads as threads_of_torch
from adadp.gradients.layers.convolution import Geometry

pytest.importorskip("numba")
from adadp.gradients.kernels import with_numba


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def agree(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(_largest(other)))


def _largest(tensor: Tensor) -> Tensor:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max() if finite.numel() else torch.zeros(())


SIZES = [(0, 3, 4), (1, 1, 1), (2, 17, 5), (3, 5, 33), (5, 60, 7), (6, 3, 1000), (7, 130, 64), (37, 33, 16)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(("count", "rows", "columns"), SIZES)
def test_vectors(count: int, rows: int, columns: int, moments: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs, bound = torch.randn(count, rows), torch.randn(count, columns), torch.rand(rows, columns)
    expected = reference.outer_clamped(outputs, inputs, bound, moments)
    agree(with_numba.outer_clamped(outputs, inputs, bound, moments), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("count", "rows", "columns"), [*SIZES, (100, 9, 0), (33, 0, 4)])
def test_lengths_of_vectors(count: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    outputs, inputs = torch.randn(count, rows), torch.randn(count, columns)
    apart = torch.randn(columns, count).T
    flat = torch.randn(count, 2, 3)
    pairs = [(outputs, inputs), (outputs, None), (outputs, apart), (flat[:, 0], inputs), (flat.flatten(1), None)]
    found = with_numba.outer_norms(pairs, 1e32)
    assert found.shape == (16, count)
    torch.testing.assert_close(found, reference.outer_norms(pairs, 1e32), rtol=1e-13, atol=0.0)


def test_what_lies_at_the_same_place_need_not_be_as_wide() -> None:
    values = torch.arange(1.0, 13.0)
    pairs = [(values[:6].view(3, 2), None), (values.view(3, 4), None)]
    torch.testing.assert_close(with_numba.outer_norms(pairs, 1e32), reference.outer_norms(pairs, 1e32))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1e30, 3e38, math.inf, math.nan])
def test_lengths_of_vectors_of_every_size(value: float) -> None:
    """A factor that leaves no room to be weighted makes its product infinite; a gradient that is one vector may be."""
    vectors, ordinary = torch.full((3, 7), value), torch.ones(3, 5)
    pairs = [(ordinary, vectors), (vectors, ordinary), (vectors, None)]
    found = with_numba.outer_norms(pairs, 1e32)
    torch.testing.assert_close(found, reference.outer_norms(pairs, 1e32), rtol=1e-13, atol=0.0, equal_nan=True)
    assert found[2].isfinite().all() == found[5].isfinite().all() == (value <= 1e30)
    assert (found[8] < math.inf).all() == (value <= 3e38)


def test_vectors_of_other_numbers_of_examples_are_refused() -> None:
    for pairs in ([(torch.ones(3, 2), torch.ones(2, 2))], [(torch.ones(3, 2), None), (torch.ones(4, 2), None)]):
        with pytest.raises(ValueError, match="examples"):
            with_numba.outer_norms(pairs, 1e32)
    with pytest.raises(TypeError):
        with_numba.outer_norms([(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.float64))], 1e32)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(("count", "rows", "columns"), SIZES)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_sequences(count: int, tokens: int, rows: int, columns: int, moments: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs = torch.randn(count, tokens, rows), torch.randn(count, tokens, columns)
    bound = 2 * torch.rand(rows, columns)
    expected = reference.products_clamped(outputs, inputs, bound, moments)
    agree(with_numba.products_clamped(outputs, inputs, bound, moments), expected)
    for scale in (None, torch.rand(rows, columns)):
        found = with_numba.products_norms(outputs, inputs, scale)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, reference.products_norms(outputs, inputs, scale), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [0, 1, 5, 63, 64, 65, 2048, 2049, 5000])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_stored_gradients(count: int, size: int) -> None:
    torch.manual_seed(0)
    gradients, scale = torch.randn(count, size), torch.rand(size)
    if count and size:
        gradients[0, size - 1] = 1e30  # whose square is no float32
        gradients[0, : size - 1] = 1e-30
    close = {"rtol": 1e-12, "atol": 0.0}
    expected = gradients.double().square().sum(1)
    torch.testing.assert_close(with_numba.dense_norms(gradients), expected, **close)
    expected = (gradients * scale).double().square().sum(1)
    torch.testing.assert_close(with_numba.dense_norms(gradients, scale), expected, **close)
    for moments in (False, True):
        agree(with_numba.dense_clamped(gradients, scale, moments), reference.dense_clamped(gradients, scale, moments))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-45])
def test_norms_of_what_is_not_finite_or_hardly_a_number(value: float) -> None:
    rows = torch.zeros(2, 100)
    rows[1, 7] = value
    expected = torch.tensor([0.0, float(rows[1, 7]) ** 2], dtype=torch.float64)
    torch.testing.assert_close(with_numba.dense_norms(rows), expected, rtol=1e-12, atol=0, equal_nan=True)


GEOMETRIES = [
    (Geometry(torch.Size((4, 3, 3, 3)), (1, 1), (1, 1), (1, 1), 1), (3, 9, 8)),
    (Geometry(torch.Size((6, 2, 3, 2)), (2, 1), (0, 2), (1, 2), 2), (4, 10, 9)),
    (Geometry(torch.Size((4, 1, 3)), (3,), (2,), (2,), 4), (4, 21)),
    (Geometry(torch.Size((3, 2, 2, 2, 2)), (1, 2, 1), (1, 0, 0), (1, 1, 1), 1), (2, 4, 5, 3)),
]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(("geometry", "form"), GEOMETRIES)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_convolutions(count: int, geometry: Geometry, form: tuple[int, ...], moments: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(count, *form)
    sizes = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, pad, dilation, kernel, stride in zip(
            form[1:], geometry.padding, geometry.dilation, geometry.kernel, geometry.stride, strict=True
        )
    ]
    outputs, bound = torch.randn(count, geometry.weight[0], *sizes), 3 * torch.rand(geometry.weight)
    expected = reference.convolution_clamped(outputs, inputs, geometry, bound, moments)
    agree(with_numba.convolution_clamped(outputs, inputs, geometry, bound, moments), expected)
    found = with_numba.convolution_norms(outputs, inputs, geometry, bound)
    torch.testing.assert_close(found, reference.convolution_norms(outputs, inputs, geometry, bound), rtol=1e-5, atol=0)


@pytest.mark.parametrize("few", [1, 3])
def test_examples_that_do_not_fit_the_buffer_together(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(with_numba, "BUFFER_BYTES", few * 4 * 12 * 9)
    test_sequences(7, 4, 12, 9, True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [0, 2])
def test_inputs_that_are_not_contiguous(tokens: int) -> None:
    torch.manual_seed(0)
    many = (6, tokens) if tokens else (6,)
    outputs, inputs = torch.randn(11, *many).movedim(0, -1), torch.randn(*many, 40)[..., ::2]
    bound = torch.rand(20, 11).T
    name = "products_clamped" if tokens else "outer_clamped"
    agree(
        getattr(with_numba, name)(outputs, inputs, bound, True), getattr(reference, name)(outputs, inputs, bound, True)
    )


@pytest.mark.usefixtures("threads")
def test_values_that_are_not_finite() -> None:
    """A NaN adds zero, an infinity what the bound allows; squares of huge values may overflow, to infinity alone."""
    values = torch.tensor([0.0, -0.0, 1.0, -2.0, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 1e25, 1e-25])
    everything = values.repeat(3)
    outputs, inputs = everything.repeat(2, 1), everything.flip(0).repeat(2, 1)
    bound = torch.rand(36, 36)
    bound[0], bound[1] = 0.0, math.inf
    for kernel in ("outer_clamped", "products_clamped"):
        pair = (outputs, inputs) if kernel == "outer_clamped" else (outputs.unsqueeze(1), inputs.unsqueeze(1))
        for moments in (False, True):
            found, squares = getattr(with_numba, kernel)(*pair, bound, moments)
            expected, expected_squares = getattr(reference, kernel)(*pair, bound, moments)
            torch.testing.assert_close(found, expected, equal_nan=True)
            assert found[2:].isfinite().all()
            assert bool((found.abs()[2:] <= 2 * bound[2:]).all())
            if moments:
                torch.testing.assert_close(squares, expected_squares)
                assert not squares.isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    """A loop knows addresses alone, so that it would read and write past the end."""
    with pytest.raises(ValueError, match="bound"):
        with_numba.outer_clamped(torch.ones(2, 3), torch.ones(2, 4), torch.ones(3, 3))
    with pytest.raises(ValueError, match="outputs"):
        with_numba.outer_clamped(torch.ones(2, 3), torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(ValueError, match="bound"):
        with_numba.products_clamped(torch.ones(2, 5, 3), torch.ones(2, 5, 4), torch.ones(3, 3))
    with pytest.raises(ValueError, match="scale"):
        with_numba.dense_norms(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(TypeError, match="bfloat16"):
        with_numba.outer_clamped(torch.ones(2, 3).bfloat16(), torch.ones(2, 4), torch.ones(3, 4))


def same_bits(make: Callable[[], tuple[Tensor, Tensor | None]], expected: tuple[Tensor, Tensor | None]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(make(), expected, strict=True) if a is not None and b is not None)


def _example() -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(37, 300, generator=generator)
    inputs, bound = torch.randn(37, 65, generator=generator), torch.rand(300, 65, generator=generator)
    return with_numba.outer_clamped(outputs, inputs, bound, True)


def test_same_bits_on_one_thread_and_on_two_and_from_two_callers_at_once() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _example()
        torch.set_num_threads(2)
        assert same_bits(_example, alone)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: same_bits(_example, alone), range(40)))
    finally:
        torch.set_num_threads(before)


def test_where_torchs_threads_cannot_be_reached_one_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, before = _example(), torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads_of_torch, "_entry", lambda: None)
    try:
        assert same_bits(_example, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="how torch's threads are reached elsewhere is not known")
def test_two_threads_are_two() -> None:
    """Each caller of the function leaves a mark: as many as torch has threads."""
    marks: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: marks.append(threading.get_native_id()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads_of_torch.in_parallel(ctypes.cast(function, ctypes.c_void_p).value or 0, 0)
    finally:
        torch.set_num_threads(before)
    assert len(marks) == len(set(marks)) == 2


def _in_a_child(sender: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    sender.send([part.tolist() for part in _example() if part is not None])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_process_goes_on_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = [part.tolist() for part in _example() if part is not None]
        receiver, sender = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(sender,))
        child.start()
        assert receiver.poll(60), "the forked process did not answer"
        assert receiver.recv() == expected
        child.join(10)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def test_works_where_nothing_compiled_can_be_kept() -> None:
    """In a process of its own, with numba told of no folder that can be written to."""
    code = (
        "import torch\n"
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from adadp.gradients.kernels import with_numba\n"
        "total, _ = with_numba.outer_clamped(torch.ones(3, 2), torch.ones(3, 5), torch.full((2, 5), 0.5))\n"
        "assert total.eq(1.5).all()\n"
    )
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    folder = str(Path(with_numba.__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([folder, environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_bounds_of_another_kind_of_number_are_refused() -> None:
    """Read as float32, what is a float64 is no bound at all."""
    bound = torch.full((3, 16), 0.1, dtype=torch.float64)
    with pytest.raises(TypeError):
        with_numba.outer_clamped(torch.ones(2, 3), torch.ones(2, 16), bound)
    with pytest.raises(TypeError):
        with_numba.dense_clamped(torch.ones(2, 3, 16), bound)
    with pytest.raises(TypeError):
        with_numba.dense_norms(torch.ones(2, 3, 16), bound)
