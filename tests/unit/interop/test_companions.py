"""DeepSpeed's JSON and accelerate's YAML beside a trainer's file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.accelerate import ACCELERATE
from preheat.interop.formats import FORMATS
from preheat.interop.reading import find_format

from .reads import look_up, read

SMALL = "model_name_or_path: tiny\ndataset_name: me/rows\nmax_steps: 50\ngradient_accumulation_steps: 4\n"


def write(folder: Path, name: str, values: object) -> Path:
    file = folder / name
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        ({"zero_optimization": {"stage": 1}}, "techniques.zero1", {}),
        ({"zero_optimization": {"stage": 2}}, "techniques.fsdp.reshard_after_forward", False),
        ({"zero_optimization": {"stage": 3}}, "techniques.fsdp.reshard_after_forward", True),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "techniques.fsdp.offload",
            True,
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "techniques.fsdp.offload", True),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "schedule.kind", "cosine"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "schedule.warmup_ratio", 0.1),
        ({"optimizer": {"type": "Lion"}}, "techniques.lion.momentum", 0.99),
        ({"gradient_accumulation_steps": 4}, "techniques.gradient_accumulation.steps", 4),
        ({"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}, "batch.size", 128),
    ],
)
def test_deepspeed(values: object, key: str, value: object, tmp_path: Path) -> None:
    config = read(SMALL, devices=4, deepspeed=write(tmp_path, "ds.json", values))
    assert look_up(config, key) == value
    assert not config.reading.not_understood


def test_deepspeed_is_found_by_its_key_and_each_of_its_keys_has_its_file(tmp_path: Path) -> None:
    write(tmp_path, "ds.json", {"zero_optimization": {"stage": 3}, "steps_per_print": 5, "new": 1})
    reading = read(SMALL + "deepspeed: ds.json\n", tmp_path / "f.yaml", devices=4).reading
    places = {
        key.key: Path(key.file).name for key in (*reading.taken, *reading.without_effect, *reading.not_understood)
    }
    assert [places[f"deepspeed.{key}"] for key in ("zero_optimization.stage", "steps_per_print", "new")] == [
        "ds.json"
    ] * 3
    assert places["deepspeed"] == ""
    assert [key.key for key in reading.not_understood] == ["deepspeed.new"]
    inline = read(SMALL + "deepspeed: {zero_optimization: {stage: 3}}\n", devices=4)
    assert look_up(inline, "techniques.fsdp.reshard_after_forward") is True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimization": {"stage": 5}}, "ds.json:1: deepspeed.zero_optimization.stage: must be 0, 1, 2 or 3"),
        ({"gradient_accumulation_steps": 2}, "ds.json:1: deepspeed.gradient_accumulation_steps: 2: the trainer has "),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "ds.json:1: deepspeed.optimizer.params.lr: 0.001: the trainer has "),
        (
            {"fp16": {"enabled": True}},
            "ds.json:1: deepspeed.fp16.enabled: true: the trainer computes in bf16; set fp16",
        ),
        ([1], "ds.json: must be a mapping of keys, got [1]"),
    ],
)
def test_mistakes_in_deepspeeds_file(
    values: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "ds.json", values)
    with pytest.raises(RecipeError) as error:
        read(SMALL, devices=4, deepspeed=Path("ds.json"))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 8}, "parallel.devices", 8),
        ({"distributed_type": "MULTI_GPU", "num_processes": 8}, "techniques.data_parallel", {}),
        (
            {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_reshard_after_forward": False}},
            "techniques.fsdp.reshard_after_forward",
            False,
        ),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 8,
                "fsdp_config": {"fsdp_reshard_after_forward": "FULL_SHARD"},
            },
            "techniques.fsdp.reshard_after_forward",
            True,
        ),
        (
            {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 1}},
            "techniques.zero1",
            {},
        ),
    ],
)
def test_accelerate(values: object, key: str, value: object, tmp_path: Path) -> None:
    config = read(SMALL, accelerate=write(tmp_path, "a.yaml", values))
    assert look_up(config, key) == value
    assert not config.reading.not_understood


def test_accelerates_file_names_deepspeeds_and_the_command_states_the_devices(tmp_path: Path) -> None:
    write(tmp_path, "ds.json", {"zero_optimization": {"stage": 3}})
    values = {"num_processes": 8, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    config = read(SMALL, tmp_path / "f.yaml", accelerate=write(tmp_path, "a.yaml", values), devices=2)
    assert look_up(config, "techniques.fsdp.reshard_after_forward") is True
    assert look_up(config, "parallel.devices") == 2


def test_every_key_of_the_installed_accelerate_is_known() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    names = [field.name for field in dataclasses.fields(config_args.ClusterConfig)]
    assert [n for n in names if n not in ACCELERATE and not any(key.startswith(f"{n}.") for key in ACCELERATE)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "compute_environment: X\ndistributed_type: FSDP\n",
            "f.yaml:2: distributed_type: is a key of accelerate's file",
        ),
        ("zero_optimization: {stage: 3}\n", "f.yaml:1: zero_optimization: is a key of DeepSpeed's file, which has no"),
    ],
)
def test_alone_they_lack_a_model(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        find_format(text, "f.yaml", FORMATS)
    assert str(error.value).startswith(message)


def test_offloading_that_is_not_planned_is_said() -> None:
    deepspeed = "deepspeed: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}\n"
    assert any("offloading is planned with sharded" in text for text in read(SMALL + deepspeed).reading.assumptions)
