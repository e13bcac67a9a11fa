"""The dry run of several devices, on one process: what each holds is its share, and gathered weights are let go."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest

from preheat import recipe as recipes
from preheat.core import STEP, Device
from preheat.models.hf import configure
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import _choose_layer_counts, find_fullest_ranks, observe_few_layers
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.observation import Observation
from preheat.planning.observation_cache import observe_cached
from preheat.planning.request import Request

from ..conftest import DEVICE, tiny

WORLD = 8


def seen(techniques: str, world: int = WORLD) -> Observation:
    wide = "model={family: llama, num_layers: 6, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 256}"  # weights are most of it
    return observe(
        Request(
            recipes.override(tiny(rows=WORLD), wide, f"techniques={techniques}"), DEVICE, vocabulary=96, world=world
        )
    )


@pytest.fixture(scope="module")
def one() -> Observation:
    return seen("{}", world=1)


@pytest.mark.parametrize(
    ("techniques", "weights", "states"),
    [
        ("{fsdp: {}}", WORLD, WORLD),
        ("{fsdp: {replicate: 2}}", WORLD / 2, WORLD / 2),
        ("{data_parallel: {}}", 1, 1),
        ("{data_parallel: {}, zero1: {}}", 1, WORLD),
        ("{tensor_parallel: {degree: 2}, fsdp: {}}", WORLD, WORLD),
    ],
)
def test_each_device_holds_its_share_of_weights_and_states(
    one: Any, techniques: str, weights: float, states: float
) -> None:
    many = seen(techniques)
    for category, share in (("parameters", weights), ("optimizer", states)):
        assert many.categories["forward"][category] == pytest.approx(
            one.categories["forward"][category] / share, rel=0.05
        )
    assert many.tokens == one.tokens  # of the whole step


def test_the_reference_of_preference_tuning_is_sharded_too(one: Any) -> None:
    many = seen("{fsdp: {}, preference: {}}")
    # The trained model and its reference.
    assert many.categories["forward"]["parameters"] == pytest.approx(
        2 * one.categories["forward"]["parameters"] / WORLD, rel=0.05
    )


def test_the_experts_of_a_reference_are_split_too() -> None:
    sizes = []
    for technique in ("", ", preference: {}"):
        recipe = tiny(f"{{data_parallel: {{}}, expert_parallel: {{}}{technique}}}", family="qwen3_moe", rows=4)
        recipe = recipes.override(recipe, "model.num_experts=4", "model.intermediate_size=512")
        seen_here = observe(Request(recipe, DEVICE, vocabulary=96, world=4))
        sizes.append(seen_here.categories["forward"]["parameters"])
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.02)


def test_gathered_weights_are_let_go(one: Any) -> None:
    whole = one.categories["forward"]["parameters"]
    kept, let_go = (
        seen(f"{{fsdp: {{reshard_after_forward: {reshard}}}}}").peak["forward"] for reshard in ("false", "true")
    )
    assert kept - let_go > 0.5 * whole


@pytest.mark.parametrize(("reshard", "gathers"), [("true", 2 * 4), ("false", 1)])
@pytest.mark.parametrize(("reduce", "reductions"), [("each", 4), ("last", 1)])
def test_weights_that_are_kept_are_gathered_once_a_step(
    reshard: str, gathers: int, reduce: str, reductions: int
) -> None:
    """Of four micro-batches two are run, and the others are counted like the second."""
    sharded = f"fsdp: {{reshard_after_forward: {reshard}, reduce: {reduce}}}"
    recipe = recipes.override(
        tiny(f"{{{sharded}, gradient_accumulation: {{steps: 4}}}}", rows=16), "model.num_layers=6", "parallel.devices=4"
    )
    kernels = observe(Request(recipe, GPU, vocabulary=96), evaluated=False).kernels
    counts = Counter(kernel.operator.rpartition("::")[2] for kernel in kernels.elements())
    layers = 6  # the other groups, at the ends, are not freed after their forward pass
    assert layers * gathers <= counts["_allgather_base_"] <= (layers + 2) * gathers, counts
    assert layers * reductions <= counts["_reduce_scatter_base_"] <= (layers + 2) * reductions, counts


def test_gradients_that_are_kept_in_bf16_take_half() -> None:
    settings = "{mixed_precision: {mode: bf16}, gradient_accumulation: {steps: 4}, fsdp: {reduce: last, gather: bf16, reduce_dtype: %s}}"
    peaks, sent = [], []
    for dtype in ("fp32", "bf16"):
        wide = "model={family: llama, num_layers: 6, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 256}"
        recipe = recipes.override(tiny(settings % dtype, rows=16), wide, "parallel.devices=4")
        seen = observe(Request(recipe, GPU, vocabulary=96), evaluated=False)
        peaks.append(max(seen.peak[phase] for phase in STEP))
        reductions = [(k, n) for k, n in seen.kernels.items() if k.operator.endswith("_reduce_scatter_base_")]
        sent.append(sum(k.bytes_read * n for k, n in reductions))
        parameters = seen.parameters
    assert sent[0] == 2 * sent[1]
    assert peaks[0] - peaks[1] == pytest.approx(2 * parameters, rel=0.25)


def test_offloaded_weights_gradients_and_states_are_not_the_devices() -> None:
    gpu = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)
    wide = "model={family: llama, num_layers: 6, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 256}"
    plain, offloaded = (
        observe(
            Request(
                recipes.override(tiny(rows=WORLD), wide, f"techniques={{fsdp: {{offload: {offload}}}}}"),
                gpu,
                vocabulary=96,
                world=WORLD,
            )
        )
        for offload in ("false", "true")
    )
    for category in ("parameters", "gradients", "optimizer"):
        whole, left = (max(held[category] for held in seen.categories.values()) for seen in (plain, offloaded))
        assert left < 0.05 * whole  # buffers and counts of steps
    assert offloaded.categories["backward"]["activations"] == plain.categories["backward"]["activations"]
    assert offloaded.peak["load"] < 0.3 * plain.peak["load"]  # a weight at a time: no more than the largest


def test_half_precision_copies_do_not_outlive_their_layer(one: Any) -> None:
    plain, cast = (
        seen(f"{{fsdp: {{}}, activation_checkpointing: {{}}{more}}}")
        for more in ("", ", mixed_precision: {mode: bf16}")
    )
    assert cast.peak["forward"] < plain.peak["forward"] + 0.25 * one.categories["forward"]["parameters"]


@pytest.mark.slow
def test_many_layers_are_planned_by_few() -> None:
    techniques = "{fsdp: {gather: bf16}, activation_checkpointing: {}, mixed_precision: {mode: bf16}}"
    recipe = recipes.override(
        tiny(rows=WORLD, more=""), "model.num_layers=13", f"techniques={techniques}", "batch.seq_len=64"
    )
    recipe = recipes.override(recipe, f"parallel.devices={WORLD}")
    request = Request(recipe, DEVICE, vocabulary=96)
    few, whole = observe_few_layers(request), observe(request)
    assert not few.log
    assert whole.log
    for phase, peak in whole.peak.items():
        assert few.peak[phase] == pytest.approx(peak, rel=0.005), phase
    for category, size in whole.categories[whole.peak_phase].items():
        assert few.categories[few.peak_phase][category] == pytest.approx(size, rel=0.01, abs=4096), category
    assert (few.flops, few.model_flops, few.parameters) == (whole.flops, whole.model_flops, whole.parameters)
    assert few.kernels.total() == whole.kernels.total()
    moved = [sum((k.bytes_read + k.bytes_written) * n for k, n in seen.kernels.items()) for seen in (few, whole)]
    assert moved[0] == pytest.approx(moved[1], rel=0.005)


def test_what_an_allocator_keeps_is_carried_on() -> None:
    """From one number of layers to the next it jumps by more than a layer's tensors, which must not be multiplied by all of them."""
    techniques = "{fsdp: {gather: bf16}, activation_checkpointing: {}, mixed_precision: {mode: bf16}, efficient_attention: {}, gradient_accumulation: {steps: 4}}"
    recipe = recipes.override(
        tiny(rows=4 * WORLD, more=""),
        "model={num_layers: 26, hidden_size: 1024, num_heads: 8, intermediate_size: 4096, vocab_size: 8192, max_positions: 2048}",
        f"techniques={techniques}",
        "batch.seq_len=2048",
    )
    h100 = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)
    request = Request(recipe, h100, vocabulary=96, world=WORLD)
    few, whole = observe_few_layers(request), observe(request)
    replayed = hold(whole.log, whole.streams, h100)
    assert few.reserved is not None
    assert few.reserved == pytest.approx(replayed, rel=0.04)
    peak = max(whole.peak[phase] for phase in STEP)
    assert replayed > 1.1 * peak  # there is something to be carried on
    quick = observe_few_layers(request, quick=True)
    assert quick.reserved is not None
    assert peak < quick.reserved < 1.1 * replayed


def test_layers_that_are_told_apart_are_all_observed() -> None:
    for techniques in (
        "{fsdp: {}, lora: {rank: 2, target_modules: '.*layers.1[0-2].*q_proj'}}",
        "{pipeline_parallel: {micro_batches: 2}}",
        "{fsdp: {}, activation_checkpointing: {every: 3}}",
    ):
        recipe = recipes.override(tiny(), "model.num_layers=13", f"techniques={techniques}")
        assert _choose_layer_counts(recipe, configure(recipe, 96)) is None, techniques
    alike = recipes.override(tiny("{fsdp: {}}"), "model.num_layers=13")
    assert _choose_layer_counts(alike, configure(alike, 96)) == (4, 5)


GPU = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)


def test_layers_that_differ_by_a_pattern_are_carried_on_by_its_turns() -> None:
    """Gemma 3 has five layers with a window, then one without."""
    small = "{hidden_size: 64, intermediate_size: 128, vocab_size: 512, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32}"
    recipe = recipes.override(
        tiny(),
        f"model={{preset: gemma-3-4b, weights: random, config: {small}}}",
        "techniques={efficient_attention: {}, mixed_precision: {mode: bf16}}",
        "batch={size: 2, seq_len: 2048}",
    )
    request = Request(recipe, GPU)
    config = configure(recipe, None)
    assert (
        config.get_text_config().num_hidden_layers,
        _choose_layer_counts(recipe, config),
        _choose_layer_counts(recipe, config, 8, 4),
    ) == (
        34,
        (4, 10),
        (10, 16),
    )
    few, whole = observe_few_layers(request), observe(request)
    assert few.peak == pytest.approx(whole.peak, rel=1e-3)
    assert few.flops == whole.flops


def test_experts_after_dense_layers_are_carried_on_from_as_many_layers_as_elsewhere() -> None:
    """The gathered weights of two neighbours with experts are the peak, and four layers have one with experts only."""
    small = "{num_hidden_layers: 12, first_k_dense_replace: 3, n_routed_experts: 16, hidden_size: 256}"
    recipe = recipes.override(
        tiny(rows=WORLD),
        f"model={{preset: glm-4.5-air, weights: random, config: {small}}}",
        "techniques={efficient_attention: {}, mixed_precision: {mode: bf16_weights}, fsdp: {}}",
        f"parallel.devices={WORLD}",
    )
    request = Request(recipe, GPU)
    few, whole = observe_few_layers(request, quick=True), observe(request)
    assert _choose_layer_counts(recipe, configure(recipe, None)) == (7, 8)
    assert few.peak == pytest.approx(whole.peak, rel=1e-3)
    assert few.categories["backward"] == pytest.approx(whole.categories["backward"], rel=1e-2, abs=2**16)


@pytest.mark.parametrize("world", [WORLD, 96])
def test_shards_that_are_made_when_read_are_those_of_torch(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 96 devices some shards of 128 rows are empty."""
    recipe = recipes.override(tiny("{fsdp: {}}", rows=world), f"parallel.devices={world}")
    lazy = [observe(Request(recipe, GPU, vocabulary=96), rank=rank) for rank in (0, world - 1)]
    monkeypatch.setattr("preheat.planning.dry_run.shard_lazily", contextlib.nullcontext)
    for rank, mine in zip((0, world - 1), lazy, strict=True):
        reference = observe(Request(recipe, GPU, vocabulary=96), rank=rank)
        assert (mine.peak, mine.categories, mine.kernels) == (reference.peak, reference.categories, reference.kernels)


def test_of_a_pipeline_the_end_that_needs_more_is_planned() -> None:
    """The last stage makes the logits: with a large vocabulary it needs more than the first, which keeps more micro-batches."""
    techniques = "{pipeline_parallel: {degree: 2, micro_batches: 4}}"
    recipe = recipes.override(
        tiny(rows=16),
        "model={num_layers: 4, hidden_size: 32, num_heads: 4, vocab_size: 8192}",
        f"techniques={techniques}",
        "parallel.devices=2",
    )
    request = Request(recipe, DEVICE, vocabulary=96)
    first, last = (observe(request, rank=rank).peak for rank in (0, 1))
    assert max(last.values()) > max(first.values())
    assert observe_few_layers(request).peak == last


def test_a_pipeline_is_planned_by_its_fullest_device_and_as_slow_as_its_busiest() -> None:
    """The first stage has fewer layers than the next, as in Llama 3.1 405B, whose 126 layers are split by 16."""
    recipe = recipes.override(
        tiny("{pipeline_parallel: {degree: 8, micro_batches: 16}}", rows=16),
        "model={family: llama, num_layers: 14, hidden_size: 128, num_heads: 4, vocab_size: 96}",
        *("parallel.devices=8", "batch.seq_len=64"),
    )
    request = Request(recipe, DEVICE, vocabulary=96)
    devices = {rank: observe(request, rank=rank) for rank in (0, 1, 2, 7)}
    peaks = {rank: max(one.peak.values()) for rank, one in devices.items()}
    assert peaks[1] == max(peaks.values()) > 1.2 * peaks[0]
    assert observe_few_layers(request).peak == observe_cached(request, how="whole").peak == devices[1].peak
    flops = {rank: sum(one.flops.values()) for rank, one in devices.items()}
    for rank, one in devices.items():
        assert flops[rank] * (1 + one.idle) == pytest.approx(max(flops.values()) * (1 + 7 / 16), rel=0.02)


@pytest.mark.parametrize(
    ("layers", "degree", "settings", "vocabulary", "devices"),
    [
        (14, 8, "micro_batches: 16", 96, {1, 7}),  # [1, 2, 2, 2, 2, 2, 2, 1]
        (14, 8, "micro_batches: 16", 4096, {0, 1, 7}),  # the embedding of the first may need more than a layer
        (7, 3, "micro_batches: 6", 96, {1, 2}),  # [2, 3, 2]: as many activations, more weights
        (8, 4, "micro_batches: 8", 96, {0, 3}),
        (8, 4, "micro_batches: 8, schedule: zbv", 96, {0}),  # embedding and head
    ],
)
def test_the_devices_of_a_pipeline_are_dry_run_that_may_need_the_most(
    layers: int, degree: int, settings: str, vocabulary: int, devices: set[int]
) -> None:
    model = f"model={{family: llama, num_layers: {layers}, hidden_size: 128, num_heads: 4, vocab_size: {vocabulary}}}"
    spread = f"{{pipeline_parallel: {{degree: {degree}, {settings}}}}}"
    recipe = recipes.override(tiny(spread, rows=16), model, f"parallel.devices={degree}")
    assert find_fullest_ranks(Request(recipe, DEVICE, vocabulary=96)) == sorted(devices)


def test_waiting_for_a_collective_and_naming_a_range_of_the_profiler_are_no_kernels() -> None:
    """torch's fake `wait_tensor` makes a new tensor, whose real one is its argument."""
    kernels = seen("{tensor_parallel: {degree: 2}, fsdp: {}}").kernels
    names = {kernel.operator for kernel in kernels}
    assert "_c10d_functional::all_reduce" in names
    assert not {name for name in names if "wait_tensor" in name or name.startswith("profiler")}


def test_a_pipeline_sends_what_weights_that_are_cast_later_give() -> None:
    spread = "{pipeline_parallel: {degree: 2, micro_batches: 2}, optimizer_offload: {weights: bf16}}"
    recipe = recipes.override(tiny(spread, rows=4), "parallel.devices=2")
    found = observe(Request(recipe, Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False), vocabulary=96))
    assert {kernel.dtype for kernel in found.kernels if kernel.operator == "c10d::send"} == {"bf16"}


def test_what_building_takes_is_carried_on_where_optimizer_and_drawing_change_places() -> None:
    """With few layers the drawing of the embedding is the most, with many the optimizer's states."""
    wide = "model={family: llama, num_layers: 24, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 3400}"
    recipe = recipes.override(tiny(rows=WORLD), wide, "techniques={fsdp: {}}", f"parallel.devices={WORLD}")
    request = Request(recipe, Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False), vocabulary=3400)
    few, whole = observe_few_layers(request), observe(request)
    assert few.peak["load"] == pytest.approx(whole.peak["load"], rel=0.001)
    assert few.at["load", "values"]["optimizer"] == 0 < few.at["load", ""]["optimizer"]


def test_many_micro_batches_of_a_pipeline_take_no_more_than_those_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own stages keep what every micro-batch of a step receives, of activations and gradients, which a plan by few micro-batches did not see."""
    monkeypatch.setattr(
        "preheat.planning.dry_run._count_needed_micro_batches", lambda made, micros: micros
    )  # all are run
    wide = "model={family: llama, num_layers: 4, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 96}"

    def peaks(micro: int) -> dict[str, int]:
        spread = f"{{pipeline_parallel: {{degree: 4, micro_batches: {micro}}}}}"
        recipe = recipes.override(tiny(spread, rows=micro), wide, "parallel.devices=4", "batch.seq_len=64")
        return observe(Request(recipe, DEVICE, vocabulary=96), evaluated=False).peak

    few, many = peaks(8), peaks(32)
    travels = 4 * 64 * 128
    for phase in ("forward", "backward"):
        assert many[phase] - few[phase] < 3 * travels, (
            phase
        )  # tokens, labels and positions of 24 more; what travels would be 24 each


@pytest.mark.parametrize(
    ("schedule", "family"),
    [
        *((schedule, "llama") for schedule in ("1f1b", "interleaved", "zero_bubble", "zbv")),
        *((schedule, "qwen3_moe") for schedule in ("1f1b", "interleaved")),
    ],
)
def test_few_micro_batches_of_a_pipeline_take_what_all_take(
    schedule: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first round of them is on its way before there are gradients; the next is beside them. With experts, all pass through the stages once before."""
    sharded = (
        f"fsdp: {{reduce: last, reshard_after_forward: {'false' if schedule in ('zero_bubble', 'zbv') else 'true'}}}"
    )
    spread = f"{{pipeline_parallel: {{degree: 2, micro_batches: 8, schedule: {schedule}}}, {sharded}}}"
    wide = f"model={{family: {family}, num_layers: 4, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 96}}"
    recipe = recipes.override(tiny(spread, rows=16), wide, "parallel.devices=4", "batch.seq_len=64")

    def planned() -> tuple[dict[str, int], Counter[str], int]:
        one = observe(Request(recipe, DEVICE, vocabulary=96), evaluated=False)
        moved: Counter[str] = Counter()
        for kernel, count in one.kernels.items():
            moved[kernel.operator] += count * (kernel.bytes_read + kernel.bytes_written)
        return {phase: one.peak[phase] for phase in ("forward", "backward")}, moved, one.model_flops

    few_peaks, few_moved, few_flops = planned()
    monkeypatch.setattr("preheat.planning.dry_run._count_needed_micro_batches", lambda made, micros: micros)
    peaks, moved, flops = planned()
    assert peaks == pytest.approx(few_peaks, rel=0.01)
    assert few_flops == flops
    # Gradients are added in each but the first micro-batch, and weights gathered in some of them.
    assert {name for name in few_moved | moved if abs(few_moved[name] - moved[name]) > 64} == set()


@pytest.mark.parametrize(
    "spread",
    [
        "{gradient_accumulation: {steps: 8}, data_parallel: {}}",
        "{gradient_accumulation: {steps: 8}, fsdp: {reduce: last}}",
        "{gradient_accumulation: {steps: 8}, fsdp: {}}",
        "{pipeline_parallel: {degree: 2, micro_batches: 8}, data_parallel: {}}",
        "{pipeline_parallel: {degree: 2, micro_batches: 8}, fsdp: {reduce: last}}",
    ],
)
def test_gradients_are_summed_as_often_as_in_a_step_of_all_micro_batches(
    spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What few micro-batches stand for is repeated; the sum over devices, which comes once a step, is not (as many layers as a micro-batch's multiple)."""
    wide = "model={family: llama, num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, vocab_size: 96}"
    recipe = recipes.override(tiny(spread, rows=8 * WORLD), wide, "parallel.devices=4")
    gpu = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)

    def sent() -> dict[str, int]:
        found: Counter[str] = Counter()
        for kernel, count in observe(Request(recipe, gpu, vocabulary=96), evaluated=False).kernels.items():
            if "reduce" in kernel.operator or kernel.operator == "fsdp::chunk_cat":
                found[kernel.operator] += count * max(kernel.bytes_read, kernel.bytes_written)
        return dict(found)

    few = sent()
    monkeypatch.setattr("preheat.planning.dry_run._count_needed_micro_batches", lambda made, micros: micros)
    assert few == sent() != {}


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_fsdp_read_and_write_each_byte_once(replicas: int) -> None:
    """A rank copies its own shard into a gather, all shards out of it, and all gradients into a reduction; hybrid
    sharding sums the shards of the gradients of a group across the groups."""
    wide = "model={family: llama, num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 2, vocab_size: 96}"
    spread = f"{{fsdp: {{replicate: {replicas}}}, gradient_accumulation: {{steps: 2}}}}"
    recipe = recipes.override(tiny(spread, rows=2 * WORLD), wide, f"parallel.devices={WORLD}")
    gpu = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)
    observation = observe(Request(recipe, gpu, vocabulary=96), evaluated=False)
    moved: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for kernel, count in observation.kernels.items():
        name = kernel.operator.rpartition("::")[2]
        moved[f"{name} read"] += count * kernel.bytes_read
        moved[f"{name} written"] += count * kernel.bytes_written
        if kernel.group is not None:
            calls[f"{name} of {kernel.group}"] += count * max(kernel.bytes_read, kernel.bytes_written)
    shards, micros = WORLD // replicas, 2
    weights = 4 * observation.parameters
    # Layers are gathered for forward and for backward of each micro-batch; the ends once, as they stay gathered.
    gathered = moved["split_with_sizes_copy written"]
    assert micros * weights < gathered <= 2 * micros * weights
    assert moved["split_with_sizes_copy read"] == gathered
    assert moved["all_gather_copy_in read"] == moved["all_gather_copy_in written"] == gathered // shards
    assert moved["chunk_cat read"] == moved["chunk_cat written"] == micros * weights
    gathers = {name: size for name, size in calls.items() if name.startswith("_allgather_base_")}
    assert gathers == {f"_allgather_base_ of {(shards, 1)}": gathered}
    assert calls[f"_reduce_scatter_base_ of {(shards, 1)}"] == micros * weights
    # The replicas are `shards` ranks apart.
    across = {name: size for name, size in calls.items() if name.startswith("allreduce_ of") and f", {shards})" in name}
    assert across == ({f"allreduce_ of {(replicas, shards)}": micros * weights // shards} if replicas > 1 else {})


def test_the_stages_of_experts_compute_what_one_device_does_and_hold_their_own() -> None:
    """A pass before the step counts the tokens of experts: it costs FLOPs that are not the model's."""
    wide = "model={family: qwen3_moe, num_layers: 4, hidden_size: 128, num_heads: 4, num_kv_heads: 2, vocab_size: 96}"

    def plan(techniques: str, world: int, coefficient: float, rank: int = 0) -> Observation:
        more = f"model.config={{router_aux_loss_coef: {coefficient}}}"
        recipe = recipes.override(tiny(rows=8), wide, f"techniques={techniques}", f"parallel.devices={world}", more)
        return observe(Request(recipe, DEVICE, vocabulary=96), rank=rank, evaluated=False)

    piped = "{pipeline_parallel: {degree: 2, micro_batches: 4}}"
    for coefficient in (0.0, 0.01):
        one = plan("{gradient_accumulation: {steps: 4}}", 1, coefficient)
        stages = [plan(piped, 2, coefficient, rank) for rank in (0, 1)]
        assert sum(stage.model_flops for stage in stages) == one.model_flops
        assert sum(sum(stage.flops.values()) for stage in stages) == sum(one.flops.values())
        assert (sum(one.flops.values()) > one.model_flops) == (coefficient > 0)
        assert [stage.experts for stage in stages] == [one.experts / 2] * 2
    split = "{pipeline_parallel: {degree: 2, micro_batches: 2}, fsdp: {reduce: last}, expert_parallel: {degree: 2}}"
    parameters = plan(split, 4, 0.01).categories["forward"]["parameters"]
    assert parameters == pytest.approx(one.categories["forward"]["parameters"] / 4, rel=0.05)
