"""Private training inside Hugging Face's trainers: `Trainer`, `Seq2SeqTrainer`, and TRL's `SFTTrainer`.

    from adadp.integrations.huggingface import private

    trainer = private(Trainer)(model=model, args=args, train_dataset=dataset, data_collator=collate,
                               target_epsilon=3, target_delta=1e-6, ledger="spent.jsonl", dataset="tickets-2026")
    trainer.train()
    print(trainer.guarantee)

`private(TrainerClass)` is a subclass that takes the arguments of `Privacy` beside the trainer's own. It needs the
extra `huggingface`; for TRL, `trl`.
"""

from __future__ import annotations

from adadp.integrations.huggingface.privacy import Privacy
from adadp.integrations.huggingface.trainer import private

__all__ = ["Privacy", "private"]
