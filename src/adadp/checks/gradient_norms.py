"""Squared norms of each example's gradient, by parameter, and how those of two runs are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from adadp.checks.seeds import on_a_gpu
from adadp.errors import UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.rounding import exact_arithmetic

#: By parameter: squared norms of each example's gradient, [n], in double precision.
Norms = dict[str, Tensor]

CROSSED = (
    "{} does not see examples in the order of the batch (they are sorted, reshaped or mixed before it, the loss "
    "compares them, or [N, T, ...] is taken for [T, N, ...]): a gradient that starts at one example arrives as "
    "another's. Keep each example in its row from the loader to the loss (pack_padded_sequence(..., "
    "enforce_sorted=False) needs no sorting), with the same layout everywhere: batch_first=True in the layers and in "
    "make_private, or False in both."
)


def example_norms(capture: Capture, count: int) -> Norms:
    """Squared norms of each example's gradient in the last backward pass."""

    names, norms = stacked_norms(capture, count)
    return dict(zip(names, norms.cpu(), strict=True)) if norms is not None else {}  # one read: each would wait


def stacked_norms(capture: Capture, count: int) -> tuple[tuple[str, ...], Tensor | None]:
    """The same as the parameters' names and [parameters, n] on their device; None where no gradient came.

    Raises:
        UnsupportedModuleError: a parameter's gradient is not that of `count` examples.

    """
    stream = torch.cuda.current_stream() if on_a_gpu() else None

    def work() -> tuple[tuple[str, ...], Tensor | None]:
        forms = capture.look()
        for name, form in forms.items():
            if form.count != count:
                raise UnsupportedModuleError(CROSSED.format(module_of(name, capture)))
        with torch.cuda.stream(stream), torch.no_grad(), exact_arithmetic():
            norms = [form.squared_norms().double() for form in forms.values()]
            return tuple(forms), torch.stack(norms) if norms else None

    # In another thread: torch.func does not work inside hooks on saved tensors, which are set for one thread. The
    # current stream and its device are a thread's own too.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def module_of(parameter: str, capture: Capture) -> str:
    """The name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or type(capture.module).__name__


def scales(count: int) -> list[float]:
    """A factor for each example: 0 for the first, then powers of 4, unlike its neighbours'; exact in any dtype."""
    return [0.0, *(4.0 ** ((5 * place) % 7 - 2) for place in range(1, count))]


def crossing_parameter(plain: Norms, scaled: Norms, factors: Sequence[float]) -> str | None:
    """A parameter for which scaling an example's loss did not scale its gradient by the same factor; else None."""
    squared = torch.tensor(factors, dtype=torch.float64) ** 2
    least = _rounding(plain)
    for name, before, after in _pairs(plain, scaled):
        wanted = before * squared
        sure = before.isfinite() & after.isfinite() & wanted.isfinite()
        if bool(((after - wanted).abs() > 1e-2 * wanted + least * squared.clamp_min(1.0))[sure].any()):
            return name
    return None


def norms_alike(
    base: Norms, other: Norms, kept: Sequence[int], relative: float, scale: float = 1.0, missing: int = 0
) -> bool:
    """Whether the kept examples' gradients are `scale` times as long in `base` as in `other`.

    The first `missing` examples are not in `other`.
    """
    least = _rounding(base)
    for _, before, after in _pairs(base, other):
        one, two = before[list(kept)], after[[row - missing for row in kept]] * scale**2
        sure = one.isfinite() & two.isfinite()
        if bool(((one - two).abs() > 2 * relative * one + least)[sure].any()):
            return False
    return True


def _pairs(one: Norms, other: Norms) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name, value in one.items():
        if name in other:
            yield name, value, other[name]


def _rounding(norms: Norms) -> float:
    """Squared norms below this may be rounding of zero (the bias of attention keys): 1e-5 of the largest norm."""
    finite = [float(norm[norm.isfinite()].max()) for norm in norms.values() if bool(norm.isfinite().any())]
    return 1e-10 * max(finite, default=0.0)
