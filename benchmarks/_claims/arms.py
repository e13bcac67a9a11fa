"""Claims on losses: arms of a small model, each trained at its own best learning rate with three seeds.

An arm is the base recipe with some keys changed. Its rate is searched with a seed of its own (0): from the lowest loss
of `preheat train --find-lr`, the rate is doubled or halved as long as the held-out loss falls. Then seeds 1, 2 and 3
train at that rate. Every run is a process of `preheat train`, and its figures are stored when it ends, so that an
interrupted measurement continues with the next run.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from preheat import recipe as recipes
from preheat.core import Device
from preheat.files import to_json, write_atomic
from preheat.hardware.child_processes import tie_to_parent

__all__ = ["ARMS", "BASE", "SEEDS", "Arm", "ArmResult", "ArmRun", "load_arms", "measure_arms"]

SEEDS = (1, 2, 3)
SEARCH_SEED = 0
STEPS = 200
LENGTH = 128
LENGTHS = (128, 256, 512)
"""Tokens at which the arms of positional embeddings are evaluated; they are trained with the first."""
BASE = f"""\
name: claims
model: {{family: llama, num_layers: 2, hidden_size: 256, num_heads: 4, intermediate_size: 768, tie_embeddings: true}}
data: {{source: stdlib, vocab_size: 2048, validation: 0.05}}
batch: {{size: 8, seq_len: {LENGTH}}}
optimizer: {{lr: 1.0e-3, weight_decay: 0.1, max_grad_norm: 1.0}}
schedule: {{kind: wsd, warmup_ratio: 0.05, decay_ratio: 0.4, min_lr_ratio: 0.02}}
stop: {{max_steps: {STEPS}}}
evaluate: {{rows: 512}}
techniques: {{efficient_attention: {{}}, chunked_loss: {{rows: 512}}}}
hardware: {{device: cpu}}
"""
"""2.2M parameters, 205,000 tokens, AdamW, fp32."""
RANGE = "1e-4..0.3"
RANGE_STEPS = 60
MOST_RATES = 8


@dataclass(frozen=True)
class Arm:
    """The base recipe with some keys changed.

    Attributes:
        settings: overrides (`a.b=c`).
        positions: `learned` or `rotary`: GPT-2 and GPT-NeoX of equal sizes instead of the base's Llama, which differ in
            little else (both have LayerNorm, GELU and biases).
    """

    settings: tuple[str, ...] = ()
    positions: str = ""


def _size(**sizes: int) -> tuple[str, ...]:
    return tuple(f"model.{key}={value}" for key, value in sizes.items())


# Few documents are read several times, and as many are held out.
_EPOCHS = ("data.limit=60", "data.validation=0.5")

ARMS: dict[str, Arm] = {
    "base": Arm(),
    "learned positions": Arm(positions="learned"),
    "rotary positions": Arm(positions="rotary"),
    "4 heads, 1 shared": Arm(_size(num_kv_heads=1)),
    "8 heads": Arm(_size(num_heads=8)),
    "8 heads, 2 shared": Arm(_size(num_heads=8, num_kv_heads=2)),
    "16 heads": Arm(_size(num_heads=16)),
    "16 heads, 4 shared": Arm(_size(num_heads=16, num_kv_heads=4)),
    "32 heads": Arm(_size(num_heads=32)),
    "32 heads, 8 shared": Arm(_size(num_heads=32, num_kv_heads=8)),
    "4 layers of 184": Arm(_size(num_layers=4, hidden_size=184, intermediate_size=552)),
    "8 layers of 128": Arm(_size(num_layers=8, hidden_size=128, intermediate_size=384)),
    "8 layers of 128, depth-scaled": Arm(
        (*_size(num_layers=8, hidden_size=128, intermediate_size=384), "techniques.depth_scaled_init={}")
    ),
    "several epochs, tied": Arm(_EPOCHS),
    "several epochs, untied": Arm((*_EPOCHS, "model.tie_embeddings=false")),
    "rare tokens last": Arm(("techniques.difficulty_curriculum={by: rarity}",)),
    "long documents last": Arm(("techniques.difficulty_curriculum={by: length}",)),
    "GELU": Arm(("techniques.feed_forward={activation: gelu}",)),
    "ReLU": Arm(("techniques.feed_forward={activation: relu}",)),
}


@dataclass(frozen=True)
class ArmRun:
    """A finished training.

    Attributes:
        loss: held-out loss at the end, nats per token.
        training_loss: mean over the last fifth of the steps.
        by_length: tokens -> held-out loss; only of arms of positional embeddings.
    """

    seed: int
    lr: float
    loss: float
    training_loss: float
    tokens_per_second: float
    by_length: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmResult:
    """The runs of an arm so far.

    Attributes:
        arm: what was trained; a result of another definition is discarded.
        date: of the last run.
        lowest: the rate with the lowest loss in the range test, where the search starts; None before it.
        search: runs at other rates with the seed of the search.
        runs: with the seeds of the comparison.
    """

    arm: str
    date: str = ""
    parameters: int = 0
    epochs: float = 0.0
    lowest: float | None = None
    search: tuple[ArmRun, ...] = ()
    runs: tuple[ArmRun, ...] = ()

    def find_best(self) -> ArmRun:
        return min(self.search, key=lambda run: run.loss)

    def is_done(self) -> bool:
        return {run.seed for run in self.runs} == set(SEEDS)


def _describe(arm: Arm) -> str:
    """Returns the text whose change makes earlier results invalid."""
    return f"{BASE}{' '.join(arm.settings)} {arm.positions} {RANGE} {RANGE_STEPS}"


def load_arms(path: Path) -> dict[str, ArmResult]:
    """Reads the results of arms as they are defined now."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    results = {}
    for name, values in stored.items():
        result = ArmResult(
            **{
                **values,
                "search": tuple(ArmRun(**run) for run in values["search"]),
                "runs": tuple(ArmRun(**run) for run in values["runs"]),
            }
        )
        if name in ARMS and result.arm == _describe(ARMS[name]):
            results[name] = result
    return results


def measure_arms(names: list[str], path: Path, today: str) -> None:
    """Trains what the arms of these names lack, and writes the results to `path` after each run."""
    for name in names:
        result = load_arms(path).get(name) or ArmResult(_describe(ARMS[name]))

        def store(result: ArmResult, name: str = name) -> None:
            results = {**load_arms(path), name: replace(result, date=today)}
            write_atomic(path, to_json({key: results[key] for key in ARMS if key in results}, indent=1) + "\n")

        with tempfile.TemporaryDirectory() as folder:
            _measure_arm(name, result, Path(folder), store)


def _measure_arm(name: str, result: ArmResult, folder: Path, store: Callable[[ArmResult], None]) -> None:
    if result.is_done():
        return
    recipe = _write_recipe(ARMS[name], folder)
    if not result.epochs:
        result = replace(result, epochs=_count_epochs(recipe))
    if result.lowest is None:
        options = ["--find-lr", "--lr-range", RANGE, "--lr-steps", str(RANGE_STEPS), "--set", f"seed={SEARCH_SEED}"]
        test = _call_preheat(recipe, folder / "find-lr", options)
        result = replace(result, lowest=float(f"{test['lowest']:.2g}"))
        store(result)
        print(f"{name}: the range test has its lowest loss at {result.lowest:g}", flush=True)
    while (lr := _choose_rate(result)) is not None:
        run, parameters = _train(recipe, folder, SEARCH_SEED, lr, positions=False)
        result = replace(result, search=(*result.search, run), parameters=parameters)
        store(result)
        print(f"{name}: rate {lr:g}: {run.loss:.4f}", flush=True)
    for seed in SEEDS:
        if seed not in {run.seed for run in result.runs}:
            run, parameters = _train(recipe, folder, seed, result.find_best().lr, positions=bool(ARMS[name].positions))
            result = replace(result, runs=(*result.runs, run), parameters=parameters)
            store(result)
            print(f"{name}: seed {seed}: {run.loss:.4f}", flush=True)


def _choose_rate(result: ArmResult) -> float | None:
    """Returns the next rate to try: a neighbour of the best one, twice or half of it; None once both are worse."""
    assert result.lowest is not None
    if not result.search:
        return result.lowest
    best, tried = result.find_best().lr, [run.lr for run in result.search]
    neighbours = [
        rate for rate in (2 * best, best / 2) if not any(math.isclose(rate, lr, rel_tol=1e-3) for lr in tried)
    ]
    return neighbours[0] if neighbours and len(tried) < MOST_RATES else None


def _count_epochs(recipe: Path) -> float:
    """Returns the passes over the training data that a run takes."""
    from preheat.data import prepare
    from preheat.data.packing import Rows

    settings = recipes.load(recipe)
    rows = prepare(settings.data, length=LENGTH, seed=0, tokenizer=settings.model.path).train
    assert isinstance(rows, Rows), "nothing is streamed"
    return STEPS * settings.batch.size / len(rows)


def _write_recipe(arm: Arm, folder: Path) -> Path:
    """Writes the recipe of an arm, and the model's folder if its architecture is none of preheat's families."""
    recipe = recipes.override(recipes.parse(BASE), *arm.settings)
    if arm.positions:
        _write_model(arm.positions, recipe, folder / "model")
        recipe = recipes.override(recipe, f"model={{path: {folder / 'model'}, weights: random}}")
    path = folder / "recipe.yaml"
    path.write_text(recipes.dump(recipe), encoding="utf-8")
    return path


def _write_model(positions: str, recipe: recipes.Recipe, folder: Path) -> None:
    from transformers import GPT2Config, GPTNeoXConfig

    from preheat.data import prepare

    tokenizer = prepare(recipe.data, length=LENGTH, seed=0).tokenizer
    tokenizer.save_pretrained(str(folder))
    model = recipe.model
    assert model.num_layers
    assert model.hidden_size
    assert model.num_heads
    inner = 4 * model.hidden_size
    if positions == "learned":
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=max(LENGTHS),
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            n_inner=inner,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ).save_pretrained(folder)
    else:
        GPTNeoXConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=max(LENGTHS),
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            intermediate_size=inner,
            hidden_act="gelu_new",
            use_parallel_residual=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ).save_pretrained(folder)


def _train(recipe: Path, folder: Path, seed: int, lr: float, *, positions: bool) -> tuple[ArmRun, int]:
    """Trains once. Returns the run, and the parameters of the model."""
    out = folder / f"run-{seed}-{lr:g}"
    summary = _call_preheat(recipe, out, ["--set", f"seed={seed}", "--set", f"optimizer.lr={lr!r}"])
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line and "tokens_per_second" in line]
    assert len(steps) == STEPS, f"{out}: {len(steps)} steps of {STEPS}"
    run = ArmRun(
        seed=seed,
        lr=lr,
        loss=summary["validation_loss"],
        training_loss=statistics.fmean(line["loss"] for line in steps[-STEPS // 5 :]),
        tokens_per_second=statistics.median(line["tokens_per_second"] for line in steps[2:]),
        by_length=_evaluate_lengths(out, folder / "exported") if positions else {},
    )
    return run, plan["parameters"]["total"]


def _call_preheat(recipe: Path, out: Path, options: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "preheat", "train", str(recipe), "--json", "--force", "--out", str(out), *options]
    process = subprocess.run(tie_to_parent(command), capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {process.stderr.strip()}")
    return json.loads(process.stdout)


def _evaluate_lengths(run: Path, exported: Path) -> dict[str, float]:
    """Returns the held-out loss of a run at lengths beyond those of its training."""
    from preheat.compress.export.huggingface import write
    from preheat.data import evaluation_batches, prepare
    from preheat.engine.builder import build
    from preheat.engine.evaluate import evaluate

    shutil.rmtree(exported, ignore_errors=True)
    write(run, exported)
    data = recipes.parse(BASE).data
    losses = {}
    for length in LENGTHS:
        rows = prepare(data, length=length, seed=1, tokenizer=str(exported))
        recipe = recipes.parse(
            f"name: claims\nmodel: {{path: {exported}}}\nbatch: {{size: 8, seq_len: {length}}}\n"
            "stop: {max_steps: 1}\nhardware: {device: cpu}"
        )
        built = build(recipe, vocabulary=len(rows.tokenizer), device=Device("cpu", "this", 64 * 2**30))
        # As many tokens at each length.
        loss, _ = evaluate(built, evaluation_batches(rows.validation, micro=4, limit=65536 // length))
        losses[str(length)] = loss
    return losses
