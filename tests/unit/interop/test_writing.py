"""Recipes as files of other trainers: read back they are the recipe, and what is lost is listed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from preheat.core import registry
from preheat.data.tokenizer import train_tokenizer
from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import ForeignConfig, read_config
from preheat.interop.recipe_settings import resolve_recipe
from preheat.interop.targets import TARGETS, render
from preheat.interop.writing import Written, compare
from preheat.recipe import Recipe, load, named_recipes, override, parse, to_values

from .reads import read

LORA = """
name: mine
seed: 7
model: {path: tiny}
data: {source: me/rows, layout: messages, validation: 0.1}
batch: {size: 64, seq_len: 256}
optimizer: {lr: 2.0e-4, betas: [0.9, 0.98], eps: 1.0e-6, weight_decay: 0.01, max_grad_norm: 0.5}
schedule: {kind: cosine, warmup_ratio: 0.03, min_lr_ratio: 0.1}
stop: {epochs: 2}
evaluate: {every: 50}
checkpoint: {every: 100, keep: 3}
parallel: {devices: 4}
techniques:
  lora: {rank: 4, alpha: 8, dropout: 0.1, target_modules: [q_proj, o_proj], variant: rslora}
  mixed_precision: {mode: bf16}
  efficient_attention: {}
  activation_checkpointing: {}
  gradient_accumulation: {steps: 8}
  chunked_loss: {}
  fsdp: {reshard_after_forward: false, offload: true}
"""
QLORA = """
name: small
model: {path: tiny}
data: {source: a/rows.jsonl, layout: sharegpt, train_on: all, validation: 0.0}
batch: {size: 6, seq_len: 128}
optimizer: {lr: 1.0e-4}
schedule: {kind: constant, warmup_ratio: 0.1}
stop: {max_steps: 40}
techniques:
  lora: {}
  nf4: {double_quantization: false}
  mixed_precision: {mode: bf16}
  low_bit_adamw: {}
  neftune: {alpha: 3}
  chunked_loss: {}
  gradient_accumulation: {steps: 3}
"""
PRETRAINING = """
name: from-text
model: {path: tiny}
data: {source: texts.jsonl, layout: text, packing: stream, text: body}
batch: {size: 16, seq_len: 512}
optimizer: {lr: 3.0e-4}
schedule: {kind: wsd, warmup_ratio: 0.05, decay_ratio: 0.2, min_lr_ratio: 0.05}
stop: {tokens: 8192000}
parallel: {devices: 2}
techniques:
  mixed_precision: {mode: bf16_pure}
  compile: {when: always}
  chunked_loss: {}
  data_parallel: {}
  zero1: {}
"""
PAIRS = """
name: pairs
model: {path: tiny}
data: {source: me/pairs, layout: preference}
batch: {size: 8, seq_len: 256}
optimizer: {lr: 1.0e-6}
schedule: {kind: wsd, warmup_ratio: 0.1, decay_ratio: 0.9, min_lr_ratio: 0}
stop: {epochs: 1}
techniques:
  lora: {}
  mixed_precision: {mode: bf16}
  efficient_attention: {}
  chunked_loss: {}
  preference: {loss: ipo, beta: 0.3}
"""
RECIPES = {"lora": LORA, "qlora": QLORA, "pretraining": PRETRAINING, "pairs": PAIRS}


def write(recipe: Recipe, to: str, folder: Path = Path()) -> tuple[Written, str]:
    written = TARGETS[to].write(recipe, folder)
    return written, render(TARGETS[to], written)


def read_back(recipe: Recipe, to: str, text: str, folder: Path = Path()) -> ForeignConfig:
    return read(text, folder / "f.yaml", devices=recipe.parallel.devices)


@pytest.mark.parametrize("to", ["axolotl", "llamafactory", "trl"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_was_written_is_read_as_the_same_recipe(
    to: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, folder = parse(RECIPES[name]), Path("files")
    written, text = write(recipe, to, folder)
    folder.mkdir()
    for file, content in written.beside.items():
        (folder / file).write_text(content)
    config = read_back(recipe, to, text, folder)
    differences = {key for key, _ in compare(resolve_recipe(recipe), to_values(config.recipe))}
    assert differences == {item.key for item in written.left_out}
    # These trainers shard optimizer states by DeepSpeed, which keeps fp32 copies of weights in half precision.
    lost = ["techniques.mixed_precision.mode"] if name == "pretraining" else []
    assert [item.key for item in written.lost] == lost
    assert all("keeps fp32 copies" in item.why for item in written.lost)
    assert config.reading.not_understood == ()
    assert config.reading.trainer == ("trl-dpo" if (to, name) == ("trl", "pairs") else to)
    # Also read by trainers whose YAML 1.1 takes 1e-6 for text.
    rate = yaml.safe_load(text)["learning_rate"]
    assert rate == recipe.optimizer.lr


@pytest.mark.parametrize("to", ["axolotl", "llamafactory", "trl", "ms-swift"])
@pytest.mark.parametrize(
    "name", [name for name, file in named_recipes().items() if not file.is_chain and file.package is None]
)
def test_built_in_recipes_are_read_back_or_listed(
    to: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    devices = 8 if name == "multi-gpu" else 1
    plain = load(name)
    stated = ["optimizer.lr=1.0e-4", f"parallel.devices={devices}"]
    stated += [] if plain.model.path or plain.model.preset else ["model={path: tiny}"]
    own = any(part.source in ("stdlib", "docstrings") for part, _ in plain.data.parts())
    stated += ["data={source: rows.jsonl, layout: text, packing: stream}"] if own else []
    recipe = load(name, stated)
    written, text = write(recipe, to)
    for file, content in written.beside.items():
        Path(file).write_text(content)
    file = TARGETS[to].file.format(name=name)
    back = read(text, Path(file), where=file, devices=devices)
    listed = {item.key for item in written.left_out} | {note.partition(":")[0] for note in written.notes}
    differences = compare(resolve_recipe(recipe), to_values(back.recipe))
    assert [(key, value) for key, value in differences if key not in listed] == []


@pytest.mark.parametrize("to", ["axolotl", "llamafactory", "trl"])
def test_each_technique_is_said_or_listed(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = parse(
        "{model: {path: tiny}, data: {source: me/rows, layout: messages}, batch: {size: 8}, optimizer: {lr: 1.0e-4}, "
        "stop: {epochs: 1}, parallel: {devices: 2}}"
    )
    silent = []
    # A preference is another task, with data of its own.
    for name in sorted(registry().keys() - {"preference"}):
        recipe = replace(plain, techniques={name: registry()[name]()})
        written, text = write(recipe, to)
        for file, content in written.beside.items():
            (tmp_path / file).write_text(content)
        back = read_config(text, Path("f.yaml"), FORMATS[to], devices=2)
        listed = {item.key for item in written.left_out} | {note.partition(":")[0] for note in written.notes}
        silent += [f"{name}: {key}" for key, _ in compare(recipe, to_values(back.recipe)) if key not in listed]
    assert silent == []


def test_what_is_only_faster_is_told_from_what_is_lost() -> None:
    text = LORA.replace("chunked_loss: {}", "chunked_loss: {rows: 64}").replace("rslora", "pissa")
    text = text.replace("steps: 8}", "steps: 8, on_gpu: auto}") + "sample: {prompts: [a]}\n"
    written, _ = write(parse(text), "trl")
    assert {item.key: item.same_result for item in written.left_out} == {
        "techniques.lora.variant": False,
        "techniques.gradient_accumulation.on_gpu": True,
        "techniques.chunked_loss.rows": True,
        "sample.prompts": True,
    }
    assert [item.describe() for item in written.lost] == ['techniques.lora.variant: "pissa": TRL has no key for it']


def test_each_source_is_accounted_for() -> None:
    rows = "[{source: a, layout: messages}, {source: b, layout: classes}, {source: ./c.json, layout: alpaca, limit: 5}]"
    recipe = parse(LORA.replace("source: me/rows, layout: messages", f"source: {rows}"))
    assert [item.key for item in write(recipe, "axolotl")[0].lost] == ["data.source.1.layout", "data.source.2.limit"]
    assert [item.key for item in write(recipe, "llamafactory")[0].lost] == ["data.source.1.layout"]


def test_defaults_of_both_are_left_out_and_known() -> None:
    recipe = parse(LORA.replace("max_grad_norm: 0.5", "max_grad_norm: 1.0").replace("0.9, 0.98", "0.9, 0.999"))
    written, text = write(recipe, "trl")
    assert {"max_grad_norm", "adam_beta1"} <= written.defaults
    assert written.values["max_grad_norm"] == 1.0
    assert "max_grad_norm" not in text
    # Not a default of a recipe: somebody stated it.
    assert "lora_r" in text


def test_a_file_of_rows_tells_their_layout(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    recipe = parse(LORA.replace("me/rows, layout: messages", str(file)))
    assert write(recipe, "axolotl")[0].values["datasets"] == [{"path": str(file), "ds_type": "json", "type": "alpaca"}]
    file.write_text('{"x": 1}\n')
    assert [item.key for item in write(recipe, "axolotl")[0].lost] == ["data.layout"]
    unknown = parse(LORA.replace(", layout: messages", ""))
    assert [item.key for item in write(unknown, "axolotl")[0].lost] == ["data.layout"]
    assert write(unknown, "trl")[0].lost == ()  # which recognizes rows itself


@pytest.mark.parametrize("to", ["axolotl", "llamafactory", "trl", "ms-swift"])
def test_automatic_precision_is_that_of_a_gpu(to: str) -> None:
    automatic = parse(LORA.replace("mode: bf16", "mode: auto"))
    assert write(automatic, to)[1] == write(parse(LORA), to)[1]


SWIFT = """\
model: tiny
use_hf: true
tuner_type: lora
lora_rank: 4
lora_alpha: 8.0
lora_dropout: 0.1
target_modules:
- q_proj
- o_proj
use_rslora: true
dataset:
- me/rows
split_dataset_ratio: 0.1
packing: true
attn_impl: flash_attn
torch_dtype: bfloat16
max_length: 256
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
num_train_epochs: 2.0
learning_rate: 0.0002
adam_beta2: 0.98
adam_epsilon: 1.0e-06
weight_decay: 0.01
max_grad_norm: 0.5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
warmup_ratio: 0.03
gradient_checkpointing: true
fsdp: full_shard
fsdp_config:
  version: 2
  reshard_after_forward: false
  cpu_offload: true
output_dir: runs/mine
save_steps: 100
save_total_limit: 3
eval_strategy: steps
eval_steps: 50
report_to: none
dataloader_num_workers: 0
seed: 7
"""


def test_ms_swift() -> None:
    written, text = write(parse(LORA), "ms-swift")
    assert text == SWIFT
    assert written.start == ("NPROC_PER_NODE=4 swift sft {file}",)
    assert [item.key for item in written.left_out] == ["techniques.chunked_loss"]
    assert written.lost == ()


def test_ms_swift_is_told_the_type_of_a_model_in_a_folder(tmp_path: Path) -> None:
    written, _ = write(parse(LORA.replace("path: tiny", f"path: {tmp_path}")), "ms-swift")
    assert [note for note in written.notes if "add model_type and template" in note]
    assert written.lost == ()


@pytest.mark.parametrize(
    ("techniques", "value"),
    [("efficient_attention: {}", "sdpa"), ("activation_checkpointing: {}", "eager")],
)
def test_packed_rows_of_axolotl_do_not_see_each_other(techniques: str, value: str) -> None:
    head = LORA[: LORA.index("techniques:")].replace("devices: 4", "devices: 1")
    recipe = parse(f"{head}techniques:\n  mixed_precision: {{mode: bf16_pure}}\n  {techniques}\n")
    written, _ = write(recipe, "axolotl")
    assert written.values["sample_packing"] is True
    assert written.values["attn_implementation"] == value


MEGATRON = """\
#!/bin/bash
set -euo pipefail
torchrun --nproc-per-node 8 pretrain_gpt.py \\
  --use-mcore-models \\
  --transformer-impl transformer_engine \\
  --num-layers 4 \\
  --hidden-size 256 \\
  --ffn-hidden-size 768 \\
  --num-attention-heads 8 \\
  --kv-channels 32 \\
  --group-query-attention \\
  --num-query-groups 4 \\
  --max-position-embeddings 512 \\
  --position-embedding-type rope \\
  --rotary-base 10000 \\
  --normalization RMSNorm \\
  --norm-epsilon 1e-06 \\
  --swiglu \\
  --disable-bias-linear \\
  --attention-dropout 0 \\
  --hidden-dropout 0 \\
  --untie-embeddings-and-output-weights \\
  --qk-layernorm \\
  --data-path data/texts_text_document \\
  --tokenizer-type HuggingFaceTokenizer \\
  --tokenizer-model tok \\
  --split 980,20,0 \\
  --reset-position-ids \\
  --reset-attention-mask \\
  --seq-length 512 \\
  --micro-batch-size 2 \\
  --global-batch-size 64 \\
  --train-iters 100 \\
  --lr 0.001 \\
  --min-lr 0.0001 \\
  --lr-decay-style cosine \\
  --lr-warmup-fraction 0.02 \\
  --weight-decay 0.1 \\
  --adam-beta1 0.9 \\
  --adam-beta2 0.95 \\
  --clip-grad 1 \\
  --bf16 \\
  --recompute-granularity full \\
  --recompute-method uniform \\
  --recompute-num-layers 1 \\
  --tensor-model-parallel-size 2 \\
  --use-distributed-optimizer \\
  --overlap-grad-reduce \\
  --overlap-param-gather \\
  --seed 0 \\
  --save runs/new \\
  --save-interval 100 \\
  --eval-interval 100 \\
  --eval-iters 10 \\
  --log-interval 10
"""
NEW = """
name: new
model: {family: qwen3, num_layers: 4, hidden_size: 256, num_heads: 8, num_kv_heads: 4, intermediate_size: 768,
  vocab_size: 1024, tie_embeddings: false}
data: {source: texts.jsonl, layout: text, packing: stream, tokenizer: tok}
batch: {size: 64, seq_len: 512}
optimizer: {lr: 1.0e-3}
stop: {max_steps: 100}
parallel: {devices: 8}
techniques:
  mixed_precision: {mode: bf16}
  activation_checkpointing: {}
  gradient_accumulation: {steps: 8}
  data_parallel: {}
  tensor_parallel: {degree: 2}
  zero1: {}
"""


def test_megatron() -> None:
    written, text = write(parse(NEW), "megatron")
    assert text == MEGATRON
    assert written.left_out == ()
    assert written.start[-1] == "bash {file}"
    assert written.start[0].startswith("python tools/preprocess_data.py --input texts.jsonl --json-keys text ")
    sizes = NEW[NEW.index("model: ") : NEW.index("data: ")]
    written, text = write(parse(NEW.replace(sizes, "model: {path: Qwen/Qwen3-0.6B}\n")), "megatron")
    assert [item.key for item in written.lost] == ["model.weights"]
    assert "--num-layers 28 " in text


def test_names_stay_within_their_word_and_comment() -> None:
    name = "a\\nrm -rf {b} $(c).jsonl"
    written, _ = write(parse(NEW.replace("texts.jsonl", f'"{name}"')), "megatron")
    text = render(TARGETS["megatron"], written, written.start)
    comment, _, command = text.removeprefix("#!/bin/bash\n").partition("set -euo pipefail\n")
    assert {line[:2] for line in comment.splitlines()} == {"# "}
    words = shlex.split(command)
    assert words[words.index("--data-path") + 1] == "data/a\nrm -rf {b} $(c)_text_document"


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
mixed_precision: bf16
num_machines: 1
machine_rank: 0
num_processes: 4
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def test_files_beside_a_trainers(tmp_path: Path) -> None:
    recipe = parse(LORA)
    written, accelerate = write(recipe, "accelerate")
    assert (accelerate, written.left_out) == (ACCELERATE, ())
    written, deepspeed = write(recipe, "deepspeed")
    assert (json.loads(deepspeed), written.left_out) == (DEEPSPEED, ())
    assert "in the trainer's file" in written.notes[0]
    # Beside the trainer's file, which does not shard itself, they are the recipe again.
    trainer = write(
        parse(LORA.replace("  fsdp: {reshard_after_forward: false, offload: true}", "  data_parallel: {}")), "trl"
    )[1]
    (tmp_path / "a.yaml").write_text(accelerate)
    (tmp_path / "d.json").write_text(deepspeed)
    for companions in ({"accelerate": tmp_path / "a.yaml"}, {"deepspeed": tmp_path / "d.json", "devices": 4}):
        back = read(trainer, **companions)
        assert list(compare(recipe, to_values(back.recipe))) == []


@pytest.mark.parametrize(
    ("to", "old", "new", "message"),
    [
        (
            "trl",
            "path: tiny",
            "size: 15M",
            "model.path: names no checkpoint, which TRL needs; add --set model.path=PATH",
        ),
        ("trl", "me/rows, layout: messages", "stdlib", "data.source: stdlib: is preheat's own text"),
        (
            "trl",
            "{devices: 4}",
            "{}",
            "parallel.devices: null: TRL's file is for a number of devices, and techniques.fsdp",
        ),
        ("accelerate", "{devices: 4}", "{}", "parallel.devices: null: accelerate's file is for"),
        ("megatron", "seed: 7", "seed: 7", "data.layout: messages: Megatron-LM's pretrain_gpt.py reads plain text"),
        (
            "ms-swift",
            "path: tiny",
            "family: llama, num_layers: 2",
            "model.path: names no checkpoint, which ms-swift needs",
        ),
    ],
)
def test_recipes_that_are_no_such_run(to: str, old: str, new: str, message: str) -> None:
    assert old in LORA
    with pytest.raises(RecipeError) as error:
        write(parse(LORA.replace(old, new)), to)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("to", "line"),
    [("llamafactory", "use_dft_loss: true"), ("trl", "loss_type: dft"), ("ms-swift", "enable_dft_loss: true")],
)
def test_dynamic_fine_tuning_is_written(to: str, line: str) -> None:
    plain = parse(LORA)
    _, written = write(override(plain, "techniques.dft={}"), to)
    assert line in written
    assert line not in write(plain, to)[1]


@pytest.mark.parametrize("to", ["axolotl", "llamafactory", "trl", "ms-swift"])
def test_a_loss_that_the_trainer_has_not(to: str) -> None:
    with pytest.raises(RecipeError, match=r"^techniques.preference.loss: apo_zero: "):
        write(parse(PAIRS.replace("loss: ipo, beta: 0.3", "loss: apo_zero").replace("preference}", "kto}")), to)


def test_a_script_for_megatron_is_read_as_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides sizes that a recipe leaves to the family, and kernels that Megatron has in any case."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer([("0", "a text of some words")], vocabulary=300).save_pretrained("words")
    recipe = parse(
        "{model: {family: llama, num_layers: 2, hidden_size: 64, num_heads: 4, max_positions: 512}, "
        "data: {source: texts.jsonl, layout: text, packing: stream, tokenizer: words}, batch: {size: 16, seq_len: 512}, "
        "optimizer: {lr: 3.0e-4}, stop: {tokens: 8192000}, parallel: {devices: 2}, "
        "schedule: {kind: wsd, warmup_ratio: 0.05, decay_ratio: 0.2, min_lr_ratio: 0.05}, "
        "techniques: {mixed_precision: {mode: bf16_master}, efficient_attention: {}, data_parallel: {}, zero1: {}}}"
    )
    written, text = write(recipe, "megatron")
    file = TARGETS["megatron"].file.format(name="mine")
    back = read(text, Path(file), where=file, devices=2)
    spelled_out = {f"model.{key}" for key in ("num_kv_heads", "intermediate_size", "tie_embeddings", "config")}
    own = {"data.workers", "data.source", "techniques.fused_operators", "techniques.chunked_loss"}
    differences = {key for key, _ in compare(resolve_recipe(recipe), to_values(back.recipe))}
    assert differences - {item.key for item in written.left_out} == {*spelled_out, *own, "model.vocab_size"}
    assert back.recipe.model.vocab_size == 384  # the tokenizer's at most 300, padded to a multiple of 128
    assert back.reading.not_understood == ()


@pytest.mark.parametrize(("to", "says"), [("axolotl", True), ("trl", False)])
def test_experts_in_4_bits_are_said_or_listed(to: str, says: bool) -> None:
    text = QLORA.replace("path: tiny", "path: Qwen/Qwen3-30B-A3B")
    assert text != QLORA
    written, file = write(parse(text), to)
    assert ("quantize_moe_experts: true" in file) is says
    assert ("techniques.nf4.experts" in {item.key for item in written.left_out}) is not says


@pytest.mark.parametrize(
    ("lora", "targets", "expert_rank"),
    [
        ("target_modules: [q_proj, experts]", ["q_proj"], 8),
        ("target_modules: attention", ["q_proj", "k_proj", "v_proj", "o_proj"], 0),
        ("target_modules: [attention, gate]", ["q_proj", "k_proj", "v_proj", "o_proj", "gate"], 0),
        ("target_modules: [attention, experts]", ["q_proj", "k_proj", "v_proj", "o_proj"], 8),
        ("target_modules: all-linear, expert_rank: 8", "all-linear", 8),
    ],
)
@pytest.mark.parametrize("to", ["axolotl", "trl", "ms-swift"])
def test_kinds_of_layers_are_written_by_their_names_and_experts_by_their_parameters(
    to: str, lora: str, targets: str | list[str], expert_rank: int
) -> None:
    text = LORA.replace("path: tiny", "path: Qwen/Qwen3-30B-A3B").replace("dropout: 0.1", "dropout: 0")
    text = text.replace("rank: 4, ", "rank: 8, ").replace("target_modules: [q_proj, o_proj]", lora)
    written, file = write(parse(text), to)
    assert not [item for item in written.left_out if item.key.startswith("techniques.lora")]
    assert ("experts.gate_up_proj" in file) is (expert_rank > 0)
    back = vars(read(file, Path(TARGETS[to].file.format(name="mine"))).recipe.techniques["lora"])
    names = back["target_modules"]
    assert (names if isinstance(names, str) else list(names)) == targets
    assert back["expert_rank"] == expert_rank


def test_experts_of_another_rank_and_kinds_of_unknown_models_are_reported() -> None:
    text = LORA.replace("path: tiny", "path: Qwen/Qwen3-30B-A3B").replace("dropout: 0.1", "expert_rank: 2")
    (left_out,) = [item for item in write(parse(text), "trl")[0].left_out if item.key == "techniques.lora.expert_rank"]
    assert left_out.why == "experts get the rank of the other layers, 4"
    unknown = LORA.replace("[q_proj, o_proj]", "attention").replace("path: tiny", "path: org/none")
    with pytest.raises(
        RecipeError, match=r"'attention': each model has other names.*name them, like \[q_proj, v_proj\]"
    ):
        write(parse(unknown), "trl")
    write(parse(unknown), "deepspeed")  # whose file is not about adapters
    absent = LORA.replace("[q_proj, o_proj]", "recurrent").replace("path: tiny", "path: Qwen/Qwen3-30B-A3B")
    with pytest.raises(RecipeError, match="'recurrent': the model has no such layers"):
        write(parse(absent), "trl")


def test_experts_without_a_gate_have_another_parameter() -> None:
    text = LORA.replace("path: tiny", "path: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").replace("dropout: 0.1, ", "")
    _, file = write(parse(text.replace("[q_proj, o_proj]", "[attention, experts]")), "trl")
    assert "experts.up_proj" in file
    assert "gate_up_proj" not in file
