"""adadp.fix: what mixes examples is replaced, with what it had learnt, and what was replaced is said."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from loop import private
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import adadp
from adadp import fix
from adadp.checks.validation import problems
from adadp.errors import ModelNotice, UnsupportedModuleError
from adadp.gradients import Capture

quiet = pytest.mark.filterwarnings("ignore::adadp.errors.ModelNotice")


class BatchNormAct(nn.BatchNorm2d):
    """As timm has it: a BatchNorm whose forward also drops and activates."""

    def __init__(self, channels: int, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return self.act(self.drop(normalised))


class FrozenBatchNorm(nn.Module):
    """As torchvision has it: buffers only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


class Block(nn.Module):
    """A residual block as torchvision writes it: one ReLU, in place, and a sum in place."""

    def __init__(self, width: int, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width, nn.Identity()) if norm is BatchNormAct else norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.act1 = nn.Identity() if norm is BatchNormAct else self.relu

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def resnet(norm: Any = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), norm(8), *([] if norm is BatchNormAct else [nn.ReLU(inplace=True)])
    )
    blocks = nn.Sequential(Block(8, norm), nn.Sequential(Block(8, norm)))
    model = nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
    return model


def images(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum((1, 2, 3)) > 0).long())


@quiet
def test_scale_and_shift_are_kept() -> None:
    model = resnet()
    norm = model[1][0].bn1
    norm.bias.requires_grad_(False)
    norm.eval().double()
    norm.eps = 0.1
    new = fix(model)[1][0].bn1
    assert isinstance(new, nn.GroupNorm)
    assert torch.equal(new.weight, norm.weight)
    assert torch.equal(new.bias, norm.bias)
    assert new.weight is not norm.weight  # of a copy
    assert (new.weight.requires_grad, new.bias.requires_grad) == (True, False)
    assert new.weight.dtype == torch.float64
    assert (new.training, new.eps) == (False, 0.1)
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    groups = x.view(3, new.num_groups, -1)
    normalised = ((groups - groups.mean(2, True)) / (groups.var(2, False, keepdim=True) + 0.1).sqrt()).view(x.shape)
    torch.testing.assert_close(new(x), normalised * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1))


@quiet
def test_without_scale_or_shift_and_other_kinds() -> None:
    plain = fix(nn.BatchNorm2d(6, affine=False))
    assert plain.weight is None
    assert plain.bias is None
    shiftless = nn.BatchNorm2d(6)
    shiftless.bias = None
    new = fix(shiftless)
    assert torch.equal(new.weight, torch.ones(6))
    assert new.bias is None
    assert new(torch.randn(2, 6, 3, 3)).shape == (2, 6, 3, 3)
    assert isinstance(fix(nn.SyncBatchNorm(6)), nn.GroupNorm)
    assert isinstance(fix(nn.BatchNorm3d(6)), nn.GroupNorm)
    meta = fix(nn.Sequential(nn.BatchNorm2d(6, device="meta")))
    assert meta[0].weight.is_meta


@quiet
def test_one_object_in_two_places_stays_one() -> None:
    norm, parameters = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    parameters.weight = norm.weight
    model = nn.Sequential(norm, nn.ReLU(), norm, nn.Sequential(norm), parameters)
    fixed = fix(model)
    assert isinstance(fixed[0], nn.GroupNorm)
    assert fixed[0] is fixed[2] is fixed[3][0]
    assert fixed[4] is not fixed[0]
    assert fixed[4].weight is fixed[0].weight
    assert problems(fixed) == []


@quiet
@pytest.mark.parametrize(
    ("act", "drop"), [(nn.ReLU(inplace=True), None), (nn.SiLU(), nn.Dropout(0.5)), (nn.Identity(), None)]
)
def test_a_norm_that_activates_keeps_its_activation(act: nn.Module, drop: nn.Module | None) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), BatchNormAct(8, act, drop))
    nn.init.uniform_(model[1].weight)
    fixed = fix(model).eval()
    norm = fixed[1].norm
    assert isinstance(norm, nn.GroupNorm)
    assert torch.equal(norm.weight, model[1].weight)
    inputs = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(fixed(inputs), copy.deepcopy(act)(norm(fixed[0](inputs))))
    assert fixed.train()[1].drop.training
    Capture(fixed.eval())


@quiet
def test_a_subclass_is_known_by_what_it_computes() -> None:
    class InFloat32(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).type_as(x)

    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Otherwise(BatchNormAct):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    assert isinstance(fix(nn.Sequential(InFloat32(4)))[0], nn.GroupNorm)
    for kind in (Doubled, Otherwise):
        with pytest.raises(UnsupportedModuleError, match=rf"a.0 \({kind.__name__}\).*by hand"):
            fix(nn.ModuleDict({"a": nn.Sequential(kind(4))}))


def test_what_has_buffers_only_is_left_alone() -> None:
    model = resnet(FrozenBatchNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = fix(model)
    assert isinstance(fixed[1][0].bn1, FrozenBatchNorm)
    assert adadp.notes(fixed) == []


def test_modules_without_a_shape_are_named() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"0\.weight .*dummy input"):
        fix(nn.Sequential(nn.LazyBatchNorm2d()))


def test_what_was_replaced_is_said_in_one_line() -> None:
    model = nn.Sequential(resnet(), nn.InstanceNorm1d(3, track_running_stats=True))
    with pytest.warns(ModelNotice) as said:
        fixed = fix(model)
    assert len(said) == 1
    assert str(said[0].message) == (
        "adadp.fix replaced 5 BatchNorm2d by GroupNorm (0.0.1, 0.1.0.bn1, 0.1.0.bn2 and 2 more) and 1 InstanceNorm1d "
        "by InstanceNorm1d without running statistics (1); adadp.notes(model) has all of them"
    )
    assert said[0].filename == __file__
    assert adadp.notes(fixed)[:2] == [
        "0.0.1: BatchNorm2d(8) replaced by GroupNorm(8, 8), with its scale and shift",
        "0.1.0.bn1: BatchNorm2d(8) replaced by GroupNorm(8, 8), with its scale and shift",
    ]
    assert len(adadp.notes(fixed)) == 6
    with pytest.warns(ModelNotice, match=r"1 BatchNorm1d by GroupNorm \(the model\)"):
        fix(nn.BatchNorm1d(8))


@quiet
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct])
def test_models_with_activations_in_place_train_after_fix(norm: Any) -> None:
    """Per-example gradients equal a loop over single examples, and the engine's loop runs."""
    model = fix(resnet(norm))
    inputs, targets = images().tensors
    inputs, targets = inputs[:5], targets[:5]
    expected = []
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        expected.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    capture = Capture(model)
    assert capture.notices == []
    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    for name, form in capture.take(5).items():
        torch.testing.assert_close(form.dense(slice(0, 5)), torch.stack([one[name] for one in expected]))
    capture.detach()
    _, model, optimizer, loader = private(model, data_loader=DataLoader(images(), batch_size=6))
    for x, y in loader:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
