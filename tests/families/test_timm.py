"""Models of timm, small and random: each gradient is that of its example alone. timm needs torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families.compare import assert_same, by_capture, by_loop, released_and_expected
from families.tasks import CLASSES, IMAGES, Batch, Task
from torch import Tensor, nn

import adadp
from adadp import losses

timm: Any = pytest.importorskip("timm", reason="timm is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

IMAGE = 32
SMALL = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
STAGES = {"depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16, "img_size": IMAGE, "patch_size": 4, "window_size": 4}
#: timm's name of a model, or a class of its where a name fixes the size, and what makes it small.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "vit_relpos_small_patch16_224": {**SMALL, "class_token": True},
    "vit_small_patch14_reg4_dinov2": SMALL,
    "deit_tiny_distilled_patch16_224": SMALL,
    "deit3_small_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "beitv2_base_patch16_224": {**SMALL, "use_abs_pos_emb": True},
    "eva02_tiny_patch14_224": SMALL,
    "swin_tiny_patch4_window7_224": STAGES,
    "swinv2_tiny_window8_256": STAGES,
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "cait_xxs24_224": {**SMALL, "depth_token_only": 1},
    "xcit_nano_12_p8_224": {**SMALL, "cls_attn_layers": 1},
    "maxvit_rmlp_pico_rw_256": {
        "img_size": IMAGE,
        "depths": (1, 1),
        "embed_dim": (32, 32),
        "stem_width": 16,
        "transformer_partition_ratio": 16,
    },
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 32, 64)},
    "test_efficientnet": {},
    "mobilenetv3_small_050": {},
    "MlpMixer": {"img_size": IMAGE, "patch_size": 8, "embed_dim": 24, "num_blocks": 2},
    "ResNetV2": {"layers": (1, 1), "channels": (128, 128), "stem_chs": 32, "stem_type": "fixed"},
}
every_model = pytest.mark.parametrize("name", MODELS)


def _losses(model: nn.Module, batch: Batch) -> Tensor:
    return losses.classification(model(batch["pixel_values"]), batch["labels"])


def _batch(count: int) -> Batch:
    batch = IMAGES.batch(count)
    images = torch.nn.functional.interpolate(batch["pixel_values"].double(), size=IMAGE)
    return {**batch, "pixel_values": images}


TASK = Task(_batch, _losses, crowd=17)


def make(name: str, change: Callable[[nn.Module], nn.Module] = adadp.fix) -> nn.Module:
    """The model after `fix`, with weights so large that no part of it hides behind another.

    In float64: normalising few values, as convolutions of this size end in, magnifies float32's rounding.
    """
    torch.manual_seed(0)
    build = {"MlpMixer": timm.models.mlp_mixer.MlpMixer, "ResNetV2": timm.models.resnetv2.ResNetV2}.get(name)
    if build is None:
        build = partial(timm.create_model, name, pretrained=False)
    model = change(build(num_classes=CLASSES, **MODELS[name])).double()
    for part in model.modules():  # nothing random: the loop runs the model anew for each example
        for rate in ("p", "drop_prob"):
            if hasattr(part, rate):
                setattr(part, rate, 0.0)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


@every_model
@pytest.mark.parametrize("count", [1, 4, TASK.crowd])
def test_gradients_are_those_of_each_example_alone(name: str, count: int) -> None:
    model, batch = make(name), TASK.batch(count)
    assert_same(by_capture(model, TASK, batch), by_loop(model, TASK, batch))


@every_model
def test_a_private_step_is_the_sum_of_clipped_gradients(name: str) -> None:
    assert_same(*released_and_expected(make(name), TASK), 1e-4)


@pytest.mark.parametrize("name", ["resnet18", "test_efficientnet", "xcit_nano_12_p8_224"])
def test_fix_keeps_what_batch_norm_had_learnt(name: str) -> None:
    plain = make(name, lambda model: model)
    norms = {key for key, part in plain.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)}
    assert norms
    fixed = adadp.fix(plain)
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in fixed.modules())
    kept = dict(fixed.named_parameters())
    for name, parameter in plain.named_parameters():
        owner, _, own = name.rpartition(".")  # a norm that activates is a sequence with the norm in it
        assert torch.equal(kept[name] if name in kept else kept[f"{owner}.norm.{own}"], parameter), name
    assert_alike(fixed, plain)


def assert_alike(fixed: nn.Module, plain: nn.Module) -> None:
    """What BatchNorm is followed by in its module (timm's has an activation) still is: every output has its sign."""
    for key, part in plain.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and isinstance(getattr(part, "act", None), nn.ReLU):
            given = torch.randn(2, part.num_features, 3, 3, dtype=torch.float64)
            assert float(fixed.get_submodule(key)(given).min()) >= 0, key
