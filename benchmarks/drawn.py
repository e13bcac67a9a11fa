"""Recipes drawn at random over model families, sizes, batches and techniques, small enough to be trained here in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from preheat.hardware.probe import fastest_half_dtype

__all__ = ["draw_settings", "format_settings"]

WORK = 1.2e11  # parameters times tokens of a step, at most
QUIET = ["evaluate={rows: 4}", "checkpoint={}", "sample={}"]


def draw_settings(count: int, seed: int) -> Iterator[list[str]]:
    """`KEY=VALUE` settings on top of the recipe `demo`, for so many recipes; the same for the same seed, but that those in bf16 are in fp32 on a CPU that is slow
    in bf16, where a step would take minutes."""
    draw, half = random.Random(seed), fastest_half_dtype() == torch.bfloat16
    while count:
        family = draw.choice(["llama", "llama", "qwen3", "gpt2"])
        width = draw.choice([128, 192, 256, 384, 512, 640])
        layers, heads = draw.randint(2, 10), width // 64
        vocabulary = draw.choice([4096, 8192, 16384, 32000])
        length, rows = draw.choice([64, 128, 256, 512, 1024]), draw.choice([2, 4, 8, 16, 32])
        parameters = 12 * layers * width * width + 2 * vocabulary * width
        techniques = _draw_techniques(draw, family, rows, half)
        if not 1e10 < parameters * rows * length < WORK:
            continue
        model = f"{{family: {family}, num_layers: {layers}, hidden_size: {width}, num_heads: {heads}, vocab_size: {vocabulary}}}"
        yield [
            f"model={model}",
            f"batch={{size: {rows}, seq_len: {length}}}",
            f"techniques={{{', '.join(techniques)}}}",
            *QUIET,
        ]
        count -= 1


def format_settings(values: list[str]) -> list[str]:
    """As arguments of the command line."""
    return [word for value in values for word in ("--set", value)]


def _draw_techniques(draw: random.Random, family: str, rows: int, half: bool) -> list[str]:
    made = []
    mode = draw.choice(["fp32", "bf16", "bf16", "bf16_weights", "bf16_master"])
    adapts = draw.random() < 0.2
    if adapts and mode == "bf16_master":  # refused over a frozen base
        mode = "bf16_weights"
    if mode != "fp32" and half:
        made.append(f"mixed_precision: {{mode: {mode}}}")
    for often, words in (
        (0.5, "efficient_attention: {}"),
        (0.5, f"chunked_loss: {{rows: {draw.choice([128, 512])}}}"),
        (0.4, f"activation_checkpointing: {{mode: {draw.choice(['full', 'selective'])}}}"),
        (0.3, "fused_operators: {}" if family != "gpt2" else ""),
        (float(adapts), "lora: {rank: 8}"),
        (0.3 if rows % 2 == 0 else 0, "gradient_accumulation: {steps: 2}"),
    ):
        if draw.random() < often and words:
            made.append(words)
    if mode in ("fp32", "bf16") and draw.random() < 0.3:
        made.append(draw.choice(["lion: {}", "adafactor: {}", "muon: {}", "low_bit_adamw: {}"]))
    return made
