"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for a GPU that is not there.

The interpreter must be asked for before Triton is first imported, and other tests must not meet it: so the cases run in
a process of their own. It takes much that the compiler does not, such as methods of numbers that are one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def test_cases_in_the_interpreter() -> None:
    cases = [str(Path(__file__).with_name(name)) for name in ("interpreted.py", "interpreted_together.py")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *cases, "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts="],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 328, run.stdout
    assert "skipped" not in run.stdout


def compiled(function: Any, known: dict[str, Any], ones: bool, **pointing: object) -> None:
    """For an H100 or H200; with sizes and strides that are all one, which the compiler treats apart, or all unknown."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "outputs", "inputs", "parts", "bound", "matrix", "sums", "squares", "found",
        "values", "factor", "total", "result", "weights", "tensors", "norms", "unit",
        "output_unit", "input_unit", "output_norms", "input_norms", "keep", "bounds", "largest",
    }  # fmt: skip
    free = [name for name in function.arg_names if name not in known]
    if ones:
        others = pointers | {
            "several_outputs",
            "several_inputs",
            "examples",
            "each",
            "splits",
            "count",
            "scale",
            "rounding",
            "least",
            "apart",
            "eps",
        }
        known = known | {name: 1 for name in free if name not in others}
    types: dict[str, object] = {name: "*fp32" if name in pointers else "i32" for name in free}
    types |= {"found": "*fp64"} | pointing
    signature = {name: "constexpr" if name in known else types[name] for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=known)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.parametrize("ones", [False, True])
def test_the_compiler_takes_every_kind(ones: bool) -> None:
    from adadp.gradients.kernels import (
        triton_bounds,
        triton_half_precision,
        triton_normalized,
        triton_outer,
        triton_products,
        triton_rows,
    )

    compiled(triton_outer._outer, {"ALIGNED": 1, "EXAMPLES": 4, "MOMENTS": True, "ROWS": 16, "COLUMNS": 16}, ones)
    tile = {"PRECISION": "tf32", "ROWS": 16, "COLUMNS": 16, "PLACES": 16}
    plain = {f"{name}_{axis}": 1 for name in ("KERNEL", "STRIDE", "DILATION") for axis in "YX"}
    for pad in (0, 1):
        padding = {"PADDING_Y": pad, "PADDING_X": pad}
        for kind in ({"CLAMPED": True, "MOMENTS": True, "SCALED": False}, {"CLAMPED": False, "SCALED": True}):
            some = dict.fromkeys(("several_outputs", "several_inputs"), ("*fp32",) * (16 if pad else 1))
            compiled(triton_products._products, tile | plain | padding | {"MOMENTS": False} | kind, ones, **some)
    half = {"ROWS": 128, "COLUMNS": 32, "TOKENS": 32}
    units = {"output_unit": "*fp32", "input_unit": "*fp32"}
    factors = units | {"outputs": "*fp16", "inputs": "*fp16", "found": "*fp32", "keep": "*i1", "scale": "fp32"}
    for kind, weights in (("norms", "*fp32"), ("sum", "*fp64"), ("clamped", "*fp32")):
        flags = {"KIND": kind, "SCALED": kind == "norms", "MOMENTS": kind == "clamped", "KEPT": kind != "norms"}
        compiled(triton_half_precision._products, half | flags, ones, **factors, weights=weights)
    lengths = units | {"output_norms": "*fp64", "input_norms": "*fp64", "bounds": "*fp64", "largest": "*fp32"}
    for flag in (False, True):
        known = {"MORE": 2.0**-16, "MOST": 1e32, "SCALED": flag, "UNITS": flag, "TILES": 16}
        found = "*fp32" if flag else "*fp64"
        compiled(triton_bounds._bound, known, ones, **lengths, found=found, rounding="fp32", least="fp32")
    compiled(triton_normalized._group_norm, {"CHANNELS": 4, "PLACES": 64}, ones, eps="fp32")
    compiled(triton_normalized._layer_norm, {"TOKENS": 2, "SIZE": 512}, ones, eps="fp32")
    compiled(triton_rows._root, {"ROWS": 4, "PIECES": 16}, ones, result="*fp64")
    for flag in (False, True):
        some = {"tensors": ("*fp32",) * (16 if flag else 1)}
        types = {"norms": "*fp64", "values": "*fp16", "unit": "*fp32"}
        compiled(triton_half_precision._halve, {"TOKENS": 32, "COLUMNS": 64}, ones, **types, **some)
        tall = {"ALIGNED": 4, "ROWS": 2, "COLUMNS": 64}
        compiled(triton_rows._squares, tall | {"SCALED": flag}, ones, **some)
        for weights in ("*fp32", "*fp64", "*i1"):
            compiled(triton_rows._weigh, tall | {"MULTIPLY": flag}, ones, weights=weights, keep="*i1")
        compiled(triton_rows._clamp, {"ALIGNED": 4, "EXAMPLES": 4, "MOMENTS": flag, "ENTRIES": 1024}, ones)
