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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Literal, TypeVar

from preheat.bench.messages import Ending, Generation, InferenceJob, OpenedModel, encode
from preheat.core.bench import InferenceMachine, InferenceModel, InferenceResult, InferenceRow, Spread
from preheat.core.units import format_memory
from preheat.errors import DoesNotFit, RecipeError, RunError
from preheat.files import read_record, to_json, write_atomic
from preheat.hardware.child_processes import describe_exit, last_error_line, tie_to_parent
from preheat.recipe import Sample
from preheat.run.layout import claim_folder

__all__ = ["InferenceContender", "bench_inference"]

Say = Callable[[str, int, int], None]
_Answer = TypeVar("_Answer")


@dataclass
class InferenceContender:
    """A contender: a model and its generation settings.

    Attributes:
        name: name in tables.
        model: a path that `load_model` accepts.
        settings: generation settings such as cache and speculative decoding; `max_new_tokens` is set by the benchmark.
        dtype: dtype to which the weights are cast; None: as the model is opened.
        kernel: of torch's attention; None: the fastest, with preheat's own on CPUs.
        engine: transformers uses its own model class and `generate`, greedy, without code of preheat.
    """

    name: str
    model: str
    settings: Sample = field(default_factory=Sample)
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    engine: Literal["preheat", "transformers"] = "preheat"
    kernel: str | None = None


class _Worker:
    """The process of a contender and its answers."""

    def __init__(self, speech: InferenceContender, job: InferenceJob, folder: Path):
        self.speech, self.failed = speech, ""
        self.opened: OpenedModel | None = None
        self.ending: Ending | None = None
        self.turns: dict[tuple[int, int], list[Generation]] = {}
        # The object's id makes file names unique among the workers of a comparison.
        file = folder / f"{id(self)}.json"
        file.write_text(encode(job), encoding="utf-8")
        # Standard error goes to a file: an unread pipe would fill up and block the worker.
        self._errors: IO[str] = (folder / f"{id(self)}.log").open("w+", encoding="utf-8", errors="replace")
        command = [sys.executable, "-m", "preheat.bench.inference_worker", str(file)]
        self._process = subprocess.Popen(
            tie_to_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The worker waits for further requests, so it is ended from here.
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def open(self) -> None:
        """Waits until the model is open; sets `opened` or `failed`."""
        self.opened = self._read_answer(OpenedModel)

    def send_text(self) -> None:
        """Lets the worker read the text of the prompts; sets `failed` if it cannot."""
        self._request("begin")
        self._read_answer(dict[str, str])

    def generate(self, cell: tuple[int, int]) -> Generation | None:
        """Measures one shape, (rows, length); None after a failure."""
        self._request(cell)
        return self._read_answer(Generation)

    def end(self) -> None:
        """Measures memory and loss; sets `ending` or `failed`."""
        self._request("end")
        self.ending = self._read_answer(Ending)

    def _request(self, request: str | tuple[int, int]) -> None:
        assert self._process.stdin is not None
        # A worker that has ended reads nothing; its empty answer reports it.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _read_answer(self, kind: type[_Answer]) -> _Answer | None:
        assert self._process.stdout is not None
        # A failed worker has ended and would not answer.
        if self.failed:
            return None
        # An empty line means that the worker closed its output, because it ended.
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = last_error_line(self._errors) if code >= 0 else ""
            self.failed = last or f"its process {describe_exit(code)}"
            return None
        answer = json.loads(line)
        self.failed = answer.get("failed", "")
        return None if self.failed else read_record(kind, answer)


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
) -> InferenceResult:
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

    Raises:
        RecipeError: a prompt with its answer is longer than a model's context.
        DoesNotFit: weights and cache of a shape exceed the memory.
        RunError: the first contender failed, or the folder cannot be written.
    """
    say = say or (lambda what, done, total: None)
    cells = [(rows, length) for length in lengths for rows in batches]
    claim_folder(out, "inference", ("inference.json", "inference.html"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for n, speech in enumerate(speeches):  # one after the other, because start-up is measured
            say(f"opening {speech.name}", n, len(speeches))
            # Both are settings of the benchmark, equal for all contenders.
            settings = dataclasses.replace(speech.settings, max_new_tokens=tokens, prompts=())
            job = InferenceJob(speech.model, settings, speech.dtype, speech.engine, tokens, cells, text, speech.kernel)
            worker = stack.enter_context(_Worker(speech, job, folder))
            worker.open()
            workers.append(worker)
            # The baseline's failure ends the comparison before the other models are opened.
            if worker.failed and not n:
                raise RunError(f"{speech.name}: {worker.failed}")
        running = [worker for worker in workers if not worker.failed]
        # Before any measurement, so that a shape that does not fit is reported at once.
        _require_room({worker.speech.name: worker.opened for worker in running if worker.opened}, cells, tokens)
        for worker in running:
            worker.send_text()
        _take_turns(running, cells, repeats, say)
        for worker in running:
            worker.end()
    baseline = workers[0]
    if baseline.failed or baseline.opened is None:
        raise RunError(f"{baseline.speech.name}: {baseline.failed}")
    device = baseline.opened
    result = InferenceResult(
        machine=InferenceMachine(device.device_kind, device.device_name, device.device_memory, version("torch")),
        batches=tuple(batches),
        lengths=tuple(lengths),
        tokens=tokens,
        repeats=repeats,
        models=tuple(_build_model(worker) for worker in workers),
        rows=tuple(
            _build_row(worker, worker.opened.cache_bytes[number], baseline, cell)
            for number, cell in enumerate(cells)
            for worker in workers
            if worker.opened and not worker.failed
        ),
    )
    write_atomic(out / "inference.json", to_json(result, indent=1) + "\n")
    return result


def _require_room(models: Mapping[str, OpenedModel], cells: Sequence[tuple[int, int]], tokens: int) -> None:
    """Raises if a shape exceeds a model's context, or the memory, which holds all models at the same time."""
    weights = sum(model.weights_bytes for model in models.values())
    for name, model in models.items():
        positions, memory = model.positions, model.device_memory
        for (rows, length), cache in zip(cells, model.cache_bytes, strict=True):
            if positions and length + tokens > positions:
                raise RecipeError(
                    f"--lengths {length}: and {tokens} generated tokens are more than the {positions:,} positions of "
                    f"{name}; use {positions - tokens} or less"
                )
            # fp32 logits of the last position of each row.
            logits = 4 * rows * model.vocabulary
            if (needed := weights + cache + logits) > memory:
                sizes = (format_memory(size / 2**30) for size in (cache, weights, needed, memory))
                of_cache, of_weights, of_all, available = sizes
                raise DoesNotFit(
                    f"--batches {rows}: with prompts of {length} tokens the cache of {name} needs {of_cache} on top of "
                    f"{of_weights} of weights, {of_all} in all, and {model.device_name} has {available}; use fewer "
                    "sequences or sample.cache=int8"
                )


def _take_turns(workers: Sequence[_Worker], cells: Sequence[tuple[int, int]], repeats: int, say: Say) -> None:
    # Shapes are the inner loop, so that every round sees all of them under the same conditions.
    total, done = len(workers) * len(cells) * (repeats + 1), 0
    for number in range(repeats + 1):  # the first round is not timed
        for cell in cells:
            first = number % len(workers)
            for worker in [*workers[first:], *workers[:first]]:
                say(f"{worker.speech.name}, {cell[0]} x {cell[1]}{'' if number else ', first time'}", done, total)
                if (turn := worker.generate(cell)) and number:
                    worker.turns.setdefault(cell, []).append(turn)
                done += 1
    say("done", total, total)


def _build_model(worker: _Worker) -> InferenceModel:
    speech, opened, ending = worker.speech, worker.opened, worker.ending
    return InferenceModel(
        name=speech.name,
        model=speech.model,
        engine=speech.engine,
        parameters=opened.parameters if opened else None,
        weights_bytes=opened.weights_bytes if opened else None,
        dtype=opened.dtype if opened else None,
        loss=ending.loss if ending else None,
        startup_seconds=opened.startup_seconds if opened else None,
        beyond_weights_gib=ending.beyond_weights_gib if ending else None,
        failed=worker.failed,
    )


def _build_row(worker: _Worker, predicted_bytes: float, baseline: _Worker, cell: tuple[int, int]) -> InferenceRow:
    turns, others = worker.turns[cell], baseline.turns[cell]
    rows, length = cell
    pairs = list(zip(turns, others, strict=True))
    texts, theirs = turns[0].texts, others[0].texts
    return InferenceRow(
        name=worker.speech.name,
        rows=rows,
        length=length,
        first_token_seconds=_compute_spread([turn.first for turn in turns]),
        prefill_tokens_per_second=_compute_spread([rows * length / turn.first for turn in turns]),
        # Decoding alone: tokens after the first ones, over the time after them.
        decode_tokens_per_second=_compute_spread([turn.drawn / turn.rest for turn in turns]),
        # Ratios per round, whose turns ran close in time: a slow phase of the machine cancels out.
        ratio=_compute_spread([(a.drawn * b.rest) / (a.rest * b.drawn) for a, b in pairs]),
        first_token_ratio=_compute_spread([a.first / b.first for a, b in pairs]),
        # Speculation runs one row at a time; otherwise each pass gives a token to every row.
        tokens_per_pass=turns[0].drawn / turns[0].passes / (1 if worker.speech.settings.speculates else rows),
        cache_bytes=turns[0].cache_bytes,
        cache_predicted_bytes=predicted_bytes,
        same_text=sum(a == b for a, b in zip(texts, theirs, strict=True)) / rows,
    )


def _compute_spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))
