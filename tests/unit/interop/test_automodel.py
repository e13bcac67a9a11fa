"""NeMo AutoModel's keys, one by one."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read

SMALL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: tiny}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 50}
"""
DATA = """\
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: me/chats
  seq_length: 64
"""
PEFT = "peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, dim: 4"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("", "model.path", "tiny"),
        ("", "model.weights", "pretrained"),
        ("", "batch.size", 8),
        ("", "batch.seq_len", 64),
        ("", "techniques.gradient_accumulation.steps", 4),
        ("", "data.source", "me/chats"),
        ("", "data.layout", "messages"),
        ("", "techniques.mixed_precision.mode", "bf16_pure"),
        ("", "techniques.activation_checkpointing", None),
        ("", "schedule.kind", "constant"),
        ("", "optimizer.lr", 1e-4),
        ("", "checkpoint.every", 100),
        ("lr_scheduler: {min_lr: 1e-5}", "schedule.kind", "cosine"),
        ("lr_scheduler: {min_lr: 1e-5}", "schedule.min_lr_ratio", 0.1),
        ("lr_scheduler: {lr_decay_style: cosine}", "schedule.min_lr_ratio", 0.01),
        ("lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 5}", "schedule.warmup_ratio", 0.1),
        ("lr_scheduler: {lr_decay_style: constant, lr_warmup_steps: 0}", "schedule.warmup_ratio", 0.0),
        ("optimizer: {_target_: torch.optim.AdamW, lr: 1e-3, weight_decay: 0.1}", "optimizer.weight_decay", 0.1),
        ("optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.95]}", "optimizer.betas", (0.9, 0.95)),
        ("optimizer: {_target_: dion.Muon}", "techniques.muon.momentum", 0.95),
        ("optimizer: {_target_: te.FusedAdam}", "techniques.mixed_precision.mode", "bf16"),  # with fp32 masters
        ("optimizer: {_target_: te.FusedAdam, master_weights: false}", "techniques.mixed_precision.mode", "bf16_pure"),
        ("clip_grad_norm: {max_norm: 0.5}", "optimizer.max_grad_norm", 0.5),
        (PEFT + "}", "techniques.lora.rank", 4),
        (PEFT + "}", "techniques.lora.alpha", 32.0),
        (PEFT + "}", "techniques.lora.target_modules", ".*_proj"),
        (
            PEFT + ", target_modules: ['*wq_a', '*.1.*.wkv']}",
            "techniques.lora.target_modules",
            r".*wq_a|.*\.1\..*\.wkv",
        ),
        (PEFT + ", target_modules: [q_proj]}", "techniques.lora.target_modules", ("q_proj",)),
        (PEFT + ", match_all_linear: true}", "techniques.lora.target_modules", "all-linear"),
        (PEFT + "}", "techniques.fused_operators.gate", True),
        (PEFT + ", use_memory_efficient_lora: false}", "techniques.fused_operators", None),
        (PEFT + ", dropout: 0.1}", "techniques.fused_operators", None),
        (PEFT + ", use_dora: true}", "techniques.lora.variant", "dora"),
        (PEFT + "}\nquantization: {load_in_4bit: true}", "techniques.nf4.double_quantization", True),
        ("loss_fn: {_target_: a.FusedLinearCrossEntropy}", "techniques.chunked_loss.kernel", "auto"),
        ("loss_fn: {_target_: a.MaskedCrossEntropy}", "techniques.chunked_loss", None),
        ("packed_sequence: {packed_sequence_size: 128}", "batch.seq_len", 128),
        ("packed_sequence: {packed_sequence_size: 0}", "batch.seq_len", 64),
        ("fp8: {enabled: true, recipe_name: tensorwise}", "techniques.fp8.recipe", "tensorwise"),
        ("fp8: {enabled: false}", "techniques.fp8", None),
        ("compile: {enabled: true}", "techniques.compile.mode", "default"),
        ("neftune: {noise_alpha: 5.0}", "techniques.neftune.alpha", 5.0),
        ("rng: {seed: 7}", "seed", 7),
        ("distributed: {dp_size: 4}", "techniques.fsdp.reduce", "each"),  # 8 sequences are one micro-batch a rank
        ("distributed: {dp_size: 2}", "techniques.fsdp.reduce", "last"),
        ("distributed: {dp_size: 2, defer_fsdp_grad_sync: false}", "techniques.fsdp.reduce", "each"),
        ("distributed: {dp_size: 2, strategy: ddp}", "techniques.data_parallel", {}),
        ("distributed: {dp_size: 2, reshard_after_forward: false}", "techniques.fsdp.reshard_after_forward", False),
        ("distributed: {dp_size: 4, dp_replicate_size: 2}", "techniques.fsdp.replicate", 2),
        ("distributed: {dp_size: 4, dp_replicate_size: 2}", "parallel.devices", 4),
        ("distributed: {dp_size: none, tp_size: 2}", "techniques.tensor_parallel.degree", 2),
        ("distributed: {tp_size: 2, sequence_parallel: true}", "techniques.tensor_parallel.sequence_parallel", True),
        ("distributed: {cp_size: 2}", "techniques.context_parallel.degree", 2),
        ("distributed: {ep_size: 4}", "techniques.expert_parallel.degree", 4),
        ("distributed: {ep_size: 4}", "techniques.fsdp.reshard_after_forward", False),
        (
            "distributed: {ep_size: 4, moe: {reshard_after_forward: true}}",
            "techniques.fsdp.reshard_after_forward",
            True,
        ),
        ("distributed: {pp_size: 2, ep_size: 2}", "parallel.devices", 4),
        (
            "distributed: {pp_size: 2, pipeline: {pp_schedule: interleaved1f1b}}",
            "techniques.pipeline_parallel.schedule",
            "interleaved",
        ),
        ("distributed: {pp_size: 2, pipeline: {pp_microbatch_size: 1}}", "techniques.gradient_accumulation.steps", 8),
        ("distributed: {activation_checkpointing: true}", "techniques.activation_checkpointing.mode", "full"),
        ("distributed: {activation_checkpointing: selective}", "techniques.activation_checkpointing.mode", "selective"),
    ],
)
def test_a_key_leads_to_the_recipes(lines: str, key: str, value: object) -> None:
    assert look_up(read(SMALL + DATA + lines + "\n"), key) == value


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ("torch_dtype: float32", "techniques.mixed_precision.mode", "bf16"),
        ("torch_dtype: torch.bfloat16", "techniques.mixed_precision.mode", "bf16_pure"),
        ("attn_implementation: eager", "techniques.efficient_attention", None),
        ("backend: {attn: te}", "techniques.efficient_attention.kernel", "auto"),
        ("backend: {rms_norm: te}", "techniques.fused_operators.norm", True),
        ("backend: {rms_norm: torch_fp32}", "techniques.fused_operators", None),
        ("backend: {te_fp8: {recipe: mxfp8}}", "techniques.fp8.recipe", "tensorwise"),
        ("use_liger_kernel: true", "techniques.fused_operators.gate", True),
    ],
)
def test_a_key_of_the_model_leads_to_the_recipes(keys: str, key: str, value: object) -> None:
    assert look_up(read(SMALL.replace("tiny}", f"tiny, {keys}}}") + DATA), key) == value


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("{_target_: NeMoAutoModelForCausalLM.from_config, config: me/m}", {"path": "me/m", "weights": "random"}),
        (
            "{_target_: NeMoAutoModelForCausalLM.from_config, load_base_model: true, config: {_target_: "
            "transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: me/m}}",
            {"path": "me/m", "weights": "pretrained"},
        ),
        (
            "{pretrained_model_name_or_path: me/m, config: {num_hidden_layers: 2}}",
            {"path": "me/m", "config": {"num_hidden_layers": 2}},
        ),
        (
            "{config: {_target_: transformers.Qwen3MoeConfig, num_hidden_layers: 2, hidden_size: 64, num_experts: 4, "
            "intermediate_size: 512, moe_intermediate_size: 32, rms_norm_eps: 1e-6}}",
            {
                "path": None,
                "family": "qwen3_moe",
                "num_layers": 2,
                "intermediate_size": 32,
                "config": {"rms_norm_eps": 1e-6},
            },
        ),
    ],
)
def test_models(model: str, values: dict[str, object]) -> None:
    config = read(f"model: {model}\nstep_scheduler: {{max_steps: 5}}\n")
    assert {key: look_up(config, f"model.{key}") for key in values} == values


@pytest.mark.parametrize(
    ("dataset", "values"),
    [
        (
            "{_target_: a.ColumnMappedTextInstructionDataset, path_or_dataset_id: r.jsonl, answer_only_loss_mask: false, "
            "column_mapping: {question: q, answer: a}}",
            {"layout": "prompt", "prompt": "q", "completion": "a", "train_on": "all"},
        ),
        (
            "{_target_: a.ColumnMappedTextInstructionDataset, path_or_dataset_id: r.jsonl, "
            "column_mapping: {context: c, question: q, answer: output}}",
            {"layout": "alpaca", "columns": {"input": "c", "instruction": "q"}},
        ),
        ("{_target_: a.NanogptDataset, file_pattern: 'd/*.bin', seq_len: 64}", {"layout": "text", "packing": "stream"}),
        ("{_target_: a.ChatDataset, path_or_dataset_id: me/c, split: 'train[:9]'}", {"split": "train[:9]"}),
    ],
)
def test_datasets(dataset: str, values: dict[str, object]) -> None:
    config = read(SMALL + f"dataset: {dataset}\n")
    assert {key: look_up(config, f"data.{key}") for key in values} == values
    assert not config.reading.not_understood


def test_lengths_that_the_rows_decide_are_assumed() -> None:
    config = read(SMALL + DATA.replace("  seq_length: 64\n", ""))
    assert look_up(config, "batch.seq_len") == 2048
    assert config.reading.assumptions[0].startswith("the longest row of a micro-batch decides its length")
    known = read(SMALL + "dataset: {_target_: a.HellaSwag, path_or_dataset: rowan/hellaswag}\n")
    assert look_up(known, "batch.seq_len") == 256


def test_random_tokens_fill_their_sequences_and_name_no_data() -> None:
    config = read(SMALL + "dataset: {_target_: a.MockIterableDataset, seq_len: 64}\n")
    assert look_up(config, "batch.seq_len") == 64
    assert config.reading.assumptions == ()


def test_the_global_batch_is_rounded_down_to_whole_micro_batches() -> None:
    config = read(SMALL.replace("size: 8", "size: 7") + DATA)
    assert look_up(config, "batch.size") == 6
    assert config.reading.assumptions[0].startswith("the global batch of 7 is no multiple of 2 sequences in each of 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("TrainFinetuneRecipeForNextTokenPrediction", "a.KD"), "f.yaml:1: recipe: a.KD: preheat plans"),
        (
            SMALL.replace("ForCausalLM", "ForImageTextToText"),
            "f.yaml:2: model._target_: nemo_automodel.NeMoAutoModelFor",
        ),
        (
            SMALL.replace("tiny", "'${MODEL}'"),
            "f.yaml:2: model.pretrained_model_name_or_path: '${MODEL}' is a template",
        ),
        (
            SMALL.replace("tiny", ""),
            "f.yaml:2: model._target_: names no model; add model.pretrained_model_name_or_path",
        ),
        (
            SMALL + "distributed: {dp_size: 8}\n",
            "f.yaml:3: step_scheduler.global_batch_size: a global batch of 8 is less",
        ),
        (SMALL + "distributed: {tp_size: two}\n", "f.yaml:4: distributed.tp_size: must be a number, got 'two'"),
        (
            SMALL + "distributed: {strategy: ddq}\n",
            "f.yaml:4: distributed.strategy: must be fsdp2, megatron_fsdp or ddp",
        ),
        (
            SMALL + "quantization: {load_in_4bit: true}\n",
            "f.yaml:4: quantization.load_in_4bit: a base in 4 bits is fro",
        ),
        (
            SMALL + "base_model: tiny\n",
            "f.yaml:4: base_model: is a key of axolotl, and step_scheduler (line 3) of NeMo",
        ),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
