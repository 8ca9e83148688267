"""Second moments as eigenvalues and eigenvectors, and their powers: the factors of a `Kronecker` shape.

The moments of many parameters are decomposed together, since most are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adadp.gradients.forms.factors import IDENTITY, DiagonalFactor, Factor, Full, LowRank
from adadp.gradients.rounding import accumulation_dtype


class Moments(NamedTuple):
    """Second moments: a symmetric matrix [d, d], its diagonal [d], or (`thin`) vectors [k, d] that sum up to it.

    With `thin` the matrix is the sum of the vectors' outer products.
    """

    values: Tensor
    thin: bool = False
    start: Tensor | None = None  # the directions that were largest when these moments were last learnt


@dataclass(eq=False)
class Spectrum:
    """Eigenvalues and directions of second moments, scaled to mean eigenvalue 1 and damped.

    A matrix with more than `2 * rank` rows is kept as its `rank` largest directions and a multiple of the identity.
    """

    values: Tensor
    basis: Tensor | None
    rest: Tensor | None
    skew: Tensor


def spectra(given: Sequence[Moments], damping: float, rank: int | None) -> list[Spectrum]:
    """Decompose many moments. Those of one size are batched."""
    tidied = [_tidied(moments, rank) for moments in given]
    made: dict[int, Spectrum] = {}
    for places in _alike([_kind(moments, rank) for moments in tidied]):
        found = _spectra_alike([tidied[place] for place in places], damping, rank)
        made |= zip(places, found, strict=True)
    return [made[place] for place in range(len(given))]


def _tidied(moments: Moments, rank: int | None) -> Moments:
    values, thin, start = moments
    if thin and _directions(values.shape[1], rank) == values.shape[1]:
        values, thin = values.T @ values, False
    return Moments(values.to(accumulation_dtype(values.dtype)), thin, start)


def _directions(size: int, rank: int | None) -> int:
    """Number of eigenvectors of a matrix that are kept."""
    return size if rank is None or size <= 2 * rank else rank


def _kind(moments: Moments, rank: int | None) -> tuple[Any, ...]:
    """Key by which moments are batched. Its first entry is the number of values that each adds to a batch."""
    values, size = moments.values, moments.values.shape[-1]
    width = 1 if values.ndim == 1 else _directions(size, rank)
    return size * width, size, values.ndim, moments.thin, values.dtype, values.device


_STACKED = 2**24  # numbers, 64 MiB in float32


def _alike(kinds: Sequence[tuple[Any, ...]]) -> Iterator[list[int]]:
    """Indices with equal keys, in batches of at most `_STACKED` values."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    for kind, places in groups.items():
        most = max(1, _STACKED // max(1, kind[0]))
        yield from (places[first : first + most] for first in range(0, len(places), most))


def _apart(stacked: Tensor) -> list[Tensor]:
    """Copy each stacked tensor into its own memory: a recording (`adadp.mechanism.replay`) copies values into each."""
    return list(torch._foreach_mul(stacked.unbind(), 1))


def _spectra_alike(given: Sequence[Moments], damping: float, rank: int | None) -> list[Spectrum]:
    like = given[0].values
    size, directions = like.shape[-1], _directions(like.shape[-1], rank)
    basis: Tensor | None = None
    rest: Tensor | None = None
    skew = torch.zeros(len(given), dtype=torch.float64, device=like.device)
    if like.ndim > 1 and directions < size:
        values, basis, trace = _largest(given, directions)
        rest = ((trace - values.sum(1)) / (size - directions)).clamp_min(0)
        exact = basis.double()
        identity = torch.eye(directions, dtype=exact.dtype, device=exact.device)
        skew = (exact.mT @ exact - identity).flatten(1).norm(dim=1)
    else:
        values = _cleaned(torch.stack([moments.values for moments in given]))
        if like.ndim > 1:
            values, basis = (part.to(like.dtype) for part in torch.linalg.eigh(values.double()))  # which finds an end
        values = values.clamp_min(0)
    # Estimates less their noise need not be positive: the mean is that of what is left of them.
    total = values.sum(1) + (0 if rest is None else rest * (size - directions))
    mean = (total / size).clamp_min(torch.finfo(like.dtype).tiny)
    fields = (
        _apart(values / mean[:, None] + damping),
        [None] * len(given) if basis is None else _apart(basis),
        [None] * len(given) if rest is None else _apart(rest / mean + damping),
        _apart(skew),
    )
    return [Spectrum(*one) for one in zip(*fields, strict=True)]


def _cleaned(moments: Tensor, most: float = 1e15) -> Tensor:
    """Clamp moments of a model that diverged: eigh raises where moments or their products are not finite."""
    if not moments.is_cuda and _all_below(moments, most):
        return moments
    return moments.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-most, most)


def _all_below(moments: Tensor, limit: float) -> bool:
    """Whether all are finite and at most `limit`. On a CPU this costs a third of what two copies cost."""
    if not moments.numel():
        return True
    low, high = moments.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _largest(given: Sequence[Moments], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `rank` largest eigenvalues, their eigenvectors, and the traces.

    Subspace iteration, starting from the last eigenvectors. Moments may be large, so they are not stacked; on a GPU,
    where cleaning makes a copy, they are cleaned each time they are read.
    """
    like, thin = given[0].values, given[0].thin
    clean = partial(_cleaned, most=1e7 if thin else 1e15)
    kept = None if like.is_cuda else [clean(moments.values) for moments in given]

    def read() -> Iterable[Tensor]:
        return (clean(moments.values) for moments in given) if kept is None else kept

    def times(basis: Tensor) -> Tensor:
        pairs = zip(read(), basis.unbind(), strict=True)
        return torch.stack([values.T @ (values @ one) if thin else values @ one for values, one in pairs])

    basis = torch.stack([_start(moments, rank) for moments in given])
    for _ in range(3):
        basis = _orthonormal(times(basis), basis)
    values, rotation = torch.linalg.eigh((basis.mT @ times(basis)).double())  # a GPU is faster at it than in float32
    if thin:
        trace = torch.stack([vectors.square().sum() for vectors in read()])
    else:
        trace = clean(torch.stack([moments.values.diagonal() for moments in given])).sum(1)
    turned = (basis.double() @ rotation).to(basis.dtype)  # in fewer bits they would not be orthonormal any more
    return values.to(basis.dtype).clamp_min(0), turned, trace


def _start(moments: Moments, rank: int) -> Tensor:
    like, shape = moments.values, (moments.values.shape[1], rank)
    if moments.start is not None and moments.start.shape == shape:
        return moments.start.to(like.dtype)
    generator = torch.Generator().manual_seed(0)  # only a starting point: no secret and no data in it
    anywhere: Tensor = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=like.dtype))[0]
    return anywhere.to(like.device)


def _orthonormal(columns: Tensor, before: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of `columns` [n, d, r]: moments times the orthonormal `before`."""
    if columns.is_cuda:
        return _by_cholesky(columns, before)  # torch.linalg.qr takes the n one after the other, each column by column
    found: Tensor = torch.linalg.qr(columns)[0]
    return found


def _by_cholesky(columns: Tensor, before: Tensor) -> Tensor:
    """The same by Cholesky factors of inner products, applied twice: a few operations for all n.

    Moments M of few directions make columns that depend on each other, so a little of B = `before` is added: unless M
    has negative eigenvalues, |(M B / |M B| + e B) x| >= x^T B^T (M B / |M B| + e B) x >= e for every unit vector x.
    Singular values are then between e and 1 + e, and float64 tells their squares apart. Where M has some, or rounding
    does the same, and no factor is found after all, `before` stays.
    """
    exact, orthonormal = columns.double(), before.double()
    lengths = torch.linalg.vector_norm(exact, dim=(1, 2), keepdim=True).clamp_min(torch.finfo(exact.dtype).tiny)
    identity = torch.eye(columns.shape[2], dtype=exact.dtype, device=exact.device)
    made = exact / lengths + 2.0**-20 * orthonormal
    for _ in range(2):
        lower = torch.linalg.cholesky_ex(made.mT @ made)[0]
        made = made @ torch.linalg.solve_triangular(lower, identity, upper=False).mT
    wrong = (made.mT @ made - identity).abs().amax((1, 2), keepdim=True)
    return torch.where(wrong <= 2.0**-40, made, orthonormal).to(columns.dtype)


#: Makes a factor from its spread, which is still on the device.
_Unread = Callable[[float], Factor]


def powers(wanted: Sequence[tuple[Spectrum, float]]) -> list[Factor]:
    """Raise spectra to exponents, in batches. All spreads are read at once, since reading waits for a GPU."""
    made: dict[int, Factor] = {}
    unread: list[tuple[int, _Unread]] = []
    exact: list[Tensor] = []
    for places in _alike([_kind_of_power(*one) for one in wanted]):
        group, exponent = [wanted[place][0] for place in places], wanted[places[0]][1]
        if exponent == 0:
            made |= dict.fromkeys(places, IDENTITY)
            continue
        values = torch.stack([spectrum.values for spectrum in group]) ** exponent
        if group[0].basis is None:
            made |= zip(places, map(DiagonalFactor, _apart(values)), strict=True)
            continue
        factors, spreads = _full(group, values) if group[0].rest is None else _low_rank(group, values, exponent)
        unread += zip(places, factors, strict=True)
        exact.append(spreads)
    for (place, factor), spread in zip(unread, torch.cat(exact).tolist() if exact else (), strict=True):
        made[place] = factor(_kept(spread, wanted[place][0].values.is_cuda))
    return [made[place] for place in range(len(wanted))]


def diagonal_of_power(spectrum: Spectrum, exponent: float) -> Tensor:
    """The diagonal of one spectrum's power, [d]."""
    values = spectrum.values**exponent
    if spectrum.basis is None:
        return values
    rest = 0.0 if spectrum.rest is None else spectrum.rest**exponent
    return (spectrum.basis.square() @ (values - rest) + rest).clamp_min(0)


def _full(group: Sequence[Spectrum], values: Tensor) -> tuple[list[_Unread], Tensor]:
    basis = torch.stack([spectrum.basis for spectrum in group if spectrum.basis is not None])
    matrices = (basis * values[:, None]) @ basis.mT
    fields = zip(_apart(matrices), _apart(matrices.double().flatten(1).norm(dim=1)), strict=True)
    return [partial(Full, *one) for one in fields], values.amax(1) / values.amin(1)


def _low_rank(group: Sequence[Spectrum], values: Tensor, exponent: float) -> tuple[list[_Unread], Tensor]:
    rest = torch.stack([spectrum.rest for spectrum in group if spectrum.rest is not None]) ** exponent
    skew = torch.stack([spectrum.skew for spectrum in group])
    largest, smallest = torch.maximum(values.amax(1), rest), torch.minimum(values.amin(1), rest)
    spreads = torch.where(skew <= 2.0**-10, largest / smallest, math.inf)  # of no basis nothing is known
    bases = [spectrum.basis for spectrum in group if spectrum.basis is not None]
    fields = zip(bases, _apart(values), _apart(rest), [spectrum.skew for spectrum in group], strict=True)
    return [partial(LowRank, *one) for one in fields], spreads


def _kind_of_power(spectrum: Spectrum, exponent: float) -> tuple[Any, ...]:
    """Key by which powers are batched. Its first entry is the number of values that each adds to a batch."""
    values, full = spectrum.values, spectrum.basis is not None and spectrum.rest is None
    size = len(values) ** 2 if full else len(values)
    return size, full, spectrum.rest is None, exponent, values.dtype, values.device


def _kept(spread: float, on_gpu: bool) -> float:
    """On a GPU, round up to a power of two: still a bound, and mostly unchanged by a refresh, so recordings last."""
    return rounded_up(spread) if on_gpu else spread


def rounded_up(spread: float) -> float:
    """The next power of two."""
    return 2.0 ** math.ceil(math.log2(spread)) if 0 < spread < 1e300 else spread
