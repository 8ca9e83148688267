"""Lots where a trainer has batches: its loader counts lots, and its optimizer's step has been made by then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader


class LotNumbers(DataLoader[int]):
    """What a trainer iterates over: the numbers of an epoch's lots.

    A trainer, and accelerate below it, fetch batches ahead, skip them and wrap loaders. Numbers may be: a lot itself is
    fetched where it is trained on.
    """

    def __init__(self, lots: int) -> None:
        # A generator of its own: DataLoader draws a number in each epoch, which must not come out of dropout's stream.
        super().__init__(range(lots), batch_size=1, generator=torch.Generator())  # type: ignore[arg-type]


class LotsInPieces:
    """The lots of a private loader, one after another over all epochs, each as the batches that it comes in."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None

    def next_lot(self) -> Iterator[Any]:
        """The batches of the next lot. All work on one is done before the next is asked for."""
        while not self.loader.stopped:
            if self._iterator is None:
                self._iterator = iter(self.loader)
            try:
                yield next(self._iterator)
            except StopIteration:
                self._iterator = None
                continue
            if self.loader.current is not None and self.loader.current.last:
                return


class SteppedOptimizer(Optimizer):
    """A private optimizer as a trainer holds it: its steps are made with the lots' last pieces, so `step()` is done.

    Schedulers, checkpoints and accelerate see the private optimizer's groups and state.
    """

    def __init__(self, private: PrivateOptimizer) -> None:
        self.private = private
        # Not calling Optimizer.__init__: all state is the private optimizer's.
        self._optimizer_step_pre_hooks = private._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = private._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The private optimizer's."""
        return self.private.param_groups  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The private optimizer's."""
        return self.private.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The private optimizer's."""
        return self.private.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the lot was released where its last piece was worked on."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the private optimizer's."""
        self.private.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The private optimizer's, with what was spent."""
        return self.private.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and charge what was spent on it to the ledger."""
        self.private.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused by the private optimizer."""
        self.private.add_param_group(param_group)

    def __reduce__(self) -> Any:
        return self.private.__reduce__()  # which says why not
