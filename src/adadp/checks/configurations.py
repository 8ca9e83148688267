"""Settings of models that mix examples only now and then, so that a trial may miss it: they are refused by name.

Models of other libraries are known by their attributes, classes' names and `config`, and nothing of those libraries is
imported. Only what is in use counts: a balancing loss that is not computed is no reason to refuse a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from adadp.checks.notes import some

#: A capacity of so many tokens drops none.
_ENOUGH = 10**9
_CAPACITIES = ("expert_capacity",)  # tokens; None: computed from the batch
_FACTORS = (
    "capacity_factor",
    "eval_capacity_factor",
    "expert_capacity_factor",
    "moe_capacity_factor",
    "moe_expert_capacity_factor",
    "moe_eval_capacity_token_fraction",
)
_EXPERTS = ("experts", "router", "gate")  # children of a module that has experts
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef", "load_balancing_loss_coef")
_CHOICES = (
    "expert_choice",
    "use_expert_choice",
    "router_type",
    "routing_type",
    "routing_algorithm",
    "router_policy",
    "moe_router_type",
    "moe_router_load_balancing_type",
)
_BY_BATCH = ("expertchoice", "expertschoose", "sinkhorn")  # without dashes and underscores, in small letters
_ONE_SCALE = (
    "quantizes activations by one scale for all of the batch, so that an example's numbers depend on the largest ones "
    "of others. {} Or quantize the weights only, or use bfloat16."
)


def configuration_problems(module: nn.Module) -> list[str]:
    """Why the settings of `module` mix examples: a sentence for each cause, with names and the way out."""
    model = _base(module)
    found: dict[tuple[str, str], list[str]] = {}  # names of modules, by their class and what is wrong with them
    for text in _contrastive(model):
        found[type(model).__name__, text] = ["the model"]
    seen: set[int] = set()
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        if config is None or id(config) in seen:  # modules share their model's
            config = None
        else:
            seen.add(id(config))
        for rule in _RULES:
            for text in rule(part, config):
                found.setdefault((type(part).__name__, text), []).append(name or "the model")
    return [f"{some(names)} ({kind}) {text}" for (kind, text), names in found.items()]


# ---- positions ----------------------------------------------------------------------------------------------------


def _dynamic_positions(part: nn.Module, config: Any) -> Iterator[str]:
    """Rotary embeddings whose angles follow the longest sequence of the batch."""
    for kind in _kinds(vars(part).get("rope_type")):
        yield _ANGLES.format(f"rope_type={kind!r}")
    if config is None or any("rope_type" in vars(below) for below in part.modules()):
        return  # which decides, and not what the config says
    for attribute in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, attribute, None)
        if isinstance(settings, Mapping):
            for entry in (settings, *settings.values()):
                for kind in _kinds(entry.get("rope_type", entry.get("type")) if isinstance(entry, Mapping) else None):
                    yield _ANGLES.format(f"config.{attribute} of type {kind!r}")
    if getattr(config, "use_dynamic_ntk", False) is True:
        yield _ANGLES.format("config.use_dynamic_ntk=True")


_ANGLES = (
    "has {}: the angles of all positions depend on the longest sequence of the batch. Build the model with a rope_type "
    "whose angles are fixed ('default', 'linear', 'yarn')."
)


def _kinds(rope_type: Any) -> Iterator[str]:
    """Those of one kind, or of one for each kind of layer, that are dynamic."""
    for kind in rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,):
        if isinstance(kind, str) and ("dynamic" in kind or kind in ("longrope", "su")):
            yield kind


# ---- mixtures of experts --------------------------------------------------------------------------------------------


def _capacity(part: nn.Module, config: Any) -> Iterator[str]:
    """Experts that take so many tokens of a batch, and no more."""
    own = vars(part)
    yield from _capacities({name: own[name] for name in (*_CAPACITIES, *_FACTORS) if name in own}, own, "")
    if config is not None and _has_experts(part):
        left = [n for n in (*_CAPACITIES, *_FACTORS) if not any(n in vars(below) for below in part.modules())]
        given = {name: getattr(config, name) for name in left if hasattr(config, name)}
        yield from _capacities(given, {"drop_tokens": getattr(config, "drop_tokens", None)}, "config.")


def _capacities(given: Mapping[str, Any], beside: Mapping[str, Any], prefix: str) -> Iterator[str]:
    if beside.get("drop_tokens") is False:
        return
    for name, value in given.items():
        tokens = name in _CAPACITIES
        if (value is None or _number(value) < _ENOUGH) if tokens else _number(value) > 0:
            way = f"{name}={_ENOUGH}, which drops none" if tokens else f"{name}=0 or None, or drop_tokens=False"
            yield (
                f"has {prefix}{name}={value}: experts drop tokens beyond their capacity, and where the tokens of a "
                "batch are counted together, an example's tokens are dropped because of other examples. Build it with "
                f"{way}."
            )


def _expert_choice(part: nn.Module, config: Any) -> Iterator[str]:
    """Experts that choose their tokens among those of the batch, or are balanced over them."""
    why = "chooses tokens for its experts among all of the batch ({}). Route each token by itself (top-k token choice)."
    if _by_batch(type(part).__name__):
        yield why.format("its class's name")
    for holder, prefix in ((vars(part), ""), (config, "config.")):
        for name in _CHOICES:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if (value is True and "choice" in name) or (isinstance(value, str) and _by_batch(value)):
                yield why.format(f"{prefix}{name}={value!r}")


def _balancing(part: nn.Module, config: Any) -> Iterator[str]:
    """Losses that balance experts over the batch."""
    known = [value for name in _COUNTS if (value := getattr(config, name, None)) is not None]
    coefficients = {name: getattr(config, name) for name in _COEFFICIENTS if hasattr(config, name)}
    counts = not coefficients or any(_number(value) for value in coefficients.values())
    if getattr(config, "output_router_logits", False) is True and counts and (not known or any(known)):
        yield (
            "has config.output_router_logits=True: it computes a loss that balances experts over all tokens of the "
            "batch, and adds it to the model's own. Set model.config.output_router_logits = False."
        )
    own = vars(part)
    if "seq_aux" in own and _number(own.get("alpha")) > 0:  # DeepSeek's gate adds gradients of its loss by itself
        yield (
            f"has alpha={own['alpha']}: it adds the gradient of a loss that balances experts over the batch. Build the "
            "model with config.aux_loss_alpha = 0.0."
        )


def _has_experts(part: nn.Module) -> bool:
    return any(name in below._modules for below in part.modules() for name in _EXPERTS)


def _by_batch(text: str) -> bool:
    plain = text.lower().replace("_", "").replace("-", "")
    return any(word in plain for word in _BY_BATCH)


# ---- scales of quantized activations --------------------------------------------------------------------------------


def _scales(part: nn.Module, config: Any) -> Iterator[str]:
    """Activations that are quantized by a scale that all examples of a batch determine together."""
    classes = {kind.__name__ for kind in type(part).__mro__}
    home = type(part).__module__
    if home.startswith(("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")):
        yield _ONE_SCALE.format("Do not use torch.ao.quantization.quantize_dynamic.")
    if "Linear8bitLt" in classes and _number(getattr(getattr(part, "state", None), "threshold", 0)) > 0:
        yield (
            "has a threshold above 0: columns are computed in 16 bits where any row of the batch is large. Use "
            "BitsAndBytesConfig(llm_int8_threshold=0.0), or load_in_4bit."
        )
    if "Float8Linear" in classes:
        cast = getattr(getattr(part, "config", None), "cast_config_input", None)
        if "axiswise" not in str(getattr(cast, "scaling_granularity", "")).lower():
            yield _ONE_SCALE.format("Use Float8LinearConfig.from_recipe_name('rowwise').")
    if home.startswith("transformer_engine") and hasattr(part, "fp8_meta"):
        yield _ONE_SCALE.format("Transformer Engine's FP8 recipes do so: use torch's own layers.")
    if "NVFP4Linear" in classes:
        yield _ONE_SCALE.format("NVFP4 does so.")
    for name, weight in part._parameters.items():
        if _granularity(weight) == "PerTensor":
            yield f"({name}) " + _ONE_SCALE.format("Quantize with granularity=PerRow().")
    for words in _quantization(getattr(config, "quantization_config", None)):
        yield f"has config.quantization_config with {words}: it " + _ONE_SCALE.format("Scale each token by itself.")


def _granularity(weight: Any) -> str:
    """What torchao scales the activations of a quantized weight by; "" for any other."""
    how = getattr(weight, "act_quant_kwargs", None)
    granularity = getattr(how, "granularity", None)
    if granularity is None and isinstance(older := getattr(weight, "quant_kwargs", None), Mapping):
        granularity = older.get("activation_granularity")
    return "" if granularity is None else type(granularity).__name__


def _quantization(settings: Any) -> Iterator[str]:
    """What in a quantization's settings makes one dynamic scale for all of a tensor."""
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping):
        return
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "fouroversix" and "mxfp4" not in (settings.get("activation_dtype"), settings.get("dtype")):
        yield f"quant_method={method!r}"
    yield from _dynamic_per_tensor(settings)


def _dynamic_per_tensor(settings: Mapping[Any, Any]) -> Iterator[str]:
    for name, scheme in (("strategy", "tensor"), ("qscheme", "per_tensor")):
        if settings.get(name) == scheme and (settings.get("dynamic") is True or settings.get("is_dynamic") is True):
            yield f"{name}={scheme!r} and dynamic scales"
    for value in settings.values():
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, Mapping):
                yield from _dynamic_per_tensor(entry)


# ---- contrastive losses ---------------------------------------------------------------------------------------------


def _contrastive(module: nn.Module) -> Iterator[str]:
    """A model of two towers that compares each example's output of one with all of the batch of the other."""
    scale = next((n for n in module._parameters if n.startswith("logit_scale") or n == "temperature"), None)
    if scale is not None and "return_loss" in inspect.signature(module.forward).parameters:
        yield (
            f"compares all examples of a batch with each other (its {scale}, and return_loss= for a contrastive loss), "
            "so no example has a loss of its own. Train a tower: make a module private whose forward returns one "
            "tower's features (by model.vision_model, model.get_image_features and their like), with a loss for each "
            "example."
        )


def _base(module: nn.Module) -> nn.Module:
    """The model inside adapters (PEFT)."""
    inner = getattr(module, "get_base_model", None)
    base = inner() if callable(inner) else module
    return base if isinstance(base, nn.Module) else module


def _number(value: Any) -> float:
    """The value if it is a number (and no bool), else 0."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


_RULES: tuple[Callable[[nn.Module, Any], Iterable[str]], ...] = (
    _dynamic_positions,
    _capacity,
    _expert_choice,
    _balancing,
    _scales,
)

__all__ = ["configuration_problems"]
