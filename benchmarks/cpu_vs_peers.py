"""preheat against transformers' Trainer and litgpt on this machine's CPU: one run, alternating, the same work for all.

    python benchmarks/cpu_vs_peers.py [--size 15M|110M] [--repeats 3] [--steps 50] [--contenders NAME ...] [--out FILE.json]

README.md beside this file says what is held equal, what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "_peers"
sys.path.insert(0, str(WORKERS))

from contract import UNTIMED, Job  # noqa: E402
from table import COLUMNS, DISTURBED, NARROW, format_cells, format_giga, is_steady, render_markdown  # noqa: E402

PEERS = ROOT / ".peers"
PEERS_NEED = (
    "litgpt==0.5.13",
    "torch==2.13.0",
    "requests",
)  # requests: litgpt needs it to save and does not ask for it
EQUAL = 0.01
"""Losses that differ by at most this share of the baseline's are equal."""


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings and the batch it is trained with."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    batch: int
    length: int
    lr: float
    vocabulary: int = 32_000

    def flops_per_token(self) -> float:
        """Model FLOPs of a training step for each token; what a contender computes twice does not count.

        6 for each weight of the layers' matrices and of the head (2 forward, 4 backward; looking up an embedding is free), and
        for attention 12 * layers * width for each pair of a token and one that it sees, (length + 1) / 2 on average as the
        mask is causal.
        """
        layer = 4 * self.width**2 + 3 * self.width * self.feed_forward
        head = self.width * self.vocabulary
        return 6 * (self.layers * layer + head) + 12 * self.layers * self.width * (self.length + 1) / 2


SHAPES = {
    "15M": Shape(width=288, layers=6, heads=6, feed_forward=768, batch=16, length=256, lr=5e-4),
    "110M": Shape(width=768, layers=12, heads=12, feed_forward=2048, batch=4, length=512, lr=3e-4),
}


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    worker: str
    settings: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    """Runs in `.peers/`."""
    bf16: bool = False
    """Multiplies in bf16."""


SLOW = 4
"""Contenders in bf16 are left out where its products have less than one such part of the fp32 rate, unless they are named."""
EXACT = {"chunked_loss": {"rows": 512}, "efficient_attention": {}}
BF16 = {"mixed_precision": {"mode": "bf16_weights"}, **EXACT}
FUSED: dict[str, Any] = {"fused_operators": {}}
COMPILED: dict[str, Any] = {"compile": {}}
"""Fuses what `FUSED` does, so that they exclude each other."""
CONTENDERS = (
    Contender("trainer", "transformers Trainer, its defaults", "trainer_worker.py"),
    Contender(
        "trainer-compile", "transformers Trainer, torch_compile=True", "trainer_worker.py", {"torch_compile": True}
    ),
    # Without a GPU the Trainer refuses bf16 unless use_cpu says that this is meant.
    Contender(
        "trainer-bf16",
        "transformers Trainer, bf16=True",
        "trainer_worker.py",
        {"bf16": True, "use_cpu": True},
        bf16=True,
    ),
    Contender(
        "trainer-bf16-compile",
        "transformers Trainer, bf16=True, torch_compile=True",
        "trainer_worker.py",
        {"bf16": True, "use_cpu": True, "torch_compile": True},
        bf16=True,
    ),
    # litgpt calls torch.compile by itself.
    Contender(
        "litgpt",
        "litgpt pretrain, its defaults on a CPU (32-true)",
        "litgpt_worker.py",
        {"precision": "32-true"},
        peer=True,
    ),
    Contender(
        "litgpt-mixed",
        "litgpt pretrain, bf16-mixed, fused AdamW",
        "litgpt_worker.py",
        {"precision": "bf16-mixed", "fused": True},
        peer=True,
        bf16=True,
    ),
    Contender(
        "litgpt-bf16",
        "litgpt pretrain, bf16-true, fused AdamW",
        "litgpt_worker.py",
        {"precision": "bf16-true", "fused": True},
        peer=True,
        bf16=True,
    ),
    Contender(
        "preheat-fp32",
        "preheat, fp32, chunked loss, fused operators",
        "preheat_worker.py",
        {"techniques": {**EXACT, **FUSED}},
    ),
    Contender(
        "preheat-fp32-compile",
        "preheat, fp32, chunked loss, compile",
        "preheat_worker.py",
        {"techniques": {**EXACT, **COMPILED}},
    ),
    Contender(
        "preheat",
        "preheat, bf16 weights, chunked loss, fused operators",
        "preheat_worker.py",
        {"techniques": {**BF16, **FUSED}},
        bf16=True,
    ),
    Contender(
        "preheat-compile",
        "preheat, bf16 weights, chunked loss, compile",
        "preheat_worker.py",
        {"techniques": {**BF16, **COMPILED}},
        bf16=True,
    ),
)
BASELINES = ("trainer", "trainer-bf16")


def build_environment() -> dict[str, str]:
    """The same for all: every core (torch's default), no network, preheat importable."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def call(*command: str | Path) -> dict[str, Any]:
    """Runs a worker; its result, or {"failed": why} with the last line that it wrote to stderr."""
    done = subprocess.run(
        [str(c) for c in command], env=build_environment(), capture_output=True, text=True, check=False
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0:
        return {"failed": lines[-1] if lines else f"ended with {done.returncode} and said nothing", "log": lines[-40:]}
    return json.loads(lines[-1])


def must(*command: str | Path) -> dict[str, Any]:
    """As `call`, and ends the benchmark when it fails."""
    result = call(*command)
    if "failed" in result:
        raise SystemExit("\n".join(result["log"]))
    return result


def find_peers_python() -> Path:
    """The Python of `.peers/`, made on the first call."""
    python, made = PEERS / "bin" / "python", PEERS / "made"
    need = "\n".join(PEERS_NEED)
    if not made.is_file() or made.read_text(encoding="utf-8") != need:
        venv.create(PEERS, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *PEERS_NEED], check=True)
        made.write_text(need, encoding="utf-8")
    return python


def prepare(folder: Path, shape: Shape, options: argparse.Namespace, *, litgpt: bool) -> str:
    """One model and one token file for all; returns what the text is."""
    values = {**vars(shape), "rows": options.steps * shape.batch, "seed": options.seed, "tokenizer": options.tokenizer}
    (folder / "shape.json").write_text(json.dumps(values), encoding="utf-8")
    text = must(sys.executable, WORKERS / "prepare.py", folder, folder / "shape.json")["text"]
    if litgpt:
        must(find_peers_python(), WORKERS / "litgpt_worker.py", "--convert", folder / "litgpt", folder / "model")
    return text


def train(contender: Contender, folder: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One training of one contender in its own process."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    job = Job(
        name=contender.name,
        model=str(folder / "model"),
        litgpt_model=str(folder / "litgpt"),
        tokens=str(folder / "tokens.npy"),
        scratch=str(scratch),
        batch=shape.batch,
        length=shape.length,
        steps=options.steps,
        lr=shape.lr,
        seed=options.seed,
        settings=contender.settings,
    )
    job.write(folder / "job.json")
    python = find_peers_python() if contender.peer else Path(sys.executable)
    return call(python, WORKERS / contender.worker, folder / "job.json")


def compute_median(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summarize_turns(runs: dict[str, list[dict[str, Any]]], shape: Shape, ceiling: float) -> list[dict[str, Any]]:
    """A row a contender. Ratios are taken within a round, where the machine is most alike, and then their median."""
    rows: list[dict[str, Any]] = []
    sound = {name: results for name, results in runs.items() if not any("failed" in r for r in results)}
    reference = statistics.median(r["loss_at_end"] for r in sound[BASELINES[0]]) if BASELINES[0] in sound else None
    for contender in CONTENDERS:
        if contender.name not in runs:
            continue
        results = runs[contender.name]
        if contender.name not in sound:
            rows.append(
                {
                    "name": contender.name,
                    "what": contender.what,
                    "failed": next(r["failed"] for r in results if "failed" in r),
                }
            )
            continue
        rate = compute_median([r["tokens_per_second"] for r in results])
        row: dict[str, Any] = {
            "name": contender.name,
            "what": contender.what,
            "settings": contender.settings,
            "versions": results[0]["versions"],
            "tokens_per_second": rate,
            "within_run_p10_p90": [statistics.median(r["spread"][i] for r in results) for i in (0, 1)],
            "peak_rss_bytes": statistics.median(r["peak_rss_bytes"] for r in results),
            "bytes_less_imports": statistics.median(r["peak_rss_bytes"] - r["rss_after_imports"] for r in results),
            "untimed_seconds": statistics.median(r["untimed_seconds"] for r in results),
            "loss": statistics.median(r["loss_at_end"] for r in results),
            "model_flops_share": rate["median"] * shape.flops_per_token() / ceiling,
        }
        for base in BASELINES:
            if base in sound:
                pairs = list(zip(results, sound[base], strict=True))
                row[f"speed_against_{base}"] = compute_median(
                    [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
                )
                row[f"memory_against_{base}"] = compute_median(
                    [
                        (a["peak_rss_bytes"] - a["rss_after_imports"]) / (b["peak_rss_bytes"] - b["rss_after_imports"])
                        for a, b in pairs
                    ]
                )
        if reference is not None:
            row["loss_difference"] = row["loss"] / reference - 1
            row["equal_loss"] = abs(row["loss_difference"]) <= EQUAL
        rows.append(row)
    return rows


def iterate_rounds(contenders: list[Contender], repeats: int) -> Iterator[Contender]:
    """Round-robin, each round begun by the next contender, so that none always follows the same one."""
    for n in range(repeats):
        start = n % len(contenders)
        yield from contenders[start:] + contenders[:start]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    data = Path(os.environ.get("PREHEAT_DATA", ROOT.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="15M")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        help=f"optimizer steps of each training; the first {UNTIMED} are not timed (default 50)",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=[c.name for c in CONTENDERS],
        help="default: all, without those in bf16 on a CPU that is slow in it",
    )
    parser.add_argument(
        "--tokenizer",
        default=str(data / "tokenizers" / "llama2"),
        help="folder with a tokenizer.json of at most 32,000 pieces; a BPE is trained when it is not there",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON to write, the Markdown table beside it (default benchmarks/results/cpu_vs_peers-SIZE.json)",
    )
    options = parser.parse_args(arguments)
    if options.steps <= UNTIMED or options.repeats < 1:
        parser.error(
            f"--steps {options.steps} --repeats {options.repeats}: take at least {UNTIMED + 1} steps and 1 repeat"
        )
    options.out = options.out or ROOT / "benchmarks" / "results" / f"cpu_vs_peers-{options.size}.json"
    return options


def format_command(options: argparse.Namespace) -> str:
    """The command that repeats this run; folders of this machine are left out."""
    words = [
        "python",
        "benchmarks/cpu_vs_peers.py",
        "--size",
        options.size,
        "--repeats",
        options.repeats,
        "--steps",
        options.steps,
        "--seed",
        options.seed,
    ]
    if options.contenders:
        words += ["--contenders", *options.contenders]
    return shlex.join(map(str, words))


def choose_contenders(named: list[str] | None, rates: dict[str, Any]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that run, and why others are left out: those named, else all that make sense at these rates."""
    if named:
        return [c for c in CONTENDERS if c.name in named], {}
    slow = rates["bf16"] * SLOW < rates["fp32"]
    why = f"bf16 products run at {format_giga(rates['bf16'])} GFLOP/s on this CPU, fp32 at {format_giga(rates['fp32'])}"
    return [c for c in CONTENDERS if not (slow and c.bf16)], {c.name: why for c in CONTENDERS if slow and c.bf16}


def main() -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    options = parse_options()
    shape, console = SHAPES[options.size], Console()
    console.print(f"{options.size}: measuring the matrix rate", highlight=False)
    begin = must(sys.executable, WORKERS / "matrix_rate.py")
    console.print(
        f"{begin['cpu']}, {begin['threads']} threads: bf16 {format_giga(begin['bf16'])} GFLOP/s, fp32 {format_giga(begin['fp32'])}",
        highlight=False,
    )
    contenders, skipped = choose_contenders(options.contenders, begin)
    for name, why in skipped.items():
        console.print(f"{name:20} left out: {why}; --contenders {name} runs it", highlight=False, soft_wrap=True)
    if any(c.peer for c in contenders) and not (PEERS / "made").is_file():
        console.print("installing litgpt into .peers, once", highlight=False)
    runs: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as temporary, Progress(*columns, console=console) as progress:
        folder = Path(temporary)
        task = progress.add_task("preparing the model and the rows", total=len(contenders) * options.repeats)
        text = prepare(folder, shape, options, litgpt=any(c.peer for c in contenders))
        for contender in iterate_rounds(contenders, options.repeats):
            progress.update(task, description=contender.name)
            result = train(contender, folder, shape, options)
            runs[contender.name].append(result)
            said = (
                f"failed: {result['failed']}"
                if "failed" in result
                else f"{result['tokens_per_second']:,.0f} tokens/s, loss {result['loss_at_end']:.4f}"
            )
            progress.console.print(f"{contender.name:20} {said}", highlight=False, markup=False)
            progress.advance(task)
        progress.update(task, description="measuring the matrix rate")
        end = must(sys.executable, WORKERS / "matrix_rate.py")

    rows = summarize_turns(runs, shape, max(rates[kind] for rates in (begin, end) for kind in ("bf16", "fp32")))
    result = {
        "command": format_command(options),
        "date": time.strftime("%Y-%m-%d"),
        "size": options.size,
        "steps": options.steps,
        "repeats": options.repeats,
        "equal_within": EQUAL,
        "seed": options.seed,
        "shape": {**vars(shape), "flops_per_token": shape.flops_per_token()},
        "text": text,
        "skipped": skipped,
        "python": platform.python_version(),
        "machine": {"begin": begin, "end": end},
        "rows": rows,
        "runs": {name: [{k: v for k, v in r.items() if k != "log"} for r in results] for name, results in runs.items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(render_markdown(result), encoding="utf-8")
    table = Table(
        *(COLUMNS[i] for i in NARROW),
        title=f"{options.size}, {options.steps} steps, rounds: {options.repeats}",
        box=None,
    )
    for row in rows:
        shown = [row["name"], *format_cells(row)[1:]]
        table.add_row(*(shown[i] for i in NARROW))
    console.print(table)
    console.print(
        f"matrix rate in GFLOP/s: bf16 {format_giga(begin['bf16'])} before, {format_giga(end['bf16'])} after; "
        f"fp32 {format_giga(begin['fp32'])} before, {format_giga(end['fp32'])} after; {options.out}"
    )
    if not is_steady(result["machine"]):
        console.print(DISTURBED, style="bold yellow")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
