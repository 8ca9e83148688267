"""The few inner loops that are worth a kernel of their own, each in every form that machines need.

| name                                              | what it returns, for the gradients g_n of examples n           |
| ------------------------------------------------- | -------------------------------------------------------------- |
| `outer_clamped(outputs, inputs, bound, moments)`  | sum_n clamp(g_n, +-bound), g_n = b_n a_n^T of two vectors; with |
|                                                   | `moments` sum_n g_n^2 as well                                  |
| `outer_norms(pairs, most)`                        | |a_n|, |b_n| and |g_n|^2 for several such, and the sum; float64 |
| `products_clamped(outputs, inputs, bound, ...)`   | the same for sequences, g_n = sum_t b_nt a_nt^T                |
| `products_norms(outputs, inputs, scale)`          | the squared norm of g_n * scale for each n; float64            |
| `halves(tensor, norms)`                           | a sequence's factor in float16, with a power of two by example |
| `halves_bounds`, `halves_sum`, `halves_clamped`   | bounds on norms, weighted and clamped sums of their products   |
| `convolution_clamped`, `convolution_norms`        | the first two for a convolution's weight                       |
| `convolution_bounds`                              | upper bounds on such norms, with the rounding of sums          |
| `dense_clamped(gradients, bound, moments)`,       | the same for gradients [n, ...] that are stored                |
| `dense_norms(gradients, scale)`                   |                                                                |
| `group_norm_sums(outputs, inputs, groups, eps)`   | gradients of a group normalisation's weight and bias           |
| `layer_norm_sums(outputs, inputs, eps, planned)`  | the same of a layer normalisation                              |
| `row_norms(tensor)`                               | the norm of each row of a matrix; float64                      |
| `alike_norms`, `alike_halves`                     | the same for several tensors of one shape and set of strides   |
| `weighted(tensor, weights, keep)`                 | rows times their weight; zero where that is, even of NaN       |
| `kept(tensor, keep)`                              | rows as they are where they are kept, zero elsewhere           |

`planned` is the public number of examples that a GPU shares its sums out for (`forms.per_example.PerExample`); the
others ignore it.

`reference` has all of them in plain torch. `numba` (CPU) and `triton` (CUDA) have what gains there; what one of them
lacks is taken from the reference. `ADADP_KERNELS=reference` takes everything from there. Every version returns the same
within rounding, and the same bits each time. A value that is NaN adds zero to a clamped sum.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from adadp.errors import ConfigurationError
from adadp.gradients.kernels import reference

CHOICES = ("auto", "reference")


def kernel(name: str, like: torch.Tensor) -> Callable[..., Any]:
    """The fastest version of the kernel called `name` for tensors such as `like`."""
    chosen: Callable[..., Any] = getattr(_backend(like.device.type, like.dtype, requested()), name, None) or getattr(
        reference, name
    )
    return chosen


def requested() -> str:
    """What the user asked for in ADADP_KERNELS; read at every call, so that it may be set at any time."""
    choice = os.environ.get("ADADP_KERNELS", "auto")
    if choice not in CHOICES:
        raise ConfigurationError(f"ADADP_KERNELS must be one of {', '.join(CHOICES)}, not {choice!r}")
    return choice


@cache
def _backend(device: str, dtype: torch.dtype, choice: str) -> ModuleType:
    package = {"cuda": "triton", "cpu": "numba"}.get(device)
    if choice == "reference" or package is None or dtype != torch.float32:
        return reference
    if find_spec(package) is None:
        if package == "numba":  # once: the answer is cached
            warnings.warn(
                "numba is not installed: training on a CPU is right without it, and slower. pip install 'adadp[fast]'",
                stacklevel=2,
            )
        return reference
    return import_module(f"adadp.gradients.kernels.with_{package}")
