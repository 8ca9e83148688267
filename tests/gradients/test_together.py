"""Forms that are asked together give what each would alone; the reference kernels stand in for a GPU's."""

from __future__ import annotations

import pytest
import torch

from adadp.gradients.collection import Gradients
from adadp.gradients.forms import products, together
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.forms.products import Products


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose user allows TF32."""
    monkeypatch.setattr(products, "may_be_halved", lambda outputs, inputs: outputs.shape[1] > 1)


def forms() -> dict[str, PerExample]:
    torch.manual_seed(0)
    made: dict[str, PerExample] = {}
    for layer in range(19):
        made[f"{layer}"] = Products(torch.randn(4, 20, 6), torch.randn(4, 20, 7))
        made[f"{layer} other"] = Products(torch.randn(4, 20, 5), torch.randn(4, 20, 7), (7, 5, 1))
        made[f"{layer} dense"] = Dense(torch.randn(4, 3, 5).double())
        made[f"{layer} vectors"] = Products(torch.randn(4, 1, 5), torch.randn(4, 1, 3))
    return made


def test_norms_and_sums_are_those_of_each() -> None:
    group, alone = forms(), forms()
    found = together.squared_norms(list(group.values()))
    for measured, form in zip(found, alone.values(), strict=True):
        torch.testing.assert_close(measured, form.squared_norms(), rtol=1e-6, atol=0.0)
    halved = [form.halved for form in group.values() if isinstance(form, Products) and form.tokens > 1]
    groups = {form.group for form in halved if form is not None}
    assert sorted(group.count for group in groups) == [3, 3, 16, 16]
    weights, keep = torch.rand(4, dtype=torch.float64), torch.tensor([True, False, True, True])
    for names in (list(group), list(group)[::3]):  # all, and too few for a group
        sums = together.weighted_sums({name: group[name] for name in names}, weights, keep)
        assert list(sums) == names
        for name in names:
            expected = alone[name].weighted_sum(weights.to(sums[name].dtype), keep)
            torch.testing.assert_close(sums[name], expected, rtol=1e-5, atol=1e-5)


def test_a_layer_alone_is_the_layer_among_others() -> None:
    group, alone = forms(), forms()
    keep = torch.ones(4, dtype=torch.bool)
    Gradients(group, 4, keep=keep).norms()
    for name in ("3", "4 other"):
        whole, part = (Gradients(some, 4, keep=keep).only([name]) for some in (group, alone))
        torch.testing.assert_close(whole.norms(), part.norms(), rtol=1e-6, atol=0.0)
