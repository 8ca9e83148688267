"""Models that people train: the classes of transformers, peft and timm, with random weights. Nothing is downloaded.

The libraries are imported when a model is made, and are not needed for the others. Dropout is off, so that everybody
does the same arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from adadp.checks.validation import fix
from adadp.errors import ConfigurationError
from adadp_lab.bench.cases import CLASSES, Case, Sizes, labels, next_tokens, text

#: A head of attention.
HEAD = 64


def gpt2(*, lot: int, width: int, depth: int, length: int, vocabulary: int) -> Case:
    """GPT-2, which predicts the next token."""
    hub = import_module("transformers")
    config = hub.GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=depth, n_head=_heads(width), use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    inputs = text(lot, length, vocabulary)
    return hub.GPT2LMHeadModel(config), inputs, next_tokens(inputs["input_ids"])


def bert(*, lot: int, width: int, depth: int, length: int, vocabulary: int) -> Case:
    """BERT with a head that classifies."""
    hub = import_module("transformers")
    config = hub.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=_heads(width),
        intermediate_size=4 * width, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
    )  # fmt: skip
    return hub.BertForSequenceClassification(config), text(lot, length, vocabulary), labels(lot)


def llama(*, lot: int, width: int, depth: int, length: int, vocabulary: int) -> Case:
    """Llama's layers: rotated positions, RMSNorm, gated units, no biases; it predicts the next token."""
    hub = import_module("transformers")
    config = hub.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=_heads(width),
        intermediate_size=8 * width // 3, max_position_embeddings=1024, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    inputs = text(lot, length, vocabulary)
    return hub.LlamaForCausalLM(config), inputs, next_tokens(inputs["input_ids"])


def llama_lora(*, rank: int, **sizes: int) -> Case:
    """The same with adapters in its attention; only those are trained."""
    peft = import_module("peft")
    module, inputs, targets = llama(**sizes)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(module, config), inputs, targets


def vit(*, lot: int, size: int) -> Case:
    """ViT-S/16."""
    return _timm("vit_small_patch16_224", lot, size, img_size=size)


def convnext(*, lot: int, size: int) -> Case:
    """ConvNeXt-T."""
    return _timm("convnext_tiny", lot, size)


def resnet50(*, lot: int, size: int) -> Case:
    """ResNet-50 with GroupNorm, as `adadp.fix` makes it."""
    module, images, targets = _timm("resnet50", lot, size)
    return fix(module), images, targets


def _timm(name: str, lot: int, size: int, **options: Any) -> Case:
    module = import_module("timm").create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return module, torch.randn(lot, 3, size, size), labels(lot)


def _heads(width: int) -> int:
    return max(1, width // HEAD)


REAL: dict[str, Callable[..., Case]] = {
    "gpt2": gpt2, "bert": bert, "llama": llama, "llama-lora": llama_lora, "vit": vit, "convnext": convnext,
    "resnet50": resnet50,
}  # fmt: skip
#: The packages that a model is made of.
NEEDS: dict[str, tuple[str, ...]] = {
    "gpt2": ("transformers",), "bert": ("transformers",), "llama": ("transformers",),
    "llama-lora": ("transformers", "peft"), "vit": ("timm",), "convnext": ("timm",), "resnet50": ("timm",),
}  # fmt: skip
_LLAMA: Sizes = {"lot": 16, "width": 768, "depth": 12, "length": 256, "vocabulary": 16_000}
_SMALL: Sizes = {"lot": 4, "width": 128, "depth": 2, "length": 64, "vocabulary": 1000}
REAL_SIZES: dict[str, dict[str, Sizes]] = {
    "cpu": {
        "gpt2": _SMALL, "bert": _SMALL, "llama": _SMALL, "llama-lora": {**_SMALL, "rank": 16},
        "vit": {"lot": 4, "size": 64}, "convnext": {"lot": 4, "size": 64}, "resnet50": {"lot": 4, "size": 64},
    },
    "cuda": {
        "gpt2": {"lot": 16, "width": 768, "depth": 12, "length": 256, "vocabulary": 50_257},
        "bert": {"lot": 32, "width": 768, "depth": 12, "length": 128, "vocabulary": 30_522},
        "llama": _LLAMA, "llama-lora": {**_LLAMA, "rank": 16},
        "vit": {"lot": 64, "size": 224}, "convnext": {"lot": 32, "size": 224}, "resnet50": {"lot": 32, "size": 224},
    },
}  # fmt: skip


def refuse_missing(model: str) -> None:
    """Raise where a package that the model is made of is not installed."""
    missing = [package for package in NEEDS.get(model, ()) if find_spec(package) is None]
    if missing:
        names = " ".join(missing)
        raise ConfigurationError(f"the model {model!r} is made of {names}, not installed here: pip install {names}")


def real_case(model: str, sizes: Sizes) -> Case:
    """A case of its own, whose weights were drawn once: drawing takes longer than copying them."""
    return copy.deepcopy(_drawn(model, tuple(sizes.items()), torch.initial_seed()))


@lru_cache(maxsize=1)
def _drawn(model: str, sizes: tuple[tuple[str, int], ...], seed: int) -> Case:
    return REAL[model](**dict(sizes))
