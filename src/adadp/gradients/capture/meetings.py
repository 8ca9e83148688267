"""Where parameters meet the examples: operations of torch on shared values, as they happen.

`adadp.gradients.capture.shared` says what a shared value is, `operations` how each operation meets the examples, and
`readings` where the examples are. Here an operation is read, and becomes a shared value, expanded copies or a tapped
product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adadp.errors import UnsupportedModuleError
from adadp.gradients.capture import tapped_operations  # noqa: F401 - registers its rules
from adadp.gradients.capture.operations import EXPANDING, RULES, UNKNOWN, NoRule, Operation
from adadp.gradients.capture.readings import FREE, ONE_ROW, Reading, UnreadError, of_rows
from adadp.gradients.capture.shared import EXPANSION, LayerOrigin, Shared, kept_whole, made_shared, passed
from adadp.gradients.capture.tap import Expand, Tap, unfolded
from adadp.gradients.layers.layer import Layer

if TYPE_CHECKING:
    from adadp.gradients.capture.capture import Capture


class UnruledError(UnsupportedModuleError):
    """An operation on parameters has no rule. `holder` names the smallest module that holds them."""

    def __init__(self, message: str, holder: str | None) -> None:
        super().__init__(message)
        self.holder = holder


class Meetings:
    """The operations on shared values in one module tree.

    Attributes:
        unread: why gradients that come past an operation of the last pass must not be used, if any come.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.unread: str | None = None

    @property
    def number(self) -> int:
        """The number of the pass that runs."""
        return self._capture.passes

    def operation(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: Sequence[Shared],
        others: Sequence[Tensor],
    ) -> Any:
        """The result of an operation of torch on shared values and other tensors."""
        count = self._capture.rows
        try:
            if count is not None:
                name = getattr(function, "__name__", "")
                return self._result(Operation(function, name, args, kwargs, shared, others, count))
        except UnreadError as error:  # refused where a gradient comes, and not before: this may be an evaluation
            self.unread = str(error)
        with torch._C.DisableTorchFunctionSubclass():  # a gradient that comes back here is seen, and refused
            return function(*args, **kwargs)

    def _result(self, operation: Operation) -> Any:
        name, others = operation.name, operation.others
        if any(passed(one) for one in operation.shared):
            raise self._unruled(name, operation.shared)
        versions = [other._version for other in others]
        operation.others = [other for other in others if not self._capture.constant(other)]
        if not operation.others and name not in EXPANDING:
            return self._unless_written(operation, others, versions)
        rule = RULES.get(name, UNKNOWN)
        if operation.count == 1:  # all that it is given is the one example's, and its copy of a value is the value
            try:
                return rule.alone(operation, self)
            except NoRule:
                return operation.with_copies(lambda one: self.expand(one, fresh=True)[0])
        try:
            reading = self._read(operation.label(), rule.readings(operation))
            if reading == FREE:
                if any(other.requires_grad for other in operation.others):
                    raise NoRule  # made of the examples: their gradient must go on to them
                self._suppose_free(operation.others)
                return self._unless_written(operation, others, versions)
            self._observe_rows(operation.others, reading)
            if self._capture.readings.learning:
                return operation.with_copies(lambda one: one.value.detach())
            return rule.meet(operation, reading, self)
        except NoRule:
            raise self._unruled(name, operation.shared) from None

    def _unless_written(self, operation: Operation, tensors: Sequence[Tensor], versions: Sequence[int]) -> Any:
        """The result as a shared value; refused where a parameter was written into a tensor that is none."""
        result = self._shared(operation)
        if [tensor._version for tensor in tensors] != list(versions):
            raise self._unruled(operation.name, operation.shared)
        return result

    def _observe_rows(self, tensors: Sequence[Tensor], reading: Reading) -> None:
        """Show the trial that observes what is taken for the rows of the examples."""
        capture = self._capture
        if reading[0] != "rows" or (capture.observed is None and not capture.readings.learning):
            return
        name = capture.module_name(self._place())
        for tensor in tensors:
            if tensor.ndim and tensor.shape[0] == (capture.rows or 0) * reading[1]:
                rows = unfolded(tensor.detach(), reading[1])
                capture.readings.saw(name, rows)
                if capture.observed is not None:
                    capture.observed.outputs.append((name, [rows.clone()]))

    def _shared(self, operation: Operation) -> Any:
        with kept_whole():
            made = operation.with_copies(Shared.traced)
        return made_shared(made, operation.shared, self._capture.work.derived)

    def _unruled(self, operation: str, shared: Sequence[Shared]) -> UnruledError:
        names = {name for one in shared for origin in one.origins for name in origin.names}
        return UnruledError(
            f"{self._capture.module_name(self._place())}: no rule says how {operation} brings "
            f"{', '.join(sorted(names))} and the examples together. Name the module in "
            "make_private(through_func=[...]).",
            self._capture.holder(names),
        )

    # ---- what rules ask for (Meeting) ---------------------------------------------------------------------------

    def expand(self, shared: Shared, fresh: bool = False) -> Tensor:
        """A copy of a shared value for each example, [n, ...]; in memory of their own if `fresh`."""
        names = {name: name for origin in shared.origins for name in origin.names}
        call = self._capture.called(EXPANSION, self._place(), names, shared)
        copies: Tensor = Expand.apply(self._capture.anchor, call, shared.value.detach(), self._capture.rows)  # type: ignore[no-untyped-call]
        return copies.clone() if fresh else copies

    def tap_shared(
        self, layer: Layer, values: Sequence[Shared], output: Tensor, saved: Sequence[Tensor], context: Any
    ) -> Tensor:
        """Have `layer` make the per-example gradients of shared values from the output's gradient."""
        names = {name: name for shared in values for origin in shared.origins for name in origin.names}
        call = self._capture.called(layer, self._place(), names, context)
        kept = [tensor.detach() for tensor in saved]
        tapped: tuple[Tensor, ...] = Tap.apply(self._capture.anchor, call, 1, output, *kept)  # type: ignore[no-untyped-call]
        return tapped[0]

    # ---- layers that are given no examples ----------------------------------------------------------------------

    def reading_of(self, inputs: Tensor, rows: int) -> tuple[Reading, str | None]:
        """Where the examples are in what the layer that runs is given, and why its gradients must not be used."""
        possible = of_rows(inputs.shape[0] if inputs.ndim else None, rows)
        if inputs.requires_grad:  # made of the examples
            possible = [one for one in possible if one != FREE] or [ONE_ROW]
        try:
            return self._read(("input", inputs.ndim), possible), None
        except UnreadError as error:
            return ONE_ROW, str(error)

    def of_layer(
        self,
        output: Tensor,
        layer: Layer,
        module: nn.Module,
        context: Any,
        saved: Sequence[Tensor],
        names: Mapping[str, str],
    ) -> Shared:
        """What a layer makes of an input without examples, as a shared value."""
        self._suppose_free(saved)
        origin = LayerOrigin.of(output, layer, module, context, saved, names)
        shared = Shared.make(origin.output, [origin], self)
        self._capture.work.derived.append(shared)
        return shared

    # ---- readings -----------------------------------------------------------------------------------------------

    def _read(self, label: tuple[Any, ...], possible: Sequence[Reading]) -> Reading:
        """Where the examples are in what the module that runs now does next under this label."""
        capture = self._capture
        if capture.rows == 1:
            return possible[0]  # all of it is the one example's
        call = number = 0
        if capture.running:
            frame = capture.running[-1]
            call, number = frame.part.calls, frame.places.get(label, 0)
            frame.places[label] = number + 1
        key = (capture.module_name(self._place()), label, call, number)
        return capture.readings.read(key, possible, trial=capture.work.trial, sure=capture.sure)

    def _place(self) -> nn.Module:
        running = self._capture.running
        return running[-1].part.module if running else self._capture.module

    def _suppose_free(self, tensors: Sequence[Tensor]) -> None:
        """Note that these are taken to be the same whatever the examples, for the trial that observes."""
        if self._capture.observed is not None:
            name = self._capture.module_name(self._place())
            self._capture.observed.free.extend((name, tensor.detach().clone()) for tensor in tensors)
