"""litgpt's own pretraining entry, `litgpt.pretrain.setup`, over our rows. Runs in `.peers/`, where transformers is not.

settings: {"precision": "32-true" | "bf16-mixed" | "bf16-true"} and, where litgpt's default is not the best on a CPU,
{"fused": true} (litgpt asks for the fused AdamW on CUDA only) and {"compile": false} (it always calls torch.compile).

`litgpt_worker.py --convert FOLDER MODEL` runs litgpt's converter first, once: FOLDER holds a copy of the safetensors of
MODEL, a Hugging Face folder.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract import Clock, Job, read_job, report
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import name_to_config
from litgpt.data import DataModule
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

NAME = "peers-llama"


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW. litgpt passes fused=False on a CPU to any optimizer whose signature has the word."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


class Rows(DataModule):
    """The rows in their order. litgpt reads length + 1 columns; the last is a label that its loss ignores, so that the
    tokens read and the tokens trained are those of the other contenders."""

    def __init__(self, job: Job, clock: Clock):
        super().__init__()
        self.job, self.clock = job, clock
        rows = torch.from_numpy(np.load(job.tokens)).long()
        self.rows = torch.cat([rows, torch.full((len(rows), 1), -100)], dim=1)

    def connect(self, tokenizer=None, batch_size: int = 1, max_seq_length: int | None = None, **kwargs) -> None:
        if (batch_size, max_seq_length) != (self.job.batch, self.job.length):
            raise RuntimeError(f"litgpt asks for rows of {max_seq_length} by {batch_size}")

    def _tick(self, rows: list[torch.Tensor]) -> torch.Tensor:
        # The loop asks for a batch when the step before it, its logging included, is over; and once more at the end.
        self.clock.tick()
        return torch.stack(rows)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.rows, batch_size=self.job.batch, collate_fn=self._tick)  # type: ignore[arg-type]

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        # litgpt validates before it trains, whatever is set: one batch, of the training's shape, or it would compile for two.
        return torch.utils.data.DataLoader(self.rows[: self.job.batch], batch_size=self.job.batch)  # type: ignore[arg-type]


def shape(folder: Path) -> dict[str, Any]:
    """litgpt's configuration of a Hugging Face Llama."""
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "name": NAME,
        "block_size": hf["max_position_embeddings"],
        "vocab_size": hf["vocab_size"],
        "padded_vocab_size": hf["vocab_size"],
        "n_layer": hf["num_hidden_layers"],
        "n_head": hf["num_attention_heads"],
        "n_query_groups": hf["num_key_value_heads"],
        "n_embd": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "norm_eps": hf["rms_norm_eps"],
        "rope_base": int(hf["rope_parameters"]["rope_theta"]),
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    }


def convert(folder: Path, model: Path) -> None:
    name_to_config[NAME] = shape(model)
    convert_hf_checkpoint(folder, model_name=NAME)
    print("\n" + json.dumps({"converted": True}))


def train() -> None:
    job, clock = read_job(), Clock()
    if not job.settings.get("compile", True):
        torch.compiler.set_stance("force_eager")
    adamw = {"lr": job.lr, "betas": job.betas, "eps": job.eps, "weight_decay": job.weight_decay}
    sys.argv = ["litgpt pretrain", NAME]  # litgpt reads the command line again when it saves
    pretrain.setup(
        NAME,
        model_config=Config(**shape(Path(job.model))),
        out_dir=Path(job.scratch),
        precision=job.settings["precision"],
        initial_checkpoint_dir=Path(job.litgpt_model).absolute(),
        data=Rows(job, clock),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=job.batch,
            micro_batch_size=job.batch,
            max_tokens=job.steps * job.batch * job.length,
            max_norm=job.clip,
            min_lr=job.lr,  # its cosine from lr to lr: constant
            lr_warmup_steps=0,
            tie_embeddings=True,
        ),
        eval=EvalArgs(interval=10 * job.steps, initial_validation=False, final_validation=False),
        optimizer={
            "class_path": f"{__name__}.FusedAdamW" if job.settings.get("fused") else "torch.optim.AdamW",
            "init_args": adamw,
        },
        devices=1,
        logger_name="csv",
        seed=job.seed,
    )
    with next(Path(job.scratch).rglob("metrics.csv")).open(encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    report(job, clock, losses, ("litgpt", "lightning", "torch"))


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        convert(Path(sys.argv[2]).absolute(), Path(sys.argv[3]).absolute())
    else:
        train()
