"""An example training loop that combines gradient accumulation, mixed precision, ZeRO and efficient attention by hand.

This is an example to read and to run, not a technique: recipes combine techniques by naming them. It is the only module
here that imports its siblings. `preheat.integrations.accelerate_trainer` makes a transformers Trainer faster, and
`preheat.watch` plans and measures a loop of your own.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from preheat.core.json_types import JsonObject

__all__ = ["integration_example"]


def integration_example(
    dim: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    batch_size: int = 4,
    accumulation_steps: int = 4,
    zero_stage: int = 1,
    use_efficient_attention: bool = True,
    use_mixed_precision: bool = True,
    precision: str = "bf16",
    *,
    length: int = 256,
    steps: int = 8,
    lr: float = 1e-3,
    seed: int = 0,
) -> JsonObject:
    """Trains a small decoder on the bytes of Python's standard library with the four techniques switched on or off.

    Uses a CUDA device if there is one. Under torchrun each process reads its own rows.

    Args:
        batch_size: rows of a micro-batch; accumulation_steps of them make one update on each process.
        zero_stage: 1, 2 or 3, as in ZeROAdamW; 0: torch's AdamW, on one process only.
        precision: bf16 or fp16 with `use_mixed_precision`; fp32 disables mixed precision.
        length: bytes of a row.
        steps: updates.

    Returns:
        {losses: mean of each update in nats per byte, tokens_per_second: median over the updates after the first,
        peak_memory_gib: of the device, or the growth of the process since the start, parameters, optimizer_bytes: of
        this process's states, processes, on: {technique: description}}.

    Raises:
        ValueError: an unknown precision or stage, or fp16 with ZeRO on several processes.

    Example:
        >>> result = integration_example(dim=32, num_layers=1, zero_stage=0, length=32, steps=2)
        >>> sorted(result["on"])
        ['efficient_attention', 'gradient_accumulation', 'mixed_precision', 'zero']
    """
    from statistics import median

    import torch

    from preheat.hardware.cuda_driver import has_cuda
    from preheat.hardware.probe import peak_resident_bytes, reset_peak, resident_bytes
    from preheat.ops.gradient_accumulation import accumulate
    from preheat.ops.toy_decoder import Decoder, PlainAttention
    from preheat.techniques.mixed_precision import autocast

    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise ValueError(f"precision: {precision!r} is not known; use {', '.join(dtypes)}")
    half = dtypes[precision] if use_mixed_precision else None
    rank, world = _find_rank_and_world()
    if half == torch.float16 and world > 1:
        raise ValueError("precision: fp16 skips steps by each process's own gradients; on several processes use bf16")
    device = torch.device("cuda" if has_cuda() else "cpu")
    data = _read_bytes(length)  # loaded before memory is measured
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    reset_peak()
    before = resident_bytes()
    torch.manual_seed(seed)

    # A function: each layer gets a module of its own.
    def build_attention() -> torch.nn.Module:
        if not use_efficient_attention:
            return PlainAttention(dim, num_heads)
        from preheat.techniques import efficient_attention

        module: type[nn.Module] = efficient_attention.EfficientAttention
        return module(dim, num_heads, dropout=0.0, causal=True, memory_efficient=True)

    model = Decoder(vocabulary=256, dim=dim, num_layers=num_layers, length=length, attention=build_attention).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = _build_optimizer(model, lr, zero_stage, world)
    # Without fp16 the scaler is disabled and passes everything through.
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
    rows = batch_size * accumulation_steps
    losses, seconds = [], []
    for step in range(steps):
        begun = time.perf_counter()
        # Processes read disjoint rows: the k-th step's block of rows is split by rank.
        first = (step * world + rank) * rows
        # Starts over at the end of the data.
        indices = [(first + n) % len(data) for n in range(rows)]
        batch = data[indices].to(device, torch.int64)

        def sum_loss(part: torch.Tensor) -> torch.Tensor:
            with autocast(device.type, half) if half else nullcontext():
                # A sum, not a mean: `accumulate` divides by the number of bytes of all micro-batches.
                return scaler.scale(model.loss(part[:, :-1], part[:, 1:]) * part[:, 1:].numel())

        total = accumulate(batch.split(batch_size), sum_loss, batch[:, 1:].numel())
        scaler.step(optimizer)
        # Before `update`, which may change the scale. float() waits for the device, so that the step's time is
        # complete.
        losses.append(float(total) / scaler.get_scale() / batch[:, 1:].numel())
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else max(peak_resident_bytes() - before, 0)
    state_tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    sharding = f"stage {zero_stage}" + ("" if world > 1 else ", one process: nothing is sharded")
    return {
        "losses": losses,
        # The first update includes one-time costs; with only one, it counts all the same.
        "tokens_per_second": world * rows * length / median(seconds[1:] or seconds),
        "peak_memory_gib": peak / 2**30,
        "parameters": parameters,
        "optimizer_bytes": optimizer.state_bytes() if zero_stage else sum(t.nbytes for t in state_tensors),
        "processes": world,
        "on": {
            "gradient_accumulation": f"{accumulation_steps} micro-batches of {batch_size} sequences",
            "mixed_precision": f"{precision} under autocast, weights in fp32" if half else "off: fp32",
            "zero": sharding if zero_stage else "off: AdamW",
            "efficient_attention": "fused" if use_efficient_attention else "off: all scores in memory",
        },
    }


def _find_rank_and_world() -> tuple[int, int]:
    """Returns this process's rank and the world size."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _build_optimizer(model: nn.Module, lr: float, stage: int, world: int) -> Any:
    import torch

    from preheat.techniques.zero_optimizer import ZeROAdamW

    if stage == 0:
        if world > 1:
            raise ValueError("zero_stage: 0 leaves the gradients of several processes apart; use 1, 2 or 3")
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return ZeROAdamW(model.parameters(), lr=lr, weight_decay=0.1, stage=stage, module=model if stage == 3 else None)


def _read_bytes(length: int, rows: int = 4096) -> torch.Tensor:
    """Returns rows of `length` + 1 bytes of the standard library's source, uint8."""
    import torch

    from preheat.data.sources import open_source
    from preheat.recipe import Data

    # One more byte per row than it is long: the last label.
    text, wanted = bytearray(), rows * (length + 1)
    for document in open_source(Data(source="stdlib")).read():
        text += document.text.encode("utf-8", "replace")
        if len(text) >= wanted:
            break
    # The source may be shorter than wanted.
    full_rows = len(text) // (length + 1)
    return torch.frombuffer(text, dtype=torch.uint8)[: full_rows * (length + 1)].view(full_rows, length + 1)
