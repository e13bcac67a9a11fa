"""Rows of a task, their prompts and gold answers: Jinja templates and expressions over the row's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from preheat.data.chat.render_limits import limit_rendering, require_template
from preheat.data.chat.template import load_template
from preheat.data.rows.file_readers import (
    ROWS,
    describe_json_type,
    describe_missing_path,
    display_path,
    expand_path,
    read_file,
    read_json,
    suggest_name,
)
from preheat.errors import DataError, RecipeError
from preheat.evaluation.tasks import BY_LIKELIHOOD, Task
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from jinja2.environment import TemplateExpression
    from transformers import PreTrainedTokenizerFast

    from preheat.data.rows.schemas import Fields

Compiled = TypeVar("Compiled")
Value = TypeVar("Value")

__all__ = ["ANSWER", "Item", "Row", "read_items", "read_rows"]


class Row(NamedTuple):
    """One row and its location, for messages."""

    where: str
    values: Fields


def read_rows(source: str, *, subset: str | None = None, split: str = "test", each: str | None = None) -> list[Row]:
    """Reads all rows of a file, or of a `datasets` name.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv) or a name such as `org/name`. A .json file holds a list of
            objects, or an object of objects whose keys become the field `key` of the rows.
        subset, split: configuration and split of a `datasets` name.
        each: a field that holds a list of objects; each of them becomes a row, with the other fields of its parent.

    Raises:
        DataError: there is no such file, it is damaged, holds no row, or a row lacks `each`.
    """
    path = expand_path("rows", source)
    if path.is_file():
        if path.suffix not in ROWS:
            raise DataError(f"{display_path(path)}: tasks read rows from {', '.join(ROWS)}; convert the file")
        rows = [_read_row(where, value) for where, value in read_file(path, keyed=True)]
    elif path.exists():
        raise DataError(f"{display_path(path)}: is not a file; name a file of rows")
    # These look like files; `datasets` would search the hub for them.
    elif path.suffix in ROWS or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise describe_missing_path("rows", path)
    else:
        rows = list(_iterate_named_rows(source, subset, split))
    if each is not None:
        rows = [part for row in rows for part in _iterate_parts(row, each)]
    if not rows:
        raise DataError(f"{source}: holds no row")
    return rows


def _read_row(where: str, value: object) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: is {describe_json_type(value)}, not an object with fields")
    return Row(where, {str(k): v for k, v in value.items()})


def _iterate_parts(row: Row, each: str) -> Iterator[Row]:
    if each not in row.values:
        raise DataError(f"{row.where}: no field '{each}' (the task's `each`); {suggest_name(each, list(row.values))}")
    parts = row.values[each]
    if not isinstance(parts, list):
        raise DataError(f"{row.where}: field '{each}' is {describe_json_type(parts)}, not a list")
    # A field of the part takes precedence over one of its parent.
    rest = {k: v for k, v in row.values.items() if k != each}
    for number, part in enumerate(parts, 1):
        # Messages name the part within its row.
        where = f"{row.where}, {each} {number}"
        yield Row(where, {**rest, **_read_row(where, part).values})


def _iterate_named_rows(name: str, subset: str | None, split: str) -> Iterator[Row]:
    import datasets

    from preheat.hardware.connectivity import is_hub_reachable

    if not is_hub_reachable():
        raise DataError(
            f"{name}: no such file, and no network to look for a data set of that name; give the task a file: NAME=FILE"
        )
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        message = shorten((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise DataError(f"{name}: no such file, and `datasets` cannot load it: {message}") from None
    for number, row in enumerate(rows, 1):
        yield _read_row(f"{name}, {split}: row {number}", row)


class Item(NamedTuple):
    """One question.

    Attributes:
        where: file and row.
        context: the text before the scored or generated continuation.
        complete: True if the context already has its special tokens, as from a chat template.
        choices: possible continuations, including the delimiter; `texts` are the same without it.
        gold: index of the right choice; -1 for generated answers.
        answers: the right answers, for generated answers.
        scale: scale of their numbers.
        program: the program to run, with `ANSWER` in the place of the generated text.
    """

    where: str
    context: str
    complete: bool
    choices: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    gold: int = -1
    answers: tuple[str, ...] = ()
    scale: str = ""
    program: str = ""

    def build_program(self, answer: str) -> str:
        """Returns the program to run with a generated answer."""
        return self.program.replace(ANSWER, answer)


ANSWER = "\0answer\0"
"""Place of the answer in `Item.program`: no text of a row has these characters."""


class _Language:
    """Compiles the templates and expressions of a task; errors at evaluation name the row."""

    def __init__(self, task: Task):
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.task = task
        # Sandboxed, since tasks may come from others. A missing field is an error and not empty text, and a line break
        # at the end of a prompt stays.
        self.environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)

    def template(self, key: str) -> Callable[[Row], str]:
        return self._guarded(key, self.environment.from_string, lambda template, values: template.render(values))

    def expression(self, key: str) -> Callable[[Row], object]:
        def make(text: str) -> TemplateExpression:
            return self.environment.compile_expression(text, undefined_to_none=False)

        def take(compiled: TemplateExpression, values: Fields) -> object:
            from jinja2 import StrictUndefined

            value = compiled(values)
            return str(value) if isinstance(value, StrictUndefined) else value  # str() raises for a missing field

        return self._guarded(key, make, take)

    def _guarded(
        self, key: str, make: Callable[[str], Compiled], take: Callable[[Compiled, Fields], Value]
    ) -> Callable[[Row], Value]:
        from jinja2 import TemplateError, TemplateSyntaxError

        text, name = getattr(self.task, key), self.task.name
        where = f"task {name}: {key}"
        # An expression is the inside of braces: with them, the check can parse it.
        require_template(where, text if "{" in text else f"{{{{ {text} }}}}")
        with limit_rendering(where):
            try:
                compiled = make(text)
            except TemplateSyntaxError as error:
                message = shorten(error.message or "", 200)
                raise RecipeError(f"{where}: line {error.lineno}: {message} in {quote_value(text, 200)}") from None

        def run(row: Row) -> Value:
            with limit_rendering(where):
                try:
                    return take(compiled, row.values)
                except (TemplateError, TypeError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
                    message = shorten((str(error).strip() or type(error).__name__).splitlines()[0], 200)
                    undefined = re.fullmatch(r"'(\w+)' is undefined", message)
                    if undefined:
                        # Jinja's message names the variable alone: name the closest field.
                        message = f"no field '{undefined[1]}'; {suggest_name(undefined[1], sorted(row.values))}"
                    raise DataError(f"{row.where}: {message} (task {name}, {key})") from None

        return run


def read_items(
    task: Task, tokenizer: PreTrainedTokenizerFast, *, limit: int | None = None, head: bool = False
) -> list[Item]:
    """Returns the questions of a task, in the order of its rows.

    Args:
        limit: maximum number of questions; `task.limit` applies, too.
        head: True for a classification head, which reads only `task.text` if the task sets it.

    Raises:
        DataError: a row lacks a field, or its gold is none of its choices; the message names the row.
        RecipeError: a template is invalid, or `chat` is set and the tokenizer has no template.
    """
    assert task.data is not None, "find_tasks refuses a task without rows"
    rows = _choose_rows(task, read_rows(task.data, subset=task.subset, split=task.split, each=task.each))
    language = _Language(task)
    prompt, gold = language.template("prompt"), language.expression("gold")
    # Few-shot examples: drawn once by the task's seed, the same before every question.
    shots: list[Row] = []
    if pool := max(task.pool, task.shots):
        if pool >= len(rows):
            raise DataError(f"task {task.name}: shots: {pool} answered rows leave none of {len(rows)} to ask")
        drawn = np.random.Generator(np.random.PCG64(task.seed)).choice(len(rows), pool, replace=False)
        shots = [rows[n] for n in drawn[: task.shots]]
        rows = [row for n, row in enumerate(rows) if n not in set(drawn.tolist())]
    # Before any limit: fewer rows must not mean fewer classes.
    classes = _find_classes(task, rows, gold) if task.kind == "classification" else None
    choices = language.expression("choices") if isinstance(task.choices, str) else lambda row: classes or task.choices
    scale = language.expression("scale") if task.scale is not None else lambda row: ""

    def render_answered(row: Row) -> tuple[str, str]:
        """Returns the prompt and the right answer as text."""
        item = _build_item(
            task, row, "", False, gold(row), choices(row) if task.choices or classes else None, scale(row)
        )
        return prompt(row), item.texts[item.gold] if item.texts else "; ".join(item.answers)

    program = language.template("program") if task.program is not None else None
    before = [render_answered(row) for row in shots]
    bare = language.template("text") if head and task.text is not None else None
    # The smaller of both limits.
    limits = [n for n in (task.limit, limit) if n is not None]
    items = []
    for row in rows[: min(limits)] if limits else rows:
        context = bare(row) if bare else _render_context(task, before, prompt(row), tokenizer)
        complete = task.chat and bare is None
        item = _build_item(
            task, row, context, complete, gold(row), choices(row) if task.choices or classes else None, scale(row)
        )
        items.append(item if program is None else item._replace(program=_render_program(task, row, program)))
    return items


def _render_program(task: Task, row: Row, program: Callable[[Row], str]) -> str:
    text = program(row._replace(values={**row.values, "answer": ANSWER}))
    if ANSWER not in text:
        raise RecipeError(f"task {task.name}: program: does not contain {{{{answer}}}}, so that no answer is run")
    return text


def _choose_rows(task: Task, rows: list[Row]) -> list[Row]:
    total = len(rows)
    if task.keys is not None:
        try:
            # Keys are compared as text: JSON objects have only such keys.
            wanted = set(map(str, read_json(expand_path(f"task {task.name}: keys:", task.keys))))
        except (OSError, TypeError) as error:
            message = shorten(str(error), 200)
            raise DataError(
                f"task {task.name}: keys: {task.keys}: not a list or an object in JSON ({message})"
            ) from None
        for row in rows:
            if "key" not in row.values:
                raise DataError(f"{row.where}: no field 'key', which the task's `keys` needs")
        rows = [row for row in rows if str(row.values["key"]) in wanted]
    if task.where is not None:
        keep = _Language(task).expression("where")
        rows = [row for row in rows if keep(row)]
    if not rows:
        raise DataError(f"task {task.name}: `keys` and `where` leave none of {total} rows of {task.data}")
    return rows


def _find_classes(task: Task, rows: Sequence[Row], gold: Callable[[Row], object]) -> tuple[str, ...]:
    if isinstance(task.choices, tuple):
        return task.choices
    if isinstance(task.choices, str):
        raise RecipeError(f"task {task.name}: choices: of a classification are a list, the same for all rows")
    classes = tuple(sorted({str(gold(row)) for row in rows}))
    if len(classes) < 2:
        raise DataError(f"task {task.name}: every row of {task.data} has the class {classes[0]!r}; state `choices`")
    return classes


def _build_item(
    task: Task, row: Row, context: str, complete: bool, gold: object, choices: object, scale: object
) -> Item:
    # A row without an answer would silently count as wrong.
    if gold is None or gold == "" or gold == []:
        raise DataError(f"{row.where}: has no gold (task {task.name}, gold: {task.gold})")
    # A chat template ends with its own delimiter, the generation prompt.
    delimiter = "" if task.chat else task.delimiter
    if task.kind not in BY_LIKELIHOOD:
        answers = tuple(map(str, gold)) if isinstance(gold, list | tuple) else (str(gold),)
        return Item(row.where, context, complete, answers=answers, scale=str(scale or ""))
    # A single choice: it is scored, not compared.
    if task.kind == "cloze":
        return Item(row.where, context, complete, (delimiter + str(gold),), (str(gold),), 0)
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        raise DataError(
            f"{row.where}: its choices are {quote_value(choices)}, not a list of two or more (task {task.name})"
        )
    texts = tuple(map(str, choices))
    if empty := [n for n, text in enumerate(texts) if not text]:
        raise DataError(f"{row.where}: choice {empty[0]} is empty (task {task.name})")
    number = _parse_number(gold, texts, by_number=task.kind == "multiple_choice")
    if number is None:
        listed = ", ".join(repr(text[:30]) for text in texts[:5]) + (" …" if len(texts) > 5 else "")
        raise DataError(
            f"{row.where}: gold {quote_value(gold)} is none of the {len(texts)} choices: {listed} (task {task.name})"
        )
    return Item(row.where, context, complete, tuple(delimiter + text for text in texts), texts, number)


def _parse_number(gold: object, texts: tuple[str, ...], *, by_number: bool) -> int | None:
    # An index, which only multiple choice has; the gold of a classification is a name, even if it is a number.
    if isinstance(gold, int) and not isinstance(gold, bool) and by_number:
        return gold if 0 <= gold < len(texts) else None
    if str(gold) in texts:
        return texts.index(str(gold))
    if by_number and str(gold).isdecimal() and int(str(gold)) < len(texts):  # CSV files have only text
        return int(str(gold))
    return None


def _render_context(
    task: Task, before: Sequence[tuple[str, str]], prompt: str, tokenizer: PreTrainedTokenizerFast
) -> str:
    if not task.chat:
        return task.separator.join([*(question + task.delimiter + answer for question, answer in before), prompt])
    turns = [{"role": "system", "content": task.system}] if task.system is not None else []
    for question, answer in before:
        # Answered examples are earlier turns of the conversation.
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _render_chat([*turns, {"role": "user", "content": prompt}], tokenizer, task)


def _render_chat(turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, task: Task) -> str:
    """Renders a chat; the only use of the chat template in evaluation."""
    if not tokenizer.chat_template:
        raise RecipeError(f"task {task.name}: chat: the tokenizer has no chat template; remove chat: true")
    try:
        return load_template(None, tokenizer).prompt(turns)
    except DataError as error:
        raise RecipeError(f"task {task.name}: chat: the tokenizer's template fails: {error}") from None
