"""Defaults of other trainers: what a run does that its configuration leaves out, with the version and the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = [
    "AUTOMODEL",
    "AXOLOTL",
    "CHECKPOINT_WEIGHTS",
    "LITGPT",
    "LITGPT_PRETRAIN",
    "LLAMA_FACTORY",
    "MEGATRON",
    "MEGATRON_BRIDGE",
    "MEGATRON_BRIDGE_PEFT",
    "MEGATRON_BRIDGE_SFT",
    "MEGATRON_SWIFT",
    "MS_SWIFT",
    "MS_SWIFT_PRETRAIN",
    "MS_SWIFT_RLHF",
    "PEFT",
    "TORCHTITAN",
    "TORCHTITAN_REGISTRY",
    "TRANSFORMERS",
    "TRL_ARGUMENTS",
    "TRL_DPO",
    "TRL_SFT",
    "UNSLOTH",
    "UNSLOTH_ADAPTER",
    "UNSLOTH_ARGUMENTS",
    "UNSLOTH_CLI",
    "UNSLOTH_DPO",
    "UNSLOTH_LOADING",
    "UNSLOTH_TRAINING",
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

_TORCH = "torch.optim.AdamW"
_ADAMW: Mapping[str, Default] = {
    "optimizer": Default("adamw_torch", "AdamW", _TORCH),
    "learning_rate": Default(1e-3, "a learning rate of 1e-3", _TORCH),
    "betas": Default((0.9, 0.999), "Adam's betas are 0.9 and 0.999", _TORCH),
    "eps": Default(1e-8, "", _TORCH),
    "weight_decay": Default(0.01, "a weight decay of 0.01", _TORCH),
}
"""Those of torch's AdamW."""

_LITGPT_ARGS = "litgpt/args.py"
_LITGPT: Mapping[str, Default] = {
    **_ADAMW,
    "length": Default(2048, "", "litgpt/args.py, max_seq_length: none"),
    "precision": Default("bf16", "bf16 on a GPU that has it", "litgpt/utils.py, get_default_supported_precision"),
    "half_weights": Default(
        False, "trained weights are in fp32 under autocast", "litgpt/utils.py, get_default_supported_precision"
    ),
    "frozen": Default("fp32", "a frozen base is in fp32", "litgpt/utils.py, get_default_supported_precision"),
    "checkpointing": Default(False, "activation checkpointing with several devices only", "litgpt/finetune/lora.py"),
    "deferred_reduction": Default(
        True, "gradients are reduced after the last micro-batch", "litgpt/finetune/lora.py, no_backward_sync"
    ),
    "save_steps": Default(1000, "", _LITGPT_ARGS),
    "schedule": Default("cosine", "the learning rate falls as a cosine", "litgpt/finetune/lora.py, get_lr_scheduler"),
    "chunked_loss": Default(False, "all logits are kept for the backward pass", "litgpt/utils.py"),
}
LITGPT = TrainerDefaults(
    version="0.5.13",
    settings={
        **_LITGPT,
        "seed": Default(1337, "", "litgpt/finetune/lora.py"),
        "global_batch": Default(16, "16 sequences a step", "litgpt/finetune/lora.py, train"),
        "micro_batch": Default(1, "one sequence a micro-batch", "litgpt/finetune/lora.py, train"),
        "epochs": Default(5.0, "five epochs", "litgpt/finetune/lora.py, train"),
        "warmup_steps": Default(100, "100 steps of warmup", "litgpt/finetune/lora.py, train"),
        "max_grad_norm": Default(0.0, "gradients are not clipped", "litgpt/finetune/lora.py"),
        "packing": Default(False, "rows are padded, not packed", "litgpt/data/base.py, get_sft_collate_fn"),
        "train_on": Default("all", "prompts are trained on", "litgpt/data/json_data.py, mask_prompt"),
        "template": Default("alpaca", "rows are laid out by Alpaca's prompt", "litgpt/data/json_data.py, prompt_style"),
        "lora_rank": Default(8, "adapters of rank 8", "litgpt/finetune/lora.py"),
        "lora_alpha": Default(16.0, "adapters' alpha of 16", "litgpt/finetune/lora.py"),
    },
    adapter_dropout=0.05,
    adapts={"lora": "q,v", "qlora": "q,v"},
    recomputes=(),
)
LITGPT_PRETRAIN = TrainerDefaults(
    version="0.5.13",
    settings={
        **_LITGPT,
        "seed": Default(42, "", "litgpt/pretrain.py"),
        "global_batch": Default(512, "512 sequences a step", "litgpt/pretrain.py, train"),
        "micro_batch": Default(4, "four sequences a micro-batch", "litgpt/pretrain.py, train"),
        "warmup_steps": Default(2000, "2,000 steps of warmup", "litgpt/pretrain.py, train"),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", "litgpt/pretrain.py, train"),
        "min_lr": Default(4e-5, "the learning rate falls to 4e-5", "litgpt/pretrain.py, train"),
        "packing": Default(True, "documents fill sequences of one length", "litgpt/data/text_files.py"),
        "compiled": Default(True, "the model is compiled", "litgpt/pretrain.py, main"),
    },
    adapter_dropout=0.0,
    adapts={},
    recomputes=(),
)
_AUTOMODEL_STEPS = "nemo_automodel/components/training/step_scheduler.py"
_AUTOMODEL_RECIPE = "nemo_automodel/recipes/llm/train_ft.py"
_AUTOMODEL_FSDP = "nemo_automodel/components/distributed/config.py"
AUTOMODEL = TrainerDefaults(
    version="0.7.0",
    settings={
        **_ADAMW,
        "learning_rate": Default(1e-4, "a learning rate of 1e-4", "nemo_automodel/components/optim/optimizer.py"),
        "seed": Default(42, "", _AUTOMODEL_RECIPE),
        "length": Default(2048, "", "nemo_automodel/components/datasets/llm, seq_length: none"),
        "global_batch": Default(32, "32 sequences a step", _AUTOMODEL_STEPS),
        "micro_batch": Default(1, "one sequence a micro-batch", _AUTOMODEL_RECIPE),
        "epochs": Default(10.0, "ten epochs", _AUTOMODEL_STEPS),
        "save_steps": Default(100, "", _AUTOMODEL_STEPS),
        "schedule": Default("constant", "a constant learning rate", f"{_AUTOMODEL_RECIPE}, lr_scheduler: none"),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", _AUTOMODEL_RECIPE),
        "half_weights": Default(
            True,
            "trained weights stay in bf16, without fp32 copies",
            "nemo_automodel/_transformers/auto_model.py, torch_dtype: auto",
        ),
        "checkpointing": Default(False, "no activation checkpointing", _AUTOMODEL_FSDP),
        "deferred_reduction": Default(
            True, "gradients are reduced after the last micro-batch", f"{_AUTOMODEL_FSDP}, defer_fsdp_grad_sync"
        ),
        "sharding": Default("full", "FSDP across all devices", _AUTOMODEL_FSDP),
        "packing": Default(False, "rows are padded, not packed", "nemo_automodel/recipes/_typed_config.py"),
        "fused_norm": Default(
            False, "norms and gates as separate operators", "nemo_automodel/components/models/common/utils.py"
        ),
        "adapter_kernels": Default(
            True,
            "adapted layers keep fewer activations",
            "nemo_automodel/components/_peft/lora.py, use_memory_efficient_lora",
        ),
        "lora_rank": Default(8, "adapters of rank 8", "nemo_automodel/components/_peft/lora.py"),
        "lora_alpha": Default(32.0, "adapters' alpha of 32", "nemo_automodel/components/_peft/lora.py"),
    },
    adapter_dropout=0.0,
    adapts={"lora": "proj", "qlora": "proj"},
    recomputes=(),
)
_SWIFT_ARGUMENTS, _SWIFT_TUNER = "swift/trainers/arguments.py", "swift/arguments/tuner_args.py"
_SWIFT: dict[str, Default] = {
    **_TRAINER,
    "learning_rate": Default(
        1e-4, "a learning rate of 1e-4 (full training: 1e-5)", "swift/arguments/sft_args.py, _init_override"
    ),
    "betas": Default((0.9, 0.95), "Adam's betas are 0.9 and 0.95", _SWIFT_ARGUMENTS),
    "weight_decay": Default(0.1, "a weight decay of 0.1", _SWIFT_ARGUMENTS),
    "micro_batch": Default(1, "one sequence a micro-batch", _SWIFT_ARGUMENTS),
    "schedule": Default("cosine", "the learning rate falls as a cosine", _SWIFT_ARGUMENTS),
    "warmup_ratio": Default(0.0, "no warmup", _SWIFT_ARGUMENTS),
    "seed": Default(42, "", "swift/arguments/base_args/base_args.py"),
    "length": Default(2048, "", "swift/arguments/base_args/template_args.py, max_length: none"),
    "precision": Default("bf16", "bf16 autocast for weights in bf16", "swift/arguments/base_args/model_args.py"),
    "half_weights": Default(
        True,
        "weights are in the checkpoint's precision, taken as bf16",
        "swift/arguments/base_args/model_args.py, torch_dtype",
    ),
    "frozen": Default(
        "auto", "so is the frozen base of adapters", "swift/arguments/base_args/model_args.py, torch_dtype"
    ),
    "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_HF}, optim"),
    "checkpointing": Default(True, "activation checkpointing is on", _SWIFT_ARGUMENTS),
    "packing": Default(False, "rows are padded, not packed", "swift/arguments/base_args/base_args.py"),
    "train_on": Default(
        "assistant", "the assistant's turns are trained on", "swift/arguments/base_args/template_args.py, loss_scale"
    ),
    "validation": Default(0.0, "nothing is held out", "swift/arguments/base_args/data_args.py, split_dataset_ratio"),
    "workers": Default(1, "one process loads rows", _SWIFT_ARGUMENTS),
    "save_steps": Default(500, "", f"{_HF}, save_steps"),
    "adapter": Default("lora", "trains a LoRA adapter", "swift/arguments/base_args/base_args.py, tuner_type"),
    "lora_rank": Default(8, "adapters of rank 8", _SWIFT_TUNER),
    "lora_alpha": Default(32.0, "adapters' alpha of 32", _SWIFT_TUNER),
    "lora_dropout": Default(0.05, "dropout of 0.05 on the adapters' inputs", _SWIFT_TUNER),
    "lora_targets": Default("all-linear", "all linear layers have adapters", _SWIFT_TUNER),
}
MS_SWIFT = TrainerDefaults(
    version="4.6",
    settings=_SWIFT,
    adapter_dropout=0.05,
    adapts={"lora": "all", "qlora": "all"},
    recomputes=("full-ft", "lora", "qlora"),
)
MS_SWIFT_PRETRAIN = replace(
    MS_SWIFT,
    settings=_SWIFT | {"train_on": Default("all", "all tokens are trained on", "swift/arguments/pretrain_args.py")},
)
MS_SWIFT_RLHF = replace(
    MS_SWIFT,
    settings=_SWIFT | {"preference": Default({"loss": "dpo"}, "the loss of DPO", "swift/arguments/rlhf_args.py")},
)


_TITAN = "torchtitan/config/job_config.py"
_TITAN_SELECTIVE = "torchtitan/distributed/activation_checkpoint.py"
TORCHTITAN = TrainerDefaults(
    version="0.3 (TOML: 0.2)",
    settings={
        "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_TITAN}, Optimizer"),
        "learning_rate": Default(8e-4, "a learning rate of 8e-4", f"{_TITAN}, Optimizer"),
        "betas": Default((0.9, 0.95), "Adam's betas are 0.9 and 0.95", f"{_TITAN}, Optimizer"),
        "eps": Default(1e-8, "", f"{_TITAN}, Optimizer"),
        "weight_decay": Default(0.1, "a weight decay of 0.1", f"{_TITAN}, Optimizer"),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", f"{_TITAN}, Training"),
        "schedule": Default("wsd", "the learning rate falls linearly", f"{_TITAN}, LRScheduler"),
        "warmup_steps": Default(200, "200 steps of warmup", f"{_TITAN}, LRScheduler"),
        "max_steps": Default(10_000, "10,000 steps", f"{_TITAN}, Training"),
        "micro_batch": Default(8, "8 sequences a micro-batch", f"{_TITAN}, Training"),
        "length": Default(2048, "2,048 tokens a sequence", f"{_TITAN}, Training"),
        "random_weights": Default(True, "weights are drawn", f"{_TITAN}, Checkpoint"),
        "precision": Default("bf16", "matmuls in bf16", f"{_TITAN}, mixed_precision_param"),
        "half_weights": Default(False, "weights are in fp32", f"{_TITAN}, dtype"),
        "frozen": Default("fp32", "so is the frozen base of adapters", f"{_TITAN}, dtype"),
        "checkpointing": Default(True, "selective activation checkpointing", f"{_TITAN}, ActivationCheckpoint"),
        "checkpointed_layers": Default(2, "every second layer keeps its input only", f"{_TITAN}, selective_ac_option"),
        "packing": Default(True, "documents fill sequences of one length", "torchtitan/hf_datasets/text_datasets.py"),
        "sharding": Default("full", "FSDP across all devices", f"{_TITAN}, data_parallel_shard_degree"),
        "sequence_parallel": Default(
            True, "with tensor parallelism, activations are split too", "torchtitan/models/llama3/infra/parallelize.py"
        ),
        "loss_parallel": Default(
            True, "with tensor parallelism, so are the logits", f"{_TITAN}, disable_loss_parallel"
        ),
        "fused_norm": Default(True, "norms are one operator", "torch.nn.RMSNorm"),
        "lora_rank": Default(8, "adapters of rank 8", "torchtitan/components/lora.py"),
        "lora_alpha": Default(16.0, "adapters' alpha of 16", "torchtitan/components/lora.py"),
    },
    adapter_dropout=0.0,
    adapts={"lora": "all"},
    recomputes=("pretrain",),
)
TORCHTITAN_REGISTRY: Mapping[str, Default] = {
    "checkpointing_mode": Default("selective", "attention and every second matmul are kept", _TITAN_SELECTIVE),
    "kept_products": Default(2, "", _TITAN_SELECTIVE),
    "checkpointed_layers": Default(1, "", _TITAN_SELECTIVE),
    "fp8_recipe": Default("rowwise", "in fp8, one scale per row", "torchtitan/components/quantization/float8.py"),
}
"""Those that differ in the registry of 0.3 (torchtitan/config/configs.py)."""

_BRIDGE, _BRIDGE_OPTIMIZER = "megatron/bridge/recipes/common.py", "megatron/bridge/recipes/utils/optimizer_utils.py"
MEGATRON_BRIDGE = TrainerDefaults(
    version="0.3.1",
    settings={
        "optimizer": Default("adamw_torch_fused", "AdamW as one kernel", _BRIDGE_OPTIMIZER),
        "learning_rate": Default(3e-4, "a learning rate of 3e-4", f"{_BRIDGE}, _pretrain_common"),
        "min_lr": Default(3e-5, "that falls to 3e-5", f"{_BRIDGE}, _pretrain_common"),
        "betas": Default((0.9, 0.95), "Adam's betas are 0.9 and 0.95", _BRIDGE_OPTIMIZER),
        "eps": Default(1e-8, "", _BRIDGE_OPTIMIZER),
        "weight_decay": Default(0.1, "a weight decay of 0.1", _BRIDGE_OPTIMIZER),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", _BRIDGE_OPTIMIZER),
        "schedule": Default("cosine", "the learning rate falls as a cosine", _BRIDGE_OPTIMIZER),
        "warmup_steps": Default(500, "500 steps of warmup", f"{_BRIDGE}, _pretrain_common"),
        "max_steps": Default(300_000, "300,000 steps", f"{_BRIDGE}, _pretrain_common"),
        "global_batch": Default(32, "32 sequences a step", f"{_BRIDGE}, _pretrain_common"),
        "micro_batch": Default(2, "two sequences a micro-batch", f"{_BRIDGE}, _pretrain_common"),
        "length": Default(4096, "4,096 tokens a sequence", f"{_BRIDGE}, _pretrain_common"),
        "seed": Default(1234, "", f"{_BRIDGE}, _pretrain_common"),
        "save_steps": Default(500, "", f"{_BRIDGE}, _pretrain_common"),
        "workers": Default(8, "", "megatron/bridge/training/config.py, DataloaderConfig"),
        "precision": Default("bf16", "matmuls in bf16", f"{_BRIDGE}, mixed_precision"),
        "masters": Default(True, "weights in bf16, with fp32 copies in the optimizer", f"{_BRIDGE}, mixed_precision"),
        "checkpointing": Default(
            False, "nothing is computed again but attention", "megatron/core/transformer/transformer_config.py"
        ),
        "sharding": Default("optimizer", "optimizer states are sharded", f"{_BRIDGE}, use_distributed_optimizer"),
        "loss_parallel": Default(
            True, "with tensor parallelism, logits are split", "megatron/core/tensor_parallel/cross_entropy.py"
        ),
        "chunked_loss": Default(
            True, "the loss is computed in place of the logits", "megatron/core/tensor_parallel/cross_entropy.py"
        ),
        "fused_norm": Default(True, "norms are one kernel", "megatron/core/extensions/transformer_engine.py"),
        "fused_gate": Default(True, "so are SwiGLU's gates", "megatron/core/fusions/fused_bias_swiglu.py"),
        "packing": Default(True, "documents fill sequences of one length", "megatron/core/datasets/gpt_dataset.py"),
        "train_on": Default("all", "all tokens are trained on", "megatron/core/datasets/gpt_dataset.py"),
        "validation": Default(0.0, "nothing is held out of the rows", "megatron/bridge/training/config.py"),
    },
    adapter_dropout=0.0,
    adapts={"lora": "all"},
    recomputes=(),
)
MEGATRON_BRIDGE_SFT: dict[str, Default] = {
    "learning_rate": Default(5e-6, "a learning rate of 5e-6", f"{_BRIDGE}, _sft_common"),
    "min_lr": Default(0.0, "that falls to 0", f"{_BRIDGE}, _sft_common"),
    "betas": Default((0.9, 0.98), "Adam's betas are 0.9 and 0.98", f"{_BRIDGE}, _sft_common"),
    "warmup_steps": Default(50, "50 steps of warmup", f"{_BRIDGE}, _sft_common"),
    "max_steps": Default(1000, "1,000 steps", f"{_BRIDGE}, _sft_common"),
    "global_batch": Default(128, "128 sequences a step", f"{_BRIDGE}, _sft_common"),
    "micro_batch": Default(1, "one sequence a micro-batch", f"{_BRIDGE}, _sft_common"),
    "length": Default(2048, "2,048 tokens a sequence", f"{_BRIDGE}, _sft_common"),
    "save_steps": Default(100, "", f"{_BRIDGE}, _sft_common"),
    "seed": Default(5678, "", f"{_BRIDGE}, _sft_common"),
    "packing": Default(True, "rows are packed", f"{_BRIDGE}, default_squad_config"),
    "train_on": Default(
        "assistant", "answers are trained on", "megatron/bridge/data/datasets/sft.py, answer_only_loss"
    ),
}
"""Those of its functions for fine-tuning."""
MEGATRON_BRIDGE_PEFT: dict[str, Default] = {
    "learning_rate": Default(1e-4, "a learning rate of 1e-4", f"{_BRIDGE}, _peft_common"),
    "lora_rank": Default(32, "adapters of rank 32", "megatron/bridge/peft/lora.py"),
    "lora_alpha": Default(32.0, "adapters' alpha of 32", "megatron/bridge/peft/lora.py"),
    "lora_targets": Default("all-linear", "all linear layers have adapters", "megatron/bridge/peft/lora.py"),
}
"""And for adapters."""
_MEGATRON_ARGUMENTS = "megatron/training/arguments.py"
_MEGATRON_OPTIMIZER = "megatron/core/optimizer/optimizer_config.py"
MEGATRON = TrainerDefaults(
    version="core 0.20",
    settings={
        "optimizer": Default("adamw_torch_fused", "AdamW as one kernel", _MEGATRON_OPTIMIZER),
        "betas": Default((0.9, 0.999), "Adam's betas are 0.9 and 0.999", _MEGATRON_OPTIMIZER),
        "eps": Default(1e-8, "", _MEGATRON_OPTIMIZER),
        "weight_decay": Default(0.01, "a weight decay of 0.01", _MEGATRON_OPTIMIZER),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", _MEGATRON_OPTIMIZER),
        "schedule": Default("wsd", "the learning rate falls linearly", "megatron/training/config/training_config.py"),
        "min_lr": Default(0.0, "to 0", _MEGATRON_ARGUMENTS),
        "seed": Default(1234, "", "megatron/training/config/common_config.py"),
        "precision": Default("fp32", "neither bf16 nor fp16 is on", "megatron/core/model_parallel_config.py"),
        "masters": Default(
            True, "weights in half precision, with fp32 copies in the optimizer", "megatron/core/optimizer/optimizer.py"
        ),
        "checkpointing": Default(
            False, "nothing is computed again but attention", "megatron/core/transformer/transformer_config.py"
        ),
        "sharding": Default(
            None, "optimizer states are on each device", f"{_MEGATRON_ARGUMENTS}, use_distributed_optimizer"
        ),
        "loss_parallel": Default(
            True, "with tensor parallelism, logits are split", "megatron/core/tensor_parallel/cross_entropy.py"
        ),
        "regather": Default(
            True,
            "with sequence parallelism, inputs of blocks are gathered again in the backward pass",
            "megatron/core/tensor_parallel/layers.py",
        ),
        "chunked_loss": Default(
            True, "the loss is computed in place of the logits", "megatron/core/tensor_parallel/cross_entropy.py"
        ),
        "fused_norm": Default(True, "norms are one kernel", "megatron/core/extensions/transformer_engine.py"),
        "fused_gate": Default(True, "so are SwiGLU's gates", f"{_MEGATRON_ARGUMENTS}, bias_swiglu_fusion"),
        "packing": Default(True, "documents fill sequences of one length", "megatron/core/datasets/gpt_dataset.py"),
        "train_on": Default("all", "all tokens are trained on", "megatron/core/datasets/gpt_dataset.py"),
        "workers": Default(2, "", f"{_MEGATRON_ARGUMENTS}, num_workers"),
    },
    adapter_dropout=0.0,
    adapts={},
    recomputes=(),
)

_SWIFT_MEGATRON = "swift/megatron/arguments/megatron_args.py"
MEGATRON_SWIFT = TrainerDefaults(
    version="4.6",
    settings={
        **{
            name: MEGATRON_BRIDGE.settings[name]
            for name in (
                "precision",
                "masters",
                "sharding",
                "loss_parallel",
                "chunked_loss",
                "fused_norm",
                "fused_gate",
            )
        },
        **{name: _SWIFT[name] for name in ("length", "packing", "train_on", "validation", "lora_rank", "lora_alpha")},
        **{name: _SWIFT[name] for name in ("lora_dropout", "lora_targets")},
        "optimizer": Default("adamw_torch_fused", "AdamW as one kernel", _SWIFT_MEGATRON),
        "learning_rate": Default(1e-4, "a learning rate of 1e-4 (full training: 1e-5)", _SWIFT_MEGATRON),
        "min_lr": Default(0.0, "that falls to 0", _SWIFT_MEGATRON),
        "betas": Default((0.9, 0.95), "Adam's betas are 0.9 and 0.95", _SWIFT_MEGATRON),
        "eps": Default(1e-8, "", _SWIFT_MEGATRON),
        "weight_decay": Default(0.1, "a weight decay of 0.1", _SWIFT_MEGATRON),
        "max_grad_norm": Default(1.0, "gradients are clipped at a norm of 1", _SWIFT_MEGATRON),
        "schedule": Default("cosine", "the learning rate falls as a cosine", _SWIFT_MEGATRON),
        "warmup_ratio": Default(0.0, "no warmup", _SWIFT_MEGATRON),
        "seed": Default(42, "", _SWIFT_MEGATRON),
        "micro_batch": Default(1, "one sequence a micro-batch", _SWIFT_MEGATRON),
        "global_batch": Default(16, "16 sequences a step", _SWIFT_MEGATRON),
        "epochs": Default(1.0, "one epoch, if the file states no steps", _SWIFT_MEGATRON),
        "save_steps": Default(500, "", _SWIFT_MEGATRON),
        "workers": Default(4, "", _SWIFT_MEGATRON),
        "checkpointing": Default(False, "nothing is computed again but attention", _SWIFT_MEGATRON),
        "adapter": Default(None, "all weights are trained", f"{_SWIFT_MEGATRON}, tuner_type"),
    },
    adapter_dropout=0.05,
    adapts={"lora": "all"},
    recomputes=(),
)
_UNSLOTH_LOADER = "unsloth/models/loader.py, from_pretrained"
_UNSLOTH_CONFIG = "unsloth/models/rl.py, replacements of SFTConfig"
_UNSLOTH_ADAPTER = "unsloth/models/llama.py, get_peft_model"
_UNSLOTH_RUN = "unsloth_cli/config.py"
UNSLOTH = TrainerDefaults(
    version="2026.10.9",
    settings={
        **_TRAINER,
        "length": Default(2048, "2,048 tokens a sequence", _UNSLOTH_LOADER),
        "double_quantization": Default(True, "the scales of 4-bit weights are in 8 bits", "unsloth/models/llama.py"),
        "micro_batch": Default(4, "4 sequences a micro-batch", _UNSLOTH_CONFIG),
        "accumulation": Default(2, "2 micro-batches a step", _UNSLOTH_CONFIG),
        "weight_decay": Default(0.001, "a weight decay of 0.001", _UNSLOTH_CONFIG),
        "warmup_ratio": Default(0.1, "10 % of the steps are warmup", _UNSLOTH_CONFIG),
        "seed": Default(3407, "", _UNSLOTH_CONFIG),
        "optimizer": Default("adamw_8bit", "AdamW with states in 8 bits", _UNSLOTH_CONFIG),
        "precision": Default("bf16", "bf16 on a GPU that has it", "unsloth/models/rl.py, mixed_precision_dtype"),
        "half_weights": Default(
            True, "fully trained weights stay in bf16", "unsloth/models/vision.py, float32_mixed_precision"
        ),
        "frozen": Default(
            "auto",
            "a frozen base in bf16 or 4 bits, adapters in fp32",
            "unsloth_zoo/training_utils.py, prepare_model_for_training",
        ),
        "checkpointing": Default(
            True, "activation checkpointing is on", f"{_UNSLOTH_ADAPTER}, use_gradient_checkpointing: unsloth"
        ),
        "activation_offload": Default(
            True,
            "the layers' inputs are kept on the host",
            "unsloth_zoo/gradient_checkpointing.py, patch_unsloth_smart_gradient_checkpointing",
        ),
        "chunked_loss": Default(
            True,
            "head and loss are computed in chunks, without all logits",
            "unsloth_zoo/fused_losses/cross_entropy_loss.py, UnslothFusedLoss",
        ),
        "fused_norm": Default(True, "norms are one kernel", "unsloth/kernels/rms_layernorm.py"),
        "fused_gate": Default(True, "the gate is one kernel, in place", "unsloth/kernels/swiglu.py"),
        "adapter_kernels": Default(
            True, "adapted layers of one input are computed together", "unsloth/kernels/fast_lora.py"
        ),
        "packing": Default(False, "rows are not packed", "trl/trainer/sft_config.py"),
        "padding_free": Default(True, "batches have no padding", "unsloth/trainer.py, _should_auto_padding_free"),
        "train_on": Default("all", "prompts are trained on", "unsloth_zoo/dataset_utils.py, train_on_responses_only"),
        "validation": Default(0.0, "nothing is held out", f"{_HF}, eval_strategy"),
        "lora_rank": Default(16, "adapters of rank 16", _UNSLOTH_ADAPTER),
        "lora_alpha": Default(16.0, "adapters' alpha of 16", _UNSLOTH_ADAPTER),
    },
    adapter_dropout=0.0,
    adapts={"lora": "all", "qlora": "all"},
    recomputes=("full-ft", "lora", "qlora"),
)
UNSLOTH_LOADING: Mapping[str, Default] = {
    "quantized": Default(True, "the base is loaded in 4 bits", f"{_UNSLOTH_LOADER}, load_in_4bit")
}
"""Of its `from_pretrained`."""
UNSLOTH_ADAPTER: Mapping[str, Default] = {"adapter": Default("lora", "adapters are trained", _UNSLOTH_ADAPTER)}
"""Of `get_peft_model`."""
UNSLOTH_DPO: Mapping[str, Default] = {
    "preference": TRL_DPO.settings["preference"],
    "padding_free": Default(False, "rows are padded, not packed", "trl/trainer/dpo_config.py"),
}
"""With DPOTrainer."""
UNSLOTH_ARGUMENTS: Mapping[str, Default] = {
    "micro_batch": _TRAINER["micro_batch"],
    "accumulation": Default(1, "one micro-batch a step", _HF),
    "weight_decay": _TRAINER["weight_decay"],
    "warmup_ratio": Default(0.0, "no warmup", _HF),
    "seed": _TRAINER["seed"],
    "optimizer": Default("adamw_torch_fused", "fused AdamW", f"{_HF}, optim"),
}
"""Those of transformers' TrainingArguments, of which unsloth changes none."""
UNSLOTH_TRAINING: Mapping[str, Default] = {**UNSLOTH_ARGUMENTS, "learning_rate": TRL_SFT.settings["learning_rate"]}
"""Those of UnslothTrainingArguments, which is TRL's SFTConfig as it was before unsloth changed it."""
UNSLOTH_CLI: Mapping[str, Default] = {
    **UNSLOTH_LOADING,
    "adapter": Default("lora", "adapters are trained", f"{_UNSLOTH_RUN}, training_type"),
    "micro_batch": Default(2, "2 sequences a micro-batch", _UNSLOTH_RUN),
    "accumulation": Default(4, "4 micro-batches a step", _UNSLOTH_RUN),
    "learning_rate": Default(2e-4, "a learning rate of 2e-4", _UNSLOTH_RUN),
    "weight_decay": Default(0.01, "a weight decay of 0.01", _UNSLOTH_RUN),
    "warmup_ratio": Default(0.0, "", _UNSLOTH_RUN),
    "warmup_steps": Default(5, "5 steps of warmup", _UNSLOTH_RUN),
    "lora_rank": Default(64, "adapters of rank 64", _UNSLOTH_RUN),
}
"""Those of `unsloth train`."""
