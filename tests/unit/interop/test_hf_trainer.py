"""transformers' Trainer: TrainingArguments as JSON and in scripts, and the files of run_clm.py."""

from __future__ import annotations

import dataclasses
import json

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import find_format

from .reads import look_up, read, read_script

SMALL = "config_name: tiny\ntrain_file: text.txt\nmax_steps: 50\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.weights", "random"),
        ("", "data.packing", "stream"),
        ("", "batch.seq_len", 1024),
        ("", "data.validation", 0.05),
        ("validation_split_percentage: 2", "data.validation", 0.02),
        ("validation_file: held.txt", "data.validation", 0.0),
        ("", "optimizer.lr", 5e-5),
        ("", "techniques.mixed_precision.mode", "bf16_pure"),  # the checkpoint's precision
        ("", "techniques.activation_checkpointing", None),
        ("", "techniques.chunked_loss", None),
        ("dtype: float32", "techniques.mixed_precision", None),
        ("dtype: float32\nbf16: true", "techniques.mixed_precision.mode", "bf16"),
        ("dtype: float16", "techniques.mixed_precision.mode", "fp16_master"),
        ("model_name_or_path: other", "model.path", "other"),
        ("model_name_or_path: other", "model.weights", "pretrained"),
        ("tokenizer_name: folder", "data.tokenizer", "folder"),
        ("block_size: 64", "batch.seq_len", 64),
        ("validation_split_percentage: 5", "data.validation", 0.05),
        ("use_liger_kernel: true", "techniques.fused_operators.norm", True),
        ("gradient_checkpointing: true", "techniques.activation_checkpointing.mode", "full"),
        ("torch_compile: true", "techniques.compile.mode", "default"),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(SMALL + lines + "\n"), key) == value


def test_every_argument_of_the_installed_trainer_is_known(tmp_path: object) -> None:
    from transformers import TrainingArguments

    arguments = json.loads(TrainingArguments(str(tmp_path)).to_json_string())
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    unknown = {
        key.key: key.assumed
        for key in read(json.dumps(arguments), overrides=["model.path=tiny"]).reading.not_understood
        if "the plan is without it" in key.assumed
    }
    assert not unknown
    # null is the default of a quarter of them, and is without effect before the table is asked.
    table = FORMATS["transformers"].table
    assert [name for name in known if name not in table and not any(key.startswith(f"{name}.") for key in table)] == []


def test_arguments_alone_need_a_model() -> None:
    text = json.dumps({"per_device_train_batch_size": 2, "max_steps": 5, "output_dir": "out"})
    with pytest.raises(RecipeError, match=r"^f.yaml: model_name_or_path: names no model; add it, or --set model.path"):
        read(text)
    config = read(text, overrides=["model.path=tiny"])
    assert (look_up(config, "model.path"), look_up(config, "batch.size"), config.names_data) == ("tiny", 2, False)
    assert any("the length of a sequence is not stated" in text for text in config.reading.assumptions)


def test_other_trainers_files_are_not_transformers() -> None:
    shared = "per_device_train_batch_size: 2\nnum_train_epochs: 1\n"
    for line, name in (
        ("base_model: x", "axolotl"),
        ("model_name_or_path: x\nstage: sft", "llamafactory"),
        ("model_name_or_path: x\nuse_peft: true", "trl"),
        ("model_name_or_path: x", "transformers"),
    ):
        assert find_format(f"{line}\n{shared}", "f.yaml", FORMATS) is FORMATS[name]
    assert find_format(f"model: x\nlora_r: 8\n{shared}", "f.yaml", FORMATS) is None


@pytest.mark.parametrize(
    ("script", "key", "value"),
    [
        ('m = AutoModelForCausalLM.from_pretrained("tiny")', "techniques.mixed_precision.mode", "bf16_pure"),
        ('m = LlamaForCausalLM.from_pretrained("tiny")', "model.path", "tiny"),
        (
            'c = AutoConfig.from_pretrained("tiny")\nm = AutoModelForCausalLM.from_config(c)',
            "model.weights",
            "random",
        ),
        (
            "b = BitsAndBytesConfig(load_in_4bit=True)\nl = LoraConfig()\n"
            'm = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=b)',
            "techniques.nf4.double_quantization",
            False,
        ),
        (
            'm = AutoModelForCausalLM.from_pretrained("tiny")\nl = LoraConfig()\nprepare_model_for_kbit_training(m)',
            "techniques.activation_checkpointing.mode",
            "full",
        ),
        (
            "b = BitsAndBytesConfig(load_in_4bit=True)\nl = LoraConfig()\n"
            'm = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=b)\nprepare_model_for_kbit_training(m)',
            "techniques.mixed_precision.frozen",
            "fp32",
        ),
    ],
)
def test_a_scripts_calls_lead_to_the_recipes_keys(script: str, key: str, value: object) -> None:
    config = read_script(f'{script}\nTrainer(model=m, args=TrainingArguments("out", max_steps=5))\n')
    assert config.reading.trainer == "transformers"
    assert look_up(config, key) == value
    assert not config.reading.not_understood


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('m = AutoModelForSequenceClassification.from_pretrained("x")', "f.py:1: AutoModelForSequenceClassification.f"),
        ("l = LoraConfig(r=0)", "f.py:1: LoraConfig.r: must be a whole number above 0, got 0"),
        ('l = LoraConfig(task_type="SEQ_CLS")', "f.py:1: LoraConfig.task_type: SEQ_CLS: a classifier has a head"),
        ("b = BitsAndBytesConfig(load_in_4bit=True)", "f.py:1: BitsAndBytesConfig.load_in_4bit: a base in 4 bits is"),
    ],
)
def test_refusals(script: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_script(f'{script}\nargs = TrainingArguments("out", max_steps=5)\n')
    assert str(error.value).startswith(message)
