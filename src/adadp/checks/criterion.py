"""Whether a loss function is a plain mean (or sum) over examples: on made-up outputs, and on the shapes really used.

The gradient of an example's own output, times the number of examples for a mean, may depend neither on the other
examples nor on how many there are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.containers import Parts, chosen, dimension, take_apart
from adadp.errors import ConfigurationError
from adadp.gradients import Capture

_COUNT = 4

_UNTRIED = (
    "the criterion cannot be tried on made-up outputs, so it is not known whether it keeps examples apart. Compute a "
    "loss for each example ([n], with reduction='none') and call optimizer.backward(losses) without criterion=, or "
    "make it an nn.Module, which is tried on what the loop gives it."
)
_FOLDED = (
    "the criterion is given another number of rows than the batch has examples (tokens in one dimension, for "
    "instance), and means over all of them mix examples. Average within each example, then over examples: "
    "optimizer.backward(losses) with a loss for each, [n]."
)


def check_criterion(criterion: Callable[..., Tensor], loss_reduction: str) -> bool:
    """Refuse a loss that mixes examples. False where it takes other arguments than were tried: it was not checked."""
    declared = getattr(criterion, "reduction", None)
    if declared in ("mean", "sum") and declared != loss_reduction:
        raise ConfigurationError(
            f"the criterion's reduction is {declared!r} but loss_reduction is {loss_reduction!r}: make them agree"
        )
    ignored = getattr(criterion, "ignore_index", -100)
    if declared == "mean" and ignored != -100:
        raise ConfigurationError(
            f"the criterion ignores label {ignored} and divides by how many labels of the whole batch are left, which "
            "mixes examples: average within each example, then over examples"
        )
    copied = _in_double(criterion)
    return any(_passes(copied, arguments, loss_reduction) for arguments in _candidates(criterion))


def watch_criterion(
    capture: Capture, criterion: Callable[..., Tensor], loss_reduction: str, due: Callable[[], bool]
) -> WatchedCriterion:
    """Check a criterion, and watch its calls if it is a module. One that cannot be tried is refused."""
    tried = check_criterion(criterion, loss_reduction)
    if not tried and not isinstance(criterion, nn.Module):
        raise ConfigurationError(_UNTRIED)
    return WatchedCriterion(capture, criterion, loss_reduction, due)


class WatchedCriterion:
    """Sees the calls of a criterion that is a module, and tries it on the shapes that it is given.

    `used` is the microbatch that it was last called for: its loss was tried.
    """

    def __init__(
        self, capture: Capture, criterion: Callable[..., Tensor], loss_reduction: str, due: Callable[[], bool]
    ) -> None:
        self._capture, self._criterion, self._reduction, self._due = capture, criterion, loss_reduction, due
        self.used: object = None
        self._passed: set[Any] = set()
        self._refused: str | None = None
        self.on_refusal: Callable[[str], None] = lambda text: None
        self._handle: Any = None
        if isinstance(criterion, nn.Module):
            self._handle = criterion.register_forward_pre_hook(self._Hook(self), with_kwargs=True)

    class _Hook:
        """Does nothing in a copy of the criterion."""

        def __init__(self, owner: WatchedCriterion) -> None:
            self._owner: WatchedCriterion | None = owner

        def __deepcopy__(self, memo: Any) -> WatchedCriterion._Hook:
            made = copy.copy(self)
            made._owner = None
            return made

        def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._owner is not None and torch.is_grad_enabled() and self._owner._capture.count is not None:
                self._owner._called(args, kwargs)

    def detach(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._refused is not None:
            raise ConfigurationError(self._refused)
        capture = self._capture
        count = capture.count
        assert count is not None
        parts = take_apart((args, kwargs), count)
        dims = [dimension(leaf, count, (0, 1) if _is_sequence(leaf) else (0,)) for leaf in parts.leaves]
        try:
            self._try(parts, dims, count)
        except ConfigurationError as error:
            self._refused = str(error)
            self.on_refusal(self._refused)
            raise
        self.used = capture.tag

    def _try(self, parts: Parts, dims: Sequence[int | None], count: int) -> None:
        declared = getattr(self._criterion, "reduction", None)
        if not dims or dims[0] is None:
            if declared == "none" or (declared == "sum" and self._reduction == "sum"):
                return  # tokens are summed, or put together elsewhere
            raise ConfigurationError(_FOLDED)
        shapes = tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in parts.leaves if isinstance(leaf, Tensor))
        if shapes in self._passed and not self._due():
            return
        criterion = _in_double(self._criterion)
        arguments = _of_schema(self._criterion, parts, dims)
        if not (_passes(criterion, arguments, self._reduction) or self._passes_as_given(parts, dims, count)):
            raise ConfigurationError(_UNTRIED)
        self._passed.add(shapes)

    def _passes_as_given(self, parts: Parts, dims: Sequence[int | None], count: int) -> bool:
        """The same with rows of what the loop gave: made-up numbers may mean nothing to this criterion."""
        rows = [place % count for place in range(_COUNT)]
        leaves = [chosen(leaf, dim, rows) for leaf, dim in zip(parts.leaves, dims, strict=True)]
        return _passes(copy.deepcopy(self._criterion), _Arguments(parts, leaves, list(dims)), self._reduction, 1e-3)


def _is_sequence(leaf: Any) -> bool:
    """Whether examples may come second: [T, N, C], as CTC takes it."""
    return isinstance(leaf, Tensor) and leaf.ndim > 2


class _Arguments:
    """What a criterion is called with: leaves, of which some have a row for each of a few examples."""

    def __init__(self, parts: Parts, leaves: list[Any], dims: list[int | None]) -> None:
        self.parts, self.leaves, self.dims = parts, leaves, dims

    def chosen(self, rows: Sequence[int]) -> _Arguments:
        leaves = [chosen(leaf, dim, rows) for leaf, dim in zip(self.leaves, self.dims, strict=True)]
        return _Arguments(self.parts, leaves, self.dims)


def _in_double(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy on the CPU that computes in double precision: the user's own stays as it is."""
    return copy.deepcopy(criterion).cpu().double() if isinstance(criterion, nn.Module) else criterion


def _candidates(criterion: Callable[..., Tensor]) -> list[_Arguments]:
    """Outputs and targets of the kinds that most losses take."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    weights = [getattr(criterion, name, None) for name in ("weight", "pos_weight")]
    classes = {3, *(len(weight) for weight in weights if isinstance(weight, Tensor) and weight.ndim == 1)}
    pairs: list[tuple[Tensor, Tensor]] = []
    for number in sorted(classes):
        labels = torch.arange(_COUNT) % number
        pairs += [(normal(_COUNT, number), labels), (normal(_COUNT, number), torch.softmax(normal(_COUNT, number), 1))]
    pairs += [(normal(_COUNT, 1), uniform(_COUNT, 1)), (normal(_COUNT), uniform(_COUNT))]
    return [_Arguments(take_apart((pair, {})), list(pair), [0, 0]) for pair in pairs]


def _of_schema(criterion: Callable[..., Tensor], parts: Parts, dims: Sequence[int | None]) -> _Arguments:
    """Made-up arguments of the shapes and kinds that a criterion was given, with ignored labels where it had some."""
    generator = torch.Generator().manual_seed(0)
    outputs = parts.leaves[0]
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim > 1 else 2
    ignored = getattr(criterion, "ignore_index", None)
    leaves: list[Any] = []
    for place, (leaf, dim) in enumerate(zip(parts.leaves, dims, strict=True)):
        if not isinstance(leaf, Tensor) or dim is None:
            leaves.append(leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf)
            continue
        shape = tuple(_COUNT if d == dim else size for d, size in enumerate(leaf.shape))
        if leaf.is_floating_point():
            draw = torch.randn if place == 0 else torch.rand
            leaves.append(draw(shape, generator=generator, dtype=torch.float64))
            continue
        labels = torch.randint(classes, shape, generator=generator)
        if ignored is not None and bool((leaf == ignored).any()):
            labels.view(-1)[0] = ignored
        leaves.append(labels.to(leaf.dtype))
    return _Arguments(parts, leaves, list(dims))


def _passes(
    criterion: Callable[..., Tensor], arguments: _Arguments, loss_reduction: str, relative: float = 1e-6
) -> bool:
    """Refuse a criterion that mixes these examples. False where it does not take them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that do not fit: they are only tried
        try:
            reference = _output_gradients(criterion, arguments, loss_reduction)
            rest = list(range(1, _COUNT))
            others = [
                _output_gradients(criterion, arguments.chosen([1, *rest]), loss_reduction),
                _output_gradients(criterion, arguments.chosen([_COUNT - 1, *rest]), loss_reduction),
            ]
            fewer = _output_gradients(criterion, arguments.chosen(rest), loss_reduction)
        except Exception:
            return False
    if not reference:
        return False
    for place, gradient in reference.items():
        for other in (*(o[place][1:] for o in others), fewer[place]):
            if not torch.allclose(gradient[1:], other, rtol=relative, atol=relative * 1e-3, equal_nan=True):
                raise ConfigurationError(
                    "the criterion mixes examples: the gradient of one example's loss changes with the others. "
                    "Weighted means divide by the batch's weights and contrastive losses compare examples; use a loss "
                    f"that is a plain {loss_reduction} over examples."
                )
    return True


def _output_gradients(criterion: Callable[..., Tensor], arguments: _Arguments, reduction: str) -> dict[int, Tensor]:
    """The gradients of the outputs, by their place among the arguments, with examples in front."""
    given, outputs, count = list(arguments.leaves), {}, 0
    for place, (leaf, dim) in enumerate(zip(given, arguments.dims, strict=True)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and dim is not None:
            given[place] = outputs[place] = leaf.clone().requires_grad_()
            count = leaf.shape[dim]
    args, kwargs = arguments.parts.rebuilt(given)
    with torch.enable_grad():
        loss = criterion(*args, **kwargs)
        # A loss for each example is put together by the loop, as loss_reduction says.
        total = loss.mean() if reduction == "mean" and loss.ndim else loss.sum()
        gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
    scale = count if reduction == "mean" else 1
    return {
        place: gradient.movedim(arguments.dims[place] or 0, 0) * scale
        for place, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    }
