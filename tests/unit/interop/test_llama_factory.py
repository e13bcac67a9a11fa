"""LLaMA-Factory's keys, one by one, and its dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read

SMALL = "model_name_or_path: tiny\nstage: sft\ndataset: rows\nmax_steps: 50\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "techniques.lora.rank", 8),
        ("", "techniques.lora.alpha", 16.0),  # twice the rank
        ("", "techniques.lora.target_modules", "all-linear"),
        ("", "techniques.activation_checkpointing.mode", "full"),
        ("", "techniques.mixed_precision", None),
        ("", "batch.size", 8),
        ("disable_gradient_checkpointing: true", "techniques.activation_checkpointing", None),
        ("finetuning_type: full", "techniques.lora", None),
        ("finetuning_type: freeze", "techniques.freeze.layers", 2),
        ("finetuning_type: freeze\nfreeze_trainable_layers: 3", "techniques.freeze.layers", 3),
        ("freeze_trainable_layers: 3", "techniques.freeze", None),
        ("loraplus_lr_ratio: 16.0", "optimizer.groups", {"lora_B": {"lr_scale": 16.0}}),
        ("finetuning_type: full\nbf16: true", "techniques.mixed_precision.mode", "bf16"),
        ("finetuning_type: full\npure_bf16: true", "techniques.mixed_precision.mode", "bf16_pure"),
        ("lora_target: q_proj,v_proj", "techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("lora_rank: 4\nlora_alpha: 4", "techniques.lora.alpha", 4.0),
        ("use_rslora: true", "techniques.lora.variant", "rslora"),
        ("pissa_init: true\npissa_iter: 4", "techniques.lora.pissa_iterations", 4),
        ("quantization_bit: 4", "techniques.nf4.double_quantization", True),
        ("quantization_bit: 4\ndouble_quantization: false", "techniques.nf4.double_quantization", False),
        ("cutoff_len: 1024", "batch.seq_len", 1024),
        ("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4", "batch.size", 8),
        ("packing: true", "data.packing", "whole"),
        ("template: llama3", "data.template", "llama3"),
        ("template: qwen", "data.template", "qwen"),
        ("template: qwen3_nothink", "data.template", "chatml"),  # no system message of its own
        ("use_cpu: true\ntorch_compile: true", "techniques.compile.mode", "default"),
        ("mask_history: true", "data.train_on", "last"),
        ("max_samples: 1000", "data.limit", 1000),
        ("val_size: 0.1", "data.validation", 0.1),
        ("optim: adamw_8bit", "techniques.low_bit_adamw.bits", 8),
        ("finetuning_type: full\nuse_muon: true", "techniques.muon.momentum", 0.95),
        ("lr_scheduler_type: cosine", "schedule.kind", "cosine"),
        ("flash_attn: disabled", "techniques.efficient_attention", None),
        ("enable_liger_kernel: true", "techniques.fused_operators.norm", True),
        ("enable_liger_kernel: true", "techniques.chunked_loss.kernel", "auto"),
        (
            "tensor_model_parallel_size: 2\nsequence_parallel: true",
            "techniques.tensor_parallel.sequence_parallel",
            True,
        ),
        ("pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 4", "techniques.pipeline_parallel.degree", 2),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(SMALL + lines + "\n"), key) == value


def test_dynamic_fine_tuning() -> None:
    assert "dft" in read(SMALL + "use_dft_loss: true\n").recipe.techniques
    assert "dft" not in read(SMALL).recipe.techniques


@pytest.mark.parametrize(
    ("lines", "loss", "size"),
    [
        ("stage: dpo\npref_loss: sigmoid", "dpo", 16),
        ("stage: dpo\npref_loss: orpo", "orpo", 16),
        ("pref_loss: simpo\nstage: dpo", "simpo", 16),
        ("stage: kto", "kto", 8),
        ("kto_chosen_weight: 1.2\nstage: kto", "kto", 8),
        ("stage: sft\npref_loss: sigmoid", None, 8),
    ],
)
def test_preferences(lines: str, loss: str | None, size: int) -> None:
    config = read(SMALL.replace("stage: sft\n", "") + lines + "\n")
    assert (look_up(config, "techniques.preference.loss"), look_up(config, "batch.size")) == (loss, size)


def test_deepspeed_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    config = read(SMALL + "deepspeed: ds.json\n", tmp_path / "f.yaml", devices=4)
    assert look_up(config, "techniques.fsdp.offload") is True
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 5}}')
    with pytest.raises(RecipeError, match=r"ds.json:1: deepspeed.zero_optimization.stage: must be 0, 1, 2 or 3, got 5"):
        read(SMALL + "deepspeed: ds.json\n", tmp_path / "f.yaml")
    assert (
        look_up(read(SMALL + "deepspeed: away/ds_z2.json\n", devices=4), "techniques.fsdp.reshard_after_forward")
        is False
    )


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        ({"file_name": "a.json"}, {"layout": "alpaca", "columns": {}}),
        (
            {"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
            {"columns": {"instruction": "q", "output": "a"}},
        ),
        (
            {"file_name": "a.json", "columns": {"prompt": "body"}, "subset": "small"},
            {"layout": "text", "text": "body", "subset": "small"},
        ),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
            {"layout": "sharegpt", "columns": {"conversations": "talk"}},
        ),
        (
            {
                "file_name": "a.json",
                "formatting": "sharegpt",
                "columns": {"messages": "talk"},
                "tags": {"role_tag": "role"},
            },
            {"layout": "messages", "columns": {"messages": "talk"}},
        ),
        ({"file_name": "a.json", "ranking": True, "columns": {"chosen": "good"}}, {"columns": {"chosen": "good"}}),
        ({"hf_hub_url": "me/rows", "subset": "small"}, {"source": "me/rows", "subset": "small"}),
    ],
)
def test_dataset_info(facts: dict[str, object], values: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"rows": facts}))
    config = read(SMALL, tmp_path / "f.yaml")
    assert {key: look_up(config, f"data.{key}") for key in values} == values
    if "file_name" in facts:
        assert look_up(config, "data.source") == str(tmp_path / "data/a.json")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, r"f.yaml:3: dataset: 'rows': is not in .*dataset_info.json"),
        (
            {"rows": {"file_name": "a", "columns": {"images": "images"}}},
            "f.yaml:3: dataset: rows: its rows have images",
        ),
    ],
)
def test_datasets_that_cannot_be_read(info: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(RecipeError, match=f"^{message}"):
        read(SMALL, tmp_path / "f.yaml")


def test_without_dataset_info_the_names_are_planned() -> None:
    config = read(SMALL.replace("dataset: rows", "dataset: a, b"))
    assert look_up(config, "data.source") == ({"source": "a"}, {"source": "b"})
    assert any("dataset_info.json is not here" in text for text in config.reading.assumptions)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("stage: ppo", "f.yaml:5: stage: ppo: training of or on rewards"),
        ("finetuning_type: oft", "f.yaml:5: finetuning_type: oft: is not read"),
        ("finetuning_type: full\nquantization_bit: 4", "f.yaml:6: quantization_bit: a base in 4 bits is frozen"),
        ("image_max_pixels: 262144", "f.yaml:5: image_max_pixels: 262144: images and sound"),
        ("mixture_of_depths: convert", "f.yaml:5: mixture_of_depths: 'convert': layers that leave tokens out"),
        ("lora_rank: -1", "f.yaml:5: lora_rank: must be a whole number above 0, got -1"),
        ("dpo_beta: 0.1", "f.yaml:5: dpo_beta: LLaMA-Factory 0.9.5 has no such key; write pref_beta"),
    ],
)
def test_refusals(lines: str, message: str) -> None:
    text = SMALL.replace("stage: sft\n", "# stage\n") if lines.startswith("stage") else SMALL
    with pytest.raises(RecipeError) as error:
        read(text + lines + "\n")
    assert str(error.value).startswith(message)
