"""What a loop may do with a model under `fully_shard`, between lots and inside of them, and what it must not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from distributed.sharding import INPUTS, Loop, layers, said, sharded
from distributed.team import start, values
from distributed.work import FEATURES, cross_entropy, full


def broken_off(model: Any) -> None:
    """A forward pass that fails half-way, caught by the loop."""

    def fail(*_: Any) -> None:
        raise ValueError("half-way")

    handle = model[0].register_forward_hook(fail, prepend=True)  # before fully_shard's own
    with torch.no_grad(), pytest.raises(ValueError, match="half-way"):
        model(INPUTS)
    handle.remove()


def other_flags(model: Any) -> None:
    """Leave weights whole between lots, in all processes or in one, and change a shard beneath."""
    weight = model[0].weight if type(model[0].weight) is nn.Parameter else model[0].weight.to_local()
    if dist.is_initialized():
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            model(INPUTS)
        assert type(model[0].weight) is nn.Parameter
        if dist.get_rank() == 0:
            model.state_dict()
    with torch.no_grad():
        weight.add_(0.1)


def compiled(loop: Loop) -> Loop:
    loop.model = torch.compile(loop.model)
    return loop


def harmless(rank: int, size: int) -> dict[str, Any]:
    """Things that a loop may do between lots and inside of them: the weights that each leads to."""
    found: dict[str, Any] = {"nothing else": Loop().run().weights}
    seen: list[Tensor] = []

    def evaluate(loop: Loop, mode: Any) -> None:
        with mode():
            seen.append(loop.model(INPUTS).clone())

    for mode in (torch.no_grad, torch.inference_mode):
        loop = Loop()
        evaluate(loop, mode)
        found[f"evaluated by all, {mode.__name__}"] = loop.run(
            after=lambda own=loop, how=mode: evaluate(own, how)
        ).weights
        assert all(type(weight).__name__ == "DTensor" for weight in loop.model.parameters())
        last = layers()
        torch.nn.utils.vector_to_parameters(loop.weights, last.parameters())
        torch.testing.assert_close(seen[-1], last(INPUTS))
        loop = Loop()
        first = (lambda own=loop, how=mode: evaluate(own, how)) if rank == 0 else lambda: None
        found[f"evaluated by one inside a lot, {mode.__name__}"] = loop.run(middle=first).weights
    loop = Loop()
    found["saved by one"] = loop.run(after=lambda: rank or loop.model.state_dict()).weights
    loop = Loop()
    found["other flags"] = loop.run(after=lambda: other_flags(loop.model)).weights
    loop = Loop()
    found["broken off inside a lot"] = loop.run(middle=lambda: broken_off(loop.model)).weights
    loop = Loop()
    found["broken off between lots"] = loop.run(after=lambda: broken_off(loop.model)).weights
    loop = Loop()
    found["compiled since"] = compiled(loop).run().weights
    assert all(  # views of whole gradients would keep these
        weight.grad.to_local().untyped_storage().nbytes() == 4 * weight.to_local().numel()
        for weight in loop.model.parameters()
    )
    kept: list[Tensor] = []
    loop = Loop(optimizer=torch.optim.Adam)
    loop.run(middle=lambda: kept.extend(loop.model.parameters()))
    assert len(kept) == 3 * 6
    found["memory of whole weights at rest"] = sum(weight.untyped_storage().nbytes() for weight in kept)
    state = [loop.optimizer.state[weight]["exp_avg"] for weight in loop.model.parameters()]
    found["at rest"] = [
        sum(value.to_local().numel() for value in values) for values in (loop.model.parameters(), state)
    ]
    return found


def test_what_a_loop_does_besides_changes_nothing(tmp_path: Path) -> None:
    found = values(2, tmp_path, harmless)
    for results in found:
        assert results.pop("memory of whole weights at rest") == 0
    assert [results.pop("at rest") for results in found] == [[38, 38], [23, 23]]  # of 61
    expected, loop = Loop(layers()).run().weights, Loop(layers())
    loop.run(after=lambda: other_flags(loop.model))
    for results in found:
        torch.testing.assert_close(results.pop("other flags"), loop.weights, rtol=0, atol=1e-5)
    for results in found:
        for name, weights in results.items():
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5, msg=name)


def misused(rank: int, size: int) -> dict[str, str]:
    """What loops must not do."""
    found: dict[str, str] = {}

    def tried(name: str, make: Callable[[Loop], Callable[[], Any]]) -> None:
        found[name] = said(make(Loop()))

    def outside(weight: Callable[[], Tensor]) -> None:
        weight().square().sum().backward()

    def before_flip(loop: Loop) -> None:
        loop.model.set_reshard_after_backward(True)

    tried("gradients between lots", lambda loop: lambda: loop.run(after=lambda: loop.model(INPUTS)))
    tried("gradients before the first", lambda loop: lambda: loop.model(INPUTS))
    tried("resharded inside a lot", lambda loop: lambda: loop.run(middle=lambda: loop.model[0].reshard()))
    tried("saved inside a lot", lambda loop: lambda: loop.run(middle=lambda: loop.model.state_dict()))
    tried("resharding flags", lambda loop: lambda: loop.run(before=lambda: before_flip(loop)))
    tried("a term on a weight", lambda loop: lambda: loop.run(middle=lambda: outside(lambda: loop.model[0].weight)))
    tried(
        "a term on a shard",
        lambda loop: (
            lambda shards: lambda: loop.run(middle=lambda: outside(lambda: shards[0].to_local()))
        )(list(loop.model.parameters())),
    )  # fmt: skip
    loop = Loop()
    said(lambda: loop.run(middle=lambda: outside(lambda: loop.model[0].weight)))
    found["dropped"] = str([weight.grad for weight in loop.model.parameters()])
    loop = Loop()
    found["not reduced"] = said(lambda: with_a_term(loop))
    loop = Loop()
    found["a layer between lots"] = said(
        lambda: loop.run(after=lambda: loop.model[0](torch.randn(loop.loader.current.count, FEATURES)))
    )
    found["after it"] = str(loop.engine.guarantee(1e-5).epsilon is not None)
    tried("another optimizer", lambda loop: torch.optim.SGD(loop.model.parameters(), lr=0.1).step)
    tried("a state with other weights", lambda loop: lambda: loop.run(after=lambda: assigned(loop.model)))
    tried(
        "weights changed by hand",
        lambda loop: (
            lambda: (
                loop.run(after=lambda: loop.model[0].weight.to_local().detach().add_(0.1)),
                loop.engine.guarantee(1e-5).untried,
            )[1]
        ),
    )
    tried("nothing", lambda loop: lambda: (loop.run(), loop.engine.guarantee(1e-5).untried)[1])
    model = layers()
    loop = Loop(model)
    sharded(lambda: model)
    found["sharded since"] = said(loop.run)
    loop = Loop(engine={"budget": (1.0, 1e-5)})
    found["spent"] = said(lambda: (loop.run(lots=50), loop.loader.stopped, type(loop.model[0].weight).__name__)[1:])
    return found


def sly(rank: int, size: int) -> dict[str, Any]:
    """What a loop may change without PyTorch's counting it, on a sharded model and on a whole one."""
    return {"sharded": told(lambda: sharded()), "whole": told(layers)}


def told(made: Callable[[], nn.Module]) -> dict[str, Any]:
    """What each loop comes to: an error, whether there is no epsilon and what was noted; and the weights."""
    found: dict[str, Any] = {}

    def tried(
        name: str, middle: Callable[[Loop], Any] | None, after: Callable[[Loop], Any] | None, clear: bool
    ) -> None:
        loop = Loop(made())
        if not clear:
            loop.optimizer.zero_grad = lambda: None  # gradients add up

        def run() -> None:
            loop.run(middle=lambda: middle and middle(loop), after=lambda: after and after(loop), lots=2)

        ended, guarantee = said(run), loop.engine.guarantee(1e-5)
        found[name] = (ended, guarantee.epsilon is None, guarantee.untried), loop.weights

    def rows(values: list[Any]) -> list[Tensor]:
        return [value.to_local() if hasattr(value, "to_local") else value for value in values]

    def add(values: list[Any]) -> None:
        with torch.no_grad():
            torch._foreach_add_(values, 100.0)

    def held(loop: Loop) -> list[Any]:
        return loop.optimizer.param_groups[0]["params"]

    def gradients(loop: Loop) -> list[Any]:
        return [each.grad for each in held(loop)]

    def skip(loop: Loop) -> None:
        loop.model.requires_grad_(False)

    tried("all frozen inside a lot", skip, None, True)
    tried("one frozen inside a lot", lambda loop: loop.model[0].bias.requires_grad_(False), None, True)
    tried("gradients add up", None, None, False)
    tried("added to gradients", None, lambda loop: add(gradients(loop)), False)
    tried("added to rows of gradients", None, lambda loop: add(rows(gradients(loop))), False)
    tried("added to weights", None, lambda loop: add(held(loop)), True)
    tried("added to rows of weights", None, lambda loop: add(rows(held(loop))), True)
    return found


def test_what_pytorch_does_not_count_is_seen_as_on_a_whole_model(tmp_path: Path) -> None:
    """A lot that one example has skipped, and private data written into what is stepped with or trained."""
    for found in values(2, tmp_path, sly):
        whole = found["whole"]
        for name, (what, weights) in found["sharded"].items():
            assert what == whole[name][0], name
            if name != "one frozen inside a lot":  # it thaws with the next
                torch.testing.assert_close(weights, whole[name][1], rtol=1e-5, atol=1e-5, msg=name)
        (ended, none, _), _ = whole["all frozen inside a lot"]
        assert "without a backward pass" in ended
        assert none
        for name in ("one frozen inside a lot", "added to weights", "added to rows of weights"):
            assert whole[name][0][2], name
        (_, _, untried), alone = whole["gradients add up"]
        assert not untried
        for name in ("added to gradients", "added to rows of gradients"):
            assert (whole[name][1] - alone).abs().max() < 1  # 100 times the rate were 10


def earlier(rank: int, size: int) -> dict[str, Any]:
    """Models that did something before they were made private, or after they no longer were."""
    found: dict[str, Any] = {}
    model = sharded()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(INPUTS).sum().backward()
    plain.step()
    plain.zero_grad()
    loop = Loop(model)
    found["trained"] = loop.run().engine.guarantee(1e-5).untried
    loop = Loop()
    loop.engine.detach(loop.model)
    next(iter(loop.loader))
    found["detached"] = [type(weight).__name__ for weight in loop.model.parameters()]
    return found


def test_what_was_before_is_noted_and_what_comes_after_is_left_alone(tmp_path: Path) -> None:
    for found in values(2, tmp_path, earlier):
        assert any("weights were changed" in each for each in found["trained"])
        assert set(found["detached"]) == {"DTensor"}


def with_a_term(loop: Loop) -> list[Tensor | None]:
    """What stands on the shards where a term on a weight is part of the loss, before the step that refuses it."""
    shards: Any = list(loop.model.parameters())
    inputs, targets, _ = next(iter(loop.loader))
    losses = cross_entropy(loop.model, inputs, targets) + loop.model[0].weight.square().sum()
    torch.autograd.backward(losses, torch.ones_like(losses))
    return [shard.grad for shard in shards]


def assigned(model: Any) -> None:
    state = {
        name: distribute_tensor(torch.ones(shard.shape), shard.device_mesh, shard.placements)
        for name, shard in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)


def test_what_a_loop_must_not_do_is_refused_or_noted(tmp_path: Path) -> None:
    for found in values(2, tmp_path, misused):
        shard = "TrainingLoopError: 0.weight is a shard"
        for name in ("gradients between lots", "gradients before the first", "resharded inside a lot"):
            assert found[name].startswith(shard), name
        assert found["saved inside a lot"].startswith(shard)
        assert found["sharded since"].startswith(shard)
        assert "is a shard" in found["resharding flags"]
        for name in ("a term on a weight", "a term on a shard"):
            assert found[name].startswith("TrainingLoopError: a gradient reached 0.weight"), name
        assert found["dropped"] == "[None, None, None, None, None, None]"
        assert found["not reduced"] == "nothing was raised: [None, None, None, None, None, None]"
        assert found["a layer between lots"].startswith(shard)
        assert found["after it"] == "True"
        assert "an ordinary optimizer on a module that is private" in found["another optimizer"]
        assert "not the shards that were made private" in found["a state with other weights"]
        assert "were changed by the loop" in found["weights changed by hand"]
        assert found["nothing"] == "nothing was raised: ()"
        assert found["spent"] == "nothing was raised: (True, 'DTensor')"


def alike() -> nn.Module:
    """Layers of one size, which processes that do different things would take for one another."""
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))


def by_itself(rank: int, size: int, what: str) -> tuple[str, int]:
    """Process 0 does something after the first lot that the other does not.

    Returns:
        What the loop comes to, and how many releases are on record.

    """
    loop = Loop(sharded(alike))

    def evaluate(part: nn.Module) -> None:
        with torch.no_grad():
            part(INPUTS)

    ways: dict[str, Callable[[], Any]] = {
        "leaves a lot": lambda: next(iter(loop.loader)),
        "evaluates": lambda: evaluate(loop.model),
        "evaluates a part": lambda: evaluate(loop.model[2]),
        "evaluates a part as often as there are layers": lambda: [evaluate(loop.model[2]) for _ in range(3)],
    }
    once = [ways[what]] if rank == 0 else []
    ended = said(lambda: loop.run(after=lambda: once.pop()() if once else None))
    return ended, sum(loop.engine._runs[0].charged().values())


@pytest.mark.parametrize(
    "what",
    ["leaves a lot", "evaluates", "evaluates a part", "evaluates a part as often as there are layers"],
)
def test_no_lot_is_released_once_a_process_goes_its_own_way(tmp_path: Path, what: str) -> None:
    answers = [member.answer() for member in start(2, tmp_path, by_itself, what, timeout=3)]
    for answer in answers:
        ended, charged = answer.value
        assert ended.startswith(("DistributedError", "TrainingLoopError")), ended
        assert charged == 1  # the one before


# ---- leaving the model to fully_shard --------------------------------------------------------------------------------


def left(rank: int, size: int) -> list[tuple[list[bool], float]]:
    """Gradients that fully_shard reduces by itself, of models that are private no longer or never became it."""
    found = []
    detached, refused = Loop().run(), sharded()
    detached.engine.detach(detached.model)
    differing = said(lambda: Loop(refused, noise_multiplier=1.0 + rank))
    assert "noise_multiplier" in differing
    for model in (detached.model, refused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(INPUTS + rank).square().sum().backward()
        grads = [weight.grad is not None for weight in model.parameters()]
        optimizer.step()
        found.append((grads, sum(float(full(weight.detach()).sum()) for weight in model.parameters())))
    return found


def test_a_model_that_is_not_private_is_an_ordinary_one(tmp_path: Path) -> None:
    one, other = values(2, tmp_path, left)
    assert one == other
    assert all(all(grads) for grads, _ in one)
