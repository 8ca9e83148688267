"""Gradients of a trial, measured: squared norms by parameter, one for each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from adadp.checks.seeds import on_a_gpu
from adadp.errors import UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.rounding import exact_arithmetic

#: Squared norms of each example's gradient, [n] a parameter.
Norms = dict[str, Tensor]

CROSSED = (
    "{} does not see examples in the order of the batch (they are sorted, reshaped or mixed before it, or [N, T, ...] "
    "is taken for [T, N, ...]): a gradient that starts at one example arrives as another's. Keep each example in its "
    "row from the loader to the loss (pack_padded_sequence(..., enforce_sorted=False) needs no sorting), with the same "
    "layout everywhere: batch_first=True in the layers and in make_private, or False in both."
)


def example_norms(capture: Capture, count: int) -> Norms:
    """Squared norms of what the last backward pass brought to each parameter, example by example."""

    def work() -> Norms:
        forms = capture.look()
        for name, form in forms.items():
            if form.count != count:
                raise UnsupportedModuleError(CROSSED.format(module_of(name, capture)))
        with torch.no_grad(), exact_arithmetic():
            norms = [form.squared_norms().double() for form in forms.values()]
            # One read for all of them: a GPU waits at each.
            return dict(zip(forms, torch.stack(norms).cpu(), strict=True)) if norms else {}

    return _in_a_thread(work)


def _in_a_thread(work: Callable[[], Norms]) -> Norms:
    """Done by another thread: torch.func does not work where hooks on saved tensors are on, and they are a thread's."""
    stream = torch.cuda.current_stream() if on_a_gpu() else None

    def there() -> Norms:
        with torch.cuda.stream(stream):  # the current one and its device are a thread's too
            return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(there).result()


def module_of(parameter: str, capture: Capture) -> str:
    """The name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or type(capture.module).__name__


def scales(count: int) -> list[float]:
    """A power of two for each example, unlike its neighbours' and exact in any precision; none at all for the first."""
    return [0.0, *(4.0 ** ((5 * place) % 7 - 2) for place in range(1, count))]


def crossing_parameter(plain: Norms, scaled: Norms, factors: Sequence[float]) -> str | None:
    """The parameter whose gradients did not scale with their own examples', if there is one."""
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
    """What rounding may make of gradients that are zero, as that of a key's bias in attention: 1e-5 of the largest."""
    finite = [float(norm[norm.isfinite()].max()) for norm in norms.values() if bool(norm.isfinite().any())]
    return 1e-10 * max(finite, default=0.0)
