"""What the contract tests know of single techniques: further settings, and what cannot run on this kind of machine."""

from __future__ import annotations

from typing import Any

# Settings that take other paths than the defaults do.
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("activation_checkpointing", {"mode": "selective", "every": 2}),
    ("chunked_loss", {"rows": 7}),
    ("efficient_attention", {"kernel": "blocks"}),
    ("feed_forward", {"activation": "relu"}),
    ("gradient_accumulation", {"steps": 3}),
    ("mixed_precision", {"mode": "bf16_weights"}),
    ("mixed_precision", {"mode": "fp32"}),
    ("regularized_loss", {"label_smoothing": 0.1, "z": 0.0}),
    ("rope_scaling", {"kind": "dynamic", "original_length": 16}),
    ("rope_scaling", {"kind": "linear"}),
]

# The family of the tiny model, for techniques that do not serve both; llama where none of them says otherwise.
FAMILY: dict[str, str] = {"grouped_queries": "llama", "rms_norm": "gpt2", "rope_scaling": "llama", "tied_embeddings": "llama"}

# What cannot run on a CPU, with words of the reason that `check` gives. Any other skip fails.
CANNOT_RUN_HERE: dict[str, str] = {}

# Of techniques that exclude each other, those that are tried together with everything else.
FIRST = {"activation_checkpointing", "chunked_loss", "efficient_attention", "gradient_accumulation", "lora", "mixed_precision"}
