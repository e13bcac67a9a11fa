"""`preheat plan --inference`: plans serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from preheat.cli.options.plan_options import ServingPlanOptions
    from preheat.core.json_types import JsonObject
    from preheat.hardware.catalogue import Accelerator
    from preheat.recipe import Recipe

__all__ = ["plan_serving"]


def plan_serving(options: ServingPlanOptions) -> None:
    """Prints weights, KV cache, sequences that fit and peak speed for each combination of weight and cache format."""
    from preheat.cli.options.subject import count_devices, find_subject
    from preheat.cli.options.unused import FOR_ANOTHER_DEVICE, SERVING, note_unread
    from preheat.cli.plan_output import text_part_note
    from preheat.cli.views.console import build_console, emit
    from preheat.cli.views.plan_view import build_serving

    subject = find_subject(
        options.what, options.set, length=options.length, devices=options.devices, foreign=options.foreign
    )
    recipe = subject.recipe
    devices, _ = count_devices(options, subject)
    if subject.from_user:
        modes = [SERVING] if options.gpu is None else [SERVING, FOR_ANOTHER_DEVICE]
        note_unread(modes, recipe, besides=("parallel.devices",) if devices > 1 else ())
    result = _collect_figures(recipe, options.gpu, devices, options.batch)
    if note := text_part_note(recipe):
        result["text_part"] = note
    if options.json:
        emit(result)
    else:
        build_console().print(build_serving(result))
        if note:
            build_console().print(note, style="dim", soft_wrap=True)
    if not result["fits"]:
        raise typer.Exit(3)


def _collect_figures(recipe: Recipe, gpu: Accelerator | None, devices: int, batch: int | None) -> JsonObject:
    """Returns what `--json` prints, without the note on a model's text part."""
    from preheat.hardware.rates import Rates
    from preheat.planning.analytic import count_model_parameters, estimate_serving
    from preheat.planning.kv_cache_size import CACHES, count_cache_bytes
    from preheat.planning.plan_request import choose_hardware

    model = count_model_parameters(recipe)
    device, rates, _ = choose_hardware(gpu, recipe, devices)
    # Measured rates of this machine, or the sustained ones of a device in the catalogue.
    if isinstance(rates, Rates):
        bandwidth, peaks = rates.bandwidth, rates.peak_matrix_rate  # measured on this machine
    else:
        assert rates.device.bandwidth is not None
        bandwidth, peaks = rates.device.bandwidth, rates.device.sustained()
    length, state = recipe.batch.seq_len, count_cache_bytes(model.config, 0)
    rows = [
        estimate
        for cache_format in CACHES
        for estimate in estimate_serving(
            model,
            memory=device.memory,
            length=length,
            devices=devices,
            bandwidth=bandwidth,
            # The format of serving is half precision, if the device's rate for it is known.
            matrix_rate=peaks.get("bf16") or max(peaks.values()),
            kept=cache_format,
            batch=batch,
        )
    ]
    return {
        "model": recipe.name,
        "device": {"kind": device.kind, "name": device.name, "memory_gib": device.memory / 2**30, "count": devices},
        "parameters": model.parameters,
        "active_parameters": model.active,
        "length": length,
        "cache_bytes_per_token": (count_cache_bytes(model.config, length) - state) / length,
        "state_bytes_per_row": state,
        "batch": batch,
        "fits": any(s.rows >= (batch or 1) for s in rows),
        "formats": [
            {
                "weights": s.format,
                "cache": s.cache_dtype,
                "weights_gib": s.weights / 2**30,
                "cache_gib_per_row": s.cache / 2**30,
                "rows": s.rows,
                "longest_context": s.longest,
                "tokens_per_second_at_most": s.tokens_per_second,
                "tokens_per_second_alone": s.alone,
                "seconds_to_first_token": s.first_token,
                "batch_cache_gib": s.batch.cache / 2**30 if s.batch else None,
                "batch_devices": s.batch.devices if s.batch else None,
                "batch_tokens_per_second_at_most": s.batch.tokens_per_second if s.batch else None,
            }
            for s in rows
        ],
    }
