"""Very long sequences: a model taken from 512 to 4,096 tokens, key-value recall by length and depth, memory and time against length.

    PREHEAT_DATA=../shared/data python benchmarks/length.py extension [--steps 120] [--length 4096] [--rows 4]
    python benchmarks/length.py recall [--steps 3500] [--length 512] [--then 1024 2048 4096 --more 250 --runs FOLDER]
    python benchmarks/length.py memory [--lengths 1024 2048 ... 65536] [--measured 8192]
    python benchmarks/length.py time [--lengths 1024 2048 ... 65536]          # a quiet machine

Each part writes length-PART.md, .json and drawings under benchmarks/results. All training is `preheat train` on a recipe that stands in the .json.
extension: stories260K is trained on for as many tokens on War and Peace (its first nine tenths) joined with TinyStories, under each rotary scaling, and as it is
at 512; measured on the last tenth of the book, and on stories that it was not trained on. recall: a new model of a few layers learns lists of random keys and
values, after which keys come again, short lists first; the test draws lists of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

RESULTS = Path(__file__).parent / "results"
SCALINGS = ("none", "linear", "base", "dynamic", "yarn")
WORDS = {
    "none": "none", "linear": "linear", "base": "NTK, the base raised once", "dynamic": "NTK, dynamic", "yarn": "YaRN", "short": "none, trained at 512",
}  # fmt: skip


def train(recipe: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`preheat train`; its summary, and the run's evaluation."""
    file, out = folder / f"{recipe['name']}.yaml", folder / recipe["name"]
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "preheat", "train", str(file), "--out", str(out), "--json", "--auto-resume"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe['name']}: {done.stderr.strip().splitlines()[-1]}")
    summary, found = json.loads(done.stdout), out / "evaluation.json"
    if summary["steps"] < recipe["stop"]["max_steps"]:
        raise SystemExit(
            f"{recipe['name']}: ended by {summary['stopped']} after {summary['steps']} steps; the same command goes on"
        )
    return summary, json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}


def write_results(part: str, lines: list[str], values: dict[str, Any]) -> None:
    import torch

    told = sys.argv[1:]
    if "--runs" in told:  # where they lay is of this machine
        del told[told.index("--runs") : told.index("--runs") + 2]
    head = [
        f"`python benchmarks/length.py {' '.join(told)}`, torch {torch.__version__}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads.",
        "",
    ]
    text = "\n".join([lines[0], "", *head, *lines[1:]]) + "\n"
    (RESULTS / f"length-{part}.md").write_text(text, encoding="utf-8")
    (RESULTS / f"length-{part}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(text)


def plot_results(name: str, draw: Any, *, columns: int = 1, height: float = 3.6) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5.6 * columns, height), layout="constrained")
    draw(axes)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


# --- from 512 to 4,096 tokens -------------------------------------------------------------------------------------


def write_texts(folder: Path) -> None:
    """book.txt, tail.txt (its last tenth), stories.jsonl and others.jsonl (one in ten)."""
    data = Path(os.environ.get("PREHEAT_DATA", "../shared/data")) / "text"
    book = (data / "war_and_peace.txt").read_text(encoding="utf-8")
    cut = book.index("\n\n", len(book) * 9 // 10)
    (folder / "book.txt").write_text(book[:cut], encoding="utf-8")
    (folder / "tail.txt").write_text(book[cut:], encoding="utf-8")
    told = (data / "tinystories_train_excerpt.txt").read_text(encoding="utf-8")
    stories = [story.strip() for story in re.split(r"\n+(?=Once upon a time|One day)", told)]
    for name, some in (("stories", [s for n, s in enumerate(stories) if n % 10]), ("others", stories[::10])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": story}) + "\n" for story in some), encoding="utf-8"
        )


def build_recipe(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The recipe of one way to 4,096 tokens; `short` has rows of the trained length, and as many tokens a step."""
    model = Path(os.environ.get("PREHEAT_DATA", "../shared/data")).resolve() / "stories260K-hf"
    length = 512 if name == "short" else options.length
    techniques: dict[str, Any] = {"efficient_attention": {}, "chunked_loss": {}}
    if name in SCALINGS[1:]:
        techniques["rope_scaling"] = {"kind": name, "factor": "auto"}
    tasks = [
        f"positions={folder / 'tail.txt'},each=24",
        f"continuation={folder / 'tail.txt'},lengths=[{options.length}],each=24",
    ]
    return {
        "name": name,
        "seed": 1,
        # `none` reads beyond what it was made for: nothing but the statement of its positions is changed.
        "model": {"path": str(model), **({"config": {"max_position_embeddings": length}} if name == "none" else {})},
        "data": {
            "source": [
                {"source": str(folder / "book.txt"), "text_files": "whole"},
                {"source": str(folder / "stories.jsonl"), "weight": 2},
            ],
            "packing": "stream",
            "validation": 0.0,
            "preflight": {"encoding": "warn"},  # some stories have quotation marks that were decoded wrongly
        },
        "batch": {"size": options.rows * options.length // length, "seq_len": length},
        "optimizer": {"lr": options.lr, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.1, "min_lr_ratio": 0.05},
        "stop": {"max_steps": options.steps},
        "evaluate": {
            "rows": 48 * options.length // length,
            "forgetting": str(folder / "others.jsonl"),
            "tasks": [] if name == "short" else tasks,
        },
        "techniques": techniques,
    }


def evaluate_by_command(run: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `preheat eval` finds of a run beyond the length of its own rows."""
    command = [
        sys.executable,
        "-m",
        "preheat",
        "eval",
        str(run),
        "--json",
        "--length",
        str(options.length),
        "--before",
        "--data",
        str(folder / "others.jsonl"),
    ]
    command += [
        "--rows",
        "48",
        "--tasks",
        f"positions={folder / 'tail.txt'},each=24",
        "--tasks",
        f"continuation={folder / 'tail.txt'},lengths=[{options.length}],each=24",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"eval: {done.stderr.strip().splitlines()[-1]}")
    made = json.loads(done.stdout)
    texts_ = {"forgetting": next(iter(made["texts"].values()))}
    before = {"texts": {"forgetting": next(iter(made["before"]["texts"].values()))}, "tasks": made["before"]["tasks"]}
    return {"after": {"texts": texts_, "tasks": made["tasks"]}, "before": before}


def measure_extension(options: argparse.Namespace) -> None:
    found: dict[str, Any] = {}
    recipes = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        for way in (*options.ways, "short"):
            recipes[way] = build_recipe(way, options, folder)
            begun = time.perf_counter()
            summary, evaluation = train(recipes[way], folder)
            if way == "short":
                evaluation = evaluate_by_command(folder / "short", folder, options)
            found[way] = evaluation | {"seconds": time.perf_counter() - begun, "loss": summary["loss"]}
            print(way, f"{found[way]['seconds']:.0f} s", flush=True)
    found = json.loads(json.dumps(found).replace(name, "TEXTS"))
    plain = found["short"]["before"]["texts"]["forgetting"]["metrics"]["loss"]["value"]

    def list_parts(way: str, when: str) -> list[dict[str, Any]]:
        return list(found[way][when]["tasks"]["positions"]["parts"])

    ends = [part["end"] for part in list_parts("short", "after")]
    lines = [
        f"# stories260K from 512 to {options.length:,} tokens",
        f"{options.steps} steps of {options.rows} x {options.length:,} tokens on nine tenths of War and Peace joined with TinyStories (each read twice as often), lr {options.lr:g}. Perplexity by position",
        "on 24 passages of the last tenth of the book. Short texts: TinyStories that were not trained on, each by itself, against the model as it was "
        f"({plain:.4f} nats a token).",
        "",
        "| rotary scaling | | "
        + " | ".join(f"to {end:,}" for end in ends)
        + " | short texts, nats | to the model as it was |",
        "|---|---|" + "---|" * (len(ends) + 2),
    ]
    for way in found:
        for when in ("before", "after"):
            short = found[way][when]["texts"]["forgetting"]["metrics"]["loss"]["value"]
            cells = " | ".join(f"{np.exp(part['value']):.1f}" for part in list_parts(way, when))
            lines.append(f"| {WORDS[way]} | {when} | {cells} | {short:.4f} | {short / plain - 1:+.1%} |")
    lines += [
        "",
        f"Loss of the last 64 of {options.length:,} tokens after training, with so much of what stands before them:",
        "",
        "| rotary scaling | none | quarter | half | all |",
        "|---|---|---|---|---|",
    ]
    for way in found:
        metrics = found[way]["after"]["tasks"]["continuation"]["metrics"]
        lines.append(
            f"| {WORDS[way]} | "
            + " | ".join(f"{metrics[f'loss_{share}']['value']:.3f}" for share in ("none", "quarter", "half", "all"))
            + " |"
        )
    lines += ["", "![perplexity by position](length-extension.png)"]

    def draw(axes: Any) -> None:
        for axis, when in zip(axes, ("before", "after"), strict=True):
            for way in found:
                axis.plot(
                    ends,
                    np.exp([part["value"] for part in list_parts(way, when)]),
                    "o-",
                    markersize=3.5,
                    label=WORDS[way],
                )
            axis.set(
                xscale="log", yscale="log", xlabel="up to this position", ylabel="perplexity", title=f"{when} training"
            )
            axis.set_xticks(ends, [f"{end:,}" for end in ends], fontsize=7)
            axis.minorticks_off()
            ticks = [5, 8, 12, 20, 50, 100, 200, 500]
            low, high = axis.get_ylim()
            axis.set_yticks([t for t in ticks if low <= t <= high], [str(t) for t in ticks if low <= t <= high])
        axes[0].legend(fontsize=8)

    plot_results("length-extension", draw, columns=2)
    data = str(Path(os.environ.get("PREHEAT_DATA", "../shared/data")).resolve())
    kept = json.loads(json.dumps(recipes).replace(name, "TEXTS").replace(data, "DATA"))
    write_results("extension", lines, {"recipes": kept, "found": found})


# --- key-value recall ---------------------------------------------------------------------------------------------


def build_vocabulary(folder: Path, pieces: int) -> Any:
    """A tokenizer whose pieces are words, saved where a recipe finds it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"</s>": 0, "<pad>": 1} | {f"w{n}": n for n in range(2, pieces)}, unk_token="</s>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(folder)
    return made


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
"""Nothing but the words, of which the assistant's are trained on."""
FIRST, LAST = 0.3, 0.3
"""Shares of the tokens that are read in lists of two to four pairs, in which it is learnt what a list is (it takes long only there), and with the longest among the rest."""


def draw_lists(pieces: list[int], new: int, again: int, rng: np.random.Generator) -> list[dict[str, str]]:
    """A list of pairs of unlike keys, and after it some of the keys again, each with the value that it had: as a conversation."""
    keys, values = np.asarray(pieces)[::2], np.asarray(pieces)[1::2]
    key, value = rng.choice(keys, new, replace=False), rng.choice(values, new)
    told = " ".join(f"w{k} w{v}" for k, v in zip(key, value, strict=True))
    asked = rng.integers(new, size=again)
    turns = [
        {"role": role, "content": f"w{of[n]}"} for n in asked for role, of in (("user", key), ("assistant", value))
    ]
    turns[0]["content"] = f"{told} {turns[0]['content']}"
    return turns


def schedule_pairs(longest: int, tokens: int, rng: np.random.Generator, *, first: bool = True) -> list[tuple[int, int]]:
    """New and asked pairs of each list over the run: up to four at first, then ever more beside the fewer ones, as many tokens of each number.

    As many are asked as are new, where a list of `longest` tokens has room for so many.

    Args:
        first: the run has to learn what a list is; otherwise lists of all numbers stand beside each other from the beginning.
    """
    most = longest // 2
    counts = [
        2,
        3,
        4,
        *(n for power in range(2, 12) for n in (3 << power - 1, 4 << power - 1)),
        *(most * n // 16 for n in (10, 12, 14, 15)),
    ]
    counts = sorted({n for n in counts if n <= most * 15 // 16})
    stages = range(counts.index(4), len(counts)) if first else [len(counts) - 1]
    made: list[tuple[int, int]] = []
    for stage in stages:
        share = FIRST if stage == stages[0] else LAST if stage == stages[-1] else (1 - FIRST - LAST) / (len(stages) - 2)
        some = [(n, min(n, most - n)) for n in counts[: stage + 1]]
        weights = np.array([1 / (new + asked) for new, asked in some])
        left = (share if first else 1) * tokens
        while left > 0:
            new, asked = some[int(rng.choice(len(some), p=weights / weights.sum()))]
            made.append((new, asked))
            left -= 2 * (new + asked)
    return made


def count_words(length: int, options: argparse.Namespace) -> int:
    """Words of a vocabulary: half of them are keys, of which the longest list takes half, so that a key is one word where it is asked."""
    return int(options.pieces or 2 * length)


def write_lists(length: int, steps: int, options: argparse.Namespace, folder: Path) -> Path:
    """Words, template and lists of a run in rows of `length`, as many lists as all steps read, so that none is read twice: the rule is learnt, not the lists."""
    from preheat.evaluation.needle import find_word_tokens

    into = folder / f"lists-{length}"
    if (into / "words.jinja").is_file():  # which is written last
        return into
    into.mkdir(exist_ok=True)
    word_tokens = find_word_tokens(build_vocabulary(into / "words", count_words(length, options)))
    rng = np.random.default_rng(options.seed)
    sizes = schedule_pairs(
        length, round(1.03 * steps * max(length, options.rows * options.length)), rng, first=length == options.length
    )
    with (into / "lists.jsonl").open("w", encoding="utf-8") as file:
        for new, again in sizes:
            file.write(json.dumps({"messages": draw_lists(word_tokens, new, again, rng)}) + "\n")
    (into / "order.txt").write_text("".join(f"{n}\n" for n in range(len(sizes))), encoding="utf-8")
    (into / "words.jinja").write_text(TEMPLATE, encoding="utf-8")
    return into


def lengthen_run(run: Path, words: Path, length: int, into: Path, scaling: str) -> Path:
    """What a run has learnt, as a folder for rows of `length`: with the words that it lacks, drawn as the known ones lie, and the positions `scaling` gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from preheat.techniques.rope_scaling import scale_rope

    exported = run / "export-hf"
    if not exported.is_dir():
        subprocess.run([sys.executable, "-m", "preheat", "export", str(run)], check=True, capture_output=True)
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(words)
    model.resize_token_embeddings(len(tokenizer))
    known = model.config.max_position_embeddings
    if scaling == "base":
        scale_rope(model.config, scaling, length / known)
    model.config.max_position_embeddings = length
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return into


def evaluate_lists(model: Path, length: int, each: int) -> dict[str, Any]:
    """What a model tells of lists up to `length` before it is trained there, by `preheat eval`."""
    command = [
        sys.executable,
        "-m",
        "preheat",
        "eval",
        str(model),
        "--json",
        "--length",
        str(length),
        "--tasks",
        f"recall,each={each}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"eval: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout)["tasks"]["recall"])


def build_stage_recipe(length: int, steps: int, lists: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A run in rows of `length`, with as many tokens a step at every length; its model is of the first, those after it go on from what was learnt."""
    model: dict[str, Any] = {
        "num_layers": options.layers,
        "hidden_size": options.width,
        "num_heads": options.width // 32,
        "intermediate_size": 2 * options.width,
        "tie_embeddings": True,
        # Biases of queries and keys: by them a head looks at the token before whatever stands there, which is half of what is to be learnt; without
        # them it is not found in as many steps. A large base: most of a head's frequencies hardly turn within a list, by which a key is known at
        # any distance. Weights are drawn for this width: with the 0.02 of wide models all attention is even at first, and stays so for long.
        "config": {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": options.base},
            "initializer_range": options.width**-0.5,
        },
    }
    return {
        "name": f"recall-{length}",
        "seed": options.seed,
        "model": model,
        "data": {
            "source": str(lists / "lists.jsonl"),
            "tokenizer": str(lists / "words"),
            "template": str(lists / "words.jinja"),
            "packing": "whole",
            "validation": 0.0,
            "preflight": {"end_token": "warn", "template_end": "warn"},  # an answer is one word, and no list has an end
        },
        "batch": {"size": max(1, options.rows * options.length // length), "seq_len": length},
        "optimizer": {"lr": options.lr, "weight_decay": 0.0},
        "schedule": {"kind": "wsd", "warmup_ratio": 0.02, "decay_ratio": 0.2, "min_lr_ratio": 0.02},
        "stop": {"max_steps": steps},
        "evaluate": {"every": max(1, steps // 4), "rows": 64, "tasks": ["recall,each=16"]},
        "checkpoint": {"every": 250, "keep": 1},
        "techniques": {
            "difficulty_curriculum": {
                "scores": str(lists / "order.txt"),
                "start": 0.01,
                "until": 1.0,
                "curve": "linear",
            },
            "muon": {},
            "efficient_attention": {},
            "chunked_loss": {},
        },
    }


def train_stage(length: int, before: Path | None, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains in rows of `length`, from nothing or from the run `before`, and asks; what the folder holds already is not done again."""
    told = folder / f"stage-{length}.json"
    if told.is_file():
        return dict(json.loads(told.read_text(encoding="utf-8")))
    steps = options.steps if before is None else options.more
    lists = write_lists(length, steps, options, folder)
    recipe = build_stage_recipe(length, steps, lists, options)
    untrained: dict[str, Any] = {}
    if before is not None:
        wider = lengthen_run(before, lists / "words", length, folder / f"from-{length}-base", "base")
        untrained["base"] = evaluate_lists(wider, length, 4)
        recipe["model"] = {
            "path": str(lengthen_run(before, lists / "words", length, folder / f"from-{length}", "none"))
        }
        recipe["optimizer"]["lr"] = options.lr / 2
        recipe["schedule"] |= {"warmup_ratio": 0.1}
        recipe["evaluate"] |= {"every": 0}
        del recipe["techniques"]["difficulty_curriculum"]
    summary, evaluation = train(recipe, folder)
    run = folder / recipe["name"]
    curve = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if before is not None:
        untrained["none"] = evaluation["before"]["tasks"]["recall"]
    result = {
        "length": length,
        "recipe": recipe,
        "parameters": json.loads((run / "plan.json").read_text(encoding="utf-8"))["parameters"]["total"],
        "seconds": max(c.get("elapsed", 0.0) for c in curve),  # of all its parts, where it was interrupted
        "loss": summary["loss"],
        "history": [(c["step"], c["tasks"]["recall"]["accuracy"]) for c in curve if "tasks" in c],
        "untrained": untrained,
        "found": evaluation["after"]["tasks"]["recall"],
    }
    result = json.loads(json.dumps(result).replace(str(folder), "TEXTS"))
    told.write_text(json.dumps(result), encoding="utf-8")
    print(
        length,
        f"{result['seconds'] / 60:.1f} minutes, right: {result['found']['metrics']['accuracy']['value']:.1%}",
        flush=True,
    )
    return dict(result)


def read_grid(found: dict[str, Any]) -> tuple[list[int], list[float], Any]:
    """Lengths, depths, and the share that is right [depths, lengths]."""
    across, down = (sorted({part[key] for part in found["parts"]}) for key in ("length", "depth"))
    values = {(part["length"], part["depth"]): part["value"] for part in found["parts"]}
    return across, down, np.array([[values[n, d] for n in across] for d in down])


def draw_heat_map(found: dict[str, Any]) -> list[str]:
    across, down, grid = read_grid(found)
    return [
        "| depth | " + " | ".join(f"{int(n):,}" for n in across) + " |",
        "|---|" + "---|" * len(across),
        *(f"| {d:.0%} | " + " | ".join(f"{v:.0%}" for v in row) + " |" for d, row in zip(down, grid, strict=True)),
    ]


def measure_recall(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = (options.runs or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        stages: list[dict[str, Any]] = []
        for length in (options.length, *options.then):
            before = folder / stages[-1]["recipe"]["name"] if stages else None
            stages.append(train_stage(length, before, options, folder))
    start, last = stages[0], stages[-1]
    found, (across, down, grid) = last["found"], read_grid(last["found"])
    accuracy = found["metrics"]["accuracy"]
    steps = start["recipe"]["stop"]["max_steps"]
    asked = found["rows"] // grid.size
    lines = [
        f"# Key-value recall up to {last['length']:,} tokens",
        f"A Llama of {options.layers} layers and width {options.width} ({last['parameters']:,} parameters), trained from nothing for {steps:,} steps of {start['recipe']['batch']['size']} x {start['length']} tokens "
        f"({start['seconds'] / 60:.1f} minutes on this machine, which other work shared) on lists of random pairs after which keys are asked again, short lists first, none read twice, with the loss on the answers alone.",
    ]  # fmt: skip
    if stages[1:]:
        lines += [
            f"Then in rows of {', '.join(format(one['length'], ',') for one in stages[1:])} tokens, as many tokens a step, {options.more} steps each, from what was learnt before: lists of all lengths beside each other, rotary positions as they are.",
            "A list needs as many keys as it has pairs, so the words double with the rows; the vectors of new ones are drawn as those of the known ones lie (`resize_token_embeddings`), and each is trained.",
            "",
            "| tokens a row | rows a step | words | parameters | minutes | right before, positions as they are | right before, NTK | right after | 95 % interval | least of a length | least of a cell |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for one in stages:
            right, cells = one["found"]["metrics"]["accuracy"], read_grid(one["found"])[2]
            first = [
                f"{one['untrained'][way]['metrics']['accuracy']['value']:.1%}" if one["untrained"] else ""
                for way in ("none", "base")
            ]
            lines.append(
                f"| {one['length']:,} | {one['recipe']['batch']['size']} | {count_words(one['length'], options):,} | {one['parameters']:,} | {one['seconds'] / 60:.1f} | {' | '.join(first)} | {right['value']:.1%} "
                f"| {right['low']:.1%} to {right['high']:.1%} | {cells.mean(axis=0).min():.1%} | {cells.min():.0%} |"
            )
        lines += ["", "Right: of lists at 8 lengths up to the row's, at 8 depths, 16 a cell. NTK: the rotary base raised once, as far as the length asks, before training, 4 a cell.", ""]  # fmt: skip
    lines += [
        f"Asked: {found['rows']:,} lists that fill so many tokens, the value of a key at the end; {asked} a cell. Right: {accuracy['value']:.1%} (95 % interval {accuracy['low']:.1%} to {accuracy['high']:.1%}), least of a length "
        f"{grid.mean(axis=0).min():.1%}, least of a cell {grid.min():.0%}; by guessing {1 / (count_words(last['length'], options) // 2):.2%}.",
        "",
        *draw_heat_map(found),
        "",
    ]  # fmt: skip
    for one in stages[:-1]:
        lines += [f"## After the stage of {one['length']:,} tokens", "", *draw_heat_map(one["found"]), ""]
    lines += [
        f"Over the {'first ' if stages[1:] else ''}run, step and share right: " + ", ".join(f"{step:,}: {right:.1%}" for step, right in start["history"]) + ".",
        "",
        "![recall by depth and length](length-recall.png)",
    ]  # fmt: skip

    def draw(axis: Any) -> None:
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(across)), [f"{int(n):,}" for n in across])
        axis.set_yticks(range(len(down)), [f"{d:.0%}" for d in down])
        axis.set(xlabel="tokens of the list", ylabel="depth of the pair", title="share of values told")
        for (y, x), v in np.ndenumerate(grid):
            axis.annotate(f"{v:.0%}", (x, y), ha="center", va="center", fontsize=7)
        axis.figure.colorbar(image)

    plot_results("length-recall", draw)
    write_results("recall", lines, {"stages": stages})


# --- memory and time ----------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {"full": {}, "window 1,024": {"sliding_window": {"window": 1024}}}


def write_one_document(folder: Path) -> Path:
    """Python's library source as one text: attention never crosses documents, so rows of many would be short ones to it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    into = folder / "library.txt"
    into.write_text(text, encoding="utf-8")
    return into


def measure_one_row(form: str, length: int, text: Path, *, steps: int = 3, precision: str = "bf16") -> dict[str, Any]:
    """A step of one row of one document: a model of about 15 million parameters, as the issue's CPU has it."""
    return {
        "name": f"{form.replace(' ', '-').replace(',', '')}-{length}",
        "model": {"num_layers": 6, "hidden_size": 384, "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 1024, "vocab_size": 4096, "tie_embeddings": True},
        "data": {"source": str(text), "text_files": "whole", "vocab_size": 4096, "packing": "stream", "validation": 0.0},
        "batch": {"size": 1, "seq_len": length},
        "stop": {"max_steps": steps},
        "techniques": {**({"mixed_precision": {"mode": "bf16"}} if precision == "bf16" else {}), "efficient_attention": {}, "activation_checkpointing": {}, "chunked_loss": {"rows": 1024}, **FORMS[form]},
    }  # fmt: skip


def measure_memory(options: argparse.Namespace) -> None:
    """Counted bytes by a dry run on this CPU, high-water marks of real steps for the shorter rows, and what a plan says of H100s."""
    from preheat.hardware.probe import probe
    from preheat.planning.dry_run import observe
    from preheat.planning.request import Request
    from preheat.recipe import parse

    rows: list[dict[str, Any]] = []
    device = probe("cpu")
    with tempfile.TemporaryDirectory() as name:
        text = write_one_document(Path(name))
        for form in FORMS:
            for length in options.lengths:
                if form != "full" and length <= 1024:
                    continue
                recipe = measure_one_row(form, length, text)
                seen = observe(Request(parse(yaml.safe_dump(recipe)), device, vocabulary=4096))
                row = {"form": form, "length": length, "counted_gib": max(seen.peak.values()) / 2**30}
                if length <= options.measured:
                    summary, _ = train(recipe, Path(name))
                    row |= {"predicted_gib": summary["predicted"]["peak_gib"], "measured_gib": summary["peak_gib"]}
                rows.append(row)
                print(row, flush=True)
    far = [plan_on_gpus(count, length) for count in (8, 64) for length in options.far]
    lines = ["# Memory against length", "One row of a model of 15 million parameters on a CPU: bf16, checkpointed layers, chunked loss, no scores in memory. Counted: the peak of all tensors of a step in a dry run;",
             "predicted and measured: the peak of the process less what the imports took.", "", "| attention | tokens a row | counted, GiB | MiB a 1,024 tokens more | predicted | measured |", "|---|---|---|---|---|---|"]  # fmt: skip
    for one, row in zip([None, *rows], rows, strict=False):
        same = one is not None and one["form"] == row["form"]
        more = (
            f"{(row['counted_gib'] - one['counted_gib']) * 2**10 / (row['length'] - one['length']) * 1024:.1f}"
            if same and one
            else ""
        )
        told = [f"{row[key]:.2f}" if key in row else "" for key in ("predicted_gib", "measured_gib")]
        lines.append(f"| {row['form']} | {row['length']:,} | {row['counted_gib']:.3f} | {more} | {' | '.join(told)} |")
    lines += ["", "## Predicted on H100s", "", "llama-3-8b with its rotary base raised, all weights trained: fsdp, context_parallel (ring) over all devices, bf16, checkpointed layers, chunked loss; one row a step. Of each device:", "",
              "| H100 | tokens a row | peak, GiB | fits 80 GB | seconds a step | tokens/s of all |", "|---|---|---|---|---|---|"]  # fmt: skip
    for row in far:
        if "why" in row:
            lines.append(f"| {row['devices']} | {row['length']:,} | {row['why']} | | | |")
        else:
            lines.append(
                f"| {row['devices']} | {row['length']:,} | {row['peak_gib']:.1f} | {'yes' if row['fits'] else 'no'} | {row['seconds']:.1f} | {row['tokens_per_second']:,.0f} |"
            )
    write_results("memory", lines, {"rows": rows, "planned": far})


def plan_on_gpus(devices: int, length: int) -> dict[str, Any]:
    """A plan for H100s by `preheat plan`."""
    techniques = {
        "rope_scaling": {"kind": "auto", "factor": "auto"}, "fsdp": {}, "context_parallel": {"degree": devices, "kind": "ring"}, "mixed_precision": {"mode": "bf16"},
        "efficient_attention": {}, "activation_checkpointing": {}, "chunked_loss": {"rows": 1024},
    }  # fmt: skip
    recipe = {
        "name": f"far-{devices}-{length}",
        "model": {"preset": "llama-3-8b"},
        "data": {"source": "stdlib"},
        "batch": {"size": 1, "seq_len": length},
        "stop": {"max_steps": 1},
        "techniques": techniques,
    }
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "far.yaml"
        file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        from preheat.errors import PreheatError
        from preheat.hardware.catalogue import find_accelerator
        from preheat.planning.plan import plan
        from preheat.planning.request import Request
        from preheat.planning.speed.roofline import Roofline
        from preheat.recipe import load

        roofline = Roofline(find_accelerator("H100"), 8)
        try:
            prediction = plan(Request(load(file), roofline.as_device, world=devices, rates=roofline))
        except PreheatError as error:
            return {"devices": devices, "length": length, "why": str(error).splitlines()[0]}
    return {
        "devices": devices,
        "length": length,
        "peak_gib": prediction.peak_gib,
        "fits": prediction.fits,
        "seconds": prediction.seconds_per_step,
        "tokens_per_second": prediction.tokens_per_second,
    }


def draw_time(
    name: str, seconds: dict[str, dict[int, list[float]]], gib: dict[str, dict[int, dict[str, float]]]
) -> None:
    def draw(axes: Any) -> None:
        for form in FORMS:
            axes[0].plot(list(seconds[form]), [np.median(some) for some in seconds[form].values()], "o-", label=form)
            axes[1].plot(list(gib[form]), [peak["measured"] for peak in gib[form].values()], "o-", label=form)
        axes[0].set(xscale="log", yscale="log", xlabel="tokens a row", ylabel="seconds a step")
        axes[1].set(xlabel="tokens a row", ylabel="peak of memory, GiB", ylim=(0, None))
        axes[0].legend()
        axes[1].legend()

    plot_results(f"length-{name}", draw, columns=2)


def measure_seconds(options: argparse.Namespace) -> None:
    """Seconds of a step, full attention and window by turns."""
    found: dict[str, dict[int, list[float]]] = {form: {} for form in FORMS}
    held: dict[str, dict[int, dict[str, float]]] = {form: {} for form in FORMS}
    with tempfile.TemporaryDirectory() as name:
        text = write_one_document(Path(name))
        for turn in range(options.turns):
            for length in (*options.lengths, *(options.once if turn == 0 else ())):
                for form in sorted(FORMS, reverse=bool(turn % 2)):
                    if form != "full" and length <= 1024:
                        continue
                    once = length in options.once
                    steps = 1 if once else options.steps
                    recipe = measure_one_row(form, length, text, steps=steps, precision=options.precision)
                    recipe["name"] += f"-{turn}"
                    summary, _ = train(recipe, Path(name))
                    held[form][length] = {
                        "predicted": summary["predicted"]["peak_gib"],
                        "measured": summary["peak_gib"],
                    }
                    lines = (Path(name) / recipe["name"] / "metrics.jsonl").read_text().splitlines()
                    taken = [step["seconds"] for step in map(json.loads, lines) if "seconds" in step and "loss" in step]
                    found[form].setdefault(length, []).extend(taken if once else taken[1:])
                    print(form, length, [f"{s:.2f}" for s in found[form][length]], flush=True)
    lines = ["# Time against length", "Seconds of a step of one row of one document, the median (least to most) of all steps but a run's first (of lengths that are taken once, the one step); a model of 15 million parameters on a CPU:",
             f"{options.precision}, checkpointed layers, chunked loss. Memory: the peak of the process less what the imports took, in the last turn.", "",
             "| tokens a row | full | window 1,024 | full / window | GiB, full: predicted, measured | window 1,024 |", "|---|---|---|---|---|---|"]  # fmt: skip
    for length in (*options.lengths, *options.once):
        cells = []
        for form in FORMS:
            some = found[form].get(length)
            cells.append(f"{np.median(some):.2f} ({min(some):.2f} to {max(some):.2f})" if some else "")
        both = [found[form].get(length) for form in FORMS]
        ratio = f"{np.median(both[0]) / np.median(both[1]):.2f}" if all(both) else ""
        peaks = [held[form].get(length) for form in FORMS]
        told = [f"{peak['predicted']:.2f}, {peak['measured']:.2f}" if peak else "" for peak in peaks]
        lines.append(f"| {length:,} | {cells[0]} | {cells[1]} | {ratio} | {' | '.join(told)} |")
    part = "time" if options.precision == "bf16" else f"time-{options.precision}"
    lines += ["", f"![seconds against length](length-{part}.png)"]

    draw_time(part, found, held)
    write_results(part, lines, {"seconds": found, "gib": held})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    doublings = [1024 * 2**n for n in range(7)]
    one = parts.add_parser("extension")
    one.add_argument("--steps", type=int, default=120)
    one.add_argument("--length", type=int, default=4096)
    one.add_argument("--rows", type=int, default=4)
    one.add_argument("--lr", type=float, default=5e-4)
    one.add_argument("--ways", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    two = parts.add_parser("recall")
    for name, value in {
        "steps": 3500,
        "length": 512,
        "rows": 8,
        "layers": 2,
        "width": 128,
        "more": 250,
        "seed": 1,
    }.items():
        two.add_argument(f"--{name}", type=int, default=value)
    two.add_argument("--lr", type=float, default=4e-3)
    two.add_argument("--base", type=float, default=1e5)
    two.add_argument("--pieces", type=int, help="words of the vocabulary; twice as many as tokens a row when not given")
    two.add_argument(
        "--then", type=int, nargs="+", default=[], help="longer sequence lengths to continue with, --more steps each"
    )
    two.add_argument(
        "--runs", type=Path, help="a folder where the runs stay; stages that it holds are not trained again"
    )
    three = parts.add_parser("memory")
    three.add_argument("--lengths", type=int, nargs="+", default=doublings)
    three.add_argument("--measured", type=int, default=8192)
    three.add_argument("--far", type=int, nargs="+", default=[131072, 524288, 1048576])
    four = parts.add_parser("time")
    four.add_argument("--lengths", type=int, nargs="+", default=doublings)
    four.add_argument(
        "--once", type=int, nargs="*", default=[], help="lengths of which one step is taken: it takes minutes"
    )
    four.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="fp32 where a CPU is slow in bf16")
    four.add_argument("--steps", type=int, default=3)
    four.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    {"extension": measure_extension, "recall": measure_recall, "memory": measure_memory, "time": measure_seconds}[
        options.part
    ](options)


if __name__ == "__main__":
    main()
