"""The per-example gradients of one microbatch, for all parameters at once.

After this no example is separate; layers that `adadp.clipping.early` clamped in the backward pass are sums already.
`Gradients` applies what concerns an example as a whole: the factor from d(loss)/dw to one example's gradient (the batch
size for a mean loss, 1 for a sum), and which examples count at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.forms import together
from adadp.gradients.forms.dense import Dense, by_segment
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.segments import SegmentRows, Segments
from adadp.gradients.rounding import exact_arithmetic, flattened, keep_mask, outer_norms

SMALL = 2**14
#: The loss's name among an example's figures.
LOSS = "loss"


def is_small(form: PerExample) -> bool:
    """Whether gradients are so small that a GPU waits for the host. All such parameters are computed on as one."""
    kind = type(form) is Dense and form.gradients.is_cuda and form.gradients.dtype == torch.float32
    return kind and form.shape.numel() <= SMALL and form.norm_floor is None


class _SideBySide:
    """Stored gradients of several parameters, concatenated into one."""

    def __init__(self, forms: Mapping[str, Dense]) -> None:
        self._shapes = {name: form.shape for name, form in forms.items()}
        self.form = Dense(torch.cat([flattened(form.gradients) for form in forms.values()], 1))

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Values for each coordinate, by parameter."""
        parts = torch.split(values, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}

    def joined(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values by parameter, as one vector; zero where a parameter has none."""
        like = self.form.gradients
        return torch.cat([
            values[name].reshape(-1) if name in values else like.new_zeros(shape.numel())
            for name, shape in self._shapes.items()
        ])  # fmt: skip


class Gradients:
    """Per-example gradients by parameter name. Private data: nothing here has been clipped or noised.

    Args:
        forms: one form for each parameter.
        count: number of examples n.
        scale: factor from what a form holds to an example's gradient.
        keep: [n] of bool; False for a row that is no example (an empty lot comes as one such row).

    Attributes:
        figures: numbers of each example, [n] by name: its loss (`LOSS`), where its own was differentiated, and others
            that were given with it.
    """

    def __init__(self, forms: Mapping[str, PerExample], count: int, *, scale: float = 1.0, keep: Tensor) -> None:
        self.forms = dict(forms)
        self.count = count
        self.scale = scale
        self.keep = keep
        self.figures: Mapping[str, Tensor] = {}

    @classmethod
    def of_segments(
        cls, forms: dict[str, PerExample], segments: Segments, *, scale: float, keep: Tensor, some: bool = False
    ) -> Gradients:
        """The gradients of segments of rows: from here on a segment is one example, and rows are no more.

        Args:
            forms: one form of rows for each parameter; taken out one by one, so that their memory can be freed.
            segments: which rows belong together.
            scale: factor from what a form holds to a row's gradient.
            keep: [rows] of bool; rows with False add nothing to their segment.
            some: whether rows of segments may be left out. If not, `keep` says which are padding.
        """
        rows = SegmentRows(segments, keep.device, keep if some else None)
        with exact_arithmetic():
            whole = {name: by_segment(forms.pop(name), rows) for name in list(forms)}
        return cls(whole, len(segments), scale=scale, keep=rows.counted)

    def __contains__(self, name: str) -> bool:
        return name in self.forms

    def only(self, names: Iterable[str]) -> Gradients:
        """The same examples, some of the parameters."""
        forms = {name: self.forms[name] for name in names if name in self.forms}
        return Gradients(forms, self.count, scale=self.scale, keep=self.keep)

    def replaced(self, forms: Mapping[str, PerExample]) -> Gradients:
        """The same examples with other forms: gradients in another basis."""
        return Gradients(forms, self.count, scale=self.scale, keep=self.keep)

    @cached_property
    def _small(self) -> _SideBySide | None:
        small = {name: form for name, form in self.forms.items() if is_small(form)}
        return _SideBySide(small) if len(small) > 1 else None  # type: ignore[arg-type]

    @cached_property
    def _others(self) -> dict[str, PerExample]:
        """The forms that are computed on one by one."""
        return self.forms if self._small is None else {n: f for n, f in self.forms.items() if not is_small(f)}

    def norms(self, let_go: bool = False) -> Tensor:
        """Upper bound on each example's L2 norm over all parameters here, shape [n], float64; may be Inf or NaN.

        With `let_go` nothing but `weighted_sums` and `finite` is called afterwards: memory may be freed.
        """
        forms = [*self._others.values(), *([] if self._small is None else [self._small.form])]
        operands = [(form, form.norm_operands) for form in forms]
        with exact_arithmetic():
            squared = together.squared_norms([form for form, pair in operands if pair is None], let_go)
            if pairs := [pair for _, pair in operands if pair is not None]:
                squared.append(outer_norms(pairs)[-1])
        if not squared:
            return torch.zeros(self.count, dtype=torch.float64, device=self.keep.device)
        total = squared[0] if len(squared) == 1 else torch.stack(squared).sum(0)
        return total.sqrt() * self.scale

    def weighted_sums(self, weights: Tensor) -> dict[str, Tensor]:
        """`sum_n weights[n] * g_n` of every parameter. Examples of weight 0 add nothing, whatever they hold."""
        scaled, keep = weights * self.scale, keep_mask(weights)
        with exact_arithmetic():
            sums = together.weighted_sums(self._others, scaled, keep)
            if self._small is not None:
                sums |= self._small.split(self._small.form.weighted_sum(scaled, keep))
        return sums

    def finite(self) -> Tensor:
        """Examples that count and whose gradients are finite everywhere; [n] of bool, the same tensor each time."""
        return self._finite

    @cached_property
    def _finite(self) -> Tensor:
        forms = [*self._others.values(), *([] if self._small is None else [self._small.form])]
        with exact_arithmetic():
            return torch.stack([self.keep, *(form.finite() for form in forms)]).all(0)

    def clamped_sums(self, bounds: Mapping[str, Tensor], moments: bool) -> dict[str, Tensor]:
        """The sums over finite examples of `clamp(g_n, -bound, bound)`, of parameters that have a bound.

        With `moments`, the same pass computes `square_sum` of their forms over the finite examples, and they store it.
        """
        keep, small = self.finite(), self._small
        bounded = {name: form for name, form in self._others.items() if name in bounds}
        with exact_arithmetic():
            sums = {n: f.clamped_sum(bounds[n], self.scale, keep, moments) for n, f in bounded.items()}
            if small is not None:
                found = small.split(small.form.clamped_sum(small.joined(bounds), self.scale, keep, moments))
                sums |= {name: value for name, value in found.items() if name in bounds}
                if moments:
                    self.cache_square_sums()
        return sums

    def cache_square_sums(self) -> None:
        """Compute `square_sum` over the finite examples for all small forms at once, and store it in each."""
        if self._small is not None:
            for name, squares in self._small.split(self._small.form.square_sum(self.finite())).items():
                self.forms[name].cache_square_sum(self.finite(), squares)
