"""Defaults of other trainers: what a run does that its configuration leaves out, with the version and the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "AXOLOTL",
    "CHECKPOINT_WEIGHTS",
    "LLAMA_FACTORY",
    "PEFT",
    "TRANSFORMERS",
    "TRL_ARGUMENTS",
    "TRL_DPO",
    "TRL_SFT",
    "Default",
    "TrainerDefaults",
]


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

_PRECISION = Default("fp32", "neither bf16 nor fp16 is on: no autocast", _HF)
_NO_CHECKPOINTING = Default(False, "no activation checkpointing", _HF)
_NESTED = Default(False, "4-bit weights with plain scales", "transformers quantization_config.py")

PEFT: Mapping[str, Default] = {
    "adapter": Default("lora", "an adapter is trained", "peft tuners/lora/config.py"),
    "lora_rank": Default(8, "adapters of rank 8", "peft tuners/lora/config.py"),
    "lora_alpha": Default(8.0, "adapters are scaled by 8 / rank", "peft tuners/lora/config.py"),
    "lora_dropout": Default(0.0, "no dropout on the adapters' inputs", "peft tuners/lora/config.py"),
}
"""Those of peft's LoraConfig."""

CHECKPOINT_WEIGHTS: Mapping[str, Default] = {
    "half_weights": Default(
        True, "weights are in the checkpoint's precision, taken as bf16", "transformers modeling_utils.py, dtype: auto"
    ),
    "frozen": Default("auto", "so is the frozen base of adapters", "transformers modeling_utils.py, dtype: auto"),
}
"""Those of `from_pretrained` since transformers 5."""

TRANSFORMERS = TrainerDefaults(
    version="5.23",
    settings={
        **_TRAINER,
        **CHECKPOINT_WEIGHTS,
        "length": Default(1024, "1,024 tokens a sequence", "run_clm.py, block_size"),
        "precision": _PRECISION,
        "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_HF}, optim"),
        "checkpointing": _NO_CHECKPOINTING,
        "packing": Default(False, "rows are padded, not packed (run_clm.py packs)", "transformers data_collator.py"),
        "train_on": Default("all", "all tokens are trained on", "transformers data_collator.py"),
        "validation": Default(0.0, "nothing is held out", f"{_HF}, eval_strategy"),
        "double_quantization": _NESTED,
    },
    adapter_dropout=0.0,
    adapts={"lora": "q,v", "qlora": "q,v"},
    recomputes=(),
)

TRL_ARGUMENTS: Mapping[str, Default] = {
    "learning_rate": _TRAINER["learning_rate"],
    "precision": _PRECISION,
    "checkpointing": _NO_CHECKPOINTING,
}
"""Those of TrainingArguments, given to one of TRL's trainers in place of its own configuration."""

_TRL_COMMON: Mapping[str, Default] = {
    **_TRAINER,
    "length": Default(1024, "1,024 tokens a sequence; longer rows are cut", "trl/trainer/sft_config.py, max_length"),
    "precision": Default("bf16", "bf16, unless fp16 is on", "trl/trainer/base_config.py"),
    "half_weights": Default(False, "weights are loaded in fp32", "trl/trainer/model_config.py, dtype"),
    "frozen": Default("fp32", "so is the frozen base of adapters", "trl/trainer/model_config.py, dtype"),
    "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_HF}, optim"),
    "checkpointing": Default(True, "activation checkpointing is on", "trl/trainer/base_config.py"),
    "chunked_loss": Default(
        True, "the loss is computed in chunks, without all logits", "trl/trainer/sft_trainer.py, add_fused_lm_head"
    ),
    "validation": Default(0.0, "nothing is held out", "trl/scripts/utils.py, test_split_size"),
    "double_quantization": _NESTED,
    "adapter": Default(None, "all weights are trained", "trl/trainer/model_config.py, use_peft"),
    "lora_rank": Default(16, "adapters of rank 16", "trl/trainer/model_config.py"),
    "lora_alpha": Default(32.0, "adapters are scaled by 32 / rank", "trl/trainer/model_config.py"),
    "lora_dropout": Default(0.05, "dropout of 0.05 on the adapters' inputs", "trl/trainer/model_config.py"),
}

TRL_SFT = TrainerDefaults(
    version="1.16",
    settings={
        **_TRL_COMMON,
        "learning_rate": Default(2e-5, "a learning rate of 2e-5", "trl/trainer/sft_config.py"),
        "packing": Default(False, "rows are padded, not packed", "trl/trainer/sft_config.py"),
        "train_on": Default(
            "all", "conversations and texts are trained on as a whole", "trl/trainer/sft_config.py, assistant_only_loss"
        ),
    },
    adapter_dropout=0.05,
    adapts={"lora": "q,v", "qlora": "q,v"},
    recomputes=("full-ft", "lora", "qlora"),
)

TRL_DPO = TrainerDefaults(
    version="1.16",
    settings={
        **_TRL_COMMON,
        "learning_rate": Default(1e-6, "a learning rate of 1e-6", "trl/trainer/dpo_config.py"),
        "preference": Default({"loss": "dpo", "beta": 0.1}, "the loss of DPO", "trl/trainer/dpo_config.py, loss_type"),
    },
    adapter_dropout=0.05,
    adapts={"lora": "q,v", "qlora": "q,v"},
    recomputes=("full-ft", "lora", "qlora"),
)
