"""The code cells of a Jupyter notebook as one script, which is read without running it. No torch."""

from __future__ import annotations

import ast
import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preheat.errors import RecipeError
from preheat.interop.script import parse_code, read_calls
from preheat.sanitize import shorten

__all__ = ["Cell", "find_cell", "read_notebook"]

_MAGIC = re.compile(r"\s*(?:[%!]|\w+\s*=\s*[%!]|\?|[\w.]+\?)")
"""Begins a line that IPython reads: a magic, a command of the shell, a question for help."""
_PYTHON_MAGICS = ("%%capture", "%%time", "%%timeit", "%%prun")
"""Magics of a whole cell that run it as Python; others give it to another program."""


@dataclass(frozen=True)
class Cell:
    """A code cell.

    Attributes:
        number: among all cells of the notebook, from 1.
        first: line of the joined script that its first line is.
    """

    number: int
    first: int


def read_notebook(text: str, where: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int], list[Cell]]:
    """Returns the arguments of the calls of a notebook's code, as `read_script` does, and its code cells.

    Args:
        where: name of the notebook in errors.

    Raises:
        RecipeError: the text is not a notebook, or a cell is not Python.

    Example:
        >>> code = {"cell_type": "code", "source": ["%pip install trl\\n", "SFTConfig(max_steps=5)"]}
        >>> read_notebook(json.dumps({"cells": [{"cell_type": "markdown", "source": ""}, code]}), "f.ipynb")
        ({'SFTConfig': {'max_steps': 5}}, {('SFTConfig', 'max_steps'): 2, ('SFTConfig',): 2}, [Cell(number=2, first=1)])
    """
    body: list[ast.stmt] = []
    cells: list[Cell] = []
    first = 1
    for number, source in _list_code(text, where):
        tree = _parse_cell(source, f"{where}:cell {number}")
        body += ast.increment_lineno(tree, first - 1).body
        cells.append(Cell(number, first))
        first += source.count("\n") + 1
    return *read_calls(ast.Module(body, type_ignores=[])), cells


def find_cell(cells: Sequence[Cell], line: int) -> tuple[int, int]:
    """Returns the number of the cell that a line of the joined script is in, and its line there.

    Example:
        >>> find_cell([Cell(2, 1), Cell(5, 9)], 10)
        (5, 2)
    """
    cell = cells[bisect.bisect_right([cell.first for cell in cells], line) - 1]
    return cell.number, line - cell.first + 1


def _list_code(text: str, where: str) -> Iterator[tuple[int, str]]:
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of too many digits
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise RecipeError(f"{where}:{line}: not a notebook: it is not JSON") from None
    cells = notebook.get("cells") if isinstance(notebook, Mapping) else None
    if not isinstance(cells, list):
        raise RecipeError(f"{where}: not a notebook of Jupyter's format 4: it has no list of cells")
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, Mapping) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield number, "".join(map(str, source)) if isinstance(source, list) else str(source)


def _parse_cell(source: str, where: str) -> ast.Module:
    lines = source.split("\n")
    head = next((line.strip() for line in lines if line.strip()), "")
    if head.startswith("%%") and not head.startswith(_PYTHON_MAGICS):
        return ast.Module([], type_ignores=[])
    while True:
        try:
            return parse_code("\n".join(lines))
        except SyntaxError as error:
            # An error in a later line hides that of a magic: the tokenizer reads all lines before the parser reports.
            number = next(
                (n for n in reversed(range(min(error.lineno or 1, len(lines)))) if _MAGIC.match(lines[n])), None
            )
            if number is None:
                raise RecipeError(f"{where}:{error.lineno or 1}: not Python: {shorten(error.msg)}") from None
        except (ValueError, RecursionError, MemoryError):  # NUL characters; nested too deep for the parser
            raise RecipeError(f"{where}: not Python that can be read: it holds NUL, or is nested too deep") from None
        _blank_magic(lines, number)


def _blank_magic(lines: list[str], number: int) -> None:
    """Replaces an IPython magic or shell command, with its continuation lines, by `pass`.

    Example:
        >>> lines = ["if colab:", "    !pip install \\\\", "        trl", "x = 1"]
        >>> _blank_magic(lines, 1)
        >>> lines
        ['if colab:', '    pass', '    pass', 'x = 1']
    """
    last = number
    while lines[last].rstrip().endswith("\\") and last + 1 < len(lines):
        last += 1
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number : last + 1] = [f"{indent}pass"] * (last + 1 - number)
