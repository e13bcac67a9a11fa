"""ms-swift's keys, one by one, and its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import ForeignConfig, find_format, read_config

from .reads import look_up, read

SMALL = "model: tiny\ntorch_dtype: bfloat16\ndataset: rows\nmax_steps: 50\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "techniques.lora.rank", 8),
        ("", "techniques.lora.alpha", 32.0),
        ("", "techniques.lora.dropout", 0.05),
        ("", "techniques.lora.target_modules", "all-linear"),
        ("", "techniques.activation_checkpointing.mode", "full"),
        ("", "techniques.mixed_precision.mode", "bf16"),
        ("", "optimizer.lr", 1e-4),
        ("", "optimizer.weight_decay", 0.1),
        ("", "optimizer.betas", (0.9, 0.95)),
        ("", "batch.size", 16),
        ("", "batch.seq_len", 2048),
        ("", "schedule.kind", "cosine"),
        ("", "data.train_on", "assistant"),
        ("tuner_type: full", "techniques.lora", None),
        ("tuner_type: full", "techniques.mixed_precision.mode", "bf16_pure"),
        ("tuner_type: full", "optimizer.lr", 1e-5),
        ("tuner_type: full\nlearning_rate: 3e-5", "optimizer.lr", 3e-5),
        ("tuner_type: longlora", "techniques.shifted_groups.group_size", "auto"),
        ("train_type: full", "techniques.lora", None),
        ("tuner_type: full\ntorch_dtype: float32", "techniques.mixed_precision.mode", "fp16"),
        ("tuner_type: full\ntorch_dtype: float32\nbf16: true", "techniques.mixed_precision.mode", "bf16"),
        ("tuner_type: full\ntorch_dtype: float32\nfp16: false", "techniques.mixed_precision", None),
        ("per_device_train_batch_size: 3", "batch.size", 18),  # six micro-batches are the first to reach 16
        ("per_device_train_batch_size: 32", "batch.size", 32),
        ("target_modules: [q_proj, v_proj]", "techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("use_dora: true", "techniques.lora.variant", "dora"),
        ("init_weights: pissa_niter_16", "techniques.lora.variant", "pissa"),
        ("quant_method: bnb\nquant_bits: 4", "techniques.nf4.double_quantization", True),
        ("max_length: 1024", "batch.seq_len", 1024),
        ("packing: true\nattn_impl: flash_attn\nmax_length: 64\npacking_length: 128", "batch.seq_len", 128),
        ("max_length: 64\npacking_length: 128", "batch.seq_len", 64),
        ("dataset: 'hf::owner/rows#500'", "data.source", "owner/rows"),
        ("dataset: 'owner/rows#500'", "data.limit", 500),
        ("dataset: 'owner/rows:small#500'", "data.subset", "small"),
        ("split_dataset_ratio: 0.1", "data.validation", 0.1),
        ("loss_scale: all", "data.train_on", "all"),
        ("loss_scale: last_round+ignore_empty_think", "data.train_on", "last"),
        ("attn_impl: eager", "techniques.efficient_attention", None),
        ("use_liger_kernel: true", "techniques.chunked_loss.kernel", "auto"),
        ("lr_scheduler_kwargs: {min_lr: 1e-5}", "schedule.min_lr_ratio", 0.1),
        ("optim: adamw_8bit", "techniques.low_bit_adamw.bits", 8),
        ("tuner_type: full\noptimizer: muon", "techniques.muon.momentum", 0.95),
        ("ENV: {NPROC_PER_NODE: 2, NNODES: 2}", "parallel.devices", 4),
        ("ENV: {NPROC_PER_NODE: 4}\ndeepspeed: zero2", "techniques.fsdp.reshard_after_forward", False),
        ("ENV: {NPROC_PER_NODE: 4}\ndeepspeed: zero3_offload", "techniques.fsdp.offload", True),
        ("ENV: {NPROC_PER_NODE: 4}\nfsdp: fsdp2", "techniques.fsdp.reshard_after_forward", True),
        (
            "ENV: {NPROC_PER_NODE: 4}\ndeepspeed: zero3\nsequence_parallel_size: 2",
            "techniques.context_parallel.degree",
            2,
        ),
        ("ENV: {NPROC_PER_NODE: 4}\ndeepspeed: zero3\nsequence_parallel_size: 2", "batch.size", 8),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    # A key that is stated again replaces the one above.
    stated = {line.partition(":")[0] for line in lines.splitlines()}
    kept = [line for line in SMALL.splitlines() if line.partition(":")[0] not in stated]
    assert look_up(read("\n".join([*kept, lines])), key) == value


def test_dynamic_fine_tuning() -> None:
    assert "dft" in read(SMALL + "enable_dft_loss: true\n").recipe.techniques
    assert "dft" not in read(SMALL).recipe.techniques


@pytest.mark.parametrize(
    ("lines", "noted"),
    [("template: chatml", True), ("template: llama3", False), ("template: qwen2_5\nloss_scale: all", False)],
)
def test_a_trained_line_break_after_answers_is_noted(lines: str, noted: bool) -> None:
    assumptions = read(SMALL + lines + "\n").reading.assumptions
    assert any("line break after each answer" in assumption for assumption in assumptions) is noted


def test_deepspeed_keeps_masters_of_weights_in_half_precision() -> None:
    full = SMALL + "tuner_type: full\nENV: {NPROC_PER_NODE: 4}\n"
    mode = "techniques.mixed_precision.mode"
    assert look_up(read(full), mode) == "bf16_pure"
    assert look_up(read(full + "deepspeed: zero3\n"), mode) == "bf16_master"
    assert look_up(read(SMALL + "deepspeed: zero3\n", devices=4), mode) == "bf16"  # LoRA: the base is as it was


def test_several_datasets() -> None:
    recipe = read(SMALL.replace("rows", "['a/b:x/y#100', c.jsonl]")).recipe
    parts = [(part.source, part.subset, part.limit) for part, _ in recipe.data.parts()]
    assert parts == [("a/b", "x", 50), ("a/b", "y", 50), ("c.jsonl", None, None)]


@pytest.mark.parametrize(
    ("lines", "preference", "size"),
    [
        ("rlhf_type: dpo", {"loss": "dpo", "beta": 0.1}, 32),
        ("rlhf_type: dpo\nloss_type: ipo\nbeta: 0.5\nrpo_alpha: 1", {"loss": "ipo", "beta": 0.5, "nll": 1.0}, 32),
        ("beta: 0.5\nrlhf_type: orpo", {"loss": "orpo", "beta": 0.5}, 32),
        ("rlhf_type: simpo", {"loss": "simpo", "beta": 2.0, "gamma": 1.0, "nll": 1.0}, 32),
        ("rlhf_type: simpo\ncpo_alpha: 0\nbeta: 10", {"loss": "simpo", "beta": 10.0, "nll": 0.0}, 32),
        ("cpo_alpha: 0\nbeta: 10\nrlhf_type: simpo", {"loss": "simpo", "beta": 10.0, "nll": 0.0}, 32),
        ("rlhf_type: cpo", {"loss": "cpo", "beta": 0.1, "nll": 1.0}, 32),
        ("rlhf_type: kto", {"loss": "kto", "beta": 0.1}, 16),
        ("rlhf_type: kto\ndesirable_weight: 1.2", {"loss": "kto", "desirable_weight": 1.2}, 16),
    ],
)
def test_preferences(lines: str, preference: dict[str, object], size: int) -> None:
    config = read(SMALL + lines + "\n")
    assert {key: look_up(config, f"techniques.preference.{key}") for key in preference} == preference
    assert look_up(config, "batch.size") == size
    assert config.reading.trainer == "ms-swift-rlhf"


_SCRIPT = """# 8 * 40GiB
nproc_per_node=8

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=$nproc_per_node \\
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
swift sft \\
    --model tiny \\
    --train_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'swift/self-cognition#100' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 2048 \\
    --system 'You are a helpful assistant.' \\
    --model_author swift \\
    --deepspeed zero2 \\
    --lora_rank $RANK

swift export --adapters out
swift rlhf --model other
"""


def _read_shell(text: str, **options: int) -> ForeignConfig:
    format = find_format(text, "f.sh", FORMATS)
    assert format is not None
    return read_config(text, Path("f.sh"), format, where="f.sh", **options)  # type: ignore[arg-type]


def test_a_shell_script() -> None:
    config = _read_shell(_SCRIPT)
    expected = {"parallel.devices": 8, "batch.size": 16, "techniques.lora.rank": 8, "batch.seq_len": 2048}
    assert {key: look_up(config, key) for key in expected} == expected
    assert [(part.source, part.limit) for part, _ in config.recipe.data.parts()] == [
        ("AI-ModelScope/alpaca-gpt4-data-zh", 500),
        ("swift/self-cognition", 100),
    ]
    assert {key.key: key.line for key in config.reading.not_understood} == {
        "system": 17,
        "lora_rank": 20,
        "not read": 23,
    }
    renamed = next(key for key in config.reading.taken if key.key == "train_type")
    assert (renamed.line, renamed.note) == (9, "ms-swift calls it tuner_type today")


def test_pretraining_is_the_commands_or_the_users_word() -> None:
    text = "NPROC_PER_NODE=2 swift pt --model tiny --dataset rows --tuner_type full --max_steps 5\n"
    assert look_up(_read_shell(text), "data.train_on") == "all"
    stated = read_config(SMALL, Path("f.yaml"), FORMATS["ms-swift-pt"])
    assert look_up(stated, "data.train_on") == "all"
    assert any("--from ms-swift-pt" in note for note in read(SMALL).reading.assumptions)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("rlhf_type: grpo", "f.yaml:5: rlhf_type: grpo: training of or on rewards is not planned"),
        (
            "tuner_type: boft",
            "f.yaml:5: tuner_type: boft: is not read from another trainer's file; write a recipe with",
        ),
        ("tuner_type: lor", "f.yaml:5: tuner_type: must be lora, longlora, full"),
        (
            "packing: true",
            "f.yaml:5: packing: true: ms-swift packs with flash attention only; add attn_impl: flash_attn",
        ),
        ("max_pixels: 1003520", "f.yaml:5: max_pixels: 1003520: images and sound are not read from another trainer's"),
        ("task_type: seq_cls", "f.yaml:5: task_type: seq_cls: has a head and a loss of its own"),
        (
            "tensor_model_parallel_size: 2\nrlhf_type: dpo",
            "f.yaml:6: rlhf_type: 'dpo': of `megatron rlhf`, which is not",
        ),
        ("val_dataset: x\nmax_length: long", "f.yaml:6: max_length: must be a number, got 'long'"),
        (
            "tuner_type: full\nquant_bits: 4",
            "f.yaml:6: quant_bits: a quantized base is frozen, and there is no adapter",
        ),
        ("system: '{{ x }}'\ntemplate: '{{ x }}'", "f.yaml:6: template: '{{ x }}' is a template or a variable"),
    ],
)
def test_a_mistake_is_one_line(lines: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(SMALL + lines + "\n")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nmegatron rlhf --model x", "f.sh:2: megatron rlhf: of ms-swift's Megatron commands, sft and pt are read"),
        (
            "swift sft --model x --micro_batch_size 2",
            "f.sh:1: micro_batch_size: 2: is of `megatron sft`, and this file",
        ),
        ("MAX_PIXELS=1 swift sft --model x --max_steps 1", "f.sh:1: env.MAX_PIXELS: 1: images and sound are not read"),
        ("swift sft --model x --streaming true", "f.sh:1: streaming: a streamed dataset has no known length; add"),
        (
            "swift sft --model x --dataset 'a#b'",
            "f.sh:1: dataset: 'a#b': must be NAME#ROWS with a whole number of rows",
        ),
        ("swift export --adapters out", "f.sh: line 1: swift export: trains nothing that is read; did you mean"),
    ],
)
def test_a_mistake_in_a_script_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        _read_shell(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


_MEGATRON = """PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=8 megatron {} \\
    --model tiny --save_safetensors true --dataset 'owner/rows#500' {} \\
    --tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 2 --global_batch_size 32 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --train_iters 50 --max_length 64 \\
    --lr_warmup_fraction 0.05 --min_lr 1e-6 --cross_entropy_loss_fusion true --packing true --no_save_optim true
"""


@pytest.mark.parametrize(
    ("task", "flags", "expected"),
    [
        (
            "sft",
            "",
            {
                "parallel.devices": 8,
                "batch.size": 32,
                "techniques.gradient_accumulation.steps": 4,
                "techniques.tensor_parallel.degree": 2,
                "techniques.mixed_precision.mode": "bf16_master",
                "techniques.activation_checkpointing.mode": "full",
                "techniques.zero1": {},
                "techniques.lora": None,
                "optimizer.lr": 1e-5,
                "schedule.min_lr_ratio": pytest.approx(0.1),
                "schedule.warmup_ratio": 0.05,
                "data.train_on": "assistant",
                "data.packing": "whole",
            },
        ),
        ("pt", "", {"data.train_on": "all"}),
        ("sft", "--tuner_type lora --lora_rank 4", {"techniques.lora.rank": 4, "optimizer.lr": 1e-4}),
        ("sft", "--fp8_format hybrid --tensor_model_parallel_size 1", {"techniques.fp8.recipe": "tensorwise"}),
    ],
)
def test_megatrons_flags(task: str, flags: str, expected: dict[str, object]) -> None:
    text = _MEGATRON.format(task, flags)
    if "--tensor_model_parallel_size 1" in flags:
        text = text.replace("--tensor_model_parallel_size 2 --sequence_parallel true ", "")
    config = _read_shell(text)
    assert {key: look_up(config, key) for key in expected} == expected
    assert [key.key for key in config.reading.not_understood] == ["recompute_method", "recompute_num_layers"]


def test_a_file_of_megatron_is_recognized_by_its_keys() -> None:
    config = read("model: tiny\ntuner_type: full\nglobal_batch_size: 4\nmicro_batch_size: 2\ntrain_iters: 5\n")
    assert config.reading.trainer == "megatron-swift"
    assert look_up(config, "techniques.gradient_accumulation.steps") == 2
