"""transformers' Trainer as it comes: only what the job fixes (and printing, saving, order of rows) is set.

settings: {} for the defaults, {"bf16": true} for its mixed precision.
"""

from __future__ import annotations

import numpy as np
import torch
from contract import Clock, read_job, report
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Row n of the token file; the model shifts the labels itself, so a row's last token has none."""

    def __init__(self, path: str):
        self.rows = torch.from_numpy(np.load(path)).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watch(TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock
        self.losses: list[float] = []

    def on_train_begin(self, *args, **kwargs) -> None:
        self.clock.tick()

    def on_step_end(self, *args, **kwargs) -> None:
        self.clock.tick()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def main() -> None:
    job, clock = read_job(), Clock()
    watch = Watch(clock)
    arguments = TrainingArguments(
        output_dir=job.scratch,
        max_steps=job.steps,
        per_device_train_batch_size=job.batch,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_epsilon=job.eps,
        weight_decay=job.weight_decay,
        max_grad_norm=job.clip,
        seed=job.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **job.settings,
    )
    model = LlamaForCausalLM.from_pretrained(job.model)
    Trainer(model=model, args=arguments, train_dataset=Rows(job.tokens), callbacks=[watch]).train()
    report(job, clock, watch.losses, ("transformers", "accelerate", "torch"))


if __name__ == "__main__":
    main()
