"""What is done to features before a linear layer is trained on them: by constants of public features, row by row.

A row's length decides how much of its gradient a bound cuts away, so rows of one length are clipped alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

#: What is added to the public covariance before it is inverted, in parts of its mean eigenvalue.
DAMPING = 0.1


def scaled(name: str, public: Tensor) -> Callable[[Tensor], Tensor]:
    """A map of rows (n, d) to rows (n, d), each by itself, from public rows. No privacy is spent on it.

    "none" changes nothing. "length" centres, and divides by the mean length of public rows. The others centre, multiply
    by a matrix, and divide each row by its own length: nothing ("unit"), one over the standard deviations ("standard"),
    or the inverse root of the covariance ("whitened").
    """
    if name == "none":
        return lambda rows: rows
    centre = public.mean(0)
    away = public - centre
    if name == "length":
        length = float(away.norm(dim=1).mean())
        return lambda rows: (rows - centre) / length
    matrix = _MATRICES[name](away.double()).to(public)
    return lambda rows: normalize((rows - centre) @ matrix, dim=1)


def _whitening(away: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(away.T @ away / len(away))
    roots = (values.clamp(min=0) + DAMPING * values.mean()).rsqrt()
    return cast(Tensor, vectors @ torch.diag(roots) @ vectors.T)


_MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "unit": lambda away: torch.eye(away.shape[1], dtype=away.dtype, device=away.device),
    # A feature that is nearly never on must not be blown up to the size of the others.
    "standard": lambda away: torch.diag((away.var(0) + DAMPING * away.var(0).mean()).rsqrt()),
    "whitened": _whitening,
}
