"""Configurations of other trainers in place of a recipe, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from .conftest import Command, losses

AXOLOTL = """\
base_model: base
datasets:
  - path: me/rows
    type: alpaca
adapter: lora
lora_r: 4
lora_target_linear: true
load_in_8bit: true
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
bf16: true
gradient_checkpointing: true
wandb_project: mine
"""
LLAMA_FACTORY = """\
model_name_or_path: base
stage: sft
finetuning_type: lora
lora_rank: 2
dataset_dir: .
dataset: mine
template: alpaca
cutoff_len: 64
per_device_train_batch_size: 2
max_steps: 2
val_size: 0.2
"""
SCRIPT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

args = SFTConfig(
    output_dir="out",
    max_length=64,
    per_device_train_batch_size=2,
    max_steps=2,
    learning_rate=rate(),
)
SFTTrainer(model="base", args=args, train_dataset=load_dataset("json", data_files="rows.json")["train"]).train()
"""
NOTEBOOK = (
    "%%capture\n!pip install unsloth",
    """\
from unsloth import FastLanguageModel
max_seq_length = 64
model, tokenizer = FastLanguageModel.from_pretrained("base", max_seq_length=max_seq_length, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing="unsloth")""",
    """\
trainer = SFTTrainer(
    model=model,
    train_dataset=load_dataset("json", data_files="rows.json")["train"],
    args=SFTConfig(per_device_train_batch_size=2, max_steps=2, learning_rate=rate()),
)""",
)
LITGPT = """\
checkpoint_dir: base
precision: bf16-true
lora_r: 2
data: {class_path: litgpt.data.JSON, init_args: {json_path: rows.json, val_split_fraction: 0.2}}
train: {global_batch_size: 4, micro_batch_size: 2, max_steps: 2, max_seq_length: 64}
"""
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: base}
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 2}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: ["*_proj"], dim: 2}
dataset:
  _target_: nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset
  path_or_dataset_id: rows.json
  column_mapping: {question: instruction, answer: output}
  seq_length: 64
"""


@pytest.fixture
def folder(preheat: Command, data_folder: Path) -> Path:
    """A small model and rows, with a file of each trainer."""
    shutil.copytree(data_folder / "stories260K-hf", preheat.folder / "base", copy_function=shutil.copy)
    rows = [{"instruction": f"Say {n}", "output": f"It is {n}."} for n in range(30)]
    (preheat.folder / "rows.json").write_text(json.dumps(rows))
    (preheat.folder / "dataset_info.json").write_text('{"mine": {"file_name": "rows.json"}}')
    (preheat.folder / "axolotl.yaml").write_text(AXOLOTL)
    (preheat.folder / "lf.yaml").write_text(LLAMA_FACTORY)
    return preheat.folder


def test_a_configuration_is_planned_beginning_with_how_it_was_read(preheat: Command, folder: Path) -> None:
    out, error = preheat.here("plan", "axolotl.yaml", "--gpu", "H100")
    lines = out.splitlines()
    assert lines[0] == (
        "read as axolotl 0.19: 12 keys taken over, 1 without effect, 1 not understood (--verbose lists all)"
    )
    assert lines[1].startswith(
        "  axolotl.yaml:8: load_in_8bit: true: not understood; assumed: the base is in half prec"
    )
    assert lines[2] == "  assumed: axolotl weighs each micro-batch of a step the same: here each token weighs the same"
    assert "padded, not packed" in lines[3]
    assert lines[4].startswith("  assumed: me/rows is not on this machine: the steps of an epoch are not known")
    assert "on H100: fits" in out
    assert "instead " in out
    assert "Traceback" not in error
    assert (
        "  9: sequence_len: 64 -> batch.seq_len: 64"
        in preheat.here("plan", "axolotl.yaml", "--gpu", "H100", "--verbose")[0].splitlines()
    )


def test_the_plan_has_the_reading_by_its_schema(preheat: Command, folder: Path) -> None:
    plan = preheat.here.json("plan", "axolotl.yaml", "--gpu", "H100", "--count", "2")
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    assert plan["recipe"]["batch"]["size"] == 8
    assert [key["key"] for key in plan["reading"]["not_understood"]] == ["load_in_8bit"]
    assert preheat.here.json("plan", "r.yaml", "--gpu", "H100")["reading"] is None


@pytest.mark.parametrize("key", ["batch.seq_len", "sequence_len", "micro_batch_size"])
def test_the_largest_value_of_a_key_fits_and_the_next_does_not(key: str, preheat: Command, folder: Path) -> None:
    gpu = ("--gpu", "name=X,memory=0.86GiB,bandwidth=100,bf16=10")
    plan = preheat.here.json("plan", "axolotl.yaml", *gpu, "--solve", key)
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    largest = plan["largest_value"]
    assert largest["key"] == key
    assert largest["line"] == (None if key == "batch.seq_len" else f"{key}: {largest['value']}")
    # By plans of the value and of the next.
    (item,) = largest["overrides"]
    assert plan["verdict"] in ("fits", "fits tightly")
    as_set = preheat.here.json("plan", "axolotl.yaml", *gpu, "--set", item)
    assert as_set["peak_gib"] == plan["peak_gib"] < largest["next_peak_gib"]
    changed = AXOLOTL.replace("sequence_len: 64", f"sequence_len: {largest['next_value']}")
    if key == "micro_batch_size":
        changed = AXOLOTL.replace("micro_batch_size: 2", f"micro_batch_size: {largest['next_value']}")
    (folder / "next.yaml").write_text(changed)
    code = 0 if largest["next_peak_gib"] <= plan["available_gib"] else 3
    beyond = preheat.here.json("plan", "next.yaml", *gpu, code=code)
    assert beyond["peak_gib"] == largest["next_peak_gib"]
    assert beyond["verdict"] in ("does not fit safely", "does not fit")


def test_the_changes_that_help_are_shown_and_written_in_the_keys_of_the_file(preheat: Command, folder: Path) -> None:
    plan = preheat.here.json("plan", "axolotl.yaml", "--gpu", "H100")
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    found = plan["improvements"]
    assert all(single["speedup"] > 1.01 and single["fits_safely"] for single in found["singles"])
    assert {"gradient_checkpointing": False} in [single["keys"] for single in found["singles"]]
    assert "sample_packing: true" in found["note"]
    out = preheat.here("plan", "axolotl.yaml", "--gpu", "H100", "--write", "better.yaml")[0]
    assert "`gradient_checkpointing: false`: " in out
    assert "--from" not in out
    # The written file is planned as fast as it was said to be.
    better = preheat.here.json("plan", "better.yaml", "--gpu", "H100")
    assert better["tokens_per_second"] == found["together"]["tokens_per_second"]
    assert better["peak_gib"] == found["together"]["peak_gib"]
    text = (folder / "better.yaml").read_text()
    assert set(AXOLOTL.splitlines()) - set(text.splitlines()) <= {
        "gradient_checkpointing: true",
        "micro_batch_size: 2",
        "gradient_accumulation_steps: 2",
    }


def test_packing_gains_by_the_lengths_of_the_rows(preheat: Command, folder: Path) -> None:
    (folder / "lf.yaml").write_text(LLAMA_FACTORY.replace("max_steps: 2", "num_train_epochs: 1").replace("64", "512"))
    found = preheat.here.json("plan", "lf.yaml", "--gpu", "H100")["improvements"]
    packed = [single for single in found["singles"] if single["kinds"] == ["packing"]]
    assert [single["keys"] for single in packed] == [{"packing": True, "neat_packing": True}]
    assert packed[0]["speedup"] > 1.01


def test_what_makes_a_file_fit_is_shown(preheat: Command, folder: Path) -> None:
    text = AXOLOTL.replace("true\nwandb", "false\nwandb").replace("_size: 2", "_size: 64")
    (folder / "f.yaml").write_text(text)
    gpu = ("--gpu", "name=X,memory=0.87GiB,bandwidth=100,bf16=10")
    plan = preheat.here.json("plan", "f.yaml", *gpu, code=3)
    together = plan["improvements"]["together"]
    assert together["fits_safely"]
    out = preheat.here("plan", "f.yaml", *gpu, code=3)[0]
    assert "\nto fit    " in out
    assert "--write improved.yaml" in out


def test_a_configuration_shows_its_data_and_trains(preheat: Command, folder: Path) -> None:
    shown = preheat.here.json("data", "lf.yaml")
    assert shown["layout"].startswith("alpaca")
    assert shown["counts"]["sources"][0]["source"].endswith("rows.json")
    preheat.here("train", "lf.yaml", "--out", "run")
    assert sorted(losses(folder / "run")) == [1, 2]


@pytest.mark.parametrize(("text", "layout"), [(LITGPT, "alpaca"), (AUTOMODEL, "prompt")])
def test_a_trainer_that_states_the_global_batch(text: str, layout: str, preheat: Command, folder: Path) -> None:
    (folder / "f.yaml").write_text(text)
    plan = preheat.here.json("plan", "f.yaml", "--gpu", "H100")
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    assert (plan["recipe"]["batch"]["size"], plan["recipe"]["data"]["layout"]) == (4, layout)
    assert plan["reading"]["not_understood"] == []
    preheat.here("train", "f.yaml", "--out", "run")
    assert sorted(losses(folder / "run")) == [1, 2]


def test_a_job_decides_the_number_of_devices(preheat: Command, folder: Path) -> None:
    arguments = ("--scheduler", "slurm", "--nodes", "2", "--gpus-per-node", "4")
    job = preheat.here.json("launch", "lf.yaml", *arguments)
    assert (job["devices"], job["mesh"]) == (8, {"replicate": 8})


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            AXOLOTL.replace("base\n", "owner/unheard-of\n", 1),
            (),
            "f.yaml:1: base_model: model.path: owner/unheard-of: ",
        ),
        (AXOLOTL + "stage: sft\nmodel_name_or_path: base\n", (), "f.yaml:16: stage: is a key of LLaMA-Factory, and "),
        (AXOLOTL.replace("64", "long"), (), "f.yaml:9: sequence_len: must be a number, got 'long'"),
        (AXOLOTL, ("--from", "axolot"), "--from: axolot: not a known format; did you mean 'axolotl'?"),
        (AXOLOTL, ("--solve", "sequence_length"), "--solve: sequence_length: is no key of the recipe or the file; did"),
        (AXOLOTL, ("--solve", "bf16"), "--solve: bf16: is True, not a number"),
        (
            AXOLOTL,
            ("--solve", "num_epochs"),
            "--solve: num_epochs: memory does not depend on it; 1 and 2 need the same",
        ),
        (
            AXOLOTL,
            ("--solve", "lora_r", "--write", "b.yaml"),
            "--write: writes the changes that help the file as it is",
        ),
        (AXOLOTL, ("--solve", "batch.size", "--aim", "longest-context"), "--solve: --aim longest-context solves for"),
    ],
)
def test_a_mistake_is_one_line(
    text: str, arguments: tuple[str, ...], message: str, preheat: Command, folder: Path
) -> None:
    (folder / "f.yaml").write_text(text)
    error = preheat.here("plan", "f.yaml", "--gpu", "H100", *arguments, code=2)[1]
    (line,) = (line for line in error.strip().splitlines() if not line.startswith("dry run: "))
    assert line.startswith(f"error: {message}")


def test_files_of_others_are_not_overwritten_and_what_never_fits_is_one_line(preheat: Command, folder: Path) -> None:
    error = preheat.here("plan", "axolotl.yaml", "--gpu", "H100", "--write", "lf.yaml", code=1)[1]
    assert error.strip() == "error: lf.yaml: exists, and preheat did not write it; name another file"
    gpu = ("--gpu", "name=X,memory=0.1GiB,bandwidth=100,bf16=10")
    # Nothing helps on a device as small as this: said also where the command ends because it does not fit.
    out, error = preheat.here("plan", "axolotl.yaml", *gpu, "--write", "b.yaml", "--json", code=3)
    assert json.loads(out)["verdict"] == "does not fit"
    assert "note: b.yaml was not written: no change of the file helps" in error
    assert not (folder / "b.yaml").exists()
    error = preheat.here("plan", "axolotl.yaml", *gpu, "--solve", "sequence_len", "--json", code=3)[1]
    assert error.startswith("error: --solve: not even sequence_len 64 fits; it needs ")
    assert len(error.strip().splitlines()) == 1


def test_from_states_the_format(preheat: Command, folder: Path) -> None:
    (folder / "f.yaml").write_text(AXOLOTL + "stage: sft\nmodel_name_or_path: base\n")
    unknown = preheat.here.json("plan", "f.yaml", "--from", "axolotl", "--gpu", "H100")["reading"]["not_understood"]
    assert [key["key"] for key in unknown] == ["load_in_8bit", "stage", "model_name_or_path"]


def test_a_script_is_planned_with_the_file_of_accelerate_beside_it_and_trains(preheat: Command, folder: Path) -> None:
    (folder / "sft.py").write_text(SCRIPT)
    (folder / "a.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}\n")
    plan = preheat.here.json("plan", "sft.py", "--gpu", "H100", "--accelerate", "a.yaml")
    assert (plan["recipe"]["batch"]["size"], plan["recipe"]["parallel"]["devices"]) == (4, 2)
    assert "fsdp" in plan["recipe"]["techniques"]
    assert [(key["key"], key["line"]) for key in plan["reading"]["not_understood"]] == [("SFTConfig.learning_rate", 9)]
    assert {key["key"]: key["file"] for key in plan["reading"]["taken"]}["accelerate.num_processes"] == "a.yaml"
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    out = preheat.here("plan", "sft.py", "--gpu", "H100", "--accelerate", "a.yaml")[0]
    assert "preheat launch sft.py --accelerate a.yaml " in out
    job = preheat.here.json(
        "launch", "sft.py", "--accelerate", "a.yaml", "--scheduler", "slurm", "--gpus-per-node", "2"
    )
    assert job["mesh"] == {"shard": 2}
    preheat.here("train", "sft.py", "--out", "run")
    assert sorted(losses(folder / "run")) == [1, 2]


def test_a_notebook_is_planned_and_trains(preheat: Command, folder: Path) -> None:
    cells = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in NOTEBOOK]
    picture = {"output_type": "display_data", "data": {"image/png": "A" * (1 << 20)}}  # larger than any recipe
    (folder / "nb.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells, "metadata": {"picture": picture}}))
    plan = preheat.here.json("plan", "nb.ipynb", "--gpu", "H100")
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    assert (plan["reading"]["trainer"], plan["recipe"]["batch"]["size"]) == ("unsloth", 4)
    (key,) = plan["reading"]["not_understood"]
    assert (key["key"], key["file"], key["line"]) == ("SFTConfig.learning_rate", "nb.ipynb:cell 3", 4)
    preheat.here("train", "nb.ipynb", "--out", "run")
    assert sorted(losses(folder / "run")) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "a.yaml"), "a.yaml:1: distributed_type: is a key of accelerate's file, which has no model"),
        (("plan", "r.yaml", "--deepspeed", "ds.json"), "--deepspeed: ds.json: belongs beside another trainer's file"),
        (("plan", "axolotl.yaml", "--deepspeed", "ds.json"), "ds.json: cannot be read (No such file or directory)"),
        (("train", "arguments.json", "--set", "model.path=base"), "arguments.json: names no data to train on; add"),
        (("plan", "r.yaml", "--write", "b.yaml"), "--write: writes the improved file of another trainer, and this is"),
        (("plan", "sft.py", "--gpu", "H100", "--write", "b.py"), "--write: sft.py is a script, which is not rewritten"),
        (("plan", "litgpt.yaml", "--gpu", "H100", "--write", "b.yaml"), "--write: files of litgpt are only read; what"),
    ],
)
def test_mistakes_with_files_beside(arguments: tuple[str, ...], message: str, preheat: Command, folder: Path) -> None:
    (folder / "a.yaml").write_text("distributed_type: FSDP\n")
    (folder / "sft.py").write_text(SCRIPT)
    (folder / "litgpt.yaml").write_text(LITGPT)
    (folder / "arguments.json").write_text('{"per_device_train_batch_size": 2, "max_steps": 2}')
    error = preheat.here(*arguments, code=2)[1]
    (line,) = (line for line in error.strip().splitlines() if not line.startswith("dry run: "))
    assert line.startswith(f"error: {message}")
