"""unsloth's keys, one by one, in scripts, notebooks and the YAML of its command."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read, read_notebook, read_script

SCRIPT = """\
max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="me/tiny", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
args = SFTConfig(max_steps=5)
trainer = SFTTrainer(model=model, args=args, train_dataset=load_dataset("me/rows", split="train"))
"""
FILE = """\
model: me/tiny
data: {dataset: me/rows}
training: {max_steps: 5, load_in_4bit: false}
lora: {lora_r: 4}
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "me/tiny"),
        ("data.source", "me/rows"),
        ("data.train_on", "all"),
        ("batch.seq_len", 1024),
        ("batch.size", 8),  # 4 sequences, 2 micro-batches
        ("optimizer.lr", 5e-5),
        ("optimizer.weight_decay", 0.001),
        ("schedule.kind", "wsd"),
        ("schedule.warmup_ratio", 0.1),
        ("seed", 3407),
        ("stop.max_steps", 5),
        ("techniques.lora.rank", 4),
        ("techniques.lora.alpha", 8.0),
        ("techniques.lora.dropout", 0.0),
        ("techniques.lora.target_modules", ("q_proj", "v_proj")),
        ("techniques.nf4.double_quantization", True),
        ("techniques.mixed_precision.mode", "bf16"),
        ("techniques.activation_checkpointing.mode", "full"),
        ("techniques.activation_offload.stay", 1),
        ("techniques.chunked_loss.kernel", "auto"),
        ("techniques.fused_operators.norm", True),
        ("techniques.fused_operators.gate", True),
        ("techniques.fused_operators.adapters", True),
        ("techniques.low_bit_adamw.bits", 8),
    ],
)
def test_a_script_with_unsloths_defaults(key: str, value: object) -> None:
    config = read_script(SCRIPT)
    assert (config.reading.trainer, config.reading.not_understood) == ("unsloth", ())
    assert look_up(config, key) == value


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("load_in_4bit=True", "load_in_4bit=False", "techniques.nf4", None),
        ("load_in_4bit=True", "load_in_16bit=True", "techniques.nf4", None),
        ("load_in_4bit=True", "full_finetuning=True", "techniques.lora", None),
        ("load_in_4bit=True", "full_finetuning=True", "techniques.nf4", None),
        ("load_in_4bit=True", "full_finetuning=True", "techniques.mixed_precision.mode", "bf16_pure"),
        (
            "load_in_4bit=True",
            "full_finetuning=True, float32_mixed_precision=True",
            "techniques.mixed_precision.mode",
            "bf16",
        ),
        (
            "dtype=None, load_in_4bit=True",
            "dtype=torch.float16, load_in_4bit=True",
            "techniques.mixed_precision.mode",
            "fp16",
        ),
        ("load_in_4bit=True", "load_in_4bit=False, dtype=torch.float32", "techniques.mixed_precision.frozen", "fp32"),
        ("r=4", "r=4, use_rslora=True", "techniques.lora.variant", "rslora"),
        ("r=4", "r=4, use_dora=True", "techniques.fused_operators.adapters", False),
        ("r=4", "r=4, bias='all'", "techniques.fused_operators.gate", False),
        ("r=4", "r=4, lora_dropout=0.1", "techniques.lora.dropout", 0.1),
        (", r=4, lora_alpha=8", "", "techniques.lora.rank", 16),
        (", r=4, lora_alpha=8", "", "techniques.lora.alpha", 16.0),
        (', target_modules=["q_proj", "v_proj"]', "", "techniques.lora.target_modules", "all-linear"),
        (
            '["q_proj", "v_proj"]',
            '["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]',
            "techniques.lora.target_modules",
            "all-linear",
        ),
        ("r=4", "r=4, use_gradient_checkpointing=True", "techniques.activation_offload", None),
        ("r=4", "r=4, use_gradient_checkpointing=False", "techniques.activation_checkpointing", None),
        ("SFTConfig(", "SFTConfig(gradient_checkpointing=False, ", "techniques.activation_offload.stay", 1),
        ("max_seq_length = 1024", "max_seq_length = 511", "techniques.activation_offload", None),
        ("SFTConfig(", "SFTConfig(max_seq_length=512, ", "batch.seq_len", 512),
        ("SFTConfig(", "SFTConfig(max_length=4096, ", "batch.seq_len", 1024),
        ("SFTConfig(", "SFTConfig(bf16=is_bfloat16_supported(), ", "techniques.mixed_precision.mode", "bf16"),
        ("SFTConfig(", "SFTConfig(fp16=not is_bfloat16_supported(), ", "techniques.mixed_precision.mode", "bf16"),
        ("SFTConfig(", "SFTConfig(bf16=False, fp16=False, ", "techniques.mixed_precision.mode", "bf16"),
        ("SFTConfig(", "SFTConfig(optim='adamw_torch', ", "techniques.low_bit_adamw", None),
        ("SFTConfig(", "TrainingArguments(", "batch.size", 8),
        ("SFTConfig(", "TrainingArguments(", "techniques.low_bit_adamw", None),
        ("SFTConfig(", "UnslothTrainingArguments(", "optimizer.lr", 2e-5),
        ("args=args", "args=args, max_seq_length=256, packing=True", "batch.seq_len", 256),
        ("FastLanguageModel", "FastModel", "techniques.lora.rank", 4),
        ("trainer = ", "DPOConfig(beta=0.2)\ntrainer = ", "techniques.preference.beta", 0.2),
        ("trainer = ", "DPOConfig(beta=0.2)\ntrainer = ", "data.layout", "preference"),
        ("trainer = ", "get_chat_template(tokenizer, 'qwen-2.5')\ntrainer = ", "data.template", "qwen"),
        ("trainer = ", "train_on_responses_only(trainer)\ntrainer = ", "data.train_on", "assistant"),
        ("me/tiny", "me/tiny-bnb-4bit", "model.path", "me/tiny-bnb-4bit"),
        (
            'me/tiny", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True',
            'me/tiny-unsloth-bnb-4bit", load_in_4bit=False',
            "model.path",
            "me/tiny",
        ),
    ],
)
def test_a_scripts_calls_lead_to_the_recipes_keys(old: str, new: str, key: str, value: object) -> None:
    assert old in SCRIPT
    assert look_up(read_script(SCRIPT.replace(old, new)), key) == value


def test_a_notebook_is_read_like_the_script_and_loads_for_inference_are_left_out() -> None:
    config = read_notebook(
        "%%capture\n!pip install unsloth",
        SCRIPT,
        "trainer.train()",
        "tokenizer = get_chat_template(tokenizer, 'chatml')",
        "tokenizer = get_chat_template(tokenizer, 'chatml')",
        "if False:\n    model, t = FastLanguageModel.from_pretrained('lora_model', load_in_4bit=False)",
        "model, t = FastLanguageModel.from_pretrained('lora_model', load_in_4bit=False)",
    )
    assert config.recipe.techniques == read_script(SCRIPT).recipe.techniques
    repeated = {key.key: key.why for key in config.reading.without_effect}
    assert repeated["get_chat_template#2.chat_template"] == "as in the first call"
    assert [(key.key, key.file) for key in config.reading.not_understood] == [
        ("FastLanguageModel.from_pretrained#2.model_name", "f.ipynb:cell 8"),
        ("FastLanguageModel.from_pretrained#2.load_in_4bit", "f.ipynb:cell 8"),
    ]


def test_batches_without_padding_are_said_to_be_so() -> None:
    def says(script: str) -> bool:
        return any("no padding" in text for text in read_script(script).reading.assumptions)

    assert says(SCRIPT)
    assert not says(SCRIPT.replace("SFTConfig(", "SFTConfig(padding_free=False, "))
    assert not says(SCRIPT.replace("SFTConfig(", "SFTConfig(packing=True, "))


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("", "", "batch.size", 8),  # 2 sequences, 4 micro-batches
        ("", "", "optimizer.lr", 2e-4),
        ("", "", "optimizer.weight_decay", 0.01),
        ("", "", "schedule.warmup_ratio", 0.99),  # 5 of 5 steps
        ("", "", "techniques.lora.alpha", 16.0),
        ("lora_r: 4", "use_rslora: false", "techniques.lora.rank", 64),
        ("lora_r: 4", "target_modules: 'q_proj,k_proj'", "techniques.lora.target_modules", ("q_proj", "k_proj")),
        ("load_in_4bit: false", "learning_rate: 1e-5", "techniques.nf4.double_quantization", True),
        ("load_in_4bit: false", "training_type: full", "techniques.lora", None),
        ("load_in_4bit: false", "training_type: full", "techniques.nf4", None),
        ("load_in_4bit: false", "batch_size: 3", "batch.size", 12),
        ("load_in_4bit: false", "gradient_checkpointing: none", "techniques.activation_checkpointing", None),
        ("load_in_4bit: false", "gradient_checkpointing: true", "techniques.activation_offload", None),
        ("load_in_4bit: false", "train_on_completions: true", "data.train_on", "assistant"),
        ("dataset: me/rows", "local_dataset: [a.jsonl], format_type: sharegpt", "data.layout", "sharegpt"),
        ("dataset: me/rows", "format_type: alpaca, local_dataset: [a.jsonl]", "data.source", "a.jsonl"),
    ],
)
def test_the_file_of_the_command(old: str, new: str, key: str, value: object) -> None:
    config = read(FILE.replace(old, new))
    assert (config.reading.trainer, config.reading.not_understood) == ("unsloth", ())
    assert look_up(config, key) == value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "model = FastLanguageModel.get_peft_model",
            "other",
            "f.py:3: FastLanguageModel.from_pretrained.load_in_4bit: a base",
        ),
        (
            "max_seq_length = 1024",
            "max_seq_length = 'long'",
            "f.py:3: FastLanguageModel.from_pretrained.max_seq_length: must",
        ),
        ("r=4", "r=0", "f.py:4: FastLanguageModel.get_peft_model.r: must be a whole number above 0, got 0"),
        (
            "FastLanguageModel",
            "FastVisionModel",
            "f.py:3: FastVisionModel.from_pretrained.model_name: 'me/tiny': images and",
        ),
        (
            "FastLanguageModel",
            "FastSentenceTransformer",
            "f.py:3: FastSentenceTransformer.from_pretrained.model_name: 'me/",
        ),
        (
            "r=4",
            "r=4) if model else FastModel.from_pretrained(num_labels=2",
            "f.py:4: FastModel.from_pretrained.num_labels: 2",
        ),
        ("SFTConfig", "GRPOConfig", "f.py:5: GRPOConfig.max_steps: training of or on rewards is not planned"),
    ],
)
def test_refusals(old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_script(SCRIPT.replace(old, new))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
