"""Two worlds that differ by one example, trained by a loop that people write, and how that ends.

Both worlds have the same seed, so the noise of their releases is the same and cancels: what is left of the difference
of two releases is what one example did to it. In units of the clipping bound that may be 1 (2 where one example is
replaced). Releases are read off the user's own optimizer when it steps, whatever loop made it step.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import adadp.errors
from adadp import PrivacyEngine
from adadp.accounting.guarantee import Guarantee
from adadp.errors import NoGuaranteeError, PrivacyError

DELTA = 1e-5
SLACK = 1.01

#: The only things that may give a number although nobody looked. Whatever else is not seen is a mistake in the engine.
NO_CODE_CAN_SEE = {
    "loss": "a scalar loss written in the loop, or losses [n] that it computes in a way of its own",
    "loop": "what the loop does to a batch before the module sees it",
    "dataset": "statistics or retries inside a Dataset",
    "weights": "weights trained without privacy beforehand",
}

# ---- how it ends --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """adadp raised. `epsilon` is what the guarantee says afterwards, None for *none*."""

    error: PrivacyError
    epsilon: float | None = None


@dataclass(frozen=True)
class NoNumber:
    """It trained, and the guarantee is *none*."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Bounded:
    """It trained, there is a number, and it is true for this example. `untried` is what the guarantee says it is on."""

    effect: float
    untried: tuple[str, ...] = ()
    guarantee: Guarantee | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Untried:
    """There is a number that is not true, and the guarantee names what nobody tried.

    `warned`: by the first release at the latest. `first`: what the assumptions begin with.
    """

    effect: float
    names: tuple[str, ...]
    warned: bool
    first: tuple[str, ...]


@dataclass(frozen=True)
class Broke:
    """Something else raised: no refusal, and no way out in the message."""

    error: Exception


@dataclass(frozen=True)
class FalseNumber:
    """There is a number, and it is not true."""

    effect: float
    epsilon: float


End = Refused | NoNumber | Bounded | Untried | Broke | FalseNumber
_WORSE = (Refused, NoNumber, Bounded, Untried, Broke, FalseNumber)


def worst(ends: Iterable[End]) -> End:
    """The one that a user would least like to have had: a case that must be refused is refused at every bound."""
    return max(ends, key=lambda ended: (_WORSE.index(type(ended)), getattr(ended, "effect", 0.0)))


# ---- a world ------------------------------------------------------------------------------------------------------


class World:
    """One run: what the loop gets, and what it released, in units of the clipping bound."""

    engine: PrivacyEngine
    model: Any
    optimizer: Any
    loader: Any

    def __init__(self, bound: float, lot: int, loss: Callable[[Any, Any], Tensor] | None) -> None:
        self.bound, self.lot, self._loss = bound, lot, loss
        self.releases: list[Tensor] = []
        self.error: Exception | None = None
        self.warned = False  # of something untried, when the first step was made
        self._stepped = False
        self._caught: list[warnings.WarningMessage] = []

    def loss(self, batch: Any) -> Tensor:
        """What the loop computes from a batch: a mean, or [n] for `by_example`."""
        assert self._loss is not None
        return self._loss(self.model, batch)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what this optimizer used, whenever it steps itself (one that wraps it may call its hooks as well)."""
        optimizer.register_step_post_hook(lambda by, *_: self._record(optimizer) if by is optimizer else None)

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        used = [p.grad.detach().double().flatten() for p in parameters if p.grad is not None]
        if not self._stepped:
            self._stepped, self.warned = True, any(_is_untried(caught) for caught in self._caught)
        self.releases.append(torch.cat(used or [torch.zeros(0).double()]) * self.lot / self.bound)

    def also(self, value: float) -> None:
        """Something else that the loop keeps or saves and that is not private in itself, such as a count."""
        self.releases.append(torch.tensor([value], dtype=torch.float64))

    @property
    def guarantee(self) -> Guarantee | None:
        """None where even asking for it is refused."""
        try:
            return self.engine.guarantee(DELTA)
        except NoGuaranteeError:
            return None


def _is_untried(caught: warnings.WarningMessage) -> bool:
    kind = getattr(adadp.errors, "UntriedWarning", None)
    return kind is not None and issubclass(caught.category, kind)


Loop = Callable[[World], None]


def plain(world: World) -> None:
    """The loop of every tutorial, with a scalar loss."""
    for batch in world.loader:
        world.optimizer.zero_grad()
        world.loss(batch).backward()
        world.optimizer.step()


def by_example(world: World) -> None:
    """The front door: losses [n], and the engine takes them from there."""
    for batch in world.loader:
        world.optimizer.zero_grad()
        world.optimizer.backward(world.loss(batch))
        world.optimizer.step()


def in_training_step(world: World) -> None:
    """The front door that runs the loss itself, and so can try it."""
    step = adadp.TrainingStep(world.optimizer, lambda *batch: world.loss(batch))
    for batch in world.loader:
        step(*(batch if isinstance(batch, tuple | list) else (batch,)))


def run(
    data: Dataset[Any],
    make: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor] | None = None,
    loop: Loop = plain,
    *,
    bound: float = 1.0,
    lot: int | None = None,
    seed: int = 7,
    engine: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.0,
    before: Callable[[World], None] | None = None,
    **settings: Any,
) -> World:
    """Train once. The lot is all of the data unless given, and lr 0: later releases do not depend on earlier ones."""
    size = lot or len(data)  # type: ignore[arg-type]
    world = World(bound, size, loss)
    with warnings.catch_warnings(record=True) as world._caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        # Whether there is a number is what counts here, and this accountant has it soonest.
        world.engine = PrivacyEngine(**{"seed": seed, "accountant": "rdp", **(engine or {})})
        model = make()
        own = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
        world.watch(own)
        settings.setdefault("noise_multiplier", 1.0)
        if "clipping" not in settings:
            settings["max_grad_norm"] = bound
        try:
            world.model, world.optimizer, world.loader = world.engine.make_private(
                module=model,
                optimizer=own,
                data_loader=DataLoader(data, batch_size=size, **(loader or {})),
                **settings,
            )
            if before is not None:
                before(world)
            loop(world)
        except Exception as error:
            world.error = _alone(error)
    return world


def _alone(error: Exception) -> Exception:
    """Without its traceback, whose frames would keep the loader's workers until some later test is slow for it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__, link = None, link.__cause__ or link.__context__
    return error


# ---- two of them --------------------------------------------------------------------------------------------------

Limit = float | Callable[[int], float]


def effects(one: World, other: World) -> list[float]:
    """What the example did to each release. A release that only one of the worlds made is told at a glance."""
    if one.error is None and other.error is None and len(one.releases) != len(other.releases):
        return [math.inf]
    return [_distance(p, q) for p, q in zip(one.releases, other.releases, strict=False)]


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    distance = float((one - other).norm())
    return math.inf if math.isnan(distance) else distance


def compare(present: World, absent: World, limit: Limit = 1.0, rounding: float = 0.0) -> End:
    """How two worlds ended. `limit` may depend on the release; `rounding` is what the weights' own precision cuts off
    after the noise was added, as a share of the release."""
    for world in (present, absent):
        if world.error is not None and not isinstance(world.error, PrivacyError):
            return Broke(world.error)
    refused = next((world for world in (present, absent) if world.error is not None), None)
    guarantee = (refused or present).guarantee
    found = effects(present, absent)
    allowance = [rounding * float(release.norm()) for release in present.releases] or [0.0]
    excess = [
        effect
        for i, effect in enumerate(found)
        if effect > SLACK * (limit(i) if callable(limit) else limit) + 1e-3 + allowance[min(i, len(allowance) - 1)]
    ]
    epsilon = None if guarantee is None else guarantee.epsilon
    untried = tuple(getattr(guarantee, "untried", ()))
    if excess and epsilon is not None and (refused is not None or not untried):
        return FalseNumber(max(excess), epsilon)
    if refused is not None:
        assert isinstance(refused.error, PrivacyError)
        return Refused(refused.error, epsilon)
    if guarantee is None or epsilon is None:
        return NoNumber(() if guarantee is None else guarantee.reasons)
    if excess:
        first = guarantee.assumptions[: len(untried)]
        return Untried(max(excess), untried, present.warned and absent.warned, first)
    return Bounded(max(found, default=0.0), untried, guarantee)


def names(subject: str, entries: Sequence[str]) -> bool:
    """Whether one of these sentences is about it: the word stands at its beginning, and is not said in passing."""
    return any(re.search(rf"\b{subject}\b", entry.partition(":")[0][:40], re.IGNORECASE) for entry in entries)


def end(
    present: Dataset[Any],
    absent: Dataset[Any],
    make: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor] | None = None,
    loop: Loop = plain,
    *,
    bounds: Sequence[float] = (1.0,),
    limit: Limit = 1.0,
    rounding: float = 0.0,
    **options: Any,
) -> End:
    """The worst end over the clipping bounds of training with and without one example."""
    return worst(
        compare(
            run(present, make, loss, loop, bound=bound, **options),
            run(absent, make, loss, loop, bound=bound, **options),
            limit,
            rounding,
        )
        for bound in bounds
    )


def check_unseen(name: str, case: Callable[..., End]) -> None:
    """One of the cases that no code can see: better seen; if not, it is said first and loudly, and strict gives none.

    `case` takes `engine`, the settings of the PrivacyEngine.
    """
    assert name in NO_CODE_CAN_SEE
    ended = case(engine={})
    assert isinstance(ended, Refused | NoNumber | Bounded | Untried), ended
    if isinstance(ended, Untried):
        assert names(name, ended.names), ended
        assert ended.warned, "no UntriedWarning by the first step"
        assert names(name, ended.first), "the assumption is not printed first"
        strict = case(engine={"strict": True})
        assert isinstance(strict, NoNumber | Refused), strict
