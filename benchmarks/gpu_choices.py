"""What `preheat plan` chooses for models that many train on GPUs that many have, beside all that a careful user would try, and beside published runs.

    python benchmarks/gpu_choices.py [--models llama-3.2-1b ...] [--gpus H100 ...] [--out benchmarks/results/gpu_choices.json]

Pairs that the file has already are kept; the page is written beside it.

For each pair the search runs as `preheat plan MODEL --gpu GPU --method ...` runs it. Beside it stands a brute force: every combination of
checkpointing, chunked loss, weights in bf16 or fp32, micro-batch, and for several devices how weights are sharded, with efficient attention and
compiled layers; the best of those also with fused operators in their place, with neither, and with plain attention. Each is planned by a dry run.
A search that ends below 0.7 of the best, or with plain attention, is told as a fault.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preheat.cli.options.subject import Subject, find_subject
from preheat.core import Numerics, Technique, registry
from preheat.core.plan import Plan
from preheat.hardware.catalogue import find_accelerator
from preheat.planning.observation_cache import observe_cached, observe_for_others
from preheat.planning.plan import describe
from preheat.planning.plan_request import choose_hardware, request_of
from preheat.planning.search.candidates import Space, describe_techniques, find_candidate_problems
from preheat.planning.search.search import count_passes, search
from preheat.planning.worker_pool import start_worker_pool

LEAST = 0.7
"""Share of the best that a search must reach."""
GPUS = ("H100", "A100-80GB", "RTX-4090", "L40S")


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and on how many devices."""

    model: str
    method: str
    devices: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} {self.method}" + (f" on {self.devices}" if self.devices > 1 else "")

    def subject(self) -> Subject:
        return find_subject(self.model, method=self.method, batch_tokens=32768 * self.devices, devices=self.devices)


CASES = (
    Case("llama-3.2-1b", "full"),
    Case("llama-3.1-8b", "lora"),
    Case("qwen3-8b", "qlora"),
    Case("llama-3.1-8b", "full", 8),
)
_TUNE = "https://github.com/pytorch/torchtune#memory-and-training-speed"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx"
_LIGER = "https://github.com/linkedin/Liger-Kernel#supercharge-your-model-with-liger-kernel"
_FOUNDRY = "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
# (model, method, GPU) -> what was published of it or of the nearest to it: settings, tokens a second of a device, where.
PUBLISHED: dict[tuple[str, str, str], list[tuple[str, int, str]]] = {
    ("llama-3.2-1b", "full", "H100"): [
        ("llm-foundry, another 1B (MPT, pretrained on 8, vocabulary of 50k)", 45455, _FOUNDRY)
    ],
    ("llama-3.2-1b", "full", "A100-80GB"): [("llm-foundry, as on the H100", 20513, _FOUNDRY)],
    ("llama-3.1-8b", "lora", "H100"): [("AutoModel, Llama 3, rows of 4,096", 12473, _AUTOMODEL)],
    ("llama-3.1-8b", "lora", "RTX-4090"): [("torchtune, compiled, 2 rows of 2,048", 3083, _TUNE)],
    ("qwen3-8b", "qlora", "RTX-4090"): [("torchtune, Llama 3.1 8B, compiled, 2 rows of 2,048", 2413, _TUNE)],
    ("llama-3.1-8b", "full", "H100"): [
        ("torchtitan, compiled, rows of 8,192, at 500 W", 6667, _TITAN),
        ("torchtitan, the same uncompiled", 5762, _TITAN),
    ],
    ("llama-3.1-8b", "full", "A100-80GB"): [("Hugging Face, Llama 3, recomputing, rows of 2,048", 3270, _LIGER)],
}


@dataclass(frozen=True)
class Choice:
    """A recipe with its plan on one GPU."""

    what: str
    plan: Plan
    techniques: frozenset[str]

    @property
    def speed(self) -> float:
        """Tokens a second, of all devices."""
        return float(self.plan.tokens_per_second)


def search_choice(
    case: Case, gpu: str, passes: int | None = None, allow: Numerics = "rounding"
) -> tuple[Choice, float]:
    """What `preheat plan` chooses, and the seconds that it took."""
    request = request_of(
        case.subject().recipe,
        find_accelerator(gpu),
        world=case.devices,
        per_host=case.devices,
        count_rows=False,
    )
    space = Space(request, allow)
    begun = time.perf_counter()
    limit = passes or 2 * count_passes(case.devices)
    best = search(space, passes=limit).best
    techniques = frozenset(best.recipe.techniques)
    return Choice(describe_techniques(best.added, best.micro), best.plan, techniques), time.perf_counter() - begun


def iterate_settings(case: Case) -> Iterator[tuple[Technique, ...]]:
    """Settings that a careful user would try, besides attention and how layers are run."""
    kinds: Mapping[str, Any] = registry()
    full = case.method == "full"
    checkpointing: list[Technique | None] = [
        None,
        *(kinds["activation_checkpointing"](mode=mode) for mode in ("selective", "full")),
    ]
    loss: list[Technique | None] = [None, kinds["chunked_loss"](rows=4096)]
    precision = [
        kinds["mixed_precision"](mode=mode) for mode in (("bf16", "bf16_weights") if full else ("bf16_weights",))
    ]
    cuts = [None if n == 1 else kinds["gradient_accumulation"](steps=n) for n in (1, 2, 4, 8, 16)]
    shards = [kinds["fsdp"](reshard_after_forward=again) for again in (True, False)] if case.devices > 1 else [None]
    if case.devices > 1:  # whose dry runs take longer: without what was never best on one device
        loss, cuts = loss[1:], cuts[1:4]
    for settings in itertools.product(checkpointing, loss, precision, shards, cuts):
        yield tuple(t for t in settings if t is not None)


def search_by_brute_force(
    case: Case, gpus: tuple[str, ...], tell: Callable[[str], None] = lambda words: None
) -> dict[str, Choice]:
    """The best of all that is tried on each GPU. Each is observed once, and what was observed serves all GPUs."""
    recipe, kinds = case.subject().recipe, registry()
    request = request_of(recipe, find_accelerator("H100"), world=case.devices, per_host=case.devices, count_rows=False)
    space = Space(request, "rounding")
    best: dict[str, tuple[Choice, tuple[Technique, ...]]] = {}

    def try_settings(settings: tuple[Technique, ...], more: tuple[Technique, ...], names: tuple[str, ...]) -> None:
        candidate = space.add_techniques((*more, *settings))
        if find_candidate_problems(space, candidate):
            return
        began = time.perf_counter()
        seen = observe_cached(candidate, how="few")
        cut = math.prod(t.micro_batch_count() for t in settings)
        what = describe_techniques((*more, *settings), recipe.batch.size // case.devices // cut)
        for gpu in names:
            device, rates, in_use = choose_hardware(find_accelerator(gpu), candidate.recipe, case.devices)
            plan = describe(replace(candidate, device=device, rates=rates, in_use=in_use), seen)
            if plan.fits and (gpu not in best or plan.tokens_per_second > best[gpu][0].speed):
                best[gpu] = Choice(what, plan, frozenset(candidate.recipe.techniques)), settings
        tell(f"{case.name}: {what}: {time.perf_counter() - began:.1f} s")

    attention, compiled, fused = (kinds[name]() for name in ("efficient_attention", "compile", "fused_operators"))
    for settings in iterate_settings(case):
        try_settings(settings, (attention, compiled), gpus)
    for gpu, (_, settings) in tuple(best.items()):
        for more in ((attention, fused), (attention,), (compiled,)):
            try_settings(settings, more, (gpu,))
    return {gpu: choice for gpu, (choice, _) in best.items()}


def find_faults(chosen: Choice, best: Choice | None) -> list[str]:
    """Why a search's choice is not good enough."""
    found = [] if "efficient_attention" in chosen.techniques else ["plain attention"]
    if best is not None and not chosen.plan.fits:
        found.append("says that nothing fits, and something does")
    elif best is not None and chosen.speed < LEAST * best.speed:
        found.append(f"{chosen.speed / best.speed:.2f} of the best")
    return found


def build_row(case: Case, gpu: str, chosen: Choice, seconds: float, best: Choice | None) -> dict[str, Any]:
    """A pair's results as the file has them; speeds are of a device."""
    return {
        "model": case.name,
        "gpu": gpu,
        "chosen": chosen.what,
        "peak_gib": chosen.plan.peak_gib,
        "fits": chosen.plan.fits,
        "tokens_per_second": chosen.speed / case.devices,
        "seconds": seconds,
        "best": best and best.what,
        "best_tokens_per_second": best and best.speed / case.devices,
        "faults": find_faults(chosen, best),
        "published": PUBLISHED.get((case.model, case.method, gpu), []),
    }


def render_page(rows: list[dict[str, Any]], command: str) -> str:
    """The results as a page."""
    shares = sorted(
        row["tokens_per_second"] / row["best_tokens_per_second"] for row in rows if row["fits"] and row["best"]
    )
    bad = [f"{row['model']} on {row['gpu']}: {', '.join(row['faults'])}" for row in rows if row["faults"]]
    verdict = f"{len(bad)} are faulty: {'; '.join(bad)}" if bad else "none chooses plain attention"
    lines = [
        "# What the planner chooses on GPUs",
        "",
        f"**In {len(rows)} pairs of a model and a GPU the search reaches {shares[0]:.2f} of the best of a brute force at least, "
        f"{shares[len(shares) // 2]:.2f} in the median (asked: {LEAST}); {verdict}.**",
        "All speeds but the published ones are predictions (published.md: 14 % off in the median); none of this was run on a GPU.",
        "",
        "| model, method | GPU | chosen | GiB | tokens/s a device | of the best | published, tokens/s a device |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share, speed = "nothing fits", "-"
        if row["fits"]:
            speed = f"{row['tokens_per_second']:,.0f}"
            share = (
                f"{row['tokens_per_second'] / row['best_tokens_per_second']:.2f}"
                if row["best"]
                else "nothing tried fits"
            )
        said = "; ".join(f"{speed:,} ([{who}]({where}))" for who, speed, where in row["published"]) or "none found"
        lines.append(
            f"| {row['model']} | {row['gpu']} | {row['chosen']} | {row['peak_gib']:.1f} | {speed} | {share} | {said} |"
        )
    lines += ["", "Where the brute force is faster by more than 2 %:", ""]
    lines += [
        f"- {row['model']} on {row['gpu']}: {row['best']}: {row['best_tokens_per_second']:,.0f} tokens/s a device"
        for row in rows
        if row["best"] and row["best_tokens_per_second"] > 1.02 * row["tokens_per_second"]
    ] or ["- none"]
    lines += [
        "",
        f"Made by `{command}`. A step has 32,768 tokens a device, in rows of 2,048; published runs have other lengths and batches where the table says so.",
        "Of the best is more than 1 where the search takes what the brute force does not try: budgets of checkpointing, pipelines, tensor parallel. "
        "Speeds of unsloth are published as ratios, not as tokens a second (https://docs.unsloth.ai/basics/unsloth-benchmarks).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="these alone")
    parser.add_argument("--gpus", nargs="+", default=GPUS, help="these alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_choices.json"))
    options = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if options.out.exists():
        rows = {(row["model"], row["gpu"]): row for row in json.loads(options.out.read_text())}
    for case in CASES:
        left = [gpu for gpu in options.gpus if (case.name, gpu) not in rows]
        if not left or (options.models and case.model not in options.models):
            continue
        with start_worker_pool(observe_for_others):
            chosen = {}
            for gpu in left:
                chosen[gpu] = search_choice(case, gpu)
                print(f"{case.name} on {gpu}: {chosen[gpu][0].speed:,.0f} tokens/s: {chosen[gpu][0].what}", flush=True)
            best = search_by_brute_force(case, tuple(left), lambda words: print(words, file=sys.stderr, flush=True))
        for gpu in left:
            rows[case.name, gpu] = build_row(case, gpu, *chosen[gpu], best.get(gpu))
        options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    options.out.with_suffix(".md").write_text(render_page(list(rows.values()), "python benchmarks/gpu_choices.py"))
    sys.exit(any(row["faults"] for row in rows.values()))


if __name__ == "__main__":
    main()
