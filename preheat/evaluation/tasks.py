"""A task: rows, how a row is asked, and what is counted. Written as YAML beside its rows; some come with preheat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from preheat.errors import RecipeError, nearest
from preheat.recipe.boundary import RecipeReader
from preheat.recipe.parts import Count, Whole
from preheat.recipe.text import compose

__all__ = ["BUILT_IN", "Task", "built_in", "find_tasks", "load_task"]

BUILT_IN = Path(__file__).parent / "builtin"

Kind = Literal["multiple_choice", "classification", "cloze", "exact_match", "token_f1", "numeric"]
BY_LIKELIHOOD = ("multiple_choice", "classification", "cloze")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Templates are jinja; an expression is what stands inside jinja's `{{ }}`, in the simplest case a field's name."""

    kind: Kind
    """multiple_choice, classification, cloze: by likelihood. exact_match, token_f1, numeric: the model writes, greedily, and its answer is compared."""
    prompt: str
    """Template of what the model is asked: "Question: {{question}}\\nAnswer:"."""
    text: str | None = None
    """classification of a run that has a head over classes: template of what it reads, as it did in training; the prompt when not stated."""
    gold: str
    """Expression of what is right: the choice (its text, or its number from 0), the class, the last words (cloze), or the answer, a list where several are (numeric: the spans of one answer)."""
    name: str = ""
    """In tables; the file's name when not stated."""
    data: str | None = None
    """The rows: a file beside the task's (.jsonl, .json, .parquet, .csv), or a `datasets` name. `--tasks NAME=FILE` gives it otherwise."""
    subset: str | None = None
    """Configuration name of a `datasets` name."""
    split: str = "test"
    """Split of a `datasets` name."""
    each: str | None = None
    """A field that holds a list of objects, each of which is a row (with the other fields beside it)."""
    where: str | None = None
    """Expression: rows for which it is not true are left out."""
    keys: str | None = None
    """A .json file (a list, or an object's keys): rows whose `key` does not stand there are left out."""
    choices: str | tuple[str, ...] | None = None
    """Expression of a row's choices, or a list that all rows share. For classification: the classes; when not stated, those that are gold somewhere."""
    delimiter: str = " "
    """Between the prompt and what follows it."""
    scale: str | None = None
    """numeric: expression of the scale of a gold number: thousand, million, billion or percent; empty for none."""
    shots: Whole = 0
    """So many answered rows stand before each question; they are drawn from the rows and then not asked."""
    separator: str = "\n\n"
    """Between them."""
    chat: bool = False
    """Ask through the tokenizer's chat template: the prompt as the user's turn."""
    system: str | None = None
    """With `chat`: the system's turn."""
    tokens: Count = 64
    """Written at most, where the model writes."""
    stop: tuple[str, ...] = ("\n",)
    """What is written ends before the first of these."""
    limit: Count | None = None
    """The first so many rows only."""
    seed: Whole = 0
    """Draws the answered rows."""

    def problems(self) -> list[tuple[str, str]]:
        """What contradicts itself, as (key, words)."""
        found = []
        if self.kind == "multiple_choice" and self.choices is None:
            found.append(("choices", "is needed for multiple_choice: a field that holds the row's choices, or a list"))
        if self.kind not in ("multiple_choice", "classification") and self.choices is not None:
            found.append(("choices", f"means nothing for {self.kind}; remove it"))
        if isinstance(self.choices, tuple) and len(set(self.choices)) < max(2, len(self.choices)):
            found.append(("choices", "needs two or more, each once"))
        if self.text is not None and self.kind != "classification":
            found.append(("text", f"means nothing for {self.kind}; remove it"))
        if self.scale is not None and self.kind != "numeric":
            found.append(("scale", f"means nothing for {self.kind}; remove it"))
        if self.system is not None and not self.chat:
            found.append(("system", "needs chat: true"))
        return found


def load_task(path: Path, settings: Mapping[str, str] | None = None) -> Task:
    """A task from its YAML file; names of files in it are relative to it.

    Args:
        settings: further keys, as they would stand in the file; they go before its own.

    Raises:
        RecipeError: no such file, an unknown key (the nearest is named), a value out of range.
    """
    try:
        values, lines = compose(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not text in UTF-8'})") from None
    reader = RecipeReader(str(path), lines)
    if settings and isinstance(values, dict):
        values |= {key: compose(value, f"{path.stem}, {key}")[0] for key, value in settings.items()}
    task: Task | None = reader.flat(Task, values, ())
    if task is not None:
        for key, words in task.problems():
            reader.say((key,), f"{key}: {words}")
    if reader.found or task is None:
        raise RecipeError("\n".join(reader.found))
    beside: dict[str, Any] = {}
    for key in ("data", "keys"):
        name = getattr(task, key)
        if name and key not in (settings or {}) and (path.parent / name).is_file():
            beside[key] = str(path.parent / name)
    return replace(task, name=task.name or path.stem, **beside)


def built_in() -> dict[str, Path]:
    """The tasks that come with preheat."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def find_tasks(names: Sequence[str], *, knob: str = "--tasks") -> list[Task | str]:
    """Each name as a task of ours, or as the name (or file) of one of lm-eval's, which look different: `lm-eval:NAME`.

    Args:
        names: `NAME` (comes with preheat) or `FILE.yaml`; either with `=DATA` for rows from elsewhere, and after commas with
            further keys of `Task`: `cloze=rows.jsonl,limit=100`. `lm-eval:NAME` or `lm-eval:FILE.yaml`.

    Raises:
        RecipeError: there is no such task; the nearest is named.
    """
    found: list[Task | str] = []
    for given in names:
        if given.startswith("lm-eval:"):
            found.append(given.removeprefix("lm-eval:"))
            continue
        first, *more = given.split(",")
        name, _, data = first.partition("=")
        path = Path(name).expanduser()
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise RecipeError(f"{knob} {name}: no such file")
        elif name in built_in():
            path = built_in()[name]
        else:
            words = nearest(name, list(built_in()))
            raise RecipeError(
                f"{knob} {name}: no such task; {words} (a file ends in .yaml; a task of lm-eval is written lm-eval:{name})"
            )
        if bad := [part for part in more if "=" not in part]:
            raise RecipeError(f"{knob} {given}: '{bad[0]}' is no KEY=VALUE")
        settings = dict(part.split("=", 1) for part in more)
        task = load_task(path, settings | ({"data": json.dumps(data)} if data else {}))
        if task.data is None:
            words = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            raise RecipeError(f"{knob} {name}: names no rows; give them: {name}=FILE ({words})")
        found.append(task)
    names_of = [t.name if isinstance(t, Task) else t for t in found]
    if twice := next((n for n in names_of if names_of.count(n) > 1), None):
        raise RecipeError(f"{knob}: {twice} stands twice")
    return found
