"""From the squares that a kernel measured of products to upper bounds on what is summed, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adadp.gradients.kernels.reference import CANCELLED, MOST_WEIGHTED
from adadp.gradients.kernels.triton_launch import launch
from adadp.gradients.kernels.triton_splits import next_power_of_2


def bounds(
    found: Tensor, lengths: tuple[Tensor, Tensor], more: float, rounding: float, *, far: float = 1.0,
    largest: Tensor | None = None, units: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Upper bounds on the squared norms of products; [n], float64. Infinite where a factor is too large to be weighted.

    Args:
        found: [n, tiles], sums of squares.
        lengths: upper bounds on the norms of each example's two factors, each [n] in float64.
        more: the relative error of the norms that were found.
        rounding: how far sums may be from what was measured, in units of reach.
        far: reach is this times both lengths: it bounds every partial sum.
        largest: what reach grows by, where products were multiplied by a scale.
        units: of each example's factors that were cut to float16: `found` is of the products before these.
    """
    result = torch.empty(len(found), dtype=torch.float64, device=found.device)
    if len(found):
        left, right = lengths
        one, other = (left, right) if units is None else units
        launch(
            _bound, len(found),
            found, found if largest is None else largest, one, other, left, right, result,
            rounding * far * (1 + 2.0**-22), CANCELLED * far, found.shape[1],
            MORE=more, MOST=MOST_WEIGHTED, UNITS=units is not None, SCALED=largest is not None,
            TILES=min(1024, next_power_of_2(found.shape[1])), num_warps=1,
        )  # fmt: skip
    return result


@triton.jit
def _bound(
    found, largest, output_unit, input_unit, output_norms, input_norms, bounds, rounding, least, tiles,
    MORE: tl.constexpr, MOST: tl.constexpr, UNITS: tl.constexpr, SCALED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILES], tl.float64)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        total += tl.load(found + example * tiles + tile, mask=tile < tiles, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0))
    left, right = tl.load(output_norms + example), tl.load(input_norms + example)
    reach = left * right
    if UNITS:
        norm = norm * tl.load(output_unit + example).to(tl.float64) * tl.load(input_unit + example)
        reach = (left + 2.0**-120) * (right + 2.0**-120)  # factors close to the smallest number may double when cut
    if SCALED:
        reach = reach * tl.load(largest).to(tl.float64)
        if UNITS:  # and the scale divided by its largest entry
            norm = norm * tl.load(largest).to(tl.float64)
    bound = norm * (1 + MORE) + reach * rounding
    floor = reach * least
    bound = tl.where(floor > bound, floor, bound)  # NaN stays: `tl.maximum` would drop it
    tl.store(bounds + example, tl.where((left < MOST) & (right < MOST), bound * bound, float("inf")))
