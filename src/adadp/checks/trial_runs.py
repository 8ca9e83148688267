"""Runs of a module, or of a loss with all that it calls, for trial: on chosen rows, with the same random numbers,
leaving nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.containers import Parts, tensors_in
from adadp.checks.gradient_norms import Norms, example_norms
from adadp.checks.module_state import ModuleState
from adadp.checks.seeds import Draws, seed_of, seeded
from adadp.checks.unlike_rows import Row, with_rows
from adadp.gradients import Capture
from adadp.gradients.capture.capture import Observed

Total = Callable[[list[Tensor]], Tensor | None]


@dataclass(frozen=True)
class RunResult:
    """What a run showed: what each module gave, what layers were given, the leaves returned, and the state left."""

    seen: Observed
    outputs: list[Tensor]
    state: ModuleState
    draws: Draws


class TrialRuns:
    """Runs one module on rows of the arguments that it was called with. Each `trial` has random numbers of its own."""

    def __init__(
        self, capture: Capture, module: nn.Module, parts: Parts, dims: Sequence[int | None], trial: int = 0
    ) -> None:
        self.capture, self.module = capture, module
        self.parts, self.dims = parts, list(dims)
        self.trial = trial

    @cached_property
    def before(self) -> ModuleState:
        """The module's attributes, as they are when they are first asked for: before any run."""
        return ModuleState(self.module)

    @property
    def name(self) -> str:
        """What a refusal says."""
        return self.capture.module_name(self.module)

    def call(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors that come out for these leaves."""
        args, kwargs = self.parts.rebuilt(leaves)
        return tensors_in(self.module(*args, **kwargs))

    def leaves(self, rows: Sequence[Row]) -> list[Any]:
        """The arguments' leaves with these rows."""
        return [
            with_rows(leaf, dim, rows, name)
            for leaf, dim, name in zip(self.parts.leaves, self.dims, self.parts.names, strict=True)
        ]

    def on(self, parts: Parts) -> TrialRuns:
        """The same on other arguments."""
        return TrialRuns(self.capture, self.module, parts, self.dims, self.trial)

    def observe(
        self, rows: Sequence[Row], seed: int = 0, keep_state: bool = False, read_state: bool = True
    ) -> RunResult:
        """Run on these rows; with `keep_state` from the state that is there, and leaving what it becomes."""
        return self.observe_leaves(self.leaves(rows), seed, keep_state, read_state)

    def observe_leaves(
        self, leaves: Sequence[Any], seed: int = 0, keep_state: bool = False, read_state: bool = True
    ) -> RunResult:
        """The same on leaves made elsewhere."""
        before = self.before
        try:
            if seed:
                before.reseed(seed)
            with seeded(seed_of(self.trial, seed)) as draws, self.capture.aside(), self.capture.observing() as seen:
                outputs = [leaf.detach().clone() for leaf in self.call(leaves)]
            if seen.outputs and not isinstance(self, LossRuns):
                # The outermost module's own, whatever it returns them in.
                seen.outputs[-1] = seen.outputs[-1][0], outputs
            return RunResult(seen, outputs, ModuleState(self.module) if read_state else before, draws)
        finally:
            if not keep_state:
                before.restore()

    def outputs(self, leaves: Sequence[Any], seed: int = 0) -> list[Tensor]:
        """What comes out for these leaves, with nothing looked at inside."""
        before = self.before
        try:
            with seeded(seed_of(self.trial, seed)), self.capture.aside(), torch.enable_grad():
                return [leaf.detach() for leaf in self.call(leaves)]
        finally:
            before.restore()

    def norms(self, rows: Sequence[Row], total: Total, seed: int = 0) -> Norms:
        """Squared norms of the examples' gradients of `total(outputs)`, by parameter and by argument."""
        leaves, given = self._differentiable(rows)
        before = self.before
        try:
            with seeded(seed_of(self.trial, seed)), self.capture.aside(), torch.enable_grad():
                scalar = total(self.call(leaves))
                if scalar is None or not scalar.requires_grad:
                    return {}
                self.capture.differentiate(scalar, *given.values())
                return {**example_norms(self.capture, len(rows)), **_rows_of(given, self.dims)}
        finally:
            before.restore()

    def _differentiable(self, rows: Sequence[Row]) -> tuple[list[Any], dict[int, Tensor]]:
        """Leaves with these rows. What another part of the model computed is a leaf of its own graph here."""
        leaves, given = self.leaves(rows), {}
        for place, leaf in enumerate(self.parts.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and self.dims[place] is not None:
                given[place] = leaves[place].requires_grad_()
                leaves[place] = given[place] * 1  # modules may write into what they are given
        return leaves, given


class LossRuns(TrialRuns):
    """Runs `loss(*batch)`, a loss for each example, [n], with the modules that it calls."""

    def __init__(
        self,
        capture: Capture,
        loss: Callable[..., Tensor],
        parts: Parts,
        dims: Sequence[int | None],
        trial: int = 0,
    ) -> None:
        super().__init__(capture, capture.module, parts, dims, trial)
        self._loss = loss

    @property
    def name(self) -> str:
        return "the loss"

    def on(self, parts: Parts) -> TrialRuns:
        return LossRuns(self.capture, self._loss, parts, self.dims, self.trial)

    def call(self, leaves: Sequence[Any]) -> list[Tensor]:
        return [self._loss(*self.parts.rebuilt(leaves))]


def _rows_of(given: dict[int, Tensor], dims: Sequence[int | None]) -> Norms:
    norms = {}
    for place, leaf in given.items():
        dim = dims[place]
        if leaf.grad is not None and dim is not None:
            norms[f"argument {place}"] = leaf.grad.movedim(dim, 0).flatten(1).double().square().sum(1)
    return norms
