"""optimizer.backward(losses) and TrainingStep: one loss for each example."""

from __future__ import annotations

import pytest
import torch
from loop import cross_entropy, data, mlp, private, released, step, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import Ellipsoid, Flat, Grouped, Local, PerLayer, PrivacyEngine, Released, TrainingStep
from adadp.errors import TrainingLoopError

each = nn.CrossEntropyLoss(reduction="none")

CLIPPINGS = {
    "flat": lambda: Flat(0.5),
    "per layer": lambda: PerLayer(0.5),
    "ellipsoid": lambda: Ellipsoid(0.5, source=Released()),
    "local": lambda: Local(0.5, threshold=0.0),
    "grouped": lambda: Grouped({"0.*": Flat(0.5), "*": PerLayer(1.0)}),
}


def trained(by: str, clipping: str, **settings: object) -> Tensor:
    """The weights after an epoch, by one of the three ways of writing a step."""
    settings = {"noise_multiplier": 1e-3, "clipping": CLIPPINGS[clipping](), **settings}
    _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), **settings)
    whole = TrainingStep(optimizer, lambda x, y: each(model(x), y)) if by == "training step" else None
    scale = float(settings.get("loss_scale", 1.0))  # type: ignore[arg-type]
    for inputs, targets in loader:
        if whole is not None:
            whole(inputs, targets)
            continue
        optimizer.zero_grad()
        if by == "rows":
            optimizer.backward(each(model(inputs), targets))
        else:
            (scale * cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("by", ["rows", "training step"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_physical_batch_size": 3}, {"pad_lots": True}, {"loss_scale": 64.0}, {"sampling": "fixed"}],
    ids=str,
)  # fmt: skip
def test_all_ways_to_write_a_step_are_the_same_training(by: str, clipping: str, settings: dict[str, object]) -> None:
    lots = {key: value for key, value in settings.items() if key == "sampling"}
    reference = trained("mean", clipping, **lots)
    torch.testing.assert_close(trained(by, clipping, **settings), reference, rtol=2e-4, atol=1e-5)


def test_what_is_lost_without_the_factor_would_show() -> None:
    """Teeth: with the scale of a mean, rows of losses train another model."""
    _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), noise_multiplier=1e-3, clipping=Flat(0.5))
    for inputs, targets in loader:
        optimizer.backward(each(model(inputs), targets) / len(inputs))
        optimizer.step()
    assert (weights(model) - trained("mean", "flat")).abs().max() > 1e-3


def test_the_loop_sees_one_batch_for_each_lot_and_parts_are_cut_inside() -> None:
    seen: list[int] = []
    _, model, optimizer, loader = private(max_physical_batch_size=2, count=40, lot=8)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(inputs))
        return each(model(inputs), targets)

    work = TrainingStep(optimizer, losses)
    batches = 0
    for batch in loader:
        work(*batch)
        batches += 1
        assert optimizer.stepped
    assert batches == len(loader) == 5
    assert max(seen) <= 4  # two of them, and trials of up to four rows
    assert len(seen) > 10


@pytest.mark.parametrize("shape", [(), (6, 1), (5,), (12,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    _, model, optimizer, loader = private(sampling="fixed")
    next(iter(loader))
    with pytest.raises(TrainingLoopError, match="one loss is needed for each"):
        optimizer.backward(torch.zeros(shape, requires_grad=True))
    assert model is not None


def test_a_scalar_beside_rows_is_refused() -> None:
    for first in ("rows", "scalar"):
        _, model, optimizer, loader = private(sampling="fixed")
        inputs, targets = next(iter(loader))
        before = weights(model)
        if first == "scalar":
            cross_entropy(model(inputs), targets).backward()
            losses = each(model(inputs), targets)
            with pytest.raises(TrainingLoopError, match="different scales"):
                optimizer.backward(losses)
        else:
            optimizer.backward(each(model(inputs), targets))
            cross_entropy(model(inputs), targets).backward()
            with pytest.raises(TrainingLoopError, match="different scales"):
                optimizer.step()
        assert torch.equal(before, weights(model))
        optimizer.zero_grad()
        optimizer.backward(each(model(inputs), targets))  # after zero_grad all is forgotten
        optimizer.step()


def test_a_scalar_after_rows_that_were_forgotten_has_its_own_scale() -> None:
    """Whatever was differentiated and dropped before must not change how the next pass is taken."""
    found = []
    for forget in (False, True):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), noise_multiplier=1e-6, sampling="fixed")
        batch = next(iter(loader))
        if forget:
            optimizer.backward(each(model(batch[0]), batch[1]))
            optimizer.zero_grad()
        step(model, optimizer, batch)
        found.append(released(model))
    torch.testing.assert_close(*found)


def test_two_losses_of_a_batch_are_one_gradient() -> None:
    found = []
    for twice in (False, True):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), noise_multiplier=1e-6, sampling="fixed")
        inputs, targets = next(iter(loader))
        for _ in range(2 if twice else 1):
            optimizer.backward(each(model(inputs), targets) * (1 if twice else 2))
        optimizer.step()
        found.append(released(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_weights_outside_the_module_are_refused() -> None:
    engine = PrivacyEngine(seed=1)  # a lot of one example is not tried
    _, model, optimizer, loader = private(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), engine)
    head = nn.Linear(4, 2)
    inputs, targets = next(iter(loader))
    with pytest.raises(TrainingLoopError, match="outside of the private module"):
        optimizer.backward(each(head(model(inputs)), targets))
    head.requires_grad_(False)
    optimizer.backward(each(head(model(inputs)), targets))  # a frozen one is a part of the loss
    optimizer.step()
    assert head.weight.grad is None


def test_bfloat16_has_no_mean_to_round() -> None:
    """One example less moves nobody else's gradient; with a scalar mean it is refused."""
    count = 1025  # where 1/n crosses a step of bfloat16
    inputs = torch.ones(count, 3) + 0.05 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (count, count - 1):
        model = mlp()
        nn.init.zeros_(model[2].weight)
        _, model, optimizer, loader = private(
            model, PrivacyEngine(seed=1), lr=0.0, max_grad_norm=1.6,
            data_loader=DataLoader(TensorDataset(inputs[:size], torch.zeros(size, dtype=torch.long)), batch_size=size),
        )  # fmt: skip
        batch = next(iter(loader))
        with torch.autocast("cpu", torch.bfloat16):
            losses = each(model(batch[0]), batch[1])
        optimizer.backward(losses)
        optimizer.step()
        found.append(released(model).double() * size)
    assert (found[0] - found[1]).norm() / 1.6 <= 1.01
    batch = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    with pytest.raises(TrainingLoopError, match="bfloat16"):
        optimizer.step()


def test_examples_can_be_left_out_one_by_one() -> None:
    found = []
    for left_out in (False, True):
        _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), noise_multiplier=1e-6, sampling="fixed")
        inputs, targets = next(iter(loader))
        keep = torch.arange(len(inputs)) % 2 == 0
        losses = each(model(inputs), targets)
        optimizer.backward(losses if left_out else losses * keep)
        optimizer.step(keep=keep if left_out else None)
        found.append(released(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    inputs, targets = next(iter(loader))
    optimizer.backward(each(model(inputs), targets))
    with pytest.raises(TrainingLoopError, match="one bool for each"):
        optimizer.step(keep=torch.ones(2, dtype=torch.bool))


def test_a_rate_changed_within_a_lot_is_refused() -> None:
    _, model, optimizer, loader = private(sampling="fixed", max_physical_batch_size=2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=len(loader) * 2)
    for _ in range(2):
        for batch in loader:
            step(model, optimizer, batch)
            if optimizer.stepped:
                schedule.step()
    assert schedule.last_epoch == len(loader) * 2
    _, model, optimizer, loader = private(sampling="fixed", max_physical_batch_size=2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=len(loader) * 2)
    batches = iter(loader)
    step(model, optimizer, next(batches))
    schedule.step()
    batch = next(batches)
    with pytest.raises(TrainingLoopError, match="learning rate was changed within a lot"):
        step(model, optimizer, batch)


def test_lots_in_pieces_rest_on_schedulers_that_count_lots() -> None:
    """A rate that follows the number of batches, and changes between two lots, cannot be seen."""
    for largest, said in ((2, True), (None, False)):
        engine, model, optimizer, loader = private(max_physical_batch_size=largest)
        for batch in loader:
            step(model, optimizer, batch)
        assert ("Schedulers and counters of the loop count lots" in str(engine.guarantee(1e-5))) == said


def test_prefetching_gives_the_same_lots() -> None:
    plain = [batch[0].tolist() for batch in _stepped(None)]
    assert [batch[0].tolist() for batch in _stepped("cpu")] == plain


def _stepped(prefetch: str | None) -> list[Tensor]:
    settings = {"data_loader": DataLoader(data(), batch_size=6), "prefetch": prefetch}
    _, model, optimizer, loader = private(engine=PrivacyEngine(seed=4), **settings)
    given = []
    for _ in range(2):
        for batch in loader:
            given.append(batch)
            step(model, optimizer, batch)
    return given
