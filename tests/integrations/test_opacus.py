"""Opacus' names: each does what the engine does, or refuses and says what to do. Loops are in test_opacus_loops."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import cross_entropy, data, epoch, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp.accounting.events import PoissonGaussian
from adadp.clipping import Adaptive, Grouped
from adadp.errors import ConfigurationError, NoGuaranteeError, TrainingLoopError
from adadp.integrations import opacus
from adadp.integrations.opacus import (
    BatchMemoryManager,
    DPDataLoader,
    DPOptimizer,
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    ModuleValidator,
    OpacusNotice,
    PrivacyEngine,
    PrivacyEngineAdaptiveClipping,
    StepGradClip,
    StepNoise,
    get_noise_multiplier,
)
from adadp.integrations.opacus.refused import Refused
from adadp.mechanism.observation import Unnoised


def test_an_opacus_loop_runs_with_only_the_import_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    assert not ModuleValidator.is_valid(model)
    assert "BatchNorm" in ModuleValidator.validate(model, strict=False)[0]
    model = ModuleValidator.fix(model)
    assert ModuleValidator.validate(model, strict=True) == []
    data = TensorDataset(torch.randn(200, 1, 8, 8), torch.randint(3, (200,)))
    train_loader = DataLoader(data, batch_size=50, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()

    privacy_engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=2,
        target_epsilon=5.0,
        target_delta=1e-5,
        max_grad_norm=1.0,
    )
    batches = 0
    for _ in range(2):
        model.train()
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer
        ) as memory_safe_loader:
            for images, targets in memory_safe_loader:
                assert len(images) <= 16
                optimizer.zero_grad()
                loss = criterion(model(images), targets)
                loss.backward()
                optimizer.step()
                batches += 1
    assert batches > 8  # lots of about 50 came in pieces
    epsilon = privacy_engine.get_epsilon(delta=1e-5)
    assert 4.9 < epsilon <= 5.0
    assert privacy_engine.accountant.get_epsilon(delta=1e-5) == epsilon
    assert train_loader.max_physical_batch_size is None


Made = tuple[PrivacyEngine, Any, Any, Any]


def made(engine: PrivacyEngine | None = None, model: nn.Module | None = None, **settings: Any) -> Made:
    engine, model = engine or PrivacyEngine(), model or mlp()
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data(), batch_size=6),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return engine, *engine.make_private(module=model, **{**given, **settings})


# ---- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_generator": torch.Generator()}, "subtract the noise.*PrivacyEngine\\(seed="),
        ({"grad_sample_mode": "no_op"}, "Use 'hooks'"),
        ({"grad_sample_mode": "ghost_fsdp"}, "use 'ghost'"),
        ({"grad_sample_mode": "magic"}, "must be one of hooks, functorch, ew, ghost"),
        ({"max_grad_norm": [1.0] * 4}, "goes with clipping='per_layer'"),
        ({"max_grad_norm": [1.0] * 3, "clipping": "per_layer"}, "3 bounds, and the optimizer trains 4"),
        ({"target_unclipped_quantile": 0.5}, "goes with clipping='adaptive'"),
        ({"unclipped_num_std": 3.0}, "goes with clipping='adaptive'"),
        ({"clipping": "adaptive", "unclipped_num_std": 0.5}, "above half of the noise multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], words: str) -> None:
    model = mlp()
    with pytest.raises(ConfigurationError, match=words):
        made(model=model, **settings)
    made(model=model)  # nothing was left watching


def test_all_modes_are_one() -> None:
    found = []
    for mode in ("hooks", "functorch", "ew"):
        _, model, optimizer, loader = made(PrivacyEngine(seed=3), grad_sample_mode=mode)
        epoch(model, optimizer, loader)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    engine, model, optimizer, criterion, loader = made(PrivacyEngine(seed=3), grad_sample_mode="ghost")  # type: ignore[misc]
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        assert float(loss) == loss.item() == pytest.approx(float(cross_entropy(model(inputs), targets)))
        loss.backward()
        optimizer.step()
    found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
    assert not any("scalar" in text for text in engine.guarantee(1e-3).untried)  # losses of rows were tried


def test_the_criterion_of_ghost_clipping() -> None:
    own = nn.CrossEntropyLoss(ignore_index=-100)
    criterion = made(criterion=own, grad_sample_mode="ghost")[3]
    assert (own.reduction, criterion.criterion.reduction) == ("mean", "none")
    logits, labels = torch.randn(4, 3, 2), torch.randint(2, (4, 3))
    loss = criterion(logits.view(-1, 2), labels.view(-1), shape=logits.shape)
    expected = nn.functional.cross_entropy(logits.mT, labels, reduction="none").mean(1)
    torch.testing.assert_close(loss.loss_per_sample, expected)
    with pytest.raises(ConfigurationError, match=r"optimizer\.backward"):
        made(criterion=nn.Identity(), grad_sample_mode="ghost")


def test_bounds_for_each_parameter() -> None:
    bounds = [0.1, 0.2, 0.3, 0.4]
    _, model, optimizer, loader = made(max_grad_norm=bounds, clipping="per_layer", noise_multiplier=2.0)
    clipping = optimizer._step.clipping
    assert isinstance(clipping, Grouped)
    assert optimizer.max_grad_norm == bounds
    epoch(model, optimizer, loader)
    names = [name for name, _ in model.named_parameters()]
    noise = clipping.stddev(2.0)  # sqrt(K) times each group's own
    assert [noise[name] for name in names] == pytest.approx([2.0 * 2.0 * bound for bound in bounds])


def test_adaptive_clipping_by_opacus_names() -> None:
    settings = {
        "target_unclipped_quantile": 0.3, "clipbound_learning_rate": 0.1, "min_clipbound": 0.01, "max_clipbound": 9.0,
    }  # fmt: skip
    engine, model, optimizer, loader = made(clipping="adaptive", unclipped_num_std=2.0, **settings)
    clipping = optimizer._step.clipping
    assert isinstance(clipping, Adaptive)
    assert (clipping.quantile, clipping.rate, clipping.least, clipping.most) == (0.3, 0.1, 0.01, 9.0)
    assert clipping.share == pytest.approx((1 / (2 * 2.0)) ** 2)
    epoch(model, optimizer, loader)
    (count,) = (value for name, value in clipping.stddev(1.0).items() if name.startswith("shape/"))
    assert count == pytest.approx(2.0)
    assert optimizer.max_grad_norm != 1.0
    assert dict(engine._open().charged()) == {PoissonGaussian(1.0, 0.25): 4}


def test_adaptive_clipping_for_a_target() -> None:
    model = mlp()
    engine = PrivacyEngineAdaptiveClipping()
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data(), batch_size=6),
        target_epsilon=9.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0, unclipped_num_std=5.0,
    )  # fmt: skip
    clipping = optimizer._step.clipping
    assert isinstance(clipping, Adaptive)
    assert clipping.share == pytest.approx((optimizer.noise_multiplier / 10) ** 2)


def test_no_noise_is_for_looking_for_mistakes() -> None:
    with pytest.warns(OpacusNotice, match="the guarantee is none"):
        engine, model, optimizer, loader = made(noise_multiplier=0.0)
    batch = next(iter(loader))
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert optimizer.noise_multiplier == 0.0
    parts = []
    for x, y in zip(*batch, strict=True):  # the sum of clipped gradients as it is, over the expected lot
        other = copy.deepcopy(mlp())
        cross_entropy(other(x[None]), y[None]).backward()
        whole = torch.cat([p.grad.flatten() for p in other.parameters()])
        parts.append(whole * min(1.0, float(1 / whole.norm())))
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, torch.stack(parts).sum(0) / 6, rtol=1e-4, atol=1e-6)
    assert engine.accountant.get_epsilon(delta=1e-5) == math.inf
    guarantee = engine.guarantee(1e-5)
    assert guarantee.epsilon is None
    assert any("noise multiplier is 0" in reason for reason in guarantee.reasons)
    with pytest.raises(NoGuaranteeError):
        made(PrivacyEngine(budget=(1.0, 1e-5)), noise_multiplier=0.0)


def test_a_sum_is_said_to_be_divided() -> None:
    with pytest.warns(OpacusNotice, match="divided by the expected lot"):
        made(loss_reduction="sum")


# ---- accountant -----------------------------------------------------------------------------------------------------


def test_names_of_accountants() -> None:
    with pytest.warns(OpacusNotice, match='called "pld"'):
        engine = PrivacyEngine(accountant="prv")
    assert engine.accountant.mechanism() == "pld"
    assert PrivacyEngine(accountant="rdp").accountant.mechanism() == "rdp"
    with pytest.raises(ConfigurationError, match="too small"):
        PrivacyEngine(accountant="gdp")


def test_the_accountant_shows_the_ledger() -> None:
    engine, model, optimizer, loader = made(PrivacyEngine(accountant="rdp"))
    accountant = engine.accountant
    assert (accountant.history, accountant.steps, len(accountant)) == ([], 0, 0)
    epoch(model, optimizer, loader)
    assert accountant.history == [(1.0, 0.25, 4)]
    assert (accountant.steps, len(accountant)) == (4, 1)
    accountant.history.clear()
    assert accountant.steps == 4
    with pytest.warns(OpacusNotice, match="alphas"):
        assert accountant.get_epsilon(1e-5, alphas=[2, 3]) == engine.get_epsilon(1e-5)
    epsilon, order = accountant.get_privacy_spent(delta=1e-5)
    assert epsilon == engine.get_epsilon(1e-5)
    assert order > 1
    for refused in (
        lambda: accountant.step(noise_multiplier=1.0, sample_rate=0.1),
        lambda: accountant.get_optimizer_hook_fn(0.1),
    ):
        with pytest.raises(ConfigurationError, match="charges each release before it is made"):
            refused()


def test_the_state_of_an_accountant_is_charged() -> None:
    engine, model, optimizer, loader = made()
    epoch(model, optimizer, loader)
    state = engine.accountant.state_dict()
    assert (state["history"], state["mechanism"]) == ([(1.0, 0.25, 4)], "pld")
    other = PrivacyEngine()
    for _ in range(2):  # what is there already is not charged again
        other.accountant.load_state_dict(state)
        assert other.accountant.history == [(1.0, 0.25, 4)]
    by_opacus = {"history": [(1.0, 0.25, 4), (2.0, 0.1, 3)], "mechanism": "prv"}
    third = PrivacyEngine()
    third.accountant.load_state_dict(by_opacus)
    assert third.accountant.steps == 7
    assert any("made by Opacus" in t or "trained by Opacus" in t for t in third.guarantee(1e-5).untried)
    assert third.get_epsilon(1e-5) > other.get_epsilon(1e-5)
    with pytest.raises(ConfigurationError, match="history"):
        third.accountant.load_state_dict({})


def test_the_least_noise_for_a_target() -> None:
    sigma = get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, epochs=3)
    assert sigma == get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, steps=30)
    engine = PrivacyEngine(accountant="rdp")
    engine.accountant.load_state_dict({"history": [(sigma, 0.1, 30)], "mechanism": "rdp"})
    assert 1.98 < engine.get_epsilon(1e-5) <= 2.0
    with pytest.raises(ConfigurationError, match="either epochs= or steps="):
        get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1)
    with pytest.raises(ConfigurationError, match="too small"):
        get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, epochs=1, accountant="gdp")


# ---- optimizer ------------------------------------------------------------------------------------------------------


def test_attributes_of_the_optimizer() -> None:
    _, model, optimizer, _ = made(max_grad_norm=0.7, noise_multiplier=1.3)
    assert isinstance(optimizer, DPOptimizer)
    assert (optimizer.max_grad_norm, optimizer.noise_multiplier, optimizer.expected_batch_size) == (0.7, 1.3, 6)
    assert (optimizer.accumulated_iterations, optimizer.loss_reduction) == (1, "mean")
    assert [id(p) for p in optimizer.params] == [id(p) for p in model.parameters()]
    for name in ("max_grad_norm", "noise_multiplier"):
        with pytest.raises(ConfigurationError, match=f"optimizer.{name} is not set"):
            setattr(optimizer, name, 2.0)
    assert (optimizer.max_grad_norm, optimizer.noise_multiplier) == (0.7, 1.3)
    with pytest.raises(AttributeError, match="no example's gradient is stored"):
        optimizer.grad_samples  # noqa: B018
    assert not hasattr(optimizer, "add_noise")
    with pytest.raises(ConfigurationError, match="make_private makes it"):
        DPOptimizer(optimizer=optimizer.original_optimizer, noise_multiplier=1.0, max_grad_norm=1.0)
    optimizer.signal_skip_step(do_skip=False)
    with pytest.raises(ConfigurationError, match="BatchMemoryManager"):
        optimizer.signal_skip_step()
    assert made(clipping="per_layer", max_grad_norm=1.5)[2].max_grad_norm == 1.5


def test_a_hook_sees_the_private_gradient_of_each_lot() -> None:
    engine, model, optimizer, loader = made(max_physical_batch_size=2)
    before = [p.detach().clone() for p in model.parameters()]
    seen: list[bool] = []

    def hook(given: Any) -> None:
        unchanged = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        seen.append(given is optimizer and unchanged and all(p.grad is not None for p in model.parameters()))

    optimizer.attach_step_hook(hook)
    for batch in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
    assert seen == [True] * 4
    assert engine.accountant.steps == 4


class Noise:
    """The standard deviation of each lot's noise, over the bound."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Any]] = []

    def noising(self, release: Unnoised) -> None:
        self.seen.append((float(release.stddev["0.weight"]), release.event))

    def noised(self, release: Unnoised, noisy: dict[str, Tensor]) -> None: ...

    def stepped(self, lot: int, gradient: dict[str, Tensor]) -> None: ...


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda optimizer: ExponentialNoise(optimizer, gamma=0.5), [2.0, 1.0, 0.5, 0.25]),
        (lambda optimizer: StepNoise(optimizer, step_size=2, gamma=3.0), [2.0, 2.0, 6.0, 6.0]),
        (lambda optimizer: LambdaNoise(optimizer, noise_lambda=lambda step: 1 + step), [2.0, 4.0, 6.0, 8.0]),
    ],
)
def test_each_lot_is_charged_for_its_own_noise(make: Any, expected: list[float]) -> None:
    engine, model, optimizer, loader = made(noise_multiplier=2.0)
    scheduler, noise = make(optimizer), Noise()
    optimizer.observe(noise)
    for _ in range(4):
        epoch(model, optimizer, loader)
        scheduler.step()
    assert [sigma for sigma, _ in noise.seen] == [sigma for sigma in expected for _ in range(4)]
    assert all(event == PoissonGaussian(sigma, 0.25) for sigma, event in noise.seen)
    counted: dict[float, int] = {}
    for sigma, _, count in engine.accountant.history:
        counted[sigma] = counted.get(sigma, 0) + count
    assert counted == {sigma: 4 * expected.count(sigma) for sigma in expected}
    assert any("follows a scheduler" in text for text in engine.guarantee(1e-5).untried)


def test_falling_noise_costs_more_than_its_start() -> None:
    def spent(gamma: float) -> float:
        engine, model, optimizer, loader = made(noise_multiplier=2.0)
        scheduler = ExponentialNoise(optimizer, gamma=gamma)
        for _ in range(3):
            epoch(model, optimizer, loader)
            scheduler.step()
        return engine.get_epsilon(1e-5)

    assert spent(0.5) > spent(1.0) > spent(2.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda optimizer: ExponentialGradClip(optimizer, gamma=0.5), [2.0, 1.0, 0.5]),
        (lambda optimizer: StepGradClip(optimizer, step_size=2, gamma=3.0), [2.0, 2.0, 6.0]),
        (lambda optimizer: LambdaGradClip(optimizer, scheduler_function=lambda step: 1 + step), [2.0, 4.0, 6.0]),
    ],
)
def test_the_bound_follows_its_schedule_with_its_noise(make: Any, expected: list[float]) -> None:
    engine, model, optimizer, loader = made(max_grad_norm=2.0)
    scheduler, noise = make(optimizer), Noise()
    optimizer.observe(noise)
    for _ in range(3):
        epoch(model, optimizer, loader)
        scheduler.step()
    assert [stddev for stddev, _ in noise.seen] == [bound for bound in expected for _ in range(4)]
    assert engine.accountant.history == [(1.0, 0.25, 12)]


@pytest.mark.parametrize("kind", [ExponentialNoise, ExponentialGradClip])
def test_schedules_move_between_lots(kind: Any) -> None:
    _, model, optimizer, loader = made(max_physical_batch_size=1)
    scheduler = kind(optimizer, gamma=0.5)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if not optimizer.stepped:
            with pytest.raises(TrainingLoopError, match="within a lot"):
                scheduler.step()
            break
    assert (scheduler.last_epoch, optimizer.noise_multiplier, optimizer.max_grad_norm) == (0, 1.0, 1.0)
    state = scheduler.state_dict()
    assert pickle.loads(pickle.dumps(state)) == state
    with pytest.raises(ConfigurationError, match="the optimizer that make_private"):
        kind(torch.optim.SGD(model.parameters(), 0.1), gamma=0.5)


def test_schedules_that_are_refused() -> None:
    for clipping in ("adaptive", "per_layer"):
        *_, optimizer, _ = made(clipping=clipping)
        with pytest.raises(ConfigurationError, match="no schedule"):
            LambdaGradClip(optimizer, scheduler_function=lambda step: 2.0)
    *_, optimizer, _ = made()
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        LambdaNoise(optimizer, noise_lambda=lambda step: 0.0)


# ---- loader, model, layers ------------------------------------------------------------------------------------------


def test_attributes_of_the_loader() -> None:
    _, _, _, loader = made()
    assert isinstance(loader, DPDataLoader)
    assert (loader.sample_rate, loader.num_workers, loader.pin_memory, loader.drop_last) == (0.25, 0, False, False)
    assert len(loader.dataset) == 24
    for name in ("batch_sampler", "sampler", "generator"):
        with pytest.raises(AttributeError, match="nobody knows who was drawn"):
            getattr(loader, name)
    with pytest.raises(ConfigurationError, match="give the ordinary DataLoader"):
        DPDataLoader.from_data_loader(DataLoader(data(), batch_size=6))
    with pytest.raises(ConfigurationError, match="that make_private returned"):
        BatchMemoryManager(data_loader=DataLoader(data()), max_physical_batch_size=2, optimizer=None)  # type: ignore[arg-type]


def test_what_is_private_already_is_made_private_anew() -> None:
    *_, loader = made()
    engine = PrivacyEngine()
    _, model, again, other = made(engine, data_loader=loader)
    assert other is not loader
    assert (other.dataset, other.batch_size) == (loader.dataset, 6)
    epoch(model, again, other)
    assert engine.accountant.history == [(1.0, 0.25, 4)]  # at the rate of the ordinary loader
    engine.detach(model)
    *_, third, _ = made(PrivacyEngine(), model, optimizer=again)
    assert third.original_optimizer is again.original_optimizer


def test_attributes_of_the_model() -> None:
    _, model, optimizer, loader = made()
    assert model._module is model
    assert set(model.state_dict()) == set(mlp().state_dict())
    assert len(list(model.modules())) == len(list(mlp().modules()))
    model.forbid_grad_accumulation()
    epoch(model, optimizer, loader)
    other = copy.deepcopy(model)
    assert other._module is other
    loaded = pickle.loads(pickle.dumps(model.to_standard_module()))
    assert isinstance(loaded, nn.Sequential)
    assert not hasattr(model, "_module")
    nn.functional.cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in model.parameters())
    _, model, _, _ = made()
    model.remove_hooks()
    assert torch.is_tensor(model(torch.randn(3)))


def test_a_wrapper_for_several_processes(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/here", rank=0, world_size=1)
    try:
        model = opacus.DifferentiallyPrivateDistributedDataParallel(mlp())
        engine, model, optimizer, loader = made(model=model)
        epoch(model, optimizer, loader)
        assert engine.accountant.history == [(1.0, 0.25, 4)]
        assert model._module is model
        model.remove_hooks()
        cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1])).backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_recurrent_layers_and_attention_are_torchs() -> None:
    for ours, theirs in ((opacus.DPLSTM, nn.LSTM), (opacus.DPGRU, nn.GRU), (opacus.DPRNN, nn.RNN)):
        one = ours(3, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.0)
        other = theirs(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        other.load_state_dict(one.state_dict())
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(one(x)[0], other(x)[0])
    assert opacus.DPRNN(3, 4, 1, False, nonlinearity="relu").bias is False
    for cell in (opacus.DPLSTMCell, opacus.DPGRUCell, opacus.DPRNNCell):
        assert "weight_ih" in cell(3, 4, bias=True).state_dict()
    attention = opacus.DPMultiheadAttention(4, 2, dropout=0.0, add_bias_kv=True, add_zero_attn=True)
    nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True).load_state_dict(attention.state_dict())


def test_attention_is_trained() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = opacus.DPMultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.attention(x, x, x)[0].mean(1))
            return logits

    tokens = TensorDataset(torch.randn(24, 3, 4), torch.arange(24) % 2)
    engine, model, optimizer, loader = made(model=Attends(), data_loader=DataLoader(tokens, batch_size=6))
    epoch(model, optimizer, loader)
    assert engine.accountant.steps == 4


def test_a_sampler_of_gradients_is_not_used() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.warns(OpacusNotice, match="register_layer"):

        @opacus.register_grad_sampler(Twice)
        def sampler(layer: Any, activations: Any, backprops: Any) -> dict[Any, Any]:
            raise AssertionError("it was used")

    engine, model, optimizer, loader = made(model=nn.Sequential(Twice(3, 2)))
    epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-3) > 0


@pytest.mark.parametrize("name", sorted(name for name, value in vars(opacus).items() if isinstance(value, Refused)))
def test_names_that_say_what_to_do(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} of Opacus is not here: .*docs/opacus.md"):
        getattr(opacus, name)(nn.Linear(2, 2))


def test_every_name_is_there() -> None:
    assert all(hasattr(opacus, name) for name in opacus.__all__)


# ---- before training, and checkpoints -------------------------------------------------------------------------------


def test_what_can_be_asked_before_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    engine = PrivacyEngine()
    assert not engine.is_compatible(module=model, optimizer=None, data_loader=None)
    good = engine.get_compatible_module(model)
    optimizer, loader = torch.optim.SGD(good.parameters(), 0.1), DataLoader(data(), batch_size=6)
    assert engine.is_compatible(module=good, optimizer=optimizer, data_loader=loader)
    assert not engine.is_compatible(module=good, optimizer=torch.optim.LBFGS(good.parameters()), data_loader=loader)
    engine.validate(module=good, optimizer=optimizer, data_loader=loader)
    with pytest.raises(ConfigurationError, match="replace_bn_with_in"):
        ModuleValidator.fix(model, replace_bn_with_in=True)
    made(engine, good)


def test_a_checkpoint_carries_weights_states_and_what_they_cost() -> None:
    engine, model, optimizer, loader = made(noise_multiplier=2.0)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    epoch(model, optimizer, loader)
    scheduler.step()
    file = io.BytesIO()
    engine.save_checkpoint(
        path=file, module=model, optimizer=optimizer, noise_scheduler=scheduler, checkpoint_dict={"epoch": 3}
    )
    file.seek(0)
    other, fresh, again, _ = made(noise_multiplier=2.0)
    following = ExponentialNoise(again, gamma=0.5)
    found = other.load_checkpoint(path=file, module=fresh, optimizer=again, noise_scheduler=following)
    assert found["epoch"] == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert (again.noise_multiplier, following.last_epoch) == (1.0, 1)
    assert other.accountant.history == [(2.0, 0.25, 4)]
    assert other.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def test_a_checkpoint_of_opacus_is_loaded_and_charged() -> None:
    model = mlp(seed=5)
    file = io.BytesIO()
    states = {
        "module_state_dict": {f"_module.{name}": value for name, value in model.state_dict().items()},
        "privacy_accountant_state_dict": {"history": [(1.1, 0.05, 100)], "mechanism": "prv"},
        "optimizer_state_dict": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
    }
    torch.save(states, file)
    file.seek(0)
    engine, fresh, optimizer, _ = made()
    engine.load_checkpoint(path=file, module=fresh, optimizer=optimizer)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert engine.accountant.history == [(1.1, 0.05, 100)]


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_nothing_in_a_checkpoint_is_executed() -> None:
    file = io.BytesIO()
    torch.save({"module_state_dict": Harmful()}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        made()[0].load_checkpoint(path=file, module=mlp())
