"""Train a BERT-shaped classifier on private messages, inside Hugging Face's Trainer, from scratch.

    python examples/text_classifier.py

Nothing is downloaded: the messages are made up, each to one of four departments, and the model starts from random
weights. Put `BertForSequenceClassification.from_pretrained(...)` and your own dataset in their places. With ADADP_SHORT
in the environment it trains for a few steps.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments
from transformers.utils import logging

from adadp.integrations.huggingface import private

SHORT = "ADADP_SHORT" in os.environ
EPSILON, DELTA = 3.0, 1e-5
logging.set_verbosity_error()
torch.manual_seed(0)

# ---- messages: some words of a department's own among words that everybody uses --------------------------------------

DEPARTMENTS = {
    "billing": ["invoice", "refund", "charge", "payment", "price"],
    "repair": ["broken", "noise", "smoke", "leaking", "cracked"],
    "delivery": ["parcel", "courier", "late", "address", "lost"],
    "account": ["password", "login", "email", "profile", "locked"],
}
FILLING = [
    "hello", "i", "my", "the", "is", "was", "please", "help", "with", "since", "today", "again", "never", "still",
]  # fmt: skip
OWN = [word for words in DEPARTMENTS.values() for word in words]
WORDS = {word: place for place, word in enumerate(["<padding>", *FILLING, *OWN])}
LONGEST = 12


def messages(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of numbers, padded to one public length: then no length of a batch depends on anybody."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(len(DEPARTMENTS))
        own = list(DEPARTMENTS.values())[label]
        text = [rng.choice(FILLING if rng.random() < 0.5 else own) for _ in range(rng.randint(6, LONGEST - 1))]
        words = [WORDS[word] for word in [*text, rng.choice(own)]]
        padding = [0] * (LONGEST - len(words))
        rows.append({"input_ids": words + padding, "attention_mask": [1] * len(words) + padding, "labels": label})
    return rows


train, test = messages(600 if SHORT else 6000, 1), messages(100 if SHORT else 500, 2)

# ---- the model, and how it is trained -------------------------------------------------------------------------------

config = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=LONGEST,
    num_labels=len(DEPARTMENTS),
    initializer_range=0.1,  # a small model from scratch, few steps
    pad_token_id=0,
    hidden_dropout_prob=0.0,  # the noise regularizes enough
    attention_probs_dropout_prob=0.0,
)
args = TrainingArguments(
    output_dir="classifier",
    per_device_train_batch_size=100 if SHORT else 300,  # the lot
    max_steps=3 if SHORT else 100,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)


def accuracy(found: EvalPrediction) -> dict[str, Any]:
    return {"accuracy": float((np.argmax(found.predictions, axis=1) == found.label_ids).mean())}


trainer = private(Trainer)(
    model=BertForSequenceClassification(config),
    args=args,
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=accuracy,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    max_grad_norm=0.5,
    max_physical_batch_size=100,
)
trainer.train()
print(f"accuracy on messages held out: {trainer.evaluate()['eval_accuracy']:.1%} (chance is 25%)")
trainer.save_model("classifier")  # with a README.md that states the guarantee
print(f"\n{trainer.guarantee.to_text(80)}")
