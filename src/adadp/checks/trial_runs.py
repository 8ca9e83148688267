"""Runs of a module, or of a loss with the modules it calls, inside a trial.

Each run takes chosen rows and given random numbers, and afterwards puts the module's attributes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adadp.checks.containers import Arguments, tensors_in
from adadp.checks.gradient_norms import Norms, example_norms
from adadp.checks.module_state import ModuleState
from adadp.checks.result_comparison import differs
from adadp.checks.seeds import Draws, seed_of, seeded
from adadp.checks.trial_rows import Row, replaced, unlike_rows, with_rows
from adadp.errors import PrivacyError, UnsupportedModuleError
from adadp.gradients import Capture
from adadp.gradients.capture.readings import UnlearntError
from adadp.gradients.capture.work import Observed

Result = TypeVar("Result")
#: The scalar that is differentiated, computed from the tensors that a run returns; None where there is none.
Total = Callable[[list[Tensor]], Tensor | None]


_OTHER_ROWS = (
    "{} mixes examples, or is given them in another order than that of the batch: what it gets as one example's rows "
    "changes with another example (sequences first, sorted examples, as many rows as the data say). Keep examples in "
    "the first dimension, from the loader to the loss."
)
#: Rounds of learning: each may show operations on what the one before found to be free of examples.
_LEARNING = 8


@dataclass(frozen=True)
class RunResult:
    """One run: inputs and outputs of every layer, the tensors returned, the attributes afterwards, what was drawn."""

    seen: Observed
    outputs: list[Tensor]
    state: ModuleState
    draws: Draws

    def tensors(self) -> list[Tensor]:
        """All outputs: those of each layer, then those of the whole."""
        return [*(leaf for _, leaves in self.seen.outputs for leaf in leaves), *self.outputs]


class TrialRuns:
    """Runs one module on rows of the arguments that it was called with.

    `trial` is the number of the trial: each has random numbers of its own.
    """

    def __init__(self, capture: Capture, module: nn.Module, arguments: Arguments, trial: int = 0) -> None:
        self.capture, self.module, self.arguments, self.trial = capture, module, arguments, trial
        self.draws = Draws()  # what the runs of `norms` drew from

    @cached_property
    def before(self) -> ModuleState:
        """The module's attributes before the first run (which is when this is first read)."""
        return ModuleState(self.module)

    @property
    def name(self) -> str:
        """What a refusal calls it."""
        return self.capture.module_name(self.module)

    def call(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors that are returned for these leaves."""
        args, kwargs = self.arguments.parts.rebuilt(leaves)
        return tensors_in(self.module(*args, **kwargs))

    def leaves(self, rows: Sequence[Row]) -> list[Any]:
        """The leaves of the arguments with these rows."""
        names = self.arguments.parts.names
        return [
            with_rows(leaf, dim, rows, name) for (leaf, dim), name in zip(self.arguments.pairs(), names, strict=True)
        ]

    def aside(self, leaves: Sequence[Any]) -> AbstractContextManager[None]:
        """Runs on these leaves, apart from the microbatch."""
        return self.capture.aside(self.arguments.rows_of(leaves), trial=True)

    def learn(self) -> None:
        """Learn where the examples are in what layers and operations are given: with four examples, and with three.

        Raises:
            UnsupportedModuleError: it is elsewhere than in earlier lots.
        """
        rows = [Row(index) for index in unlike_rows(self.arguments, 4)]
        first = not self.capture.readings.learnt
        self._learn_from(rows)
        if first:  # parts that training leaves out now and then
            with evaluating(self.module):
                self._learn_from(rows)

    def _learn_from(self, rows: Sequence[Row]) -> None:
        readings = self.capture.readings
        readings.begin()
        try:
            for _ in range(_LEARNING):
                for number in (4, 3):
                    self.outputs(self.leaves(rows[:number]))
                if readings.settled():
                    break
            self._refuse_other_rows(rows)
        except BaseException:
            readings.abandon()
            raise
        readings.end()

    def _refuse_other_rows(self, rows: Sequence[Row]) -> None:
        """Raise where what is read as an example's rows changes with another example: they are in another order."""
        kept = [1, 3]
        with self.capture.readings.rows_seen() as base:
            self.outputs(self.leaves(rows))
        for kind in ("large", "own"):
            with self.capture.readings.rows_seen() as found:
                try:
                    self.outputs(self.leaves(replaced(rows, kept, kind)))
                except PrivacyError:
                    raise
                except Exception:
                    if kind == "own":
                        raise
                    continue  # the model does not take such examples
            break
        if [name for name, _ in base] != [name for name, _ in found]:
            return  # other modules ran, for random numbers
        for (name, one), (_, other) in zip(base, found, strict=True):
            if one is None or other is None or one.shape != other.shape or differs(one, other, 0, kept):
                raise UnsupportedModuleError(_OTHER_ROWS.format(name))

    def on(self, arguments: Arguments) -> TrialRuns:
        """The same on other arguments."""
        return TrialRuns(self.capture, self.module, arguments, self.trial)

    def observe(
        self, rows: Sequence[Row], seed: int = 0, keep_state: bool = False, read_state: bool = True
    ) -> RunResult:
        """Run on these rows, watching every layer.

        With `keep_state` the attributes stay as the run leaves them; with `read_state=False` they are not read.
        """
        return self.observe_leaves(self.leaves(rows), seed, keep_state, read_state)

    def observe_leaves(
        self, leaves: Sequence[Any], seed: int = 0, keep_state: bool = False, read_state: bool = True
    ) -> RunResult:
        """The same on given leaves."""
        return self._having_learnt(leaves, lambda: self._observe(leaves, seed, keep_state, read_state))

    def _having_learnt(self, leaves: Sequence[Any], run: Callable[[], Result]) -> Result:
        """A run on these leaves. If it meets lengths that nothing was learnt of, that is done first."""
        try:
            return run()
        except UnlearntError:
            if self.capture.readings.learning or self.capture.readings.covers():
                raise
            self.on(self.arguments.with_leaves(list(leaves), self.arguments.rows_of(leaves))).learn()
            return run()

    def _observe(self, leaves: Sequence[Any], seed: int, keep_state: bool, read_state: bool) -> RunResult:
        before = self.before
        try:
            if seed:
                before.reseed(seed)
            with seeded(seed_of(self.trial, seed)) as draws, self.aside(leaves), self.capture.observing() as seen:
                outputs = [leaf.detach().clone() for leaf in self.call(leaves)]
            if seen.outputs and not isinstance(self, LossRuns):
                # The outermost module's outputs, also where they are in an object that the capture does not flatten.
                seen.outputs[-1] = seen.outputs[-1][0], outputs
            return RunResult(seen, outputs, ModuleState(self.module) if read_state else before, draws)
        finally:
            if not keep_state:
                before.restore()

    def outputs(self, leaves: Sequence[Any], seed: int = 0) -> list[Tensor]:
        """The tensors returned for these leaves, without watching layers."""
        before = self.before
        try:
            with seeded(seed_of(self.trial, seed)), self.aside(leaves), torch.enable_grad():
                return [leaf.detach() for leaf in self.call(leaves)]
        finally:
            before.restore()

    def norms(self, rows: Sequence[Row], total: Total, seed: int = 0) -> Norms:
        """Squared norms of the examples' gradients of `total(outputs)`, by parameter and by argument."""
        leaves, given = self.leaves(rows), {}
        for place, (leaf, dim) in enumerate(self.arguments.pairs()):
            # What another part of the model computed is a leaf of its own graph here.
            if isinstance(leaf, Tensor) and leaf.requires_grad and dim is not None:
                given[place] = leaves[place].requires_grad_()
                leaves[place] = given[place] * 1  # modules may write into their arguments
        return self.norms_of(leaves, len(rows), total, seed, given)

    def norms_of(
        self, leaves: Sequence[Any], count: int, total: Total, seed: int = 0, given: dict[int, Tensor] | None = None
    ) -> Norms:
        """The same for leaves of `count` rows, by parameter and by those of them that are `given` with their place."""
        return self._having_learnt(leaves, lambda: self._norms(leaves, count, total, seed, given or {}))

    def _norms(self, leaves: Sequence[Any], count: int, total: Total, seed: int, given: dict[int, Tensor]) -> Norms:
        before = self.before
        try:
            with seeded(seed_of(self.trial, seed)) as draws, self.aside(leaves), torch.enable_grad():
                scalar = total(self.call(leaves))
                if scalar is None:
                    return {}
                self.capture.differentiate(scalar, *given.values())
                norms = {**example_norms(self.capture, count), **_argument_norms(given, self.arguments.dims)}
            self.draws.add(draws)
            return norms
        finally:
            before.restore()


class LossRuns(TrialRuns):
    """Runs `loss(*batch)`, one loss for each example, [n], or one number, with the modules that it calls."""

    def __init__(self, capture: Capture, loss: Callable[..., Tensor], arguments: Arguments, trial: int = 0) -> None:
        super().__init__(capture, capture.module, arguments, trial)
        self._loss = loss

    @property
    def name(self) -> str:
        return "the loss"

    def on(self, arguments: Arguments) -> LossRuns:
        return LossRuns(self.capture, self._loss, arguments, self.trial)

    def call(self, leaves: Sequence[Any]) -> list[Tensor]:
        return [self._loss(*self.arguments.parts.rebuilt(leaves))]


def _argument_norms(given: dict[int, Tensor], dims: Sequence[int | None]) -> Norms:
    norms = {}
    for place, leaf in given.items():
        dim = dims[place]
        if leaf.grad is not None and dim is not None:
            norms[f"argument {place}"] = leaf.grad.movedim(dim, 0).flatten(1).double().square().sum(1)
    return norms


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without calling `eval()`: dropout would draw other numbers for other shapes."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
