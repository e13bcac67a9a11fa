"""Megatron-LM's arguments, one by one, as flags of a shell script."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.reading import ForeignConfig

from .reads import look_up, read

BASE = """\
SIZES=(
    --num-layers 8
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 32 --vocab-size 500
)
TP=${TP:-1}
torchrun --nproc_per_node 8 pretrain_gpt.py "${SIZES[@]}" --micro-batch-size 2 --train-iters 100 --data-path mine \\
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3"""


def read_flags(flags: str, **options: object) -> ForeignConfig:
    return read(f"{BASE} \\\n    {flags}\n", Path("f.sh"), where="f.sh", **options)  # type: ignore[arg-type]


FULL = "--recompute-granularity full"
SPLIT = "--tensor-model-parallel-size 2"
PIPED = "--pipeline-model-parallel-size 2"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("", "model.family", "llama"),
        ("", "model.num_layers", 8),
        ("", "model.num_kv_heads", 4),
        ("", "model.intermediate_size", 256),
        ("", "model.tie_embeddings", True),
        ("", "model.vocab_size", 512),  # a multiple of 128
        ("", "techniques.feed_forward.activation", "gelu"),
        ("", "techniques.mixed_precision", None),
        ("", "techniques.data_parallel", {}),
        ("", "techniques.zero1", None),
        ("", "techniques.activation_checkpointing", None),
        ("", "techniques.chunked_loss.rows", 64),
        ("", "parallel.devices", 8),
        ("", "batch.size", 16),
        ("", "data.source", "mine"),
        ("", "data.packing", "stream"),
        ("", "seed", 1234),
        ("", "optimizer.betas", (0.9, 0.999)),
        ("", "schedule.kind", "wsd"),
        (LLAMA, "model.intermediate_size", 128),  # 64 * 4 * 2 / 3, rounded down to 64s
        (LLAMA, "techniques.feed_forward", None),
        (LLAMA, "techniques.fused_operators.gate", True),
        (f"{LLAMA} --qk-layernorm", "model.family", "qwen3"),
        (f"{LLAMA} --num-experts 4", "model.family", "mixtral"),
        (f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 96", "model.intermediate_size", 96),
        (f"{LLAMA} --num-experts 4 --moe-router-topk 3", "model.num_experts_per_tok", 3),
        ("--group-query-attention --num-query-groups 2", "model.num_kv_heads", 2),
        ("--num-query-groups 2", "model.num_kv_heads", 4),  # counts with group_query_attention only
        ("--kv-channels 32", "model.config.head_dim", 32),
        ("--untie-embeddings-and-output-weights", "model.tie_embeddings", False),
        ("--rotary-base 500000", "model.config.rope_parameters.rope_theta", 500000),
        ("--make-vocab-size-divisible-by 4", "model.vocab_size", 500),
        (f"{SPLIT} --make-vocab-size-divisible-by 3", "model.vocab_size", 504),
        ("--bf16", "techniques.mixed_precision.mode", "bf16_master"),
        ("--fp16", "techniques.mixed_precision.mode", "fp16_master"),
        ("--bf16 --fp8-format hybrid", "techniques.fp8.recipe", "tensorwise"),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "techniques.fp8.recipe", "rowwise"),
        ("--global-batch-size 64", "techniques.gradient_accumulation.steps", 4),
        ("--fp16 --use-distributed-optimizer", "techniques.zero1", {}),
        ("--bf16 --use-distributed-optimizer", "techniques.zero1", {}),
        ("--bf16 --use-distributed-optimizer --global-batch-size 64", "techniques.fsdp.reduce", "last"),
        ("--bf16 --use-distributed-optimizer --global-batch-size 64", "techniques.fsdp.reshard_after_forward", False),
        ("--bf16 --use-torch-fsdp2 --grad-reduce-in-bf16", "techniques.fsdp.reduce_dtype", "bf16"),
        ("--bf16 --use-torch-fsdp2", "techniques.fsdp.reduce_dtype", "fp32"),
        ("--bf16 --use-torch-fsdp2", "techniques.mixed_precision.mode", "bf16"),
        ("--bf16 --use-torch-fsdp2", "techniques.fsdp.gather", "bf16"),
        ("--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim", "techniques.zero1", {}),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 1", "techniques.activation_checkpointing.every", 1),
        (f"{FULL} --recompute-method block --recompute-num-layers 4", "techniques.activation_checkpointing.every", 2),
        ("--recompute-activations", "techniques.activation_checkpointing", None),
        (SPLIT, "techniques.tensor_parallel.loss_parallel", True),
        (SPLIT, "techniques.tensor_parallel.rows", 64),
        (SPLIT, "techniques.tensor_parallel.regather", False),
        (f"{SPLIT} --sequence-parallel", "techniques.tensor_parallel.regather", True),
        (f"{SPLIT} --sequence-parallel {FULL}", "techniques.tensor_parallel.regather", False),
        (f"{PIPED} --global-batch-size 64", "techniques.pipeline_parallel.schedule", "1f1b"),
        (f"{PIPED} --num-layers-per-virtual-pipeline-stage 1", "techniques.pipeline_parallel.stages", 4),
        (f"{PIPED} --num-virtual-stages-per-pipeline-rank 2", "techniques.pipeline_parallel.schedule", "interleaved"),
        ("--context-parallel-size 2", "techniques.context_parallel.degree", 2),
        ("--lr-warmup-iters 10", "schedule.warmup_ratio", 0.1),
        ("--lr-warmup-fraction .01", "schedule.warmup_ratio", 0.01),
        ("--lr-decay-style cosine --min-lr 1e-4", "schedule.min_lr_ratio", 0.1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 25", "schedule.decay_ratio", 0.25),
        ("--lr-decay-style WSD --lr-wsd-decay-samples 480", "schedule.decay_ratio", 0.3),  # of 16 a step
        ("--lr-decay-style WSD", "schedule.decay_ratio", 0.1),
        ("--adam-beta2 0.95", "optimizer.betas", (0.9, 0.95)),
        ("--clip-grad 0.5", "optimizer.max_grad_norm", 0.5),
        ("--split 949,50,1", "data.validation", 0.05),
        ("--attention-backend unfused", "techniques.efficient_attention", None),
    ],
)
def test_an_argument_leads_to_the_recipes(flags: str, key: str, value: object) -> None:
    assert look_up(read_flags(flags), key) == pytest.approx(value)


@pytest.mark.parametrize(
    ("flags", "degree", "notes"),
    [
        ("--expert-model-parallel-size 2", 2, []),
        ("--expert-model-parallel-size 2 --expert-tensor-parallel-size 2", 2, []),
        (
            "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
            2,
            [
                "4 x 1 devices split the experts and their matrices, planned as 2 x 2: each expert's matrices are split "
                "over the tensor axis"
            ],
        ),
    ],
)
def test_the_matrices_of_experts_are_split_over_the_tensor_axis(flags: str, degree: int, notes: list[str]) -> None:
    config = read_flags(f"{LLAMA} --num-experts 8 {SPLIT} {flags}")
    assert look_up(config, "techniques.expert_parallel.degree") == degree
    assert [note for note in config.reading.assumptions if "experts and their" in note] == notes


def test_samples_are_steps() -> None:
    text = BASE.replace("--train-iters 100", "--train-samples 1600 --lr-warmup-samples 160")
    config = read(text, Path("f.sh"), where="f.sh")
    assert (look_up(config, "stop.max_steps"), look_up(config, "schedule.warmup_ratio")) == (100, 0.1)


def test_latent_attention_is_described_by_deepseek() -> None:
    config = read_flags(
        f"{LLAMA} --multi-latent-attention --kv-lora-rank 16 --v-head-dim 8 --num-experts 8 --moe-ffn-hidden-size 32 "
        "--moe-shared-expert-intermediate-size 64 --moe-layer-freq '([0]*3+[1]*5)'"
    )
    assert (look_up(config, "model.path"), look_up(config, "model.weights")) == (
        "deepseek-ai/DeepSeek-V3-Base",
        "random",
    )
    expected = {
        "kv_lora_rank": 16,
        "q_lora_rank": 512,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 8,
    }
    found = look_up(config, "model.config")
    assert isinstance(found, dict)
    assert {key: found[key] for key in expected} == expected


def test_each_difference_of_the_planned_model_is_said() -> None:
    assert (
        "planned with llama's blocks in place of LayerNorm, learned positions and biases, which cost about the same"
        in (read_flags("").reading.assumptions)
    )
    assert not any("blocks" in text for text in read_flags(LLAMA).reading.assumptions)
    text = BASE.replace("--hidden-dropout 0", "").replace("--vocab-size 500", "--vocab-file a")
    config = read(text, Path("f.sh"), where="f.sh")
    assert any("default dropout of 0.1" in note for note in config.reading.assumptions)
    assert look_up(config, "model.vocab_size") == 50304  # GPT-2's, padded
    unknown = read(BASE.replace("--vocab-size 500", "--tokenizer-type Own"), Path("f.sh"), where="f.sh")
    assert any("the tokenizer's size is not known" in note for note in unknown.reading.assumptions)


def test_computed_arguments_are_named_with_their_lines() -> None:
    config = read_flags("--tensor-model-parallel-size $TP --clip-grad $1 --sequence-parallel ${MORE[@]}")
    assert {(key.key, key.line) for key in config.reading.not_understood} == {
        ("clip_grad", 10),
        ("arguments.${MORE[@]}", 10),
    }
    assert look_up(config, "optimizer.max_grad_norm") == 1.0  # the default


def test_a_branch_that_extends_an_array_keeps_it() -> None:
    text = 'A=(--bf16 "--seed 7")\nif [ -f x ]; then\n  A=("${A[@]}" --swiglu)\nfi\n' + BASE + " ${A[@]}\n"
    config = read(text, Path("f.sh"), where="f.sh")
    assert (look_up(config, "seed"), look_up(config, "techniques.mixed_precision.mode")) == (7, "bf16_master")
    assert [key.key for key in config.reading.not_understood] == ["swiglu"]


def test_a_table_of_yaml_has_the_same_names() -> None:
    config = read(
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nmicro_batch_size: 1\nseq_length: 32\n"
        "tensor_model_parallel_size: 2\ntrain_iters: 5\nbf16: true\n"
    )
    assert config.reading.trainer == "megatron"
    assert look_up(config, "techniques.tensor_parallel.degree") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tensor-model-parallel-size 3",
            "f.sh:10: tensor_model_parallel_size: tensor 3 x pipeline 1 x context 1 needs a",
        ),
        (
            "--global-batch-size 8",
            "f.sh:10: global_batch_size: a global batch of 8 is less than 2 sequences in each of 8",
        ),
        (
            f"{PIPED} --num-layers-per-virtual-pipeline-stage 3",
            "f.sh:10: num_layers_per_virtual_pipeline_stage: 3 layers x 2 devices do not divide the 8 layers",
        ),
        ("--perform-rl-step", "f.sh:10: perform_rl_step: True: training on rewards is not planned"),
        (
            "--lr 1 --micro-batch-size $1",
            "f.sh:10: micro_batch_size: nothing can be planned without micro_batch_size; write",
        ),
        ("--fp8-recipe other", "f.sh:10: fp8_recipe: must be tensorwise, delayed, mxfp8, blockwise or custom, got"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_flags(flags)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    with pytest.raises(
        RecipeError, match=r"^f.sh:1: pretrain_t5.py: of Megatron-LM's scripts, pretrain_gpt.py is read$"
    ):
        read("python pretrain_t5.py --num-layers 2", Path("f.sh"), where="f.sh")
