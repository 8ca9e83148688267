"""What one step computes, in three types: bounded sums, noised sums, and the released gradient.

    Clipping.bound  ->  BoundedSums  ->  add_noise  ->  NoisedSums  ->  Clipping.release  ->  ReleasedGradient
                        private data                    differentially private: everything after is post-processing

Each is a dictionary of tensors by name. They are types of their own so that mypy refuses to hand on a sum that has no
noise yet where a released value is expected. A constructor call is a claim: `BoundedSums(...)` claims that each
example's share is within the clipping's sensitivity, and only `adadp.mechanism.noise.add_noise` turns bounded sums into
noised ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

#: Standard deviations of the noise, one entry (a number, or a tensor of the entry's shape) for each entry of the sums.
Stddev = Mapping[str, float | Tensor]


class BoundedSums(dict[str, Tensor]):
    """Sums over examples of bounded contributions, without noise: private data.

    Keys are parameter names, or "shape/<parameter>/<statistic>" for statistics that share the step's privacy cost.
    """


class NoisedSums(dict[str, Tensor]):
    """Bounded sums with Gaussian noise: may be released. Made by `add_noise`."""


class ReleasedGradient(dict[str, Tensor]):
    """One gradient for each parameter, computed from noised sums and public values alone (post-processing)."""
