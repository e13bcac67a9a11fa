"""What the contract tests know of single techniques: further settings, and what cannot run on this kind of machine."""

from __future__ import annotations

from typing import Any

# Settings that take other paths than the defaults do.
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("activation_checkpointing", {"mode": "selective", "every": 2}),
    ("chunked_loss", {"rows": 7}),
    ("chunked_loss", {"rows": 7, "kernel": "torch"}),
    ("efficient_attention", {"kernel": "blocks"}),
    ("gradient_accumulation", {"steps": 3}),
    ("mixed_precision", {"mode": "bf16_weights"}),
    ("mixed_precision", {"mode": "fp32"}),
    ("regularized_loss", {"label_smoothing": 0.1, "z": 0.0}),
]

# What cannot run on a CPU, with words of the reason that `check` gives. Any other skip fails.
CANNOT_RUN_HERE: dict[str, str] = {"liger": "need a CUDA device"}

# What a recorder cannot look into: under it, and in the plan, something else stands there, so that "what the dry run sees" compares
# only that with itself. Name -> what stands there, and the tests that look at the real thing instead.
NOT_OBSERVED: dict[str, str] = {
    "compile": "uncompiled layers, which keep more: test_less_is_kept_for_the_backward_pass_than_the_plan_says",
    "chunked_loss with kernel: torch": "our own loop with chunks of the same size: benchmarks/results/loss_kernels.md has both",
}

# Of techniques that exclude each other, those that are tried together with everything else.
FIRST = {"activation_checkpointing", "chunked_loss", "efficient_attention", "gradient_accumulation", "lora", "mixed_precision"}
