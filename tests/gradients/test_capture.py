"""What models and training loops do around layers: each is right or refused, never silently wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradients.reference import assert_forms, assert_matches, by_func, by_loop, captured, loss_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adadp.errors import TrainingLoopError, UnsupportedModuleError
from adadp.gradients.capture.capture import Capture
from adadp.gradients.collection import Gradients

COUNT = 4


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """A module from a function of its parts."""

    def __init__(self, run: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


# ---- one parameter, several uses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 3), (3,)), (nn.Linear(3, 3), (5, 3)), (nn.Conv1d(3, 3, 1), (3, 5)), (nn.LayerNorm(3), (3,))],
    ids=str,
)
def test_module_called_twice(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Model(lambda self, x: self.layer(torch.tanh(self.layer(x))), layer=layer).double()
    assert_matches(model, [randn(COUNT, *shape)])


def test_shared_weight_of_two_modules() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    model = Model(lambda self, x: self.other(torch.tanh(self.one(x))), one=one, other=other).double()
    assert model.one.weight is model.other.weight
    assert_matches(model, [randn(COUNT, 2, 3)])


def test_module_that_hangs_in_two_places() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert_matches(model, [randn(COUNT, 3)], loop=True)
    assert_matches(model, [randn(COUNT, 3)], loop=True, through_func=[""])


# ---- what is trained ------------------------------------------------------------------------------------------------


def test_frozen_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_matches(model, [randn(COUNT, 3)])


def test_what_is_trained_changes_between_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    capture, x = Capture(model), randn(COUNT, 3)
    for frozen in ([], [0], [2], [0, 2], []):
        for place in (0, 2):
            model[place].requires_grad_(place not in frozen)
        if len(frozen) == 2:
            assert not model(x).requires_grad
            continue
        expected = by_loop(copy.deepcopy(model), [x])
        loss_of(model(x)).backward()
        assert_forms(capture.take(COUNT), expected, 1e-9)


def test_adapters_beside_a_frozen_layer() -> None:
    torch.manual_seed(0)
    model = Model(
        lambda self, x: self.base(x) + self.up(self.down(x)),
        base=nn.Linear(5, 4),
        down=nn.Linear(5, 2, bias=False),
        up=nn.Linear(2, 4, bias=False),
    ).double()
    model.base.requires_grad_(False)
    assert_matches(model, [randn(COUNT, 3, 5)])


# ---- arguments and results ------------------------------------------------------------------------------------------


def test_dicts_and_tuples() -> None:
    torch.manual_seed(0)

    def run(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        first, (second, _) = batch["x"], batch["pair"]
        return {"sum": self.one(first) + self.two(input=second), "both": (self.one(second), "text")}

    model = Model(run, one=nn.Linear(3, 2), two=nn.Linear(3, 2)).double()
    batch = {"x": randn(COUNT, 3), "pair": (randn(COUNT, 3) * 2, randn(COUNT, 1))}
    assert_forms(captured(model, [batch], count=COUNT), by_loop(model, [batch], count=COUNT), 1e-9)


def test_masked_sequences() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    model = Model(lambda self, x, m: self.layer(x) * m.unsqueeze(2), layer=nn.Linear(3, 2)).double()
    expected = by_func(model, [randn(COUNT, 3, 3), mask])
    assert expected["weight" if "weight" in expected else "layer.weight"][2].abs().max() == 0
    assert_matches(model, [randn(COUNT, 3, 3), mask])


def test_reductions_of_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    target = torch.tensor([0, 1, 1, 0])
    total = captured(model, [randn(COUNT, 3)], lambda out: F.cross_entropy(out, target, reduction="sum"))
    mean = captured(model, [randn(COUNT, 3)], lambda out: F.cross_entropy(out, target))
    for name, form in total.items():
        torch.testing.assert_close(mean[name].dense(slice(0, 4)) * COUNT, form.dense(slice(0, 4)))


def test_inputs_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    assert_matches(nn.Linear(3, 2).double(), [randn(3, 5, COUNT).permute(2, 1, 0)])


def test_activation_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3), nn.ReLU(True))
    assert_matches(model.double(), [randn(COUNT, 2, 4, 4)], loop=True)


def test_change_in_place_of_what_a_layer_saw_is_refused() -> None:
    """Autograd itself refuses it: the tap keeps its input like any other operation."""
    model = Model(lambda self, x: (self.layer(x), x.mul_(2))[0], layer=nn.Linear(3, 2))
    Capture(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model(torch.randn(COUNT, 3))).backward()


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_examples(count: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for shape in ((count, 3), (count, 5, 3)):
        forms = captured(model, [torch.randn(*shape)])
        assert set(forms) == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert forms[name].squared_norms().shape == (count,)
            assert forms[name].weighted_sum(torch.ones(count), None).shape == parameter.shape
            assert (
                forms[name].clamped_sum(torch.ones(parameter.shape), 1.0, torch.ones(count) > 0).shape
                == parameter.shape
            )


def test_sequences_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4)).double()
    ids = torch.tensor([[0, 1, 1], [2, 2, 4]])
    forms = captured(model, [ids.T], lambda out: loss_of(out.transpose(0, 1)), batch_first=False, count=2)
    assert_forms(forms, by_func(model, [ids]), 1e-9)


def test_vector_without_a_batch_is_refused() -> None:
    model = nn.Linear(3, 2)
    Capture(model)
    with pytest.raises(UnsupportedModuleError, match="batch of one"):
        model(torch.randn(3))
    assert isinstance(model.weight, nn.Parameter)


# ---- precision ------------------------------------------------------------------------------------------------------


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model, x = convolutional(), randn(COUNT, 2, 4, 4, dtype=torch.float32)
    expected = by_loop(model, [x])

    def loss(output: Tensor) -> Tensor:
        return loss_of(output.float())

    capture = Capture(model)
    with torch.autocast("cpu", dtype):
        output = model(x)
    assert output.dtype == dtype
    loss(output).backward()
    forms = capture.take(COUNT)
    assert all(form.weighted_sum(torch.ones(COUNT), None).dtype == torch.float32 for form in forms.values())
    assert_forms(forms, expected, 0.1)


def test_sums_are_exact_even_inside_autocast() -> None:
    """A step taken inside the autocast region must not sum in bfloat16 what was measured in float32."""
    model, x = nn.Linear(64, 64), randn(COUNT, 8, 64, dtype=torch.float32)
    expected = by_func(model, [x])
    capture = Capture(model)
    loss_of(model(x)).backward()
    with torch.autocast("cpu", torch.bfloat16):
        gradients = Gradients(capture.take(COUNT), COUNT, keep=torch.ones(COUNT, dtype=torch.bool)).only(["weight"])
        total = gradients.weighted_sums(torch.ones(COUNT))["weight"]
        norms = gradients.norms()
    torch.testing.assert_close(total, expected["weight"].sum(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norms, expected["weight"].flatten(1).norm(dim=1).double(), rtol=1e-4, atol=0)


def test_model_in_bfloat16() -> None:
    model, x = convolutional(), randn(COUNT, 2, 4, 4, dtype=torch.float32)
    expected = by_loop(copy.deepcopy(model).bfloat16().float(), [x.bfloat16().float()])
    assert_forms(captured(model.bfloat16(), [x.bfloat16()]), expected, 0.1)


# ---- the loop around it ---------------------------------------------------------------------------------------------


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_checkpointing() -> None:
    model, x = small(), randn(COUNT, 3)
    expected = by_func(model, [x])
    capture = Capture(model)
    loss_of(checkpoint(model, x, use_reentrant=False)).backward()
    assert_forms(capture.take(COUNT), expected, 1e-9)

    part = Model(
        lambda self, x: self.last(checkpoint(self.first, x, use_reentrant=False)), first=small(), last=nn.Linear(2, 2)
    )
    assert_matches(part.double(), [x], loop=True)


def test_reentrant_checkpointing_is_refused() -> None:
    model = small()
    capture = Capture(model)
    loss_of(checkpoint(model, randn(COUNT, 3).requires_grad_(), use_reentrant=True)).backward()
    with pytest.raises(TrainingLoopError, match="use_reentrant=False"):
        capture.take(COUNT)


def test_gradients_taken_for_another_purpose_leave_nothing() -> None:
    model, x = small(), randn(COUNT, 3).requires_grad_()
    expected = by_func(model, [x.detach()])
    capture = Capture(model)
    loss = loss_of(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert_forms(capture.take(COUNT), expected, 1e-9)
    torch.autograd.grad(loss_of(model(x)), x)
    assert capture.take(COUNT) == {}


def test_two_backward_passes_add_up() -> None:
    model, x = small(), randn(COUNT, 3)
    once = by_func(model, [x])
    capture = Capture(model)
    loss_of(model(x)).backward()
    loss_of(model(x)).backward()
    assert_forms(capture.take(COUNT), {name: 2 * gradient for name, gradient in once.items()}, 1e-9)


def test_one_graph_differentiated_twice_adds_up() -> None:
    model, x = small(), randn(COUNT, 3)
    once = by_func(model, [x])
    capture = Capture(model)
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_forms(capture.take(COUNT), {name: 2 * gradient for name, gradient in once.items()}, 1e-9)


def test_parts_called_on_their_own() -> None:
    model, x = small(), randn(COUNT, 3)
    expected = by_func(model, [x])
    capture = Capture(model)
    loss_of(model[2](model[1](model[0](x)))).backward()
    assert_forms(capture.take(COUNT), expected, 1e-9)


def test_forward_method_called_around_the_hooks() -> None:
    model = Model(lambda self, x: self.layer.forward(x), layer=nn.Linear(3, 2)).double()
    assert_matches(model, [randn(COUNT, 3)], loop=True)


def test_weight_used_elsewhere() -> None:
    model = Model(lambda self, x: F.linear(self.layer(x), self.layer.weight), layer=nn.Linear(3, 3)).double()
    assert_matches(model, [randn(COUNT, 3)], loop=True)


class Scaled(torch.autograd.Function):
    """x * w, with a gradient for w that torch's operations do not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


@pytest.mark.parametrize("weight", [lambda w: w, lambda w: w + 1])
def test_parameter_in_an_autograd_function_is_refused(weight: Any) -> None:
    model = Model(lambda self, x: Scaled.apply(x, weight(self.scale)), scale=nn.Parameter(torch.ones(3)))
    capture = Capture(model)
    loss_of(model(torch.randn(COUNT, 3))).backward()
    with pytest.raises(UnsupportedModuleError, match="per-example gradients were not seen"):
        capture.take(COUNT)


class Doubled(torch.autograd.Function):
    """A weight as it is, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


@pytest.mark.parametrize("use", [lambda x, w, v: x * w, lambda x, w, v: x + w * v], ids=["alone", "with another"])
def test_parameter_that_an_autograd_function_passes_on_is_refused(use: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        made: Tensor = use(x, Doubled.apply(self.scale), self.other)
        return made

    model = Model(forward, scale=nn.Parameter(torch.ones(3)), other=nn.Parameter(torch.ones(3)))
    Capture(model)
    with pytest.raises(UnsupportedModuleError, match="no rule says"):
        model(torch.randn(COUNT, 3))


def test_batch_folded_into_tokens() -> None:
    model = Model(lambda self, x: self.layer(x.flatten(0, 1)).view(len(x), -1), layer=nn.Linear(3, 2)).double()
    assert_matches(model, [randn(COUNT, 5, 3)], loop=True)


def test_images_folded_into_the_batch_are_refused() -> None:
    model = Model(lambda self, x: self.layer(x.flatten(0, 1)).view(len(x), -1), layer=nn.Conv2d(1, 2, 3))
    capture = Capture(model)
    loss_of(model(torch.randn(COUNT, 5, 1, 4, 4))).backward()
    with pytest.raises(UnsupportedModuleError, match="20 examples where the microbatch has 4"):
        capture.take(COUNT)


def test_copy_of_a_watched_model_is_ordinary() -> None:
    model, x = small(), randn(COUNT, 3)
    capture = Capture(model)
    other = copy.deepcopy(model)
    loss_of(other(x)).backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    loss_of(model(x)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(capture.take(COUNT)) == 4


def test_error_in_the_forward_pass_leaves_the_model_whole() -> None:
    model, x = small(), randn(COUNT, 3)
    expected = by_func(model, [x])
    parameters = dict(model.named_parameters())
    capture = Capture(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(randn(COUNT, 7))
    assert dict(model.named_parameters()) == parameters
    loss_of(model(x)).backward()
    assert_forms(capture.take(COUNT), expected, 1e-9)


def test_inference_is_untouched() -> None:
    model, x = small(), randn(COUNT, 3)
    expected = model(x)
    capture = Capture(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert capture.take(COUNT) == {}


def test_weights_that_change_in_place_between_steps() -> None:
    model, x = small(), randn(COUNT, 3)
    capture = Capture(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        expected = by_func(copy.deepcopy(model), [x])
        loss_of(model(x)).backward()
        assert_forms(capture.take(COUNT), expected, 1e-9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


# ---- modules without a rule -----------------------------------------------------------------------------------------


def test_bare_parameters() -> None:
    torch.manual_seed(0)
    model = Model(
        lambda self, x: self.layer(x * self.scale) + self.shift,
        layer=nn.Linear(3, 2),
        scale=nn.Parameter(torch.randn(3)),
        shift=nn.Parameter(torch.randn(())),
    ).double()
    expected = by_func(model, [randn(COUNT, 3)])
    capture = Capture(model)
    assert not capture.notices
    loss_of(model(randn(COUNT, 3))).backward()
    forms = capture.take(COUNT)
    assert set(forms) == set(expected)
    for name, form in forms.items():
        torch.testing.assert_close(form.dense(slice(0, COUNT)), expected[name])
        torch.testing.assert_close(form.squared_norms().sqrt(), expected[name].view(COUNT, -1).norm(dim=1))
        torch.testing.assert_close(form.weighted_sum(torch.ones(COUNT), None), expected[name].sum(0))


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weights(make: Any) -> None:
    torch.manual_seed(0)
    assert_matches(nn.Sequential(make(nn.Linear(COUNT, COUNT)), nn.Tanh()).double(), [randn(COUNT, COUNT)], loop=True)


def test_parametrized_weights_that_change_in_the_forward_pass_are_refused() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(COUNT, COUNT)), nn.Tanh())
    Capture(model)
    with pytest.raises(
        UnsupportedModuleError, match=r"no rule says how mv brings 0\.parametrizations\.weight\.original"
    ):
        model(torch.randn(COUNT, COUNT))


def test_transposed_convolution_and_bilinear_through_func() -> None:
    torch.manual_seed(0)
    assert_matches(nn.ConvTranspose2d(2, 3, 3).double(), [randn(COUNT, 2, 4, 4)], through_func=[""])
    assert_matches(nn.Bilinear(2, 3, 4).double(), [randn(COUNT, 2), randn(COUNT, 3)], through_func=[""])
    assert_matches(nn.PReLU(3).double(), [randn(COUNT, 3, 2)])


@pytest.mark.parametrize("end", [torch.tanh, torch.relu, torch.sigmoid, torch.exp, lambda x: x.softmax(-1)])
def test_a_module_without_a_rule_may_end_in_what_saves_its_output(end: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return end(x @ self.matrix)

    torch.manual_seed(0)
    assert_matches(nn.Sequential(nn.Linear(5, 4), Own(), nn.Linear(3, 2)).double(), [randn(COUNT, 5)], loop=True)


def test_random_numbers_in_a_module_without_a_rule_are_refused() -> None:
    model = Model(lambda self, x: self.drop(x * self.scale), drop=nn.Dropout(), scale=nn.Parameter(torch.ones(3)))
    capture = Capture(model, through_func=[""])
    loss_of(model(torch.randn(COUNT, 3))).backward()
    with pytest.raises(UnsupportedModuleError, match="random"):
        capture.take(COUNT)
