"""What the contract tests know of single techniques: further settings, and what cannot run on this kind of machine."""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from preheat.technique import Tag

# Settings that take other paths than the defaults do.
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("activation_checkpointing", {"mode": "budget", "budget": 0.6}),
    ("activation_checkpointing", {"mode": "selective", "every": 2}),
    ("block_sparse_attention", {"local": 5, "global_tokens": 2}),
    ("apollo", {"rank": 0.0}),
    ("chunked_loss", {"rows": 7}),
    ("classification", {"classes": 5}),
    ("chunked_loss", {"rows": 7, "kernel": "torch"}),
    ("difficulty_curriculum", {"by": "length", "curve": "linear"}),
    ("distillation", {"divergence": "reverse", "temperature": 2.0}),
    ("distillation", {"hidden": 0.05, "matched": 2}),
    ("dynamic_batch", {"start": 1, "every": 2}),
    ("efficient_attention", {"kernel": "blocks"}),
    ("expert_balancing", {"method": "loss"}),
    ("feed_forward", {"activation": "relu"}),
    ("fused_operators", {"gate": False}),
    ("gradient_accumulation", {"steps": 3}),
    ("length_curriculum", {"schedule": "root", "keep": "rows"}),
    ("low_bit_adamw", {"bits": 4, "block_size": 64, "least": 0}),
    ("low_bit_adamw", {"least": 0}),
    ("mixed_precision", {"keep_fp32": "norm|^lm_head$"}),
    ("mixed_precision", {"mode": "bf16_master"}),
    ("lora", {"variant": "dora", "rank": 4}),
    ("lora", {"variant": "pissa", "rank": 4}),
    ("lora", {"variant": "rslora"}),
    ("lora", {"embedding_rank": 3}),
    ("length_curriculum", {"schedule": "linear"}),
    ("mixed_precision", {"mode": "bf16_weights"}),
    ("mixed_precision", {"mode": "bf16_weights", "keep_fp32": "norm|q_proj|embed_tokens"}),
    ("mixed_precision", {"mode": "fp16"}),
    ("mixed_precision", {"mode": "fp16_master"}),
    ("mixed_precision", {"mode": "fp32"}),
    ("nf4", {"double_quantization": False, "keep": ".*down_proj"}),
    ("peft_adapter", {"method": "loha", "settings": {"alpha": 64}}),
    ("preference", {"loss": "orpo"}),
    ("preference", {"loss": "simpo", "label_smoothing": 0.1}),
    ("preference", {"loss": "unpaired"}),
    ("regularized_loss", {"label_smoothing": 0.1, "z": 0.0}),
    ("rope_scaling", {"kind": "auto", "factor": "auto", "original_length": 16}),
    ("rope_scaling", {"kind": "base", "original_length": 16}),
    ("rope_scaling", {"kind": "dynamic", "original_length": 16}),
    ("rope_scaling", {"kind": "linear"}),
    ("shifted_groups", {"group": 10}),
    ("sliding_window", {"window": 5, "every": 2}),
    ("sparse_weights", {"prune": "2:4"}),
    ("upcycling", {"experts": 4, "chosen": 1}),
]

# What the first loss is near to, for those whose objective is not next-token prediction: technique, and its `loss` or `classes`.
BEGINS: dict[tuple[str, Any], float] = {
    ("classification", None): math.log(2),
    ("classification", 5): math.log(5),
    ("distillation", None): 0.5 * math.log(96),  # the teacher is drawn as the student is: near to even, so near to each other
    ("preference", None): math.log(2),
    ("preference", "orpo"): math.log(96) + 0.1 * math.log(2),
    ("preference", "simpo"): 0.9 * math.log(1 + math.exp(0.5)) + 0.1 * math.log(1 + math.exp(-0.5)),
    ("preference", "unpaired"): 0.5,
}

# The family of the tiny model, for techniques that do not serve both; llama where none of them says otherwise.
FAMILY: dict[str, str] = {
    "expert_balancing": "qwen3_moe",
    "grouped_queries": "llama",
    "peft_adapter": "llama",  # peft's OFT knows no Conv1D
    "rms_norm": "gpt2",
    "rope_scaling": "llama",
    "tied_embeddings": "llama",
    "upcycling": "llama",
}

# Pairs that no model of a family serves, with words of the refusal.
REFUSED_PAIRS: dict[tuple[str, str], str] = {
    ("expert_balancing", "feed_forward"): "its feed-forward block is not known to preheat",
    ("expert_balancing", "fused_operators"): "not qwen3_moe",
    ("fused_operators", "rms_norm"): "not gpt2",
    ("fused_operators", "upcycling"): "not mixtral",
}

# Pairs that failed once, and that nothing else marks as near to each other: always tried.
FAILED_ONCE = {("dynamic_batch", "upcycling")}

# What cannot run on a CPU, with words of the reason that `check` gives. Any other skip fails.
CANNOT_RUN_HERE: dict[str, str] = {
    "activation_offload": "needs a CUDA device",
    "context_parallel": "context 2 does not multiply to 1 device",
    "data_parallel": "there is one",
    "fp8": "a CPU has no fp8 products",
    "expert_parallel": "shares out experts, and llama has none",
    "fsdp": "there is one",
    "liger": "need a CUDA device",
    "optimizer_offload": "needs a CUDA device",
    "pipeline_parallel": "pipeline 2 does not multiply to 1 device",
    "tensor_parallel": "shares out matrices among devices, and there is one",
    "sparse_weights": "keeps the zeros of weights that are read",  # of a folder; FURTHER has it on a new model
    "vision_tower": "llama has no vision tower",
    "zero1": "there is one",
}

# What a technique asks of the rest of the recipe.
RECIPE: dict[str, list[str]] = {
    "distillation": ["techniques.distillation.teacher={teacher}", "data.tokenizer={teacher}"],
    "optimizer_in_backward": ["optimizer.clip=0"],
}


def asked(name: str) -> list[str]:
    """RECIPE of a technique, as --set takes it."""
    return [words.format(teacher=teacher()) if "{" in words else words for words in RECIPE.get(name, [])]


@functools.cache
def teacher(vocabulary: int = 96, **sizes: int) -> Path:
    """The folder of a Llama that is drawn at random, twice as wide as the tiny one and with its vocabulary, and of its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="preheat-teacher-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = LlamaConfig(
        **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96} | sizes,
        vocab_size=vocabulary, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(folder)
    pieces = {"</s>": 0} | {f"w{n}": n for n in range(1, vocabulary)}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return folder


# What a recorder cannot look into: under it, and in the plan, something else stands there, so that "what the dry run sees" compares
# only that with itself. Name -> what stands there, and the tests that look at the real thing instead.
NOT_OBSERVED: dict[str, str] = {
    "compile": "uncompiled layers, which keep more: test_less_is_kept_for_the_backward_pass_than_the_plan_says",
    "chunked_loss with kernel: torch": "our own loop with chunks of the same size: benchmarks/results/loss_kernels.md has both",
}

# Of techniques that exclude each other, those that are tried together with everything else.
FIRST = {"activation_checkpointing", "chunked_loss", "efficient_attention", "gradient_accumulation", "lora", "mixed_precision"}

# What brings a tag that some technique needs: a technique that is tried alone is tried with this.
BRINGS = {
    Tag.BF16_COMPUTE: "mixed_precision",
    Tag.FROZEN_BASE: "lora",
    Tag.REPLICATED_WEIGHTS: "data_parallel",
    Tag.REDUCED_GRADIENTS: "data_parallel",
}
