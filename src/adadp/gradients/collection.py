"""The per-example gradients of one microbatch, for all parameters at once.

This is the last place where examples are apart. It applies the two things that concern an example as a whole: the
factor between the loss's gradient and the example's own (n for a mean over n), and which examples count at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from adadp.gradients.arithmetic import exact_arithmetic, only_if_some_are_not, outer_norms
from adadp.gradients.per_example import PerExample, sum_tensors


class Gradients:
    """Per-example gradients by parameter name.

    `scale` times what a form holds is an example's gradient. `keep` is False for placeholders that stand in for an
    empty lot.
    """

    def __init__(self, forms: Mapping[str, PerExample], count: int, *, scale: float = 1.0, keep: Tensor) -> None:
        self.forms = dict(forms)
        self.count = count
        self.scale = scale
        self.keep = keep

    def __contains__(self, name: str) -> bool:
        return name in self.forms

    def only(self, names: Iterable[str]) -> Gradients:
        """The same examples, some of the parameters."""
        forms = {name: self.forms[name] for name in names if name in self.forms}
        return Gradients(forms, self.count, scale=self.scale, keep=self.keep)

    def replaced(self, forms: Mapping[str, PerExample]) -> Gradients:
        """The same examples with other forms: gradients in another basis."""
        return Gradients(forms, self.count, scale=self.scale, keep=self.keep)

    def norms(self) -> Tensor:
        """Upper bound on each example's L2 norm over all parameters here, shape [n], float64; may be Inf or NaN."""
        pairs = [(form, form.pair) for form in self.forms.values()]
        with exact_arithmetic():
            squared = [form.squared_norms().double() for form, pair in pairs if pair is None]
            if together := [pair for _, pair in pairs if pair is not None]:
                squared.append(outer_norms(together)[-1])
        if not squared:
            return torch.zeros(self.count, dtype=torch.float64, device=self.keep.device)
        return sum_tensors(squared).sqrt() * self.scale

    def weighted_sums(self, weights: Tensor) -> dict[str, Tensor]:
        """`sum_n weights[n] * g_n` of every parameter. Examples of weight 0 add nothing, whatever they hold."""
        scaled, keep = weights * self.scale, only_if_some_are_not(weights)
        with exact_arithmetic():
            return {name: form.weighted_sum(scaled, keep) for name, form in self.forms.items()}

    def finite(self) -> Tensor:
        """Examples that count and whose gradients are finite everywhere; [n] of bool, the same tensor each time."""
        return self._finite

    @cached_property
    def _finite(self) -> Tensor:
        with exact_arithmetic():
            return torch.stack([self.keep, *(form.finite() for form in self.forms.values())]).all(0)

    def clamped_sum(self, name: str, bound: Tensor, moments: bool) -> Tensor:
        """One parameter's sum over finite examples of `clamp(g_n, -bound, bound)`; see `PerExample.clamped_sum`."""
        with exact_arithmetic():
            return self.forms[name].clamped_sum(bound, self.scale, self.finite(), moments)
