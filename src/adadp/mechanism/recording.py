"""One step as a CUDA graph: recorded on one lot, then replayed on others that are the same work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from adadp.clipping.base import settings_of
from adadp.gradients.rounding import convolutions_are_cut, matmul_precision
from adadp.mechanism.kept_state import CannotBeReplayedError, KeptState
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.mechanism.sums import ReleasedGradient
from adadp.sampling.lot import Microbatch


class Recording:
    """A step recorded on one lot.

    It owns the tensors that a replay reads its batch from, the gradients that a replay writes, and the state of the
    clipping that the recorded work reads and writes in place. Recording computes nothing: the first replay does.

    Guarantee:
        A replay does the work of an ordinary step on a lot of the same `signature`: it bounds the examples of the batch
        it is given and draws new noise. The caller charges the lot before `play`.

    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        loss: Callable[..., Losses],
        signature: Any,
        microbatch: Microbatch,
        batch: tuple[Any, ...],
        pool: Any,
    ) -> None:
        self.signature = signature
        step = optimizer._step
        _refuse_what_is_not_copied(microbatch, tree_leaves(batch))
        device = next(iter(optimizer._parameters.values())).device
        self._batch = tree_map(lambda part: part.to(device, copy=True) if isinstance(part, Tensor) else part, batch)
        self._real = torch.zeros((), dtype=torch.long, device=device)
        objects = step.clipping.objects()
        before = KeptState(objects)
        self._state = before  # also keeps alive what the recorded work reads and nobody else may hold
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(step._randomness.generator(device))
        optimizer.zero_grad()
        recorded = replace(microbatch, real=self._real)
        lots = optimizer._loader.lots
        lots.work_on(recorded)
        try:
            with recording_into(self._graph, device, pool):
                backward(optimizer, loss(*self._batch))
                with torch.no_grad():
                    optimizer.release(recorded)
                    before.follow(KeptState(objects))
        except BaseException:
            optimizer.zero_grad()  # the gradients that were set were not computed
            step.capture.discard()
            step.take_back(microbatch)
            step._randomness.renew(device)
            raise
        finally:
            before.restore()  # nothing was computed yet: the first replay does
            lots.work_on(microbatch)
        self._lots_begun = step.lots_begun
        parameters = optimizer._parameters.items()
        self.gradients = ReleasedGradient({name: p.grad for name, p in parameters if p.grad is not None})

    def play(self, microbatch: Microbatch, batch: tuple[Any, ...]) -> None:
        """Copy a lot's batch into the recorded one's tensors and start the recorded work."""
        for own, given in zip(tree_leaves(self._batch), tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        self._real.fill_(microbatch.real)
        self._graph.replay()

    def current(self, optimizer: PrivateOptimizer) -> bool:
        """Whether the clipping's state is still the recorded one, or was copied into it (`KeptState.take_over`)."""
        step = optimizer._step
        if self._lots_begun != step.lots_begun:  # not all lots since were replayed
            now = KeptState(step.clipping.objects())
            if not (self._state.kept_in(now) or self._state.take_over(now)):
                return False
            self._lots_begun = step.lots_begun
        return True


Losses = Tensor | tuple[Tensor, Mapping[str, Tensor]]
"""One loss for each row, or a scalar; with it may come figures of each row, by name."""


def losses_alone(found: Losses) -> Tensor:
    """Losses without the figures that came with them."""
    return found[0] if isinstance(found, tuple) else found


def backward(optimizer: PrivateOptimizer, found: Losses) -> None:
    """Differentiate one loss for each row, or a scalar."""
    losses, figures = found if isinstance(found, tuple) else (found, None)
    if losses.ndim:
        optimizer.backward_by_rows(losses, figures)
    else:
        losses.backward()  # type: ignore[no-untyped-call]


@contextmanager
def recording_into(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside. No garbage is collected: a graph cannot be freed while another is recorded."""
    collecting = gc.isenabled()
    gc.disable()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
        if collecting:
            gc.enable()


def keeper() -> torch.cuda.CUDAGraph:
    """A recording of almost nothing, whose memory pool all recordings share: it lives on between them."""
    graph, device = torch.cuda.CUDAGraph(), torch.device("cuda", torch.cuda.current_device())
    with recording_into(graph, device):
        torch.zeros(1, device=device)
    return graph


def signature_of(optimizer: PrivateOptimizer, microbatch: Microbatch, batch: tuple[Any, ...]) -> Any:
    """Everything that Python and the libraries decide by. Lots with equal signatures need the same work."""
    step = optimizer._step
    leaves, form = tree_flatten(batch)
    parts = [(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in leaves if _is_copied(part)]
    weights = [(p.data_ptr(), p.requires_grad) for p in optimizer._parameters.values()]
    precision = matmul_precision(), convolutions_are_cut()
    modes = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), precision)
    training = [part.training for part in step.capture.module.modules()]
    numbers = microbatch.count, microbatch.planned, step.noise_multiplier, step.loss_scale
    return numbers, form, parts, weights, modes, training, settings_of(step.clipping)


def _is_copied(part: Any) -> bool:
    """Whether a part of a batch is put in the recorded one's place, or is the same in both."""
    return part is None or isinstance(part, Tensor | int | float | str)


def _refuse_what_is_not_copied(microbatch: Microbatch, parts: list[Any]) -> None:
    """A recording sees what is copied into its batch. Anything else would be the first lot's at every replay."""
    foreign = [type(part).__name__ for part in parts if not _is_copied(part)]
    if foreign:
        raise CannotBeReplayedError(f"the batch has a {foreign[0]} in it: only tensors can be given to a replay")
    if not any(isinstance(part, Tensor) and part.ndim and microbatch.count in part.shape[:2] for part in parts):
        raise CannotBeReplayedError("no example is in what the step is given: the loss must take all of its batch")
