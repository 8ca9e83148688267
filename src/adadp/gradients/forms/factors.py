"""Symmetric matrices that gradients are multiplied by, such as powers of second moments.

A factor computes upper bounds on the norms of its products, often without computing the products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adadp.gradients.rounding import norms, unit_roundoff


class Factor(ABC):
    """A symmetric matrix F, applied to the last dimension of a tensor."""

    #: Whether `norms` is much cheaper than `apply`.
    low_rank: ClassVar[bool] = False
    #: Condition number of F, largest over smallest eigenvalue: by how much `tensor @ F` can amplify relative errors of
    #: `tensor`. NaN or infinite where F is unusable. 1 where F mixes no coordinates: each keeps its relative error.
    spread: float = 1.0

    @property
    def growth(self) -> float | Tensor:
        """About by how much absolute rounding errors grow in a product with F; `norm_floor` grows by the same."""
        return 1.0

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """`tensor @ F`."""

    def apply_left(self, tensor: Tensor) -> Tensor:
        """`F @ tensor`."""
        return self.apply(tensor.mT).mT

    def apply_unscaled(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """`tensor @ F` divided by a number, and that number, or None for 1. Saves a pass over all tokens."""
        return self.apply(tensor), None

    @abstractmethod
    def matrix(self, size: int, like: Tensor) -> Tensor:
        """F itself."""

    def times_columns(self, right: Factor, rows: int, columns: int) -> Tensor | None:
        """The matrix S [rows, columns] with L g R = S * g elementwise, or None where there is none."""
        sides = (self, rows), (right, columns)
        if not all(isinstance(side, Identity | DiagonalFactor) for side, _ in sides):
            return None
        down, across = (side.values if isinstance(side, DiagonalFactor) else None for side, _ in sides)
        if down is None or across is None:
            only = down if across is None else across
            return None if only is None else (only[:, None] if across is None else only[None]).expand(rows, columns)
        return down[:, None] * across[None]

    @abstractmethod
    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        """Upper bounds on the L2 norms of the exact `tensor @ F` for each of n examples, [n], float64.

        `lengths` [n] are upper bounds on the norms of `tensor` [n, ..., d] itself.
        """


def last_bit(tensor: Tensor) -> float:
    """The relative error of one operation on values of `tensor`'s dtype."""
    return 2.0**-53 if tensor.dtype == torch.float64 else 2.0**-24


def _rounding(tensor: Tensor) -> float:
    """Bounds |fl(x . y) - x . y| / (|x| |y|) for products along the last dimension of `tensor`, in any order."""
    return 2 * unit_roundoff(tensor) + tensor.shape[-1] * last_bit(tensor)


def _measurable(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Lengths with room for what products of values close to the smallest number lose."""
    return lengths + tensor.shape[-1] * 2.0**-126


class Identity(Factor):
    """F = I."""

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.eye(size, dtype=like.dtype, device=like.device)

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return lengths


@dataclass(frozen=True)
class DiagonalFactor(Factor):
    """F = diag(values)."""

    values: Tensor

    @property
    def growth(self) -> Tensor:
        return self.values.abs().amax()

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.values.to(tensor.dtype)

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return torch.diag(self.values.to(like.dtype))

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return _measurable(tensor, norms(self.apply(tensor))) * (1 + 2 * last_bit(tensor))


@dataclass(frozen=True)
class Full(Factor):
    """F by all its entries."""

    values: Tensor
    reach: Tensor  # its Frobenius norm, float64
    spread: float

    @property
    def growth(self) -> Tensor:
        return self.reach / math.sqrt(len(self.values))

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor @ self.values.to(tensor.dtype)

    def apply_left(self, tensor: Tensor) -> Tensor:
        # Not the transpose of a product: a batch of them is slow to copy. F is symmetric up to rounding alone, and what
        # `norms` measures is the transpose's.
        return self.values.to(tensor.dtype).mT @ tensor

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return self.values.to(like.dtype)

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        return norms(self.apply(tensor)) + _rounding(tensor) * self.reach * _measurable(tensor, lengths)


@dataclass(frozen=True)
class LowRank(Factor):
    """F = rest * I + U diag(top - rest) U^T: eigenvalues `top` in a few directions, `rest` in all others."""

    low_rank: ClassVar[bool] = True

    basis: Tensor
    top: Tensor
    rest: Tensor
    skew: Tensor  # how far U^T U is from the identity (Frobenius, float64): a basis is orthonormal up to rounding
    spread: float

    @property
    def growth(self) -> Tensor:
        return torch.maximum(self.top.amax(), self.rest) * (1 + self.skew)

    def apply(self, tensor: Tensor) -> Tensor:
        basis, rest = self.basis.to(tensor.dtype), self.rest.to(tensor.dtype)
        inner = (tensor @ basis) * (self.top.to(tensor.dtype) - rest)
        return torch.addcmul(inner @ basis.T, tensor, rest)

    def apply_left(self, tensor: Tensor) -> Tensor:
        # Not as a transpose: the result then has the memory layout of `tensor`.
        basis, rest = self.basis.to(tensor.dtype), self.rest.to(tensor.dtype)
        inner = (self.top.to(tensor.dtype) - rest).unsqueeze(1) * (basis.T @ tensor)
        return torch.addcmul(basis @ inner, tensor, rest)

    def apply_unscaled(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        basis, rest = self.basis.to(tensor.dtype), self.rest.to(tensor.dtype)
        flat = tensor.flatten(0, -2)
        inner = (flat @ basis) * (self.top.to(tensor.dtype) / rest - 1)
        return torch.addmm(flat, inner, basis.T).view(tensor.shape), rest

    def matrix(self, size: int, like: Tensor) -> Tensor:
        return self.apply(torch.eye(size, dtype=like.dtype, device=like.device))

    def norms(self, tensor: Tensor, lengths: Tensor) -> Tensor:
        # |xF|^2 = rest^2 |x|^2 + sum_k (top_k^2 - rest^2) (x . u_k)^2: the few products with the basis are enough.
        rest, top = self.rest.double().square(), self.top.double().square()
        whole = _measurable(tensor, lengths).square()
        inner = (tensor @ self.basis.to(tensor.dtype)).double().square()
        along = (inner.flatten(1, -2).sum(1) if inner.ndim > 2 else inner) @ (top - rest)
        # An x that lies in the basis is all taken off rest^2 |x|^2 again: the difference is wrong by what the products
        # with the basis are wrong by (2 and a little for the square), and by the basis's skew (1 + skew, at most 2).
        wrong = 3 * math.sqrt(len(self.top)) * _rounding(tensor) + 2 * self.skew + 8 * last_bit(tensor)
        return (whole * (rest + wrong * torch.maximum(rest, top.amax())) + along).clamp_min(0).sqrt()


IDENTITY: Factor = Identity()
