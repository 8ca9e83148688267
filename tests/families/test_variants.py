"""Families of Hugging Face as people run them: half precision, checkpoints, tied weights, frozen bodies, compiled."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families.compare import assert_same, by_capture, by_loop, released_and_expected, trainable
from families.hugging_face import FAMILIES, Family
from torch import nn

from adadp.errors import PrivacyError, TrainingLoopError

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY_KIND = ["gpt2", "llama", "bert", "t5", "vit", "convnext"]
COMPILED = {"gpt2": {"n_layer": 1}, "llama": {"num_hidden_layers": 1}, "vit": {"num_hidden_layers": 1}}


def assert_alone(family: Family, model: nn.Module, tolerance: float = 1e-5, autocast: bool = False) -> None:
    """The gradients of four unlike examples are those of each alone, computed in the same way."""
    batch = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in family.task.batch(4).items()
    }
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected = by_loop(model, family.task, batch)
        found = by_capture(model, family.task, batch)
    assert_same(found, expected, tolerance)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_bfloat16(name: str, way: str) -> None:
    """To its three digits: of other batches, sums are rounded elsewhere."""
    family = FAMILIES[name]
    model = family.make()
    assert_alone(family, model.bfloat16() if way == "weights" else model, 0.05, autocast=way == "autocast")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_checkpoints(name: str) -> None:
    family = FAMILIES[name]
    model, plain = family.make(use_cache=False), family.make(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = family.task.batch(4)
    assert_same(by_capture(model, family.task, batch), by_loop(plain, family.task, batch))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_reentrant_checkpoints_are_refused_by_name(name: str) -> None:
    family = FAMILIES[name]
    model = family.make(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(TrainingLoopError, match="reentrant"):
        by_capture(model, family.task, family.task.batch(4))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart", "vit", "beit"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention(name: str, attention: str) -> None:
    family = FAMILIES[name]
    model = family.make(attn_implementation=attention)
    assert model.config._attn_implementation == attention
    assert_alone(family, model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt", "bart"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    model = family.make(tie_word_embeddings=tied)
    same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert same == tied
    assert_alone(family, model)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "swin", "deberta-v2"])
def test_a_private_head_on_a_frozen_body(name: str) -> None:
    """What is frozen is not watched, whatever it does; only the last module is trained."""
    family = FAMILIES[name]
    model = family.make(tie_word_embeddings=False)
    place = [key for key, part in model.named_children() if any(True for _ in part.parameters())][-1]
    head = copy.deepcopy(model.get_submodule(place))  # T5's is tied
    model.requires_grad_(False).set_submodule(place, head)
    assert set(trainable(model)) == {f"{place}.{key}" for key, _ in head.named_parameters()}
    assert_alone(family, model)
    assert_same(*released_and_expected(model, family.task), 1e-4)


def frozen_resnet() -> tuple[Family, nn.Module]:
    """A body with BatchNorm, frozen in eval mode, under a head that is trained."""
    family = FAMILIES["vit"]
    body = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
    resnet = Family(family.task, "ResNetConfig", "ResNetForImageClassification", body)
    model = resnet.make()
    model.resnet.requires_grad_(False).eval()
    return resnet, model


def test_a_frozen_body_with_batch_norm() -> None:
    family, model = frozen_resnet()
    assert_same(*released_and_expected(model, family.task), 1e-4)


def test_a_frozen_batch_norm_must_stay_in_eval_mode() -> None:
    family, model = frozen_resnet()
    with pytest.raises(PrivacyError, match="eval"):
        released_and_expected(model, family.task, before_step=lambda: model.train())


def compiled_alone(name: str, backend: str, **settings: Any) -> None:
    torch.compiler.reset()
    family = FAMILIES[name]
    model = family.make(**settings)
    batch = family.task.batch(4)
    expected = by_loop(model, family.task, batch)
    assert_same(by_capture(model, family.task, batch, torch.compile(model, backend=backend)), expected)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    compiled_alone(name, "aot_eager", **COMPILED[name])


#: Compiled, torch's weight norm works backwards on parameters directly, where no rule knows the examples.
NEEDS_FUNC = {"wav2vec2": "wav2vec2.encoder.pos_conv_embed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEEDS_FUNC])
def test_compiled_every_family(name: str) -> None:
    compiled_alone(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_FUNC)
def test_compiled_with_a_module_through_func(name: str) -> None:
    torch.compiler.reset()
    family = FAMILIES[name]

    def compile_it(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]

    with pytest.raises(PrivacyError, match="through_func"):
        released_and_expected(family.make(), family.task, called=compile_it)
    torch.compiler.reset()
    given = {"called": compile_it, "through_func": [NEEDS_FUNC[name]]}
    assert_same(*released_and_expected(family.make(), family.task, **given), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_to_machine_code(name: str) -> None:
    compiled_alone(name, "inductor")
