"""The loops of the CPU kernels, for numba to compile: each a function of the bodies' variant that returns a body.

A body is a C function of an address where numbers lie: first the next tile that is to do, then the addresses of its
arrays, then their sizes. Whoever runs a body takes tiles until none is left. The loops are written so that the compiler
vectorises them: comparisons that become the processor's own min and max, and columns counted without a sign, which
need no look at whether they count from the end. `moments` and `scaled` are constants of what is compiled.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

# What a thread works on stays in its first-level cache: sums, squares and bounds of this many coordinates.
TILE = 2048
# Sums of squares that are kept apart, and added up at the end of a tile.
LANES = 64


@intrinsic
def _next(context, numbers):
    """The number at an address, which is one more from then on, whoever else does the same."""

    def code(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], context.get_constant(types.int64, 1), "monotonic")

    return types.int64(numbers), code


@intrinsic
def _at(context, address):
    """What lies at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), code


@numba.njit(inline="always")
def _number(value):
    return value if value == value else np.float32(0)


@numba.njit(inline="always")
def _within(value, limit):
    value = limit if limit < value else value
    return -limit if -limit > value else value


def add_outer(moments: bool) -> Callable[..., None]:
    """total[r, c] += clamp(outputs[n, r] * inputs[n, c]) over n, and squares likewise."""

    def body(numbers):
        given = numba.carray(numbers, (9,))
        count, rows, columns = given[6], given[7], given[8]
        outputs = numba.carray(_at(given[1]), (count, rows), np.float32)
        inputs = numba.carray(_at(given[2]), (count, columns), np.float32)
        bound = numba.carray(_at(given[3]), (rows, columns), np.float32)
        total = numba.carray(_at(given[4]), (rows, columns), np.float32)
        squares = numba.carray(_at(given[5]), (rows, columns), np.float32)
        wide = min(columns, 256)
        high = max(1, TILE // max(1, wide))
        across, down = (columns + wide - 1) // max(1, wide), (rows + high - 1) // high
        fours = count // 4 * 4
        tile = _next(numbers)
        while tile < across * down:
            top, left = (tile // across) * high, (tile % across) * wide
            bottom, right = min(top + high, rows), min(left + wide, columns)
            for n in range(0, fours, 4):  # four at a time: the sum is loaded and stored less often
                for row in range(top, bottom):
                    b0, b1, b2, b3 = outputs[n, row], outputs[n + 1, row], outputs[n + 2, row], outputs[n + 3, row]
                    for c in range(np.uint64(left), np.uint64(right)):
                        p0, p1 = _number(b0 * inputs[n, c]), _number(b1 * inputs[n + 1, c])
                        p2, p3 = _number(b2 * inputs[n + 2, c]), _number(b3 * inputs[n + 3, c])
                        limit = bound[row, c]
                        first, second = _within(p0, limit) + _within(p1, limit), _within(p2, limit) + _within(p3, limit)
                        total[row, c] += first + second
                        if moments:
                            squares[row, c] += (p0 * p0 + p1 * p1) + (p2 * p2 + p3 * p3)
            for n in range(fours, count):
                for row in range(top, bottom):
                    b0 = outputs[n, row]
                    for c in range(np.uint64(left), np.uint64(right)):
                        p0 = _number(b0 * inputs[n, c])
                        total[row, c] += _within(p0, bound[row, c])
                        if moments:
                            squares[row, c] += p0 * p0
            tile = _next(numbers)

    return body


def add(moments: bool) -> Callable[..., None]:
    """total[c] += clamp(gradients[n, c]) over n, and squares likewise."""

    def body(numbers):
        given = numba.carray(numbers, (7,))
        count, size = given[5], given[6]
        gradients = numba.carray(_at(given[1]), (count, size), np.float32)
        bound = numba.carray(_at(given[2]), (size,), np.float32)
        total = numba.carray(_at(given[3]), (size,), np.float32)
        squares = numba.carray(_at(given[4]), (size,), np.float32)
        tile = _next(numbers)
        while tile * TILE < size:
            left, right = tile * TILE, min((tile + 1) * TILE, size)
            for n in range(count):
                for c in range(np.uint64(left), np.uint64(right)):
                    value = _number(gradients[n, c])
                    total[c] += _within(value, bound[c])
                    if moments:
                        squares[c] += value * value
            tile = _next(numbers)

    return body


# Rows whose lengths a thread takes at a time.
ROWS = 16


@numba.njit(error_model="numpy", fastmath={"contract", "reassoc"})  # in any order: terms have one sign, and 53 bits
def _squared(values, row):
    total = 0.0
    for c in range(np.uint64(values.shape[1])):
        value = np.float64(values[row, c])
        total += value * value
    return total


def outer_lengths(most: float) -> Callable[..., None]:
    """found[3k : 3k + 3, n] = |a|, |b| and |a|^2 |b|^2 of the k-th pair of vectors of n; their sum in the last row.

    The square is infinite where |a| or |b| is `most` or more. Where there is only b, the size of a is -1 and |a| is 1.
    Pairs come last in the numbers: the addresses of b and a, then their sizes.
    """

    def body(numbers):
        count, pairs = numba.carray(numbers, (4,))[2], numba.carray(numbers, (4,))[3]
        given = numba.carray(numbers, (4 + 4 * pairs,))
        found = numba.carray(_at(given[1]), (3 * pairs + 1, count), np.float64)
        tile = _next(numbers)
        while tile * ROWS < count:
            for n in range(tile * ROWS, min((tile + 1) * ROWS, count)):
                total, b, last, width = 0.0, 0.0, 0, 0
                for k in range(pairs):
                    outputs, inputs, rows, columns = given[4 + 4 * k : 8 + 4 * k]
                    if outputs != last or rows != width:  # a bias has the outputs of its weight, which comes before it
                        last, width = outputs, rows
                        b = _squared(numba.carray(_at(outputs), (count, rows), np.float32), n)
                    a, product = 1.0, b
                    if columns >= 0:
                        a = _squared(numba.carray(_at(inputs), (count, columns), np.float32), n)
                        product = a * b if a < most * most and b < most * most else np.inf
                    found[3 * k, n], found[3 * k + 1, n], found[3 * k + 2, n] = np.sqrt(a), np.sqrt(b), product
                    total += product
                found[3 * pairs, n] = total
            tile = _next(numbers)

    return body


def squared_lengths(scaled: bool) -> Callable[..., None]:
    """pieces[n, tile] = the sum of squares of gradients[n, c] * factor[c] over the tile's c, in float64."""

    def body(numbers):
        given = numba.carray(numbers, (7,))
        count, size, tiles = given[4], given[5], given[6]
        gradients = numba.carray(_at(given[1]), (count, size), np.float32)
        factor = numba.carray(_at(given[2]), (size,), np.float32)
        pieces = numba.carray(_at(given[3]), (count, tiles), np.float64)
        lanes = np.zeros(LANES)
        tile = _next(numbers)
        while tile < count * tiles:
            n, left = tile // tiles, (tile % tiles) * TILE
            right = min(left + TILE, size)
            whole = left + (right - left) // LANES * LANES
            lanes[:] = 0
            for start in range(np.uint64(left), np.uint64(whole), np.uint64(LANES)):
                for k in range(np.uint64(LANES)):
                    value = gradients[n, start + k] * factor[start + k] if scaled else gradients[n, start + k]
                    lanes[k] += np.float64(value) * np.float64(value)
            for k in range(np.uint64(right - whole)):
                c = np.uint64(whole) + k
                value = gradients[n, c] * factor[c] if scaled else gradients[n, c]
                lanes[k] += np.float64(value) * np.float64(value)
            half = LANES // 2
            while half > 0:
                for k in range(np.uint64(half)):
                    lanes[k] += lanes[k + np.uint64(half)]
                half //= 2
            pieces[n, tile % tiles] = lanes[0]
            tile = _next(numbers)

    return body
