"""The long trial of a module, on a few examples that differ much from each other.

They are run as they are, with half of them replaced, and with one of them left out. For the examples that stay, no
output of any layer may change, every layer must see one row less where one example is left out, and a gradient that
starts at one example's output may not reach another. What the module stores between calls may not depend on examples.
Each `_refuse_...` method raises with the name of the layer at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adadp.checks.gradient_norms import CROSSED, crossing_parameter, module_of, norms_alike, scales
from adadp.checks.result_comparison import (
    ExampleAxis,
    coarse,
    common,
    differs,
    example_axis,
    example_dimension,
    largest_finite,
    one_row_less,
    same_bits,
)
from adadp.checks.running_statistics import STATISTICS
from adadp.checks.seeds import redraws
from adadp.checks.short_trial import given_items
from adadp.checks.trial_rows import KINDS, Row, all_differ, replaced, splits, unlike_rows
from adadp.checks.trial_runs import RunResult, TrialRuns
from adadp.errors import UnsupportedModuleError

_FEWEST, _MOST = 4, 8


class ModuleTrial:
    """One long trial of one module. `mean` says what a scalar loss is over examples: a mean, or a sum."""

    def __init__(self, runs: TrialRuns, dimensions: Sequence[int], mean: bool) -> None:
        self._runs, self._dimensions, self._mean = runs, dimensions, mean
        self._module = runs.module
        self._coarse = coarse(runs.module)
        self._redrawn: list[RunResult] = []  # the same rows with other random numbers
        self.places: list[ExampleAxis | None] = []  # where examples are in each returned tensor

    def conclusive(self) -> bool:
        """Raise where the module mixes these examples. False if they are too much alike to tell."""
        buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in self._module.named_buffers()}
        rows, whole = self._told_apart()
        self._rows, self._all = rows, range(len(rows))
        again = self._runs.observe(rows)
        redrawn, fewer = self._runs.observe(rows, seed=1), self._runs.observe(rows[1:])
        self._redrawn = [redrawn]
        self._refuse_statistics(buffers)
        self._refuse_memory(whole, again, fewer)
        decided = self._replace(whole, redrawn, fewer)
        self._redraw(whole, fewer)
        self._refuse_tables(whole, fewer)
        refuse_unlike(whole, fewer)
        self._refuse_counting(whole, fewer)
        self.places = places = [
            example_axis(one, less, len(rows), self._dimensions == (0,))
            for one, less in zip(whole.outputs, fewer.outputs, strict=False)
        ]
        self._refuse_nowhere(places, whole)
        self._refuse_crossing(places)
        if given_items(self._runs) or any(o.numel() == 1 for o in whole.outputs):
            self._refuse_shared_scalars(places, random=any(self._drawn(whole, fewer)))
        return decided

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _told_apart(self) -> tuple[list[Row], RunResult]:
        """The rows and the first run: so many that no layer has a second dimension of this length by chance."""
        for number in range(_FEWEST, _MOST + 1):
            rows = [Row(index) for index in unlike_rows(self._runs.arguments, number)]
            whole = self._runs.observe(rows)
            if not any(given.ndim > 1 and given.shape[:2] == (number, number) for _, given, _ in whole.seen.inputs):
                break
        return rows, whole

    def _replace(self, whole: RunResult, redrawn: RunResult, fewer: RunResult) -> bool:
        """Raise where replacing examples changes others. Whether each one was replaced by a different one."""
        own = self._runs.leaves(self._rows)
        changed: set[int] = set()
        for run, kept in enumerate(splits(len(self._rows))):
            others = [place for place in self._all if place not in kept]
            seed = run % 2  # with other random numbers every second time
            for kind in dict.fromkeys((KINDS[run % len(KINDS)], "own")):
                rows = replaced(self._rows, kept, kind)
                try:
                    leaves = self._runs.leaves(rows)
                    found = self._runs.observe_leaves(leaves, seed)
                except Exception:
                    if kind == "own":
                        raise
                    continue  # the model does not take such an example: the next kind is tried
                self._refuse_mixing(redrawn if seed else whole, found, fewer, kept)
                changed.update(p for p in others if all_differ(own, leaves, self._runs.arguments.dims, [p]))
                break
        return changed == set(self._all)

    def _redraw(self, whole: RunResult, fewer: RunResult) -> None:
        """Compare with more seeds, to meet what a module does with some probability only."""
        kept = [place for place in self._all if place % 2]
        for seed in range(2, 2 + redraws(whole.draws, own=bool(self._runs.before.generators))):
            base = self._runs.observe(self._rows, seed)
            try:
                found = self._runs.observe(replaced(self._rows, kept, "large"), seed)
            except Exception:  # the model does not take such examples
                found = self._runs.observe(replaced(self._rows, kept, "own"), seed)
            self._refuse_mixing(base, found, fewer, kept)
            self._redrawn.append(base)

    # ---- what is refused -----------------------------------------------------------------------------------------

    def _refuse_statistics(self, before: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, buffer in self._module.named_buffers():
            known, values = before.get(name, (None, buffer))
            if buffer is not known or not same_bits(buffer, values):
                if buffer is known:
                    buffer.data.copy_(values)  # what these runs wrote is not to stay
                raise UnsupportedModuleError(STATISTICS.format(name))

    def _refuse_memory(self, whole: RunResult, again: RunResult, fewer: RunResult) -> None:
        """Attributes may count calls or hold caches, but not depend on examples."""
        self._refuse_kept(whole, again, fewer)
        if whole.state.changed_from(self._runs.before) is None:
            return  # no attribute changed
        after_same = self._after(self._rows)
        try:
            after_other = self._after([Row(row.source, "large") for row in self._rows])
        except Exception:  # the model does not take such examples
            after_other = self._after([self._rows[0]] * len(self._rows))
        self._refuse_kept(after_same, after_other, fewer)
        keeper = after_same.state.changed_from(after_other.state)
        if keeper is not None:
            raise UnsupportedModuleError(_KEEPS.format(keeper))

    def _refuse_kept(self, one_run: RunResult, other_run: RunResult, fewer: RunResult) -> None:
        for name, one, other, less in _together(one_run, other_run, fewer):
            if differs(one, other, example_dimension(one, less), self._all):
                raise UnsupportedModuleError(_KEEPS.format(name))

    def _after(self, first: Sequence[Row]) -> RunResult:
        """A run on the rows right after a run on `first`, with the attributes that this one left."""
        try:
            self._runs.observe(first, keep_state=True)
            return self._runs.observe(self._rows)
        finally:
            self._runs.before.restore()

    def _refuse_mixing(self, whole: RunResult, found: RunResult, fewer: RunResult, kept: Sequence[int]) -> None:
        refuse_unlike(whole, found)
        for name, one, other, less in _together(whole, found, fewer):
            if differs(one, other, example_dimension(one, less), kept):
                who = name
                if self._was_given_mixed(name, whole, found, fewer, kept):
                    who = f"{name.rpartition('.')[0] or 'the model'} (what it gives to {name})"
                raise UnsupportedModuleError(
                    f"{who} mixes examples: replacing one example of a batch changes the output for the others, so a "
                    "bound on one example's gradient does not bound its influence. Use layers that work on each "
                    "example alone."
                )

    def _was_given_mixed(
        self, name: str, whole: RunResult, found: RunResult, fewer: RunResult, kept: Sequence[int]
    ) -> bool:
        """Whether the layer's input was mixed already, so that it is not the layer at fault."""
        inputs = zip(whole.seen.inputs, found.seen.inputs, fewer.seen.inputs, strict=False)
        return any(
            own == twin == name and differs(one, other, example_dimension(one, less), kept)
            for (own, one, _), (twin, other, _), (_, less, _) in inputs
        )

    def _drawn(self, whole: RunResult, fewer: RunResult) -> list[bool]:
        """For each output: whether it depends on random numbers. Several seeds, since two may give the same result."""
        found = [False] * len(list(_together(whole, whole, fewer)))
        for redrawn in self._redrawn:
            pairs = list(_together(whole, redrawn, fewer))
            last = len(found) - len(
                pairs
            )  # outputs of the outermost module only, where the seed changed which modules ran
            found[:last] = [True] * last
            for place, (_, one, twin, less) in enumerate(pairs, last):
                found[place] = found[place] or differs(one, twin, example_dimension(one, less), self._all)
        return found

    def _refuse_counting(self, whole: RunResult, fewer: RunResult) -> None:
        drawn = self._drawn(whole, fewer)
        for place, (name, one, _, less) in enumerate(_together(whole, whole, fewer)):
            dim = example_dimension(one, less)
            if dim is None or drawn[place] or torch.equal(one.narrow(dim, 1, less.shape[dim]), less):
                continue  # random outputs differ anyway, since fewer examples draw other numbers
            # Other shapes are summed in another order, so the tolerance is larger here.
            rest = one.narrow(dim, 1, less.shape[dim])
            size = largest_finite(rest, 0.0) if rest.is_floating_point() else 0.0
            least = max(1e-4, self._coarse * size if self._coarse > 1e-2 else 0.0)
            if differs(rest, less, dim, range(rest.shape[dim]), self._coarse, least):
                raise UnsupportedModuleError(
                    f"{name} mixes examples: its output for an example depends on how many others there are, or where "
                    "among them it is. Leave the mean over examples to the loss."
                )

    def _refuse_tables(self, whole: RunResult, fewer: RunResult) -> None:
        for (name, _, before), (_, _, after) in zip(whole.seen.inputs, fewer.seen.inputs, strict=False):
            if not one_row_less(before, after, len(self._rows), self._dimensions):
                raise UnsupportedModuleError(
                    f"{name} does not see one row less when there is one example less (a table of positions, for "
                    "instance, or examples folded into another dimension): its gradients cannot be told apart by "
                    "example. Keep examples in the first dimension (batch_first=False for [T, N, ...]), expand a table "
                    "over the batch before the layer, or freeze the layer."
                )

    def _refuse_nowhere(self, places: Sequence[ExampleAxis | None], whole: RunResult) -> None:
        if any(place is not None for place in places) or any(leaf.numel() == 1 for leaf in whole.outputs):
            return
        raise UnsupportedModuleError(
            f"{self._runs.capture.module_name(self._module)} returns no tensor with a row for each example, so it is "
            "not known whether it keeps them apart. Keep examples in the first dimension (batch_first=False for "
            "[T, N, ...]) from the loader to the loss."
        )

    def _refuse_crossing(self, places: Sequence[ExampleAxis | None]) -> None:
        """Scaling each example's output gradient by a factor must scale that example's parameter gradients by it."""
        factors = scales(len(self._rows))
        plain = self._runs.norms(self._rows, lambda outputs: cotangent(outputs, places, [1.0] * len(factors)))
        if not plain:
            return
        scaled = self._runs.norms(self._rows, lambda outputs: cotangent(outputs, places, factors))
        crossing = crossing_parameter(plain, scaled, factors)
        if crossing is not None:
            raise UnsupportedModuleError(CROSSED.format(module_of(crossing, self._runs.capture)))
        # Only this finds what changes gradients by a value of the batch without changing outputs (hooks, autograd).
        kept = [place for place in self._all if place % 2]
        try:
            rows = replaced(self._rows, kept, "large")
            other = self._runs.norms(rows, lambda outputs: cotangent(outputs, places, [1.0] * len(factors)))
        except UnsupportedModuleError:
            raise
        except Exception:
            return  # the model does not take such examples
        if not norms_alike(plain, other, kept, max(self._coarse, 1e-2)):
            raise UnsupportedModuleError(_GRADIENTS.format(self._runs.capture.module_name(self._module)))

    def _refuse_shared_scalars(self, places: Sequence[ExampleAxis | None], random: bool) -> None:
        """A loss that the module computes itself must be a plain mean (or sum) over examples."""
        name = self._runs.capture.module_name(self._module)
        if given_items(self._runs):
            raise UnsupportedModuleError(_SCALAR.format(name))

        def total(outputs: list[Tensor]) -> Tensor | None:
            scalars = [
                leaf.sum().float()
                for leaf, place in zip(outputs, places, strict=False)
                if leaf.numel() == 1 and place is None and leaf.is_floating_point() and leaf.requires_grad
            ]
            return sum(scalars) if scalars else None  # type: ignore[return-value]

        base = self._runs.norms(self._rows, total)
        if not base:
            return
        count = len(self._rows)
        for kept, kind in (([0, 2], "large"), ([1, 3], "ignored"), ([0, 1], "own")):
            try:
                other = self._runs.norms(replaced(self._rows, kept, kind), total)
            except UnsupportedModuleError:
                raise
            except Exception:
                continue
            if not norms_alike(base, other, kept, self._coarse):
                raise UnsupportedModuleError(_SCALAR.format(name))
        if not random:
            fewer = self._runs.norms(self._rows[1:], total)
            scale = (count - 1) / count if self._mean else 1.0
            if not norms_alike(base, fewer, range(1, count), self._coarse, scale, missing=1):
                raise UnsupportedModuleError(_SCALAR.format(name))


_KEEPS = (
    "{} keeps something of the examples it saw (a queue, a centre, a hidden state) and uses it for later ones: it "
    "leaves its lot without noise. Compute it anew from each batch, or keep nothing that depends on examples."
)
_GRADIENTS = (
    "{} mixes examples in its backward pass: replacing some examples of a batch changes the gradients of the others. "
    "Use layers, hooks and autograd functions that work on each example alone."
)
_SCALAR = (
    "{} computes a loss inside that mixes examples: one example's share of it changes with the others, as in a mean "
    "over all tokens of a batch. Give it no labels (nor num_items_in_batch), and compute a loss for each example "
    "outside: optimizer.backward(adadp.losses.causal_lm(model(...).logits, labels))."
)


def refuse_unlike(one: RunResult, other: RunResult) -> None:
    """Raise where what is taken to be free of examples differs between runs on different examples, bit for bit.

    Examples of other lengths may make it longer; what was there stays.
    """
    for (name, first), (other_name, second) in zip(one.seen.free, other.seen.free, strict=False):
        if name != other_name:
            return  # other modules ran from here on, for random numbers
        if not torch.equal(*common(first, second)):
            raise UnsupportedModuleError(_UNLIKE.format(name))


_UNLIKE = (
    "{} is given something without a row for each example that still depends on the examples (a maximum over the "
    "batch, the values of the first one): their gradients cannot be told apart. Keep examples in the first dimension, "
    "or compute it from each example alone."
)


def cotangent(
    outputs: Sequence[Tensor], places: Sequence[ExampleAxis | None], factors: Sequence[float]
) -> Tensor | None:
    """Sum of all outputs with random weights, each example's times its factor; None where no output has examples."""
    generator = torch.Generator().manual_seed(0)
    total: Tensor | None = None
    for leaf, place in zip(outputs, places, strict=False):
        if place is None or not leaf.requires_grad or not leaf.is_floating_point():
            continue
        apart = place.unfolded(leaf)
        weights = torch.randn(apart.shape, generator=generator)
        weights = (weights * torch.tensor(factors).view(-1, *[1] * (apart.ndim - 1))).to(leaf.device)
        term = (apart.to(torch.promote_types(leaf.dtype, torch.float32)) * weights).sum()
        total = term if total is None else total + term
    return total


def _together(*runs: RunResult) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The outputs of each layer in three runs, with its name; of the outermost only, where other layers ran."""
    lists = [run.seen.outputs for run in runs]
    if len({tuple(name for name, _ in given) for given in lists}) > 1:
        lists = [given[-1:] for given in lists]
    for (name, first), (_, second), (_, third) in zip(*lists, strict=False):
        for one, other, another in zip(first, second, third, strict=False):
            yield name, one, other, another
