"""adadp.checks on a GPU: the same findings, none by TF32 or bfloat16, and no index that a kernel asserts on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checks.trials import Run, collated, normal
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from adadp.errors import PrivacyError, UnsupportedModuleError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["highest", "high"])
def _precision(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).cuda()


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("autocast", [False, True])
def test_precision_is_not_mixing(autocast: bool) -> None:
    inputs = normal(16, 3, 8, 8).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        Run(convolutional())(inputs)
        with pytest.raises(UnsupportedModuleError, match="mixes"):
            Run(nn.Sequential(convolutional(), Centred()))(inputs)


def test_attention_in_bfloat16() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda().bfloat16()
    Run(nn.Sequential(layer, nn.Linear(64, 3).cuda().bfloat16()))(normal(16, 12, 64).cuda().bfloat16())


def test_integers_stay_within_their_leaf() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.f = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.nll_loss(self.f(self.e(ids)).log_softmax(2).transpose(1, 2), labels, reduction="none").mean(1)

    ids = torch.randint(9, (8, 5)).cuda()
    Run(Inside().cuda())(ids, labels=ids)
    torch.cuda.synchronize()  # an assertion of a kernel would show here


def test_padding_is_tried_on_the_device_of_the_model() -> None:
    class Mean(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.e, self.f, self.own = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3), own

        def forward(self, ids: Tensor) -> Tensor:
            length = (ids > 0).sum(1, keepdim=True) if self.own else ids.shape[1]
            return self.f(self.e(ids).sum(1) / length)

    items = [torch.arange(3 + i % 4) % 8 + 1 for i in range(12)]

    def pad(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    assert collated(Mean(True).cuda(), items, pad, lambda m, b: m(b.cuda())).untried == {}
    with pytest.raises(UnsupportedModuleError, match="padding reaches"):
        collated(Mean(False).cuda(), items, pad, lambda m, b: m(b.cuda()))


def test_losses_and_criteria() -> None:
    inputs, labels = normal(12, 6).cuda(), (torch.arange(12) % 3).cuda()
    run = Run(nn.Linear(6, 3).cuda())
    criterion = nn.CrossEntropyLoss().cuda()
    watched = run.trial.of_criterion(criterion)
    criterion(run(inputs), labels)
    assert watched.used is run.part
    losses = F.cross_entropy(run.model(inputs), labels, reduction="none")
    run.trial.of_rows(losses, run.part)
    assert run.gradients(losses.sum())
    run.trial.of_loss(lambda x, y: F.cross_entropy(run.model(x), y), (inputs, labels), run.out(1, 12))
    with pytest.raises(PrivacyError):
        run.trial.of_loss(lambda x, y: F.cross_entropy(run.model(x - x.mean(0)), y), (inputs, labels), run.out(1, 12))


def test_the_users_random_numbers_on_the_gpu() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).cuda()
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    run = Run(model)
    part = run.out(0, 8)
    run.trial.before_call(model, (normal(8, 6).cuda(),), {}, part)
    assert torch.equal(before, torch.cuda.get_rng_state())
