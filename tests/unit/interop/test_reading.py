"""Every key of a foreign file ends in one of three ways, and mistakes are one line with file, line and key."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.keys import iterate_entries
from preheat.interop.own_techniques import add_own_techniques
from preheat.interop.reading import find_format, read_config
from preheat.interop.settings import OURS
from preheat.interop.stand_in import drop_missing_kernels, shorten_assumed_length
from preheat.recipe import parse
from preheat.recipe.yaml_io import compose

from .reads import look_up, read

SMALL = "base_model: tiny\ndatasets: [{path: rows.jsonl, type: alpaca}]\nmax_steps: 5\n"
CONFIGS = Path(os.environ.get("PREHEAT_CONFIGS", "../shared/configs"))


@pytest.mark.parametrize("trainer", ["axolotl", "llamafactory", "automodel", "litgpt"])
def test_every_key_of_the_trainers_examples_is_accounted_for(trainer: str) -> None:
    files = sorted((CONFIGS / trainer).glob("*.y*ml"))
    if not files:
        pytest.skip(f"no configurations in {CONFIGS / trainer}: set PREHEAT_CONFIGS")
    for file in files:
        text = file.read_text(encoding="utf-8")
        format = find_format(text, file.name, FORMATS)
        assert format is not None
        assert format.name.startswith(trainer)
        refusal = ""
        try:
            reading = read_config(text, file, format, where=file.name).reading
        except RecipeError as error:
            refusal = str(error)
        if refusal:  # for the file's own reason
            assert re.fullmatch(rf"{re.escape(file.name)}:\d+: [\w.]+: .+", refusal)
            continue
        keys = [key.key for part in (reading.taken, reading.without_effect, reading.not_understood) for key in part]
        assert sorted(keys) == sorted(entry.name for entry in iterate_entries(*compose(text, ""), ""))


def test_each_key_is_taken_without_effect_or_not_understood() -> None:
    reading = read(SMALL + "wandb_project: mine\nload_in_8bit: true\nsequence_length: 64\nlora_r:\n").reading
    assert [key.key for key in reading.taken] == ["base_model", "datasets.0.path", "datasets.0.type", "max_steps"]
    assert {key.key: key.why for key in reading.without_effect} == {
        "wandb_project": "logging and tracking",
        "lora_r": "null: the trainer's default",
    }
    assert {key.key: (key.line, key.assumed) for key in reading.not_understood} == {
        "load_in_8bit": (5, "the base is in half precision, twice the memory of 8 bits"),
        "sequence_length": (6, "the plan is without it; did you mean sequence_len?"),
    }
    assert reading.taken[-1].ours == ("stop.max_steps: 5",)


def test_defaults_of_the_trainer_fill_in_what_the_file_leaves_out() -> None:
    config = read(SMALL)
    assert look_up(config, "batch.seq_len") == 512
    assert look_up(config, "optimizer.betas") == (0.9, 0.999)
    lengths = [default for default in config.reading.defaults if "batch.seq_len: 512" in default.ours]
    assert [default.source for default in lengths] == ["axolotl/utils/schemas/config.py"]
    assert not [d for d in read(SMALL + "sequence_len: 64\n").reading.defaults if "batch.seq_len: 64" in d.ours]


@pytest.mark.parametrize("name", FORMATS)
def test_the_tables_of_defaults_name_fields_that_lead_to_keys_of_a_recipe(name: str) -> None:
    assert FORMATS[name].defaults.settings.keys() <= OURS.keys()
    assert all(default.source for default in FORMATS[name].defaults.settings.values())


def test_the_global_batch_counts_devices_and_accumulation() -> None:
    text = SMALL + "micro_batch_size: 2\ngradient_accumulation_steps: 3\n"
    assert look_up(read(text), "batch.size") == 6
    config = read(text, devices=8)
    assert (look_up(config, "batch.size"), look_up(config, "parallel.devices")) == (48, 8)
    assert look_up(config, "techniques.data_parallel") == {}
    parallel = read(text + "tensor_parallel_size: 2\n", devices=8)
    assert look_up(parallel, "batch.size") == 24


def test_overrides_are_the_recipes_keys() -> None:
    assert look_up(read(SMALL, overrides=["batch.seq_len=64"]), "batch.seq_len") == 64
    with pytest.raises(RecipeError, match=r"^--set batch.seq_len=x: batch.seq_len: must be a whole number, got 'x'$"):
        read(SMALL, overrides=["batch.seq_len=x"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sequence_len: long", "f.yaml:4: sequence_len: must be a number, got 'long'"),
        ("sequence_len: 0.5", "f.yaml:4: sequence_len: must be a whole number above 0, got 0.5"),
        ("sequence_len: 1", "f.yaml:4: sequence_len: batch.seq_len: must be at least 2, got 1"),
        ("learning_rate: '1e999'", "f.yaml:4: learning_rate: must be a number, got '1e999'"),
        ("sample_packing: [a]", "f.yaml:4: sample_packing: must be true or false, got ['a']"),
        ("learning_rate: '{{ lr }}'", "f.yaml:4: learning_rate: '{{ lr }}' is a template or a variable, which is not"),
        ("adapter: ${oc.env:ADAPTER}", "f.yaml:4: adapter: '${oc.env:ADAPTER}' is a template or a variable"),
        ("learning_rate: {{ lr }}", "f.yaml:4: learning_rate: a key is text, not a list or a mapping"),
        ("<<: *shared", "f.yaml:4: not YAML: found undefined alias"),
        ("max_packed_sequence_len: 5", "f.yaml:4: max_packed_sequence_len: axolotl 0.19 has no such key; write sequ"),
        ("rl: grpo", "f.yaml:4: rl: grpo: training of or on rewards is not planned"),
        ("processor_type: AutoProcessor", "f.yaml:4: processor_type: 'AutoProcessor': images and sound are not read"),
        ("stage: sft\nmodel_name_or_path: b", "f.yaml:4: stage: is a key of LLaMA-Factory, and base_model (line 1) of"),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(line: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(SMALL + line + "\n")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_anchors_are_read_like_what_they_stand_for() -> None:
    assert look_up(read("seed: &n 7\nsequence_len: *n\n" + SMALL), "batch.seq_len") == 7


def test_a_file_with_sections_of_a_recipe_is_a_recipe() -> None:
    assert find_format("base_model: x\nstop: {max_steps: 1}", "f.yaml", FORMATS) is None
    assert find_format("model: {size: 15M}", "f.yaml", FORMATS) is None
    assert find_format("base_model: x", "f.yaml", FORMATS, "llamafactory") is FORMATS["llamafactory"]


def test_a_renamed_key_is_read_as_its_successor() -> None:
    config = read(SMALL + "noisy_embedding_alpha: 5\n")
    assert look_up(config, "techniques.neftune.alpha") == 5.0
    assert config.reading.taken[-1].note == "axolotl calls it neftune_noise_alpha today"


def test_a_checkpoint_in_4_bits_is_known_by_its_name() -> None:
    config = read(SMALL.replace("tiny", "me/tiny-AWQ") + "adapter: lora\n")
    assert look_up(config, "techniques.nf4") is not None
    assert look_up(read(SMALL.replace("tiny", "me/tiny-AWQ")), "techniques.nf4") is None


def test_kernels_that_preheat_lacks_for_a_family_are_left_out_and_named() -> None:
    config = read(SMALL.replace("tiny", "google/gemma-3-1b-it") + "liger_rms_norm: true\nlora_qkv_kernel: true\n")
    dropped = drop_missing_kernels(config)
    assert look_up(config, "techniques.fused_operators") is not None
    assert look_up(dropped, "techniques.fused_operators") is None
    assert dropped.reading.assumptions[-1].startswith(
        "the fused norms and gates of gemma3_text are planned as separate"
    )
    known = read(SMALL.replace("tiny", "Qwen/Qwen3-8B") + "liger_rms_norm: true\n")
    assert drop_missing_kernels(known) is known


def test_a_length_that_the_file_leaves_out_is_at_most_the_models_positions() -> None:
    text = "model_name_or_path: EleutherAI/pythia-14m\ndataset_name: me/rows\nuse_peft: false\nmax_steps: 5\n"
    config = read(text)
    short = shorten_assumed_length(config)
    assert (look_up(config, "batch.seq_len"), look_up(short, "batch.seq_len")) == (1024, 512)
    assert short.reading.assumptions[-1].startswith("the model has 512 positions")
    stated = read(text + "max_length: 1000\n")
    assert shorten_assumed_length(stated) is stated  # an error of the file, which says so itself


def test_preheat_adds_what_the_recipe_lacks() -> None:
    plain = parse("{model: {size: 15M}, stop: {max_steps: 1}, techniques: {activation_checkpointing: {}, lora: {}}}")
    added = add_own_techniques(plain).techniques
    assert set(added) == {"activation_checkpointing", "lora", "chunked_loss", "fused_operators"}
    assert vars(added["activation_checkpointing"])["on_gpu"] == "auto"
    fused = parse("{model: {size: 15M}, stop: {max_steps: 1}, techniques: {liger: {}}}")
    assert set(add_own_techniques(fused, fused=False).techniques) == {"liger"}


def test_steps_of_a_warmup_without_the_steps_of_the_run_are_said_to_be_no_share() -> None:
    text = SMALL.replace("max_steps: 5", "num_epochs: 1")
    assert not [a for a in read(text).reading.assumptions if "warmup" in a]
    notes = [a for a in read(text + "warmup_steps: 20\n").reading.assumptions if "warmup" in a]
    assert len(notes) == 1
    assert notes[0].startswith("the warmup of 20 steps")
