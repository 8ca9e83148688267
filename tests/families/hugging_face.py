"""Families of Hugging Face models, tiny and random, made from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families.tasks import (
    CLASSES,
    DETECTION,
    IMAGE,
    IMAGE_TOWER,
    IMAGES,
    MASKED,
    PAD,
    PAIRS,
    SOUNDS,
    SPEECH,
    START,
    TEXT,
    TEXT_TOWER,
    WORDS,
    Task,
)
from torch import nn

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()

SPECIAL = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": START}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": 16, "intermediate_size": 24}
ENCODER = {**DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**DECODER, "num_key_value_heads": 1, "head_dim": 8}
PATCHES = {
    "image_size": IMAGE, "patch_size": 4, "num_labels": CLASSES, "intermediate_size": 24, **SIZES,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BOTH_WAYS = {
    **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": 16, "d_model": 16, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "dropout": 0.0, "attention_dropout": 0.0, "decoder_start_token_id": START,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model and what it is trained on. `by_config` builds it; other settings may be added to the configuration's."""

    task: Task
    config: str
    model: str
    settings: dict[str, Any]
    adapted: Callable[[nn.Module], nn.Module] | None = None

    def make(self, **more: Any) -> nn.Module:
        """The model, with weights so large that no part of it hides behind another, in training mode."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.settings, **more})
        model = getattr(transformers, self.model)(config)
        model = model if self.adapted is None else self.adapted(model)
        for parameter in model.parameters():
            if parameter.requires_grad:  # biases, layer scales and LoRA's second factors begin at 0
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return model.train()


def _gpt2(**more: Any) -> dict[str, Any]:
    nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        **SPECIAL,
        "vocab_size": WORDS,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        **nothing,
        **more,
    }


def _adapter(name: str, **settings: Any) -> Callable[[nn.Module], nn.Module]:
    """A model with adapters of PEFT; all else is frozen."""

    def adapted(model: nn.Module) -> nn.Module:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        return peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **settings))

    return adapted


def _on_llama(adapter: Callable[[nn.Module], nn.Module]) -> Family:
    return Family(TEXT, "LlamaConfig", "LlamaForCausalLM", GROUPED, adapter)


def _on_gpt2(adapter: Callable[[nn.Module], nn.Module]) -> Family:
    return Family(TEXT, "GPT2Config", "GPT2LMHeadModel", _gpt2(), adapter)


_LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
_HEADS = {"target_modules": ["q_proj", "v_proj"]}
_SWIN = {
    "image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": CLASSES, "drop_path_rate": 0.0,
}  # fmt: skip
_CONVNEXT = {"depths": [1, 1], "hidden_sizes": [8, 12], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES}
_TOWER = {**DECODER, "projection_dim": 6, "attention_dropout": 0.0}
_DETR = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 3,
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0, "num_labels": CLASSES,
    "auxiliary_loss": False,
}  # fmt: skip


def _detr() -> dict[str, Any]:
    body = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    return {**_DETR, "backbone_config": transformers.ResNetConfig(**body, out_features=["stage2"])}


FAMILIES: dict[str, Family] = {
    # ---- decoders
    "gpt2": Family(TEXT, "GPT2Config", "GPT2LMHeadModel", _gpt2()),
    "gpt-neo": Family(TEXT, "GPTNeoConfig", "GPTNeoForCausalLM", {
        **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": 16, "hidden_size": 16, "num_layers": 2,
        "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4,
    }),
    "gpt-j": Family(TEXT, "GPTJConfig", "GPTJForCausalLM", {**_gpt2(), "rotary_dim": 4}),
    "gpt-neox": Family(TEXT, "GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER),
    "opt": Family(TEXT, "OPTConfig", "OPTForCausalLM", {
        **DECODER, "ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0,
    }),
    "bloom": Family(TEXT, "BloomConfig", "BloomForCausalLM", {
        **SPECIAL, "vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2,
    }),
    "falcon": Family(TEXT, "FalconConfig", "FalconForCausalLM", {**DECODER, "ffn_hidden_size": 24}),
    "mpt": Family(TEXT, "MptConfig", "MptForCausalLM", {
        "vocab_size": WORDS, "d_model": 16, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 16,
    }),
    "llama": Family(TEXT, "LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": Family(TEXT, "MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "qwen2": Family(TEXT, "Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": Family(TEXT, "Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "gemma": Family(TEXT, "GemmaConfig", "GemmaForCausalLM", GROUPED),
    "gemma2": Family(TEXT, "Gemma2Config", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "gemma3": Family(TEXT, "Gemma3TextConfig", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "phi": Family(TEXT, "PhiConfig", "PhiForCausalLM", {**DECODER, "qk_layernorm": True}),
    "phi3": Family(TEXT, "Phi3Config", "Phi3ForCausalLM", DECODER),
    "stablelm": Family(TEXT, "StableLmConfig", "StableLmForCausalLM", {**DECODER, "num_key_value_heads": 2}),
    "olmo2": Family(TEXT, "Olmo2Config", "Olmo2ForCausalLM", DECODER),
    "cohere": Family(TEXT, "CohereConfig", "CohereForCausalLM", DECODER),
    "mamba": Family(TEXT, "MambaConfig", "MambaForCausalLM", {
        **SPECIAL, "vocab_size": WORDS, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2,
    }),
    # ---- encoders
    "bert": Family(MASKED, "BertConfig", "BertForMaskedLM", ENCODER),
    "roberta": Family(MASKED, "RobertaConfig", "RobertaForMaskedLM", ENCODER),
    "distilbert": Family(MASKED, "DistilBertConfig", "DistilBertForMaskedLM", {
        **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": 16, "dim": 16, "hidden_dim": 24, "n_layers": 2,
        "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
    }),
    "albert": Family(MASKED, "AlbertConfig", "AlbertForMaskedLM", {**ENCODER, "embedding_size": 8}),
    "electra": Family(MASKED, "ElectraConfig", "ElectraForMaskedLM", {**ENCODER, "embedding_size": 8}),
    "deberta-v2": Family(MASKED, "DebertaV2Config", "DebertaV2ForMaskedLM", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False, "pooler_dropout": 0.0,
    }),
    "deberta": Family(MASKED, "DebertaConfig", "DebertaForMaskedLM", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 4,
    }),
    "mobilebert": Family(MASKED, "MobileBertConfig", "MobileBertForMaskedLM", {
        **ENCODER, "embedding_size": 8, "intra_bottleneck_size": 16, "num_feedforward_networks": 1,
        "trigram_input": False,  # with it a text's last word sees the padding
    }),
    "mpnet": Family(MASKED, "MPNetConfig", "MPNetForMaskedLM", ENCODER),
    "modernbert": Family(MASKED, "ModernBertConfig", "ModernBertForMaskedLM", {
        **DECODER, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 4, "global_attn_every_n_layers": 2,
    }),
    # ---- encoders with decoders
    "t5": Family(PAIRS, "T5Config", "T5ForConditionalGeneration", {
        **SPECIAL, "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "dropout_rate": 0.0, "decoder_start_token_id": START,
    }),
    "bart": Family(PAIRS, "BartConfig", "BartForConditionalGeneration", BOTH_WAYS),
    "pegasus": Family(PAIRS, "PegasusConfig", "PegasusForConditionalGeneration", BOTH_WAYS),
    # ---- images
    "vit": Family(IMAGES, "ViTConfig", "ViTForImageClassification", PATCHES),
    "deit": Family(IMAGES, "DeiTConfig", "DeiTForImageClassification", PATCHES),
    "beit": Family(IMAGES, "BeitConfig", "BeitForImageClassification", {
        **PATCHES, "use_relative_position_bias": True, "use_absolute_position_embeddings": True,
        "drop_path_rate": 0.0,
    }),
    "beit-shared": Family(IMAGES, "BeitConfig", "BeitForImageClassification", {
        **PATCHES, "use_shared_relative_position_bias": True, "drop_path_rate": 0.0, "use_mean_pooling": False,
    }),
    "dinov2": Family(IMAGES, "Dinov2Config", "Dinov2ForImageClassification", {**PATCHES, "mlp_ratio": 2}),
    "swin": Family(IMAGES, "SwinConfig", "SwinForImageClassification", {**_SWIN, "use_absolute_embeddings": True}),
    "swinv2": Family(IMAGES, "Swinv2Config", "Swinv2ForImageClassification", _SWIN),
    "poolformer": Family(IMAGES, "PoolFormerConfig", "PoolFormerForImageClassification", {
        "depths": [1, 1], "hidden_sizes": [8, 12], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1], "num_labels": CLASSES, "drop_path_rate": 0.0,
    }),
    "segformer": Family(IMAGES, "SegformerConfig", "SegformerForImageClassification", {
        "depths": [1, 1], "hidden_sizes": [8, 12], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "sr_ratios": [2, 1], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
        "num_labels": CLASSES,
    }),
    "convnext": Family(IMAGES, "ConvNextConfig", "ConvNextForImageClassification", _CONVNEXT),
    "convnextv2": Family(IMAGES, "ConvNextV2Config", "ConvNextV2ForImageClassification", _CONVNEXT),
    "detr": Family(DETECTION, "DetrConfig", "DetrForObjectDetection", _detr()),
    "yolos": Family(DETECTION, "YolosConfig", "YolosForObjectDetection", {
        **PATCHES, "image_size": [IMAGE, IMAGE], "num_detection_tokens": 3,
    }),
    # ---- towers and sounds
    "clip-text": Family(TEXT_TOWER, "CLIPTextConfig", "CLIPTextModelWithProjection", _TOWER),
    "clip-vision": Family(IMAGE_TOWER, "CLIPVisionConfig", "CLIPVisionModelWithProjection", {
        **_TOWER, "image_size": IMAGE, "patch_size": 4,
    }),
    "siglip-vision": Family(IMAGE_TOWER, "SiglipVisionConfig", "SiglipVisionModel", {
        **SIZES, "image_size": IMAGE, "patch_size": 4, "intermediate_size": 24,
    }),
    "whisper": Family(SPEECH, "WhisperConfig", "WhisperForConditionalGeneration", {
        **BOTH_WAYS, "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 16,
    }),
    "wav2vec2": Family(SOUNDS, "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", {
        **SIZES, "intermediate_size": 24, "conv_dim": [8, 8], "conv_kernel": [4, 2], "conv_stride": [2, 2],
        "num_feat_extract_layers": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
        "layerdrop": 0.0, "apply_spec_augment": False, "classifier_proj_size": 8, "num_labels": CLASSES,
    }),
    # ---- adapters
    "lora": _on_llama(_adapter("LoraConfig", **_LORA, **_HEADS)),
    "lora-gpt2": _on_gpt2(_adapter("LoraConfig", **_LORA, target_modules=["c_attn"], fan_in_fan_out=True)),
    "rslora": _on_llama(_adapter("LoraConfig", **_LORA, **_HEADS, use_rslora=True)),
    "dora": _on_llama(_adapter("LoraConfig", **_LORA, **_HEADS, use_dora=True)),
    "ia3": _on_llama(_adapter(
        "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
    )),
    "prompt": _on_gpt2(_adapter("PromptTuningConfig", num_virtual_tokens=3)),
    "prefix": _on_llama(_adapter("PrefixTuningConfig", num_virtual_tokens=3)),
}  # fmt: skip
