"""litgpt's keys, one by one, of fine-tuning and of pretraining."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read

LORA = """\
checkpoint_dir: checkpoints/me/tiny
lora_r: 4
data: {class_path: litgpt.data.JSON, init_args: {json_path: rows.json}}
train: {max_steps: 50, max_seq_length: 64}
"""
FULL = LORA.replace("lora_r: 4\n", "")
PRETRAIN = """\
model_name: tiny
tokenizer_dir: checkpoints/me/tiny
data: {class_path: litgpt.data.TextFiles, init_args: {train_data_path: texts}}
train: {max_tokens: 1000000, max_seq_length: 64, max_norm: 1.0}
"""
SIZES = (
    "model_config: {n_layer: 2, n_embd: 64, n_head: 4, n_query_groups: 2, intermediate_size: 128, block_size: 256, "
    "padded_vocab_size: 512, norm_class_name: RMSNorm, mlp_class_name: LLaMAMLP, rotary_percentage: 1.0, "
    "parallel_residual: false, bias: false}"
)


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.path", "me/tiny"),
        ("", "data.source", "rows.json"),
        ("", "data.layout", "alpaca"),
        ("", "data.validation", 0.05),
        ("", "data.train_on", "all"),
        ("", "data.template", "alpaca"),
        ("", "data.packing", "whole"),
        ("", "batch.size", 16),
        ("", "batch.seq_len", 64),
        ("", "techniques.gradient_accumulation.steps", 16),
        ("", "techniques.lora.alpha", 16.0),
        ("", "techniques.lora.dropout", 0.05),
        ("", "techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("", "techniques.activation_checkpointing", None),
        ("", "techniques.mixed_precision.frozen", "fp32"),  # bf16-mixed by default
        ("", "techniques.chunked_loss", None),
        ("", "optimizer.lr", 1e-3),
        ("", "optimizer.max_grad_norm", 0.0),
        ("", "schedule.min_lr_ratio", 0.0),
        ("precision: bf16-true", "techniques.mixed_precision.frozen", "auto"),
        ("precision: 32-true", "techniques.mixed_precision", None),
        ("precision: bf16-true\nquantize: bnb.nf4", "techniques.nf4.double_quantization", False),
        ("precision: bf16-true\nquantize: nf4-dq", "techniques.nf4.double_quantization", True),
        ("lora_key: true\nlora_value: false", "techniques.lora.target_modules", ("q_proj", "k_proj")),
        ("lora_mlp: true", "techniques.lora.target_modules", ("q_proj", "v_proj", "feed-forward")),
        ("lora_key: true\nlora_projection: true", "techniques.lora.target_modules", ("attention",)),
        ("lora_alpha: 8\nlora_dropout: 0", "techniques.lora.alpha", 8.0),
        ("optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2e-4}}", "optimizer.lr", 2e-4),
        ("optimizer: {class_path: torch.optim.AdamW, init_args: {betas: [0.9, 0.95]}}", "optimizer.betas", (0.9, 0.95)),
        ("optimizer: bitsandbytes.optim.AdamW8bit", "techniques.low_bit_adamw.bits", 8),
        ("devices: 4", "parallel.devices", 4),
        ("devices: 4", "batch.size", 16),
        ("devices: 4", "techniques.fsdp.reduce", "last"),
        ("devices: 4", "techniques.activation_checkpointing.mode", "full"),
        ("devices: 2\nnum_nodes: 2", "parallel.devices", 4),
        ("devices: auto", "parallel.devices", None),
        ("seed: 3", "seed", 3),
    ],
)
def test_a_key_of_finetuning_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(LORA + lines + "\n"), key) == value


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.path", "me/tiny"),  # the tokenizer's folder states the owner
        ("", "model.weights", "random"),
        ("", "data.tokenizer", None),
        ("", "data.packing", "stream"),
        ("", "batch.size", 512),
        ("", "stop.max_steps", 1000000 // (512 * 64)),
        ("", "techniques.compile.mode", "default"),
        ("", "schedule.min_lr_ratio", 0.04),  # 4e-5 of 1e-3
        ("initial_checkpoint_dir: checkpoints/me/other", "model.path", "me/other"),
        ("initial_checkpoint_dir: checkpoints/me/other", "model.weights", "pretrained"),
        ("devices: 2\nnum_nodes: 2", "techniques.fsdp.replicate", 2),
        (SIZES, "model.family", "llama"),
        (SIZES, "model.num_layers", 2),
        (SIZES, "model.num_kv_heads", 2),
        (SIZES, "model.tie_embeddings", False),
    ],
)
def test_a_key_of_pretraining_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(PRETRAIN + lines + "\n"), key) == value


def test_finetuning_without_adapters_trains_all_weights() -> None:
    config = read(FULL + "precision: bf16-true\n")
    assert look_up(config, "techniques.lora") is None
    assert look_up(config, "techniques.mixed_precision.mode") == "bf16_pure"
    assert look_up(read(FULL), "techniques.mixed_precision.mode") == "bf16"


@pytest.mark.parametrize(
    ("module", "source", "layout"),
    [
        ("TinyStories", "roneneldan/TinyStories", "text"),
        ("{class_path: litgpt.data.Alpaca2k}", "mhenrichsen/alpaca_2k_test", "alpaca"),
        ("{class_path: LitData, init_args: {data_path: mine}}", "mine", "text"),
    ],
)
def test_data_modules(module: str, source: str, layout: str) -> None:
    config = read(f"checkpoint_dir: tiny\ndata: {module}\ntrain: {{max_steps: 5}}\n")
    assert (look_up(config, "data.source"), look_up(config, "data.layout")) == (source, layout)
    assert any("states no train.max_seq_length" in text for text in config.reading.assumptions)


def test_finetuning_reads_alpaca_if_the_file_names_no_data() -> None:
    config = read("checkpoint_dir: tiny\ndata:\ntrain: {max_steps: 5, max_seq_length: 64}\n")
    assert look_up(config, "data.source") == "tatsu-lab/alpaca"
    assert "the file names no data: litgpt reads Alpaca" in config.reading.assumptions


def test_the_command_decides_the_devices_and_the_global_batch_stays() -> None:
    config = read(LORA + "devices: 2\n", devices=8)
    assert (look_up(config, "parallel.devices"), look_up(config, "batch.size")) == (8, 16)
    assert look_up(config, "techniques.gradient_accumulation.steps") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LORA.replace("64}", "64, max_norm: 1.0}"), "f.yaml:4: train.max_norm: 1.0: litgpt finetune does not support"),
        (PRETRAIN.replace("64,", "64, epochs: 2,"), "f.yaml:4: train.epochs: 2: litgpt pretrain does not support it"),
        (FULL + "quantize: bnb.nf4\n", "f.yaml:4: quantize: a base in 4 bits is frozen: only finetune_lora"),
        (LORA + "quantize: bnb.nf4\ndevices: 2\n", "f.yaml:5: quantize: litgpt quantizes on one device only"),
        (LORA + "precision: half\n", "f.yaml:5: precision: must be bf16-true, bf16-mixed,"),
        (LORA + "lora_query: false\nlora_value: false\n", "f.yaml:2: lora_r: no kind of layer has adapters"),
        (LORA + "devices: 32\n", "f.yaml:4: train.micro_batch_size: "),
        (LORA + "optimizer: {init_args: {betas: 0.9}}\n", "f.yaml:5: optimizer.init_args.betas: must be two numbers"),
        (LORA.replace(", init_args: {json_path: rows.json}", ""), "f.yaml:3: data.class_path: names no data; add its"),
        (PRETRAIN + "model_config: {n_layer: 2}\n", "f.yaml:5: model_config.n_layer: only models of Llama's blocks"),
        (
            PRETRAIN + SIZES.replace("RMSNorm", "LayerNorm") + "\n",
            "f.yaml:5: model_config.norm_class_name: LayerNorm: only models of Llama's blocks",
        ),
    ],
)
def test_refusals(text: str, message: str) -> None:
    if "micro_batch_size" in message:
        text = text.replace("64}", "64, micro_batch_size: 1}")
    with pytest.raises(RecipeError) as error:
        read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
