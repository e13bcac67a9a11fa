"""The search: what it finds is what planning each candidate finds, what was fixed stays, and nothing is traded without leave."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.cli.options.subject import find_subject
from preheat.core import Axis, Problem, ProblemCode, Tag, registry
from preheat.core.plan import Verdict
from preheat.errors import RecipeError
from preheat.hardware.catalogue import Accelerator, find_accelerator, parse_accelerator
from preheat.hardware.gpu_memory import CONTEXT
from preheat.hardware.interrupts import Interrupted, raise_on_signal
from preheat.models.pipeline_split import balance_stages
from preheat.planning import observation_cache as recalling
from preheat.planning.dry_run import observe
from preheat.planning.explain import build_figures, explain
from preheat.planning.layer_extrapolation import choose_sampled_layers
from preheat.planning.plan import describe, plan
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space, find_candidate_problems, worst_numerics
from preheat.planning.search.cost_model import (
    Guess,
    LayerCost,
    _estimate_busiest_stage,
    estimate_gathered_share,
    observe_layer,
)
from preheat.planning.search.nearest_miss import find_more_devices, find_shorter_rows
from preheat.planning.search.result import EvaluatedPlan, is_tradeoff
from preheat.planning.search.search import Candidate, _Correction, _Search, search
from preheat.planning.search.technique_combinations import Combination, TechniqueCombinations
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import Recipe, override, parse
from tests.unit.plans import plan_of, values_of

from ...conftest import DEVICE


def small(more: str = "", rows: int = 8) -> Recipe:
    """With some techniques stated, so that less is to be searched."""
    techniques = f"{{efficient_attention: {{}}, chunked_loss: {{}}{more}}}"
    return parse(
        "model: {num_layers: 2, hidden_size: 256, num_heads: 4, vocab_size: 2048}\n"
        f"batch: {{size: {rows}, seq_len: 512}}\nstop: {{max_steps: 1}}\ntechniques: {techniques}"
    )


def gpu(mib: float) -> Roofline:
    """Returns a small GPU of so many MiB, 527 of which a run holds beside its tensors."""
    memory = mib - 527 + (CONTEXT >> 20)
    return Roofline(parse_accelerator(f"name=small,memory={memory}MiB,bandwidth=1000,bf16=100,fp32=20,link=100"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path_factory.getbasetemp() / "search"))


def found(recipe: Recipe, mib: float, allow: Any = "exact", world: int = 1, **how: Any) -> Any:
    rates = gpu(mib)
    return search(
        Space(Request(recipe, rates.as_device, world=world, rates=rates), allow), passes=16, confirm=False, **how
    )


def test_less_memory_costs_speed_and_the_verdict_is_that_of_a_plan() -> None:
    wide, tight = found(small(), 8192), found(small(), 650)
    assert wide.best.plan.fits
    assert tight.best.plan.fits
    assert tight.best.plan.peak_gib * 2**30 <= gpu(650).as_device.memory
    assert tight.best.plan.tokens_per_second <= wide.best.plan.tokens_per_second
    again = plan(Request(tight.best.recipe, gpu(650).as_device, rates=gpu(650)))
    assert tight.best.plan.peak_gib == pytest.approx(again.peak_gib, rel=0.01)


@pytest.mark.parametrize(("layers", "passes", "how"), [(20, 64, "whole"), (21, 64, "enough"), (80, 400, "whole")])
def test_the_number_of_layers_decides_how_the_best_is_confirmed(
    monkeypatch: pytest.MonkeyPatch, layers: int, passes: int, how: str
) -> None:
    module = importlib.import_module("preheat.planning.search.search")  # the package has the function of this name
    recipe, rates, kinds = override(small(), f"model.num_layers={layers}"), gpu(8192), []
    monkeypatch.setattr(module, "observe_cached", lambda request, *, how: kinds.append(how))
    monkeypatch.setattr(module, "describe", lambda request, observation: plan_of(values_of(1.0, 8.0)))
    one = _Search(Space(Request(recipe, rates.as_device, world=1, rates=rates)), "fastest", passes, print)
    best = EvaluatedPlan(recipe, plan_of(values_of(0.5, 8.0)), "exact", 1, ())
    one.seen = [best]
    assert one._confirm(best) == (replace(best, plan=plan_of(values_of(1.0, 8.0))), how == "whole")
    assert kinds == [how]


def test_an_observation_is_read_from_disk_unless_its_file_is_damaged() -> None:
    request = Request(small(), gpu(8192).as_device, world=1, rates=gpu(8192))
    first = recalling.observe_cached(request, how="step")
    path = recalling._entry_path(request, "step", 0)
    recalling.clear()
    again = recalling.observe_cached(request, how="step")
    assert not again.log, "the log is not on disk"
    assert (again.kernels, again.at, again.peak) == (first.kernels, first.at, first.peak)
    for damaged in (path.read_text().replace("passing", "gassing"), '{"observation": {}}', "{"):
        recalling.clear()
        path.write_text(damaged)
        assert recalling.observe_cached(request, how="step").log


def test_nothing_is_traded_without_leave_and_what_is_stated_stays() -> None:
    exact = found(small(", lora: {rank: 4}"), 8192)
    rounded = found(small(", lora: {rank: 4}"), 8192, "rounding")
    assert exact.best.trades == worst_numerics(exact.best.added) == "exact"
    assert any(s.trades == "rounding" for s in rounded.evaluated)
    assert all(s.trades == "exact" for s in exact.evaluated)
    assert rounded.best.plan.tokens_per_second >= exact.best.plan.tokens_per_second
    for made in (exact, rounded):
        assert made.best.recipe.techniques["lora"].rank == 4
        assert made.best.plan.tokens_per_step == 8 * 512


def test_where_nothing_fits_it_says_what_is_least() -> None:
    made = found(small(), 520)
    assert not made.best.plan.fits
    assert any("needs" in why and "GiB" in why for _, why in made.rejected)
    assert not made.alternatives


def test_what_excludes_a_better_technique_is_found_where_that_does_not_fit() -> None:
    # 27M parameters, in bf16 with fp32 states 12 bytes each; heads share keys and values.
    settings = ("model.hidden_size=1024", "model.num_kv_heads=2", "batch.seq_len=64", "techniques={chunked_loss: {}}")
    wide = override(small(rows=2), *settings)
    made = found(wide, 780, "rounding")
    assert made.best.plan.fits
    assert made.best.recipe.techniques.keys() >= {"optimizer_offload"}


def test_devices_share_out_what_one_cannot_hold() -> None:
    wide = override(small(rows=4), "model.hidden_size=1024", "batch.seq_len=64")  # 29M parameters, 16 bytes each
    one, four = found(wide, 960), found(wide, 960, world=4)
    assert not one.best.plan.fits
    assert four.best.plan.fits
    assert (
        math.prod(Space(Request(four.best.recipe, gpu(960).as_device, world=4)).sizes_of(four.best.recipe).values())
        == 4
    )


def test_a_search_is_told_in_words_and_figures() -> None:
    made = found(small(), 650)
    told = explain(made, devices=1, price=2.0)
    assert told.cost is not None
    assert told.cost.million_tokens == pytest.approx(2 / 3600 / told.tokens_per_second * 1e6)
    rates = gpu(650)
    request = Request(made.best.recipe, rates.as_device, world=1, rates=rates)
    seen = recalling.observe_cached(request, how="whole", logged=True)
    drawn = build_figures(made, request)
    most = max(size for _, size in drawn.timeline.bytes)
    assert most == pytest.approx(max(size for phase, size in seen.peak.items() if phase != "evaluation") / 2**30)
    assert all(0 < point.flops <= drawn.roofline.peak for point in drawn.roofline.points)


def test_what_was_observed_is_recalled_from_disk_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(small(), gpu(8192).as_device, world=1)
    first = recalling.observe_cached(request, how="whole")
    recalling._known.clear()
    monkeypatch.setitem(recalling._DRY_RUNS, "whole", lambda *_, **__: pytest.fail("looked at again"))
    second = recalling.observe_cached(request, how="whole")
    assert (first.peak, first.kernels, first.at, first.reserved) == (
        second.peak,
        second.kernels,
        second.at,
        second.reserved,
    )


def test_a_device_is_stated_in_its_data_sheets_units() -> None:
    made = parse_accelerator("name=X,memory=24GiB,bandwidth=1008,bf16=165")
    assert (made.name, made.memory, made.bandwidth, made.bf16) == ("X", 24 * 2**30, 1008e9, 165e12)
    assert isinstance(find_accelerator("H100"), Accelerator)
    for text, words in (
        ("memory=24", "--gpu: memory: '24' is not an amount of memory"),
        ("bf16=1", "needs memory and bandwidth"),
        ("flops=1", "did you mean|known"),
    ):
        with pytest.raises(RecipeError, match=words):
            parse_accelerator(text)


def test_a_question_is_a_recipe_or_a_model(tmp_path: Path) -> None:
    named = find_subject("Qwen/Qwen3-8B", method="qlora", batch_tokens=65536, length=4096)
    assert (named.recipe.model.preset, named.checkpoint, named.from_user) == ("qwen3-8b", "Qwen/Qwen3-8B", False)
    assert (named.recipe.batch.size, named.recipe.batch.seq_len) == (16, 4096)
    assert set(named.recipe.techniques) == {"lora", "nf4"}
    assert find_subject("demo").from_user
    assert find_subject("15M").recipe.model.size == "15M"
    assert find_subject(None, ["model.size=15M"]).recipe.model.size == "15M"
    for what, how, words in (
        ("qwen3-8b", {"batch_tokens": 1000}, "no multiple of sequences of 2,048"),
        ("qwen3-8b", {"batch_tokens": 0}, "no multiple"),
        (str(tmp_path), {}, "without a config.json"),
    ):
        with pytest.raises(RecipeError, match=words):
            find_subject(what, **how)  # type: ignore[arg-type]


def test_a_configuration_that_lacks_a_size_is_refused(tmp_path: Path) -> None:
    from preheat.models import hf

    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 128}'
    )
    with pytest.raises(RecipeError, match="has no num_hidden_layers"):
        hf.configure(find_subject(str(tmp_path)).recipe)


@pytest.mark.parametrize(
    ("more", "rows", "words"),
    [
        ("techniques={fsdp: {}, data_parallel: {}}", 8, "data_parallel and fsdp both take the devices that are left"),
        ("name=one", 1, "batch.size: 1 sequences cannot be split evenly across 8 devices"),
    ],
)
def test_what_contradicts_itself_is_told_in_one_line(more: str, rows: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        found(override(small(rows=rows), more), 4000, world=8)


def test_a_stated_technique_that_no_layout_goes_with_is_told_before_layouts_that_nobody_asked_for() -> None:
    model = "model={family: qwen3_moe, num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 2048, config: {num_experts: 8}}"
    with pytest.raises(RecipeError, match=r"be planned here: expert_parallel: degree: 3 does not divide the 8 devices"):
        found(override(small(), model, "techniques.expert_parallel={degree: 3}"), 4000, world=8)


def test_a_look_tells_what_a_layer_keeps_from_what_its_gradients_take() -> None:
    rates = gpu(8192)
    single = override(small(), "batch.size=1")
    request = Request(single, rates.as_device, world=1, rates=rates)
    plain = observe_layer(request)
    spare = observe_layer(replace(request, recipe=override(single, "techniques.activation_checkpointing={}")))
    hidden = 512 * 256 * 4  # of a row's tokens, fp32: the one thing that a layer keeps whose rest is computed again
    assert hidden <= spare.saved[0] <= 1.1 * hidden
    assert plain.saved[0] > 8 * hidden
    layer = 4 * 256**2 + 3 * 256 * 1024 + 2 * 256  # four projections, a gated feed-forward of four widths, two norms
    assert plain.states[0] == spare.states[0] == pytest.approx(16 * layer, rel=0.35)
    assert 0 < plain.update[0] < plain.seconds[0] < spare.seconds[0]
    both = plain.with_change(spare, plain)
    assert both == spare


def candidates_with(one: _Search, layout: str, kinds: list[Combination]) -> list[Candidate]:
    """Returns the candidates of a search with these parallel techniques."""
    own = one.space.recipe.techniques
    parallel = tuple(override(one.space.recipe, f"techniques={layout}").techniques.values())
    sizes = one.space.sizes((*own.values(), *parallel))
    assert sizes is not None
    return one._list_layout_candidates(parallel, sizes, kinds)


def test_estimates_of_layouts_are_near_their_dry_runs() -> None:
    """Of one micro-batch and of four: new weights of ZeRO-1, the second copy of replicas, FSDP's copies, bf16 gathers."""
    recipe = parse(
        "model: {num_layers: 6, hidden_size: 1024, num_heads: 8, vocab_size: 4096}\nbatch: {size: 32, seq_len: 1536}\n"
        "stop: {max_steps: 1}\ntechniques: {efficient_attention: {}, chunked_loss: {}, mixed_precision: {}}"
    )
    rates = gpu(65536)
    one = _Search(Space(Request(recipe, rates.as_device, world=8, rates=rates), "rounding"), "fastest", 1, print)
    kinds = [Combination((), observe_layer(one.space.to_single_device(())), frozenset())]
    layouts = (
        "{data_parallel: {}}",
        "{data_parallel: {}, zero1: {}}",
        "{fsdp: {}}",
        "{fsdp: {gather: bf16}}",
        "{fsdp: {replicate: 2}}",
        "{fsdp: {replicate: 4, reshard_after_forward: false, reduce: last}}",
    )
    seconds: dict[str, list[float]] = {}
    for text in layouts:
        for c in candidates_with(one, text, kinds):
            if c.micro not in (4, 1):
                continue
            planned = plan(one.space.add_techniques(c.added))
            assert c.guess.bytes / 2**30 == pytest.approx(planned.allocated_gib, rel=0.2), text
            assert c.guess.seconds == pytest.approx(planned.seconds_per_step, rel=0.15), (text, c.micro)
            seconds.setdefault(text, []).append(c.guess.seconds)
    # New weights are gathered when nothing else runs: 7/8 of them over 0.8 of the link, after 20 us.
    weights = 4 * sum(kinds[0].cost.parameters[n] * times for n, times in ((0, 6), (1, 1)))
    update = kinds[0].cost.update[0] * 6 + kinds[0].cost.update[1]
    for plain, cut in zip(seconds[layouts[0]], seconds[layouts[1]], strict=True):
        assert cut - plain == pytest.approx(weights * 7 / 8 / 80e9 + 20e-6 - update * 7 / 8, rel=0.02)


def test_estimates_of_split_layers_are_near_their_dry_runs() -> None:
    """Hidden states are on all devices of a tensor-parallel group, and a pipeline holds several micro-batches."""
    recipe = parse(
        "model: {preset: llama-3.1-70b, config: {num_hidden_layers: 12}}\nbatch: {size: 32, seq_len: 2048}\n"
        "stop: {max_steps: 1}\ntechniques: {mixed_precision: {mode: bf16_weights}, efficient_attention: {}, "
        "fused_operators: {}}"
    )
    rates = Roofline.of("H100")
    request = Request(recipe, rates.as_device, world=16, rates=rates, per_host=8)
    one = _Search(Space(request, "rounding"), "fastest", 1, lambda message: None)
    recomputing = tuple(
        override(recipe, "techniques={activation_checkpointing: {mode: selective}}").techniques.values()
    )
    kinds = [Combination(own, observe_layer(one.space.to_single_device(own)), frozenset()) for own in ((), recomputing)]
    for text, micros in (
        ("{tensor_parallel: {degree: 8}, fsdp: {}}", 1),
        ("{tensor_parallel: {degree: 8, sequence_parallel: true}, fsdp: {}}", 1),
        ("{pipeline_parallel: {degree: 4}, fsdp: {reduce: last, reshard_after_forward: false}}", 8),
        ("{pipeline_parallel: {degree: 2, schedule: interleaved}, fsdp: {reduce: last}}", 4),
        (
            "{pipeline_parallel: {degree: 2, schedule: interleaved}, tensor_parallel: {degree: 4}, fsdp: {reduce: last}}",
            8,
        ),
    ):
        candidates = candidates_with(one, text, kinds)
        chosen = [c for c in candidates if (c.cuts.micro_batch_count() if c.cuts else 1) == micros]
        assert len(chosen) == len(kinds)
        for c in chosen:
            planned = plan(one.space.add_techniques(c.added))
            assert c.guess.bytes / 2**30 == pytest.approx(planned.allocated_gib, rel=0.12), (text, c.kind)
            assert c.guess.seconds == pytest.approx(planned.seconds_per_step, rel=0.1), (text, c.kind)


def test_estimates_know_that_gathers_among_many_devices_take_long() -> None:
    """A layer's gather passes 1,023 devices in turn; in 16 groups it passes 63."""
    recipe = parse(
        "model: {preset: llama-3.1-8b}\nbatch: {size: 1024, seq_len: 2048}\n"
        "stop: {max_steps: 1}\ntechniques: {mixed_precision: {mode: bf16_weights}, efficient_attention: {}, "
        "fused_operators: {}, chunked_loss: {}}"
    )
    rates = Roofline.of("H100")
    request = Request(recipe, rates.as_device, world=1024, rates=rates, per_host=8)
    one = _Search(Space(request, "rounding"), "fastest", 1, lambda message: None)
    kinds = [Combination((), observe_layer(one.space.to_single_device(())), frozenset())]
    seconds = {}
    for groups in (1, 16):
        (c,) = candidates_with(one, f"{{fsdp: {{replicate: {groups}}}}}", kinds)
        seconds[groups] = plan(one.space.add_techniques(c.added)).seconds_per_step
        assert c.guess.seconds == pytest.approx(seconds[groups], rel=0.1), groups
    # Two gathers and a reduction of each layer: (1023 - 127) * 1.9 + 127 * 4 us, partly hidden by computation.
    assert 1.2 * seconds[16] < seconds[1] < seconds[16] + 3 * 33 * 2.3e-3


def test_the_busiest_device_of_a_pipeline_has_the_head_if_it_costs_more_than_a_share() -> None:
    """As `pipeline_split.balance_stages` cuts them: at least one layer beside the head, whatever it costs."""
    for layers, ends, devices in ((16, 4.3, 8), (26, 8.0, 8), (126, 0.65, 16), (80, 1.2, 4), (80, 1.2, 16)):
        cuts = balance_stages([1.0] * layers, devices, after=ends)
        costs = [len(cut) + (ends if cut.stop == layers else 0.0) for cut in cuts]
        assert _estimate_busiest_stage(layers, (1.0, ends), devices) == pytest.approx(max(costs))
    assert _estimate_busiest_stage(16, (1.0, 4.3), 1) == pytest.approx(20.3)


def test_a_candidate_with_room_is_preferred_to_one_that_is_hardly_faster() -> None:
    search_ = _Search(Space(Request(small(), gpu(65536).as_device, rates=gpu(65536))), "fastest", 1, print)

    def seen(speed: float, high: float) -> EvaluatedPlan:
        values = values_of(40.0, 79.0, tokens_per_second=speed, peak_gib_interval=[0.0, high])
        return EvaluatedPlan(small(), plan_of(values), "exact", 1, ())

    tight, roomy, slow = seen(100.0, 87.0), seen(99.5, 76.0), seen(98.0, 50.0)
    search_.seen = [slow, tight]
    assert search_._choose_preferred() is tight
    search_.seen = [slow, roomy, tight]
    assert search_._choose_preferred() is roomy


def test_a_candidate_that_does_not_fit_safely_is_the_answer_only_if_no_other_fits() -> None:
    search_ = _Search(Space(Request(small(), gpu(65536).as_device, rates=gpu(65536))), "fastest", 1, print)

    def seen(speed: float, peak: float) -> EvaluatedPlan:
        values = values_of(
            peak, 80.0, tokens_per_second=speed, peak_gib_interval=[0.9 * peak, 1.1 * peak], seconds_to_start=0.0
        )
        return EvaluatedPlan(small(), plan_of(values), "exact", 1, ())

    slow, fast, faster, too_large = seen(50.0, 77.0), seen(99.0, 78.0), seen(100.0, 79.9), seen(200.0, 81.0)
    search_.seen = [too_large, faster, fast, slow]
    assert search_._choose_preferred() is slow
    assert search_._list_alternatives(slow) == []
    search_.seen = [too_large, faster, fast]
    assert search_._choose_preferred() is fast, "of those that do not fit safely, the one with the best chance"


def test_a_search_keeps_away_from_the_end_of_the_memory() -> None:
    peak = found(small(), 8192).best.plan.peak_gib
    best = found(small(), peak * 1024 / 0.985).best.plan
    assert best.verdict in (Verdict.FITS, Verdict.TIGHT)
    assert best.peak_gib <= 0.97 * best.available_gib


def test_estimates_of_split_experts_are_near_their_dry_runs() -> None:
    """They gather a part of the experts, and send tokens; across hosts both are slow."""
    recipe = parse(
        "model: {preset: qwen3-30b-a3b, config: {num_hidden_layers: 6}}\nbatch: {size: 16, seq_len: 4096}\n"
        "stop: {max_steps: 1}\ntechniques: {mixed_precision: {mode: bf16_weights}, efficient_attention: {}, "
        "chunked_loss: {}, activation_checkpointing: {}}"
    )
    rates = Roofline.of("H100")
    request = Request(recipe, rates.as_device, world=16, rates=rates, per_host=8)
    one = _Search(Space(request, "rounding"), "fastest", 1, lambda message: None)
    kinds = [Combination((), observe_layer(one.space.to_single_device(())), frozenset())]
    for text in (
        "{fsdp: {}, expert_parallel: {degree: 2}}",
        "{fsdp: {}, expert_parallel: {degree: 16}}",
        "{fsdp: {replicate: 2}, expert_parallel: {}}",
        "{data_parallel: {}, expert_parallel: {degree: 4}}",
    ):
        (c,) = candidates_with(one, text, kinds)
        planned = plan(one.space.add_techniques(c.added))
        assert c.guess.bytes / 2**30 == pytest.approx(planned.allocated_gib, rel=0.2), text
        assert c.guess.seconds == pytest.approx(planned.seconds_per_step, rel=0.15), text


@pytest.mark.parametrize("weights", ["data_parallel: {}", "fsdp: {replicate: 2}"])
def test_more_devices_may_split_experts_than_split_the_batch(weights: str) -> None:
    """Those of a sequence do, too: 8 of 8 split the experts, and 2 the batch."""
    recipe = parse(
        "model: {family: qwen3_moe, num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 96, num_experts: 8}\n"
        "batch: {size: 8, seq_len: 512}\nstop: {max_steps: 1}\ntechniques: {efficient_attention: {}}"
    )
    rates = Roofline.of("H100")
    one = _Search(Space(Request(recipe, rates.as_device, world=8, rates=rates)), "fastest", 1, lambda message: None)
    kinds = [Combination((), observe_layer(one.space.to_single_device(())), frozenset())]
    candidates = candidates_with(one, f"{{{weights}, context_parallel: {{degree: 4}}, expert_parallel: {{}}}}", kinds)
    assert candidates
    assert all(0 < c.guess.seconds < 1 for c in candidates)


def test_a_slow_clock_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = found(small(), 650)
    for name in ("process_time", "perf_counter"):
        monkeypatch.setattr(time, name, functools.partial(next, itertools.count(1e9, 100.0)))
    slow = found(small(), 650)
    assert slow.best.plan.tokens_per_second == quick.best.plan.tokens_per_second
    assert [s.added for s in slow.evaluated] == [s.added for s in quick.evaluated]


def test_fewer_passes_are_fewer_dry_runs_with_the_same_verdict() -> None:
    rates = gpu(650)
    space = Space(Request(small(), rates.as_device, world=1, rates=rates), "exact")
    few, many = (search(space, passes=passes, confirm=False) for passes in (1, 1000))
    assert 1 <= len(few.evaluated) < len(many.evaluated)
    assert few.best.plan.fits
    assert many.best.plan.tokens_per_second >= few.best.plan.tokens_per_second


def test_experts_are_split_where_gathering_them_would_take_most_of_a_step() -> None:
    recipe = parse(
        "model: {preset: deepseek-v3, config: {num_hidden_layers: 8, vocab_size: 8192}}\n"
        "batch: {size: 64, seq_len: 4096}\nstop: {max_steps: 1}\ntechniques: {mixed_precision: {mode: bf16_weights}, "
        "efficient_attention: {}, chunked_loss: {}, activation_checkpointing: {}}"
    )
    rates = Roofline.of("H200")
    space = Space(Request(recipe, rates.as_device, world=64, rates=rates, per_host=8), "rounding")
    best = search(space, passes=80, confirm=False).best
    assert best.plan.fits
    degrees = [t.expert_degree(space.sizes_of(best.recipe)) for t in best.added]
    assert max(degrees) >= 8
    for degree in (2, 64):
        other = plan(
            replace(space.request, recipe=override(best.recipe, f"techniques.expert_parallel.degree={degree}"))
        )
        assert other.tokens_per_second < 1.02 * best.plan.tokens_per_second


def test_estimates_of_experts_know_that_a_micro_batch_reads_all_of_them() -> None:
    recipe = parse(
        "model: {preset: qwen3-30b-a3b, config: {num_hidden_layers: 2}}\nbatch: {size: 4, seq_len: 512}\n"
        "stop: {max_steps: 1}\ntechniques: {mixed_precision: {mode: bf16_weights}, efficient_attention: {}, "
        "chunked_loss: {}, lora: {}, activation_checkpointing: {}}"
    )
    rates = Roofline.of("H100")
    one = _Search(Space(Request(recipe, rates.as_device, world=1, rates=rates)), "fastest", 1, lambda message: None)
    kinds = TechniqueCombinations(one.space, one._refuse).sampled()
    plain = next(kind for kind in kinds if not kind.settings)
    ((layout, sizes),) = one._iterate_meshes()
    by_rows = {c.micro: c for c in one._list_layout_candidates(layout, sizes, [plain])}
    few, many = (plan(one.space.add_techniques(by_rows[n].added)) for n in (1, 4))
    measured = many.tokens_per_second / few.tokens_per_second
    estimated = by_rows[4].guess.tokens_per_second / by_rows[1].guess.tokens_per_second
    assert 1.5 < estimated == pytest.approx(measured, rel=0.3)


def test_weights_that_are_gathered_in_bf16_are_tried() -> None:
    """Activations between layers are in bf16 then: no estimate of one device shows it."""
    result = found(small(", mixed_precision: {}"), 8192, "rounding", world=8)
    other = override(result.best.recipe, "techniques.fsdp.gather=own")
    assert result.best.recipe.techniques["fsdp"].gather == "bf16"
    slower = plan(Request(other, gpu(8192).as_device, rates=gpu(8192)))
    assert result.best.plan.tokens_per_second > slower.tokens_per_second


def test_a_stated_pipeline_with_its_micro_batches_is_searched() -> None:
    techniques = "techniques={efficient_attention: {}, pipeline_parallel: {degree: 2, micro_batches: 4}}"
    result = found(override(small(rows=16), techniques), 8192, world=4)
    assert result.best.plan.fits
    assert result.best.recipe.techniques["pipeline_parallel"].micro_batches == 4
    assert "gradient_accumulation" not in result.best.recipe.techniques


def test_no_other_setting_of_a_layout_improves_the_answer() -> None:
    """Also settings that estimates take for as fast: fsdp's hidden communication, and schedules of a pipeline."""
    techniques = "techniques={mixed_precision: {mode: bf16_weights}, fused_operators: {}, efficient_attention: {}}"
    settings = ("model.hidden_size=1024", "model.num_layers=4", "batch.seq_len=512", techniques)
    rates = Roofline(parse_accelerator("name=small,memory=1300MiB,bandwidth=1000,bf16=100,fp32=20,link=20"))
    space = Space(Request(override(small(), *settings), rates.as_device, world=4, rates=rates), "exact")
    best = search(space, passes=80, confirm=False).best
    neighbours = 0
    for t in best.added:
        for other in t.options(space.context(best.recipe)) if t.degrees() else ():  # type: ignore[attr-defined]
            request = space.add_techniques([other if each is t else each for each in best.added])
            if other.degrees() == t.degrees() and not find_candidate_problems(space, request):
                neighbour = describe(request, recalling.observe_cached(request, how="few"))
                neighbours += 1
                assert not neighbour.fits or neighbour.tokens_per_second < 1.02 * best.plan.tokens_per_second, other
    assert neighbours >= 3


def test_settings_of_the_best_layout_that_only_its_techniques_allow_are_candidates() -> None:
    """Gathering in bf16 is listed only beside a technique that computes in bf16, which the search adds."""
    space = space_of(small(), 8192, "rounding", world=4)
    one = _Search(space, "fastest", 1.0, lambda message: None)
    kind, layout = (registry()["mixed_precision"](mode="bf16"),), (registry()["fsdp"](),)  # type: ignore[call-arg]
    pair = (1e8, 1e8)
    cost = LayerCost(pair, (4e8, 4e8), pair, pair, pair, pair, (1e-3, 1e-3), (1e-4, 1e-4))
    sizes = dict.fromkeys(Axis, 1) | {Axis.SHARD: 4}
    current = one._list_layout_candidates(layout, sizes, [Combination(kind, cost, frozenset())])[0]
    best = EvaluatedPlan(
        space.add_techniques(current.added).recipe,
        plan_of(values_of(1.0, 8.0)),
        "rounding",
        current.micro,
        current.added,
    )
    others = [c.layout[0] for c in one._vary_settings(current, best)]
    assert {t.gather for t in others} == {"own", "bf16"}  # type: ignore[attr-defined]
    # All rows at once: when gradients are reduced changes nothing, so each pair is tried once.
    assert len(others) == len({(t.gather, t.reshard_after_forward) for t in others}) == 4  # type: ignore[attr-defined]


def test_other_degrees_of_the_best_layout_are_dry_run_next() -> None:
    """A correction by one layout is no correction of others: tensor parallelism's error differs by its degree."""
    space = space_of(small(), 8192, "rounding", world=8)
    one = _Search(space, "fastest", 1.0, lambda message: None)
    pair = (1e8, 1e8)
    cost = LayerCost(pair, (4e8, 4e8), pair, pair, pair, pair, (1e-3, 1e-3), (1e-4, 1e-4))
    combination = Combination((), cost, frozenset())
    for tensor in (1, 2, 4):
        layout = [registry()["fsdp"]()]
        if tensor > 1:
            layout = [registry()["tensor_parallel"](degree=tensor), *layout]  # type: ignore[call-arg]
        sizes = dict.fromkeys(Axis, 1) | {Axis.TENSOR: tensor, Axis.SHARD: 8 // tensor}
        one.candidates += one._list_layout_candidates(tuple(layout), sizes, [combination])
    current = max(one.candidates, key=lambda c: max(dict(t.degrees()).get(Axis.TENSOR, 0) for t in c.layout))
    others = one._vary_degrees(current)
    # The same techniques with two devices in place of four; not those of another layout.
    assert [[t.degree for t in c.layout if t.name() == "tensor_parallel"] for c in others] == [[2]]  # type: ignore[attr-defined]
    assert others[0].guess == min(
        (c.guess for c in one.candidates if c.layout == others[0].layout), key=lambda g: g.seconds
    )


def test_rows_are_cut_once_for_several_stages_on_a_device() -> None:
    recipe = parse(
        "model: {num_layers: 8, hidden_size: 64, num_heads: 4, vocab_size: 512}\nbatch: {size: 8, seq_len: 512}\n"
        "stop: {max_steps: 1}\nparallel: {devices: 8}\ntechniques: {context_parallel: {degree: 2}, data_parallel: {}, "
        "zero1: {}, gradient_accumulation: {steps: 4}, pipeline_parallel: {degree: 2}}"
    )
    one, two = (
        observe(
            Request(override(recipe, f"techniques.pipeline_parallel.schedule={schedule}"), gpu(8192).as_device, world=8)
        )
        for schedule in ("1f1b", "interleaved")
    )
    assert two.model_flops == one.model_flops > 0
    states = [o.categories["update"]["optimizer"] for o in (one, two)]
    assert states[1] == pytest.approx(states[0], rel=0.02)


def test_offload_is_refused_for_a_stage_of_one_layer() -> None:
    techniques = (
        "techniques={efficient_attention: {}, activation_offload: {}, pipeline_parallel: {degree: 2, micro_batches: 2}}"
    )
    recipe = override(small(), "model.num_layers=2", techniques, "parallel.devices=2")
    with pytest.raises(RecipeError, match=r"activation_offload\.stay: 1 of the 1 layers of a pipeline's stage"):
        plan(Request(recipe, gpu(8192).as_device, world=2, rates=gpu(8192)))


def test_half_precision_weights_are_not_halved_again_when_gathered() -> None:
    pair, tags = (1e8, 1e8), frozenset({Tag.BF16_ALL_GATHER})
    full = LayerCost(pair, (4e8, 4e8), pair, pair, pair, pair, pair, pair)
    assert estimate_gathered_share(full, tags) == 0.5
    assert estimate_gathered_share(replace(full, weights=(2e8, 2e8)), tags) == 1.0
    assert estimate_gathered_share(full, frozenset()) == 1.0


def test_only_what_goes_with_a_way_to_share_out_is_a_candidate() -> None:
    rates, recipe = (
        gpu(8192),
        parse(
            "model: {num_layers: 2, hidden_size: 256, num_heads: 4, vocab_size: 2048}\nbatch: {size: 8, seq_len: 512}\nstop: {max_steps: 1}\n"
            "techniques: {tensor_parallel: {degree: 2}, efficient_attention: {}}"
        ),
    )
    made = search(Space(Request(recipe, rates.as_device, world=2, rates=rates), "rounding"), passes=16, confirm=False)
    assert made.best.plan.fits
    assert made.guessed
    assert not any("owns the slot" in why for what, why in made.rejected if "tensor_parallel" in what), made.rejected


@pytest.mark.parametrize(("steps", "compiled"), [(2, False), (10**6, True)])
def test_compiling_is_chosen_for_runs_that_outlast_it(steps: int, compiled: bool) -> None:
    recipe = override(small(), f"stop.max_steps={steps}")
    made = found(recipe, 8192, "rounding")
    assert ("compile" in made.best.recipe.techniques) is compiled
    total = steps * made.best.plan.seconds_per_step
    assert made.best.plan.seconds_total == pytest.approx(total + (60 if compiled else 0))
    # Both answers say how long a run must be: it then ends no later with compile, and one step fewer is too few.
    assert made.startup is not None
    pays = explain(made, devices=1).startup.pays_from_steps
    plain, faster = (s.plan.seconds_per_step for s in (made.startup.without, made.startup.with_them))
    assert made.startup.techniques == ("compile",)
    assert made.best in (made.startup.without, made.startup.with_them)
    assert 60 + pays * faster <= pays * plain
    assert 60 + (pays - 1) * faster > (pays - 1) * plain
    assert (steps >= pays) is compiled
    exact = found(recipe, 8192, "exact")
    assert not {"compile", "fused_operators", "mixed_precision"} & exact.best.recipe.techniques.keys()


def test_more_rows_at_a_time_are_looked_at_where_guesses_of_one_row_see_no_gain() -> None:
    recipe = small(
        ", lora: {}, nf4: {}, compile: {}", rows=16
    )  # whose weights are made from 4 bits for each micro-batch
    made = found(recipe, 8192, "rounding")
    rates = gpu(8192)
    for cuts in (2, 4, 16):
        other = override(made.best.recipe, f"techniques.gradient_accumulation={{steps: {cuts}}}")
        told = plan(Request(other, rates.as_device, rates=rates))
        assert told.fits
        assert made.best.plan.tokens_per_second >= 0.99 * told.tokens_per_second


def test_a_search_adds_only_what_is_planned_well_on_the_device() -> None:
    recipe = small(", lora: {}")
    names = {
        kind: {cls.name() for cls in Space(Request(recipe, device, world=1), "different").searched()}
        for kind, device in (("cpu", DEVICE), ("cuda", gpu(8192).as_device))
    }
    assert names["cuda"] - names["cpu"] == {"compile", "liger", "fp8"}
    assert "nf4" in names["cpu"]
    for name, fits in (("A100", False), ("L40S", True)):
        device = Roofline.of(name).as_device
        space = Space(Request(override(small(), "techniques.mixed_precision={}"), device, world=1), "different")
        refused = find_candidate_problems(space, space.add_techniques([registry()["fp8"]()]))
        assert any("compute capability" in problem.text for problem in refused) is not fits, refused


def test_weights_and_moments_in_bf16_are_searched_if_numerics_may_differ() -> None:
    device = gpu(8192).as_device
    for recipe, more in ((small(), {"bf16_pure"}), (small(", lora: {}"), set())):
        modes = {}
        for allow in ("rounding", "different"):
            space = Space(Request(recipe, device, world=1), allow)  # type: ignore[arg-type]
            modes[allow] = {t.mode for t in space._list_options(registry()["mixed_precision"])}  # type: ignore[attr-defined,arg-type]
        assert modes["different"] - modes["rounding"] == more


@pytest.mark.parametrize("frozen", [False, True])
def test_devices_without_bf16_are_offered_fp16(frozen: bool) -> None:
    recipe = override(small(", lora: {}" if frozen else ""), "stop.max_steps=1000")
    rates = Roofline.of("T4")
    space = Space(Request(recipe, rates.as_device, world=1, rates=rates), "rounding")
    result = search(space, passes=16, confirm=False)
    best = result.best.recipe.techniques["mixed_precision"]
    assert best.mode.startswith("fp16"), best  # type: ignore[attr-defined]
    # The base is in half precision, and adapters and their optimizer in fp32.
    memory, parameters = result.best.plan.memory, result.best.plan.parameters
    if frozen:
        base = parameters.total - parameters.trained
        assert memory["parameters"] * 2**30 == pytest.approx(2 * base + 4 * parameters.trained, rel=0.02)
    assert not any("bf16" in str(s.recipe.techniques.get("mixed_precision")) for s in result.evaluated)
    assert result.best.plan.matrix_rate == rates.peak_matrix_rate["fp16"]
    assert result.best.plan.mfu < 1


def test_what_cannot_be_built_beside_others_is_no_refusal_beside_the_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    space = space_of(small(), 8192, "rounding")
    one = _Search(space, "fastest", 1.0, lambda message: None)
    fused = registry()["fused_operators"]()
    one._refuse(fused, Problem("fused_operators", ProblemCode.BUILD, "cannot be built beside another"))
    best = EvaluatedPlan(space.recipe, plan_of(values_of(1.0, 8.0)), "exact", 1, ())
    assert one._list_refusals(best) == []
    monkeypatch.setattr(type(fused), "apply", lambda *_: (_ for _ in ()).throw(RecipeError("no such kernel\nhere")))
    recalling.clear()
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    assert one._list_refusals(best) == [("fused_operators", "no such kernel")]


def test_what_one_precision_refuses_is_tried_beside_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that precision is not the best by itself, as on this device, which is slow in bf16."""
    half = Tag.BF16_COMPUTE
    attention = registry()["efficient_attention"]
    monkeypatch.setattr(attention, "check", lambda self, context: [] if half in context.tags else ["needs bf16"])
    rates = Roofline(parse_accelerator("name=odd,memory=8GiB,bandwidth=1000,bf16=5,fp32=100"))
    recipe = override(small(), "techniques={chunked_loss: {}, lora: {}}")
    refusals: list[Any] = []
    space = Space(Request(recipe, rates.as_device, world=1, rates=rates), "rounding")
    kinds = TechniqueCombinations(space, lambda *why: refusals.append(why)).sampled()
    together = [{t.name(): t for t in kind.settings} for kind in kinds if attention in map(type, kind.settings)]
    modes = {kind["mixed_precision"].mode for kind in together}  # type: ignore[attr-defined]
    assert modes, "efficient attention was dropped"
    assert not any(isinstance(t, attention) for t, _ in refusals)


def test_costs_of_combinations_with_long_rows_are_those_of_dry_runs() -> None:
    """Plain attention takes most of such a step: a precision observed beside it was ranked by what attention saves."""
    long = parse(
        "model: {num_layers: 2, hidden_size: 256, num_heads: 16, vocab_size: 512}\n"
        "batch: {size: 2, seq_len: 4096}\nstop: {max_steps: 1}"
    )
    space = space_of(long, 80 * 1024, "rounding")
    kinds = TechniqueCombinations(space, lambda *why: None).sampled()
    names = [frozenset(t.name() for t in kind.settings) for kind in kinds]
    compared = [
        (kind.cost, observe_layer(space.to_single_device(kind.settings)), kind.settings)
        for kind, techniques in zip(kinds, names, strict=True)
        if techniques >= {"efficient_attention", "mixed_precision"} and not techniques & {"activation_checkpointing"}
    ]
    assert len(compared) >= 3
    for cost, observed, settings in compared:
        assert cost.saved[0] == pytest.approx(observed.saved[0], rel=0.1), settings
        assert cost.seconds[0] == pytest.approx(observed.seconds[0], rel=0.1), settings


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("llama-3.2-1b", (1, 2)),
        ("qwen3.5-0.8b", (1, 5)),  # three layers with a delta rule, one with attention
        ("gemma-3-1b", (1, 7)),
        ("deepseek-v3", (4, 5)),  # the first three have no experts
        ("nemotron-3-nano-30b-a3b", (1, 6)),  # nothing repeats: the sixth layer is the first with attention
        ("gemma-3n-e2b", (1, 9)),  # the first layer of the last kind comes too late
    ],
)
def test_a_sample_of_layers_has_each_kind(preset: str, expected: tuple[int, int]) -> None:
    recipe = parse(f"model: {{preset: {preset}}}\nstop: {{max_steps: 1}}")
    assert choose_sampled_layers(Request(recipe, gpu(81920).as_device)) == expected


def test_techniques_of_later_layers_are_searched() -> None:
    """The first two layers of this model have no attention."""
    recipe = parse(
        "model: {preset: qwen3.5-0.8b, config: {num_hidden_layers: 8}}\nbatch: {size: 1, seq_len: 2048}\n"
        "stop: {max_steps: 1}\ntechniques: {chunked_loss: {}, mixed_precision: {mode: bf16_weights}}"
    )
    kinds = TechniqueCombinations(space_of(recipe, 81920), lambda *why: None).sampled()
    least = min(kinds, key=lambda kind: kind.cost.saved[0])
    assert "efficient_attention" in {t.name() for t in least.settings}


def test_a_setting_without_effect_on_one_layer_is_observed_on_two_and_three() -> None:
    rates = gpu(8192)
    request = Request(override(small(), "batch.size=1"), rates.as_device, world=1, rates=rates)
    plain = observe_layer(request)
    offloaded = override(request.recipe, "techniques.activation_offload={}")
    cost = observe_layer(replace(request, recipe=offloaded))
    assert 0 < cost.saved[0] < plain.saved[0]
    assert cost.states[0] == pytest.approx(plain.states[0])


@pytest.mark.parametrize("more", [{}, {"head_dim": None}])
def test_a_model_whose_first_layers_have_no_experts_is_searched(tmp_path: Path, more: dict[str, None]) -> None:
    values = {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        **more,  # a null in the file
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    recipe = parse(
        f"model: {{path: {tmp_path}, weights: random}}\nbatch: {{size: 2, seq_len: 64}}\nstop: {{max_steps: 1}}\n"
        "techniques: {efficient_attention: {}, chunked_loss: {}}"
    )
    assert found(recipe, 8192).best.plan.fits


def space_of(recipe: Recipe, mib: float, allow: Any = "exact", world: int = 1) -> Space:
    rates = gpu(mib)
    return Space(Request(recipe, rates.as_device, world=world, rates=rates), allow)


def test_settings_between_the_sampled_ones_are_observed_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TechniqueCombinations, "_find_pareto_front", lambda self, choices: choices
    )  # keep what is dominated here
    rates = Roofline(parse_accelerator("name=slow,memory=8GiB,bandwidth=50,bf16=2,fp32=2"))  # not bound by the host
    space = Space(Request(small(), rates.as_device, world=1, rates=rates), "exact")
    combinations = TechniqueCombinations(space, lambda *why: None)

    def by_budget(kinds: list[Any]) -> dict[float | None, Any]:
        checkpointing = registry()["activation_checkpointing"]
        pairs = ((t, kind.cost) for kind in kinds for t in kind.settings if isinstance(t, checkpointing))
        return {t.budget: cost for t, cost in pairs if t.mode == "budget"}  # type: ignore[attr-defined]

    assert by_budget(combinations.sampled()).keys() == {0.5}
    assert by_budget(combinations.refined(1000.0)).keys() == {0.5}, "no two settings differ so much in speed"
    combinations = TechniqueCombinations(space, lambda *why: None)
    combinations.sampled()
    costs = by_budget(combinations.refined(1.0))
    assert costs.keys() == {0.25, 0.5, 0.75}
    assert costs[0.75].saved[0] > costs[0.5].saved[0]
    assert costs[0.75].seconds[0] < costs[0.5].seconds[0]


def test_the_gain_by_larger_micro_batches_is_that_of_a_fixed_time_a_micro_batch() -> None:
    lookup = _Search(space_of(small(), 8192), "fastest", 1.0, lambda message: None)
    one, other = (registry()["chunked_loss"](),), (registry()["fused_operators"](),)

    def candidate(kind: tuple[Any, ...], micro: int) -> Candidate:
        return Candidate(kind, (), None, micro, Guess(1e9, 1.0, 100.0))

    assert lookup._correct_estimate(candidate(one, 4))[1] == 100.0
    # A micro-batch takes 1 s and each of its rows 3 s: 4 s a row alone, 3.5 s of two, 3.25 s of four.
    lookup._similar.clear()
    lookup._corrections += [_Correction(one, (), micro, 1.0, 1 / (1 / micro + 3)) for micro in (1, 2)]
    assert lookup._correct_estimate(candidate(one, 4))[1] == pytest.approx(100 / 3.25)
    assert lookup._correct_estimate(candidate(other, 4))[1] == pytest.approx(100 / 3.25)
    assert lookup._correct_estimate(candidate(one, 1))[1] == pytest.approx(100 / 4)


def test_refusals_are_those_of_the_best_recipe_and_what_fits_is_an_alternative() -> None:
    made = found(small(", lora: {}"), 8192, "rounding")
    space = space_of(small(", lora: {}"), 8192, "rounding")
    names = {cls.name() for cls in space.searched()}
    refused = [(what, why) for what, why in made.rejected if what in names]
    assert any(what == "optimizer_in_backward" and "max_grad_norm" in why for what, why in refused)
    for what, why in refused:
        problems = find_candidate_problems(space, space.add_techniques((*made.best.added, registry()[what]())))
        assert any(why in str(problem) for problem in problems), (what, why)
    assert not any("fits" in why for _, why in made.rejected)
    assert {id(s) for s in made.alternatives} <= {id(s) for s in made.evaluated if s.plan.fits}
    assert made.best.names not in {s.names for s in made.alternatives if s.plan.peak_gib >= made.best.plan.peak_gib}


def of_figures(speed: float, gib: float, trades: Any = "rounding", later: float = 0.0, micro: int = 4) -> EvaluatedPlan:
    plan = plan_of(values_of(gib, 2 * gib, tokens_per_second=speed, seconds_to_start=later))
    return EvaluatedPlan(small(), plan, trades, micro, ())


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (of_figures(90, 40), True),  # slower, less memory
        (of_figures(99.9, 40), True),
        (of_figures(90, 50), False),  # slower for nothing
        (of_figures(90, 49.9), False),  # a difference that no device notices
        (of_figures(90, 60), False),
        (of_figures(100, 50), False),
        (of_figures(110, 40), False),  # gives nothing up
        (of_figures(110, 60), True),  # as of the largest batch, or the closest numerics
        (of_figures(110, 50, micro=2), True),
        (of_figures(90, 50, "exact"), True),
        (of_figures(90, 50, "different"), False),
        (of_figures(110, 50, "different"), True),
        (of_figures(90, 60, later=-60.0), True),  # starts earlier
        (of_figures(90, 50, later=60.0), False),
    ],
)
def test_an_alternative_gains_something_and_gives_something_up(candidate: EvaluatedPlan, expected: bool) -> None:
    best = of_figures(100, 50)
    assert is_tradeoff(candidate, best) is expected
    rates = gpu(65536)
    one = _Search(Space(Request(small(), rates.as_device, world=1, rates=rates), "rounding"), "fastest", 1, print)
    other = replace(candidate, added=(registry()["activation_checkpointing"](),))
    one.seen = [best, other]
    assert one._list_alternatives(best) == ([other] if expected else [])


def test_an_alternative_is_better_in_something_than_each_faster_one() -> None:
    rates = gpu(65536)
    one = _Search(Space(Request(small(), rates.as_device, world=1, rates=rates), "rounding"), "fastest", 1, print)
    names = ("activation_checkpointing", "fused_operators", "optimizer_in_backward")
    best, *others = of_figures(100, 50), of_figures(90, 30), of_figures(60, 40), of_figures(50, 20)
    spare, slow, least = (replace(s, added=(registry()[name](),)) for s, name in zip(others, names, strict=True))
    one.seen = [best, least, slow, spare]
    assert one._list_alternatives(best) == [spare, least]


@pytest.mark.parametrize(
    ("stated", "world", "per_host", "expected"),
    [
        ("", 64, 8, {1, 4, 8}),
        ("", 8, 8, {1}),
        ("", 16, 8, {1, 2}),
        ("tensor_parallel: {degree: 4}, ", 64, 8, {1, 4, 8}),
        ("tensor_parallel: {degree: 8}, ", 64, 8, {1, 4}),  # a host holds one shard: no group within it
        ("pipeline_parallel: {degree: 2}, ", 64, 8, {1, 2, 4}),
    ],
)
def test_hybrid_sharding_is_tried_on_several_hosts(stated: str, world: int, per_host: int, expected: set[int]) -> None:
    """Groups of the shards span one host or two."""
    recipe, rates = override(small(rows=64), f"techniques={{{stated}}}"), replace(gpu(65536), per_host=per_host)
    space = Space(Request(recipe, rates.as_device, world=world, rates=rates, per_host=per_host))
    copies = set()
    for layout in space.layouts():
        if [t.name() for t in layout] == ["fsdp"]:
            copies.add(layout[0].replicate)
            sizes = space.sizes((*recipe.techniques.values(), *layout))
            assert sizes is not None
            within = sizes[Axis.SHARD] * sizes[Axis.CONTEXT] * sizes[Axis.TENSOR]
            assert layout[0].replicate == 1 or within in (per_host, 2 * per_host)
    assert copies == expected


def test_layouts_whose_states_exceed_a_device_are_not_estimated() -> None:
    recipe = override(small(rows=64), "model.hidden_size=1024", "techniques={mixed_precision: {}}")
    rates = Roofline(parse_accelerator("name=small,memory=36MiB,bandwidth=1000,bf16=100,fp32=20,link=100"))
    one = _Search(Space(Request(recipe, rates.as_device, world=16, rates=rates, per_host=8)), "fastest", 1, print)
    cost = observe_layer(one.space.to_single_device(()))
    kinds = [Combination((), cost, frozenset())]
    states, optimizer = (pair[0] * 2 + pair[1] for pair in (cost.states, cost.optimizer))
    assert states / 16 < 36 * 2**20 < (states - optimizer) / 8 + optimizer / 16, "two replicas do not fit"
    layouts = {c.layout for c in one._list_candidates(kinds)}
    sizes = [one.space.sizes((*recipe.techniques.values(), *layout)) for layout in layouts]
    assert sizes
    assert all(each is not None and each[Axis.REPLICATE] == 1 for each in sizes)


def test_an_interrupted_search_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = _Search._evaluate
    left = [1]

    def interrupted(self: _Search, c: Candidate) -> Any:
        if not left:
            signal.raise_signal(signal.SIGINT)
        left.pop()
        return evaluate(self, c)

    monkeypatch.setattr(_Search, "_evaluate", interrupted)
    with raise_on_signal():
        made = found(small(), 8192)
    assert made.interrupted
    assert len(made.evaluated) == 1
    assert made.best is made.evaluated[0]
    assert explain(made, devices=1).searched.interrupted
    with raise_on_signal(), pytest.raises(Interrupted):  # before the first dry run there is nothing to say
        found(small(), 8192)


def test_a_model_too_large_for_every_layout_is_told_what_would_make_it_fit() -> None:
    wide = override(small(rows=4), "model.hidden_size=1024", "batch.seq_len=64")  # 29M parameters, 16 bytes each
    space = space_of(wide, 960)
    least = found(wide, 960).best
    assert not least.plan.fits

    def request_on(devices: int) -> Request:
        return replace(space.request, world=devices)

    more = find_more_devices(least, space, request_on, passes=16)
    assert more is not None
    devices, result = more
    assert devices in (2, 4)
    assert result.best.plan.fits
    assert find_more_devices(least, space, lambda devices: None, passes=16) is None
    assert find_shorter_rows(least, space) is None  # its weights and states alone are too large


def test_rows_are_halved_until_they_fit() -> None:
    long = override(small(", lora: {}", rows=1), "batch.seq_len=4096", "techniques.activation_checkpointing={}")
    space = space_of(long, 8192)
    whole = plan(space.request)
    half = plan(replace(space.request, recipe=override(long, "batch.seq_len=2048")))
    mib = (whole.peak_gib + half.peak_gib) * 512  # between the two
    least = EvaluatedPlan(long, replace(whole, available_gib=mib / 1024), "exact", 1, ())
    shorter = find_shorter_rows(least, space_of(long, mib))
    assert shorter is not None
    assert shorter.recipe.batch.seq_len == 2048
    assert shorter.plan.peak_gib == pytest.approx(half.peak_gib, rel=0.01)
