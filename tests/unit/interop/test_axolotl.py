"""axolotl's keys, one by one."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read

SMALL = "base_model: tiny\ndatasets: [{path: rows.jsonl, type: alpaca}]\nmax_steps: 50\n"
PAIRS = "base_model: tiny\ndatasets: [{path: pairs.jsonl, type: chatml.intel}]\nmax_steps: 50\n"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("base_model: other", "model.path", "other"),
        ("reinit_weights: true", "model.weights", "random"),
        ("tokenizer_config: folder", "data.tokenizer", "folder"),
        ("tokens: ['<a>']", "model.add_tokens", ("<a>",)),
        ("sequence_len: 4096", "batch.seq_len", 4096),
        ("micro_batch_size: 3", "batch.size", 3),
        ("learning_rate: 2e-5", "optimizer.lr", 2e-5),
        ("learning_rate: '2e-5'", "optimizer.lr", 2e-5),
        ("adam_beta2: 0.95", "optimizer.betas", (0.9, 0.95)),
        ("adam_epsilon: 1e-6", "optimizer.eps", 1e-6),
        ("weight_decay: 0.1", "optimizer.weight_decay", 0.1),
        ("max_grad_norm: 0.3", "optimizer.max_grad_norm", 0.3),
        ("optimizer: adamw_bnb_8bit", "techniques.low_bit_adamw.bits", 8),
        ("optimizer: adamw_torch_4bit", "techniques.low_bit_adamw.bits", 4),
        ("optimizer: adafactor", "techniques.adafactor.decay", 0.8),
        ("optimizer: paged_adamw_32bit", "techniques.low_bit_adamw", None),
        ("lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1", "schedule.min_lr_ratio", 0.1),
        ("lr_scheduler: constant_with_warmup", "schedule.kind", "constant"),
        ("lr_scheduler: linear\nwarmup_ratio: 0.1", "schedule.decay_ratio", 0.9),
        ("warmup_ratio: 0.1", "schedule.warmup_ratio", 0.1),
        ("warmup_steps: 5", "schedule.warmup_ratio", 0.1),
        ("warmup_steps: 0.2", "schedule.warmup_ratio", 0.2),
        ("adapter: lora\nlora_r: 4", "techniques.lora.rank", 4),
        ("adapter: lora", "techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("adapter: lora\nlora_target_linear: true", "techniques.lora.target_modules", "all-linear"),
        (
            "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]",
            "techniques.lora.target_modules",
            "all-linear",
        ),
        ("", "data.template", "alpaca"),  # of the rows' type
        ("adapter: lora\nlora_target_modules: [q_proj]", "techniques.lora.target_modules", ("q_proj",)),
        (
            "adapter: lora\nlora_target_modules: 'model.language_model.layers.[\\d]+.mlp'",
            "techniques.lora.target_modules",
            "model.layers.[\\d]+.mlp",
        ),
        ("adapter: lora\npeft_use_dora: true", "techniques.lora.variant", "dora"),
        ("adapter: qlora\nload_in_4bit: true", "techniques.nf4.double_quantization", True),
        ("adapter: lora", "techniques.nf4", None),
        # bitsandbytes quantizes linear layers: experts only by a key of axolotl's.
        ("base_model: Qwen/Qwen3-30B-A3B\nadapter: qlora\nload_in_4bit: true", "techniques.nf4.experts", False),
        (
            "base_model: Qwen/Qwen3-30B-A3B\nadapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true",
            "techniques.nf4.experts",
            True,
        ),
        (
            "base_model: Qwen/Qwen3-30B-A3B\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj]\n"
            "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
            "techniques.lora.expert_rank",
            8,
        ),
        (
            "base_model: Qwen/Qwen3-30B-A3B\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj]\n"
            "lora_target_parameters: [mlp.experts.down_proj]",
            "techniques.lora.expert_rank",
            0,
        ),
        (
            "base_model: Qwen/Qwen3-30B-A3B\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj]\n"
            "lora_target_parameters: [7.mlp.experts.gate_up_proj, 7.mlp.experts.down_proj]",
            "techniques.lora.expert_rank",
            0,
        ),
        ("unfrozen_parameters: ['layers.3[01]+.mlp']", "techniques.freeze.train", ("layers.3[01]+.mlp",)),
        ("unfrozen_parameters: ['layers.3.block_sparse_moe.gate']", "techniques.freeze", None),
        ("unfrozen_parameters: ['^lm_head.weight$']", "techniques.freeze", None),
        ("unfrozen_parameters: ['layers.3']\nadapter: lora", "techniques.freeze", None),
        ("adapter: lora\nloraplus_lr_ratio: 16", "optimizer.groups", {"lora_B": {"lr_scale": 16}}),
        ("bf16: true", "techniques.mixed_precision.mode", "bf16_pure"),
        ("adapter: lora\nbf16: auto", "techniques.mixed_precision.mode", "bf16"),
        ("bf16: false", "techniques.mixed_precision", None),
        ("fp16: true", "techniques.mixed_precision.mode", "fp16_master"),
        ("gradient_checkpointing: true", "techniques.activation_checkpointing.mode", "full"),
        ("gradient_checkpointing: false", "techniques.activation_checkpointing", None),
        ("gradient_checkpointing: offload", "techniques.activation_offload.stay", 1),
        ("attn_implementation: eager", "techniques.efficient_attention", None),
        ("sdp_attention: true", "techniques.efficient_attention.kernel", "auto"),
        (
            "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]",
            "techniques.chunked_loss.rows",
            None,
        ),
        ("liger_rms_norm: true", "techniques.fused_operators.norm", True),
        ("liger_rms_norm: true", "techniques.fused_operators.gate", False),
        ("liger_fused_linear_cross_entropy: true", "techniques.chunked_loss.kernel", "auto"),
        ("lora_mlp_kernel: true", "techniques.fused_operators.adapters", True),
        ("neftune_noise_alpha: 5", "techniques.neftune.alpha", 5.0),
        ("torch_compile: true", "techniques.compile.mode", "default"),
        ("sample_packing: false", "data.packing", "whole"),
        ("val_set_size: 0.1", "data.validation", 0.1),
        ("val_set_size: 0.1\neval_steps: 10", "evaluate.every", 10),
        ("train_on_inputs: true", "data.train_on", "all"),
        ("chat_template: chatml", "data.template", "chatml"),
        ("save_steps: 10\nsave_total_limit: 3", "checkpoint.keep", 3),
        ("seed: 3", "seed", 3),
        ("dp_shard_size: 2\ndp_replicate_size: 2\nfsdp_version: 2", "techniques.fsdp.replicate", 2),
        (
            "dp_shard_size: 2\nfsdp_config: {reshard_after_forward: false}",
            "techniques.fsdp.reshard_after_forward",
            False,
        ),
        ("dp_shard_size: 2\nfsdp: [full_shard, auto_wrap]", "techniques.fsdp.reshard_after_forward", True),
        ("dp_shard_size: 2\nfsdp_version: 2\nfsdp_config: {offload_params: true}", "techniques.fsdp.offload", True),
        ("fsdp_version: 2", "techniques.fsdp", None),  # one device has nothing to shard
        ("dp_shard_size: 4\ndeepspeed: ds/zero1.json", "techniques.zero1", {}),
        ("dp_shard_size: 4\ndeepspeed: ds/zero3_bf16_cpuoffload_all.json", "techniques.fsdp.offload", True),
        ("tensor_parallel_size: 2", "parallel.devices", 2),
        ("tensor_parallel_size: 2", "techniques.tensor_parallel.loss_parallel", False),
        ("torch_compile: true\nliger_rms_norm: true", "techniques.fused_operators", None),
        ("context_parallel_size: 2", "techniques.context_parallel.degree", 2),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    text = SMALL if not lines.startswith("base_model") else SMALL.replace("base_model: tiny\n", "")
    assert look_up(read(text + lines + "\n"), key) == value


@pytest.mark.parametrize(
    ("rl", "loss", "size"), [("dpo", "dpo", 4), ("ipo", "ipo", 4), ("orpo", "orpo", 4), ("kto", "kto", 2)]
)
def test_preferences_are_two_answers_a_row_but_for_kto(rl: str, loss: str, size: int) -> None:
    config = read(f"{PAIRS}rl: {rl}\nrl_beta: 0.2\nmicro_batch_size: 2\n")
    assert look_up(config, "techniques.preference.loss") == loss
    assert look_up(config, "techniques.preference.beta") == 0.2
    assert look_up(config, "batch.size") == size


@pytest.mark.parametrize(
    ("dataset", "values"),
    [
        ("{path: a.jsonl, type: alpaca}", {"source": "a.jsonl", "layout": "alpaca"}),
        ("{path: me/chats, type: chat_template, field_messages: talk}", {"columns": {"messages": "talk"}}),
        (
            "{path: me/chats, type: chat_template, field_messages: talk, "
            "message_property_mappings: {role: from, content: value}}",
            {"layout": "sharegpt", "columns": {"conversations": "talk"}},
        ),
        ("{path: me/text, type: completion, field: body}", {"layout": "text", "text": "body"}),
        ("{path: me/set, type: alpaca, name: small, split: 'train[:5%]'}", {"subset": "small", "split": "train[:5%]"}),
    ],
)
def test_datasets(dataset: str, values: dict[str, object]) -> None:
    config = read(f"base_model: tiny\nmax_steps: 5\ndatasets: [{dataset}]\n")
    assert {key: look_up(config, f"data.{key}") for key in values} == values
    assert not config.reading.not_understood


def test_several_datasets_are_a_list_of_sources() -> None:
    config = read("base_model: tiny\nmax_steps: 5\ndatasets: [{path: a, type: alpaca}, {path: b, type: alpaca}]\n")
    assert look_up(config, "data.source") == (
        {"source": "a", "layout": "alpaca"},
        {"source": "b", "layout": "alpaca"},
    )


def test_pretraining_streams_packed_text() -> None:
    config = read("base_model: tiny\npretraining_dataset: [{path: me/text, type: pretrain}]\nmax_steps: 5\n")
    assert [look_up(config, f"data.{key}") for key in ("streaming", "packing", "layout")] == [True, "stream", "text"]
    with pytest.raises(RecipeError, match=r"^f.yaml:2: pretraining_dataset.0.path: .*add max_steps"):
        read("base_model: tiny\npretraining_dataset: [{path: me/text}]\n")


def test_padded_rows_are_said_to_be_planned_at_their_full_length() -> None:
    assert "at the full 512 tokens" in read(SMALL).reading.assumptions[0]
    packed = read(SMALL + "sample_packing: true\n").reading.assumptions
    assert not any("full 512 tokens" in assumption for assumption in packed)


@pytest.mark.parametrize(("steps", "noted"), [(1, False), (2, True)])
def test_accumulated_micro_batches_of_equal_weight_are_noted(steps: int, noted: bool) -> None:
    assumptions = read(SMALL + f"gradient_accumulation_steps: {steps}\n").reading.assumptions
    assert any("each micro-batch of a step the same" in assumption for assumption in assumptions) is noted


@pytest.mark.parametrize(
    ("lines", "noted"),
    [
        ("sample_packing: true", True),
        ("sample_packing: true\nattn_implementation: sdpa", False),
        ("sample_packing: true\nflash_attention: true", False),
        ("sample_packing: true\nflash_attention: false", True),
        ("sample_packing: false", False),
    ],
)
def test_rows_packed_without_a_backend_of_attention_are_noted(lines: str, noted: bool) -> None:
    assumptions = read(SMALL + lines + "\n").reading.assumptions
    assert any("see each other" in assumption for assumption in assumptions) is noted


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("load_in_4bit: true", "f.yaml:4: load_in_4bit: a base in 4 bits is frozen, and there is no adapter"),
        ("rl: dpo\nsample_packing: true", "f.yaml:5: sample_packing: true: axolotl does not pack preferences"),
        ("adapter: bone", "f.yaml:4: adapter: must be lora, qlora, llama-adapter, none or , got 'bone'"),
        ("reward_model: true", "f.yaml:4: reward_model: True: a reward model has a head of its own"),
    ],
)
def test_contradictions(lines: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(SMALL + lines + "\n")
    assert str(error.value).startswith(message)
