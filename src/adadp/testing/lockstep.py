"""`influence`: the effect of one example on every release of a user's own loop, by two worlds in lockstep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from adadp.errors import ConfigurationError, PrivacyError
from adadp.mechanism.observation import under_test
from adadp.testing.awkward_examples import Example, Surroundings, awkward_examples, surroundings
from adadp.testing.changed_dataset import Change, items_of, with_changes
from adadp.testing.effects import ROUNDING, Effect, Influence
from adadp.testing.printed_epsilon import unobserved
from adadp.testing.watching import LOTS, RELEASED_NOTHING, Train
from adadp.testing.world import World

#: Awkward examples that are also tried in the place of an item that is in no lot.
_HELD_OUT = ("ordinary", "other class", "large", "not a number", "long")


def influence(
    train: Train,
    dataset: Any,
    *,
    examples: Any = "made",
    among: Iterable[str] | None = None,
    lots: int = LOTS,
    key: int = 0,
    delta: float = 1e-5,
) -> Influence:
    """Run `train(dataset)` with and without one example, in lockstep, and say how far a release moves.

    Lots, noise and the loop's random numbers are replaced by keyed ones. They are the same in both worlds, and so are
    N, q and the number of steps. The world without the example runs first, and the other one is given its releases.
    Nothing is written to a ledger's file, and the guarantee of every run inside is none.

    Args:
        train: the user's own function. It makes model, engine, DataLoader(dataset, ...) and loop inside, and is called
            several times; when `lots` lots were released it is left by an exception.
        dataset: map-style. It is given to `train` with one item replaced.
        examples: "made" (all awkward examples that can be made from the structure of the items), names of such
            examples, indices of the dataset, or items; or a list of these.
        among: which other examples: "own" (the dataset's), "alike" (all the same), "alike but one", "corrupt" (some
            beside it are NaN). All of them unless given.
        lots: how many lots each world runs. Some do not hold the example, which must have no effect on them. Others
            have a clipping bound near the norm of a typical gradient, where a fault shows most.
        key: of all draws; another one gives other lots.
        delta: at which the epsilon is computed that the engine would print.

    Returns:
        The largest effect, and that of every example. A pass proves nothing.

    Raises:
        ConfigurationError: there is nothing to compare, or an argument is invalid.

    """
    if under_test():
        raise ConfigurationError("a function under test cannot test another one: call one after the other")
    if lots < 1 or len(dataset) < 2:
        raise ConfigurationError("influence needs at least one lot and a dataset of two examples")
    chosen = _chosen(examples, dataset)
    wanted = None if among is None else [among] if isinstance(among, str) else list(among)
    places = surroundings(dataset)
    unknown = set(wanted or ()) - {each.name for each in places}
    if unknown:
        raise ConfigurationError(
            f"among= is one of {', '.join(each.name for each in places)}, not {', '.join(sorted(unknown))}"
        )
    comparison = _Comparison(train, dataset, lots, key)
    effects: list[Effect] = []
    for where in places:
        if wanted is not None and where.name not in wanted:
            continue
        here = where.examples
        tried = [each for each in chosen if here is None or each.name in here or not each.made]
        effects += [comparison.effect(example, where) for example in tried]
        if where.name == "own" and (aside := comparison.held_out()) is not None:
            apart = [each for each in chosen if each.index is None and (each.name in _HELD_OUT or not each.made)]
            effects += [
                comparison.effect(replace(each, name=f"{each.name} (held out)", index=aside), where) for each in apart
            ]
    return _result(comparison, effects, delta)


def _chosen(examples: Any, dataset: Any) -> list[Example]:
    asked = examples if isinstance(examples, list) else [examples]
    ready = {each.name: each for each in awkward_examples(dataset)}
    chosen: list[Example] = []
    for each in asked:
        if isinstance(each, str) and each == "made":
            chosen += ready.values()
        elif isinstance(each, str):
            if each not in ready:
                raise ConfigurationError(
                    f"no example called {each!r} can be made from this data; there are {', '.join(ready)}"
                )
            chosen.append(ready[each])
        elif isinstance(each, int) and not isinstance(each, bool):
            index = range(len(dataset))[each]
            chosen.append(Example(f"item {index}", dataset[index], index, made=False))
        else:
            chosen.append(Example(f"given {len(chosen)}", each, made=False))
    if not chosen:
        raise ConfigurationError("no examples were given")
    return chosen


class _Comparison:
    """Keeps first worlds, and compares second worlds with them."""

    def __init__(self, train: Train, dataset: Any, lots: int, key: int) -> None:
        self._train, self._dataset, self._lots, self._key = train, dataset, lots, key
        self._first: dict[tuple[str, int, bool], World | Effect] = {}
        self._target = 0
        self.last: World | None = None
        self.unrepeatable = ""

    def effect(self, example: Example, where: Surroundings) -> Effect:
        """The effect of an example on the releases."""
        name = example.name if where.name == "own" else f"{example.name} (others {where.name})"
        target = self._target if example.index is None else example.index
        first = self._without(target, where, anywhere=example.index is None)
        if isinstance(first, Effect):
            return replace(first, example=name)
        if example.index is None:
            target = self._target  # the loop may train on a part of the data, which the first world showed
            first = self._without(target, where)
            assert isinstance(first, World)
        world = self._world(target, where, inside=True, earlier=first)
        change = where.change(target)
        try:
            world.run(
                self._train,
                with_changes(self._dataset, Change({**change.items, target: example.item}, change.all_others)),
            )
        except Exception as error:
            return replace(_failed(error), example=name, lots=world.seen)
        self.last = world
        mixed = world.read_for_several() or world.worst.mixed
        return replace(world.worst, example=name, lots=world.seen, mixed=mixed)

    def held_out(self) -> int | None:
        """An item that is in no lot: it may have no effect at all (by a validation loss that decides, for instance)."""
        if self.last is None:
            return None
        held = {item for run in self.last.runs for item in items_of(run.loader.dataset, len(self._dataset))}
        return next((item for item in range(len(self._dataset)) if item not in held), None)

    def _world(self, target: int, where: Surroundings, **rest: Any) -> World:
        always = tuple((target + step) % len(self._dataset) for step in where.always)
        return World(target, key=self._key, lots=self._lots, always=always, **rest)

    def _without(self, target: int, where: Surroundings, anywhere: bool = True) -> World | Effect:
        """The first world: at the target's index is another item, and no lot holds it.

        Where the loop does not train on the target anyway, and the target may be `anywhere`: the first world of an item
        that it does train on.
        """
        known = self._first.get((where.name, target, anywhere))
        if known is None:
            known = self._first[where.name, target, anywhere] = self._run_without(target, where, anywhere)
        return known

    def _run_without(self, target: int, where: Surroundings, anywhere: bool) -> World | Effect:
        change = where.change(target)
        stand_in = self._dataset[(target + 1) % len(self._dataset)] if change.all_others is None else change.all_others
        items = {**change.items, target: stand_in}

        def run(earlier: World | None) -> World:
            world = self._world(target, where, earlier=earlier)
            world.run(self._train, with_changes(self._dataset, Change(items, change.all_others)))
            return world

        try:
            world = run(None)
            if not world.runs or not world.seen:
                return Effect("", skipped=True, error=RELEASED_NOTHING)
            if anywhere and not any(run.places for run in world.runs):
                return self._elsewhere(target, world, where)
            if not self._first and (again := run(world)).worst.value > ROUNDING:
                self.unrepeatable = again.worst.why or "its releases differ"
        except Exception as error:
            if where.name == "own" and not isinstance(error, PrivacyError):
                raise
            return _failed(error)
        self.last = self.last or world
        return world

    def _elsewhere(self, target: int, world: World, where: Surroundings) -> World | Effect:
        """The loop trains on a part of the data that does not hold the target: take one that it does hold."""
        for other in items_of(world.runs[0].loader.dataset, len(self._dataset)):
            if other != target:
                self._target = other
                return self._without(other, where)
        return Effect("", skipped=True, error="no item of the dataset is in a lot")


def _failed(error: Exception) -> Effect:
    """The engine refused the loop, or else the loop cannot take the example."""
    refused = isinstance(error, PrivacyError)
    return Effect("", refused=refused, skipped=not refused, error=f"{type(error).__name__}: {error}")


def _result(comparison: _Comparison, effects: list[Effect], delta: float) -> Influence:
    used = [effect for effect in effects if not effect.skipped]
    worst = max(used, key=lambda effect: (effect.value, effect.refused), default=Effect(""))
    refused = next((effect for effect in used if effect.refused), None)
    mixed = max((effect for effect in used if effect.mixed), key=lambda effect: effect.value, default=None)
    bound = 1.0 if comparison.last is None else comparison.last.runs[0].bound
    epsilon, reasons = (None, ()) if comparison.last is None else _printed(comparison.last, delta)
    if comparison.unrepeatable:
        reasons = (
            *reasons,
            f"two runs on the same data are not the same ({comparison.unrepeatable}): the loop draws from a generator "
            "of its own, or keeps something between calls. Seed it inside the function",
        )
    if comparison.unrepeatable:
        verdict = "no number"
    elif worst.value > bound * (1 + ROUNDING):
        verdict = "no number" if reasons else "exceeded"
    elif refused is not None:
        verdict, worst = "refused", refused
    elif mixed is not None and not reasons:
        verdict, worst = "mixed", replace(mixed, lot=None, parameter=None, kind=None, why=mixed.mixed)
    else:
        verdict = "no number" if reasons or not used else "within"
    return Influence(
        value=worst.value,
        bound=bound,
        verdict=verdict,
        epsilon=epsilon,
        delta=delta,
        example=worst.example or None,
        lot=worst.lot,
        parameter=worst.parameter,
        kind=worst.kind,
        why=worst.why,
        refused=None if refused is None else refused.error,
        reasons=tuple(reasons),
        effects=tuple(effects),
    )


def _printed(world: World, delta: float) -> tuple[float | None, tuple[str, ...]]:
    """The largest epsilon that an engine would print for the world's lots if it were not watched; or why none."""
    said = [unobserved(ledger, delta) for ledger in {id(run.ledger): run.ledger for run in world.runs}.values()]
    reasons = tuple(dict.fromkeys(reason for guarantee in said for reason in guarantee.reasons))
    if reasons:
        return None, reasons
    return max((guarantee.epsilon or 0.0 for guarantee in said), default=None), ()


__all__ = ["influence"]
