"""Writes a recipe as a shell script that starts Megatron-LM's `pretrain_gpt.py`: pretraining on plain text.

Names of arguments are those of Megatron-LM core 0.16 (megatron/training/arguments.py, megatron/core). Megatron has its
own model, so the script states the sizes of the recipe's; weights of a checkpoint are converted before.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.interop.hf_writing import is_file
from preheat.interop.stand_in import find_preset
from preheat.interop.trainer_defaults import Default
from preheat.interop.writing import Draft, Written
from preheat.model_folder import count_embedding_rows
from preheat.models import configs
from preheat.recipe import Recipe
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["VERSION", "render_script", "write_megatron"]

VERSION = "core 0.16"
_SOURCE = "megatron/training/arguments.py"
_DEFAULTS: Mapping[str, Default] = {
    name: Default(value, "", _SOURCE)
    for name, value in {
        "seed": 1234,
        "precision": "fp32",
        "weight_decay": 0.01,
        "schedule": "linear",
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "max_grad_norm": 1.0,
        "half_weights": False,
    }.items()
}
"""Megatron-LM's defaults."""
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families whose layers Megatron's arguments describe in full."""
_MODEL_KEYS = (
    *("path", "preset", "family", "size", "shape", "num_layers", "hidden_size", "num_heads", "num_kv_heads"),
    *("intermediate_size", "num_experts", "num_experts_per_tok", "max_positions", "vocab_size", "tie_embeddings"),
    "config",
)
_NO_EFFECT = ("workers", "attention", "fused_norm", "fused_gate", "validation", "architecture", "model", "tokenizer")
_DEVICES_PER_HOST = 8
_OPTIMIZERS = {"adamw_torch_fused": "adam", "muon": "muon", "lion_32bit": "lion"}


def write_megatron(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes a recipe as the arguments of Megatron-LM's `pretrain_gpt.py`.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the recipe does not pretrain on plain text, or Megatron's arguments do not describe its model.
    """
    draft = Draft(recipe, "Megatron-LM", _DEFAULTS, checkpoint=False)
    settings = draft.settings
    layouts = {str(source.get("layout", "auto")) for source in settings.sources}
    if layouts != {"text"}:
        other = next(iter(sorted(layouts - {"text"})))
        raise RecipeError(
            f"data.layout: {other}: Megatron-LM's pretrain_gpt.py reads plain text; use rows of data.layout: text, or "
            "another trainer"
        )
    _write_model(draft)
    _write_data(draft)
    _write_batch(draft)
    _write_optimizer(draft)
    _write_precision(draft)
    _write_recomputation(draft)
    _write_parallelism(draft)
    _write_saving(draft)
    draft.agree(*_NO_EFFECT)
    hosts = math.ceil(settings.world / _DEVICES_PER_HOST)
    draft.start.append("bash {file}" + (f"   (on each of {hosts} hosts)" if hosts > 1 else ""))
    return draft.finish()


def render_script(values: Mapping[str, Any], comment: str) -> str:
    """Returns the script that starts Megatron-LM with these arguments; True: an argument without a value."""
    lines = []
    values = dict(values)
    processes, hosts = values.pop("nproc-per-node"), values.pop("nnodes")
    for key, value in values.items():
        items = [] if value is True else value if isinstance(value, list) else [value]
        lines.append("  " + shlex.join([f"--{key}", *(_show(word) for word in items)]))
    start = f"torchrun --nproc-per-node {processes}"
    if hosts > 1:
        start += f' --nnodes {hosts} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500'
    arguments = " \\\n".join(lines)
    return f"#!/bin/bash\n{comment}set -euo pipefail\n{start} pretrain_gpt.py \\\n{arguments}\n"


def _show(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _read_sizes(recipe: Recipe) -> PretrainedConfig:
    """Returns the configuration of the recipe's model, also of a built-in one whose checkpoint is not here."""
    path = recipe.model.path
    if path is not None and not Path(path).exists() and (preset := find_preset(path)) is not None:
        return configs.preset_config(preset)
    vocabulary = recipe.model.vocab_size
    if vocabulary is None and recipe.data.tokenizer is not None:
        from preheat.data.tokenizer import load_tokenizer  # imports transformers

        vocabulary = count_embedding_rows(load_tokenizer(recipe.data.tokenizer))
    return configs.of(recipe, vocabulary)


def _write_model(draft: Draft) -> None:
    recipe = draft.recipe
    config = _read_sizes(recipe).get_text_config()
    family = str(config.model_type)
    if family not in _FAMILIES:
        raise RecipeError(
            f"model.path: {shorten(str(recipe.model.path))}: layers of {family} are not written for Megatron-LM, but "
            f"those of {', '.join(_FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes: dict[str, object] = {
        "use-mcore-models": True,
        "transformer-impl": "transformer_engine",
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.intermediate_size,
        "num-attention-heads": config.num_attention_heads,
        "kv-channels": head,
        "group-query-attention": True,
        "num-query-groups": config.num_key_value_heads,
        "max-position-embeddings": max(config.max_position_embeddings, recipe.batch.seq_len),
        "position-embedding-type": "rope",
        "rotary-base": int(rope.get("rope_theta", 10_000)),
        "normalization": "RMSNorm",
        "norm-epsilon": config.rms_norm_eps,
        "swiglu": True,
        "disable-bias-linear": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    if kind == "llama3":
        sizes |= {"use-rope-scaling": True, "rope-scaling-factor": rope["factor"]}
    elif kind != "default":
        draft.refuse("model.config", {"rope_type": kind}, "Megatron-LM's arguments have no such rotary embedding")
    if not config.tie_word_embeddings:
        sizes["untie-embeddings-and-output-weights"] = True
    if family == "qwen2":
        sizes["add-qkv-bias"] = True
    if family in ("qwen3", "qwen3_moe"):
        sizes["qk-layernorm"] = True
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        sizes |= {
            "num-experts": experts,
            "moe-router-topk": config.num_experts_per_tok,
            "moe-ffn-hidden-size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "moe-grouped-gemm": True,
            "moe-token-dispatcher-type": "alltoall",
        }
    for key, value in sizes.items():
        draft.put(key, value)
    for key in _MODEL_KEYS:
        draft.cover(f"model.{key}")
    if recipe.model.weights == "random" or recipe.model.path is None:
        draft.agree("random_weights")
        draft.cover("model.weights")
    else:
        draft.refuse(
            "model.weights",
            "pretrained",
            "convert the checkpoint to Megatron-LM's format (tools/checkpoint/convert.py), then add --load FOLDER; or "
            "model.weights: random",
        )


def _write_data(draft: Draft) -> None:
    settings = draft.settings
    paths = []
    for source in settings.sources:
        name = str(source["source"])
        prefix = f"data/{Path(name).stem}_text_document"
        paths.append(prefix)
        where = name if is_file(name) else f"{name}, saved as JSON lines"
        column = source.get("text", "text")
        draft.start.append(
            f"python tools/preprocess_data.py --input {shlex.quote(where)} --json-keys {shlex.quote(str(column))} "
            f"--output-prefix data/{Path(name).stem} --tokenizer-type HuggingFaceTokenizer --append-eod ..."
        )
    draft.said.sources = settings.sources
    draft.put("data-path", paths)
    tokenizer = settings.tokenizer or settings.model
    if tokenizer is None:
        raise RecipeError("data.tokenizer: null: Megatron-LM needs one; add --set data.tokenizer=PATH")
    draft.put("tokenizer-type", "HuggingFaceTokenizer")
    draft.put("tokenizer-model", tokenizer)
    held_out = settings.validation if isinstance(settings.validation, float) else 0.0
    shares = [1000 - round(1000 * held_out), round(1000 * held_out), 0]
    draft.put("split", ",".join(str(share) for share in shares))
    # Documents of a sequence do not see each other.
    for key in ("reset-position-ids", "reset-attention-mask"):
        draft.put(key, True)
    draft.agree("packing", "streaming", "train_on")
    draft.say("seq-length", "length", always=True)


def _write_batch(draft: Draft) -> None:
    settings = draft.settings
    draft.say("micro-batch-size", "micro_batch", always=True)
    draft.say("global-batch-size", "accumulation", value=draft.recipe.batch.size, always=True)
    if settings.max_steps is None:
        raise RecipeError("stop.max_steps: null: Megatron-LM counts steps; add --set stop.max_steps=N")
    draft.say("train-iters", "max_steps", always=True)


def _write_optimizer(draft: Draft) -> None:
    settings, recipe = draft.settings, draft.recipe
    if settings.optimizer in _OPTIMIZERS and not settings.apollo:
        name = _OPTIMIZERS[settings.optimizer]
        draft.say("optimizer", "optimizer", value=name)
    if recipe.optimizer.lr != "auto":
        draft.say("lr", "learning_rate", always=True)
        floor = recipe.schedule.min_lr_ratio if recipe.schedule.kind != "constant" else 1.0
        draft.put("min-lr", settings.learning_rate * floor)
    draft.agree("min_lr_ratio")
    if settings.schedule == "wsd":
        steps = settings.max_steps or 0
        draft.put("lr-decay-style", "WSD")
        draft.put("lr-wsd-decay-style", "linear")
        draft.put("lr-wsd-decay-iters", round(steps * recipe.schedule.decay_ratio))
        for key in ("kind", "decay_ratio", "min_lr_ratio"):
            draft.cover(f"schedule.{key}")
    else:
        draft.say("lr-decay-style", "schedule", always=True)
        draft.cover("schedule.min_lr_ratio")
    draft.say("lr-warmup-fraction", "warmup_ratio", always=True)
    draft.agree("warmup_steps")
    draft.say("weight-decay", "weight_decay", always=True)
    draft.put("adam-beta1", settings.betas[0])
    draft.put("adam-beta2", settings.betas[1])
    draft.agree("betas")
    draft.say("adam-eps", "eps")
    draft.say("clip-grad", "max_grad_norm", always=True)


def _write_precision(draft: Draft) -> None:
    settings = draft.settings
    if settings.precision in ("bf16", "fp16"):
        draft.say(settings.precision, "precision", value=True)
    mixed = draft.recipe.techniques.get("mixed_precision")
    # Megatron computes with weights in half precision, and keeps fp32 copies for the optimizer.
    if mixed is not None and getattr(mixed, "mode", "") in ("bf16_master", "fp16_master"):
        draft.cover("techniques.mixed_precision.mode")
    draft.explain("techniques.mixed_precision.mode", "Megatron-LM keeps fp32 copies of weights: mode: bf16")
    if settings.fp8:
        draft.say("fp8-format", "fp8", value="hybrid")


def _write_recomputation(draft: Draft) -> None:
    settings = draft.settings
    if not settings.checkpointing:
        return
    if settings.checkpointing_mode == "selective":
        draft.say("recompute-granularity", "checkpointing", "checkpointing_mode", value="selective")
    elif settings.checkpointing_mode == "full":
        draft.say("recompute-granularity", "checkpointing", value="full")
        draft.put("recompute-method", "uniform")
        draft.put("recompute-num-layers", 1)


def _write_parallelism(draft: Draft) -> None:
    settings = draft.settings
    degrees = {
        "tensor-model-parallel-size": "tensor_parallel",
        "pipeline-model-parallel-size": "pipeline_parallel",
        "context-parallel-size": "context_parallel",
        "expert-model-parallel-size": "expert_parallel",
    }
    for key, name in degrees.items():
        if getattr(settings, name) > 1:
            draft.say(key, name)
    draft.cover("techniques.tensor_parallel.loss_parallel")  # which it always is
    if settings.sequence_parallel and settings.tensor_parallel > 1:
        draft.say("sequence-parallel", "sequence_parallel")
    if settings.sharding == "optimizer":
        draft.say("use-distributed-optimizer", "sharding", value=True)
        draft.put("overlap-grad-reduce", True)
        draft.put("overlap-param-gather", True)
    elif settings.sharding is not None:
        draft.say("use-torch-fsdp2", "sharding", value=True)
        if settings.half_reduction:
            draft.say("grad-reduce-in-bf16", "half_reduction")
        if settings.sharding == "gradients":
            draft.put("torch-fsdp2-no-reshard-after-forward", True)
        draft.put("no-gradient-accumulation-fusion", True)
        draft.put("ckpt-format", "torch_dist")
    hosts = max(math.ceil(settings.world / _DEVICES_PER_HOST), 1)
    draft.put("nproc-per-node", settings.world // hosts)
    draft.put("nnodes", hosts)


def _write_saving(draft: Draft) -> None:
    settings = draft.settings
    steps = settings.max_steps or 1
    draft.say("seed", "seed", always=True)
    draft.put("save", f"runs/{settings.name}")
    draft.say("save-interval", "save_steps", value=settings.save_steps or steps, always=True)
    draft.agree("save_limit")
    draft.say("eval-interval", "eval_steps", value=settings.eval_steps or steps, always=True)
    draft.put("eval-iters", 10 if settings.validation else 0)
    draft.put("log-interval", 10)
