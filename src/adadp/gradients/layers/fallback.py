"""Any other module: per-example gradients by torch.func, a chunk of examples at a time.

The module runs once as usual. When its output gradients arrive, it is run again for each example alone, under vmap,
and differentiated. A module that draws random numbers would draw others the second time, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from adadp.errors import UnsupportedModuleError
from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer, LayerCall, Taps


class ThroughFunc(Layer):
    """Differentiates a module and everything below it as one function of its parameters.

    Tensors among the arguments whose first dimension is the batch's are taken apart by example; the rest is the
    same for all. Examples are in the first dimension.
    """

    atomic: ClassVar[bool] = True
    own_rows: ClassVar[bool] = True

    def after(self, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        leaves, inputs = pytree.tree_flatten((args, kwargs))
        outputs, form = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in outputs]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [isinstance(leaf, Tensor) for leaf in leaves]
        batched = [0 if taps.is_batched(tensor) else None for tensor in tensors]
        context = (inputs, places, rest, floating, taps.chunk, taps.module_name(module), taps.batch_first, batched)
        given = [leaf for leaf, is_floating in zip(outputs, floating, strict=True) if is_floating]
        tapped = iter(taps.tap(self, module, given, tensors, context))
        return pytree.tree_unflatten([next(tapped) if f else o for o, f in zip(outputs, floating, strict=True)], form)

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        inputs, places, rest, floating, chunk, name, batch_first, batched = call.context
        if not batch_first:
            raise UnsupportedModuleError(f"{name}: torch.func needs examples in the first dimension (batch_first=True)")
        module = call.module
        everything = _parameters(module)
        parameters = {own: value for own, value in everything.items() if own in call.wanted}
        fixed = {own: value for own, value in everything.items() if own not in call.wanted}
        state = {**fixed, **dict(module.named_buffers())}

        def gradient_of_one(tensors: list[Tensor], output_gradients: list[Tensor]) -> dict[str, Tensor]:
            present = iter(t.unsqueeze(0) if d == 0 else t for t, d in zip(tensors, batched, strict=True))
            leaves = [next(present) if here else other for here, other in zip(places, rest, strict=True)]
            args, kwargs = pytree.tree_unflatten(leaves, inputs)

            def run(values: dict[str, Tensor]) -> list[Tensor]:
                output = functional_call(module, {**values, **state}, args, kwargs, tie_weights=False)
                flat = pytree.tree_leaves(output)
                return [leaf for leaf, float_ in zip(flat, floating, strict=True) if float_]

            backward = vjp(run, parameters)[1]
            return dict(backward([g.unsqueeze(0) for g in output_gradients])[0])

        try:
            with _no_performance_warnings():
                found = vmap(gradient_of_one, in_dims=(batched, 0), chunk_size=chunk)(
                    list(call.saved), list(call.gradients)
                )
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedModuleError(
                f"{name} ({type(module).__name__}): torch.func cannot take its per-example gradients: "
                f"{str(error).splitlines()[0]} A module that draws random numbers, mixes examples or reads values back "
                "cannot be split by example; move its parameters into modules that adadp knows, or freeze them."
            ) from error
        return {own: Dense(gradient, planned=call.planned) for own, gradient in found.items()}


@contextmanager
def _no_performance_warnings() -> Iterator[None]:
    """Without torch's warning that vmap takes an operation one example at a time, which no user can change.

    `warnings.catch_warnings` at every step would have Python show warnings of the user's own code again and again.
    """
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda on: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Each place of a parameter by one name, though its module may hang in two: functional_call corrupts those."""
    return {
        f"{prefix}.{attribute}" if prefix else attribute: parameter.detach()
        for prefix, part in module.named_modules()
        for attribute, parameter in part._parameters.items()
        if parameter is not None
    }
