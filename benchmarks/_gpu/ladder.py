"""How fast: what the plan chooses and each step up to it, beside other trainers with the same tokens, one after another on the same card.

Speed is the median over the timed steps with its spread; the loss of the last step shows that the work is alike. Other trainers run
where they are installed, and are named where they are not. `plans` plans the same recipes for a card that is not at hand.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from _gpu import peers
from _gpu.case import Case, Skip, Where, Wrong
from _gpu.shapes import build_recipe
from preheat.hardware.child_processes import tie_to_parent

STEPS, UNTIMED = 9, 4
DOES_NOT_FIT = 3
"""Exit code of `preheat plan`, which has a plan all the same: a rung of plain operators may be too large."""
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


CHOICE = "the plan's choice"
PREDICTED = {
    "tokens_per_second": "planned tokens/s",
    "allocated_gib": "planned allocated GiB",
    "reserved_gib": "planned reserved GiB",
    "peak_gib": "planned GiB on the card",
}
"""Keys of a plan, and their names among the figures."""


def cases(where: Where) -> list[Case]:
    selected = []
    for task, (_, _, _, rungs) in TASKS.items():
        selected.append(Case(f"{task}/{CHOICE}", functools.partial(_chosen, task), seconds=180))
        selected += [Case(f"{task}/{rung}", functools.partial(_taken, task, rung), seconds=120) for rung in rungs]
        if task != "packed functions":
            # The first one of a model also writes its weights: 16 GB of 8B.
            selected += [
                Case(f"{task}/{peer}", functools.partial(_peer, task, peer), seconds=180) for peer in peers.PEERS
            ]
    return selected


def plans(where: Where) -> list[Case]:
    """Cases that write plans to `where.plan_to`, of the rungs and of the plan's choices, by the names of those."""
    return [
        Case(f"{task}/{rung}", functools.partial(_write_plan, task, rung), seconds=900)
        for task, (_, _, _, rungs) in TASKS.items()
        for rung in (CHOICE, *rungs)
    ]


def plan_file(folder: str, task: str, rung: str) -> Path:
    """Returns the file of a plan: the recipe, what it was planned for, and what is predicted."""
    return Path(folder) / (re.sub("[^A-Za-z0-9]+", "-", f"{task}/{rung}") + ".json")


def _recipe(task: str, techniques: dict[str, Any], where: Where) -> Any:
    shape, rows, length, _ = TASKS[task]
    if task == "packed functions":
        data = f"{{source: {_functions(where)}, vocab_size: 4096, preflight: {{truncated: warn}}}}"
    else:
        data = f"{{source: {_one_document(where)}, text_files: whole, vocab_size: 4096, validation: 0}}"
    more = {"data": data}
    return build_recipe(where, shape, rows, length, techniques, STATED_STEPS, **more)


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
    timed = sorted(seconds[UNTIMED:])
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

    if where.kind != "cuda":
        return {}
    return {
        "allocated GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved GiB": torch.cuda.max_memory_reserved() / 2**30,
    }


def _taken(task: str, rung: str, where: Where) -> dict[str, Any]:
    """A rung; as it was planned beforehand if `where.planned` has plans."""
    if where.planned:
        return _run_planned(task, rung, _read_plan(task, rung, where), where)
    return _run(task, _recipe(task, TASKS[task][3][rung], where), where)


def _run(task: str, recipe: Any, where: Where, planned: dict[str, Any] | None = None) -> dict[str, Any]:
    from preheat import recipe as recipes
    from preheat.bench.messages import TurnJob
    from preheat.bench.worker import take_steps
    from preheat.errors import RecipeError

    try:
        timed_run = take_steps(TurnJob(recipes.dump(recipe), STEPS))
    except RecipeError as error:
        raise Skip(str(error)) from None
    figures = _figures(timed_run.seconds, timed_run.tokens, timed_run.losses) | _memory(where)
    if timed_run.notices:
        figures["notices"] = "; ".join(timed_run.notices)
    if planned:
        figures |= planned | _planned_over_measured(planned, figures)
    return like_the_first(figures, Path(where.folder) / f"{task} losses.json")


def _planned_over_measured(planned: dict[str, Any], figures: dict[str, Any]) -> dict[str, float]:
    return {
        f"planned over measured {key}": planned[f"planned {key}"] / figures[key]
        for key in ("tokens/s", "allocated GiB", "reserved GiB")
        if key in figures
    }


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
    """Trains the recipe that `preheat plan --allow rounding` chooses for the card, planned here or beforehand."""
    return _run_planned(
        task, CHOICE, _read_plan(task, CHOICE, where) if where.planned else _plan(task, CHOICE, where), where
    )


def _run_planned(task: str, rung: str, plan: dict[str, Any], where: Where) -> dict[str, Any]:
    """Trains a planned recipe on the device and the data at hand."""
    from preheat import recipe as recipes

    recipe, here = recipes.parse(json.dumps(plan["recipe"])), _recipe(task, {}, where)
    recipe = replace(recipe, data=here.data, hardware=replace(recipe.hardware, device=here.hardware.device))
    figures = {"planned for": plan["card"]} if where.planned else {}
    if rung == CHOICE:
        figures["chosen"] = plan["chosen"]
    return _run(task, recipe, where, figures | plan["predicted"])


def _plan(task: str, rung: str, where: Where) -> dict[str, Any]:
    """Plans a rung, or lets the plan choose, for `where.card` or the device at hand.

    Returns:
        {card, chosen, predicted: figures, recipe: the planned one, as values}.
    """
    from preheat import recipe as recipes

    rungs, options = TASKS[task][3], ["--gpu", where.card] if where.card else []
    if rung == CHOICE:
        techniques: dict[str, Any] = {name: {} for name in next(iter(rungs.values())) if name in ("lora", "nf4")}
        if "nf4" in techniques:
            techniques["mixed_precision"] = {}
        options += ["--aim", "fastest", "--allow", "rounding"]
    else:
        techniques = rungs[rung]
    file = Path(where.folder) / "stated.yaml"
    file.write_text(recipes.dump(_recipe(task, techniques, where)), encoding="utf-8")
    command = [sys.executable, "-m", "preheat", "plan", file.name, "--json", *options]
    done = subprocess.run(tie_to_parent(command), cwd=where.folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, DOES_NOT_FIT):
        raise Wrong(f"plan: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}", {})
    plan = json.loads(done.stdout)
    return {
        "card": plan["device"]["name"],
        "chosen": plan["chosen"],
        "predicted": {name: plan[key] for key, name in PREDICTED.items()},
        "recipe": plan["recipe"],
    }


def _write_plan(task: str, rung: str, where: Where) -> dict[str, Any]:
    plan = _plan(task, rung, where)
    plan_file(where.plan_to, task, rung).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return {"planned for": plan["card"], "chosen": plan["chosen"], **plan["predicted"]}


def _read_plan(task: str, rung: str, where: Where) -> dict[str, Any]:
    file = plan_file(where.planned, task, rung)
    if not file.exists():
        raise Skip(f"no {file.name} in {where.planned}: write it with --plan-to")
    plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return plan


def _peer(task: str, peer: str, where: Where) -> dict[str, Any]:
    """Another trainer on the first rows of the same data; with activation checkpointing if it does not fit without."""
    run = peers.PEERS[peer]
    shape, _, _, rungs = TASKS[task]
    recipe = _recipe(task, {}, where)
    rows, length = recipe.batch.size, recipe.batch.seq_len
    sizes = (
        shape,
        "nf4" in str(rungs),
        "lora" in str(rungs),
        rows,
        length,
        STEPS,
        where.tiny,
        where.kind,
        where.folder,
    )
    tokens = _rows_of(task, recipe, where)
    for checkpointed in (False, True):
        answer = peers.run_apart(peer, peers.Task(*sizes, checkpointed), tokens, where.sites.get(run.__name__, ""))
        if "skip" in answer:
            raise Skip(answer["skip"])
        if "out of memory" not in answer:
            break
    else:
        raise Wrong(f"with activation checkpointing too: {answer['out of memory']}", {})
    if not all(math.isfinite(loss) for loss in answer["losses"]):
        raise Wrong("a loss is not finite", {"losses": str(answer["losses"])})
    figures = _figures(answer["seconds"], [rows * length] * STEPS, answer["losses"]) | answer["figures"]
    return figures | {"checkpointed": checkpointed, "versions": answer["versions"]}


def _rows_of(task: str, recipe: Any, where: Where) -> Path:
    """Returns a file with the token ids of the rows that all trainers of a task read, in their order."""
    import numpy as np

    from preheat.training.session import data_of

    file = Path(where.folder) / f"{task} rows.npy"
    if not file.exists():
        train: Any = data_of(recipe).train
        np.save(file, np.stack([train.row(n).tokens.astype("int64") for n in range(STEPS * recipe.batch.size)]))
    return file
