"""Compares models at text generation: time to first token, tokens per second and cache memory, in alternating turns.

contenders ──a process each──▶ rounds over shapes ──medians──▶ inference.json, inference.html

Any models that `load_model` opens can be compared, compressed or not, and one model with several settings.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal

from preheat.core.json_types import JsonObject
from preheat.errors import DoesNotFit, RecipeError, RunError
from preheat.files import to_json, write_atomic
from preheat.hardware.child_processes import ended_by, last_error_line, tethered
from preheat.recipe import Sample
from preheat.run.layout import claim

__all__ = ["InferenceContender", "bench_inference"]

Say = Callable[[str, int, int], None]


@dataclass
class InferenceContender:
    """A contender: a model and its generation settings.

    Attributes:
        name: name in tables.
        model: a path that `load_model` accepts.
        settings: generation settings such as cache and speculative decoding; `max_new_tokens` is set by the benchmark.
        dtype: dtype to which the weights are cast; None: as the model is opened.
        engine: transformers uses its own model class and `generate`, greedy, without code of preheat.
    """

    name: str
    model: str
    settings: Sample = field(default_factory=Sample)
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    engine: Literal["preheat", "transformers"] = "preheat"


class _Worker:
    """The process of a contender and its answers."""

    def __init__(self, speech: InferenceContender, job: JsonObject, folder: Path):
        self.speech, self.failed, self.about, self.turns = (
            speech,
            "",
            JsonObject(),
            dict[tuple[int, int], list[Any]](),
        )
        # The object's id makes file names unique among the workers of a comparison.
        file = folder / f"{id(self)}.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        # Standard error goes to a file: an unread pipe would fill up and block the worker.
        self._errors: IO[str] = (folder / f"{id(self)}.log").open("w+", encoding="utf-8", errors="replace")
        command = [sys.executable, "-m", "preheat.bench.inference_worker", str(file)]
        self._process = subprocess.Popen(
            tethered(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        # The worker waits for further requests, so it is ended from here.
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, request: object = None) -> JsonObject:
        """Sends a request and returns the answer, or waits for the initial one; empty after a failure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A failed worker has ended and would not answer.
        if self.failed:
            return {}
        if request is not None:
            # A worker that has ended reads nothing; the empty line below reports it.
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        # An empty line means that the worker closed its output, because it ended.
        line = self._process.stdout.readline()
        answer: JsonObject = json.loads(line) if line else self._ended()
        self.failed = answer.get("failed", "")
        return {} if self.failed else answer

    def _ended(self) -> JsonObject:
        code = self._process.wait()
        last = last_error_line(self._errors) if code >= 0 else ""
        return {"failed": last or f"its process {ended_by(code)}"}


def bench_inference(
    speeches: Sequence[InferenceContender],
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (128, 512),
    tokens: int = 32,
    repeats: int = 5,
    text: str | None = None,
    out: Path,
    say: Say | None = None,
) -> JsonObject:
    """Measures contenders in alternating turns, shape by shape, and writes `inference.json`.

    Each contender generates every shape once before it is timed, so that kernel selection and compilation are not
    measured.

    Args:
        speeches: the first is the baseline.
        batches: numbers of rows per batch.
        lengths: prompt lengths in tokens; each is combined with each of `batches`.
        tokens: tokens generated after each prompt, at least 2; no end token stops a text early.
        repeats: rounds; each begins with the next contender.
        text: a file from which prompts are cut; default Python's standard library.

    Returns:
        {machine, batches, lengths, tokens, repeats, models: [{name, model, parameters, weights_bytes, dtype, loss,
        startup_seconds, beyond_weights_gib, failed}], rows: [{name, rows, length, first_token_seconds,
        prefill_tokens_per_second, decode_tokens_per_second, ratio, first_token_ratio: each {value, low, high},
        tokens_per_pass, cache_bytes, cache_predicted_bytes, same_text}]}. `same_text` is the fraction of rows with the
        same tokens as the first contender.

    Raises:
        RecipeError: a prompt with its answer is longer than a model's context.
        DoesNotFit: weights and cache of a shape exceed the memory.
        RunError: the first contender failed, or the folder cannot be written.
    """
    say = say or (lambda what, done, total: None)
    cells = [(rows, length) for length in lengths for rows in batches]
    claim(out, "inference", ("inference.json", "inference.html"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for n, speech in enumerate(speeches):  # one after the other, because start-up is measured
            say(f"opening {speech.name}", n, len(speeches))
            settings = dataclasses.asdict(speech.settings)
            # Both are settings of the benchmark, equal for all contenders.
            del settings["max_new_tokens"], settings["prompts"]
            job = {"model": speech.model, "settings": settings, "dtype": speech.dtype, "engine": speech.engine}
            worker = stack.enter_context(
                _Worker(speech, job | {"tokens": tokens, "cells": cells, "text": text}, folder)
            )
            worker.about = worker.ask()
            workers.append(worker)
            # The baseline's failure ends the comparison before the other models are opened.
            if worker.failed and not n:
                raise RunError(f"{speech.name}: {worker.failed}")
        running = [worker for worker in workers if not worker.failed]
        # Before any measurement, so that a shape that does not fit is reported at once.
        _require_room(running, cells, tokens)
        for worker in running:
            worker.ask("begin")
        _take_turns(running, cells, repeats, say)
        for worker in running:
            worker.about |= worker.ask("end")
    if workers[0].failed:
        raise RunError(f"{workers[0].speech.name}: {workers[0].failed}")
    summary = {
        "machine": workers[0].about["device"] | {"torch": version("torch")},
        "batches": list(batches),
        "lengths": list(lengths),
        "tokens": tokens,
        "repeats": repeats,
        "models": [_model(worker) for worker in workers],
        "rows": [
            _row(worker, workers[0], cell, number)
            for number, cell in enumerate(cells)
            for worker in workers
            if not worker.failed
        ],
    }
    write_atomic(out / "inference.json", to_json(summary, indent=1) + "\n")
    return summary


def _require_room(workers: Sequence[_Worker], cells: Sequence[tuple[int, int]], tokens: int) -> None:
    """Raises if a shape exceeds a model's context, or the memory, which holds all models at the same time."""
    weights = sum(worker.about["weights_bytes"] for worker in workers)
    for worker in workers:
        positions, device = worker.about["positions"], worker.about["device"]
        for (rows, length), cache in zip(cells, worker.about["cache_bytes"], strict=True):
            if positions and length + tokens > positions:
                raise RecipeError(
                    f"--lengths {length}: and {tokens} generated tokens are more than the {positions:,} positions of "
                    f"{worker.speech.name}; use {positions - tokens} or less"
                )
            # fp32 logits of the last position of each row.
            logits = 4 * rows * worker.about["vocabulary"]
            if (needed := weights + cache + logits) > device["memory"]:
                raise DoesNotFit(
                    f"--batches {rows}: with prompts of {length} tokens the cache of {worker.speech.name} needs "
                    f"{cache / 2**30:.2f} GiB on top of {weights / 2**30:.2f} GiB of weights, {needed / 2**30:.2f} "
                    f"GiB in all, and {device['name']} has {device['memory'] / 2**30:.2f} GiB; use fewer sequences or "
                    "sample.cache=int8"
                )


def _take_turns(workers: Sequence[_Worker], cells: Sequence[tuple[int, int]], repeats: int, say: Say) -> None:
    # Shapes are the inner loop, so that every round sees all of them under the same conditions.
    total, done = len(workers) * len(cells) * (repeats + 1), 0
    for number in range(repeats + 1):  # the first round is not timed
        for cell in cells:
            first = number % len(workers)
            for worker in [*workers[first:], *workers[:first]]:
                say(f"{worker.speech.name}, {cell[0]} x {cell[1]}{'' if number else ', first time'}", done, total)
                if (turn := worker.ask(cell)) and number:
                    worker.turns.setdefault(cell, []).append(turn)
                done += 1
    say("done", total, total)


def _model(worker: _Worker) -> JsonObject:
    keys = ("parameters", "weights_bytes", "dtype", "loss", "startup_seconds", "beyond_weights_gib")
    speech = worker.speech
    return {
        "name": speech.name,
        "model": speech.model,
        "engine": speech.engine,
        **{key: worker.about.get(key) for key in keys},
        "failed": worker.failed,
    }


def _row(worker: _Worker, baseline: _Worker, cell: tuple[int, int], number: int) -> JsonObject:
    turns, others = worker.turns[cell], baseline.turns[cell]
    rows, length = cell
    # Decoding alone: tokens after the first ones, over the time after them.
    speeds = [turn["drawn"] / turn["rest"] for turn in turns]
    pairs = list(zip(turns, others, strict=True))
    texts, theirs = turns[0]["texts"], others[0]["texts"]
    return {
        "name": worker.speech.name,
        "rows": rows,
        "length": length,
        "first_token_seconds": _spread([turn["first"] for turn in turns]),
        "prefill_tokens_per_second": _spread([rows * length / turn["first"] for turn in turns]),
        "decode_tokens_per_second": _spread(speeds),
        # Ratios per round, whose turns ran close in time: a slow phase of the machine cancels out.
        "ratio": _spread([(a["drawn"] * b["rest"]) / (a["rest"] * b["drawn"]) for a, b in pairs]),
        "first_token_ratio": _spread([a["first"] / b["first"] for a, b in pairs]),
        # Speculation runs one row at a time; otherwise each pass gives a token to every row.
        "tokens_per_pass": turns[0]["drawn"] / turns[0]["passes"] / (1 if worker.speech.settings.speculates else rows),
        "cache_bytes": turns[0]["cache_bytes"],
        "cache_predicted_bytes": worker.about["cache_bytes"][number],
        "same_text": sum(a == b for a, b in zip(texts, theirs, strict=True)) / rows,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"value": median(values), "low": min(values), "high": max(values)}
