"""The run folder: the only interface between running and reporting. Append-only, readable while the run goes on. No torch.

recipe.yaml       the recipe with every default written out; `preheat train recipe.yaml` runs it again
plan.json         what was predicted (see `PLAN_KEYS`)
environment.json  machine, versions, threads, command
changes.json      {technique: [{what, count, kernel}]}
metrics.jsonl     a line a step (see `METRIC_KEYS`, what the objective scores: accuracy, what techniques count: recompilations,
                  and where there are experts expert_load, experts_idle, expert_loads and balance_loss: engine/balance.py) and a line an evaluation
                  ({step, validation_loss, tokens, validation_<score>, forgetting_loss, tasks}, as far as measured; tokens: what the loss is the mean over)
before.json       what was measured before the first step, row by row: {texts, tasks}
evaluation.json   the newest evaluation: {step, after, before, difference}, each {texts, tasks: {name: {metrics: {name: {value, low, high}}}}}
events.jsonl      {time, kind, ...}: started, resumed, checkpoint, damaged, unsaved, out_of_memory, rung, stopping, notice, measured, sample, baseline,
                  finished, failed; of out_of_memory and rung: training/rungs.py
samples.json      [{prompt, before, text}] (see `Reader.samples`)
checkpoints/      step-N/ (engine/checkpoint.py)
tokenizer/        the tokenizer as transformers reads it
report.html, report.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from preheat.errors import RunError

__all__ = ["METRIC_KEYS", "PLAN_KEYS", "Reader", "Silent", "Writer", "check_folder", "strict", "write_asked", "write_atomic"]

METRIC_KEYS = {
    "step": "optimizer steps committed, from 1",
    "tokens": "tokens read so far",
    "loss": "mean loss of this step: a trained token in nats, or a pair, answer or document where the objective judges those",
    "lr": "learning rate of this step",
    "gradient_norm": "before clipping",
    "seconds": "wall-clock seconds of this step",
    "tokens_per_second": "of this step",
    "memory": "bytes in use after this step (resident on a CPU, allocated on a GPU) less what the imports took",
    "elapsed": "seconds of training so far, over all sessions of the run",
    "length": "tokens in a row of this step",
}
PLAN_KEYS = {
    "fits": "whether the predicted peak is at most what the device has",
    "peak_gib": "predicted peak memory, GiB, less what the imports take",
    "peak_gib_interval": "[low, high]: nine in ten measured peaks lay between",
    "available_gib": "what the device has",
    "memory": "{category: GiB} at the peak: parameters, gradients, optimizer, activations, temporary, overhead",
    "overhead": "{what: GiB} of memory.overhead: rounding, gathered weights, communication buffers, what the allocator keeps, context, workspaces, process, kernels, saving",
    "overhead_sources": "{what: where its figure is from}",
    "allocated_gib": "of it tensors alone",
    "reserved_gib": "tensors, and what the allocator keeps of freed ones: torch's max_memory_reserved on a GPU",
    "phases": "{phase: GiB}, the peak of each: load, forward, head and loss, backward, update, saving, evaluation, generation (where there are samples)",
    "phase_memory": "{phase: {category: GiB}} at the peak of each phase, categories as of memory",
    "export": "{category: GiB} at the peak of `preheat export`, a command of its own; None for several devices",
    "peak_phase": "the one that is the peak of all",
    "seconds_per_step": "predicted",
    "tokens_per_second": "predicted",
    "tokens_per_second_interval": "[low, high]: nine in ten measured speeds lay between",
    "mfu": "model FLOPs utilisation, predicted, of the measured matrix rate",
    "fp32_rate": "FLOP/s of products in fp32, where the recipe computes in bf16 and this device is slower in it; None otherwise",
    "flops_per_step": "counted by the dry run",
    "parameters": "{total, trained}",
    "steps": "steps of the run",
    "seconds_total": "predicted time to finish",
    "contended": "whether the machine was busy when its rates were measured, and is still",
    "pace": "how many times as long as by this machine's rates steps of earlier runs took, in the median of the last nine of 20 s and more: in the predicted seconds; 1 where fewer than three are known",
    "gives_back": "whether a GPU's allocator must give back freed memory for it to fit, which takes time in each step",
    "heap": "why preheat's heap, whose memory is predicted, will not serve on this machine; None where it will",
    "watts": "of the device's board at most; None where none is known",
}


def strict(value: Any) -> Any:
    """The same data with null for NaN and infinities, which JSON has no word for.

    Example:
        >>> strict({"loss": float("nan"), "steps": (1, 2)})
        {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomic(path: Path, text: str) -> None:
    """Writes a file beside, syncs it and renames: a reader never sees half of it."""
    beside = path.with_name(path.name + ".writing")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_asked(path: str | Path, text: str, *, fix: str = "name a file in a folder that exists") -> Path:
    """`write_atomic` of a file that the user named; returns its path.

    Raises:
        RunError: it cannot be written; `fix` says what to do.
    """
    path = Path(path)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {fix}") from None
    return path


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line that is still being written, or that a crash cut, is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):  # the cut end of a killed writer, completed by the next
                    yield json.loads(line)


class Reader:
    """Reads a run, finished or still going on.

    Example:
        >>> run = Reader("runs/demo")                                   # doctest: +SKIP
        >>> run.plan["peak_gib"], run.metrics()[-1]["loss"]             # doctest: +SKIP
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "recipe.yaml").is_file():
            raise RunError(f"{self.path}: is not a run (it has no recipe.yaml)")

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @property
    def recipe_text(self) -> str:
        return (self.path / "recipe.yaml").read_text(encoding="utf-8")

    @property
    def plan(self) -> dict[str, Any]:
        return self._json("plan.json")

    @property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @property
    def changes(self) -> dict[str, list[dict[str, Any]]]:
        return self._json("changes.json")

    @property
    def evaluation(self) -> dict[str, Any]:
        """The newest evaluation with intervals and, after a first step, beside the one before it; empty without any."""
        return self._json("evaluation.json")

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step. Steps that were taken again after a crash stand once, as last taken."""
        by_step = {line["step"]: line for line in _lines(self.path / "metrics.jsonl") if "loss" in line}
        return [by_step[step] for step in sorted(by_step)]

    def evaluations(self) -> list[dict[str, Any]]:
        """One dict an evaluation: {step, validation_loss, tokens, forgetting_loss, tasks: {name: {metric: value}}}, as far as measured."""
        by_step = {line["step"]: line for line in _lines(self.path / "metrics.jsonl") if "loss" not in line}
        return [by_step[step] for step in sorted(by_step)]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in _lines(self.path / "events.jsonl") if kind is None or e["kind"] == kind]

    def samples(self) -> list[dict[str, Any]]:
        """[{prompt, before, text}]: the texts written last, each beside what the model wrote to that prompt before its first step.

        None stands where there is none.
        """
        found: dict[str, dict[str, Any]] = {}
        fresh = True
        for event in self.events():
            if event["kind"] in ("started", "resumed"):
                fresh = True
            elif event["kind"] == "sample":
                key = json.dumps(event.get("prompt"))
                if event.get("step") == 0:
                    found[key] = {"prompt": event.get("prompt"), "before": event.get("text"), "text": None}
                    continue
                if fresh:  # another session wrote after other prompts, perhaps
                    found = {k: {**v, "text": None} for k, v in found.items() if v["before"] is not None}
                fresh = False
                found.setdefault(key, {"prompt": event.get("prompt"), "before": None})["text"] = event.get("text")
        written = [v for v in found.values() if v["text"] is not None]
        return written or list(found.values())

    def measured(self) -> dict[str, Any]:
        """{peak_gib, tokens_per_second, ...} of the last session; empty while the first goes on."""
        found = self.events("measured")
        return found[-1] if found else {}


def check_folder(path: Path, *, resume: bool) -> None:
    """Whether a run may begin in a folder, or go on there. Nothing is made.

    Raises:
        RunError: it holds a run already, or none to resume, or it cannot be written there.
    """
    holds = (path / "recipe.yaml").exists()
    if holds and not resume:
        raise RunError(f"{path}: holds a run already; add --resume to go on with it, or name another folder with --out")
    if resume and not holds:
        raise RunError(f"{path}: holds no run to resume; run it without --resume first")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise _unwritable(path, "Not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(path, "Permission denied")


def _unwritable(path: Path, why: str | None) -> RunError:
    return RunError(f"{path}: cannot write there ({why}); name another folder with --out")


class Writer:
    """Writes a run. One writer a folder: a second one is refused while the first lives.

    Args:
        path: the folder. A new run needs one that holds no run; `resume` needs one that does.

    Raises:
        RunError: the folder holds a run already, cannot be written, or another process writes it.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        self.path = Path(path)
        check_folder(self.path, resume=resume)
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a")
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from None
        self._locked()
        self._files: dict[str, TextIO] = {}

    def _locked(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(
                f"{self.path}: another process is writing this run; wait for it or end it, or name another folder with --out"
            ) from None

    def text(self, name: str, text: str) -> None:
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror})") from None

    def json(self, name: str, value: Any) -> None:
        self.text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            file = self._files.get(name)
            if file is None:
                path = self.path / name
                cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
                file = self._files[name] = path.open("a", encoding="utf-8")
                if cut:  # a killed writer left half a line: end it, so that ours stands alone
                    file.write("\n")
            file.write(json.dumps(value) + "\n")
            file.flush()
        except OSError as error:
            raise RunError(
                f"{self.path / name}: cannot be written ({error.strerror}); free some room and go on with --resume"
            ) from None

    def metric(self, **values: Any) -> None:
        self._append("metrics.jsonl", values)

    def event(self, kind: str, **values: Any) -> None:
        self._append("events.jsonl", {"time": time.time(), "kind": kind, **values})

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._lock.close()


class Silent(Writer):
    """The writer of a process whose run another one writes down."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def text(self, name: str, text: str) -> None:
        pass

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
