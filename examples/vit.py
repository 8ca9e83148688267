"""Train a ViT of transformers on scikit-learn's digits, inside Hugging Face's Trainer, from scratch.

    python examples/vit.py

1,797 real images that come with scikit-learn: nothing is downloaded. With ADADP_SHORT in the environment it trains for
a few steps.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from adadp.integrations.huggingface import private

SHORT = "ADADP_SHORT" in os.environ
EPSILON, DELTA = 8.0, 1e-4
logging.set_verbosity_error()
torch.manual_seed(0)

images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
pixels = images.float().reshape(-1, 1, 8, 8) / 8 - 1  # a fixed, public scale: never a statistic of the private data
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).tolist()
rows = [{"pixel_values": pixels[place], "labels": int(labels[place])} for place in order]
test, train = rows[:180], rows[180:]

config = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_labels=10,
    initializer_range=0.1,  # a small model from scratch, few steps
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
args = TrainingArguments(
    output_dir="vit",
    per_device_train_batch_size=64 if SHORT else 256,  # the lot
    max_steps=3 if SHORT else 200,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, axis=1) == found.label_ids).mean())}


trainer = private(Trainer)(
    model=ViTForImageClassification(config),
    args=args,
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=accuracy,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    max_grad_norm=1.0,
    max_physical_batch_size=128,
)
trainer.train()
print(f"accuracy on {len(test)} images held out: {trainer.evaluate()['eval_accuracy']:.1%}")
trainer.save_model("vit")  # with a README.md that states the guarantee
print(f"\n{trainer.guarantee.to_text(80)}")
