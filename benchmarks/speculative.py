"""Speculative decoding against plain greedy decoding: the same text on 200 prompts, and how much sooner. One run, in alternation.

    python benchmarks/speculative.py MODEL --text FILE [--draft FOLDER] [--count 200] [--tokens 64] [--dtypes fp32 bf16] [--out benchmarks/results]

Prompts are cut from the text's documents (separated by blank lines or <|endoftext|>), one each, with a part of the document before it, so that there is
something to look up, as in a summary or an edit. Each prompt is written plainly and with proposals one after the other, the order changing from prompt to
prompt. Where texts part, how far apart the two likeliest tokens were is said, in units of the dtype's precision at that logit: a tie is at most a few.
Writes speculative.json and .md.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from preheat.hardware.probe import probe
from preheat.inference.load import load_draft_model, load_model
from preheat.models.generation.detokenizer import common_prefix_length
from preheat.models.generation.generate import Timed, generate
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cast(model: Any, dtype: torch.dtype) -> None:
    """Parameters, not buffers: rotary frequencies stay as they are."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def cut_prompts(text: str, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """One prompt of `length` tokens a document that is long enough; in order."""
    found: list[list[int]] = []
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for document in re.split(r"<\|endoftext\|>|\n\s*\n", text):
        ids = tokenizer.encode(document.strip(), add_special_tokens=False, verbose=False)
        if len(ids) >= length:
            found.append([*first, *ids[: length - len(first)]])
        if len(found) == count:
            return found
    raise SystemExit(
        f"the text has {len(found)} documents of {length} tokens, and {count} are asked for; lower --count or --length"
    )


def tie(model: Any, prompt: list[int], plain: list[int], other: list[int]) -> float:
    """How far apart the two tokens' logits are where the texts part, in steps of the dtype."""
    at = common_prefix_length(plain, other)
    logits = compute_reference_logits(model, torch.tensor([[*prompt, *plain[:at]]]))[0, -1]
    a, b = float(logits[plain[at]]), float(logits[other[at]])
    return abs(a - b) / (max(abs(a), abs(b)) * torch.finfo(next(model.parameters()).dtype).eps)


def compare_prompts(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """All prompts in one dtype."""
    opened = load_model(options.model)
    model: Any = opened.build.trained[0]
    cast(model, DTYPES[dtype])
    ways: dict[str, tuple[Sample, Any]] = {
        "plain": (Sample(max_new_tokens=options.tokens), None),
        f"lookup {options.lookup}": (Sample(max_new_tokens=options.tokens, prompt_lookup_tokens=options.lookup), None),
    }
    if options.draft:
        draft = load_draft_model(options.draft, opened.tokenizer)
        cast(draft, DTYPES[dtype])
        settings = Sample(max_new_tokens=options.tokens, draft_model=options.draft, draft_tokens=options.draft_tokens)
        ways[f"draft {options.draft_tokens}"] = (settings, draft)
    prompts = cut_prompts(options.text.read_text(encoding="utf-8"), opened.tokenizer, options.count, options.length)
    stop = frozenset({opened.tokenizer.eos_token_id} - {None})

    def write(name: str, prompt: list[int]) -> tuple[list[int], float, Timed]:
        settings, draft = ways[name]
        timed = Timed()
        begun = time.perf_counter()
        (made,) = generate(
            model,
            opened.tokenizer,
            [prompt],
            settings,
            stop=stop,
            positions=opened.build.model.positions,
            draft=draft,
            timed=timed,
        )
        return made.tokens, time.perf_counter() - begun, timed

    for name in ways:  # kernels are chosen before anything is timed
        write(name, prompts[0])
    found: dict[str, list[tuple[list[int], float, Timed]]] = {name: [] for name in ways}
    for number, prompt in enumerate(prompts):
        turn = number % len(ways)
        for name in [*list(ways)[turn:], *list(ways)[:turn]]:
            found[name].append(write(name, prompt))
    rows = []
    for name, made in found.items():
        parted = [(p, a[0], b[0]) for p, a, b in zip(prompts, found["plain"], made, strict=True) if a[0] != b[0]]
        ratios = [a[1] / b[1] for a, b in zip(found["plain"], made, strict=True)]
        quarter = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-len(ratios) // 4]
        tokens, passes = sum(len(m[0]) for m in made), sum(len(m[2].at) for m in made)
        rows.append(
            {
                "name": name,
                "identical": len(prompts) - len(parted),
                "prompts": len(prompts),
                "steps_apart": [tie(model, *texts) for texts in parted],
                "tokens_per_pass": tokens / passes,
                "seconds": sum(m[1] for m in made),
                "tokens_per_second": tokens / sum(m[1] for m in made),
                "speed": sum(m[1] for m in found["plain"]) / sum(m[1] for m in made),
                "speed_median": median(ratios),
                "speed_quartiles": quarter,
            }
        )
    return {"dtype": dtype, "parameters": sum(p.numel() for p in model.parameters()), "rows": rows}


def render_markdown(made: dict[str, Any]) -> str:
    lines = [
        "# Speculative decoding against plain greedy decoding",
        "",
        f"`{made['command']}`, {made['machine']}, torch {torch.__version__}, {made['threads']} threads; prompts of {made['length']} tokens, at most {made['tokens']} after each.",
        "",
        "| dtype | | identical texts | tokens a pass | tokens/s | times plain | median (quartiles) over prompts | parted at, in steps of the dtype |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in made["dtypes"]:
        for row in part["rows"]:
            low, high = row["speed_quartiles"]
            apart = f"at most {max(row['steps_apart']):.1f}" if row["steps_apart"] else "-"
            lines.append(
                f"| {part['dtype']} | {row['name']} | {row['identical']} of {row['prompts']} | {row['tokens_per_pass']:.2f} | {row['tokens_per_second']:,.0f} | "
                f"{row['speed']:.2f} | {row['speed_median']:.2f} ({low:.2f} to {high:.2f}) | {apart} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lookup", type=int, default=4)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    names = [Path(options.model).name, Path(options.text).name, *([Path(options.draft).name] if options.draft else [])]
    draft = f" --draft {names[2]}" if options.draft else ""
    made = {
        "command": f"python benchmarks/speculative.py {names[0]} --text {names[1]}{draft} --count {options.count} --tokens {options.tokens}",
        "machine": probe("auto").name,
        "threads": torch.get_num_threads(),
        "length": options.length,
        "tokens": options.tokens,
        "dtypes": [compare_prompts(options, dtype) for dtype in options.dtypes],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speculative.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (options.out / "speculative.md").write_text(render_markdown(made), encoding="utf-8")
    print(render_markdown(made))
    # In fp32 there is nothing to be excused: every text is the greedy one.
    return int(
        any(
            row["identical"] < row["prompts"]
            for part in made["dtypes"]
            if part["dtype"] == "fp32"
            for row in part["rows"]
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
