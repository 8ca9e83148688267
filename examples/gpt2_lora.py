"""Fine-tune a GPT-2 with LoRA on private support tickets, inside Hugging Face's Trainer.

    python examples/gpt2_lora.py

Nothing is downloaded: the tickets are made up, and a small GPT-2 with random weights is first trained, in the ordinary
way, on made-up public text. Put `GPT2LMHeadModel.from_pretrained("gpt2")` and your own dataset in their places.
`examples/gpt2_lora.ipynb` is the same as a notebook. With ADADP_SHORT in the environment it trains for a few steps.
"""

from __future__ import annotations

import os
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from adadp.integrations.huggingface import private

SHORT = "ADADP_SHORT" in os.environ
EPSILON, DELTA = 3.0, 1e-5
torch.manual_seed(0)
logging.set_verbosity_error()

# ---- text: what anybody may know, and what customers wrote ----------------------------------------------------------

WHO = ["a customer", "a manager", "the office", "our shop", "a nurse", "the driver", "a teacher", "the hotel"]
WHAT = ["printer", "router", "invoice", "password", "screen", "order", "account", "heater"]
PUBLIC = ["likes", "buys", "sells", "has", "wants"]
PRIVATE = ["is broken since", "was lost on", "stopped working on", "must be replaced by", "was never repaired after"]
WHEN = ["monday", "tuesday", "wednesday", "thursday", "friday"]


def sentence(rng: random.Random, verbs: list[str]) -> str:
    who, verb, what = rng.choice(WHO), rng.choice(verbs), rng.choice(WHAT)
    if verbs is PUBLIC:
        return f"{who} {verb} a {what} on {rng.choice(WHEN)}"
    return f"{who} writes that the {what} {verb} {rng.choice(WHEN)}"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word that may be said: the vocabulary is public, and not counted on the tickets."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = " ".join([*WHO, *WHAT, *PUBLIC, *PRIVATE, *WHEN, "a on writes that the"]).split()
    words = {word: number for number, word in enumerate(dict.fromkeys(["<pad>", "<end>", "<unknown>", *known]))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


tokenizer = word_tokenizer()


def tokenized(count: int, verbs: list[str], seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [dict(tokenizer(f"{sentence(rng, verbs)} <end>")) for _ in range(count)]


collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads; labels are the words, padding left out
public = tokenized(256 if SHORT else 4000, PUBLIC, 1)
tickets = tokenized(512 if SHORT else 6000, PRIVATE, 2)
held_out = tokenized(64 if SHORT else 400, PRIVATE, 3)  # these customers get no guarantee: their loss is printed

# ---- a model that knows public text ---------------------------------------------------------------------------------

sizes = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
base = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **end, pad_token_id=tokenizer.pad_token_id))


def arguments(folder: str, **settings: object) -> TrainingArguments:
    """The same for both runs: on a CPU, and quiet."""
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(output_dir=folder, **{"use_cpu": not torch.cuda.is_available(), **quiet, **settings})


ordinary = arguments("public", per_device_train_batch_size=64, learning_rate=5e-3, max_steps=5 if SHORT else 150)
Trainer(model=base, args=ordinary, train_dataset=public, data_collator=collate).train()

# ---- LoRA, privately ------------------------------------------------------------------------------------------------

adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(base, adapters)
args = arguments(
    "private",
    per_device_train_batch_size=256 if not SHORT else 64,  # the lot: larger lots need less noise for each example
    max_steps=3 if SHORT else 120,
    learning_rate=2e-2,
    lr_scheduler_type="cosine",
)
trainer = private(Trainer)(
    model=model,
    args=args,
    train_dataset=tickets,
    eval_dataset=held_out,
    data_collator=collate,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    max_grad_norm=0.1,
    max_physical_batch_size=64,
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
print(f"loss on tickets held out: {before:.3f} before, {after:.3f} after")
trainer.save_model("tickets-lora")  # adapters, and a README.md that states the guarantee
print(f"\n{trainer.guarantee.to_text(80)}")
