"""Models and batches of `memory` and `ladder`: public shapes with random weights, real text; small ones to try the cases."""

from __future__ import annotations

import json
from typing import Any

from _gpu.case import Where

__all__ = ["SHAPES", "build_recipe"]

SHAPES: dict[str, dict[str, Any]] = {
    "124M": {"family": "gpt2", "num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50304},
    "0.5B": {"num_layers": 24, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_embeddings": True},
    "1B": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_embeddings": True},
    "8B": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "8B, 8 layers": {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}  # fmt: skip
"""The shapes of GPT-2, Qwen2.5-0.5B (as a Llama, without its biases), Llama-3.2-1B and Llama-3.1-8B."""


def build_recipe(
    where: Where, shape: str, rows: int, length: int, techniques: dict[str, Any], steps: int, **more: str
) -> Any:
    """A recipe on real text.

    Args:
        more: further sections of the recipe, as YAML in flow style.
    """
    from preheat import recipe as recipes

    model = dict(SHAPES[shape])
    if where.tiny:
        heads = {} if model.get("family") == "gpt2" else {"num_kv_heads": 2}
        model = {
            "family": model.get("family", "llama"),
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "vocab_size": 4096,
            **heads,
        }
        rows, length = min(rows, 4), min(length, 64)
    sections = {
        "model": json.dumps(model),
        "data": "{source: stdlib, vocab_size: 4096, limit: 400}",
        "batch": f"{{size: {rows}, seq_len: {length}}}",
        "stop": f"{{max_steps: {steps}}}",
        "hardware": f"{{device: {where.kind}}}",
        "techniques": json.dumps(techniques),
    } | more
    return recipes.parse("name: gpu-check\nseed: 1\n" + "\n".join(f"{key}: {value}" for key, value in sections.items()))
