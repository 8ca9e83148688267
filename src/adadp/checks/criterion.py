"""Whether a criterion is a plain mean (or sum) over examples: tried on made-up outputs, and on the shapes of its calls.

The gradient with respect to one example's output (times the number of examples, for a mean) may depend neither on the
other examples nor on how many there are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adadp.checks.containers import Arguments, dimension, take_apart
from adadp.errors import ConfigurationError
from adadp.gradients import Capture

_COUNT = 4  # rows of a trial

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
    """Raise where a criterion mixes made-up examples. False where it takes none of the arguments that were tried."""
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


class WatchedCriterion:
    """Checks a criterion and, if it is a module, watches its calls and tries it on the shapes that it is given.

    `used` is the microbatch for which it was called last: that loss was tried.

    Raises:
        ConfigurationError: the criterion mixes examples, or is a function that cannot be tried.

    """

    def __init__(
        self,
        capture: Capture,
        criterion: Callable[..., Tensor],
        loss_reduction: str,
        *,
        due: Callable[[], bool],
        on_refusal: Callable[[str], None],
    ) -> None:
        if not check_criterion(criterion, loss_reduction) and not isinstance(criterion, nn.Module):
            raise ConfigurationError(_UNTRIED)
        self._capture, self._criterion, self._reduction = capture, criterion, loss_reduction
        self._due, self._on_refusal = due, on_refusal
        self.used: object = None
        self._passed: set[Any] = set()  # shapes and dtypes that were tried
        self._refused: str | None = None
        self._handle: Any = None
        if isinstance(criterion, nn.Module):
            self._handle = criterion.register_forward_pre_hook(self._Hook(self), with_kwargs=True)

    class _Hook:
        """Calls its owner; in a copy of the criterion, which trials make, it does nothing."""

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
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._refused is not None:
            raise ConfigurationError(self._refused)
        count = self._capture.count
        assert count is not None
        parts = take_apart((args, kwargs), count)
        dims = [dimension(leaf, count, (0, 1) if _is_sequence(leaf) else (0,)) for leaf in parts.leaves]
        try:
            self._try(Arguments(parts, dims, count))
        except ConfigurationError as error:
            self._refused = str(error)
            self._on_refusal(self._refused)
            raise
        self.used = self._capture.tag

    def _try(self, given: Arguments) -> None:
        declared = getattr(self._criterion, "reduction", None)
        if not given.dims or given.dims[0] is None:
            if declared == "none" or (declared == "sum" and self._reduction == "sum"):
                return  # tokens are summed, or the loop combines them
            raise ConfigurationError(_FOLDED)
        shapes = tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in given.leaves if isinstance(leaf, Tensor))
        if shapes in self._passed and not self._due():
            return
        criterion = _in_double(self._criterion)
        made_up = _like(self._criterion, given)
        if not (_passes(criterion, made_up, self._reduction) or self._passes_as_given(given)):
            raise ConfigurationError(_UNTRIED)
        self._passed.add(shapes)

    def _passes_as_given(self, given: Arguments) -> bool:
        """The same with rows of the call: a criterion may not take made-up numbers."""
        rows = given.chosen([place % given.count for place in range(_COUNT)])
        return _passes(copy.deepcopy(self._criterion), rows, self._reduction, 1e-3)


def _is_sequence(leaf: Any) -> bool:
    """Whether examples may come second: [T, N, C], as CTC takes it."""
    return isinstance(leaf, Tensor) and leaf.ndim > 2


def _in_double(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy on the CPU that computes in double precision: the user's own stays as it is."""
    return copy.deepcopy(criterion).cpu().double() if isinstance(criterion, nn.Module) else criterion


def _candidates(criterion: Callable[..., Tensor]) -> list[Arguments]:
    """Made-up outputs and targets of the kinds that most losses take."""
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
    return [Arguments(take_apart((pair, {})), [0, 0], _COUNT) for pair in pairs]


def _like(criterion: Callable[..., Tensor], given: Arguments) -> Arguments:
    """Made-up arguments of the shapes and dtypes that a criterion was given, with an ignored label if it had some."""
    generator = torch.Generator().manual_seed(0)
    outputs = given.leaves[0]
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim > 1 else 2
    ignored = getattr(criterion, "ignore_index", None)
    leaves: list[Any] = []
    for place, (leaf, dim) in enumerate(given.pairs()):
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
    return given.with_leaves(leaves, _COUNT)


def _passes(
    criterion: Callable[..., Tensor], arguments: Arguments, loss_reduction: str, relative: float = 1e-6
) -> bool:
    """Raise where a criterion mixes these examples. False where it does not take them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments that do not fit: they are only tried
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


def _output_gradients(criterion: Callable[..., Tensor], arguments: Arguments, reduction: str) -> dict[int, Tensor]:
    """Gradients with respect to real arguments, by their place, with examples in the first dimension."""
    given, outputs = list(arguments.leaves), {}
    for place, (leaf, dim) in enumerate(arguments.pairs()):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and dim is not None:
            given[place] = outputs[place] = leaf.clone().requires_grad_()
    args, kwargs = arguments.parts.rebuilt(given)
    with torch.enable_grad():
        loss = criterion(*args, **kwargs)
        # The loop combines a loss for each example as loss_reduction says.
        total = loss.mean() if reduction == "mean" and loss.ndim else loss.sum()
        gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
    scale = arguments.count if reduction == "mean" else 1
    return {
        place: gradient.movedim(arguments.dims[place] or 0, 0) * scale
        for place, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    }
