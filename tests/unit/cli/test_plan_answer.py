"""The answer of `preheat plan`: one screen, and on it what a reader decides by."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import typer
from rich.console import Console

from preheat import recipe as recipes
from preheat.cli.options.plan_options import TrainingPlanOptions, parse_price
from preheat.cli.options.subject import Subject, find_subject
from preheat.cli.plan_output import finish
from preheat.cli.views.next_command import build_next_command, build_smaller_command, list_assumed_settings
from preheat.cli.views.plan_answer import LINES, WIDTH, Answer, build_page_texts, wrap_command
from preheat.cli.views.plan_view import build_details, build_serving
from preheat.core.plan import Verdict
from preheat.errors import RecipeError
from tests.unit.plans import CATEGORIES, plan_of, values_of


def techniques(text: str) -> dict[str, Any]:
    return recipes.to_values(recipes.parse(f"stop: {{max_steps: 1}}\ntechniques: {text}"))["techniques"]


def result(subject: Subject, technique_text: str, peak: float, has: float, **more: Any) -> dict[str, Any]:
    """What `preheat plan --json` prints, with the figures of real plans."""
    values = recipes.to_values(subject.recipe) | {"techniques": techniques(technique_text)}
    speed, tokens = 2379.2, subject.recipe.batch.size * subject.recipe.batch.seq_len
    return values_of(peak, has) | {
        "seconds_per_step": tokens / speed, "tokens_per_step": tokens, "cost": None,
        "energy": {"kilowatts": 0.45, "million_tokens": 0.0525, "run": None}, "devices": 1, "chosen": "c",
        "numerics": "rounding", "recipe": values, "alternatives": [], "rejected": [],
        "searched": {"candidates": 143, "dry_runs": 9, "confirmed": True, "interrupted": False}, **more,
    }  # fmt: skip


QLORA = "{lora: {}, nf4: {}, mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {rows: 512}, compile: {when: always}, gradient_accumulation: {steps: 16}}"  # fmt: skip
LAYOUT = "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, fused_operators: {}, tensor_parallel: {degree: 2}, fsdp: {}}"  # fmt: skip
STAGES = "{mixed_precision: {mode: bf16_weights}, pipeline_parallel: {degree: 4}, fsdp: {}}"


def alternative(text: str, gives_up: str) -> dict[str, Any]:
    return {"what": "w", "recipe": techniques(text), "peak_gib": 17.4, "tokens_per_second": 2307.0, "seconds_per_step": 14.2, "mfu": 0.4, "tradeoff": gives_up, "cost": None, "energy": None}  # fmt: skip


def qlora() -> tuple[Subject, dict[str, Any]]:
    subject = find_subject("Qwen/Qwen3-8B", method="qlora")
    others = [
        alternative(QLORA.replace("compile", "activation_checkpointing: {mode: budget, budget: 0.5}, compile").replace("steps: 16", "steps: 8"), "3 % slower, 778 MiB more"),
        alternative(QLORA.replace("compile: {when: always}", "fused_operators: {}"), "6 % slower, as much memory"),
        alternative(QLORA.replace("compile: {when: always}", "fused_operators: {}, activation_checkpointing: {mode: budget}"), "9 % slower, 2.10 GiB less"),
    ]  # fmt: skip
    export = dict(zip(CATEGORIES, (5.8, 0.0, 0.3, 0.0, 24.9, 0.55), strict=True))
    return subject, result(subject, QLORA, 16.634, 24.0, alternatives=others, export=export)


def cluster(text: str = LAYOUT) -> tuple[Subject, dict[str, Any]]:
    subject = find_subject("llama-3.1-70b", devices=64)
    others = [
        alternative(LAYOUT.replace("fused_operators: {}", "activation_checkpointing: {}"), "3 % slower, 25.30 GiB less"),
        alternative(LAYOUT.replace("tensor_parallel: {degree: 2}", "compile: {when: always}, chunked_loss: {rows: 4096}"), "8 % slower, 6.60 GiB less, starts 60 s later"),
        alternative(LAYOUT.replace("tensor_parallel: {degree: 2}", "compile: {when: always}, chunked_loss: {rows: 4096}, activation_checkpointing: {}"), "9 % slower, 20.40 GiB less, starts 60 s later"),
    ]  # fmt: skip
    device = {"kind": "cuda", "name": "H100", "memory": 2**36, "expandable": True}
    size = {"total": 70553706496, "active": 70553706496, "trained": 70553706496}
    return subject, result(subject, text, 79.998, 80.0, alternatives=others, devices=64, device=device, parameters=size)


def frontier() -> tuple[Subject, dict[str, Any]]:
    """405B on 16,384 devices."""
    subject = find_subject("llama-3.1-405b", devices=16384)
    mine = "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, fused_operators: {}, activation_checkpointing: {mode: budget, budget: 0.5}, tensor_parallel: {degree: 4}, fsdp: {}}"  # fmt: skip
    sequence = "tensor_parallel: {degree: 4, sequence_parallel: true}"
    others = [
        alternative(mine.replace("tensor_parallel: {degree: 4}", sequence), "1 % slower, 23.35 GiB less"),
        alternative(mine.replace("mode: budget, budget: 0.5}, tensor_parallel: {degree: 4}", f"}}, {sequence}"), "1 % slower, 26.13 GiB less"),
        alternative(mine.replace("tensor_parallel: {degree: 4}", f"context_parallel: {{}}, {sequence}"), "3 % slower, 24.70 GiB less"),
    ]  # fmt: skip
    device = {"kind": "cuda", "name": "H100", "memory": 2**36, "expandable": True}
    size = {"total": 405853388800, "active": 405853388800, "trained": 405853388800}
    return subject, result(
        subject, mine, 50.91, 80.0, alternatives=others, devices=16384, device=device, parameters=size
    )


def cpu() -> tuple[Subject, dict[str, Any]]:
    subject = find_subject("demo")
    device = {"kind": "cpu", "name": "AMD EPYC", "memory": 2**36}
    text = "{mixed_precision: {}, muon: {}, efficient_attention: {}, chunked_loss: {rows: 512}, gradient_accumulation: {steps: 2}}"  # fmt: skip
    searched = {"candidates": 0, "dry_runs": 0, "confirmed": False, "interrupted": False}
    return subject, result(
        subject, text, 0.142, 23.17, device=device, steps=385, seconds_total=66.2, energy=None, searched=searched,
        matrix_rate=4.25e11, pace=3.95, contended=True, heap="no C++ compiler", settled={"compile.when": "never"},
    )  # fmt: skip


def too_large() -> tuple[Subject, dict[str, Any]]:
    subject = find_subject("Qwen/Qwen3-8B")
    others = [
        {**alternative(QLORA, "trains an adapter"), "options": ["--method", "lora"]},
        {**alternative(QLORA, "trains an adapter on a base in 4 bits"), "options": ["--method", "qlora"]},
    ]
    text = "{efficient_attention: {}, fused_operators: {}, activation_checkpointing: {}, chunked_loss: {rows: 4096}, optimizer_offload: {weights: bf16}, gradient_accumulation: {steps: 16}}"  # fmt: skip
    return subject, result(subject, text, 33.9, 24.0, alternatives=others)


SHARED = {"alone": False, "seconds": 0.3, "own_cores": 0.5, "other_cores": 1.5, "cpus": 2, "threads": 2}


def shared() -> tuple[Subject, dict[str, Any]]:
    subject, plan = cpu()
    return subject, {**plan, "now": {"tokens_per_second": 1234.5, "seconds_per_step": 3.3, "machine": SHARED}}


PLANS = {"shared": shared, "qlora": qlora, "cluster": cluster, "frontier": frontier, "cpu": cpu, "too large": too_large}
ASKED = {
    "qlora": ["preheat", "plan", "Qwen/Qwen3-8B", "--gpu", "RTX-4090", "--method", "qlora"],
    "cluster": ["preheat", "plan", "llama-3.1-70b", "--gpu", "H100", "--count", "8", "--nodes", "8"],
    "frontier": ["preheat", "plan", "llama-3.1-405b", "--gpu", "H100", "--count", "8", "--nodes", "2048"],
    "cpu": ["preheat", "plan", "demo"],
    "shared": ["preheat", "plan", "demo"],
    "too large": ["preheat", "plan", "Qwen/Qwen3-8B", "--gpu", "RTX-4090"],
}


def options_of(what: str | None, **more: Any) -> TrainingPlanOptions:
    names = [field.name for field in fields(TrainingPlanOptions)]
    return TrainingPlanOptions(**{**dict.fromkeys(names), "what": what, "set": (), "nodes": 1, **more})


def screen(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """The lines that the command prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    subject, plan = PLANS[name]()
    asked = ASKED[name]
    assumed = [] if name in ("cpu", "shared") else list_assumed_settings(subject, plan_of(plan), asked, per_host=8)
    command = build_next_command(plan_of(plan), subject, options_of(asked[2]), asked, per_host=8)
    with nullcontext() if plan_of(plan).fits else pytest.raises(typer.Exit):
        finish(plan_of({**plan, **more}), subject, json=False, assumed=assumed, command=command)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("priced", [False, True])
def test_an_answer_is_one_screen(
    name: str, priced: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {"hour": 25.6, "million_tokens": 2.99, "run": None}
    lines = screen(name, capsys, monkeypatch, **({"cost": cost, "currency": "EUR"} if priced else {}))
    assert len(lines) <= LINES == 24, "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH == 80
    labels = [line[:10].strip() for line in lines if line[:1].strip()]
    assert labels[-1] == "next"
    wanted = {"memory", "batch", "method"} | ({"speed", "time"} if name != "too large" else {"short by"})
    wanted |= {"instead", "assumed"} if name not in ("cpu", "shared") else {"note"}
    wanted |= {"now"} if name == "shared" else set()
    wanted |= {"cost"} if priced and name != "too large" else set()
    assert wanted <= set(labels)
    assert "nine of ten runs" in lines[1]


def test_the_answer_states_its_assumptions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(screen("qlora", capsys, monkeypatch))
    flat = " ".join(text.split())
    for part in (
        "Qwen3-8B (8.23B parameters, 43.6M trained) on RTX-4090: fits",
        "16.63 of 24.00 GiB (14.64 to 18.63 GiB in nine of ten runs)",
        "2,379 tokens/s (1,594 to 2,784), 50 % of the device's 165 TFLOP/s",
        "117 h (4.9 days) per billion tokens",
        "micro-batches of 1 sequence of 2,048 tokens, 16 a step",
        # The stated method is part of it, not only what the search added.
        "lora, nf4, mixed_precision (bf16_weights), efficient_attention, chunked_loss (rows 512), compile",
        "2,048 tokens a sequence (--length), 32,768 tokens a step (--batch-tokens)",
        "6 % slower, as much memory: with fused_operators, without compile",
        "export runs on the host: a later preheat export needs 31.55 GiB of its memory",
    ):
        assert part in flat, part
    assert "--method" not in text.split("assumed")[1].split("instead")[0], "it was stated"
    assert text.endswith("next      preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method qlora --out \\\n            recipe.yaml")  # fmt: skip


@pytest.mark.parametrize(
    ("start", "pays", "parts"),
    [
        (60.0, 1500, ["the first step comes 60 s later, after compiling", "compile pays from 1,500 steps on"]),
        (0.0, 1500, ["compile pays from 1,500 steps on"]),
        (60.0, None, ["the first step comes 60 s later, after compiling"]),
    ],
)
def test_the_answer_says_from_how_many_steps_compiling_pays(start: float, pays: int | None, parts: list[str]) -> None:
    startup = {"techniques": ["compile"], "pays_from_steps": pays}
    plan = PLANS["qlora"]()[1] | {"seconds_to_start": start, "startup": startup}
    (said,) = (entry.text for entry in Answer(plan_of(plan), "a model")._build_entries(None) if entry.label == "time")
    assert said.split("; ")[2:] == parts
    assert build_page_texts(plan_of(plan)).startup == "; ".join(parts)  # on the page, too


@pytest.mark.parametrize(
    ("alone", "text"),
    [
        (False, ", because other processes use 1.5 of 2 cores; the speed above assumes an idle machine"),
        (None, ": slower than when it was calibrated; to measure again: preheat calibrate"),
        (
            True,
            ": slower than when it was calibrated, though no other process uses its cores; to measure again: "
            "preheat calibrate",
        ),
    ],
)
def test_speed_now_and_on_an_idle_machine(alone: bool | None, text: str) -> None:
    _, plan = shared()
    plan["contended"] = False
    plan["now"] |= {"machine": SHARED | {"alone": alone, "other_cores": {None: None, True: 0.1, False: 1.5}[alone]}}
    flat = " ".join(" ".join(line for line, _ in Answer(plan_of(plan), "m").lines()).split())
    assert f"now 1,234 tokens/s{text} time " in flat
    busy = " ".join(" ".join(line for line, _ in Answer(plan_of({**plan, "contended": True}), "m").lines()).split())
    estimated = text.replace("assumes", "is an estimate for")
    assert f"now 1,234 tokens/s{estimated} time " in busy
    assert "speeds may be too low by a third" in busy, "it was calibrated beside other work"
    # The interval is that of an idle machine.
    assert f"speed {plan['tokens_per_second']:,.0f} tokens/s (" in flat


def test_a_run_of_one_step_is_written_so() -> None:
    _, plan = cpu()
    one, two = (" ".join(line for line, _ in Answer(plan_of({**plan, "steps": n}), "m").lines()) for n in (1, 2))
    assert re.search(r"for 1 step\b", one)
    assert re.search(r"for 2 steps\b", two)


@pytest.mark.parametrize("name", ["qlora", "cluster", "frontier"])
def test_nothing_of_an_answer_is_cut(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = screen(name, capsys, monkeypatch)
    assert not any(line.endswith("…") for line in lines if not line.startswith("  free")), "\n".join(lines)
    start = next(n for n, line in enumerate(lines) if line.startswith("instead"))
    assert sum(" slower, " in line for line in lines[start:]) == len(PLANS[name]()[1]["alternatives"])


def test_alternatives_give_up_lines_from_the_last_one() -> None:
    _, plan = cluster()
    roomy = [line for line, _ in Answer(plan_of(plan), "m").lines()]
    tight = [line for line, _ in Answer(plan_of(plan), "m", below=6).lines()]
    assert len(tight) <= LINES - 6
    first = next(line for line in roomy if line.startswith("instead"))[:60]
    assert any(line.startswith(first) for line in tight)
    assert "9 % slower" in "\n".join(roomy)
    # Never the verdict, nor the batch.
    least = [line for line, _ in Answer(plan_of(plan), "m" * 500, below=LINES).lines()]
    assert least[0].endswith(": does not fit safely"), "the peak is 99.998 % of the device's memory"
    assert {"memory", "speed", "time", "batch"} <= {line[:10].strip() for line in least}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [40, 60, 79])
def test_a_narrow_terminal_gets_whole_lines(name: str, width: int) -> None:
    lines = [line for line, _ in Answer(plan_of(PLANS[name]()[1]), "m").lines(width)]
    assert max(map(len, lines)) <= width
    assert len(lines) <= LINES


def test_cached_memory_that_the_allocator_releases_need_not_fit() -> None:
    full = plan_of(values_of(80.0, 80.0, peak_gib_interval=[70.0, 90.0], allocator_retries=True))
    full = replace(full, overhead={"context": 0.5, "allocator": 20.0})
    assert full.verdict is Verdict.TIGHT
    assert full.chance == pytest.approx(replace(full, available_gib=80 * 80 / 60, overhead={}).chance)
    assert replace(full, overhead={"allocator": 3.0}).verdict is Verdict.UNSAFE  # 77 GiB, 96 % of the memory


@pytest.mark.parametrize(
    ("share", "verdict", "chance"),
    [
        (0.80, Verdict.FITS, 1.0),
        (0.893, Verdict.TIGHT, 0.95),  # the 95th percentile is just above the memory
        (0.97, Verdict.TIGHT, None),
        (0.9701, Verdict.UNSAFE, None),
        (1.0, Verdict.UNSAFE, 0.5),
        (1.0001, Verdict.NO, 0.5),
        (1 / 0.88, Verdict.NO, 0.05),
    ],
)
def test_the_verdict_and_the_chance_to_fit(share: float, verdict: Verdict, chance: float | None) -> None:
    subject, plan = qlora()
    plan = result(subject, QLORA, share * 24.0, 24.0)
    assert plan_of(plan).verdict is verdict
    stated = plan_of(plan).chance
    # The reference: a normal distribution from the standard library.
    low, high = plan["peak_gib_interval"]
    assert stated == pytest.approx(
        NormalDist((low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.95)).cdf(24.0), abs=1e-4
    )
    if chance is not None:
        assert stated == pytest.approx(chance, abs=0.005)
    lines = [line for line, _ in Answer(plan_of(plan), "m").lines()]
    assert lines[0].endswith(f": {verdict}")
    assert any(f"the chance to fit is {100 * stated:.0f} %" in line for line in lines) == (
        verdict in (Verdict.TIGHT, Verdict.UNSAFE)
    )


def test_a_limit_below_the_process_is_named() -> None:
    _, plan = cpu()
    text = " ".join(line for line, _ in Answer(plan_of({**plan, "fits": False, "available_gib": 2**-30}), "m").lines())
    assert "the process itself takes all that is there" in text
    assert "the limit must exceed what the process takes" in text


def test_layout_and_micro_batch_of_each_rank() -> None:
    _, plan = cluster()
    text = " ".join(" ".join(line for line, _ in Answer(plan_of(plan), "m").lines()).split())
    # 64 rows on 32 data-parallel ranks.
    assert (
        "micro-batches of 2 sequences of 2,048 tokens, 1 a step on each rank; 64 devices = shard 32 x tensor 2" in text
    )
    _, plan = cluster(STAGES)
    assert "70.6B parameters, in one of 4 stages" in Answer(plan_of(plan), "m").lines()[0][0]


def test_an_interrupted_search_does_not_say_that_nothing_fits() -> None:
    _, plan = too_large()
    plan |= {"alternatives": [], "searched": {**plan["searched"], "interrupted": True}}
    lines = [line for line, _ in Answer(plan_of(plan), "m").lines()]
    assert lines[0].endswith(": nothing fits so far")
    text = " ".join(" ".join(lines).split())
    assert "9.90 GiB; a candidate that was not tried yet may fit" in text
    assert "the least of" not in text
    assert build_smaller_command(plan_of(plan), ASKED["too large"], searched=True) == ASKED["too large"]


def test_an_interrupted_search_prints_the_best_so_far_and_writes_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    subject, plan = cluster()
    plan["searched"] = plan["searched"] | {"interrupted": True}
    with pytest.raises(typer.Exit) as ended:
        finish(plan_of(plan), subject, json=False, out=Path("r.yaml"), html=Path("p.html"))
    assert ended.value.exit_code == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "recipe    r.yaml"
    text = " ".join(" ".join(lines).split())
    assert "interrupted: 143 candidates, 9 dry-run; this is the best so far; the page p.html was not written" in text


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    _, plan = too_large()
    asked = ASKED["too large"]
    text = " ".join(" ".join(line for line, _ in Answer(plan_of(plan), "m").lines()).split())
    assert "9.90 GiB, the least of 143 candidates; would fit in 33.90 GiB, or split over at least 2" in text
    assert "--method lora: fits in 17.40 GiB, 2,307 tokens/s; trains an adapter" in text
    assert "tokens/s (" not in text, "no speed of what cannot run"
    assert build_smaller_command(plan_of(plan), asked, searched=True) == [*asked, "--method", "lora"]
    # A number of devices that was planned replaces the least that memory alone allows.
    known = {**plan, "alternatives": [*plan["alternatives"], {**plan["alternatives"][0], "options": ["--count", "4"]}]}
    assert "split over" not in " ".join(line for line, _ in Answer(plan_of(known), "m").lines())
    plan["alternatives"] = []
    assert build_smaller_command(plan_of(plan), asked, searched=True)[-2:] == ["--allow", "different"]
    beyond = [*asked, "--allow", "different", "--count", "2"]
    plan["devices"] = 2
    assert build_smaller_command(plan_of(plan), beyond, searched=True) == [
        *asked,
        "--allow",
        "different",
        "--count",
        "4",
    ]
    assert build_smaller_command(plan_of(plan), ["preheat", "plan", "r.yaml"], searched=False)[-2:] == [
        "--aim",
        "fastest",
    ]


@pytest.mark.parametrize(
    ("name", "out", "more", "wanted"),
    [
        ("qlora", None, [], "preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method qlora --out recipe.yaml"),
        ("qlora", "r.yaml", [], "preheat train r.yaml --set data.source=DATA.jsonl --dry-run --gpu RTX-4090"),
        ("cluster", "r.yaml", [], "preheat launch r.yaml --set data.source=DATA.jsonl --scheduler slurm --nodes 8 --gpus-per-node 8 -o job.sbatch"),
        ("cpu", None, [], "preheat train demo --set a.b=1"),
        ("cpu", None, ["--gpu", "G"], "preheat train demo --set a.b=1 --dry-run --gpu G"),
    ],
)  # fmt: skip
def test_the_next_command(name: str, out: str | None, more: list[str], wanted: str) -> None:
    subject, plan = PLANS[name]()
    plan["peak_gib"] = min(plan["peak_gib"], 0.9 * plan["available_gib"])
    asked = [*ASKED[name], *more]
    options = options_of(asked[2], set=("a.b=1",) if name == "cpu" else (), out=Path(out) if out else None)
    assert build_next_command(plan_of(plan), subject, options, asked, per_host=8) == wanted.split()


def test_after_a_search_without_a_safe_fit_the_next_command_planswhat_would_fit() -> None:
    subject, plan = cluster()
    unsafe = plan | {"peak_gib": 79.5}
    command = build_next_command(plan_of(unsafe), subject, options_of(None, nodes=8), ASKED["cluster"], per_host=8)
    assert "--out" not in command


def test_a_wrapped_command_is_still_one_command() -> None:
    arguments = ["preheat", "plan", "my model.yaml", *(f"--set=a{n}=it's {n}" for n in range(9))]
    text = "\n".join(wrap_command(arguments))
    printed = subprocess.run(["bash", "-c", text.replace("next ", "printf '%s\\n'", 1)], capture_output=True, text=True)
    assert printed.stdout.splitlines() == arguments
    assert max(map(len, text.split("\n"))) <= WIDTH


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2.5USD/h", (2.5, "USD")), ("$2.5/hour", (2.5, "USD")), ("2.5 € / GPU-h", (2.5, "EUR")),
        ("1,460eur/month", (2.0, "EUR")), ("48usd/day", (2.0, "USD")), ("1_460.00EUR/mo", (2.0, "EUR")), ("0USD/h", (0.0, "USD")),
    ],
)  # fmt: skip
def test_a_price_has_a_unit(text: str, wanted: tuple[float, str]) -> None:
    price = parse_price(text)
    assert (price.per_hour, price.currency) == wanted


@pytest.mark.parametrize("text", ["2.5", "", "USD/h", "2.5USD", "2.5/h", "-1USD/h", "1,5EUR/h", "1,50,000EUR/h", "nanUSD/h", "1e400USD/h", "$2EUR/h", "2.5USD/h of it", "2\x1b[31mUSD", "9" * 99])  # fmt: skip
def test_a_price_without_a_unit_is_one_line(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--price: .*must be an amount with its currency and time.*2\.5USD/h") as bad:
        parse_price(text)
    assert "\n" not in str(bad.value)
    assert "\x1b" not in str(bad.value)


def test_details_have_every_phase_and_rejection() -> None:
    _, plan = qlora()
    plan["rejected"] = [{"recipe": f"r{n}", "reason": "needs 30 GiB"} for n in range(20)]
    page = Console(file=io.StringIO(), width=WIDTH)
    page.print(build_details(plan_of(plan)))
    text = page.file.getvalue()  # type: ignore[attr-defined]
    assert "143 candidates, 9 dry-run" in text
    assert "r19: needs 30 GiB" in text
    assert "export, later" in text
    assert "24.90" in text


def test_the_table_of_serving_has_one_line_a_row() -> None:
    formats = [{"weights": "bf16", "cache": c, "weights_gib": 15.0, "cache_gib_per_row": 0.25, "rows": 34, "longest_context": 69979, "tokens_per_second_at_most": 1361.0, "tokens_per_second_alone": 61.7, "seconds_to_first_token": 0.258} for c in ("bf16", "int8")]  # fmt: skip
    plan = {"model": "m", "device": {"kind": "cuda", "name": "G", "memory_gib": 24.0, "count": 1}, "parameters": 9, "active_parameters": 9, "length": 2048, "cache_bytes_per_token": 1024, "state_bytes_per_row": 0, "formats": formats}  # fmt: skip
    page = Console(file=io.StringIO(), width=WIDTH)
    page.print(build_serving(plan))
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[2].split() == ["weights", "cache", "size", "each", "fit", "longest", "prompt", "one", "all"]
    assert lines[3].split()[:2] == ["bf16", "bf16"]
    assert max(map(len, lines)) <= WIDTH


def test_an_answer_needs_no_torch(tmp_path: Path) -> None:
    _, plan = qlora()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code = (
        "import json, sys; from preheat.cli.views.plan_answer import Answer\n"
        "from preheat.core.plan import Plan; from preheat.files import read_record\n"
        f"Answer(read_record(Plan, json.load(open({str(tmp_path / 'plan.json')!r}))), 'm').lines(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_hostile_names_stay_on_their_line() -> None:
    _, plan = copy.deepcopy(qlora())
    plan["device"]["name"] = "G\x1b[31m\n" * 50
    page = Console(file=io.StringIO(), width=WIDTH)
    page.print(Answer(plan_of(plan), "n\n" * 500))
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= LINES
    assert "\x1b[31m" not in page.file.getvalue()  # type: ignore[attr-defined]
    assert lines[0].rstrip().endswith(": fits")


def test_an_alternative_without_room_is_left_out_and_not_cut() -> None:
    subject, plan = PLANS["qlora"]()
    long = "{lora: {}, nf4: {}, mixed_precision: {mode: bf16}, activation_checkpointing: {}, low_bit_adamw: {}, activation_offload: {}}"
    plan["alternatives"] = [alternative(long, f"{n} % slower, 4.00 GiB less, starts 60 s later") for n in (3, 5, 7)]
    lines = [line for line, _ in Answer(plan_of(plan), subject.recipe.name, notes=["a note"] * 4, below=3).lines()]
    assert len(lines) + 3 <= LINES
    assert any("3 % slower" in line for line in lines), "the closest stays"
    assert not any("7 % slower" in line for line in lines)
    assert not any("…" in line for line in lines if "slower" in line or "without" in line), lines
