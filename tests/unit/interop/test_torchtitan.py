"""torchtitan's TOML and its registry of Python, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.cli.options.subject import find_subject
from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import ForeignConfig, find_format
from preheat.interop.toml_files import read_toml

from .reads import look_up, read

BASE = """\
[job]
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 64
steps = 50
dataset = "c4"
"""
REGISTRY = """\
from torchtitan.models.qwen3 import model_registry

STEPS = 50

def _rows(sample):
    return sample["messages"]

def _config(spec, training, **more):
    return Trainer.Config(model_spec=spec, training=training, optimizer=default_adamw(lr=3e-4), parallelism=ParallelismConfig())

def base():
    return _config(model_registry("0.6B"), TrainingConfig(local_batch_size=2, seq_len=64 * 2, steps=STEPS))
"""


def read_file(text: str, **options: object) -> ForeignConfig:
    return read(text, Path("f.toml"), where="f.toml", **options)  # type: ignore[arg-type]


def read_registry(text: str, name: str = "run", **options: object) -> ForeignConfig:
    return read(text, Path("f.py"), where=f"f.py::{name}", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.path", "meta-llama/Llama-3.1-8B"),
        ("", "model.weights", "random"),
        ("", "data.source", "allenai/c4"),
        ("", "data.packing", "stream"),
        ("", "batch.size", 2),
        ("", "optimizer.lr", 8e-4),
        ("", "optimizer.betas", (0.9, 0.95)),
        ("", "schedule.kind", "wsd"),
        ("", "techniques.mixed_precision.mode", "bf16"),
        ("", "techniques.activation_checkpointing.every", 2),  # selective_ac_option "2"
        ("global_batch_size = 8", "techniques.gradient_accumulation.steps", 4),
        ('dtype = "bfloat16"', "techniques.mixed_precision.mode", "bf16_pure"),
        ('mixed_precision_param = "float32"', "techniques.mixed_precision", None),
        ('dataset_path = "mine"', "data.source", "mine"),
        ("[lr_scheduler]\nwarmup_steps = 5\ndecay_ratio = 0.8\nmin_lr_factor = 0.1", "schedule.decay_ratio", 0.8),
        ("[lr_scheduler]\nwarmup_steps = 5\nmin_lr_factor = 0.1", "schedule.decay_ratio", 0.9),
        ("[lr_scheduler]\nwarmup_steps = 5\nmin_lr_factor = 0.1", "schedule.min_lr_ratio", 0.1),
        ('[activation_checkpoint]\nmode = "none"', "techniques.activation_checkpointing", None),
        ('[activation_checkpoint]\nmode = "full"', "techniques.activation_checkpointing.every", 1),
        (
            '[activation_checkpoint]\nselective_ac_option = "op"\nmode = "selective"',
            "techniques.activation_checkpointing.products",
            2,
        ),
        (
            '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = 3',
            "techniques.activation_checkpointing.every",
            3,
        ),
        ("[compile]\nenable = true", "techniques.compile.mode", "default"),
        ('[compile]\nenable = true\ncomponents = ["loss"]', "techniques.compile", None),
        ("[compile]\nenable = true", "techniques.chunked_loss", None),
        ("[optimizer]\nbeta1 = 0.8\neps = 1e-15", "optimizer.betas", (0.8, 0.95)),
        ("[checkpoint]\ninitial_load_in_hf = true", "model.weights", "pretrained"),
        ("[parallelism]\ntensor_parallel_degree = 2", "techniques.tensor_parallel.sequence_parallel", True),
        ("[parallelism]\ntensor_parallel_degree = 2", "techniques.tensor_parallel.rows", 0),
        (
            'mixed_precision_reduce = "bfloat16"\n[parallelism]\ndata_parallel_shard_degree = 2',
            "techniques.fsdp.reduce_dtype",
            "bf16",
        ),
        (
            "[parallelism]\ntensor_parallel_degree = 2\ndisable_loss_parallel = true",
            "techniques.tensor_parallel.loss_parallel",
            False,
        ),
        ("[parallelism]\ntensor_parallel_degree = 2\n[compile]\nenable = true", "techniques.compile", None),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'",
            "techniques.pipeline_parallel.schedule",
            "interleaved",
        ),
        ("[parallelism]\npipeline_parallel_degree = 2", "techniques.gradient_accumulation.steps", 2),
    ],
)
def test_a_key_of_toml_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read_file(BASE + lines + "\n"), key) == pytest.approx(value)


@pytest.mark.parametrize(
    "more", ["", "[metrics]\nlog_freq = 5\n", "[checkpoint]\ninterval = 9\n", "[optimizer]\nlr = 1e-4\n"]
)
def test_toml_without_a_job_is_recognized(more: str) -> None:
    text = BASE.replace("[job]\n", "") + more
    format = find_format(text, "f.toml", FORMATS)
    assert format is not None
    assert format.name == "torchtitan"


def test_a_registry_of_model_and_training_is_recognized() -> None:
    text = REGISTRY.replace(", optimizer=default_adamw(lr=3e-4), parallelism=ParallelismConfig()", "")
    format = find_format(text, "f.py::base", FORMATS)
    assert format is not None
    assert format.name == "torchtitan"


def test_converters_switch_fp8_on() -> None:
    config = read_file(BASE.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]'))
    assert look_up(config, "techniques.fp8.recipe") == "tensorwise"


def test_degrees_with_devices() -> None:
    shards = "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = "
    config = read_file(BASE + shards + "4\n")
    assert (look_up(config, "parallel.devices"), look_up(config, "techniques.fsdp.replicate")) == (8, 2)
    assert look_up(config, "techniques.fsdp.gather") == "bf16"
    copies = read_file(BASE + shards + "1\n", devices=2)
    assert look_up(copies, "techniques.fsdp") is None
    assert look_up(copies, "techniques.data_parallel") is not None
    with pytest.raises(RecipeError, match=r"f.toml:13: parallelism.data_parallel_shard_degree: 4 shards x 2 replicas"):
        read_file(BASE + shards + "4\n", devices=16)
    # A pipeline keeps gathered weights, and reduces gradients after its last micro-batch.
    piped = read_file(BASE + "[parallelism]\npipeline_parallel_degree = 2\n", devices=4)
    assert look_up(piped, "techniques.fsdp.reshard_after_forward") is False
    assert look_up(piped, "techniques.fsdp.reduce") == "last"


def test_keys_of_earlier_versions_are_read() -> None:
    text = BASE.replace("local_batch_size = 2", "batch_size = 2\nwarmup_steps = 5\ntensor_parallel_degree = 2")
    config = read_file(text + "[experimental]\npipeline_parallel_degree = 2\n[metrics]\nlog_freq = 1\n")
    assert (look_up(config, "batch.size"), look_up(config, "techniques.tensor_parallel.degree")) == (2, 2)
    assert look_up(config, "techniques.pipeline_parallel.degree") == 2
    assert not config.reading.not_understood
    note = next(key.note for key in config.reading.taken if key.key == "training.batch_size")
    assert note == "torchtitan calls it training.local_batch_size today"


@pytest.mark.parametrize(
    ("name", "flavor", "key", "value"),
    [
        ("llama3", "debugmodel", "model.hidden_size", 256),
        ("llama3", "8B_flex", "model.path", "meta-llama/Llama-3.1-8B"),
        ("qwen3", "30B-A3B", "model.path", "Qwen/Qwen3-30B-A3B"),
        ("qwen3", "debugmodel_moe", "model.num_experts", 64),
        ("deepseek_v3", "16B", "model.config.n_routed_experts", 64),
        ("llama4", "17bx16e", "model.path", "meta-llama/Llama-4-Scout-17B-16E"),
    ],
)
def test_flavors_are_known_sizes(name: str, flavor: str, key: str, value: object) -> None:
    text = BASE.replace('name = "llama3"', f'name = "{name}"').replace('"8B"', f'"{flavor}"')
    assert look_up(read_file(text), key) == value


@pytest.mark.parametrize(
    ("body", "key", "value"),
    [
        ("    return base()", "model.path", "Qwen/Qwen3-0.6B"),
        ("    return base()", "batch.seq_len", 128),
        ("    return base()", "stop.max_steps", 50),
        ("    return base()", "optimizer.lr", 3e-4),
        ("    return base()", "techniques.activation_checkpointing.products", 2),
        ("    c = base()\n    c.training.seq_len = 32\n    return c", "batch.seq_len", 32),
        ("    c = base()\n    c.compile.enable = True\n    return c", "techniques.compile.mode", "default"),
        (
            "    c = base()\n    c.activation_checkpoint = None\n    return c",
            "techniques.activation_checkpointing",
            "none",
        ),
        (
            "    c = base()\n    c.activation_checkpoint = FullAC.Config()\n    return c",
            "techniques.activation_checkpointing.mode",
            "full",
        ),
        (
            "    c = base()\n    c.loss = ChunkedLossWrapper.Config(num_chunks=4)\n    return c",
            "techniques.chunked_loss.rows",
            64,
        ),
        (
            "    c = base()\n    c.model_spec = model_registry('0.6B', converters=[LoRAConverter.Config(rank=4, "
            "target_modules=['wqkv', 'w2'])])\n    return c",
            "techniques.lora.target_modules",
            ("q_proj", "k_proj", "v_proj", "down_proj"),
        ),
        (
            "    c = base()\n    c.dataloader = ChatDataLoader.Config(dataset_path='json', load_dataset_kwargs={"
            "'data_files': 'chat.jsonl'}, sample_processor=_rows)\n    return c",
            "data.source",
            "chat.jsonl",
        ),
    ],
)
def test_a_function_of_the_registry_leads_to_the_recipes(body: str, key: str, value: object) -> None:
    config = read_registry(f"{REGISTRY}\ndef run():\n{body}\n")
    found = look_up(config, key)
    assert found == value or (value == "none" and found is None)


def test_what_a_function_computes_is_named_with_its_line() -> None:
    body = (
        "    c = base()\n    if big():\n        c.training.seq_len = 4096\n    c.training.steps = count()\n    return c"
    )
    config = read_registry(f"{REGISTRY}\ndef run():\n{body}\n")
    assert {(key.key, key.line) for key in config.reading.not_understood} == {
        ("training.seq_len", 17),
        ("training.steps", 18),
    }
    assert look_up(config, "batch.seq_len") == 2048  # torchtitan's default


def test_several_configurations_need_a_name() -> None:
    assert look_up(read(REGISTRY, Path("f.py"), where="f.py"), "batch.size") == 2  # the only one
    with pytest.raises(RecipeError, match=r"^f.py: has 2 configurations \(base, run\); name one: f.py::base$"):
        read(f"{REGISTRY}\ndef run():\n    return base()\n", Path("f.py"), where="f.py")
    with pytest.raises(RecipeError, match=r"^f.py: has no function other; its configurations: base$"):
        read_registry(REGISTRY, "other")


def test_the_command_line_names_a_configuration_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REGISTRY.replace("torchtitan.models.qwen3", ".") + "\ndef run():\n    c = base()\n    return c\n")
    with pytest.raises(RecipeError, match=r"mine.py:12: model_spec.flavor: sizes of '\S+ 0.6B' are not known; known: "):
        find_subject(f"{file}::run")
    file.write_text(file.read_text().replace("return c\n", "c.hf_assets_path = './hf/Qwen3-0.6B'\n    return c\n"))
    subject = find_subject(f"{file}::run")
    assert (subject.absent, subject.recipe.batch.seq_len) == ("Qwen/Qwen3-0.6B", 128)
    with pytest.raises(RecipeError, match=r"other.py::run: no such file"):
        find_subject(f"{tmp_path}/other.py::run")


def test_a_registry_that_calls_itself_ends() -> None:
    doubled = "".join(f"def f{n}():\n    f{n + 1}()\n    return f{n + 1}()\n\n" for n in range(40))
    config = read_registry(
        f"{REGISTRY}\ndef f40():\n    return f0()\n\n{doubled}\ndef run():\n    x = f0()\n    return base()\n"
    )
    assert look_up(config, "batch.size") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE.replace('"8B"', '"9B"'), "f.toml:4: model.flavor: sizes of 'llama3 9B' are not known; known: llama3 1B,"),
        (BASE + "global_batch_size = 3\n", None),
        (BASE.replace("seq_len = 64", "seq_len = inf"), "f.toml:8: training.seq_len: must be a number, got 'inf'"),
        (BASE + "[activation_checkpoint]\nmode = 'most'\n", "f.toml:12: activation_checkpoint.mode: must be none, sel"),
        (BASE + "steps = 5\n", "f.toml: not TOML: Cannot overwrite a value (at line 11,"),
        ("[tool]\na = 1\n", "f.toml: has no section of another trainer's TOML"),
        (BASE + "[encoder]\nt5_encoder = 'google/t5'\n", "f.toml:12: encoder.t5_encoder: 'google/t5': images and"),
    ],
)
def test_refusals(text: str, message: str | None) -> None:
    if message is None:  # rounded down, as for other trainers
        assert any("no multiple" in note for note in read_file(text).reading.assumptions)
        return
    with pytest.raises(RecipeError) as error:
        read_file(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_lines_of_toml() -> None:
    text = 'a = 1\n\n[x.y] # note\n"b c" = """\nd = 2\n"""\n[[z]]\ne = [\n  1,\n]\n[[z]]\nf = {g = 1}\n'
    values, lines = read_toml(text, "f.toml")
    assert values == {"a": 1, "x": {"y": {"b c": "d = 2\n"}}, "z": [{"e": [1]}, {"f": {"g": 1}}]}
    assert {path: line for path, line in lines.items() if line > 6} == {
        ("z",): 7,
        ("z", "0"): 7,
        ("z", "0", "e"): 8,
        ("z", "1"): 11,
        ("z", "1", "f"): 12,
        ("z", "1", "f", "g"): 12,
    }
    assert (lines["a",], lines["x", "y"], lines["x", "y", "b c"]) == (1, 3, 4)
