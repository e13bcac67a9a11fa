"""Megatron-Bridge's overrides, key by key."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import find_format

from .reads import look_up, read

SMALL = "model: {hf_model_id: tiny}\ntrain: {global_batch_size: 8, micro_batch_size: 2, train_iters: 50}\nddp: {}\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.path", "tiny"),
        ("", "model.weights", "random"),
        ("", "batch.size", 8),
        ("", "techniques.gradient_accumulation.steps", 4),
        ("", "batch.seq_len", 4096),
        ("", "optimizer.lr", 3e-4),
        ("", "optimizer.betas", (0.9, 0.95)),
        ("", "schedule.min_lr_ratio", 0.1),
        ("", "techniques.mixed_precision.mode", "bf16_master"),
        ("", "techniques.activation_checkpointing", None),
        ("", "data.train_on", "all"),
        ("checkpoint: {pretrained_checkpoint: ckpt/base}", "model.weights", "pretrained"),
        ("checkpoint: {pretrained_checkpoint: ckpt/base}", "optimizer.lr", 5e-6),
        ("dataset: {dataset_root: rows}", "data.source", "rows/training.jsonl"),
        ("dataset: {dataset_root: rows}", "data.train_on", "assistant"),
        ("dataset: {dataset_name: squad, dataset_subset: plain}", "data.subset", "plain"),
        ("dataset: {data_path: corpus_text_document}", "data.packing", "stream"),
        ("dataset: {packed_sequence_specs: {packed_sequence_size: 1024}}", "batch.seq_len", 1024),
        ("dataset: {split: '98,2,0'}", "data.validation", 0.02),
        ("peft: {dim: 8}", "techniques.lora.rank", 8),
        ("peft: {dim: 8}", "techniques.lora.alpha", 32.0),
        ("peft: {dim: 8}", "optimizer.lr", 1e-4),
        ("peft: {dim: 8}", "techniques.mixed_precision.mode", "bf16"),
        ("peft: {target_modules: [linear_qkv]}", "techniques.lora.target_modules", ("q_proj", "k_proj", "v_proj")),
        (
            "peft: {target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}",
            "techniques.lora.target_modules",
            "all-linear",
        ),
        ("peft: {_target_: megatron.bridge.peft.dora.DoRA, dim: 8}", "techniques.lora.variant", "dora"),
        ("optimizer: {lr: 1e-3, min_lr: 1e-4, adam_beta2: 0.99}", "optimizer.betas", (0.9, 0.99)),
        ("optimizer: {optimizer: muon}", "techniques.muon.momentum", 0.95),
        ("scheduler: {lr_warmup_iters: 5}", "schedule.warmup_ratio", 0.1),
        ("scheduler: {lr_warmup_fraction: 0.2}", "schedule.warmup_ratio", 0.2),
        ("scheduler: {lr_decay_style: constant}", "schedule.kind", "constant"),
        ("mixed_precision: bf16_with_fp8_current_scaling_mixed", "techniques.fp8.recipe", "tensorwise"),
        ("mixed_precision: fp16_mixed", "techniques.mixed_precision.mode", "fp16_master"),
        ("mixed_precision: {fp16: true}", "techniques.mixed_precision.mode", "fp16_master"),
        ("checkpoint: {save_interval: 7, most_recent_k: 3}", "checkpoint.keep", 3),
        ("rng: {seed: 3}", "seed", 3),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(SMALL + lines + "\n"), key) == value


@pytest.mark.parametrize(
    ("model", "other", "key", "value"),
    [
        ("tensor_model_parallel_size: 2, sequence_parallel: true", "", "techniques.tensor_parallel.regather", True),
        ("tensor_model_parallel_size: 2", "", "techniques.tensor_parallel.loss_parallel", True),
        ("context_parallel_size: 2", "", "techniques.context_parallel.degree", 2),
        ("pipeline_model_parallel_size: 2", "", "techniques.pipeline_parallel.degree", 2),
        ("recompute_granularity: full", "", "techniques.activation_checkpointing.mode", "full"),
        ("recompute_granularity: selective", "", "techniques.activation_checkpointing", None),
        ("seq_length: 512", "", "batch.seq_len", 512),
        ("num_layers: 2", "", "model.config", {"num_hidden_layers": 2}),
        ("tensor_model_parallel_size: 1", "ddp: {use_distributed_optimizer: true}", "techniques.zero1", {}),
        (
            "tensor_model_parallel_size: 1",
            "ddp: {use_megatron_fsdp: true}",
            "techniques.fsdp.reshard_after_forward",
            True,
        ),
    ],
)
def test_parallelism_and_sizes(model: str, other: str, key: str, value: object) -> None:
    text = SMALL.replace("tiny}", f"tiny, {model}}}").replace("ddp: {}", other or "ddp: {}")
    assert look_up(read(text, devices=4), key) == value


def test_the_tokenizer_or_the_sizes_stand_for_the_model() -> None:
    unnamed = SMALL.replace("hf_model_id: tiny", "tensor_model_parallel_size: 1")
    named = read(unnamed + "tokenizer: {tokenizer_model: meta-llama/Llama-3.2-1B}\n")
    assert look_up(named, "model.path") == "meta-llama/Llama-3.2-1B"
    sizes = read(SMALL.replace("hf_model_id: tiny", "num_layers: 2, hidden_size: 64, num_attention_heads: 4"))
    assert look_up(sizes, "model.family") == "llama"
    assert any("the model is not named" in note for note in sizes.reading.assumptions)


def test_every_key_of_the_tutorials_is_known() -> None:
    text = """
dataset: {dataset_root: data/sft, seq_length: 2048}
train: {train_iters: 1000, global_batch_size: 16, micro_batch_size: 2, eval_iters: 10, eval_interval: 100}
optimizer: {lr: 2.0e-4, min_lr: 2.0e-5, weight_decay: 0.0, adam_beta2: 0.95, clip_grad: 1.0}
scheduler: {lr_warmup_iters: 20, lr_decay_style: cosine}
peft: {dim: 16, alpha: 32, dropout: 0.0}
model: {hf_model_id: tiny, seq_length: 2048, tensor_model_parallel_size: 1, context_parallel_size: 1}
checkpoint: {pretrained_checkpoint: ckpt/base, save: ckpt/lora, load: ckpt/lora, save_interval: 200}
logger: {log_interval: 10}
rng: {seed: 42}
"""
    reading = read(text).reading
    assert reading.not_understood == ()
    assert not any("recipe function" in note for note in reading.assumptions)
    assert any(
        "train.micro_batch_size" in note for note in read(text.replace("micro_batch_size: 2, ", "")).reading.assumptions
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("hf_model_id: tiny", "seq_length: 64"), "f.yaml: model.hf_model_id: names no model; add it, or"),
        (
            SMALL.replace("tiny}", "tiny, seq_length: 64}") + "dataset: {seq_length: 32}\n",
            "f.yaml:4: dataset.seq_length: 32: model",
        ),
        (SMALL.replace("batch_size: 8", "batch_size: 1"), "f.yaml:2: train.global_batch_size: a global batch of 1 is"),
        (SMALL + "peft: {_target_: x.y.IA3}\n", "f.yaml:4: peft._target_: IA3: is not one of preheat's methods; use"),
        (SMALL + "rng: {seed: '${oc.env:SEED}'}\n", "f.yaml:4: rng.seed: '${oc.env:SEED}' is a template or a variable"),
    ],
)
def test_a_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_recipe_is_no_overrides() -> None:
    assert find_format("model: {size: 15M}\nstop: {max_steps: 1}\n", "f.yaml", FORMATS) is None
