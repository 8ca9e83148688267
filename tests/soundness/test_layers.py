"""What holds for every registered kind of layer: its gradients are right, and bounded however it is attacked.

A kind is found here as soon as it is registered (`@supports`). It needs an example in `EXAMPLES`: this file cannot be
collected without one.
"""

from __future__ import annotations

import math

import pytest
import torch
from gradients.reference import assert_matches, matrix_factor
from torch import Tensor, nn

from adadp.gradients import Capture
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.factors import IDENTITY, DiagonalFactor, LowRank
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import _REGISTER, Layer, LayerCall, known_layer, registered, supports
from soundness.stand import CLIPPINGS, TOLERANCE, Stand, World, losses, switched_on, without


class Alone(nn.Module):
    """One layer, called with its input `times` times over, and two fixed sums of all that it returns."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(*[x] * self.times)
        flat = (outputs[0] if isinstance(outputs, tuple) else outputs).flatten(1)
        places = torch.arange(flat.shape[1], dtype=flat.dtype)
        return flat @ torch.stack([torch.cos(0.7 * places), torch.sin(1.3 * places)], 1)


EXAMPLES: dict[type[nn.Module], World] = {
    nn.Linear: World(lambda: Alone(nn.Linear(3, 4)), (5, 3)),
    nn.Conv1d: World(lambda: Alone(nn.Conv1d(2, 3, 3, padding=1)), (2, 6)),
    nn.Conv2d: World(lambda: Alone(nn.Conv2d(2, 4, 3, stride=2, groups=2)), (2, 5, 5)),
    nn.Conv3d: World(lambda: Alone(nn.Conv3d(1, 2, 2)), (1, 3, 3, 3)),
    nn.Embedding: World(lambda: Alone(nn.Embedding(5, 3)), (4,), words=5),
    nn.EmbeddingBag: World(lambda: Alone(nn.EmbeddingBag(5, 3)), (4,), words=5),
    nn.LayerNorm: World(lambda: Alone(nn.LayerNorm(3)), (4, 3)),
    nn.RMSNorm: World(lambda: Alone(nn.RMSNorm(3)), (4, 3)),
    nn.GroupNorm: World(lambda: Alone(nn.GroupNorm(2, 4)), (4, 3)),
    nn.InstanceNorm1d: World(lambda: Alone(nn.InstanceNorm1d(2, affine=True)), (2, 4)),
    nn.InstanceNorm2d: World(lambda: Alone(nn.InstanceNorm2d(2, affine=True)), (2, 3, 3)),
    nn.InstanceNorm3d: World(lambda: Alone(nn.InstanceNorm3d(2, affine=True)), (2, 2, 2, 2)),
    nn.BatchNorm1d: World(lambda: Alone(nn.BatchNorm1d(2).eval()), (2, 4)),
    nn.BatchNorm2d: World(lambda: Alone(nn.BatchNorm2d(2).eval()), (2, 3, 3)),
    nn.BatchNorm3d: World(lambda: Alone(nn.BatchNorm3d(2).eval()), (2, 2, 2, 2)),
    nn.SyncBatchNorm: World(lambda: Alone(nn.SyncBatchNorm(2).eval()), (2, 3)),
    nn.MultiheadAttention: World(lambda: Alone(nn.MultiheadAttention(4, 2, batch_first=True), 3), (3, 4)),
    nn.RNN: World(lambda: Alone(nn.RNN(3, 2, batch_first=True)), (4, 3)),
    nn.GRU: World(lambda: Alone(nn.GRU(3, 2, batch_first=True)), (4, 3)),
    nn.LSTM: World(lambda: Alone(nn.LSTM(3, 2, batch_first=True)), (4, 3)),
    nn.RNNCell: World(lambda: Alone(nn.RNNCell(3, 2)), (3,)),
    nn.GRUCell: World(lambda: Alone(nn.GRUCell(3, 2)), (3,)),
    nn.LSTMCell: World(lambda: Alone(nn.LSTMCell(3, 2)), (3,)),
}


def worlds() -> dict[str, World]:
    """An example of every registered kind, by its name."""
    missing = [kind.__name__ for kind in registered() if kind not in EXAMPLES]
    if missing:
        raise LookupError(f"registered layers without an example in EXAMPLES of {__file__}: {missing}")
    return {kind.__name__: EXAMPLES[kind] for kind in registered()}


every_kind = pytest.mark.parametrize("kind", worlds())


@every_kind
def test_gradients_are_those_of_each_example_alone(kind: str) -> None:
    torch.manual_seed(0)
    world = worlds()[kind]
    model = world.make().double()
    assert known_layer(model.layer) is not None
    inputs = world.inputs(4, torch.Generator().manual_seed(1), torch.float64)
    assert_matches(model, [inputs], lambda outputs: losses(outputs.sin()).sum(), loop=True)


@every_kind
@pytest.mark.parametrize("name", ["flat", "local, raw, on", "ellipsoid, partly wide, released"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_example_moves_a_release_by_at_most_its_noise(kind: str, name: str, dtype: torch.dtype) -> None:
    stand = Stand(worlds()[kind], CLIPPINGS[name], dtype)
    assert switched_on(stand.clipping)
    limit, tolerance = 1 / stand.sigma, TOLERANCE[dtype]
    for blow in (1.0, 1e30):
        inputs, _ = stand.examples(5)
        if inputs.is_floating_point():
            inputs[1] *= blow
        weights = torch.tensor([1.0, -1.0, 1e30, 1e-30, math.nan], dtype=dtype)
        whole = stand.bound(inputs, weights)
        for index in range(len(inputs)):
            fewer = stand.bound(without(inputs, index), without(weights, index))
            assert stand.distance(whole, fewer) <= limit * (1 + tolerance) + tolerance


def low_rank(size: int) -> LowRank:
    basis = torch.eye(size)[:, :1]
    return LowRank(basis, torch.tensor([2.0]), torch.tensor(1.0), torch.tensor(0.0, dtype=torch.float64), 2.0)


@every_kind
def test_all_that_is_made_of_a_form_is_planned_for_the_same_number(kind: str) -> None:
    """If the realised count chose the arithmetic, one example more could change everybody's clipping factor."""
    torch.manual_seed(0)
    world = worlds()[kind]
    model, inputs = world.make(), world.inputs(4, torch.Generator().manual_seed(1))
    capture = Capture(model)
    for planned in (1, 10**12):  # everything fits, nothing does
        for calls in (1, 2):  # which are merged
            capture.work_on(object(), 4, planned)
            sum(losses(model(inputs)).sum() for _ in range(calls)).backward()
            forms = capture.take(4)
            assert forms
            for form in forms.values():
                rows, columns = form.matrix
                factors = [
                    IDENTITY,
                    DiagonalFactor(torch.ones(columns)),
                    low_rank(columns),
                    matrix_factor(torch.eye(columns)),
                ]
                made = [form, form.scaled(torch.ones(form.shape))]
                made += [form.sandwiched(left, right) for left in (IDENTITY, low_rank(rows)) for right in factors]
                made += [turned.scaled(torch.ones(form.shape)) for turned in made]
                made += [turned.sandwiched(IDENTITY, low_rank(columns)) for turned in made]
                assert {turned.planned for turned in made} == {planned}


def test_a_kind_is_found_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, input: Tensor) -> Tensor:
            return input * self.weight

    monkeypatch.setitem(_REGISTER, Scale, None)  # so that it is taken out again afterwards
    del _REGISTER[Scale]

    @supports(Scale)
    class ScaleLayer(Layer):
        def per_example(self, call: LayerCall) -> dict[str, PerExample]:
            return {"weight": Dense(call.saved[0] * call.gradients[0], planned=call.planned)}

    with pytest.raises(LookupError, match="Scale"):
        worlds()
    monkeypatch.setitem(EXAMPLES, Scale, World(lambda: Alone(Scale()), (3,)))
    assert "Scale" in worlds()
    test_gradients_are_those_of_each_example_alone("Scale")
    test_one_example_moves_a_release_by_at_most_its_noise("Scale", "flat", torch.float32)
    test_all_that_is_made_of_a_form_is_planned_for_the_same_number("Scale")
