"""Reads the configuration of a training loop in this process, by the tables that read the trainer's files.

The trainer's arguments are the keys of its JSON; model and adapter are described as the calls of a script that made
them. What a file cannot say is measured: the precision of the weights, and the longest sequences of the data.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.integrations.applied import applied_to
from preheat.integrations.loop_memory import TILE, LoopMemory, count_mask_bytes, count_tile_bytes
from preheat.integrations.micro_batch import MicroBatch
from preheat.interop.formats import FORMATS
from preheat.interop.reading import ForeignConfig, read_arguments
from preheat.interop.stand_in import drop_missing_kernels
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

    from preheat.core.json_types import JsonObject
    from preheat.recipe import Recipe

__all__ = ["LoopConfig", "find_core_model", "read_optimizer_loop", "read_trainer"]

_LOADED = "AutoModelForCausalLM.from_pretrained"
_PLANNED = {"SFTConfig": "trl", "DPOConfig": "trl-dpo"}
"""Configuration classes of TRL -> our name of their format."""


@dataclass(frozen=True)
class LoopConfig:
    """A training loop as a recipe.

    Attributes:
        foreign: the recipe, and how it was read.
        source_config: configuration of the model, which may be on no disk.
        world: number of processes, each with a device.
        extra: memory that the recipe does not have.
        folder: of the model's configuration while this object lives, if it is in no other.
    """

    foreign: ForeignConfig
    source_config: PretrainedConfig
    world: int = 1
    extra: LoopMemory = field(default_factory=LoopMemory)
    folder: str | None = None


def find_core_model(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model under adapters and wrappers for several devices.

    Raises:
        RecipeError: there is none.
    """
    from transformers import PreTrainedModel

    core: Any = model
    if (inner := getattr(core, "module", None)) is not None and not isinstance(core, PreTrainedModel):
        core = inner  # of DistributedDataParallel
    if _adapters_of(core):
        core = core.get_base_model()
    if not isinstance(core, PreTrainedModel):
        raise RecipeError(f"model: {type(core).__name__} is no model of transformers, which alone can be planned")
    return core


def read_trainer(
    args: TrainingArguments,
    model: nn.Module,
    *,
    batch: MicroBatch,
    max_steps: int,
    applied: Sequence[str] = (),
) -> LoopConfig:
    """Reads the arguments of a transformers Trainer, or of TRL's SFTTrainer or DPOTrainer.

    Args:
        model: the trainer's model, with its adapters.
        batch: the longest micro-batch.
        max_steps: steps of the run.
        applied: what `accelerate_trainer` changed, as `key=value` of the recipe.

    Raises:
        RecipeError: preheat does not plan this trainer, or an argument is of a feature that cannot be planned.
    """
    kinds = [kind.__name__ for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    name = next((_PLANNED[kind] for kind in kinds if kind in _PLANNED), None if kinds else "transformers")
    if name is None:
        raise RecipeError(f"{kinds[0]}: of TRL's trainers, SFTTrainer and DPOTrainer are planned")
    # Through JSON, as the trainer's file has them: without objects such as dtypes.
    values: JsonObject = json.loads(json.dumps(args.to_dict(), default=str))
    for key in ("model_init_kwargs", "ref_model_init_kwargs", "parallelism_config"):
        values.pop(key, None)
    values |= {
        "per_device_train_batch_size": batch.rows,
        "max_steps": max_steps,
        ("block_size" if name == "transformers" else "max_length"): batch.length,
    }
    home = Path(args.run_name or args.output_dir or "trainer")
    return _read(values, name, model, type(args).__name__, home, batch, max(args.world_size, 1), applied)


def read_optimizer_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: MicroBatch,
    accumulation: int,
    steps: int | None,
    autocast: str | None,
    name: str,
) -> LoopConfig:
    """Reads a plain loop from its model and optimizer.

    Args:
        batch: the largest micro-batch.
        accumulation: micro-batches of a step.
        steps: of the run, if they are known.
        autocast: bf16 or fp16, in which the loop computes; None: in the weights' own precision.
        name: of the run.

    Raises:
        RecipeError: the model is not of transformers, or preheat does not know the optimizer.
    """
    from preheat.interop.torch_keys import OPTIMIZERS

    kind = type(optimizer).__name__
    if kind not in OPTIMIZERS:
        raise RecipeError(f"optimizer: {quote_value(kind)}: not one that is planned, which are {', '.join(OPTIMIZERS)}")
    group = optimizer.param_groups[0]
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    core = find_core_model(model)
    values: JsonObject = {
        "per_device_train_batch_size": batch.rows,
        "gradient_accumulation_steps": accumulation,
        "block_size": batch.length,
        "learning_rate": float(group["lr"]),
        "weight_decay": float(group.get("weight_decay", 0.0)),
        "adam_beta1": float(beta1),
        "adam_beta2": float(beta2),
        "optim": OPTIMIZERS[kind],
        "max_grad_norm": 0.0,
        "activation_checkpointing": bool(core.is_activation_checkpointing),
        # A run without an end has no plan; the number changes neither memory nor speed.
        "max_steps": steps or 1,
        **({autocast: True} if autocast else {}),
    }
    return _read(values, "transformers", model, "the loop", Path(name), batch, 1, ())


def _read(
    values: JsonObject,
    name: str,
    model: nn.Module,
    where: str,
    home: Path,
    batch: MicroBatch,
    world: int,
    applied: Sequence[str],
) -> LoopConfig:
    core = find_core_model(model)
    config = _copy_config(core)
    described = _describe_model(model, core)
    overrides = [*applied, "data.source=rows-of-the-loop"]
    folder = None
    if not core.config.name_or_path or not Path(core.config.name_or_path).is_dir():
        # Of the hub, or made in Python: planning reads a folder, and needs no weights in it.
        folder = tempfile.mkdtemp(prefix="preheat-")
        config.save_pretrained(folder)
        described[_LOADED]["pretrained_model_name_or_path"] = folder
        overrides.append("model.weights=random")
    foreign = drop_missing_kernels(
        read_arguments(
            {**values, **described}, {}, home, FORMATS[name], where=where, devices=world, overrides=overrides
        )
    )
    loop = LoopConfig(foreign, config, world, _count_extra(foreign.recipe, name, model, core, batch), folder)
    if folder is not None:
        weakref.finalize(loop, shutil.rmtree, folder, ignore_errors=True)
    return loop


def _count_extra(recipe: Recipe, name: str, model: nn.Module, core: PreTrainedModel, batch: MicroBatch) -> LoopMemory:
    techniques = recipe.techniques
    rows = batch.rows * (2 if "preference" in techniques else 1)
    itemsize = 2 if "mixed_precision" in techniques else 4
    masks = 0
    if batch.padded:
        masks = count_mask_bytes(
            model,
            core,
            rows=rows,
            length=batch.length,
            itemsize=itemsize,
            recomputes="activation_checkpointing" in techniques,
        )
    if name not in _PLANNED.values():
        return LoopMemory(masks)
    vocabulary = core.get_input_embeddings().weight.shape[0]
    narrow, cuda = applied_to(model).narrow_tile, core.device.type == "cuda"
    loss = count_tile_bytes(rows * (batch.length - 1), vocabulary, itemsize=itemsize, cuda=cuda, narrow=narrow)
    return LoopMemory(masks, loss, sparse=not (narrow or cuda) and vocabulary < TILE[1])


def _describe_model(model: nn.Module, core: PreTrainedModel) -> JsonObject:
    """Returns the calls of a script that would make the model: its path, precision, attention and adapter."""
    # The largest tensor: norms and adapters may be in another precision.
    largest = max(core.parameters(), key=lambda p: p.numel())
    quantized = _is_four_bit(core)
    dtype = str(largest.dtype).removeprefix("torch.")
    loaded: JsonObject = {
        "pretrained_model_name_or_path": core.config.name_or_path,
        # The weights of a 4-bit base are stored as bytes.
        "dtype": dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16",
        "attn_implementation": core.config._attn_implementation or "sdpa",
    }
    if quantized:
        loaded["load_in_4bit"] = True
    adapters = _adapters_of(model)
    return {_LOADED: loaded, **({"LoraConfig": _describe_adapter(adapters)} if adapters else {})}


def _is_four_bit(core: PreTrainedModel) -> bool:
    return bool(getattr(core, "is_loaded_in_4bit", False))


def _adapters_of(model: object) -> Mapping[str, Any]:
    """Returns peft's configurations of a model, by the adapter's name; empty if it is not peft's."""
    from peft import PeftModel

    return model.peft_config if isinstance(model, PeftModel) else {}


def _describe_adapter(adapters: Mapping[str, Any]) -> JsonObject:
    from peft import LoraConfig

    name, adapter = next(iter(adapters.items()))
    if not isinstance(adapter, LoraConfig):
        raise RecipeError(f"adapter {quote_value(name)}: is a {type(adapter).__name__}; adapters of LoRA are planned")
    targets = adapter.target_modules
    return {
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": adapter.lora_dropout,
        "target_modules": [targets] if isinstance(targets, str) else sorted(targets or ()),
        "bias": adapter.bias,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
    }


def _copy_config(core: PreTrainedModel) -> PretrainedConfig:
    """Returns the model's configuration, without the storage of its weights: the recipe's techniques have that."""
    config = copy.deepcopy(core.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config
