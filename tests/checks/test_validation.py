"""adadp.checks.validation: what does not keep examples apart is refused, by name, before anything is released."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from loop import cross_entropy, data, epoch, mlp, private, step, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from adadp import PrivacyEngine, fix
from adadp.checks.validation import check_criterion, problems
from adadp.errors import ConfigurationError, PrivacyError, UnsupportedModuleError


class Around(nn.Module):
    """A linear model with a function before and one after."""

    def __init__(self, before: Callable[..., Tensor] | None = None, after: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x if self.before is None else self.before(x))
        return hidden if self.after is None else self.after(hidden)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def refused(model: nn.Module, words: str, **settings: object) -> None:
    """Training refuses the model with these words, with nothing charged and nothing changed, however often tried."""
    settings.setdefault("sampling", "fixed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()
    engine, model, optimizer, loader = private(model, **settings)
    before = weights(model)
    for _ in range(3):
        batch = next(iter(loader))  # another batch may hide what the first one showed
        with pytest.raises(UnsupportedModuleError, match=words):
            step(model, optimizer, batch)
    assert torch.equal(before, weights(model))
    assert dict(engine._open().composition()) == {}


# ---- what can be read off the modules -----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), r"1 \(BatchNorm1d\).*adadp.fix"),
        (lambda: nn.Sequential(nn.Sequential(nn.SyncBatchNorm(3))), r"0.0 \(SyncBatchNorm\)"),
        (lambda: nn.BatchNorm1d(3), r"the model \(BatchNorm1d\)"),
        (lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), "0 .*track_running_stats"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0 .*dummy input"),
        (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 2))), "remove_parametrizations"),
        (lambda: nn.Sequential(weight_norm(nn.Linear(3, 2))), r"0 \(Linear\).*weight_norm"),
        (lambda: weight_norm(nn.Linear(3, 2)), r"the model \(Linear\).*weight_norm"),
        (lambda: nn.Sequential(spectral_norm(nn.Linear(3, 2))), r"0 \(Linear\).*spectral_norm"),
        (lambda: nn.DataParallel(nn.Linear(3, 2)), "pass the module inside"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 2))), "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    model = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UnsupportedModuleError, match=words):
        private(model, optimizer=lambda parameters, lr: optimizer)


def test_all_problems_at_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    with pytest.raises(UnsupportedModuleError, match=r"(?s)0 \(BatchNorm1d\).*1 \(BatchNorm1d\)"):
        private(model)


def test_fix_replaces_and_trains() -> None:
    model = nn.Sequential(
        nn.Linear(3, 24),
        nn.BatchNorm1d(24),
        nn.Unflatten(1, (3, 8)),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24, affine=False), nn.Linear(24, 2)),
    )
    model[3].weight.data.fill_(2.0)
    kept = copy.deepcopy(model.state_dict())
    fixed = fix(model)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())  # a copy was changed
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].num_groups == 3
    assert fix(nn.BatchNorm2d(12)).num_groups == 12
    assert fixed[1](torch.randn(5, 24)).std() > 0.5  # plain features survive it
    assert not fixed[3].track_running_stats
    assert torch.equal(fixed[3].weight, torch.full((3,), 2.0))
    assert problems(fixed) == []
    assert isinstance(fix(nn.BatchNorm2d(33)), nn.GroupNorm)
    _, fixed, optimizer, loader = private(fixed)
    before = weights(fixed)
    epoch(fixed, optimizer, loader)
    assert not torch.equal(before, weights(fixed))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
        (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1), "1 parameter.* not the"),
        (lambda m: torch.optim.SGD(mlp().parameters(), lr=0.1), "not the module's"),
        (lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), "missing from the optimizer: 2.weight, 2.bias"),
        (lambda m: private()[2], "private already"),
    ],
)
def test_optimizers_that_are_refused(make: Callable[..., torch.optim.Optimizer], words: str) -> None:
    model = mlp()
    with pytest.raises(ConfigurationError, match=words):
        private(model, optimizer=lambda parameters, lr: make(model))


def test_nothing_to_train() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        private(model)
    model[2].requires_grad_(True)
    private(model, optimizer=lambda parameters, lr: torch.optim.SGD(model[2].parameters(), lr=lr))


# ---- what is tried out -----------------------------------------------------


@pytest.mark.parametrize("physical", [None, 2, 3])
@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.std(0, unbiased=False).clamp_min(0.1),
        lambda x: x + 1e-3 * x.sum(0),
        lambda x: x.roll(1, 0),
        lambda x: x + x[0],
        lambda x: torch.softmax(x @ x.T, 1) @ x,
        lambda x: x * (x.abs().max() / 5),
        lambda x: x.cumsum(0),
    ],
)
def test_mixing_is_seen_and_named(mix: Callable[[Tensor], Tensor], physical: int | None) -> None:
    refused(Around(before=mix), "the model .* mixes examples", max_physical_batch_size=physical)
    # Lots are drawn at random. In about one of a hundred, no replaced row is the largest after the layer, and it is
    # the gradients that show the mixing: refused all the same, with the name of the layer inside.
    words = r"inner(\.layer)? (mixes examples|does not see examples in the order)"
    refused(Outer(Around(after=mix)), words, max_physical_batch_size=physical)


def test_examples_against_examples_are_seen() -> None:
    refused(Around(after=lambda x: x @ x.T), "Around mixes examples")


def test_small_outputs_are_looked_at_closely() -> None:
    refused(Around(after=lambda x: 1e-6 * (x - x.mean(0))), "mixes examples")


def test_dependence_on_the_number_of_examples_is_seen() -> None:
    refused(Outer(Around(after=lambda x: x / len(x))), "inner mixes examples: .* how many")


def test_examples_that_are_alike_prove_nothing() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            rare = hidden * (x > 1).unsqueeze(1)  # rows made of the schema have words 0 and 1 alone
            return self.head(hidden - rare.mean(0).detach())  # no gradient crosses, which would show at once

    targets = torch.zeros(24, dtype=torch.long)
    settings = {"data_loader": DataLoader(TensorDataset(torch.ones(24).long(), targets), batch_size=6)}
    _, model, optimizer, loader = private(Words(), sampling="fixed", **settings)
    step(model, optimizer, next(iter(loader)))
    loader.dataset.tensors = torch.arange(24) % 5, targets
    with pytest.raises(UnsupportedModuleError, match="mixes"):
        step(model, optimizer, next(iter(loader)))


def test_attention_over_the_batch_is_seen() -> None:
    class Crosswise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(3, 1), nn.Linear(3, 2)  # batch_first is False

        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(1).expand(-1, 4, -1)  # [n, T, d], taken for [T, n, d]
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    settings = {"sampling": "fixed"}
    _, model, optimizer, loader = private(Crosswise(), **settings)
    with pytest.raises(PrivacyError):
        step(model, optimizer, next(iter(loader)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 8])
def test_a_table_is_not_a_batch(rows: int) -> None:
    """However many rows it has: each example gets the gradient that it has alone."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
            self.register_buffer("table", torch.randn(rows, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.unsqueeze(1) + self.place(self.table)).mean(1)

    torch.manual_seed(0)
    model = Positions()
    plain = copy.deepcopy(model)
    _, model, optimizer, loader = private(model, noise_multiplier=1e-9, sampling="fixed")
    inputs, targets = next(iter(loader))
    step(model, optimizer, (inputs, targets))
    parameters = list(plain.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for one, target in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(plain(one[None]), target[None])
        gradient = torch.autograd.grad(loss, parameters)
        norm = torch.stack([part.norm() for part in gradient]).norm()
        for part, mine in zip(total, gradient, strict=True):
            part += mine / norm.clamp_min(1.0) / len(inputs)
    for parameter, wanted in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_a_table_that_depends_on_the_lot_is_refused() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.unsqueeze(1) + self.place(x.amax(0, keepdim=True).expand(5, 3))).mean(1)

    refused(Positions(), "mixes examples|depends on the examples|does not see")


@pytest.mark.parametrize("how", ["in place", "assigned", "counted"])
def test_buffers_that_take_statistics_are_seen(how: str) -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if how == "in place":
                self.mean.lerp_(x.mean(0).detach(), 0.1)
            elif how == "assigned":
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            else:
                self.mean += 1
            return self.layer(x)

    refused(Keeper(), "the buffer mean changes")
    refused(nn.Sequential(Keeper()), "the buffer 0.mean changes")


@pytest.mark.parametrize("lot", [2, 6])
@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 3, num_layers=2, bidirectional=True), nn.LSTM(3, 3, 2), nn.TransformerEncoderLayer(3, 1, 4)]
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_a_length_that_happens_to_be_the_number_of_examples(layer: nn.Module, lot: int, first: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)
            (self.layer.self_attn if hasattr(layer, "self_attn") else self.layer).batch_first = first
            self.head = nn.LazyLinear(2)

        def forward(self, x: Tensor) -> Tensor:
            sequence = x.unsqueeze(1).expand(-1, 4, -1)
            found = self.layer(sequence if first else sequence.transpose(0, 1))
            return self.head((found[0] if isinstance(found, tuple) else found).mean(1 if first else 0))

    model = Reader()
    model(torch.zeros(3, 3))
    _, model, optimizer, loader = private(model, lot=lot, batch_first=first, sampling="fixed")
    epoch(model, optimizer, loader)


@pytest.mark.parametrize("steps", [5, 6])
@pytest.mark.parametrize("first", [True, False])
def test_as_many_steps_as_examples(steps: int, first: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(3, 3, batch_first=first), nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            if first:
                return self.head((self.layer(x)[0].mT @ mask).sum(2))  # a mask of [T, T] is the same for all examples
            return self.head(self.layer(x.transpose(0, 1))[0].sum(0))  # [n, T, ...] outside, [T, n, ...] inside

    examples = TensorDataset(torch.randn(24, steps, 3), torch.zeros(24, dtype=torch.long))
    settings = {"data_loader": DataLoader(examples, batch_size=6), "batch_first": first, "sampling": "fixed"}
    _, model, optimizer, loader = private(Reader(), **settings)
    for inputs, targets in loader:
        cross_entropy(model(inputs, torch.ones(steps, steps) if first else None), targets).backward()
        optimizer.step()


def test_a_fixed_number_of_examples_cannot_be_tried() -> None:
    refused(Around(before=lambda x: x.reshape(6, 3) * 1.0), "batches of any size")


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(self.embed(x.unsqueeze(-1)).tanh()) * scale
        return {"logits": self.head(hidden.mean(1)), "other": hidden}


def test_honest_models_pass() -> None:
    honest = [
        mlp(),
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(8, 2)),
        Around(after=lambda x: x + torch.randn_like(x)),
        Around(before=lambda x: x.flip(1), after=lambda x: x.double().float()),
        mlp().double(),
    ]
    for model in honest:
        dtype = next(model.parameters()).dtype
        examples = TensorDataset(data()[:][0].to(dtype), data()[:][1])
        for count, lot in ((24, 6), (24, 2)):
            model = copy.deepcopy(model)
            _, model, optimizer, loader = private(model, data_loader=DataLoader(examples, batch_size=lot), count=count)
            epoch(model, optimizer, loader)
    _, model, optimizer, loader = private(_Wide())
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs, scale=torch.tensor(0.5))["logits"], targets).backward()
        optimizer.step()


def test_the_check_leaves_the_random_numbers_alone() -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        inputs = data()[:][0][:6]
        if watched:
            _, model, _, loader = private(model, sampling="fixed")
            next(iter(loader))
        torch.manual_seed(1)
        found.append(model(inputs).detach())
    assert torch.equal(*found)


# ---- losses -----------------------------------------------------


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def batch_hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none").max()


@pytest.mark.parametrize(
    ("criterion", "reduction", "words"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "mean", "Weighted means"),
        (nn.CrossEntropyLoss(ignore_index=1), "mean", "ignores label 1"),
        (nn.NLLLoss(ignore_index=0), "mean", "ignores label 0"),
        (contrastive, "mean", "mixes examples"),
        (batch_hardest, "mean", "mixes examples"),
        (nn.CrossEntropyLoss(), "sum", "make them agree"),
        (nn.MSELoss(reduction="sum"), "mean", "make them agree"),
        (lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum"), "mean", "mixes examples"),
        (lambda o, t: nn.functional.cross_entropy(o, t), "sum", "mixes examples"),
        (lambda o, t: nn.functional.cross_entropy(o - o.mean(0), t), "mean", "mixes examples"),
    ],
)
def test_losses_that_are_refused(criterion: Callable[..., Tensor], reduction: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        private(criterion=criterion, loss_reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "kind", [nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss, nn.HuberLoss]
)
def test_plain_losses_pass(kind: type[nn.Module], reduction: str) -> None:
    assert check_criterion(kind(reduction=reduction), reduction)
    assert check_criterion(kind(reduction="none"), reduction)  # the loop puts it together


def test_weights_that_do_not_mix_pass_and_stay_as_they_are() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum")
    assert check_criterion(criterion, "sum")
    assert criterion.weight.dtype == torch.float32
    assert check_criterion(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])), "mean")
    assert check_criterion(nn.CrossEntropyLoss(label_smoothing=0.1), "mean")


def test_a_loss_of_other_arguments_cannot_be_tried_and_is_refused() -> None:
    def triplet(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return nn.functional.triplet_margin_loss(anchor, positive, negative)

    assert check_criterion(triplet, "mean") is False
    with pytest.raises(ConfigurationError, match=r"optimizer.backward\(losses\)"):
        private(criterion=triplet)


def test_packed_sequences_of_different_lengths_are_not_mixing() -> None:
    """A packed sequence is ordered by length: replacing an example moves the rows of the others, and mixes nothing."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (last, _) = self.rnn(packed)
            out: torch.Tensor = self.head(torch.cat([last[0], last[1]], 1))
            return out

    torch.manual_seed(0)
    model = Packed()
    sequences = TensorDataset(torch.randn(40, 6, 3), torch.randint(1, 7, (40,)), torch.randint(2, (40,)))
    model, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(sequences, batch_size=10),
        noise_multiplier=1.0,
    )
    steps = 0
    for x, lengths, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, lengths), targets).backward()
        optimizer.step()
        steps += 1
    assert steps == 4


# ---- precision -----------------------------------------------------------------------------


def test_a_precision_that_no_bound_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise RuntimeError("mix of the legacy and new APIs")  # what torch says then

    _, model, optimizer, loader = private()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", unknown)
    with pytest.raises(ConfigurationError, match="set_float32_matmul_precision"):
        epoch(model, optimizer, loader)


def test_fewer_bits_on_a_cpu_beside_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, optimizer, loader = private()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    epoch(model, optimizer, loader)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigurationError, match="'highest'"):
            epoch(model, optimizer, loader)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_models_are_tried_out_with_all_bits() -> None:
    """With TF32 another number of examples is another kernel, and looked like examples that mix."""
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            return x

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        model = nn.Sequential(Looks(), nn.Linear(3, 2))
        _, model, optimizer, loader = private(model)
        epoch(model, optimizer, loader)
        assert ("highest", False) in seen[:5]
        assert seen[-1] == ("high", before[1])
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", before[1])
    finally:
        torch.set_float32_matmul_precision(before[0])
