"""One lot is out at a time: asking for the next one before the step is refused, and the guarantee is then none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from adadp.errors import PrivacyError, TrainingLoopError
from soundness.field.stand import Bounded, End, Loop, NoNumber, Refused, World, by_example, compare, plain, run, worst

EXAMPLES, LOT = 64, 8
SEEDS = range(3)  # 24 lots: example 0 is in some of them and left out of others


def line() -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Rows(Dataset[Tensor]):
    """A dataset of one's own, as people write them: it is not read by the engine's shortcut for tensors."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def rows(present: bool) -> Tensor:
    """Example 0 pulls along the first axis and all others along the second. Without it, it pulls nowhere."""
    features = torch.zeros(EXAMPLES, 4)
    features[1:, 1] = 10.0
    features[1:, 2] = torch.linspace(-1, 1, EXAMPLES - 1)  # examples that are all alike are tried again and again
    features[0, 0] = 10.0 if present else 0.0
    return features


def with_lengths(present: bool) -> TensorDataset:
    lengths = torch.ones(EXAMPLES)
    lengths[0] = 9.0
    return TensorDataset(rows(present), lengths)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return model(batch if isinstance(batch, Tensor) else batch[0]).mean()


def ending(
    loop: Loop,
    data: Callable[[bool], Dataset[Any]] = lambda present: Rows(rows(present)),
    seeds: range = SEEDS,
    **settings: Any,
) -> End:
    """The worst end over a few seeds, that is, over many lots."""
    limit = 2.0 if settings.get("sampling") == "fixed" else 1.0
    settings.setdefault("lot", LOT)
    return worst(
        compare(*(run(data(present), line, mean, loop, seed=seed, **settings) for present in (True, False)), limit)
        for seed in seeds
    )


def assert_refused_for_good(ended: End) -> None:
    """Refused by the engine, and catching the error does not bring a number back."""
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended
    assert ended.epsilon is None, "an epsilon although lots were looked at and not released"


# ---- looking ahead ------------------------------------------------------------------------------------------------


def one_ahead(world: World) -> None:
    """Prefetchers on CUDA streams, accelerate's and Lightning's loaders: the next batch is fetched first."""
    batches = iter(world.loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        step(world, batch)


def step(world: World, batch: Any) -> None:
    world.optimizer.zero_grad()
    world.loss(batch).backward()
    world.optimizer.step()


AHEAD: dict[str, dict[str, Any]] = {
    "padded": {"pad_lots": True},
    "unpadded": {},
    "in pieces": {"max_physical_batch_size": 4},
    "padded, in pieces": {"pad_lots": True, "max_physical_batch_size": 4},
    "fixed size": {"sampling": "fixed"},
    "lots of one": {"lot": 1},  # where a wrong lot is told by its size least often
}


@pytest.mark.parametrize("settings", AHEAD.values(), ids=AHEAD)
def test_looking_ahead_is_refused(settings: dict[str, Any]) -> None:
    assert_refused_for_good(ending(one_ahead, with_lengths, **settings))


def evaluation_within_the_epoch(world: World) -> None:
    """A training accuracy every few steps, over the only loader at hand."""
    for number, batch in enumerate(world.loader):
        step(world, batch)
        if number == 2:
            training_accuracy(world)


def evaluation_before_the_step(world: World) -> None:
    """The same between fetching a batch and stepping on it."""
    for number, batch in enumerate(world.loader):
        if number == 2:
            training_accuracy(world)
        step(world, batch)


def training_accuracy(world: World) -> None:
    with torch.no_grad():
        sum(float(world.model(batch).sum()) for batch in world.loader)


def in_pairs(world: World) -> None:
    """zip(loader, loader): two views, mixup partners, source and target of the same data."""
    for batch, _ in zip(world.loader, world.loader, strict=False):
        step(world, batch)


def as_a_list(world: World) -> None:
    """batches = list(loader), to shuffle them or to count them."""
    for batch in list(world.loader):
        step(world, batch)


def one_batch_kept(world: World) -> None:
    """The first batch is kept and trained on wherever the next has its size: 'overfit one batch', hard batches."""
    kept = None
    for batch in world.loader:
        kept = batch if kept is None else kept
        step(world, kept if len(kept) == len(batch) else batch)


LOOKED_AT = (evaluation_within_the_epoch, evaluation_before_the_step, in_pairs, as_a_list)


@pytest.mark.parametrize("pad", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("loop", LOOKED_AT, ids=lambda loop: loop.__name__)
def test_lots_that_are_looked_at_and_not_released_are_refused(loop: Loop, pad: bool) -> None:
    assert_refused_for_good(ending(loop, pad_lots=pad))


@pytest.mark.parametrize("settings", [{"pad_lots": True}, {"sampling": "fixed"}], ids=["padded", "fixed size"])
def test_a_batch_of_an_earlier_lot_is_not_trained_on_again(settings: dict[str, Any]) -> None:
    ended = ending(one_batch_kept, seeds=range(2), **settings)
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


def test_a_kept_batch_that_happens_to_have_the_right_size_is_not_trained_on_again() -> None:
    # Of 8 seeds some have a lot of the size of their first.
    ends = [ending(one_batch_kept, seeds=range(seed, seed + 1)) for seed in range(8)]
    assert any(isinstance(ended, Refused) for ended in ends)
    assert all(isinstance(ended, Refused | Bounded) for ended in ends), ends


@pytest.mark.parametrize("pad", [False, True], ids=["unpadded", "padded"])
def test_one_batch_is_released_once(pad: bool) -> None:
    def overfit_one_batch(world: World) -> None:
        batch = next(iter(world.loader))
        for _ in range(3):
            step(world, batch)

    ended = ending(overfit_one_batch, pad_lots=pad)
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


# ---- leaving an iteration -----------------------------------------------------------------------------------------


def a_peek_first(world: World) -> None:
    """next(iter(loader)), to see the shapes."""
    next(iter(world.loader))
    plain(world)


def broken_off(world: World) -> None:
    """Epochs of at most so many batches."""
    for _ in range(3):
        for number, batch in enumerate(world.loader):
            step(world, batch)
            if number == 3:
                break


@pytest.mark.parametrize("pad", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("loop", [a_peek_first, broken_off], ids=lambda loop: loop.__name__)
def test_an_iteration_may_be_left(loop: Loop, pad: bool) -> None:
    ended = ending(loop, pad_lots=pad)
    assert isinstance(ended, Bounded), ended


def test_lots_that_were_left_are_counted() -> None:
    def three_peeks(world: World) -> None:
        for _ in range(3):
            next(iter(world.loader))
        plain(world)

    ended = ending(three_peeks, seeds=range(1))
    assert isinstance(ended, Bounded), ended
    assert ended.guarantee is not None
    left = [note for note in ended.guarantee.notes if "lot" in note and "left" in note]
    assert any("3" in note for note in left), ended.guarantee.notes
    whole = ending(plain, seeds=range(1))
    assert isinstance(whole, Bounded), whole
    assert whole.guarantee is not None
    assert not any("left" in note for note in whole.guarantee.notes)


def test_an_iteration_within_a_lot_may_be_left() -> None:
    def first_pieces(world: World) -> None:
        for _ in range(3):
            for batch in world.loader:
                step(world, batch)
                if not world.loader.current.last:
                    break

    assert isinstance(ending(first_pieces, max_physical_batch_size=4), Bounded)


@pytest.fixture
def workers_end() -> Iterator[None]:
    """Ends workers that a loop left behind: where the garbage collector finds them, each takes five seconds."""
    gc.disable()
    yield
    for each in gc.get_objects():
        if type(each) is _MultiProcessingDataLoaderIter:
            each._shutdown_workers()
    gc.enable()


@pytest.mark.usefixtures("workers_end")
def test_workers_may_be_left() -> None:
    ended = ending(broken_off, seeds=range(1), loader={"num_workers": 1})
    assert isinstance(ended, Bounded), ended


@pytest.mark.usefixtures("workers_end")
@pytest.mark.parametrize("pad", [False, True], ids=["unpadded", "padded"])
def test_evaluation_with_workers_that_stay_is_refused(pad: bool) -> None:
    workers = {"num_workers": 1, "persistent_workers": True}
    assert_refused_for_good(ending(evaluation_within_the_epoch, seeds=range(1), loader=workers, pad_lots=pad))


@pytest.mark.parametrize("settings", [{}, {"pad_lots": True}, {"max_physical_batch_size": 4}, {"sampling": "fixed"}])
def test_a_plain_loop_is_bounded(settings: dict[str, Any]) -> None:
    assert isinstance(ending(plain, with_lengths, **settings), Bounded)


# ---- padding ------------------------------------------------------------------------------------------------------


def longest_first(batch: list[tuple[Tensor, Tensor]]) -> Any:
    """The classic collate for pack_padded_sequence."""
    batch.sort(key=lambda pair: -pair[1].item())
    return default_collate(batch)


def last_first(batch: list[tuple[Tensor, Tensor]]) -> Any:
    return default_collate(batch[::-1])


@pytest.mark.parametrize("pad", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("collate", [longest_first, last_first], ids=lambda collate: collate.__name__)
def test_a_collate_may_change_the_order(collate: Callable[..., Any], pad: bool) -> None:
    ended = ending(plain, with_lengths, loader={"collate_fn": collate}, pad_lots=pad)
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("collate", [longest_first, last_first], ids=lambda collate: collate.__name__)
def test_the_example_itself_counts_where_the_order_changes(collate: Callable[..., Any]) -> None:
    """Not bounded by leaving it out: over these lots it moves as many releases as it is drawn for."""
    moved = 0
    for seed in SEEDS:
        worlds = [
            run(with_lengths(on), line, mean, lot=LOT, seed=seed, pad_lots=True, loader={"collate_fn": collate})
            for on in (True, False)
        ]
        assert not any(world.error for world in worlds), worlds[0].error
        moved += sum(float((p - q).norm()) > 0.9 for p, q in zip(worlds[0].releases, worlds[1].releases, strict=True))
    assert moved >= 1


# ---- batches that are skipped -------------------------------------------------------------------------------------


def scored(broken: bool) -> TensorDataset:
    """Two hundred rows, of which the first has a missing value in one of the worlds."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    if broken:
        inputs[0, 2] = float("nan")
    return TensorDataset(inputs, labels)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def skipping(skip: Callable[[Tensor], bool]) -> Loop:
    """if not torch.isfinite(loss): continue -- one of the commonest lines in training loops."""

    def loop(world: World) -> None:
        for _ in range(4):
            for inputs, labels in world.loader:
                loss = functional.cross_entropy(world.model(inputs), labels)
                if skip(loss):
                    continue
                world.optimizer.zero_grad()
                loss.backward()
                world.optimizer.step()

    return loop


SKIPS: dict[str, Callable[[Tensor], bool]] = {
    "not finite": lambda loss: not torch.isfinite(loss),
    "spikes": lambda loss: not loss < 50,
}


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_skipped_lots_are_refused(skip: Callable[[Tensor], bool]) -> None:
    worlds = [run(scored(broken), net, loop=skipping(skip), lot=40) for broken in (True, False)]
    assert_refused_for_good(compare(*worlds))


@pytest.mark.usefixtures("workers_end")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_lot_of_an_epoch_is_not_skipped_either(workers: int) -> None:
    """The loader has no more to give, and the lot that is out was not released."""

    def but_the_last(world: World) -> None:
        for _ in range(2):
            for number, batch in enumerate(world.loader, 1):
                if number < len(world.loader):
                    step(world, batch)

    ended = ending(but_the_last, seeds=range(1), loader={"num_workers": workers})
    assert isinstance(ended, Refused | NoNumber), ended
    assert not isinstance(ended, Refused) or ended.epsilon is None, ended


def test_errors_that_the_loop_catches_are_remembered() -> None:
    """try: ... except Exception: continue, around a step, so that one bad batch does not end the night's run."""

    def careless(world: World) -> None:
        for inputs, labels in world.loader:
            try:
                loss = functional.cross_entropy(world.model(inputs), labels)
                if not torch.isfinite(loss):
                    raise ValueError("a bad batch")
                world.optimizer.zero_grad()
                loss.backward()
                world.optimizer.step()
            except (ValueError, PrivacyError):
                continue

    worlds = [
        run(scored(broken), net, loop=lambda world: [careless(world) for _ in range(4)], lot=40)
        for broken in (True, False)
    ]
    ended = compare(*worlds)
    assert isinstance(ended, Refused | NoNumber), ended
    assert not isinstance(ended, Refused) or ended.epsilon is None


@pytest.mark.parametrize("front_door", [False, True], ids=["scalar", "by example"])
def test_examples_may_be_left_out_of_a_step(front_door: bool) -> None:
    """The way out: what the loop does not want counts for nothing, and the lot is released all the same."""

    def without_the_missing(world: World) -> None:
        for inputs, labels in world.loader:
            losses = functional.cross_entropy(world.model(inputs), labels, reduction="none")
            keep = losses.isfinite()
            world.optimizer.zero_grad()
            if front_door:
                world.optimizer.backward(losses)
            else:
                losses.mean().backward()
            world.optimizer.step(keep=keep)

    worlds = [run(scored(broken), net, loop=without_the_missing, lot=100) for broken in (True, False)]
    ended = compare(*worlds, limit=2.0)  # its row is replaced by one with a missing value
    assert isinstance(ended, Bounded), ended
    assert worlds[0].releases


def test_a_missing_value_needs_no_care_at_all() -> None:
    ended = compare(*(run(scored(broken), net, cross_entropies, by_example, lot=100) for broken in (True, False)))
    assert isinstance(ended, Bounded), ended


def cross_entropies(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_what_is_left_out_adds_nothing() -> None:
    """keep= is a mask of examples, not a hint: only the kept ones are in the release."""

    def only_the_first(world: World) -> None:
        for inputs, labels in world.loader:
            world.optimizer.zero_grad()
            world.optimizer.backward(functional.cross_entropy(world.model(inputs), labels, reduction="none"))
            world.optimizer.step(keep=torch.arange(len(inputs)) == 0)

    data = scored(False)
    changed = TensorDataset(torch.cat([data.tensors[0][:1], -data.tensors[0][1:]]), data.tensors[1])
    one, other = (run(each, net, loop=only_the_first) for each in (data, changed))
    assert one.error is None, one.error
    assert other.error is None, other.error
    torch.testing.assert_close(one.releases, other.releases)


PIECES: dict[str, Callable[[Any], bool]] = {
    "the first piece of each lot": lambda current: current.index == 0 and not current.last,
    "the last piece of every second lot": lambda current: bool(current.last and current.lot % 2),
    "every second lot": lambda current: bool(current.lot % 2),
}


@pytest.mark.parametrize("skip", PIECES.values(), ids=PIECES)
def test_skipped_pieces_are_refused(skip: Callable[[Any], bool]) -> None:
    def loop(world: World) -> None:
        for batch in world.loader:
            if not skip(world.loader.current):
                step(world, batch)

    assert_refused_for_good(ending(loop, seeds=range(2), max_physical_batch_size=4))


def test_a_backward_pass_without_its_step_is_refused() -> None:
    def every_second_step(world: World) -> None:
        for number, batch in enumerate(world.loader):
            world.loss(batch).backward()
            if number % 2 == 0:
                world.optimizer.step()

    assert_refused_for_good(ending(every_second_step, seeds=range(2)))


# ---- what happens once a batch, where lots come in pieces ----------------------------------------------------------


def scheduled(world: World, factor: Callable[[int], float], careful: bool) -> None:
    """scheduler.step() after each optimizer.step(). How often that was is in every checkpoint (last_epoch)."""
    schedule = torch.optim.lr_scheduler.LambdaLR(world.optimizer, factor)
    for _ in range(2):
        for batch in world.loader:
            step(world, batch)
            if not careful or world.optimizer.stepped:
                schedule.step()
    world.also(schedule.last_epoch)


def one_piece_more(loop: Loop) -> End:
    """Lots of all examples in pieces of eight: the ninth example is a piece of its own."""
    features = rows(True)[:9]
    worlds = [
        run(Rows(features[:count]), line, mean, loop, lr=1e-9, seed=1, max_physical_batch_size=8) for count in (9, 8)
    ]
    return compare(*worlds)


def test_a_rate_that_changes_within_a_lot_is_refused() -> None:
    ended = one_piece_more(lambda world: scheduled(world, lambda count: 0.9**count, careful=False))
    assert isinstance(ended, Refused), ended
    assert isinstance(ended.error, TrainingLoopError), ended


def test_a_schedule_that_counts_pieces_and_changes_nothing_is_not_refused() -> None:
    """The rate stays what it was. Its counter tells how many pieces there were: for the curator (threat-model.md)."""
    ended = one_piece_more(lambda world: scheduled(world, lambda count: 1.0, careful=False))
    assert not isinstance(ended, Refused | NoNumber), ended


def test_a_schedule_that_counts_lots_is_right() -> None:
    ended = one_piece_more(lambda world: scheduled(world, lambda count: 0.9**count, careful=True))
    assert isinstance(ended, Bounded), ended


@pytest.mark.parametrize("careful", [False, True])
def test_one_cycle_over_as_many_lots_as_the_loader_says(careful: bool) -> None:
    """OneCycleLR(total_steps=len(loader) * epochs) ends early where it is stepped once a piece."""

    def one_cycle(world: World) -> None:
        total = len(world.loader) * 2
        schedule = torch.optim.lr_scheduler.OneCycleLR(world.optimizer, max_lr=1e-3, total_steps=total)
        for _ in range(2):
            for batch in world.loader:
                step(world, batch)
                if not careful or world.optimizer.stepped:
                    schedule.step()

    ended = ending(one_cycle, seeds=range(1), max_physical_batch_size=4, lr=1e-3)
    assert isinstance(ended, Bounded if careful else Refused), ended


def test_a_schedule_where_every_lot_is_one_batch_is_right() -> None:
    """The loop of every tutorial: nothing is changed within a lot."""
    ended = ending(lambda world: scheduled(world, lambda count: 0.9**count, careful=False), seeds=range(1), lr=1e-9)
    assert isinstance(ended, Bounded), ended
