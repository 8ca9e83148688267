"""Tables of rows: repeated ids, padding, shared tables, and options that have no guarantee."""

from __future__ import annotations

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_func, by_loop, captured
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture.capture import Capture
from adadp.gradients.forms import per_example
from adadp.gradients.forms import products as product_forms
from adadp.gradients.forms.dense import merged
from adadp.gradients.forms.products import Products
from adadp.gradients.kernels.reference import CANCELLED
from adadp.gradients.layers.embedding import Rows, Tied

DTYPES = [torch.float64, torch.float32]


def ids(*shape: int, vocabulary: int = 7) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 9), (5, 3, 2), (1, 6)])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"sparse": True}], ids=str)
def test_every_shape_and_option(options: dict[str, object], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(7, 3, **options, dtype=dtype)
    plain = nn.Embedding(7, 3, **{**options, "sparse": False}, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    expected = by_loop(plain, [ids(*shape)])
    assert_forms(captured(model, [ids(*shape)]), expected, 1e-9 if dtype == torch.float64 else 1e-4)


def test_ids_of_another_integer_type_and_frozen_table() -> None:
    assert_matches(nn.Embedding(7, 3).double(), [ids(4, 3).int()], loop=True)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)).double()
    model[0].weight.requires_grad_(False)
    assert_matches(model, [ids(4, 3)], loop=True)


def test_repeated_ids_are_added_before_the_norm() -> None:
    outputs = torch.tensor([[[3.0, 0.0], [1.0, 1.0], [1.0, 0.0]]])
    form = Rows.summed(torch.tensor([[5, 1, 5]]), outputs, (6, 2))
    assert form.squared_norms().item() == pytest.approx(16 + 2, rel=1e-4)
    cancelling = Rows.summed(torch.tensor([[5, 5, 5]]), torch.tensor([[[1e8, 0.0], [-1e8, 0.0], [0.1, 0.0]]]), (6, 2))
    assert cancelling.squared_norms().sqrt() >= cancelling.weighted_sum(torch.ones(1), None).double().norm()


def test_rows_are_not_made_dense() -> None:
    """[n, vocabulary, d] would take 40 GiB here."""
    form = Rows.summed(ids(16, 32, vocabulary=10**7), torch.randn(16, 32, 64), (10**7, 64))
    assert form.squared_norms().shape == (16,)
    everybody = torch.ones(16, dtype=torch.bool)
    assert form.moments(everybody, {"rows": "diagonal"})["rows"].shape == (10**7,)
    assert form.moments(everybody, {"columns": "full"})["columns"].shape == (64, 64)


def test_sequences_first() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(7, 3).double()
    expected = by_func(model, [ids(5, 4)])
    forms = captured(model, [ids(5, 4).T], loss=lambda out: _loss(out.transpose(0, 1)), batch_first=False, count=5)
    assert_forms(forms, expected, 1e-9)


def _loss(output: Tensor) -> Tensor:
    from gradients.reference import loss_of

    return loss_of(output)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.scores = nn.Linear(3, 7, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.table(tokens)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [False, True])
def test_table_shared_with_the_scores(monkeypatch: pytest.MonkeyPatch, large: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TiedModel().to(dtype)
    expected = by_func(model, [ids(5, 4)])
    if large:
        for module in (per_example, product_forms):
            monkeypatch.setattr(module, "DENSE_BYTES", 100)
    forms = captured(model, [ids(5, 4)])
    assert isinstance(forms["table.weight"], Tied) == large
    assert_forms(forms, expected, 1e-9 if dtype == torch.float64 else 1e-4)


def test_look_ups_and_products_that_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts are huge and their sum is what rounding leaves."""
    torch.manual_seed(0)
    for module in (per_example, product_forms):
        monkeypatch.setattr(module, "DENSE_BYTES", 1)
    places = ids(3, 4)
    inputs = torch.randn(3, 4, 3) * 1e4
    outputs = nn.functional.one_hot(places, 7).float() * torch.randn(3, 4, 1)
    rows = Rows.summed(places, -(inputs * outputs.sum(2, keepdim=True)), (7, 3))
    form = merged([Products(inputs, outputs), rows])
    assert isinstance(form, Tied)
    for example in range(3):
        alone = torch.zeros(3)
        alone[example] = 1
        added = form.weighted_sum(alone, alone != 0).double().norm()
        bound = form.squared_norms()[example].sqrt()
        assert added <= bound
        least = CANCELLED * (form.products.reach + form.rows.rows.double().flatten(1).norm(dim=1))[example]
        assert least <= bound <= 1.001 * least, "rounding is most of what is added, or the bound far too large"


def test_table_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return self.table(one).sum(1) * self.table(other).sum(1)

    torch.manual_seed(0)
    assert_matches(Twice().double(), [ids(5, 4), ids(5, 2)])


def test_options_that_touch_more_than_one_example_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="max_norm=None"):
        Capture(nn.Sequential(nn.Embedding(5, 2, max_norm=1.0)))
    with pytest.raises(UnsupportedModuleError, match="scale_grad_by_freq=False"):
        Capture(nn.Embedding(5, 2, scale_grad_by_freq=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 2}, {"mode": "sum", "padding_idx": 2}],
    ids=str,
)
def test_bags(options: dict[str, object], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_matches(nn.EmbeddingBag(7, 3, **options, dtype=dtype), [ids(5, 6)], loop=True)


def test_weighted_bags() -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(7, 3, mode="sum").double()
    factors = torch.rand(5, 4, dtype=torch.float64)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = model

        def forward(self, tokens: Tensor, factors: Tensor) -> Tensor:
            return self.bag(tokens, per_sample_weights=factors)

    assert_matches(Weighted(), [ids(5, 4), factors], loop=True)


def test_bags_that_are_not_known_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="'mean' or 'sum'"):
        Capture(nn.EmbeddingBag(5, 2, mode="max"))
    model = nn.EmbeddingBag(7, 3)
    Capture(model)
    with pytest.raises(UnsupportedModuleError, match="padding_idx="):
        model(ids(6), torch.tensor([0, 2, 4]))


def test_one_bad_example_stays_alone() -> None:
    outputs = torch.ones(3, 2, 2)
    outputs[1] = float("inf")
    outputs[2, 0, 0] = float("nan")
    form = Rows.summed(torch.tensor([[1, 2], [1, 1], [2, 2]]), outputs, (4, 2))
    keep = form.squared_norms().isfinite()
    assert keep.tolist() == [True, False, False]
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(form.weighted_sum(keep.float(), keep), expected)
    assert form.clamped_sum(torch.ones(4, 2), 1.0, torch.ones(3, dtype=torch.bool)).isfinite().all()


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_examples(count: int) -> None:
    form = captured(nn.Embedding(7, 3), [ids(count, 4)])["weight"]
    assert form.squared_norms().shape == (count,)
    assert form.weighted_sum(torch.ones(count), None).shape == (7, 3)
