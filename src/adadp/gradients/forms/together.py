"""What several parameters' forms are asked at once.

A small step's time on a GPU is that of its launches. Where forms ask for the same thing of tensors that are alike, they
get it from one launch for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from adadp.gradients.forms.half_precision import Halves
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products
from adadp.gradients.rounding import norms_of


def squared_norms(forms: Sequence[PerExample], let_go: bool = False) -> list[Tensor]:
    """`squared_norms` of each. With `let_go` only these and weighted sums are asked for afterwards."""
    waiting = [form for form in forms if "lengths" not in vars(form)]
    lengths = iter(norms_of([factor for form in waiting for factor in form.factors]))
    for form in waiting:
        form.lengths = tuple(next(lengths) for _ in form.factors)
    kinds: dict[type[PerExample], list[PerExample]] = {}
    for form in forms:
        kinds.setdefault(type(form), []).append(form)
    for kind, some in kinds.items():
        kind.prepare(some, let_go)
    return [form.squared_norms() for form in forms]


def weighted_sums(forms: Mapping[str, PerExample], weights: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    """`weighted_sum` of each, by name."""
    groups: dict[Halves, dict[int, str]] = {}
    for name, form in forms.items():
        if isinstance(form, Products) and form.halved is not None:
            groups.setdefault(form.halved.group, {})[form.halved.place] = name
    sums: dict[str, Tensor] = {}
    for group, members in groups.items():
        if len(members) == group.count:  # of some alone, it would compute all
            for place, total in enumerate(group.weighted_sums(weights, keep)):
                sums[members[place]] = total.view(forms[members[place]].shape)
    return {name: sums[name] if name in sums else form.weighted_sum(weights, keep) for name, form in forms.items()}
