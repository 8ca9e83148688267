"""Runs of a module for trial: on chosen rows, with the same random numbers, leaving nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.made import Row, made
from adadp.checks.norms import Norms, measured
from adadp.checks.rows import Parts, tensors_in
from adadp.checks.seeds import seeded
from adadp.checks.state import State
from adadp.gradients import Capture
from adadp.gradients.capture.capture import Observed

Total = Callable[[list[Tensor]], Tensor | None]


@dataclass(frozen=True)
class Result:
    """What a run showed: what each module gave, what layers were given, the leaves returned, and the state left."""

    seen: Observed
    outputs: list[Tensor]
    state: State


class Runs:
    """Runs one module on rows of the arguments that it was called with."""

    def __init__(self, capture: Capture, module: nn.Module, parts: Parts, dims: Sequence[int | None]) -> None:
        self.capture, self.module = capture, module
        self.parts, self.dims = parts, list(dims)
        self.before = State(module)

    def leaves(self, rows: Sequence[Row]) -> list[Any]:
        """The arguments' leaves with these rows."""
        return [
            made(leaf, dim, rows, name)
            for leaf, dim, name in zip(self.parts.leaves, self.dims, self.parts.names, strict=True)
        ]

    def observe(self, rows: Sequence[Row], seed: int = 0, keep_state: bool = False) -> Result:
        """Run on these rows; with `keep_state` from the state that is there, and leaving what it becomes."""
        return self.observe_leaves(self.leaves(rows), seed, keep_state)

    def observe_leaves(self, leaves: Sequence[Any], seed: int = 0, keep_state: bool = False) -> Result:
        """The same on leaves made elsewhere."""
        args, kwargs = self.parts.rebuilt(leaves)
        try:
            if seed:
                self.before.reseed(seed)
            with seeded(seed), self.capture.aside(), self.capture.observing() as seen:
                output = self.module(*args, **kwargs)
            outputs = [leaf.detach().clone() for leaf in tensors_in(output)]
            if seen.outputs:  # the outermost module's own, whatever it returns them in
                seen.outputs[-1] = seen.outputs[-1][0], outputs
            return Result(seen, outputs, State(self.module))
        finally:
            if not keep_state:
                self.before.restore()

    def norms(self, rows: Sequence[Row], total: Total, seed: int = 0) -> Norms:
        """Squared norms of the examples' gradients of `total(outputs)`, by parameter and by argument."""
        leaves, given = self._differentiable(rows)
        args, kwargs = self.parts.rebuilt(leaves)
        try:
            with seeded(seed), self.capture.aside(), torch.enable_grad():
                output = self.module(*args, **kwargs)
                scalar = total(tensors_in(output))
                if scalar is None or not scalar.requires_grad:
                    return {}
                self.capture.differentiate(scalar, *given.values())
                return {**measured(self.capture, len(rows)), **_rows_of(given, self.dims)}
        finally:
            self.before.restore()

    def _differentiable(self, rows: Sequence[Row]) -> tuple[list[Any], dict[int, Tensor]]:
        """Leaves with these rows. What another part of the model computed is a leaf of its own graph here."""
        leaves, given = self.leaves(rows), {}
        for place, leaf in enumerate(self.parts.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and self.dims[place] is not None:
                given[place] = leaves[place].requires_grad_()
                leaves[place] = given[place] * 1  # modules may write into what they are given
        return leaves, given


def _rows_of(given: dict[int, Tensor], dims: Sequence[int | None]) -> Norms:
    norms = {}
    for place, leaf in given.items():
        dim = dims[place]
        if leaf.grad is not None and dim is not None:
            norms[f"argument {place}"] = leaf.grad.movedim(dim, 0).flatten(1).double().square().sum(1)
    return norms
