"""Does a run need what its plan says: allocated, reserved and on the card, and seconds; and the constants that plans take for granted.

Allocated is compared with allocated, reserved with reserved; what the card holds beside that is the context, by the driver's own count.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

from _gpu.case import Case, Skip, Where, Wrong
from _gpu.shapes import build_recipe

GIB = 2**30
STEPS, UNTIMED = 7, 3
BOUNDS = {"allocated off": 0.05, "reserved off": 0.15, "memory off": 0.15, "speed off": 0.5}
"""The largest errors of a plan. Measured on an H200: 0.012, 0.095 and 0.104, and seconds from the data sheet 0.19."""
LEAN: dict[str, Any] = {"mixed_precision": {"mode": "bf16_weights"}, "efficient_attention": {}, "chunked_loss": {}}
AUTOCAST: dict[str, Any] = {"mixed_precision": {}, "efficient_attention": {}}
LORA: dict[str, Any] = {**LEAN, "lora": {}}
QLORA: dict[str, Any] = {**AUTOCAST, "chunked_loss": {}, "lora": {}, "nf4": {}}

RECIPES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("1B full, bf16 weights", "1B", 8, 2048, LEAN),
    ("1B full, bf16 weights, compiled", "1B", 8, 2048, {**LEAN, "compile": {}}),
    ("8B LoRA, 8k", "8B", 1, 8192, LORA),
    ("8B QLoRA, 2k", "8B", 2, 2048, QLORA),
    ("8B QLoRA, 8k, checkpointed", "8B", 1, 8192, {**QLORA, "activation_checkpointing": {}}),
    ("1B full, autocast", "1B", 4, 2048, AUTOCAST),
    ("1B full, autocast, compiled", "1B", 4, 2048, {**AUTOCAST, "compile": {}}),
    ("1B full, autocast, chunked loss", "1B", 4, 2048, {**AUTOCAST, "chunked_loss": {}}),
    ("1B full, selective checkpointing", "1B", 8, 2048, {**LEAN, "activation_checkpointing": {"mode": "selective"}}),
    ("1B full, checkpointed", "1B", 16, 2048, {**LEAN, "activation_checkpointing": {}}),
    ("1B full, fused operators", "1B", 8, 2048, {**LEAN, "fused_operators": {}}),
    ("1B full, bf16 master", "1B", 4, 2048, {**LEAN, "mixed_precision": {"mode": "bf16_master"}}),
    ("1B full, 8-bit AdamW", "1B", 8, 2048, {**AUTOCAST, "chunked_loss": {}, "low_bit_adamw": {}}),
    ("1B full, fp8", "1B", 8, 2048, {**AUTOCAST, "chunked_loss": {}, "fp8": {}}),
    ("1B full, liger", "1B", 8, 2048, {**LEAN, "liger": {}}),
    ("1B full, accumulated", "1B", 16, 2048, {**LEAN, "gradient_accumulation": {"steps": 4}}),
    ("1B full, activations on the host", "1B", 4, 2048, {**LEAN, "activation_offload": {}}),
    ("8 layers of 8B, optimizer on the host", "8B, 8 layers", 2, 4096, {**AUTOCAST, "chunked_loss": {}, "optimizer_offload": {}}),
    ("1B full, fp32", "1B", 2, 1024, {"efficient_attention": {}}),
    ("0.5B LoRA, compiled", "0.5B", 8, 1024, {**LORA, "compile": {}}),
    ("124M full, fp16", "124M", 16, 1024, {"mixed_precision": {"mode": "fp16"}, "efficient_attention": {}}),
]  # fmt: skip


def cases(where: Where) -> list[Case]:
    return [
        Case("constants", _read_constants, seconds=60, fresh=True),
        Case("rates", _measure_rates, seconds=200),
        *(
            Case(f"recipes/{name}", functools.partial(_measure_recipe, shape, rows, length, techniques), seconds=120)
            for name, shape, rows, length, techniques in RECIPES
        ),
    ]


def _time_call(work: Any, where: Where, turns: int = 20) -> float:
    """Median seconds of one call, warmed up."""
    import torch

    taken = []
    for turn in range(turns + 3):
        if where.kind == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if where.kind == "cuda":
            torch.cuda.synchronize()
        if turn >= 3:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _read_constants(where: Where) -> dict[str, Any]:
    """What a plan adds to tensors, and the rates that its roofline rests on."""
    import torch

    device = torch.device(where.kind)
    size = 256 if where.tiny else 8192
    figures: dict[str, Any] = {}
    if where.kind == "cuda":
        before = torch.cuda.mem_get_info()[0]  # makes the context
        tensor = torch.empty(1, device=device)
        whole = torch.cuda.mem_get_info()[1]
        figures["context GiB"] = (whole - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / GIB
        figures["free before GiB"] = before / GIB
        del tensor
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if where.kind == "cuda":
        before = torch.cuda.memory_allocated()
        c = a @ b
        figures["cuBLAS workspace MiB"] = (torch.cuda.memory_allocated() - before - c.nbytes) / 2**20
        del c
    figures["product TFLOP/s"] = 2 * size**3 / _time_call(lambda: a @ b, where) / 1e12
    small = torch.zeros(1, device=device)

    def repeat_call() -> None:
        for _ in range(1000):
            small.add_(1)

    figures["launch microseconds"] = _time_call(repeat_call, where, 5) * 1000
    large = torch.empty(size * size * 8, device=device, dtype=torch.uint8)
    other = torch.empty_like(large)
    figures["copy on the device GB/s"] = 2 * large.nbytes / _time_call(lambda: other.copy_(large), where) / 1e9
    if where.kind == "cuda":
        pinned = torch.empty(large.shape, dtype=torch.uint8, pin_memory=True)
        figures["to the host GB/s"] = large.nbytes / _time_call(lambda: pinned.copy_(large), where, 5) / 1e9
        figures["from the host GB/s"] = large.nbytes / _time_call(lambda: large.copy_(pinned), where, 5) / 1e9
    return figures


def _measure_rates(where: Where) -> dict[str, Any]:
    """Measures the device as a run's first plan does; the recipes below are planned by it."""
    from preheat.hardware.benchmark_rates import rates
    from preheat.hardware.probe import probe

    if where.tiny:
        import torch

        threads = torch.get_num_threads()
    else:
        from preheat.engine.device import resolve_device

        _, threads = resolve_device(build_recipe(where, "1B", 1, 1024, {}, 1))
    measured = rates(probe(where.kind), threads)
    return {"seconds": measured.seconds, "bandwidth GB/s": measured.bandwidth / 1e9} | {
        f"{dtype} TFLOP/s": rate / 1e12 for dtype, rate in measured.peak_matrix_rate.items()
    }


def _measure_recipe(shape: str, rows: int, length: int, techniques: dict[str, Any], where: Where) -> dict[str, Any]:
    import torch

    from preheat import recipe as recipes
    from preheat.bench.messages import TurnJob
    from preheat.bench.worker import take_steps
    from preheat.errors import RecipeError
    from preheat.planning.plan_request import plan_on_this_machine

    recipe = build_recipe(where, shape, rows, length, techniques, STEPS)
    try:
        plan = plan_on_this_machine(recipe)
    except RecipeError as error:
        raise Skip(str(error)) from None
    if not plan.fits:
        raise Skip(f"the plan says {plan.peak_gib:.1f} GiB, and {plan.available_gib:.1f} are there")
    taken = take_steps(TurnJob(recipes.dump(recipe), STEPS))
    timed = taken.seconds[UNTIMED:]
    seconds = statistics.median(timed)
    figures: dict[str, float | str] = {
        "seconds": seconds,
        "planned seconds": plan.seconds_per_step,
        "tokens/s": taken.tokens[-1] / seconds,
    }
    if taken.notices:
        figures["notices"] = "; ".join(taken.notices)
    figures["spread"] = (max(timed) - min(timed)) / seconds
    figures["speed off"] = plan.seconds_per_step / seconds - 1
    if where.kind == "cuda":
        free, whole = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        beside = (whole - free - torch.cuda.memory_reserved()) / GIB
        figures |= {
            "allocated": allocated,
            "planned allocated": plan.allocated_gib,
            "allocated off": plan.allocated_gib / allocated - 1,
        }
        figures |= {
            "reserved": reserved,
            "planned reserved": plan.reserved_gib,
            "reserved off": plan.reserved_gib / reserved - 1,
        }
        figures |= {
            "on the card": reserved + beside,
            "planned": plan.peak_gib,
            "memory off": plan.peak_gib / (reserved + beside) - 1,
        }
    else:
        figures |= {"resident": taken.memory["peak_gib"], "planned": plan.peak_gib}
    return check_bounds(figures) if where.kind == "cuda" else figures  # at tiny sizes the interpreter dominates


def check_bounds(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures; raises `Wrong` if the plan is further off than BOUNDS."""
    beyond = [f"{key} by {figures[key]:+.0%}" for key, bound in BOUNDS.items() if not abs(figures[key]) <= bound]
    if beyond:
        raise Wrong("; ".join(beyond), figures)
    return figures
