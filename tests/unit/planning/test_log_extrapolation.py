"""The log of all layers, made from those of few, against that of a dry run of all layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preheat.core import STEP, Phase
from preheat.planning import observation_cache
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import extrapolate_all_layers, find_fullest_ranks, set_layers
from preheat.planning.log_extrapolation import extrapolate_log
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.observation import Observation
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import override

from ...conftest import tiny

GPU = Roofline.of("H100").as_device
LAYERS = 13


def request_of(techniques: str, world: int = 1, family: str = "llama") -> Request:
    # Sizes that weights and activations do not have in common by chance.
    sizes = (f"model.num_layers={LAYERS}", "model.hidden_size=40", "model.intermediate_size=112", "batch.seq_len=36")
    recipe = override(tiny(techniques, family=family, rows=8), *sizes, f"parallel.devices={world}")
    return Request(recipe, GPU, vocabulary=96)


def events(seen: Observation) -> list[tuple[Phase, int, str, int]]:
    """Returns the events of a log, with blocks numbered by allocation; frees between two allocations have no order."""
    ordered: list[tuple[Phase, int, str, int]] = []
    freed: list[tuple[Phase, int, str, int]] = []
    blocks: dict[int, int] = {}
    entries = [[entry for entry in seen.log if entry[1] and entry[2] in phases] for phases in ((Phase.LOAD,), STEP)]
    for block, size, phase in (*entries[0], *entries[1]):
        if size > 0:
            ordered += sorted(freed)
            freed = []
            blocks[block] = len(ordered)
            ordered.append((phase, size, seen.streams.get(block, ""), blocks[block]))
        elif block in blocks:
            freed.append((phase, size, seen.streams.get(block, ""), blocks.pop(block)))
    return [*ordered, *sorted(freed)]


MIXED = "efficient_attention: {}, mixed_precision: {mode: bf16}"


@pytest.mark.parametrize(
    ("techniques", "world"),
    [
        ("{}", 1),
        (f"{{{MIXED}, activation_checkpointing: {{mode: selective}}, gradient_accumulation: {{steps: 4}}}}", 1),
        (f"{{{MIXED}, activation_checkpointing: {{}}, fused_operators: {{}}, chunked_loss: {{rows: 16}}}}", 1),
        ("{activation_checkpointing: {every: 2}}", 1),
        (f"{{{MIXED}, lora: {{rank: 4}}, nf4: {{}}, gradient_accumulation: {{steps: 2}}}}", 1),
        (f"{{{MIXED}, fsdp: {{gather: bf16}}, activation_checkpointing: {{}}}}", 4),
        (f"{{{MIXED}, fsdp: {{gather: bf16}}, gradient_accumulation: {{steps: 2}}}}", 4),
    ],
)
def test_log_of_all_layers_follows_from_those_of_few(techniques: str, world: int) -> None:
    request = request_of(techniques, world)
    extrapolated, whole = extrapolate_all_layers(request), observe(request)
    assert extrapolated is not None
    assert events(extrapolated) == events(whole)
    assert hold(extrapolated.log, extrapolated.streams, GPU) == hold(whole.log, whole.streams, GPU)


@pytest.mark.parametrize(
    ("techniques", "world", "family"),
    [
        ("{}", 1, "qwen3_moe"),  # the load-balancing loss takes all layers at once
        ("{data_parallel: {}, zero1: {}}", 4, "llama"),  # each rank updates another part of all layers
        ("{pipeline_parallel: {degree: 2}, gradient_accumulation: {steps: 4}}", 2, "llama"),
    ],
)
def test_all_layers_are_dry_run_if_logs_do_not_repeat(techniques: str, world: int, family: str) -> None:
    request = request_of(techniques, world, family)
    assert extrapolate_all_layers(request) is None
    rank = find_fullest_ranks(request)[0]
    seen = observation_cache.observe_cached(request, how="whole", rank=rank, logged=True)
    assert events(seen) == events(observe(request, rank=rank))


def test_logs_of_other_events_have_no_extrapolation() -> None:
    few, more = (observe(set_layers(request_of("{}"), layers), by_layer=True) for layers in (4, 5))
    assert extrapolate_log(few, more, 1, 512) is not None
    middle = len(more.log) // 2
    log = [*more.log[:middle], (-1, 512, Phase.BACKWARD), *more.log[middle:]]
    assert extrapolate_log(few, replace(more, log=log, unrounded={**more.unrounded, -1: 1}), 1, 512) is None
