"""Models by name: shapes, sizes, nothing that mixes examples."""

import pytest
import torch
from torch import nn

from adadp.errors import ConfigurationError
from adadp.models import MODELS, PaperCifarNet, build, choose
from adadp.models.paper import ResponseNorm

CASES = [
    ("paper", (60,), 71_010),
    ("paper", (3, 32, 32), 1_756_426),
    ("tanh-cnn", (1, 28, 28), 26_010),
    ("tanh-cnn", (3, 32, 32), 550_570),
    ("linear", (784,), 7_850),
    ("mlp", (1, 8, 8), 9_610),
    ("resnet", (3, 32, 32), 2_776_906),
]


@pytest.mark.parametrize(("name", "shape", "size"), CASES)
def test_shape_and_size(name, shape, size):
    model = build(name, shape, 10)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == size


@pytest.mark.parametrize(("name", "shape", "size"), CASES)
def test_an_example_does_not_feel_the_others(name, shape, size):
    torch.manual_seed(0)
    model = build(name, shape, 10).train()
    x = torch.rand(3, *shape)
    other = x.clone()
    other[1:] = 100 * torch.rand(2, *shape)
    assert torch.allclose(model(x)[0], model(other)[0], atol=1e-5)
    norms = nn.modules.batchnorm._BatchNorm
    assert not any(isinstance(module, norms) for module in model.modules())


def test_every_model_is_in_the_cases():
    assert {name for name, *_ in CASES} == set(MODELS)


def test_paper_net_is_as_described():
    net = build("paper", (3, 32, 32), 10)
    assert isinstance(net, PaperCifarNet)
    kinds = [type(m).__name__ for m in net.features]
    first = ["Conv2d", "ReLU", "MaxPool2d", "ResponseNorm"]
    assert kinds == [*first, "Conv2d", "ReLU", "ResponseNorm", "MaxPool2d", "Flatten"]
    assert [m.kernel_size for m in net.features if isinstance(m, nn.Conv2d)] == [(5, 5), (5, 5)]
    assert [m.out_features for m in net.head if isinstance(m, nn.Linear)] == [384, 192, 10]
    assert not any(p.requires_grad for p in net.features.parameters())
    assert all(p.requires_grad for p in net.head.parameters())


def test_response_norm_is_that_of_torch():
    x = torch.randn(2, 64, 5, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = ResponseNorm(64).double(), nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
    assert torch.allclose(ours(30 * x), theirs(30 * x))
    assert torch.autograd.gradcheck(ours, x[:1, :, :2, :2] * 30)
    assert not ours.state_dict()


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 28, 28), "tanh-cnn"),
        ((3, 32, 32), "tanh-cnn"),
        ((3, 64, 48), "tanh-cnn"),
        ((1, 8, 8), "mlp"),
        ((9,), "mlp"),
    ],
)
def test_auto(shape, name):
    assert choose(shape) == name
    assert build("auto", shape, 3)(torch.zeros(1, *shape)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "message"),
    [
        ("vgg", (3, 32, 32), 10, "no model is called 'vgg'; there are auto, linear"),
        ("paper", (1, 28, 28), 10, "DPPCA"),
        ("tanh-cnn", (60,), 10, "mlp"),
        ("tanh-cnn", (1, 8, 8), 10, "16x16"),
        ("resnet", (60,), 10, "8x8"),
        ("linear", (3, 3), 10, "input_shape"),
        ("linear", (), 10, "input_shape"),
        ("linear", (5,), 1, "classes"),
    ],
)
def test_refusals(name, shape, classes, message):
    with pytest.raises(ConfigurationError, match=message):
        build(name, shape, classes)
