"""adadp.register_layer: a rule is compared with torch.func before it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gradients.reference import assert_matches
from torch import Tensor, nn

import adadp
from adadp.errors import ConfigurationError
from adadp.gradients import Capture
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import _REGISTER, Layer, LayerCall, registered


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = dict(_REGISTER)
    yield
    _REGISTER.clear()
    _REGISTER.update(before)


class Affine(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight.square() + self.bias


class AffineRule(Layer):
    """The gradients of [n, T, width] and [n, width]."""

    def per_example(self, call: LayerCall) -> dict[str, PerExample]:
        (gradients,), (inputs,) = call.gradients, call.saved
        found = {"weight": 2 * inputs * gradients * call.module.weight, "bias": gradients}
        return {name: Dense(self.summed(found[name]), planned=call.planned) for name in found if name in call.wanted}

    def summed(self, gradients: Tensor) -> Tensor:
        return gradients.sum(1) if gradients.ndim > 2 else gradients


class OfOnes(AffineRule):
    """Right for the initial weights only."""

    def per_example(self, call: LayerCall) -> dict[str, PerExample]:
        (gradients,), (inputs,) = call.gradients, call.saved
        found = {"weight": 2 * inputs * gradients, "bias": gradients}
        return {name: Dense(self.summed(part), planned=call.planned) for name, part in found.items()}


class Mixing(AffineRule):
    def summed(self, gradients: Tensor) -> Tensor:
        return super().summed(gradients) - 1e-4 * super().summed(gradients).mean(0)


class Forgetful(AffineRule):
    def per_example(self, call: LayerCall) -> dict[str, PerExample]:
        return {"bias": Dense(self.summed(call.gradients[0]), planned=call.planned)}


class Small(Dense):
    """Norms that are too small let an example's gradient pass unclipped."""

    def squared_norms(self) -> Tensor:
        return super().squared_norms() * 0.5


class SmallNorms(Forgetful):
    def per_example(self, call: LayerCall) -> dict[str, PerExample]:
        right = AffineRule().per_example(call)
        return {**right, "bias": Small(self.summed(call.gradients[0]), planned=call.planned)}


class Replacing(AffineRule):
    def after(self, taps, module, args, kwargs, output):  # type: ignore[no-untyped-def]
        return super().after(taps, module, args, kwargs, output * 1.001)


class Failing(AffineRule):
    def per_example(self, call: LayerCall) -> dict[str, PerExample]:
        return {"weight": call.saved[3]}


EXAMPLE = (Affine(), torch.randn(5, 4, 3))


def test_a_right_rule_is_registered_and_used() -> None:
    module, inputs = EXAMPLE
    before = {name: value.clone() for name, value in module.state_dict().items()}
    adadp.register_layer(Affine, AffineRule, EXAMPLE, (Affine(2), torch.randn(3, 2)))
    assert isinstance(registered()[Affine], AffineRule)
    model = nn.Sequential(Affine(), nn.Linear(3, 2))
    capture = Capture(model)
    assert capture.notices == []
    capture.detach()
    assert_matches(model.double(), [torch.randn(4, 3, dtype=torch.float64)])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module._forward_hooks
    assert inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (OfOnes, r"gradient of weight .*differs from torch.func's by \d.*largest entry"),
        (Mixing, "gradient of weight .*differs from torch.func's by"),
        (Forgetful, "gives no gradient of weight"),
        (SmallNorms, "norms of bias .*below"),
        (Replacing, "returns something else"),
        (Failing, "cannot be used for Affine: IndexError"),
    ],
)
def test_a_wrong_rule_is_refused(rule: type[Layer], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        adadp.register_layer(Affine, rule, EXAMPLE)
    assert Affine not in registered()


def test_the_rule_of_another_kind() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.T + self.bias

    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    adadp.register_layer(Own, nn.Linear, (Own(3, 2), torch.randn(5, 3)), (Own(3, 2), torch.randn(5, 4, 3)))
    assert registered()[Own] is registered()[nn.Linear]
    with pytest.raises(ConfigurationError, match=r"nn.Linear's rule.*Twice.*gradient of weight"):
        adadp.register_layer(Twice, nn.Linear, (Twice(3, 2), torch.randn(5, 3)))
    with pytest.raises(ConfigurationError, match="no rule for Bilinear"):
        adadp.register_layer(Twice, nn.Bilinear, (Twice(3, 2), torch.randn(5, 3)))


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        ([], "at least one example"),
        ([(nn.Linear(3, 2), torch.randn(5, 3))], "instance of Affine first"),
        ([(Affine(),)], "an input"),
        ([(Affine(), torch.randn(1, 3))], "two examples"),
        ([(Affine().requires_grad_(False), torch.randn(5, 3))], "trainable"),
        ([(Affine(), torch.zeros(5, 3))], "weight is zero"),
    ],
)
def test_examples_that_show_nothing(examples: list[tuple[object, ...]], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        adadp.register_layer(Affine, AffineRule, *examples)


def test_what_is_known_already_and_what_is_random() -> None:
    class Random(Affine):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input))

    with pytest.raises(ConfigurationError, match="registered already"):
        adadp.register_layer(nn.Linear, AffineRule, (nn.Linear(3, 2), torch.randn(5, 3)))
    with pytest.raises(ConfigurationError, match="cannot differentiate the example"):
        adadp.register_layer(Random, AffineRule, (Random(), torch.randn(5, 3)))
