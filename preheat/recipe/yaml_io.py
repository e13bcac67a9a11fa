"""YAML 1.2 for recipes: PyYAML's loader and dumper with the scalars of the core schema, and the line of every key.

PyYAML follows YAML 1.1, which reads 1e-4 as text and off as false. Size, depth and number of values are bounded, since
a few lines of aliases can expand to billions of values.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from preheat.errors import RecipeError
from preheat.sanitize import quote_value, shorten

__all__ = ["LARGEST_FILE", "compose", "parse_nodes", "read", "read_text", "write"]

LARGEST_FILE = 1 << 20
"""Maximum size of a YAML file in bytes. A recipe with every default written out has five thousand."""
_DEEPEST = 32
"""Levels of a YAML text: PyYAML recurses for each, and the stack must not overflow."""
_MOST_VALUES = 10_000
"""PyYAML reads this many in half a second."""
_TOO_MANY = f"holds more than {_MOST_VALUES:,} values, aliases (*name) written out"


_TAG = "tag:yaml.org,2002:"


class _Unusable(yaml.constructor.ConstructorError):
    """Valid YAML that no recipe can use."""


class _Loader(yaml.SafeLoader):
    depth = values = 0

    def _here(self) -> yaml.Mark:
        """Where the next node begins."""
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return mark

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # `index` is the number of an item, the node of a key, or None at the root, whatever PyYAML's stubs say.
        self.depth += 1
        self.values += 1
        if self.values > _MOST_VALUES:  # here too: PyYAML takes a minute for a megabyte of them
            raise _Unusable(None, None, _TOO_MANY, self._here())
        if self.depth > _DEEPEST:  # PyYAML recurses for each level: stop before the stack overflows
            problem = f"is nested more than {_DEEPEST} levels deep"
            raise _Unusable(None, None, problem, self._here())
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Dumper(yaml.SafeDumper):
    pass


# The core schema of YAML 1.2.2, section 10.3.2, with the characters that a scalar of each type begins with.
_SCALARS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN\0"),
}
for _class in (_Loader, _Dumper):
    # Assigned, not changed: PyYAML's own classes share the dictionary.
    _class.yaml_implicit_resolvers = {}
    for _tag, (_pattern, _first) in _SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first])


def _report_errors(read: Callable[[str], object], rule: str) -> Callable[[yaml.SafeLoader, yaml.Node], object]:
    """Returns a constructor that reports its errors as YAML errors with their line."""

    def construct(loader: yaml.SafeLoader, node: yaml.Node) -> object:
        try:
            return read(loader.construct_scalar(node))  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            raise _Unusable(None, None, f"{rule}, got {quote_value(node.value, 40)}", node.start_mark) from None

    return construct


def _construct_integer(text: str) -> int:
    if len(text) > 70:  # Python refuses to read integers of more than 4,300 digits
        raise ValueError
    # int(text, 0) refuses leading zeros, which are decimal in YAML 1.2.
    value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def _construct_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _construct_text(text: str) -> str:
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError
    return text


# The core schema alone: recipes have no use for dates, binary values and sets.
_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"]
    for name in ("null", "seq", "map")
} | {None: yaml.SafeLoader.yaml_constructors[None]}
for _name, _read, _rule in (
    ("int", _construct_integer, "an integer must fit in 64 bits"),
    ("float", _construct_number, "a number must be finite"),
    ("bool", lambda text: {"true": True, "false": False}.get(text.lower(), text), "a truth value is true or false"),
    ("str", _construct_text, "text must not hold NUL or half of a surrogate pair"),
):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _report_errors(_read, _rule))
_Dumper.add_representer(
    # In flow style, [0.9, 0.95] on one line, as a person writes short sequences; lists have one item a line.
    tuple,
    lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True),
)
# `repr` is the shortest text that reads back as the same float.
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", repr(value)))


def read(path: Path, where: str | None = None) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Reads a YAML file by `compose`.

    Args:
        where: name of the file in errors; the path if None.

    Raises:
        RecipeError: the file cannot be read, is not text, is larger than `LARGEST_FILE`, or as for `compose`.
    """
    return compose(read_text(path, where), where or str(path))


def read_text(path: Path, where: str | None = None, largest: int = LARGEST_FILE) -> str:
    """Returns the text of a YAML file of at most so many bytes; other arguments and errors as for `read`."""
    where = where or str(path)
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise RecipeError(f"{where}: is {'a folder' if path.is_dir() else 'not a file'}; name a YAML file")
        # Before reading: a file of weights given by mistake may have gigabytes.
        if path.stat().st_size > largest:
            raise RecipeError(f"{where}: is larger than {largest >> 20} MiB, which no recipe is; name a YAML file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{where}: not text in UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{where}: cannot be read ({error.strerror})") from None


def _find_prefix(at: tuple[str, ...]) -> str:
    return f"{shorten('.'.join(at))}: " if at else ""


def _describe_tag(line: str, at: tuple[str, ...], node: yaml.Node) -> str:
    tag = quote_value(node.tag.replace(_TAG, "!!"))
    return f"{line}: {_find_prefix(at)}has the tag {tag}; write the plain value, without a tag"


def _require_plain_key(key: yaml.Node, line: str, at: tuple[str, ...]) -> None:
    """Rejects keys of a mapping that are not plain text."""
    if not isinstance(key, yaml.ScalarNode):
        raise RecipeError(f"{line}: {_find_prefix(at)}a key is text, not a list or a mapping")
    if key.value == "<<" and key.style is None:
        raise RecipeError(f"{line}: {_find_prefix(at)}merge keys ('<<') are not of YAML 1.2; write the keys out")
    if key.tag not in _Loader.yaml_constructors:
        raise RecipeError(_describe_tag(line, at, key))


def compose(text: str, where: str, *, numbered: bool = True) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Parses YAML text into plain values and the line of each key. Keys are text.

    Args:
        text: the YAML.
        where: name of the text in errors.
        numbered: put the line into errors; False for a value on the command line.

    Raises:
        RecipeError: the text is not YAML, has a duplicate key, or is larger, deeper or (with its aliases expanded)
            longer than any recipe.
    """
    lines: dict[tuple[str, ...], int] = {}
    nodes = 0

    def walk(node: yaml.Node, at: tuple[str, ...]) -> None:
        nonlocal nodes
        # PyYAML shares the node of an alias; walking it at each use counts the values that it would expand to.
        nodes += 1
        line = f"{where}:{node.start_mark.line + 1}" if numbered else where
        if len(at) > _DEEPEST:  # an anchor that is used within itself ends here too
            raise RecipeError(f"{line}: is nested more than {_DEEPEST} levels deep")
        if nodes > _MOST_VALUES:
            raise RecipeError(f"{line}: {_TOO_MANY}")
        if isinstance(node, yaml.MappingNode):
            if node.tag != f"{_TAG}map":
                raise RecipeError(_describe_tag(line, at, node))
            for key, value in node.value:
                _require_plain_key(key, line, at)
                key.tag = f"{_TAG}str"  # 1, null and true are names like others
                here = (*at, key.value)
                # PyYAML would silently keep the last one.
                if here in lines:
                    name = shorten(".".join(here))
                    first = lines[here]
                    raise RecipeError(
                        f"{where}:{key.start_mark.line + 1}: key '{name}' is given twice (also in line {first})"
                    )
                lines[here] = key.start_mark.line + 1
                walk(value, here)
        elif isinstance(node, yaml.SequenceNode):
            if node.tag != f"{_TAG}seq":
                raise RecipeError(_describe_tag(line, at, node))
            for index, value in enumerate(node.value):
                lines[(*at, str(index))] = value.start_mark.line + 1
                walk(value, (*at, str(index)))
        elif node.tag not in _Loader.yaml_constructors:
            raise RecipeError(_describe_tag(line, at, node))
        else:
            try:
                loader.construct_object(node)
            except _Unusable as error:  # reported here, since the key is known
                raise RecipeError(f"{line}: {_find_prefix(at)}{error.problem}") from None

    # Nodes first, values last: nodes have the line and the tag of each value.
    node, loader = _compose_nodes(text, where, numbered=numbered)
    if node is None:
        return {}, lines
    # All checks, before the values are constructed as a whole.
    walk(node, ())
    with _short_yaml_errors(where, numbered=numbered):
        return loader.construct_document(node), lines


def _compose_nodes(text: str, where: str, *, numbered: bool) -> tuple[yaml.Node | None, _Loader]:
    """Returns the nodes of YAML text with aliases not yet expanded, and their loader; errors as for `compose`."""
    if len(text) > LARGEST_FILE:
        raise RecipeError(f"{where}: is longer than {LARGEST_FILE >> 20} MiB, which no recipe is")
    with _short_yaml_errors(where, numbered=numbered):
        loader = _Loader(text)
        return loader.get_single_node(), loader


@contextlib.contextmanager
def _short_yaml_errors(where: str, *, numbered: bool) -> Iterator[None]:
    """Converts PyYAML's errors within the block to a RecipeError of one line."""
    try:
        yield
    except yaml.reader.ReaderError as error:
        raise RecipeError(f"{where}: not YAML: the character #x{error.character:04x}, which no text has") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and numbered else ""
        problem = (getattr(error, "problem", None) or str(error)).removeprefix("but ")
        # PyYAML describes a tab only as a character that cannot start a token.
        if "'\\t'" in problem:
            problem += "; indent with spaces, not tabs"
        kind = "" if isinstance(error, _Unusable) else "not YAML: "
        raise RecipeError(f"{where}{line}: {kind}{shorten(problem, 160)}") from None


def parse_nodes(text: str, where: str) -> yaml.Node | None:
    """Parses YAML of another program into nodes without constructing values, since it may have tags of its own.

    Raises:
        RecipeError: the text is not YAML, or larger, deeper or (with its aliases expanded) longer than any recipe; the
            message begins with `where`.
    """
    root, _ = _compose_nodes(text, where, numbered=True)
    count, todo = 0, [(root, 0)] if root is not None else []
    while todo:
        node, depth = todo.pop()
        # As in `compose`, an aliased node is counted at each use.
        count += 1
        if depth > _DEEPEST:  # an anchor that is used within itself ends here too
            raise RecipeError(f"{where}:{node.start_mark.line + 1}: is nested more than {_DEEPEST} levels deep")
        if count > _MOST_VALUES:
            raise RecipeError(f"{where}:{node.start_mark.line + 1}: {_TOO_MANY}")
        if isinstance(node, yaml.MappingNode):
            todo += [(inner, depth + 1) for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += [(inner, depth + 1) for inner in node.value]
    return root


def write(value: object) -> str:
    """Returns plain values as YAML that `compose` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
