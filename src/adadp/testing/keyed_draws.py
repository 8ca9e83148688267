"""Keyed random numbers: an example gets the same ones in both worlds, whichever other examples are in its lot.

A stream that is read row by row would give other numbers to every row after an added one. So, while the loop works on a
batch, every random operation takes one number (a seed) from its generator. Each value of its result is a hash of the
seed, the index of the example in whose row it is, and its coordinates in the row: not an offset, so that a row that is
padded to another length keeps its values.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adadp.normal import Numbers, box_muller, uniform_of

Words = np.ndarray[Any, np.dtype[np.uint64]]


_SEEDED = torch.Tag.nondeterministic_seeded


def seed_of(*parts: object) -> int:
    """A 63-bit hash of `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mixed(words: Words) -> Words:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the input."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def _words(seed: int, shape: Sequence[int], axis: int | None, identities: Sequence[int]) -> Words:
    """A 64-bit hash for each coordinate of `shape`, in which `identities` replace the indices along `axis`."""
    words = _mixed(np.array(seed, dtype=np.uint64))
    for dimension, size in enumerate(shape):
        places: Any = np.asarray(identities) if dimension == axis else np.arange(size)
        column = places.astype(np.int64).astype(np.uint64).reshape(-1, *[1] * (len(shape) - dimension - 1))
        words = _mixed(words ^ _mixed(column + np.uint64(dimension << 48)))
    return np.broadcast_to(words, tuple(shape)).copy()


def uniform(seed: int, shape: Sequence[int], axis: int | None = None, identities: Sequence[int] = ()) -> Numbers:
    """Values in [0, 1): a hash of `seed`, the identity along `axis` (None: its index) and the other coordinates."""
    return uniform_of(_words(seed, shape, axis, identities))


def normal(seed: int, shape: Sequence[int], axis: int | None = None, identities: Sequence[int] = ()) -> Numbers:
    """Standard normal values, by the Box-Muller transform."""
    second = uniform(seed_of(seed, "angle"), shape, axis, identities)
    return box_muller(uniform(seed, shape, axis, identities), second)[0]


def seed_everything(*parts: object) -> None:
    """Seed the global generators of torch, numpy and Python with a hash of `parts`."""
    seed = seed_of(*parts)
    _seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _seed_torch(seed: int) -> None:
    """As torch.manual_seed, but without its queued calls for devices that are not initialized yet."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators at the end."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


@dataclass(frozen=True)
class RowOwners:
    """The index of the example in each row of a batch, and the batch's number (run, lot)."""

    identities: tuple[int, ...]
    number: tuple[int, int] = (0, 0)


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the results of torch's random operations by keyed ones, while `rows` is set.

    `drawn` notes the shape of each result in the first world. Where the second world draws the same shape although it
    has another number of rows, the tensor holds no rows, and gets the values of the first world.
    """

    def __init__(self, earlier: KeyedDraws | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: RowOwners | None = None
        self.batch_first = True
        self.drawn: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._earlier = {} if earlier is None else earlier.drawn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.rows is None or _SEEDED not in func.tags:
            return func(*args, **kwargs)
        return self._keyed(func, args, kwargs, self.rows)

    def _keyed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowOwners) -> Any:
        given = _bound(func, args, kwargs)
        generator = given.get("generator")
        # One number for each operation, whatever its size: a generator that the loop resets gives the same again.
        seed = int(torch.randint(2**62, (1,), generator=generator if _on_cpu(generator) else None))
        state = torch.default_generator.get_state()
        _seed_torch(seed)
        result = func(*args, **kwargs)
        torch.default_generator.set_state(state)
        draw = _DRAWS.get(func._schema.name.partition("::")[2])
        first = result[0] if isinstance(result, tuple | list) else result
        if draw is None or not isinstance(first, Tensor) or first.is_meta or first.numel() == 0:
            return result  # seeded, but not keyed by rows

        def places(shape: Sequence[int]) -> tuple[int | None, Sequence[int]]:
            return self._places(seed, tuple(shape), rows)

        return draw(_Operation(given, result, seed, places))

    def _places(self, seed: int, shape: tuple[int, ...], rows: RowOwners) -> tuple[int | None, Sequence[int]]:
        """Which dimension of `shape` holds examples (None: none does), and the identity at each of its indices."""
        key = (rows.number, seed, shape)
        whose = self._earlier.get(key, rows.identities)
        whose = rows.identities if len(whose) == len(rows.identities) else whose
        self.drawn[key] = whose
        count = len(whose)
        for dimension in (0, 1) if self.batch_first else (1, 0):
            if len(shape) > dimension and shape[dimension] == count:
                return dimension, whose
        if shape and count and shape[0] % count == 0:  # several rows for each example: tokens, or heads
            each = shape[0] // count
            return 0, [identity * 2**20 + place for identity in whose for place in range(each)]
        return None, ()


@dataclass(frozen=True)
class _Operation:
    """A random operation that has run: its arguments by name, its result, and the seed that it took."""

    given: dict[str, Any]
    result: Any
    seed: int
    places: Callable[[Sequence[int]], tuple[int | None, Sequence[int]]]

    def uniform(self, shape: Sequence[int]) -> Numbers:
        return uniform(self.seed, shape, *self.places(shape))

    def normal(self, shape: Sequence[int]) -> Numbers:
        return normal(self.seed, shape, *self.places(shape))

    def fill(self, values: Numbers | Tensor) -> Any:
        """Write `values` into the result."""
        tensor = torch.as_tensor(values, device=self.result.device)
        if self.result.is_floating_point() and tensor.is_floating_point():
            tensor = tensor.to(self.result.dtype)
        return self.result.copy_(tensor)

    def like(self, value: Any) -> Any:
        """An argument as a number or a numpy array."""
        return value.detach().double().cpu().numpy() if isinstance(value, Tensor) else value


def _bernoulli(one: _Operation) -> Any:
    chance = one.given["p"] if one.given.get("p") is not None else one.given["self"]
    if chance is one.result:  # bernoulli_() without a probability
        chance = 0.5
    return one.fill((one.uniform(one.result.shape) < one.like(chance)).astype(np.float64))


def _uniform(one: _Operation) -> Any:
    low, high = one.given.get("from", 0.0), one.given.get("to", 1.0)
    # In 24 bits: rounding to float32 must not give the end of the interval.
    values = np.floor(one.uniform(one.result.shape) * 2**24) * 2.0**-24
    return one.fill(low + (high - low) * values)


def _normal(one: _Operation) -> Any:
    mean, std = one.like(one.given.get("mean", 0.0)), one.like(one.given.get("std", 1.0))
    return one.fill(mean + std * one.normal(one.result.shape))


def _integers(one: _Operation) -> Any:
    high = one.given.get("high", one.given.get("to"))
    low = one.given.get("low", one.given.get("from")) or 0
    high = 2**24 if high is None else high
    return one.fill(np.floor(low + (int(high) - low) * one.uniform(one.result.shape)))


def _exponential(one: _Operation) -> Any:
    return one.fill(-np.log1p(-one.uniform(one.result.shape)) / one.given.get("lambd", 1.0))


def _permutation(one: _Operation) -> Any:
    return one.fill(np.argsort(uniform(one.seed, one.result.shape)).astype(np.float64))


def _multinomial(one: _Operation) -> Any:
    chances = one.like(one.given["self"])
    if one.given.get("replacement"):
        bounds = np.cumsum(chances, -1) / chances.sum(-1, keepdims=True)
        return one.fill((one.uniform(one.result.shape)[..., None] > bounds[..., None, :]).sum(-1).astype(np.float64))
    with np.errstate(divide="ignore"):
        gumbel = np.log(chances) - np.log(-np.log1p(-one.uniform(chances.shape) - 1e-300))
    chosen = np.argsort(-gumbel, -1)[..., : one.result.shape[-1]]
    return one.fill(np.ascontiguousarray(chosen).astype(np.float64))


def _dropout(one: _Operation) -> Any:
    output, mask = one.result
    if one.given.get("train") is False:
        return one.result
    chance = one.given["p"]
    kept = torch.as_tensor(one.uniform(mask.shape) >= chance, device=mask.device)
    mask.copy_(kept)
    output.copy_(torch.where(kept, one.given["input"] / (1 - chance), 0.0))
    return one.result


_DRAWS: dict[str, Callable[[_Operation], Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform_": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "normal_": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "exponential_": _exponential,
    "randperm": _permutation,
    "multinomial": _multinomial,
    "native_dropout": _dropout,
}


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names, defaults included."""
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given.update(zip((each.name for each in arguments), args, strict=False))
    return {**given, **kwargs}


def _on_cpu(generator: torch.Generator | None) -> bool:
    return generator is not None and generator.device.type == "cpu"


__all__ = ["KeyedDraws", "RowOwners", "generators_kept", "normal", "seed_everything", "seed_of", "uniform"]
