"""The machine that was measured: its versions, its settings while measuring, its memory."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adadp.errors import ConfigurationError
from adadp.gradients.kernels import requested
from adadp.training.planning import device_of
from adadp_lab.report.records import version

#: The kinds of devices that sizes and goals are made for.
KINDS = ("cpu", "cuda")
#: What is measured, and what times depend on.
PACKAGES = ("adadp", "opacus", "triton", "numba", "transformers", "peft", "timm")


def device_for(name: str) -> torch.device:
    """A device of a kind that is measured."""
    device = device_of(name)
    if device.type not in KINDS:
        raise ConfigurationError(f"device must be auto, cpu or cuda, not {name!r}")
    return device


def versions(device: torch.device) -> dict[str, Any]:
    """Everything that times depend on: packages, processor, threads, the kernels that were asked for."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    packages = {package: version(package) for package in PACKAGES}
    found |= {package: known for package, known in packages.items() if known is not None}
    found |= {"processor": _processor(), "threads": torch.get_num_threads(), "kernels": requested()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@contextmanager
def settings(device: torch.device, threads: int | None) -> Iterator[None]:
    """The same arithmetic for everybody: float32, on CUDA with TF32 products. All is as it was afterwards."""
    if threads is not None and threads < 1:
        raise ConfigurationError(f"threads must be at least 1, not {threads}")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peers warn of their own innards at every step
            yield
    finally:
        torch.set_num_threads(before[0])
        if device.type == "cuda":
            torch.set_float32_matmul_precision(before[1])
            torch.backends.cudnn.allow_tf32 = before[2]


def free_mib(device: torch.device) -> float:
    """Memory that can still be had."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0]) / 2**20
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def load() -> float | None:
    """How many processes wanted a processor in the last minute, on average; None where nobody counts them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def said(error: BaseException) -> str:
    """An error as one line of a table."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
