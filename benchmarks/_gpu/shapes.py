"""Models and batches of `memory` and `ladder`: public shapes with random weights, real text; small ones to try the cases."""

from __future__ import annotations

import json
from typing import Any

from _gpu.case import Where

__all__ = ["SHAPES", "recipe_of"]

SHAPES: dict[str, dict[str, Any]] = {
    "124M": {"family": "gpt2", "layers": 12, "width": 768, "heads": 12, "vocabulary": 50304},
    "0.5B": {"family": "qwen2", "layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "feed_forward": 4864, "vocabulary": 151936, "tie_embeddings": True},
    "1B": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "feed_forward": 8192, "vocabulary": 128256, "tie_embeddings": True},
    "8B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14336, "vocabulary": 128256},
    "8B, 8 layers": {"layers": 8, "width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14336, "vocabulary": 128256},
}  # fmt: skip
"""Those of GPT-2, Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.1-8B."""


def recipe_of(
    where: Where, shape: str, rows: int, length: int, techniques: dict[str, Any], steps: int, **more: str
) -> Any:
    """A recipe on real text.

    Args:
        more: further sections of the recipe, as YAML in flow style.
    """
    from preheat import recipe as recipes

    model = dict(SHAPES[shape])
    if where.tiny:
        heads = {} if model.get("family") == "gpt2" else {"kv_heads": 2}
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
