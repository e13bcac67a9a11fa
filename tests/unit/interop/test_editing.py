"""Changes of a recipe in the keys of other trainers' files, read back from the text with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.changes import Change, list_changes
from preheat.interop.editing import edit_text, find_changed_keys
from preheat.interop.reading import ForeignFile
from preheat.interop.trl import TRL

from .reads import read, read_script

AXOLOTL = """\
# mine
base_model: me/base   # the base
plugins: [my.Plugin]
datasets: &rows
  - path: me/rows   # rows
    type: alpaca

test_datasets: *rows
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
wandb_project:
"""
LLAMA_FACTORY = """\
model_name_or_path: me/base
stage: sft
finetuning_type: full
dataset: mine
template: alpaca
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_train_epochs: 1
bf16: true
"""
TRL_SFT = """\
model_name_or_path: me/base
dataset_name: me/rows
use_peft: true
lora_target_modules: all-linear
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
"""


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY, TRL_SFT])
@pytest.mark.parametrize("devices", [1, 2])
def test_each_change_that_a_file_can_say_is_read_back_from_its_text(text: str, devices: int) -> None:
    config = read(text, devices=devices)
    made = set()
    for smaller in (False, True):
        for change in list_changes(config.recipe, smaller=smaller, growth=4.0):
            changed = change.apply(config.recipe)
            if (keys := find_changed_keys(config.file, config.recipe, changed)) is not None:
                assert read(edit_text(config.file, keys), devices=devices).recipe == changed, (change, keys)
                made.add(change.kind)
    assert made >= {"checkpointing", "micro-batch", "kernels", "optimizer"}
    assert ("sharding" in made) == (devices == 2)


def test_comments_anchors_and_order_are_kept() -> None:
    config = read(AXOLOTL)
    fused = {"norm": True, "gate": True, "adapters": False}
    keys = {("plugins",): ["my.Plugin", "axolotl.integrations.liger.LigerPlugin"]}
    keys |= {("liger_rms_norm",): True, ("liger_glu_activation",): True}
    assert (
        find_changed_keys(config.file, config.recipe, Change("", {"fused_operators": fused}).apply(config.recipe))
        == keys
    )
    text = edit_text(config.file, {**keys, ("sequence_len",): 128, ("gradient_checkpointing",): None})
    kept = AXOLOTL.replace("[my.Plugin]", "[my.Plugin, axolotl.integrations.liger.LigerPlugin]")
    kept = kept.replace("sequence_len: 64", "sequence_len: 128").replace("gradient_checkpointing: true\n", "")
    assert text == kept + "liger_rms_norm: true\nliger_glu_activation: true\n"


def test_arguments_of_a_script_are_named_by_their_call_and_scripts_are_not_rewritten() -> None:
    script = "SFTTrainer(model='me/base', args=SFTConfig('out', packing=True), train_dataset=load_dataset('me/rows'))"
    config = read_script(script)
    change = Change("checkpointing", {}, ("activation_checkpointing",))
    keys = find_changed_keys(config.file, config.recipe, change.apply(config.recipe))
    assert keys == {("SFTConfig", "gradient_checkpointing"): False}
    assert read_script(script, changes=keys).recipe == change.apply(config.recipe)
    with pytest.raises(RecipeError, match=r"f.py: is a script, which is not rewritten"):
        edit_text(config.file, keys)


def test_json_keeps_its_order_and_indent() -> None:
    values = {"b": 1, "a": {"c": [1, 2]}}
    file = ForeignFile(Path("f.json"), json.dumps(values, indent=4), TRL, values, padded=True)
    assert (
        edit_text(file, {("a", "d"): False, ("b",): None})
        == json.dumps({"a": {"c": [1, 2], "d": False}}, indent=4) + "\n"
    )
