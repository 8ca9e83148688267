"""A trained model as plain torch code: the text of a `model.py` that builds the same module without this library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from adadp.errors import ConfigurationError
from adadp.models import PaperCifarNet, ResNet

_HEAD = '"""The model in plain torch."""\n'


def plain_code(model: nn.Module, input_shape: tuple[int, ...], classes: int) -> str | None:
    """Code with a function `build()`; None for a module that is not one of this library's or a sequence of layers.

    The code is run, and what it builds is compared with `model`.

    Raises:
        ConfigurationError: it builds something else.

    """
    if isinstance(model, ResNet):
        code = _source(ResNet) + _build(f"ResNet({input_shape[0]}, {classes or 1})")
    elif isinstance(model, PaperCifarNet):
        code = _source(PaperCifarNet) + _build(f"PaperCifarNet({classes or 1})")
    elif isinstance(model, nn.Sequential) and all(_is_layer(layer) for layer in model):
        layers = "".join(f"        nn.{layer!r},\n" for layer in model)
        code = f"{_HEAD}\nfrom torch import nn\n" + _build(f"nn.Sequential(\n{layers}    )")
    else:
        return None
    _require_same(code, model, input_shape)
    return code


def _is_layer(module: nn.Module) -> bool:
    """Whether a module's representation is the call that makes it: torch's own layers without children."""
    return type(module).__module__.startswith("torch.nn.modules.") and not list(module.children())


def _source(kind: type[nn.Module]) -> str:
    return inspect.getsource(sys.modules[kind.__module__])


def _build(call: str) -> str:
    return f'\n\ndef build() -> nn.Module:\n    """The module, with random weights."""\n    return {call}\n'


def _require_same(code: str, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    names: dict[str, object] = {"__name__": "exported_model"}
    exec(compile(code, "model.py", "exec"), names)
    build = names["build"]
    assert callable(build)
    made: nn.Module = build()
    weights: Mapping[str, Tensor] = model.state_dict()
    outline = {name: value.shape for name, value in made.state_dict().items()}
    if outline != {name: value.shape for name, value in weights.items()}:
        raise ConfigurationError("the model's code builds other weights than the run has")
    made.load_state_dict(weights)
    given = torch.rand(3, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if not torch.equal(made.eval()(given), model.eval()(given)):
            raise ConfigurationError("the model's code computes something else than the run's model")
