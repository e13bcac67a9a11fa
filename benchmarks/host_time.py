"""Steps of small models on a CPU, measured and planned: which share of a step is the host's Python, and is it predicted.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py

Models of width 32 and 32 tokens a step, so that their tensors cost almost nothing. One thread. Prints the step planned with the measured host time
and, as before it was measured, with a constant multiple of a bare launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

RECIPE = (
    "model: {{num_layers: {layers}, hidden_size: 32, num_heads: 4, num_kv_heads: 2, intermediate_size: 64, "
    "vocab_size: 96}}\nbatch: {{size: 2, seq_len: 16}}\nstop: {{max_steps: 9}}\nhardware: {{threads: 1, device: cpu}}\n"
    "techniques: {{{techniques}}}"
)
STEPS = (
    (2, ""),
    (4, ""),
    (2, "muon: {}"),
    (2, "lora: {}"),
    (2, "mixed_precision: {}"),
    (2, "activation_checkpointing: {mode: full}"),
    (2, "fused_operators: {}"),
    (2, "fused_operators: {}, mixed_precision: {}"),
    (2, "adafactor: {}"),
)


def lower_quartile(step: Callable[[], object], count: int = 60) -> float:
    """Returns the lower quartile of the seconds of a call, which other processes disturb least."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[count // 4]


def main() -> None:
    import torch

    from preheat import recipe as recipes
    from preheat.core import Batch, MaskSpec
    from preheat.engine.builder import build
    from preheat.engine.device import resolve_device
    from preheat.engine.step import accumulate_gradients, update
    from preheat.hardware.benchmark_rates import calibrate
    from preheat.planning.dry_run import observe
    from preheat.planning.request import Request
    from preheat.planning.speed.step_time import collect_grids, estimate_step_seconds

    torch.set_num_threads(1)
    rates = None
    print(
        "| step | operators | of them custom | measured ms | planned ms | planned before |\n|---|---|---|---|---|---|"
    )
    for layers, techniques in STEPS:
        recipe = recipes.parse(RECIPE.format(layers=layers, techniques=techniques))
        device, _ = resolve_device(recipe)
        seen = observe(Request(recipe, device, vocabulary=96))
        if rates is None:
            (grid,) = collect_grids(seen, device, width=32, vocabulary=96)
            rates = calibrate(device, 1, grid=replace(grid, dtypes=("bf16", "fp32")))
            assert rates.host_operator is not None
            assert rates.host_custom is not None
        model_build = build(recipe, vocabulary=96, device=device, source_config=None)
        tokens, positions = torch.randint(96, (2, 16)), torch.arange(16).expand(2, 16).contiguous()
        batch = Batch(tokens, tokens.clone(), positions, MaskSpec(), 32, (0, 1))

        def run_step(model_build=model_build, batch=batch) -> None:  # type: ignore[no-untyped-def]
            loss = accumulate_gradients(model_build, [batch], 1e-6)
            torch.cat([loss.total.float().reshape(1), update(model_build, 1e-6)]).tolist()

        run_step()
        measured = lower_quartile(run_step)
        planned = estimate_step_seconds(seen, rates)
        before = estimate_step_seconds(seen, replace(rates, host_operator=None, host_custom=None))
        operators = sum(seen.kernels.values())
        custom = sum(n for kernel, n in seen.kernels.items() if kernel.operator.startswith("preheat::"))
        name = f"{layers} layers{', ' if techniques else ''}{techniques}"
        changes = (f"{seconds * 1e3:.2f} ({seconds / measured - 1:+.0%})" for seconds in (planned, before))
        print(f"| {name} | {operators} | {custom} | {measured * 1e3:.2f} | {' | '.join(changes)} |", flush=True)
    assert rates is not None
    each = [f"{seconds * 1e6:.3g}" for seconds in (rates.launch, rates.host_operator or 0, rates.host_custom or 0)]
    print(f"bare launch {each[0]} us; in a tiny step {each[1]} us an operator, {each[2]} us a custom one")


if __name__ == "__main__":
    main()
