"""What the contract tests read of all techniques (each says it in its own file, as `trials`), and of pairs of them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from preheat.core import Tag, registry

TRIALS = {name: cls.trials for name, cls in registry().items()}

FURTHER: list[tuple[str, dict[str, Any]]] = [
    (n, dict(settings)) for n, trials in TRIALS.items() for settings in trials.settings
]
"""Settings that take other paths than the defaults do."""
FAMILY = {name: trials.family for name, trials in TRIALS.items() if trials.family}
"""The family of the small model, for techniques that do not serve all; llama if none of them says otherwise."""
CANNOT_RUN_HERE = {name: trials.refused_on_cpu for name, trials in TRIALS.items() if trials.refused_on_cpu}
"""What cannot run on a CPU, with the reason that `check` gives. Any other skip fails."""
BEGINS = {(name, key): loss for name, trials in TRIALS.items() for key, loss in trials.first_loss.items()}
"""What the first loss is near to, for other objectives: (technique, its `loss` or `classes`) -> nats."""
BRINGS = {tag: names[0] for tag in Tag if (names := [name for name, cls in registry().items() if tag in cls.provides])}
"""What provides a tag that some technique needs: a technique that is tried alone is tried with this."""

# Pairs that no model of a family serves, with words of the refusal.
REFUSED_PAIRS: dict[tuple[str, str], str] = {
    ("expert_balancing", "feed_forward"): "its feed-forward block is not known to preheat",
    ("expert_balancing", "fused_operators"): "not qwen3_moe",
    ("fused_operators", "rms_norm"): "not gpt2",
    ("fused_operators", "upcycling"): "not mixtral",
}

# Pairs that failed once, and that nothing else marks as near to each other: always tried.
FAILED_ONCE = {("dynamic_batch", "upcycling")}

# Of techniques that exclude each other, those that are tried together with everything else.
FIRST = {
    "activation_checkpointing",
    "chunked_loss",
    "efficient_attention",
    "gradient_accumulation",
    "lora",
    "mixed_precision",
}


def asked(name: str) -> list[str]:
    """What a technique needs of the rest of the recipe, as --set takes it."""
    return [item.format(teacher=teacher()) if "{" in item else item for item in TRIALS[name].recipe]


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
