"""The same bounded sums on a GPU as on a CPU, for every clipping and kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Clipping, Diagonal, Ellipsoid, Flat, Kronecker, Local, PrivacyEngine, Probe, TrainingStep
from adadp.clipping import Adaptive, Automatic, PerLayer
from adadp.clipping.early import Clamped
from adadp.errors import PrivacyError, TrainingLoopError
from adadp.gradients import Gradients
from adadp.gradients.forms.factors import Identity, LowRank
from adadp.gradients.forms.low_rank import TimesLowRank
from adadp.gradients.forms.products import Products
from adadp.gradients.kernels.reference import CANCELLED
from adadp.gradients.layers.convolution import Convolution, Geometry
from adadp.mechanism.optimizer import BudgetWarning

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

COUNT, SIDE = 40, 12


def vectors(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=generator)


class Net(nn.Module):
    """A convolution, vectors of more than 64 numbers (so that factors are of low rank), and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8)
        self.wide, self.head = nn.Linear(8 * (SIDE - 2) ** 2, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.norm(self.conv(x)).tanh().flatten(1)).relu())


CLIPPINGS: dict[str, Callable[[], Clipping]] = {
    "flat": lambda: Flat(0.5),
    "automatic": lambda: Automatic(0.5),
    "adaptive": lambda: Adaptive(0.5),
    "per layer": lambda: PerLayer(0.5),
    "diagonal": lambda: Ellipsoid(0.5, shape=Diagonal(0.5, 0.0), source=Probe(vectors, count=64)),
    "Kronecker": lambda: Ellipsoid(0.5, shape=Kronecker(), source=Probe(vectors, count=64)),
    "local": lambda: Local(0.5, threshold=0.0),
}


def trained(device: str, make: Callable[[], Clipping]) -> dict[str, Tensor]:
    """Two steps on all examples, with noise too small to be seen."""
    torch.manual_seed(0)
    model = Net().to(device)
    inputs, labels = torch.randn(COUNT, 1, SIDE, SIDE), torch.arange(COUNT) % 10
    inputs[3] = float("nan")
    inputs[4] *= 1e4
    data = TensorDataset(inputs.to(device), labels.to(device))
    private, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=1e-7, clipping=make(),
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
    return {name: value.detach().cpu() for name, value in copy.deepcopy(private).state_dict().items()}


@pytest.mark.parametrize("name", CLIPPINGS)
def test_the_same_as_on_a_cpu(name: str) -> None:
    here, there = trained("cpu", CLIPPINGS[name]), trained("cuda", CLIPPINGS[name])
    start = Net().state_dict()
    for key, value in here.items():
        assert value.isfinite().all()
        assert (value - start[key]).abs().max() > 0
        torch.testing.assert_close(there[key], value, rtol=1e-2, atol=1e-3)


def replayed(make: Callable[[], Clipping], graphs: bool, noise: float = 1e-7, steps: int = 60) -> tuple[nn.Module, int]:
    """A run of padded Poisson lots, with momentum and a schedule, replayed or not."""
    torch.manual_seed(0)
    model = Net().cuda()
    inputs, labels = torch.randn(400, 1, SIDE, SIDE), torch.arange(400) % 10
    inputs[3] = float("nan")
    data = TensorDataset(inputs.cuda(), labels.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = PrivacyEngine(seed=1)
    _, private, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=noise,
        clipping=make(), pad_lots=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = TrainingStep(private, lambda x, y: nn.functional.cross_entropy(model(x), y))
    if not graphs:
        step.why_not = "compared with"
    done = 0
    while done < steps:
        for batch in loader:
            step(*batch)
            if private._loader.current.last:
                schedule.step()
                done += 1
            if done == steps:
                break
    (_, count), *rest = engine._open().composition()
    assert count == done
    assert not rest
    return model, step.replays


@pytest.mark.parametrize("name", CLIPPINGS)
def test_replayed_steps_are_the_steps(name: str) -> None:
    plain, none = replayed(CLIPPINGS[name], False)
    fast, many = replayed(CLIPPINGS[name], True)
    assert none == 0
    assert many > 40
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_replayed_noise_is_fresh_and_of_the_right_size() -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 40).cuda()
    data = TensorDataset(1e-6 * torch.randn(400, 50).cuda(), (torch.arange(400) % 40).cuda())
    _, private, loader = PrivacyEngine(seed=5).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=3.0, clipping=Flat(2.0), pad_lots=True,
    )  # fmt: skip
    step = TrainingStep(private, lambda x, y: nn.functional.cross_entropy(model(x), y))
    drawn = []
    for _ in range(20):
        for batch in loader:
            step(*batch)
            drawn.append(model.weight.grad.flatten().clone() * COUNT / 6)  # inputs of next to nothing: it is all noise
    rows = torch.stack(drawn).double()
    assert step.replays > 150
    size = rows.numel()
    assert abs(rows.square().mean() - 1) < 6 * (2 / size) ** 0.5
    products = (rows @ rows.T) / rows.shape[1]
    products.fill_diagonal_(0)
    assert products.abs().max() < 6.5 / rows.shape[1] ** 0.5  # no draw is like another


def test_a_step_never_waits_for_the_gpu() -> None:
    for name, make in CLIPPINGS.items():
        torch.manual_seed(0)
        model = Net().cuda()
        data = TensorDataset(torch.randn(400, 1, SIDE, SIDE).cuda(), (torch.arange(400) % 10).cuda())
        _, private, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=1.0, clipping=make(), pad_lots=True,
        )  # fmt: skip
        batches = iter(loader)
        for turn in range(9):
            batch = next(batches)
            steady = private._step.clipping.steady()
            torch.cuda.set_sync_debug_mode("error" if turn > 1 and steady else "default")
            try:
                private.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                private.step()
            except RuntimeError as error:
                pytest.fail(f"{name}: {error}")
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_a_budget_ends_replayed_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).cuda()
    data = TensorDataset(torch.randn(400, 5).cuda(), (torch.arange(400) % 3).cuda())
    engine = PrivacyEngine(seed=2)
    _, private, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=COUNT), target_epsilon=2.0, target_delta=1e-5, steps=25, pad_lots=True,
    )  # fmt: skip
    step = TrainingStep(private, lambda x, y: nn.functional.cross_entropy(model(x), y))

    def train() -> None:
        for _ in range(4):
            for batch in loader:
                step(*batch)

    with pytest.warns(BudgetWarning):
        train()
    assert step.replays > 10
    assert engine.get_epsilon(1e-5) <= 2.0
    assert engine._open().composition()[0][1] == 25


def moved(private: bool, autocast: bool) -> Tensor:
    """What ten steps change, with or without privacy and bfloat16."""
    torch.manual_seed(0)
    model = Net().cuda()
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    data = TensorDataset(torch.randn(400, 1, SIDE, SIDE).cuda(), (torch.arange(400) % 10).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data, batch_size=COUNT)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return nn.functional.cross_entropy(model(x), y, reduction="none")

    if private:
        _, optimizer, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1e-7, max_grad_norm=0.5,
            pad_lots=True,
        )  # fmt: skip
        step = TrainingStep(optimizer, losses)
        for batch in loader:
            step(*batch)
        assert step.replays > 1
    else:
        for batch in loader:
            optimizer.zero_grad()
            losses(*batch).mean().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start


def test_autocast_changes_no_more_than_without_privacy() -> None:
    changed = {}
    for private in (False, True):
        exact, rough = moved(private, False), moved(private, True)
        changed[private] = float((rough - exact).norm() / exact.norm())
    assert 0 < changed[True] < 2 * changed[False] + 0.01


class Sequence(nn.Module):
    """Tokens, a convolution over them, and places where they cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv1d(24, 40, 3, padding=1), nn.Linear(40, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x.mT).mT
        return self.head(self.mix(tokens).tanh()).mean(1)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("name", ["flat", "rowcolumn", "diagonal", "Kronecker"])
def test_one_example_adds_no_more_than_the_bound(name: str, precision: str) -> None:
    """Also where products are cut to ten bits, and where tokens cancel each other."""
    made: dict[str, Callable[[], Clipping]] = {
        "flat": lambda: Flat(0.5),
        "rowcolumn": lambda: Ellipsoid(0.5, shape=Kronecker(rank=0), source=Probe(_tokens, count=32)),
        "diagonal": lambda: Ellipsoid(0.5, shape=Diagonal(), source=Probe(_tokens, count=32)),
        "Kronecker": lambda: Ellipsoid(0.5, shape=Kronecker(rank=4), source=Probe(_tokens, count=32)),
    }
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    largest = 0.0
    try:
        torch.manual_seed(0)
        model = Sequence().cuda()
        examples = torch.randn(64, 200, 24)
        examples[16:32, 100:] = examples[16:32, :100] * (1 + 1e-5 * torch.randn(16, 100, 1))
        examples[32:] *= torch.logspace(-12, 4, 32)[:, None, None]
        data = TensorDataset(examples.cuda(), (torch.arange(64) % 10).cuda())
        _, private, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=1), noise_multiplier=1e-9, clipping=made[name](),
            sampling="shuffle", pad_lots=True,
        )  # fmt: skip
        sums: list[Tensor] = []
        step = private._step
        complete = step.clipping.complete
        step.clipping.complete = lambda given: (  # type: ignore[method-assign]
            sums.append(torch.cat([value.double().flatten() for value in given.values()]).norm()),
            complete(given),
        )[1]
        for x, y in loader:
            private.zero_grad()
            (1e3 * nn.functional.cross_entropy(model(x), y)).backward()
            private.step()
        found = torch.stack(sums)
        largest = float(found.max())
        assert (found <= 0.5).all()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert largest > 0.4


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 200, 24, generator=generator)


@pytest.mark.parametrize("sizes", [(4, 256, 768, 96), (3, 2000, 40, 130), (5, 300, 33, 20)], ids=str)
def test_products_in_half_precision_are_bounded(sizes: tuple[int, int, int, int]) -> None:
    """Of tokens that cancel, of equal ones whose additions all round alike, of huge and tiny ones."""
    count, tokens, rows, columns = sizes
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(0)
        inputs, outputs = torch.randn(count, tokens, columns), torch.randn(count, tokens, rows)
        inputs[0], outputs[0] = 0.37, 1 / 3
        half = tokens // 2
        inputs[1, :half], outputs[1, :half] = inputs[1, half : 2 * half], -outputs[1, half : 2 * half]
        inputs[2], outputs[2] = inputs[2] * 1e25, outputs[2] * 1e-30
        form = Products(inputs.cuda(), outputs.cuda())
        scale = torch.rand(rows, columns).cuda()
        truth = outputs.cuda().double().mT @ inputs.cuda().double()
        lengths = outputs.flatten(1).double().norm(dim=1) * inputs.flatten(1).double().norm(dim=1)
        for made, exact in ((form, truth), (form.scaled(scale), truth * scale)):
            assert form._way == "half"
            bounds = made.squared_norms().sqrt()
            assert (made.dense(slice(0, count)).double().flatten(1).norm(dim=1) <= bounds).all()
            for example in range(count):
                weights = torch.zeros(count, device="cuda")
                weights[example] = 1
                added = made.weighted_sum(weights, weights != 0).double()
                assert added.norm() <= bounds[example]
                assert (added - exact[example]).norm() <= 2**-10 * lengths[example]
                most = added.norm() + 6 * (tokens + 4) * 2**-24 * lengths[example] * 1.01
                assert bounds[example] <= max(most, CANCELLED * lengths[example] * (1 + 1e-6))
        keep = torch.ones(count, dtype=torch.bool, device="cuda")
        bound = torch.rand(rows, columns, device="cuda")
        clamped = (2 * truth).clamp(-bound, bound).sum(0)
        assert (form.clamped_sum(bound, 2.0, keep, True) - clamped).norm() <= 2e-2 * clamped.norm()
        squares = truth.square().sum(0)
        assert (form.square_sum(keep) - squares).norm() <= 2e-3 * squares.norm()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("spread", [2.0, 60.0])
def test_convolutions_along_directions_are_bounded(cut: bool, spread: float) -> None:
    """Of places that cancel, of blank images, of huge and tiny ones, of gradients that lie in the directions."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if cut else "highest")
    torch.backends.cudnn.allow_tf32 = cut
    try:
        torch.manual_seed(0)
        geometry = Geometry(torch.Size((48, 32, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
        inputs, outputs = torch.randn(6, 32, 16, 16).cuda(), torch.randn(6, 48, 16, 16).cuda()
        inputs[0], outputs[0] = 0.37, 1 / 3
        inputs[1, ..., ::2], outputs[1, ..., ::2] = inputs[1, ..., 1::2], -outputs[1, ..., 1::2]
        inputs[2], outputs[2] = inputs[2] * 1e15, outputs[2] * 1e-20
        inputs[3], outputs[3] = inputs[3] * 1e-25, outputs[3] * 1e10
        basis = torch.linalg.qr(torch.randn(288, 8, dtype=torch.float64))[0].float().cuda()
        outputs[4], inputs[4] = 0.0, 0.0
        outputs[4, :, 5, 5], inputs[4, :, 4:7, 4:7] = 1.0, basis[:, 0].view(32, 3, 3)
        skew = (basis.double().T @ basis.double() - torch.eye(8).cuda()).norm()
        top = torch.full((8,), 1 / spread, device="cuda")
        right = LowRank(basis, top, torch.ones((), device="cuda"), skew, spread)
        made = Convolution(inputs, outputs, geometry).sandwiched(Identity(), right)
        assert isinstance(made, TimesLowRank)
        bounds = made.squared_norms().sqrt()
        exact = Convolution(inputs.double(), outputs.double(), geometry).dense(slice(0, 6)).reshape(6, 48, 288)
        exact = exact @ right.matrix(288, exact)
        for example in range(6):
            weights = torch.zeros(6, device="cuda")
            weights[example] = 1
            added = made.weighted_sum(weights, weights != 0).double().view(48, 288)
            assert added.norm() <= bounds[example]
            assert exact[example].norm() <= bounds[example] * (1 + 1e-6)
        assert bounds[5] <= exact[5].norm() * (1.2 if cut else 1.05)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_clamping_in_the_backward_pass_is_clamping_after_it() -> None:
    """Layers' gradients go as they come; small ones are clamped side by side at the end."""
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        model = Net().cuda()
        data = TensorDataset(torch.randn(COUNT, 1, SIDE, SIDE).cuda(), (torch.arange(COUNT) % 10).cuda())
        _, optimizer, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), sampling="shuffle",
            data_loader=DataLoader(data, batch_size=COUNT), noise_multiplier=1e-7, clipping=CLIPPINGS["local"](),
        )  # fmt: skip
        if not early:
            optimizer._step.capture.before_pass = None
        forms = []
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                forms = [form for record in optimizer._step.capture.work.records for form in record.forms().values()]
                optimizer.step()
        # The weights of three layers, and the biases that are measured with theirs.
        assert sum(isinstance(form, Clamped) for form in forms) == (5 if early else 0)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- loops that people write ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_prefetched_batches_are_the_batches(pinned: bool) -> None:
    """The next lot is copied while this one is worked on: the same lots, the same weights."""
    found = []
    for prefetch in (None, "cuda"):
        torch.manual_seed(0)
        model = Net().cuda()
        data = TensorDataset(torch.randn(400, 1, SIDE, SIDE), torch.arange(400) % 10)
        _, private, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1e-6,
            data_loader=DataLoader(data, batch_size=COUNT, pin_memory=pinned), prefetch=prefetch,
        )  # fmt: skip
        for _ in range(2):
            for inputs, targets in loader:
                assert (inputs.is_cuda, targets.is_cuda) == (prefetch is not None,) * 2
                private.backward(nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda(), reduction="none"))
                private.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_prefetcher_of_ones_own_is_refused() -> None:
    model = nn.Linear(5, 3).cuda()
    _, private, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(60, 5), torch.arange(60) % 3), batch_size=8),
    )  # fmt: skip
    batches = iter(loader)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ahead = [part.cuda(non_blocking=True) for part in next(batches)]
    torch.cuda.current_stream().wait_stream(stream)
    with pytest.raises(TrainingLoopError, match="prefetch="):
        next(batches)
    assert ahead[0].is_cuda
    assert private is not None


class Later(nn.Module):
    """Keeps examples apart until it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.mixes else x)


def test_mixing_that_starts_later_is_found_beside_replays() -> None:
    torch.manual_seed(0)
    model = Later().cuda()
    data = TensorDataset(torch.randn(400, 5).cuda(), (torch.arange(400) % 3).cuda())
    engine = PrivacyEngine(seed=1)
    _, private, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, pad_lots=True,
        data_loader=DataLoader(data, batch_size=COUNT),
    )  # fmt: skip
    step = TrainingStep(private, lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    batches = (batch for _ in range(1000) for batch in loader)
    for batch in batches:
        step(*batch)
        if loader.current.lot == 40:
            model.mixes = True  # a recording does not see it
        if loader.current.lot == 998:
            break
    assert step.replays > 900
    step(*next(batches))
    batch = next(batches)
    with pytest.raises(PrivacyError):
        step(*batch)
    assert loader.current.lot == 1000  # which is tried


def test_one_example_in_replayed_bfloat16_steps() -> None:
    """With losses for each example there is no 1/n to round: one example more moves nobody else."""
    found = []
    count = 1025
    inputs = torch.ones(count, 8) + 0.05 * torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    for last in (1.0, 0.0):  # at 0 the last example adds nothing
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False)).cuda()
        nn.init.zeros_(model[2].weight)
        rows = inputs.clone()
        rows[-1] *= last
        _, private, loader = PrivacyEngine(seed=1).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, pad_lots=True,
            data_loader=DataLoader(
                TensorDataset(rows.cuda(), torch.zeros(count, dtype=torch.long).cuda()), batch_size=count
            ),
        )  # fmt: skip

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return nn.functional.cross_entropy(model(x), y, reduction="none")

        step = TrainingStep(private, losses)
        for _ in range(10):
            for batch in loader:
                step(*batch)
        assert step.replays > 2
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double() * count)
    assert float((found[0] - found[1]).norm()) <= 1.01


def test_factors_that_were_cut_are_let_go_by_flat_clipping() -> None:
    """Their halves serve norms and sums: keeping both would be half as much again."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    try:
        inputs, outputs = (torch.randn(4, 64, 128, device="cuda") for _ in range(2))
        kept = Gradients({"w": Products(inputs, outputs)}, 4, keep=torch.ones(4, dtype=torch.bool, device="cuda"))
        gone = Gradients({"w": Products(inputs, outputs)}, 4, keep=kept.keep)
        assert torch.equal(kept.norms(), gone.norms(let_go=True))
        assert not hasattr(gone.forms["w"], "inputs")
        weights = torch.rand(4, device="cuda", dtype=torch.float64)
        assert torch.equal(kept.weighted_sums(weights)["w"], gone.weighted_sums(weights)["w"])
        assert torch.equal(kept.finite(), gone.finite())
    finally:
        torch.set_float32_matmul_precision("highest")
