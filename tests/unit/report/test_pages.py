"""No page obeys, or is broken by, what a file holds: text of any length and content, numbers of any size, missing keys."""

import copy
import itertools
import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from preheat.core.bench import BenchResult, InferenceResult
from preheat.core.compression import CompressionResult
from preheat.core.lr_range import LrRange
from preheat.core.nettest import NettestResult
from preheat.core.plan import PlanFigures
from preheat.core.step_profile import StepProfile
from preheat.errors import RunError
from preheat.files import read_record
from preheat.report import (
    bench_page,
    compress_page,
    data_page,
    inference_page,
    lr_range_page,
    nettest_page,
    page,
    plan_page,
    profile_page,
    report_data,
    run_page,
    svg,
)
from preheat.report.formatting import MISSING
from preheat.run.writer import Writer
from tests.unit.plans import plan_of, values_of

HOSTILE = (
    '"</title></pre></td><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m\x00\u202e\ud800'
    + "w" * 1_000_000
    + "'\">"
)
SPREAD = {"value": 2.0, "low": 1.5, "high": 2.5}
SMALL = {"peak_gib": 0.02, "tokens_per_second": 4000.0}


def bench_row(name: str) -> dict[str, Any]:
    return {"name": name, "techniques": ["lora"], "failed": "", "fits": True, "mfu": 0.1, "changes": {"lora": ["c"]}, "predicted": SMALL, **SMALL, "speeds": [1.0, 2.0], "spread": [1.0, 2.0], "ratio": 1.0, "ratio_spread": [1.0, 1.0],
            "startup_seconds": 1.0, "loss": 5.0, "gradient_cosine": None, "notices": ["n"], "finding": "f"}  # fmt: skip


SIDE = {"loss": 4.3, "perplexity": 75.8, "perplexity_interval": [None, None], "rows": 1, "bytes": 5000, "tokens": 9, "prompt_tokens": 7, "first_token_seconds": 0.1, "decode_tokens_per_second": 10.0, "decode_interval": [9.0, 11.0]}  # fmt: skip
CATEGORIES = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporary", "overhead"), 0.01)


def draw_plan(data: dict[str, Any]) -> str:
    figures, texts = read_record(PlanFigures, data["figures"]), read_record(plan_page.PlanTexts, data["texts"])
    return plan_page._render_page(plan_of(data["plan"]), figures, texts, data["recipe"])


PAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bench": (
        lambda data: bench_page._render_page(read_record(BenchResult, data)),
        {"name": "n", "machine": {"name": "m", "kind": "cpu", "threads": 1, "torch": "2"}, "steps": 3, "repeats": 2, "available_gib": None, "recipe": {},
         "verdicts": [{"technique": "lora", "speed": 1.0, "within_noise": True, "freed_gib": 0.1, "message": "v"}],
         "rows": [*map(bench_row, ("plain", "all", "without lora")), {"name": "x", "techniques": [], "failed": "why", "predicted": None}]},
    ),
    "compress": (
        lambda data: compress_page._render_page(read_record(CompressionResult, data)),
        {"path": "p", "bytes": 5000, "before": SIDE, "after": SIDE, "max_logit_difference": 0.1, "source": "s", "texts": "t", "calibration_rows": 1, "chosen": "int8", "chosen_because": "b", "notes": ["s"],
         "variants": [{"name": "int8", "method": "int8", "settings": {}, "what": "w", "bytes": 5000, "before": SIDE, "after": SIDE, "perplexity_rise": 0.1, "perplexity_rise_interval": [None, None],
                       "max_logit_difference": 0.1, "largest_logit": 1.0, "top_1_agreement": 1.0}]},
    ),
    "lr_range": (
        lambda data: lr_range_page._render_page(read_record(LrRange, data)),
        {"suggested": 1e-3, "lowest": 1e-2, "steepest": 1e-3, "present": 0.1, "diverged_at": None, "steps": 2,
         "points": [{"lr": lr, "loss": loss, "smoothed": loss, "gradient_norm": 1.0} for lr, loss in ((1e-3, 5.0), (1e-2, 4.0))]},
    ),
    "profile": (
        lambda data: profile_page._page(read_record(StepProfile, data), "n"),
        {"rank": 0, "ranks": 2, "device": "d", "first_step": 4, "steps": 2, "seconds": 1.0, "seconds_unprofiled": 0.9, "seconds_planned": 0.8,
         "phases": [{"name": name, "seconds": 0.2, "share": 0.2, "planned": None} for name in ("data", "forward", "backward", "optimizer", "other")],
         "gradients": {"name": "forward and backward", "seconds": 0.4, "share": 0.4, "planned": 0.3}, "kinds": [{"name": "matmul", "seconds": 1.0, "share": 1.0, "planned": 0.8}],
         "operators": [{"name": "aten::mm", "kind": "matmul", "calls": 2.5, "seconds": 1.0, "share": 1.0}], "launch_bound": 0.1, "waiting_for_data": 0.2,
         "transfers": [{"direction": "HtoD", "copies": 1.0, "bytes": 5e6, "seconds": 0.1}], "stores_scores": False,
         "machine": {"seconds": 1.0, "own_cores": 1.0, "other_cores": 1.0, "cpus": 2, "threads": 1, "alone": False},
         "findings": [{"part": "matmul", "seconds": 0.2, "text": "f"}, {"part": "data", "seconds": 0.1, "text": "g"}],
         "memory": [{"phase": "gradients", "gib": 1.5, "planned_gib": 1.4}], "out_of_memory": [{"phase": "data", "gib": 1.5, "planned_gib": None}]},
    ),
    "data": (
        data_page._render_page,
        {"name": "n", "blocked": ["b"], "preflight": ["p"], "template": "t", "layout": "text, l", "layout_kind": "text", "layout_reason": "l",
         "packing": {"documents": 1, "tokens": 9, "trained": 9, "rows": 1, "length": 8, "efficiency": 1.0, "cut": 0, "duplicates": 0},
         "counts": {"read": 1, "dropped": {"d": 1}, "validation": {"documents": 0}, "sources": [{"source": "s", "layout": "l", "read": 1, "tokens": 9, "weight": 1.0, "dropped": {"d": 1}}]},
         "lengths": {"longest": 9, "median": 9, "longer_than_a_row": 0, "bars": [{"from": 1, "to": None, "count": 1}]},
         "examples": [{"row": 0, "compared": False, "padding": 3, "documents": [{"where": "rows.jsonl:1", "spans": [["a", True, 1], ["b", False, 1]], "tokens": 2, "trained": 1, "label": "l"}]}]},
    ),
    "inference": (
        lambda data: inference_page._render_page(read_record(InferenceResult, data)),
        {"machine": {"name": "m", "kind": "cpu", "memory": 9, "torch": "2"}, "batches": [1], "lengths": [32], "tokens": 4, "repeats": 3,
         "models": [{"name": "a", "model": "p", "engine": "preheat", "parameters": 5, "weights_bytes": 9, "dtype": "float32", "loss": 5.0, "startup_seconds": 1.0, "beyond_weights_gib": 0.1, "failed": ""},
                    {"name": "b", "model": "q", "engine": "preheat", **dict.fromkeys(("parameters", "weights_bytes", "dtype", "loss", "startup_seconds", "beyond_weights_gib")), "failed": "why"}],
         "rows": [{"name": "a", "rows": 1, "length": 32, "first_token_seconds": SPREAD, "prefill_tokens_per_second": SPREAD, "decode_tokens_per_second": SPREAD, "ratio": SPREAD,
                   "first_token_ratio": SPREAD, "tokens_per_pass": 1.0, "cache_bytes": 9, "cache_predicted_bytes": 9.0, "same_text": 1.0}]},
    ),
    "net": (
        lambda data: nettest_page._render_page(read_record(NettestResult, data)),
        {"devices": 2, "hosts": 1, "backend": "gloo", "hardware": "h", "torch": "2", "names": ["h"], "seconds": 1.0, "stored": None, "expected": {"in_host": 1e9, "between_hosts": None, "share": {"all_reduce": 0.5}},
         "rows": [{"collective": "all_reduce", "backend": "gloo", "devices": 2, "hosts": 1, "bytes": 1024, "seconds": 0.1, "low": 0.1, "high": 0.2, "algorithm_bandwidth": 1e6, "bus_bandwidth": 1e6}],
         "pairs": [{"kind": "k", "ranks": [0, 1], "hosts": ["h", "h"], "latency": 0.1, "bandwidth": 1e6, "rows": [{"bytes": 4, "seconds": 0.1, "low": 0.1, "high": 0.2}]}]},
    ),
    "plan": (
        draw_plan,
        {"plan": values_of(0.02, 0.03, tokens_per_second=4000.0, recipe={"name": "n"}, device={"kind": "cuda", "name": "d", "memory": 9}, chosen="c", seconds_per_step=0.1, seconds_total=5.0, steps=7,
                           searched={"candidates": 3, "dry_runs": 2, "confirmed": True}, memory=CATEGORIES, phase_memory={"forward": CATEGORIES}, phases={"forward": 0.02},
                           alternatives=[{"what": "a", "recipe": {}, **SMALL, "seconds_per_step": 0.1, "mfu": 0.1, "tradeoff": "g"}], rejected=[{"recipe": "r", "reason": "w"}]),
         "figures": {"timeline": {"phases": [[0, "forward"]], "bytes": [[0, 0.01], [1, 0.02]]}, "roofline": {"peak": 1e12, "bandwidth": 1e9, "points": [{"operator": "o", "intensity": 5.0, "flops": 1e10, "share": 1.0}]},
                     "guesses": [{"what": "g; 1 row", "techniques": "g", "peak_gib": 0.2, "tokens_per_second": 4100.0}],
                     "tried": [{"what": "p; 1 row", "techniques": "p", **SMALL, "verdict": "fits", "best": True}, {"what": "q; 1 row", "techniques": "q", "peak_gib": 0.04, "tokens_per_second": 1.0, "verdict": "does not fit"}]},
         "texts": {"method": "c", "batch": "b", "changes": ["a"]}, "recipe": "name: n"},
    ),
}  # fmt: skip
# Text that the pages look up, and no user writes.
OURS = {
    "fits",
    "does not fit",
    "cuda",
    "plain",
    "all",
    "without lora",
    "exact",
    "forward",
    "all_reduce",
    "int8",
    "lora",
}


def spoiled(value: Any) -> Any:
    """The same data with hostile text for every text that a file or a name may hold."""
    if isinstance(value, dict):
        return {key: spoiled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spoiled(item) for item in value]
    return HOSTILE if isinstance(value, str) and value and value not in OURS else value


class Tags(HTMLParser):
    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def harmless(source: str) -> None:
    found = Tags(source)
    assert not found.open, "every element is closed"
    assert not {tag for tag, _ in found.tags} & {"script", "img", "link", "iframe"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", source)
    assert len(source) < 1_000_000


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_any_text_and_obeys_none(name: str) -> None:
    draw, data = PAGES[name]
    harmless(draw(copy.deepcopy(data)))
    harmless(draw(spoiled(data)))


VALUES = [None, True, 0, -1, 10**400, 1e300, -1e-300, math.nan, math.inf, "", "x", HOSTILE, [], [None], [[1]], {}, {"a": {"b": None}}, {"value": "x"}]  # fmt: skip


def run_files(path: Path) -> dict[str, Any]:
    """A run of a few steps, and the documents of its files."""
    writer = Writer(path)
    recipe = {"name": "n", "seed": 1, "model": {"path": "m"}, "data": {"source": ["a", {"source": "b"}], "validation": 0.1}, "batch": {"size": 2, "seq_len": 8}, "optimizer": {"lr": 1e-3},
              "schedule": {"kind": "wsd", "warmup_ratio": 0.1}, "stop": {"max_steps": 3, "hours": 1}, "techniques": {"lora": {}, "gradient_accumulation": {"steps": 2}}}  # fmt: skip
    writer.write_text("recipe.yaml", json.dumps(recipe))
    parts = {"metrics": {"loss": {"value": 4.5, "low": 4.0, "high": 5.0}}, "rows": 7, "truncated": 1}
    tasks = {"needle": {**parts, "parts": [{"length": 8, "depth": 0.5, "value": 0.5}]}, "places": {**parts, "parts": [{"start": 0, "end": 4, "value": 2.0, "low": 1.0, "high": 3.0}]}}  # fmt: skip
    documents = {
        "plan.json": values_of(0.02, 8.0, tokens_per_second=4000.0, memory=CATEGORIES, phases={"forward": 0.02}, steps=3, mfu=0.1),
        "changes.json": {"lora": [{"what": "w", "count": 2, "kernel": "k"}]},
        "environment.json": {"device": "cpu", "processes": 2, "threads": 1, "machine": {"device": "d", "memory_gib": 3.0}, "command": "c"},
        "evaluation.json": {"step": 3, "before": {"texts": {"v": parts}}, "after": {"texts": {"v": parts}, "tasks": tasks}, "difference": {"texts": {"v": parts}}},
        "metrics": [{"step": n, "loss": 3.0 / n, "lr": 1e-3, "gradient_norm": 1.0, "tokens": n, "tokens_per_second": 5.0, "memory": 2**20, "elapsed": 1.0, "expert_loads": [1.0, 2.0]} for n in (1, 2, 3)],
        "evaluations": [{"step": n, "validation_loss": 3.0, "forgetting_loss": 2.0, "tasks": {"t": {"accuracy": 0.5}}} for n in (0, 3)],
        "events": [{"kind": "started"}, {"kind": "baseline", "vocabulary": 9, "unigram": 3.0}, {"kind": "fallback", "step": 1, "set": ["batch.size=1"], "changed": ["t"], "cause": "w", "was_gib": 1.0, "peak_gib": 0.5},
                   {"kind": "sample", "prompt": "p", "text": "t"}, {"kind": "sample", "step": 0, "prompt": [{"role": "user", "content": "hi"}], "text": "u"},
                   {"kind": "measured", **SMALL, "spread": [1, 2], "usage": {"device_hours": 2.0}}, {"kind": "checkpoint", "step": 3, "seconds": 0.5}, {"kind": "finished", "steps": 3, "loss": 1.0}],
        "system": [{"step": n, "time": n, "cpu_percent": 1.0, "usage": {"device_hours": n, "energy_kwh": n / 2, "energy_sources": ["nvml"], "cost": 2.0 * n, "currency": "EUR", "price_per_hour": 2.0}} for n in (1, 2)],
    }  # fmt: skip
    writer.close()
    return documents


def mutated(value: Any, chance: float, random: random.Random) -> Any:
    """The same data with some values replaced by those that no one expects, and some keys left out."""
    if random.random() < chance:
        return random.choice(VALUES)
    if isinstance(value, dict):
        return {key: mutated(item, chance, random) for key, item in value.items() if random.random() > chance / 2}
    return [mutated(item, chance, random) for item in value] if isinstance(value, list) else value


def extreme(plan: dict[str, Any], random: random.Random) -> dict[str, Any]:
    """A plan that is read, with very large and very small numbers and hostile names."""
    values = {**plan, "memory": {HOSTILE: 1e300, "parameters": 0.0}, "phases": {HOSTILE: 1e-300}}
    for key in ("tokens_per_second", "seconds_per_step", "mfu", "available_gib", "seconds_total", "flops_per_step"):
        values[key] = random.choice([0.0, 1e-300, 1e300, -1.0])
    assert plan_of(values)
    return values


def damaged(path: Path, seed: int, chance: float = 0.12) -> None:
    """Writes a run whose files hold JSON, but not what a run writes; lines stay what the reader takes: with a step, a kind."""
    rng = random.Random(seed)
    documents = run_files(path)
    recipe = mutated(json.loads((path / "recipe.yaml").read_text()), chance, rng)
    (path / "recipe.yaml").write_text(json.dumps(recipe if rng.random() > 0.1 else [recipe]))
    for name in ("plan.json", "changes.json", "environment.json", "evaluation.json"):
        # A plan with one such value is left out as a whole: half of the runs have one of extreme numbers.
        if name == "plan.json" and seed % 2:
            (path / name).write_text(json.dumps(extreme(documents[name], rng)))
        elif rng.random() > 0.1:
            (path / name).write_text(json.dumps(mutated(documents[name], chance, rng)))
    for file, key, names in (
        ("events.jsonl", "kind", ("events",)),
        ("metrics.jsonl", "step", ("metrics", "evaluations")),
        ("system.jsonl", "step", ("system",)),
    ):
        lines = []
        for name in names:
            for line in documents[name]:
                changed = {
                    k: mutated(v, chance, rng) for k, v in line.items() if k != key and rng.random() > chance / 2
                }
                required = (
                    {"loss": changed.get("loss", 1.0)} if name == "metrics" else {"time": rng.choice([5.0, 1e300, "x"])}
                )
                if name == "evaluations":
                    required = {}
                    changed.pop("loss", None)
                lines.append(json.dumps({key: line[key], **required, **changed}))
        (path / file).write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("seed", range(12))
def test_a_report_is_drawn_of_whatever_a_run_holds(tmp_path: Path, seed: int) -> None:
    damaged(tmp_path / "run", seed)
    collected = report_data.collect(tmp_path / "run")
    harmless(run_page.render(collected))


def test_a_report_begins_with_what_was_asked_for(tmp_path: Path) -> None:
    documents = run_files(tmp_path / "run")
    for name in ("plan.json", "environment.json"):
        (tmp_path / "run" / name).write_text(json.dumps(documents[name]))
    source = run_page.render(report_data.collect(tmp_path / "run"))
    head = source[: source.index("<section")]
    shown = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", head[head.index('class="setup"') :]))
    assert {key: text.replace("\u00a0", " ") for key, text in shown.items()} == {
        "Model": "m",
        "Data": "a and b, 10 % held out",
        "Batch of a step": "2 sequences, 16 tokens, in 2 micro-batches",
        "Sequence length": "8 tokens",
        "Learning rate": "0.001, wsd after 10 % warm-up",
        "Steps": "3, stop.hours 1",
        "Seed": "1",
        "Techniques": "lora, gradient_accumulation",
        "Device": "d, 2 processes, 1 thread",
    }


def test_a_table_has_one_unit_and_no_names_of_json_keys(tmp_path: Path) -> None:
    documents = run_files(tmp_path / "run")
    for name in ("plan.json", "changes.json", "environment.json", "evaluation.json"):
        (tmp_path / "run" / name).write_text(json.dumps(documents[name]))
    (tmp_path / "run/events.jsonl").write_text(
        "".join(json.dumps({"time": 5.0, **e}) + "\n" for e in documents["events"])
    )
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in documents["metrics"]))
    source = run_page.render(report_data.collect(tmp_path / "run"))
    cells = re.findall('<td class="n">(.*?)</td>', source)
    assert len(cells) > 20
    assert not [cell for cell in cells if re.search("[KMG]iB", cell)], "the unit is in the head of the column"
    text = re.sub("<[^>]*>", " ", source[: source.index("<details>")])
    assert not re.findall(
        r"\b(?:peak_gib|tokens_per_second|seconds_per_step|memory_gib|validation_loss|was_gib)\b", text
    )
    assert "not recorded" not in text


@pytest.mark.parametrize(
    "command", [bench_page.write_bench, compress_page.write_compress, inference_page.write_inference]
)
def test_a_file_of_figures_that_lacks_a_key_is_one_line(tmp_path: Path, command: Any) -> None:
    name = {"write_bench": "bench", "write_compress": "compress", "write_inference": "inference"}[command.__name__]
    for text in ("[]", "null", "{}", '{"rows": null}', '{"cut', "\xff"):
        (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(RunError, match=rf"{name}\.json: is damaged") as caught:
            command(tmp_path)
        assert "\n" not in str(caught.value)


RANGES = [(0, 1), (0, 1e-9), (1e-9, 1.001e-9), (0, 3e12), (-5, -4.999), (-1e-5, 1e-5), (7, 7), (0, 0), (75.80, 75.86), (1234.5, 1234.6), (-3, 1e6), (1e12, 1e12 + 8), (0.003, 0.0031), (-1e-300, 1)]  # fmt: skip


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_differ_and_say_where_they_are(low: float, high: float, logarithmic: bool) -> None:
    from matplotlib.figure import Figure

    if logarithmic and low <= 0:
        pytest.skip("a logarithm of nothing")
    axes = Figure().add_subplot()
    if logarithmic:
        axes.set_yscale("log")
    axes.plot([0, 1], [low, high])
    svg.set_ticks(axes.yaxis)
    bottom, top = axes.get_ylim()
    places = [v for v in axes.yaxis.get_major_locator()() if bottom <= v <= top]
    labels = axes.yaxis.get_major_formatter().format_ticks(places)
    assert len(places) >= 2
    assert len(set(labels)) == len(labels)
    gap = min(b - a for a, b in itertools.pairwise(places))
    for label, place in zip(labels, places, strict=True):
        assert abs(float(label.replace(",", "").replace("\u2212", "-")) - place) < gap / 10
        assert label != "\u22120"


def test_labels_of_a_few_ranges() -> None:
    assert svg.format_tick_labels([0.0, 0.0025, 0.005]) == ["0", "0.0025", "0.005"]
    assert svg.format_tick_labels([0.0, 20000.0]) == ["0", "20,000"]
    assert svg.format_tick_labels([-0.0, -2e-5]) == ["0", "\u22122e-5"]
    assert svg.format_tick_labels([75.80, 75.82]) == ["75.8", "75.82"]


def test_no_mark_is_clipped_by_the_frame_and_any_name_can_be_drawn() -> None:
    lines = [svg.Curve(HOSTILE, [1, 8], [0.0, 5.0], style="points"), svg.Curve("汉字 $x_$", [0], [3.0], style="named")]
    drawing = svg.draw_curves("x", lines, "what it shows", from_zero=True)
    marks = re.findall(r"<g[^>]*clip-path[^>]*>\s*<use", drawing)
    assert drawing.count("<use") >= 2
    assert not marks
    assert "汉字 $x_$" in drawing
    svg.draw_by_size("y", lines[:1], "sizes", format=str)
    svg.draw_spans(
        "z", [svg.Span(HOSTILE, 0, 1, "series-1"), svg.Span("none", 1, 1 - 1.5e-05, "series-2")], "w", unit="GiB"
    )
    assert "1.5e-05" not in svg.draw_spans(
        "z", [svg.Span("a", 0, 1, "ink"), svg.Span("b", 1, 1 - 1.5e-05, "ink")], "w", unit="GiB"
    )


def test_a_plans_page_says_what_it_rests_on_in_the_prices_currency() -> None:
    draw, data = PAGES["plan"]
    cost = {"hour": 0.4, "million_tokens": 0.00496, "run": None}
    (other,) = data["plan"]["alternatives"]
    plan = {
        **data["plan"], "peak_gib_interval": [0.018, 0.022], "tokens_per_second_interval": [2680.0, 4680.0], "cost": cost, "currency": "EUR",
        "alternatives": [{**other, "cost": cost}],
    }  # fmt: skip
    texts = {
        "method": "lora, compile", "batch": "micro-batches of 8 sequences", "assumed": ["2,048 tokens a sequence (--length)"], "startup": "compile pays from 900 steps on",
        "command": ["preheat", "plan", "a b", "--out", "r.yaml"], "changes": ["with lora"],
    }  # fmt: skip
    shown = {**data, "plan": plan, "texts": texts}
    source = draw(shown)
    harmless(source)
    text = re.sub("<[^>]*>", " ", source).replace("\u00a0", " ")
    for part in (
        "20.5 MiB of 30.7 MiB (18.4 MiB to 22.5 MiB in nine of ten runs); 4,000 tokens a second (2,680 to 4,680",
        "lora, compile; numerics unchanged",
        "micro-batches of 8 sequences",
        "compile pays from 900 steps on",
        "2,048 tokens a sequence (--length)",
        "preheat plan &#x27;a b&#x27; --out r.yaml",
        "4.96 EUR",
        "with lora",
    ):
        assert part in text, part
    assert text.count("30.7 MiB of the device") == 2, "the line of the device is named in both charts"


def test_a_planned_recipe_says_what_differs_from_the_defaults() -> None:
    from types import SimpleNamespace

    from preheat import recipe as recipes
    from preheat.cli.plan_output import render_recipe

    text = "name: n\nmodel:\n  size: 15M\nbatch:\n  seq_len: 64\nstop:\n  max_steps: 3\ntechniques:\n  lora:\n    rank: 4\n  chunked_loss: {}\n"
    recipe = recipes.parse(text)
    question: Any = SimpleNamespace(checkpoint=None, from_user=True)
    said = render_recipe(replace(plan_of(values_of(1.0, 8.0)), recipe=recipes.to_values(recipe)), question)
    assert "".join(line for line in said.splitlines(keepends=True) if not line.lstrip().startswith("#")) == text
    recipe, question = (
        recipes.parse("model: {preset: gpt2}\nstop: {max_steps: 1}"),
        SimpleNamespace(checkpoint="org/model", from_user=False),
    )
    assert render_recipe(replace(plan_of(values_of(1.0, 8.0)), recipe=recipes.to_values(recipe)), question).endswith(
        "# data: {source: DATA.jsonl}\n"
    )
    assert (
        recipes.parse(
            render_recipe(replace(plan_of(values_of(1.0, 8.0)), recipe=recipes.to_values(recipe)), question)
        ).model.path
        == "org/model"
    )


def test_markup_of_figures_and_tables_stands_in_one_module() -> None:
    for file in Path(page.__file__).parent.glob("*.py"):
        tags = re.findall("<!doctype|<figure|<table|<t[rhd]|<section|<header|class=.legend", file.read_text("utf-8"))
        assert bool(tags) == (file.name == "page.py"), (file.name, tags)


def test_parts_escape_text_and_leave_out_what_is_empty() -> None:
    legend = [page.LegendEntry("a<b", "series-2"), page.LegendEntry("raw", "ink", "raw")]
    assert page.figure("T&", "c<", "<svg />", legend) == (
        "<figure><figcaption><h3>T&amp;</h3><p>c&lt;</p></figcaption>"
        '<ul class="legend"><li class="line" style="--c: var(--series-2)">a&lt;b</li>'
        '<li class="raw" style="--c: var(--ink)">raw</li></ul><svg /></figure>'
    )
    assert page.figure("", "c", "") == "<figure><figcaption><p>c</p></figcaption></figure>"
    assert [page.section("a", "A", ""), page.two_columns("", ""), page.tiles([("L", MISSING, "b")])] == ["", "", ""]
    rows = [page.named_row("<i>", page.number_cell("1 GiB", "2 to 3")), page.failed_row("x", "<why>", 2)]
    assert page.table(("name", "size"), rows) == (
        '<div class="scroll"><table><thead><tr><th scope="col">name</th><th scope="col" class="n">size</th></tr></thead>'
        '<tbody><tr><th scope="row">&lt;i&gt;</th><td class="n">1\u00a0GiB<br><span class="small">2 to 3</span></td></tr>'
        '<tr><th scope="row">x</th><td class="free bad" colspan="1">&lt;why&gt;</td></tr></tbody></table></div>'
    )
    many = page.table((), [page.row(page.cell(str(n))) for n in range(1000)])
    assert many.count("<tr>") == 401
    assert "600 rows left out" in many
