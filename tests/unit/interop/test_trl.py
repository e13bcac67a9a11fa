"""TRL's keys, one by one, in YAML, JSON and scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.reading import read_config

from .reads import look_up, read, read_script

SMALL = "model_name_or_path: tiny\ndataset_name: me/rows\nmax_steps: 50\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "batch.seq_len", 1024),
        ("", "batch.size", 8),
        ("", "optimizer.lr", 2e-5),
        ("", "techniques.lora", None),
        ("", "techniques.activation_checkpointing.mode", "full"),
        ("", "techniques.mixed_precision.mode", "bf16"),
        ("", "techniques.chunked_loss.kernel", "auto"),
        ("", "data.train_on", "all"),
        ("", "data.source", "me/rows"),
        ("use_peft: true", "techniques.lora.rank", 16),
        ("use_peft: true", "techniques.lora.alpha", 32.0),
        ("use_peft: true", "techniques.lora.dropout", 0.05),
        ("use_peft: true", "techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("use_peft: true", "techniques.mixed_precision.frozen", "fp32"),
        ("use_peft: true\ndtype: bfloat16", "techniques.mixed_precision.frozen", "auto"),
        ("use_peft: true\nlora_target_modules: all-linear", "techniques.lora.target_modules", "all-linear"),
        ("use_peft: true\nuse_dora: true", "techniques.lora.variant", "dora"),
        ("use_peft: true\nload_in_4bit: true", "techniques.nf4.double_quantization", False),
        ("use_peft: true\nload_in_4bit: true\nuse_bnb_nested_quant: true", "techniques.nf4.double_quantization", True),
        ("lora_r: 4", "techniques.lora", None),  # without use_peft
        ("dtype: bfloat16", "techniques.mixed_precision.mode", "bf16_pure"),
        ("dtype: bfloat16\nbf16: false", "techniques.mixed_precision.mode", "bf16_pure"),
        ("bf16: false", "techniques.mixed_precision", None),
        ("fp16: true", "techniques.mixed_precision.mode", "fp16"),
        ("max_seq_length: 64", "batch.seq_len", 64),
        ("assistant_only_loss: true", "data.train_on", "assistant"),
        ("dataset_text_field: body", "data.text", "body"),
        ("dataset_config: small\ndataset_train_split: half", "data.subset", "small"),
        ("dataset_config: small\ndataset_train_split: half", "data.split", "half"),
        ("test_split_size: 0.1", "data.validation", 0.1),
        ("gradient_checkpointing: false", "techniques.activation_checkpointing", None),
        ("activation_offloading: true", "techniques.activation_offload.stay", 1),
        ("model_init_kwargs: {attn_implementation: eager}", "techniques.efficient_attention", None),
        (
            "use_peft: true\nmodel_init_kwargs: {quantization_config: {load_in_4bit: true}}",
            "techniques.nf4.double_quantization",
            False,
        ),
        ("label_smoothing_factor: 0.1", "techniques.chunked_loss", None),
        ("optim: adamw_8bit", "techniques.low_bit_adamw.bits", 8),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
            "schedule.min_lr_ratio",
            0.1,
        ),
        ("fsdp: true\nfsdp_config: {reshard_after_forward: false}", "techniques.fsdp.reshard_after_forward", False),
        ("fsdp_config: {version: 2}", "techniques.fsdp", None),  # without fsdp
        ("fsdp: full_shard offload", "techniques.fsdp.offload", True),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(SMALL + lines + "\n", devices=4 if "fsdp" in lines else None), key) == value


def test_dynamic_fine_tuning() -> None:
    assert "dft" in read(SMALL + "loss_type: dft\n").recipe.techniques
    assert "dft" not in read(SMALL).recipe.techniques


@pytest.mark.parametrize(
    ("dataset", "values"),
    [
        ("{path: json, data_files: a.jsonl}", {"source": "a.jsonl"}),
        ("{path: json, data_files: {train: a.jsonl, test: b.jsonl}}", {"source": "a.jsonl"}),
        ("{path: me/set, name: small, split: half}", {"source": "me/set", "subset": "small", "split": "half"}),
    ],
)
def test_datasets(dataset: str, values: dict[str, object]) -> None:
    config = read(f"model_name_or_path: tiny\nmax_steps: 5\ndatasets: [{dataset}]\n")
    assert {key: look_up(config, f"data.{key}") for key in values} == values
    assert not config.reading.not_understood


@pytest.mark.parametrize(
    ("lines", "loss"),
    [
        ("precompute_ref_log_probs: false", "dpo"),
        ("beta: 0.2\nloss_type: ipo", "ipo"),
        ("beta: 0.2\nloss_type: [hinge]", "hinge"),
        ("beta: 0.2\nloss_type: [sigmoid, sft]", "dpo"),
    ],
)
def test_preferences_are_known_by_their_keys(lines: str, loss: str) -> None:
    config = read(f"{SMALL}{lines}\n")
    assert (config.reading.trainer, look_up(config, "techniques.preference.loss")) == ("trl-dpo", loss)
    assert look_up(config, "techniques.preference.beta") == (0.2 if "beta" in lines else 0.1)
    assert (look_up(config, "batch.size"), look_up(config, "data.layout")) == (16, "preference")
    assert look_up(config, "optimizer.lr") == 1e-6


def test_a_file_that_does_not_tell_the_task_is_read_as_sft_and_says_so() -> None:
    def says(lines: str) -> bool:
        return any("--from trl-dpo" in text for text in read(SMALL + lines).reading.assumptions)

    assert says("")
    assert not says("packing: true\n")
    assert not says("beta: 0.1\n")
    stated = read_config(SMALL, Path("f.yaml"), FORMATS["trl-dpo"])
    assert look_up(stated, "techniques.preference.loss") == "dpo"


def test_batches_without_padding_are_said_to_be_so() -> None:
    def says(lines: str) -> bool:
        return any(text.startswith("batches have no padding") for text in read(SMALL + lines).reading.assumptions)

    assert says("padding_free: true\n")
    assert not says("padding_free: false\n")


def test_a_length_of_null_is_planned_at_the_default_and_says_so() -> None:
    assert any(text.startswith("max_length: null") for text in read(SMALL + "max_length: null\n").reading.assumptions)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("num_generations: 8", "f.yaml:4: num_generations: training of or on rewards is not planned"),
        ("beta: 0.1\nuse_vllm: false", "f.yaml:5: use_vllm: training of or on rewards is not planned"),
        ("center_rewards_coefficient: 0.01", "f.yaml:4: center_rewards_coefficient: training of or on rewards"),
        ("use_peft: true\nlora_task_type: SEQ_CLS", "f.yaml:5: lora_task_type: SEQ_CLS: training of or on rewards"),
        ("desirable_weight: 1.0", "f.yaml:4: desirable_weight: of TRL's trainers, SFT and DPO are read"),
        ("load_in_4bit: true", "f.yaml:4: load_in_4bit: a base in 4 bits is frozen"),
        ("dataset_streaming: true\nmax_steps: -1", "f.yaml:4: dataset_streaming: a streamed dataset has no known"),
        ("packing_strategy: other", "f.yaml:4: packing_strategy: must be bfd, bfd_split, bfd-requeue or wrapped"),
        ("dtype: int8", "f.yaml:4: dtype: must be auto, bfloat16, float16 or float32, got 'int8'"),
        ("use_peft: maybe", "f.yaml:4: use_peft: must be true or false, got 'maybe'"),
        ("learning_rate: ${LR}", "f.yaml:4: learning_rate: '${LR}' is a template or a variable"),
    ],
)
def test_refusals(lines: str, message: str) -> None:
    text = SMALL.replace("max_steps: 50\n", "# steps\n") if "max_steps" in lines else SMALL
    with pytest.raises(RecipeError) as error:
        read(text + lines + "\n")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", ["GRPO", "Reward", "RLOO"])
def test_scripts_on_rewards_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"^f.py:1: {name}Config.output_dir: training of or on rewards"):
        read_script(f'args = {name}Config(output_dir="out")\n')


SCRIPT = """\
MODEL = "tiny"
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
args = SFTConfig(
    output_dir="out",
    learning_rate=1e-4,
    max_steps=5,
    per_device_train_batch_size=int(2),
)
trainer = SFTTrainer(model=model, args=args, train_dataset=load_dataset("me/rows", split="train"))
"""


def test_a_script_is_read_with_its_trainers_defaults() -> None:
    config = read_script(SCRIPT)
    assert (config.reading.trainer, look_up(config, "model.path")) == ("trl", "tiny")
    assert look_up(config, "optimizer.lr") == 1e-4
    assert look_up(config, "data.source") == "me/rows"
    assert look_up(config, "techniques.mixed_precision.mode") == "bf16_pure"
    assert look_up(config, "techniques.activation_checkpointing.mode") == "full"
    (key,) = config.reading.not_understood
    assert (key.key, key.line, key.value) == ("SFTConfig.per_device_train_batch_size", 7, "int(2)")
    assert "not known without running" in key.assumed


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("SFTConfig(", "TrainingArguments(", "techniques.activation_checkpointing", None),
        (", dtype=torch.bfloat16", "", "techniques.mixed_precision.mode", "bf16_pure"),
        ("torch.bfloat16", "torch.float32", "techniques.mixed_precision.mode", "bf16"),
        ("model=model", 'model="other"', "model.path", "other"),
        ("args=args,", "args=args, peft_config=LoraConfig(),", "techniques.lora.rank", 8),
        ("args=args,", "args=args, peft_config=LoraConfig(r=4),", "techniques.lora.rank", 4),
        ("args=args,", "args=args, peft_config=LoraConfig(r=4),", "techniques.lora.alpha", 8.0),
        ("args=args,", "args=args, max_seq_length=64,", "batch.seq_len", 64),
        ("SFTTrainer(model=model, args=args", "SFTTrainer(model, args", "model.path", "tiny"),
    ],
)
def test_a_scripts_calls_lead_to_the_recipes_keys(old: str, new: str, key: str, value: object) -> None:
    assert old in SCRIPT
    assert look_up(read_script(SCRIPT.replace(old, new)), key) == value
