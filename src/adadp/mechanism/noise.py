"""The noise of training: the only place where private sums become releasable.

Everything that a lot releases passes through `add_noise`: its gradient, the objectives of a line search, a gradient
drawn again. (`adadp.preprocessing.release` is the counterpart for statistics of whole tables.)
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from adadp.mechanism.sums import BoundedSums, NoisedSums, Stddev
from adadp.randomness import Randomness


def add_noise(sums: BoundedSums, stddev: Stddev, randomness: Randomness) -> NoisedSums:
    """Add independent Gaussian noise to every coordinate of the sums.

    Entries of one dtype and device share a single draw. Nothing waits for a GPU, so that the draw can be recorded in a
    CUDA graph; `sums` is not changed.

    Args:
        sums: bounded sums of one lot.
        stddev: standard deviation for each entry of `sums`.
        randomness: where the draws come from. It must not be shared with another run.

    Returns:
        The noised sums, in at least float32.

    Guarantee:
        If adding or removing one example moves `sums / stddev` by at most 1/z in L2 norm, the result is one Gaussian
        event of noise multiplier z.

    """
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, value in sums.items():
        kinds.setdefault((value.dtype, value.device), []).append(name)
    noisy: dict[str, Tensor] = {}
    for names in kinds.values():
        values = [sums[name] for name in names]
        drawn = randomness.normal(values[0].new_empty(sum(value.numel() for value in values)))
        parts = torch.split(drawn, [value.numel() for value in values])
        noise = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        scales = [stddev[name] for name in names]
        if all(isinstance(scale, Tensor) for scale in scales):
            torch._foreach_mul_(noise, cast(list[Tensor], scales))
        elif any(isinstance(scale, Tensor) for scale in scales):
            for part, scale in zip(noise, scales, strict=True):
                part *= scale
        elif len(set(scales)) == 1:
            drawn *= scales[0]
        else:
            torch._foreach_mul_(noise, cast(list[float], scales))
        torch._foreach_add_(noise, values)
        noisy |= zip(names, noise, strict=True)
    return NoisedSums({name: noisy[name] for name in sums})
