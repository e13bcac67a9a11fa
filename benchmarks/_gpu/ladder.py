"""How fast: what the plan chooses and each step up to it, beside other trainers with the same tokens, one after another on the same card.

Speed is the median over the timed steps with its spread; the loss of the last step shows that the work is alike. Other trainers run
where they are installed, and are named where they are not.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu import peers
from _gpu.case import Case, Skip, Where, Wrong
from _gpu.shapes import recipe_of
from preheat.hardware.child_processes import tethered

STEPS, UNTIMED = 9, 4
STATED_STEPS = 1000
"""Length of the run that is planned: of 9 steps no compilation would pay."""
LOSS = {"first loss": 0.01, "last loss": 0.05}
"""The largest relative differences between the losses of a task's rungs: same weights and rows, rounded differently."""
HALF: dict[str, Any] = {"mixed_precision": {"mode": "bf16_weights"}}
FLASH: dict[str, Any] = {**HALF, "efficient_attention": {}}
CHUNKS: dict[str, Any] = {**FLASH, "chunked_loss": {}}
COMPILED: dict[str, Any] = {**CHUNKS, "compile": {}}
FUSED: dict[str, Any] = {"fused_operators": {}}
NF4: dict[str, Any] = {"mixed_precision": {}, "efficient_attention": {}, "chunked_loss": {}, "lora": {}, "nf4": {}}

FOUR_BITS = {
    "attention, chunked loss": NF4,
    "+ fused operators": {**NF4, **FUSED},
    "+ compile": {**NF4, "compile": {}},
}

# task: shape, rows, length, rungs
TASKS: dict[str, tuple[str, int, int, dict[str, dict[str, Any]]]] = {
    "1B full": (
        "1B", 8, 2048,
        {"plain bf16": HALF, "+ attention": FLASH, "+ chunked loss": CHUNKS, "+ compile": COMPILED},
    ),
    "8B LoRA": (
        "8B", 1, 8192,
        {
            "bf16, attention, chunked loss": {**CHUNKS, "lora": {}},
            "+ fused operators": {**CHUNKS, **FUSED, "lora": {}},
            "+ compile": {**COMPILED, "lora": {}},
        },
    ),
    "8B QLoRA 8k": ("8B", 1, 8192, FOUR_BITS),
    "8B QLoRA 2k": ("8B", 4, 2048, FOUR_BITS),
    "packed functions": ("1B", 8, 2048, {"attention, chunked loss": CHUNKS, "+ compile": COMPILED}),
}  # fmt: skip


def cases(where: Where) -> list[Case]:
    selected = []
    for task, (_, _, _, rungs) in TASKS.items():
        selected.append(Case(f"{task}/the plan's choice", functools.partial(_chosen, task), seconds=150))
        selected += [
            Case(f"{task}/{rung}", functools.partial(_taken, task, techniques), seconds=90)
            for rung, techniques in rungs.items()
        ]
        if task != "packed functions":
            selected += [
                Case(f"{task}/{peer}", functools.partial(_peer, task, run), seconds=120, fresh=True)
                for peer, run in peers.PEERS.items()
            ]
    return selected


def _recipe(task: str, techniques: dict[str, Any], where: Where) -> Any:
    shape, rows, length, _ = TASKS[task]
    if task == "packed functions":
        data = f"{{source: {_functions(where)}, vocab_size: 4096, preflight: {{truncated: warn}}}}"
    else:
        data = f"{{source: {_one_document(where)}, text_files: whole, vocab_size: 4096, validation: 0}}"
    more = {"data": data}
    return recipe_of(where, shape, rows, length, techniques, STATED_STEPS, **more)


def _one_document(where: Where) -> Path:
    """One long text, so that each row is one document: other trainers attend over whole rows."""
    file = Path(where.folder) / "one-document.txt"
    if not file.exists():
        sources = sorted(Path(statistics.__file__).parent.glob("*.py"))[: 20 if where.tiny else 200]
        text = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
        file.write_text(text[:3_000_000], encoding="utf-8")
    return file


def _functions(where: Where) -> Path:
    """Rows of real lengths, which are packed: each function of Python's standard library as an answer to its own first line."""
    import ast

    file = Path(where.folder) / "functions.jsonl"
    if file.exists():
        return file
    rows = []
    for source in sorted(Path(statistics.__file__).parent.glob("*.py"))[: 20 if where.tiny else 200]:
        text = source.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (body := ast.get_source_segment(text, node)):
                prompt, _, answer = body.partition("\n")
                rows.append({"prompt": prompt, "completion": answer or prompt})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _figures(seconds: list[float], tokens: list[int], losses: list[float]) -> dict[str, Any]:
    timed = sorted(seconds[UNTIMED:] or seconds[-1:])
    median = statistics.median(timed)
    return {
        "tokens/s": tokens[-1] / median,
        "spread": (timed[-1] - timed[0]) / median,
        "first steps s": sum(seconds[:UNTIMED]),
        "first loss": losses[0],
        "last loss": losses[-1],
    }


def _memory(where: Where) -> dict[str, Any]:
    import torch

    return {"allocated GiB": torch.cuda.max_memory_allocated() / 2**30} if where.kind == "cuda" else {}


def _taken(task: str, techniques: dict[str, Any], where: Where) -> dict[str, Any]:
    return _run(task, _recipe(task, techniques, where), where)


def _run(task: str, recipe: Any, where: Where) -> dict[str, Any]:
    from preheat import recipe as recipes
    from preheat.bench.worker import take_steps
    from preheat.errors import RecipeError

    try:
        timed_run = take_steps({"recipe": recipes.dump(recipe), "steps": STEPS, "gradient": None, "seconds": 60.0})
    except RecipeError as error:
        raise Skip(str(error)) from None
    figures = _figures(timed_run["seconds"], timed_run["tokens"], timed_run["losses"]) | _memory(where)
    if timed_run["notices"]:
        figures["notices"] = "; ".join(timed_run["notices"])
    return like_the_first(figures, Path(where.folder) / f"{task} losses.json")


def like_the_first(figures: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns the figures; raises `Wrong` if a loss is not that of the task's first rung, which `file` keeps."""
    losses = {key: figures[key] for key in LOSS}
    if not all(math.isfinite(loss) for loss in losses.values()):
        raise Wrong("a loss is not finite", {key: str(value) for key, value in figures.items()})
    if not file.exists():
        file.write_text(json.dumps(losses), encoding="utf-8")
    first = json.loads(file.read_text(encoding="utf-8"))
    beyond = [
        f"{key} {losses[key]:.4g}, before {first[key]:.4g}"
        for key in LOSS
        if abs(losses[key] / first[key] - 1) > LOSS[key]
    ]
    if beyond:
        raise Wrong("; ".join(beyond), figures)
    return figures


def _chosen(task: str, where: Where) -> dict[str, Any]:
    """What `preheat plan --allow rounding` chooses for the card at hand, trained."""
    from preheat import recipe as recipes

    kept = {name: settings for name, settings in next(iter(TASKS[task][3].values())).items() if name in ("lora", "nf4")}
    needed: dict[str, Any] = {name: {} for name in kept} | ({"mixed_precision": {}} if "nf4" in kept else {})
    stated = _recipe(task, needed, where)
    file = Path(where.folder) / "chosen.yaml"
    file.write_text(recipes.dump(stated), encoding="utf-8")
    command = [sys.executable, "-m", "preheat", "plan", file.name, "--aim", "fastest", "--allow", "rounding", "--json"]
    done = subprocess.run(tethered(command), cwd=where.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(f"plan: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}", {})
    plan = json.loads(done.stdout)
    chosen = recipes.parse(json.dumps(plan["recipe"]))
    figures = _run(task, chosen, where)
    return {"chosen": plan.get("chosen", ""), "planned tokens/s": plan["tokens_per_second"]} | figures


def _peer(task: str, run: Callable[..., peers.Taken], where: Where) -> dict[str, Any]:
    """Another trainer on the first rows of the same data."""
    import torch

    from preheat.training.session import data_of

    shape, rows, length, rungs = TASKS[task]
    recipe = _recipe(task, {}, where)
    train: Any = data_of(recipe).train
    rows, length = recipe.batch.size, recipe.batch.seq_len
    tokens = torch.stack([torch.as_tensor(train.row(n).tokens.astype("int64")) for n in range(STEPS * rows)])
    how = peers.Task(
        shape, "nf4" in str(rungs), "lora" in str(rungs), rows, length, STEPS, where.tiny, where.kind, where.folder
    )
    taken = run(how, tokens)
    if not all(math.isfinite(loss) for loss in taken.losses):
        raise Wrong("a loss is not finite", {"losses": str(taken.losses)})
    return _figures(taken.seconds, [rows * length] * STEPS, taken.losses) | _memory(where)
