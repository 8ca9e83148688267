"""Settings that mix examples now and then are refused by name; what merely has the attribute is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop import private
from torch import Tensor, nn

from adadp.checks.configurations import configuration_problems
from adadp.checks.validation import problems
from adadp.errors import UnsupportedModuleError


class Part(nn.Module):
    """A module with these attributes, and a layer."""

    def __init__(self, config: Any = None, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if config is not None:
            self.config = SimpleNamespace(**config)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Linear8bitLt(nn.Linear):
    """As bitsandbytes has it."""

    def __init__(self, threshold: float) -> None:
        super().__init__(3, 2)
        self.state = SimpleNamespace(threshold=threshold)


class Float8Linear(nn.Linear):
    """As torchao has it."""

    def __init__(self, granularity: str) -> None:
        super().__init__(3, 2)
        self.config = SimpleNamespace(cast_config_input=SimpleNamespace(scaling_granularity=granularity))


class ExpertsChooseRouter(nn.Linear):
    pass


def scaled(granularity: str) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight.act_quant_kwargs = SimpleNamespace(granularity=type(granularity, (), {})())
    return model


def experts(**config: Any) -> nn.Module:
    return Part(config, experts=nn.ModuleList([nn.Linear(3, 3)]))


def compressed(strategy: str, dynamic: bool) -> dict[str, Any]:
    groups = {"group_0": {"input_activations": {"strategy": strategy, "dynamic": dynamic}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: Part(rope_type="dynamic"), r"rope_type='dynamic'.*longest sequence.*'yarn'"),
        (lambda: Part(rope_type={"full": "default", "local": "longrope"}), "rope_type='longrope'"),
        (lambda: Part({"rope_scaling": {"type": "su"}}), "config.rope_scaling of type 'su'"),
        (lambda: Part({"rope_parameters": {"full": {"rope_type": "dynamic"}}}), "config.rope_parameters of type"),
        (lambda: Part({"use_dynamic_ntk": True}), "config.use_dynamic_ntk"),
        (lambda: Part(expert_capacity=64), "expert_capacity=64.*dropped.*expert_capacity=1000000000"),
        (lambda: Part(expert_capacity=None), "expert_capacity=None"),
        (lambda: Part(capacity_factor=1.25), "capacity_factor=1.25.*drop_tokens=False"),
        (lambda: experts(expert_capacity=8), "config.expert_capacity=8"),
        (lambda: Part(router_type="experts-choose"), "router_type='experts-choose'.*top-k"),
        (lambda: Part({"expert_choice": True}), "config.expert_choice=True"),
        (lambda: Part(moe_router_load_balancing_type="sinkhorn"), "sinkhorn"),
        (lambda: ExpertsChooseRouter(3, 2), "class's name"),
        (lambda: Part({"output_router_logits": True, "router_aux_loss_coef": 0.1}), "output_router_logits = False"),
        (lambda: Part(alpha=0.001, seq_aux=True), "aux_loss_alpha = 0.0"),
        (lambda: Linear8bitLt(6.0), "threshold.*llm_int8_threshold=0.0"),
        (lambda: Float8Linear("ScalingGranularity.TENSORWISE"), "one scale.*rowwise"),
        (lambda: scaled("PerTensor"), r"\(weight\).*PerRow"),
        (lambda: Part({"quantization_config": compressed("tensor", True)}), "quantization_config.*strategy='tensor'"),
        (lambda: Part({"quantization_config": {"quant_method": "fouroversix"}}), "quant_method='fouroversix'"),
    ],
)
def test_refused_with_module_attribute_and_way_out(part: Callable[[], nn.Module], words: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), part())
    (found,) = configuration_problems(model)
    assert found.startswith(f"1 ({type(model[1]).__name__}) ")
    with pytest.raises(UnsupportedModuleError, match=words):
        private(model)


@pytest.mark.parametrize(
    "part",
    [
        lambda: Part(rope_type="yarn"),
        lambda: Part({"rope_parameters": {"rope_type": "dynamic"}}, rotary=Part(rope_type="linear")),
        lambda: Part({"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": None}),
        lambda: Part(expert_capacity=10**9, capacity_factor=None),
        lambda: Part(capacity_factor=1.0, drop_tokens=False),
        lambda: Part({"expert_capacity": 64}),  # of a model without experts
        lambda: experts(expert_capacity=10**9, capacity_factor=0),
        lambda: Part({"output_router_logits": False, "router_aux_loss_coef": 0.1, "num_experts": 4}),
        lambda: Part({"output_router_logits": True, "router_aux_loss_coef": 0.0, "num_experts": 4}),
        lambda: Part({"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_local_experts": 0}),
        lambda: Part(alpha=0.3),
        lambda: Part(alpha=0.0, seq_aux=True),
        lambda: Part({"router_type": "top_k", "expert_choice": False}),
        lambda: Linear8bitLt(0.0),
        lambda: Float8Linear("ScalingGranularity.AXISWISE"),
        lambda: scaled("PerRow"),
        lambda: Part({"quantization_config": compressed("token", True)}),
        lambda: Part({"quantization_config": compressed("tensor", False)}),
        lambda: Part({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        lambda: Part(logit_scale=nn.Parameter(torch.ones(()))),
    ],
)
def test_what_mixes_nothing_is_accepted(part: Callable[[], nn.Module]) -> None:
    assert problems(nn.Sequential(part(), nn.Linear(2, 2))) == []


def test_the_same_cause_in_many_modules_is_said_once() -> None:
    (found,) = configuration_problems(nn.Sequential(*[Linear8bitLt(6.0) for _ in range(9)]))
    assert found.startswith("0, 1, 2 and 6 more (Linear8bitLt) has a threshold")


def test_dynamic_quantization_of_torch() -> None:
    """It does mix: one scale for all of a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            body = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
            inputs = torch.randn(3, 4)
            before = body(inputs)[0]
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this torch cannot quantize: {error}")
    inputs[1] *= 10
    assert not torch.equal(before, body(inputs)[0])
    (found,) = configuration_problems(nn.Sequential(body, nn.Linear(4, 2)))
    assert found.startswith("0.0 (Linear) quantizes activations by one scale")


# ---- transformers, where it is installed ----------------------------------------------------------------------------


TEXT = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


def of_transformers(name: str, config: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return getattr(transformers, name)(getattr(transformers, config)(**settings))


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, False),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, True),
    ],
)
def test_llama(rope: dict[str, Any], refused: bool) -> None:
    model = of_transformers("LlamaForCausalLM", "LlamaConfig", **TEXT, rope_parameters=rope)
    found = problems(model)
    assert bool(found) is refused
    assert all("model.rotary_emb (LlamaRotaryEmbedding) has rope_type='dynamic'" in text for text in found)


def test_mixtral() -> None:
    settings = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 2, "router_aux_loss_coef": 0.1}
    assert problems(of_transformers("MixtralForCausalLM", "MixtralConfig", **settings)) == []
    model = of_transformers("MixtralForCausalLM", "MixtralConfig", **settings, output_router_logits=True)
    (found,) = problems(model)
    assert found.startswith("the model (MixtralForCausalLM) has config.output_router_logits=True")
    model.config.output_router_logits = False  # as the message says
    assert problems(model) == []


def test_nllb_and_switch() -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "num_experts": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    steps = {"encoder_sparse_step": 1, "decoder_sparse_step": 1}
    found = problems(of_transformers("NllbMoeModel", "NllbMoeConfig", **sizes, **heads, **steps, expert_capacity=4))
    assert any("expert_capacity=4" in text for text in found)
    assert any("moe_eval_capacity_token_fraction=1.0" in text for text in found)
    open_ended = {"expert_capacity": 10**9, "moe_eval_capacity_token_fraction": 0.0}
    assert problems(of_transformers("NllbMoeModel", "NllbMoeConfig", **sizes, **heads, **steps, **open_ended)) == []
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    (found,) = problems(of_transformers("SwitchTransformersModel", "SwitchTransformersConfig", **sizes))
    assert "router" in found.partition("(")[0]
    assert "expert_capacity=64" in found


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


def test_clip_is_refused_as_a_whole_and_its_towers_are_not() -> None:
    vision = {**VISION, "image_size": 8, "patch_size": 4}
    model = of_transformers("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=vision, projection_dim=4)
    (found,) = problems(model)
    assert found.startswith("the model (CLIPModel) compares all examples of a batch with each other (its logit_scale")
    assert "model.vision_model" in found
    assert problems(nn.Sequential(model.vision_model)) == []
    assert problems(nn.ModuleDict({"clip": model, "head": nn.Linear(4, 2)})) == []  # which may use one tower only
    assert problems(of_transformers("CLIPVisionModelWithProjection", "CLIPVisionConfig", **vision)) == []
    siglip = of_transformers("SiglipModel", "SiglipConfig", text_config=TEXT, vision_config=vision)
    assert "logit_scale" in problems(siglip)[0]


def test_ordinary_models_are_accepted() -> None:
    gpt = of_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=20, n_embd=8, n_head=2, n_layer=1, n_positions=16)
    assert problems(gpt) == []
    assert problems(of_transformers("BertModel", "BertConfig", **TEXT)) == []
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 0}
    ranks = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4}
    model = of_transformers("DeepseekV3ForCausalLM", "DeepseekV3Config", **TEXT, **experts, **ranks)
    assert problems(model) == []
