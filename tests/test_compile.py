"""torch.compile of the user's model, before or after make_private: the same steps, and no gradient goes past us."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine
from adadp.engine import is_private

pytestmark = pytest.mark.filterwarnings("ignore")
Compiling = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.embed(x) * 2 + 1)
        return self.down(torch.tanh(self.up(self.norm(hidden))).mean(1))


def compiled(module: nn.Module, backend: str) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[return-value]


def in_place(module: nn.Module, backend: str) -> nn.Module:
    module.compile(backend=backend)
    return module


def a_part(module: nn.Module, backend: str) -> nn.Module:
    module.up.compile(backend=backend)  # type: ignore[operator, union-attr]
    return module


def trained(
    before: Callable[[nn.Module, str], nn.Module] | None,
    after: bool,
    backend: str,
    used: bool,
    per_example: bool = False,
) -> Tensor:
    torch.manual_seed(0)
    model = Net()
    data = TensorDataset(torch.randn(40, 4, 6), torch.arange(40) % 3)
    given = model if before is None else before(model, backend)
    if used:  # compiled already, without hooks
        nn.functional.cross_entropy(given(data.tensors[0][:8]), data.tensors[1][:8]).backward()
        model.zero_grad()
    called, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=given, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=1e-7,
        data_loader=DataLoader(data, batch_size=8), max_grad_norm=0.1,
    )  # fmt: skip
    assert called is given
    assert is_private(called)
    forward = torch.compile(called, backend=backend) if after else called
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            if per_example:
                optimizer.backward(nn.functional.cross_entropy(forward(x), y, reduction="none"))
            else:
                nn.functional.cross_entropy(forward(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("before", [compiled, in_place, a_part])
def test_compiled_before(before: Callable[[nn.Module, str], nn.Module], used: bool) -> None:
    torch.testing.assert_close(trained(before, False, "aot_eager", used), trained(None, False, "", False))


def test_compiled_after() -> None:
    torch.testing.assert_close(trained(None, True, "aot_eager", False), trained(None, False, "", False))


@pytest.mark.parametrize(("before", "after", "used"), [(compiled, False, True), (None, True, False)])
def test_losses_of_examples_are_tried_on_compiled_code(
    before: Callable[[nn.Module, str], nn.Module] | None, after: bool, used: bool
) -> None:
    """The trial differentiates the same graph more than once."""
    with config.patch(donated_buffer=True):
        found = trained(before, after, "aot_eager", used, per_example=True)
    torch.testing.assert_close(found, trained(None, False, "", False))


@pytest.mark.slow
def test_compiled_to_machine_code() -> None:
    plain = trained(None, False, "", False)
    torch.testing.assert_close(trained(None, True, "inductor", False, per_example=True), plain)
    torch.testing.assert_close(trained(compiled, False, "inductor", True), plain)
    torch.testing.assert_close(trained(None, True, "inductor", False), plain)


def test_detached_it_is_an_ordinary_model() -> None:
    torch.manual_seed(0)
    model = Net()
    engine = PrivacyEngine(seed=1)
    data = TensorDataset(torch.randn(40, 4, 6), torch.arange(40) % 3)
    called, optimizer, loader = engine.make_private(
        module=compiled(model, "aot_eager"), optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        noise_multiplier=1.0, data_loader=DataLoader(data, batch_size=8),
    )  # fmt: skip
    x, y = next(iter(loader))
    nn.functional.cross_entropy(called(x), y).backward()
    optimizer.step()
    engine.detach(called)
    assert not is_private(called)
    model.zero_grad()
    nn.functional.cross_entropy(called(x), y).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_function_compiled_before_goes_past_no_hook() -> None:
    """Not the module but a function that calls a part of it: nothing about the module shows that it was compiled."""
    torch.manual_seed(0)
    model = Net()
    data = TensorDataset(100 * torch.randn(40, 4, 6), torch.arange(40) % 3)

    @torch.compile(backend="eager")
    def hidden(x: Tensor) -> Tensor:
        return torch.tanh(model.embed(x))

    hidden(data.tensors[0][:8]).sum().backward()  # compiled for lots of eight, without hooks
    _, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=1e-7,
        data_loader=DataLoader(data, batch_size=8), max_grad_norm=0.1, sampling="fixed",
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.down(model.up(model.norm(hidden(x))).mean(1)), y).backward()
        optimizer.step()
        released = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert 0 < released.norm() < 0.11
