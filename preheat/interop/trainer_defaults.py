"""Defaults of other trainers: what a run does that its configuration leaves out, with the version and the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AXOLOTL", "LLAMA_FACTORY", "Default", "TrainerDefaults"]


@dataclass(frozen=True)
class Default:
    """A default of a trainer.

    Attributes:
        value: of the field of `settings.Settings` that it is the default of.
        what: what the trainer does, for people; empty for a plain number that needs no words.
        source: the file of the trainer's repository or package that says so.
    """

    value: object
    what: str
    source: str


@dataclass(frozen=True)
class TrainerDefaults:
    """The defaults of a trainer.

    Attributes:
        version: the version whose source was read.
        settings: by field of `settings.Settings`; a field that is not listed keeps the value it has there.
        adapter_dropout: dropout on the input of adapters.
        adapts: layers with adapters if the configuration names none, by method.
        recomputes: methods with which activation checkpointing is on by default.
    """

    version: str
    settings: Mapping[str, Default]
    adapter_dropout: float
    adapts: Mapping[str, str]
    recomputes: tuple[str, ...]


_HF = "transformers training_args.py"
_TRAINER: Mapping[str, Default] = {
    "betas": Default((0.9, 0.999), "Adam's betas are 0.9 and 0.999", _HF),
    "eps": Default(1e-8, "", _HF),
    "weight_decay": Default(0.0, "no weight decay", _HF),
    "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", _HF),
    "learning_rate": Default(5e-5, "a learning rate of 5e-5", _HF),
    "micro_batch": Default(8, "8 sequences a micro-batch", _HF),
    "schedule": Default("linear", "the learning rate falls linearly", _HF),
    "epochs": Default(3.0, "three epochs", _HF),
    "seed": Default(42, "", _HF),
}
"""Those of transformers' Trainer, which the trainers below build on."""

AXOLOTL = TrainerDefaults(
    version="0.19",
    settings={
        **_TRAINER,
        "seed": Default(42, "", "axolotl/utils/schemas/validation.py"),
        "length": Default(512, "512 tokens a sequence", "axolotl/utils/schemas/config.py"),
        "micro_batch": Default(1, "one sequence a micro-batch", "axolotl/utils/schemas/training.py"),
        "epochs": Default(1.0, "one epoch", "axolotl/utils/schemas/training.py"),
        "schedule": Default("cosine", "the learning rate falls as a cosine", "axolotl/utils/schemas/training.py"),
        "warmup_ratio": Default(0.03, "3 % of the steps are warmup", "axolotl/core/builders/base.py"),
        "optimizer": Default("adamw_torch_fused", "fused AdamW", "axolotl/utils/schemas/training.py"),
        "precision": Default("bf16", "bf16 on a GPU that has it", "axolotl/utils/schemas/config.py, bf16: auto"),
        "half_weights": Default(
            True, "trained weights stay in bf16, without fp32 copies", "axolotl/utils/config/__init__.py, torch_dtype"
        ),
        "checkpointing": Default(False, "no activation checkpointing", "axolotl/utils/schemas/config.py"),
        "packing": Default(
            False, "rows are padded, not packed", "axolotl/utils/schemas/config.py and core/builders/causal.py"
        ),
        "train_on": Default("assistant", "prompts are not trained on", "axolotl/utils/schemas/training.py"),
        "validation": Default(0.0, "nothing is held out", "axolotl/utils/schemas/config.py"),
    },
    adapter_dropout=0.0,
    adapts={"lora": "q,v", "qlora": "q,v"},
    recomputes=(),
)
LLAMA_FACTORY = TrainerDefaults(
    version="0.9.5",
    settings={
        **_TRAINER,
        "length": Default(2048, "2,048 tokens a sequence", "llamafactory/hparams/data_args.py, cutoff_len"),
        "precision": Default("fp32", "neither bf16 nor fp16 is on", _HF),
        "half_weights": Default(
            False, "trained weights are in fp32 under autocast", "llamafactory/model/adapter.py, init_adapter"
        ),
        "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_HF}, optim"),
        "adapter": Default("lora", "trains a LoRA adapter", "llamafactory/hparams/finetuning_args.py, finetuning_type"),
        "lora_rank": Default(8, "adapters of rank 8", "llamafactory/hparams/finetuning_args.py"),
        "checkpointing": Default(
            True, "activation checkpointing is on", "llamafactory/hparams/model_args.py, disable_gradient_checkpointing"
        ),
        "packing": Default(
            False, "rows are padded, not packed (stage pt packs)", "llamafactory/hparams/parser.py, data_args.packing"
        ),
        "warmup_ratio": Default(0.0, "no warmup", _HF),
        "train_on": Default("assistant", "prompts are not trained on", "llamafactory/hparams/data_args.py"),
        "validation": Default(0.0, "nothing is held out", "llamafactory/hparams/data_args.py, val_size"),
    },
    adapter_dropout=0.0,
    adapts={"lora": "all", "qlora": "all"},
    recomputes=("full-ft", "lora", "qlora"),
)
