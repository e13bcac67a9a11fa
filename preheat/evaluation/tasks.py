"""Evaluation tasks: their settings, as YAML files, and the built-in ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from preheat.core.field_types import Bound, Count, NonNegative, NonNegativeInt
from preheat.data.rows.file_readers import expand_path
from preheat.errors import RecipeError, suggest_nearest
from preheat.recipe.validate import RecipeReader
from preheat.recipe.yaml_io import compose, read
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["BUILT_IN", "OF_LENGTH", "LengthTask", "Task", "find_built_in", "find_tasks", "load_task"]

BUILT_IN = Path(__file__).parent / "builtin"

Kind = Literal["multiple_choice", "classification", "cloze", "exact_match", "token_f1", "numeric", "execution"]
BY_LIKELIHOOD = ("multiple_choice", "classification", "cloze")
OF_LENGTH = {
    "positions": "the loss of each position of long passages: does it keep falling with more context?",
    "continuation": "the loss of a passage's last tokens with none, a quarter, half and all of the context before them",
    "needle": "phrases hidden in a text, by length and depth: is one continued when the text ends in its beginning?",
    "recall": "a list of keys and values, by length and depth: is the value of the key at the end recalled?",
}
TEXTS = ("positions", "continuation", "needle")
# lm-eval's names, and a key of the other kinds of tasks -> what the error says.
_HINTS = {
    "num_fewshot": "here it is 'shots'",
    "doc_to_text": "here it is 'prompt'",
    "doc_to_target": "here it is 'gold'",
}
_LENGTH_HINTS = {"limit": "here it is 'each', the questions or passages per length and depth; --limit is for all tasks"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task over rows. Templates are Jinja; an expression is the inside of Jinja's `{{ }}`, e.g. a field's name."""

    kind: Kind
    """multiple_choice, classification, cloze: scored by likelihood. exact_match, token_f1, numeric: the model generates
    greedily, and its answer is compared. execution: it generates programs, which are run with the row's tests."""
    prompt: str
    """Template of the prompt: "Question: {{question}}\\nAnswer:"."""
    text: str | None = None
    """classification with a classification head: template of the text that it reads, as in training; default the
    prompt."""
    gold: str
    """Expression of the right answer: the choice (its text, or its index from 0), the class, the last words (cloze), or
    the answer; a list if several are right (numeric: the spans of one answer). execution: a solution, for `shots`."""
    name: str = ""
    """Name in tables; default the file's name."""
    data: str | None = None
    """The rows: a file relative to the task's (.jsonl, .json, .parquet, .csv), or a `datasets` name. `--tasks
    NAME=FILE` overrides it."""
    subset: str | None = None
    """Configuration name of a `datasets` name."""
    split: str = "test"
    """Split of a `datasets` name."""
    each: str | None = None
    """A field with a list of objects; each of them becomes a row, together with the other fields."""
    where: str | None = None
    """Expression: rows for which it is not true are left out."""
    keys: str | None = None
    """A .json file (a list, or an object's keys): rows whose `key` is not in it are left out."""
    choices: str | tuple[str, ...] | None = None
    """Expression of a row's choices, or a list for all rows. For classification: the classes; default those that are
    gold somewhere."""
    delimiter: str = " "
    """Text between the prompt and its continuation."""
    scale: str | None = None
    """numeric: expression of the scale of a gold number: thousand, million, billion or percent; empty for none."""
    shots: NonNegativeInt = 0
    """Number of few-shot examples before each question; they are drawn from the rows and not asked themselves. `--tasks
    NAME,shots=0..8` evaluates each number from 0 to 8 on the same questions."""
    pool: NonNegativeInt = 0
    """Number of rows that are set aside for examples and not asked; 0: as many as `shots`. Tasks with equal pools ask
    the same questions and take their examples in the same order."""
    separator: str = "\n\n"
    """Text between the examples."""
    chat: bool = False
    """Ask through the tokenizer's chat template: the prompt as the user's turn."""
    system: str | None = None
    """With `chat`: the system prompt."""
    tokens: Count = 64
    """Maximum tokens of a generated answer."""
    stop: tuple[str, ...] | None = None
    """A generated answer ends before the first of these; default: a line break, for execution nothing. In a chat, they
    end no program that is in a fenced block."""
    program: str | None = None
    """execution: template of the program that is run, with the generated text as `answer`. The row passes if the
    program reaches its end without an error."""
    samples: Count = 1
    """execution: generated answers per row."""
    k: tuple[Count, ...] = (1,)
    """execution: report pass@k, the probability that one of k answers passes, estimated from `samples` (Chen et al.
    2021, arXiv:2107.03374)."""
    temperature: NonNegative = 0.0
    """execution: as `sample.temperature`; above 0 for several samples."""
    top_p: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """execution: as `sample.top_p`."""
    seconds: Annotated[float, Bound(0.1, 600)] = 10.0
    """execution: time limit of a program."""
    limit: Count | None = None
    """Maximum number of rows."""
    seed: NonNegativeInt = 0
    """Seed for drawing the few-shot examples and samples."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that end a generated answer: `stop`, or its default."""
        if self.stop is not None:
            return self.stop
        return () if self.kind == "execution" else ("\n",)

    def problems(self) -> list[tuple[str, str]]:
        """Returns contradictory settings, as (key, message)."""
        problems = []
        if self.kind == "multiple_choice" and self.choices is None:
            problems.append(
                ("choices", "is needed for multiple_choice: a field that holds the row's choices, or a list")
            )
        if self.kind not in ("multiple_choice", "classification") and self.choices is not None:
            problems.append(("choices", f"means nothing for {self.kind}; remove it"))
        # A repeated choice could make two answers right, of which only one counts.
        if isinstance(self.choices, tuple) and len(set(self.choices)) < max(2, len(self.choices)):
            problems.append(("choices", "needs two or more, each once"))
        if self.text is not None and self.kind != "classification":
            problems.append(("text", f"means nothing for {self.kind}; remove it"))
        if self.scale is not None and self.kind != "numeric":
            problems.append(("scale", f"means nothing for {self.kind}; remove it"))
        if self.system is not None and not self.chat:
            problems.append(("system", "needs chat: true"))
        if 0 < self.pool < self.shots:
            problems.append(
                ("pool", f"{self.pool} rows hold no {self.shots} examples (shots); raise it or leave it out")
            )
        if self.kind != "execution":
            for key, default in _OF_EXECUTION.items():
                if getattr(self, key) != default:
                    problems.append((key, f"means nothing for {self.kind}; remove it"))
            return problems
        if self.program is None:
            problems.append(("program", "is needed for execution: a template of the answer and its tests"))
        if self.k and max(self.k) > self.samples:
            problems.append(
                ("k", f"{max(self.k)} is more than samples ({self.samples}); set samples={max(self.k)} or more")
            )
        if not self.k or len(set(self.k)) < len(self.k):
            problems.append(("k", "needs one or more numbers, each once"))
        if self.samples > 1 and not self.temperature:
            problems.append(("samples", f"{self.samples} greedy answers are all the same; set a temperature, e.g. 0.8"))
        return problems


_OF_EXECUTION = {"program": None, "samples": 1, "k": (1,), "temperature": 0.0, "top_p": 1.0, "seconds": 10.0}
"""Keys of the kind execution, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class LengthTask:
    """A long-context task; written `--tasks recall`, `needle=book.txt,needles=4`, or as YAML."""

    kind: Literal["positions", "continuation", "needle", "recall"]
    """positions: loss by position; continuation: loss with more and less context; needle: phrases hidden in a text;
    recall: key-value pairs."""
    name: str = ""
    """Name in tables; default the kind."""
    data: str | None = None
    """Long documents: a text, a folder or `stdlib`. All kinds but recall need it."""
    lengths: tuple[Count, ...] = ()
    """Tokens of context and answer together. Default: up to the longest row in eight even steps (needle, recall), in
    four doublings (continuation), or only the longest row (positions)."""
    depths: Count = 8
    """needle, recall: number of depths, from the beginning (0) to the end (1)."""
    each: Count | None = None
    """Questions per length and depth (default 4), or passages per length (default 16)."""
    needles: Count = 1
    """needle: number of phrases hidden in the text, one of which the question is about."""
    seed: NonNegativeInt = 0
    """Seed for drawing passages, positions and tokens: equal seeds give equal questions."""

    def problems(self) -> list[tuple[str, str]]:
        """Returns contradictory settings, as (key, message)."""
        problems = []
        if self.kind in TEXTS and self.data is None:
            problems.append(
                ("data", f"names no text; give one: {self.kind}=FILE (long documents), or {self.kind}=stdlib")
            )
        if self.kind == "recall" and self.data is not None:
            problems.append(("data", "means nothing for recall, whose lists are drawn; remove it"))
        if self.needles > 1 and self.kind != "needle":
            problems.append(("needles", f"means nothing for {self.kind}; remove it"))
        if self.kind == "positions" and len(self.lengths) > 1:
            problems.append(("lengths", f"{len(self.lengths)} of them: positions are those of the longest; state one"))
        if list(self.lengths) != sorted(set(self.lengths)):
            problems.append(("lengths", f"{list(self.lengths)} must rise, each once"))
        if self.depths < 2 and self.kind in ("needle", "recall"):
            problems.append(("depths", "needs two or more"))
        return problems


def load_task(path: Path, settings: Mapping[str, str] | None = None, *, knob: str = "--tasks") -> Task | LengthTask:
    """Reads a task from a YAML file; file names in it are relative to it, and its kind determines its keys.

    Args:
        settings: additional keys, written as in the file; they override its own.
        knob: the option or key that has these settings, for errors.

    Raises:
        RecipeError: no such file, an unknown key (the closest one is suggested), or a value out of range.
    """
    values, lines = read(path)
    if settings and isinstance(values, dict):
        # Values of the command line are YAML, as in the file, so that numbers and lists have their types.
        values |= {key: compose(value, f"{path.stem}, {key}", numbered=False)[0] for key, value in settings.items()}
    assigned: dict[tuple[str, ...], str] = {
        (key,): f"{knob} {path.stem},{key}={shorten(value)}" for key, value in (settings or {}).items()
    }
    task = _read(values, str(path), lines, assigned)
    files: JsonObject = {}
    # Relative to the task's file, except for names given on the command line.
    for key in ("data", "keys"):
        name = getattr(task, key, None)
        if name and key not in (settings or {}) and (path.parent / name).is_file():
            files[key] = str(path.parent / name)
    return replace(task, name=task.name or path.stem, **files)


def _read(
    values: object,
    name: str,
    lines: Mapping[tuple[str, ...], int],
    assigned: Mapping[tuple[str, ...], str] | None = None,
) -> Task | LengthTask:
    # The kind decides the class, and so the valid keys.
    of_length = isinstance(values, Mapping) and values.get("kind") in OF_LENGTH
    # The reader of recipes: unknown keys and wrong values give the same messages as there.
    reader = RecipeReader(name, lines, assigned, hints=_LENGTH_HINTS if of_length else _HINTS)
    task: Task | LengthTask | None = reader.flat(LengthTask if of_length else Task, values, ())
    if task is not None:
        for key, problem in task.problems():
            reader.report((key,), f"{key}: {problem}")
    reader.refuse()
    assert task is not None, "a task that was not read has a problem"
    return task


def find_built_in() -> dict[str, Path]:
    """Returns the built-in tasks."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def find_tasks(names: Sequence[str], *, knob: str = "--tasks") -> list[Task | LengthTask | str]:
    """Resolves each name to a task, or to the name or file of a task of lm-eval (as str).

    Args:
        names: `NAME` (built-in, or a kind of `OF_LENGTH`) or `FILE.yaml`; optionally with `=DATA` for other rows, and
            after commas further keys of `Task` or `LengthTask`: `cloze=rows.jsonl,limit=100`, `recall,lengths=[128,
            256]`; `shots=0..8` gives a task for each number of examples. Tasks of lm-eval are `lm-eval:NAME` or
            `lm-eval:FILE.yaml`.

    Raises:
        RecipeError: there is no such task; the closest name is suggested.
    """
    tasks: list[Task | LengthTask | str] = []
    for given in names:
        if given.startswith("lm-eval:"):
            tasks.append(given.removeprefix("lm-eval:"))
            continue
        first, *more = re.split(r",(?![^\[]*\])", given)  # do not split lists in brackets
        name, _, data = first.partition("=")
        if bad := [part for part in more if "=" not in part]:
            raise RecipeError(f"{knob} {given}: '{bad[0]}' is not KEY=VALUE")
        # JSON quotes the name, which is text even if it looks like a number.
        settings = dict(part.split("=", 1) for part in more) | ({"data": json.dumps(data)} if data else {})
        path = expand_path(knob, name)
        # No file: the kind itself and the given keys are the task.
        if name in OF_LENGTH:
            values = {"name": name} | {
                key: compose(value, f"{name}, {key}", numbered=False)[0] for key, value in settings.items()
            }
            tasks.append(_read(values | {"kind": name}, f"{knob} {name}", {}))
            continue
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise RecipeError(f"{knob} {name}: no such file")
        elif name in find_built_in():
            path = find_built_in()[name]
        else:
            suggestion = suggest_nearest(name, [*find_built_in(), *OF_LENGTH])
            raise RecipeError(
                f"{knob} {name}: no such task; {suggestion} (a file ends in .yaml; a task of lm-eval is written "
                f"lm-eval:{name})"
            )
        variants = _split_shots(settings, f"{knob} {given}")
        for variant in variants:
            task = load_task(path, variant, knob=knob)
            if task.data is None and isinstance(task, Task):
                # The first line of a built-in task says which fields its rows need.
                comment = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
                raise RecipeError(f"{knob} {name}: names no rows; give them: {name}=FILE ({comment})")
            tasks.append(replace(task, name=f"{task.name}, {variant['shots']} shots") if len(variants) > 1 else task)
    # Results are stored by name, so a second task of a name would replace the first.
    names_of = [t if isinstance(t, str) else t.name for t in tasks]
    if twice := next((n for n in names_of if names_of.count(n) > 1), None):
        raise RecipeError(f"{knob}: {twice} is given twice")
    return tasks


_MOST_VARIANTS = 100
"""Numbers of examples that one range may name: each is an evaluation of its own."""


def _split_shots(settings: Mapping[str, str], given: str) -> list[dict[str, str]]:
    """Returns the settings of a task for each number of examples in `shots=LOW..HIGH`; without one, the settings."""
    match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", settings.get("shots", "").strip())
    if match is None:
        return [dict(settings)]
    low, high = map(int, match.groups())
    if low >= high:
        raise RecipeError(f"{given}: shots: {low}..{high} is not a range; write the smaller number first, as in 0..8")
    if high - low >= _MOST_VARIANTS:
        raise RecipeError(
            f"{given}: shots: {low}..{high} is an evaluation for each number; name {_MOST_VARIANTS} at most"
        )
    # One pool for all numbers, so that all ask the same questions.
    return [{"pool": str(high), **settings, "shots": str(n)} for n in range(low, high + 1)]
