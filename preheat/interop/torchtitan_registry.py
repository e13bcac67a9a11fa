"""A configuration of torchtitan's registry as keys, read from its source without running it. No torch.

Since version 0.3 a run of torchtitan is a Python function that returns `Trainer.Config(...)`. Constants are followed
through assignments, attributes that are set later, and calls of other functions of the module. All other values are
`Computed`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from preheat.errors import RecipeError
from preheat.interop.keys import Computed
from preheat.interop.script import is_plain, name_call, parse_script
from preheat.sanitize import shorten

__all__ = ["is_registry", "read_registry", "split_name"]

SEPARATOR = "::"
"""Between a file and the name of the configuration in it."""
_TRAINER = "Trainer.Config"
_POSITIONAL: Mapping[str, tuple[str, ...]] = {"model_registry": ("flavor",), "default_adamw": ("lr",)}
_NAMED_BY_FIELD = (
    *("Trainer.Config", "TrainingConfig", "ParallelismConfig", "CompileConfig", "CommConfig", "DebugConfig"),
    *("LRSchedulersContainer.Config", "CheckpointManager.Config", "MetricsProcessor.Config", "Profiler.Config"),
    *("Validator.Config", "HuggingFaceTokenizer.Config", "OptimizersContainer.Config", "ParamGroupConfig"),
    "default_adamw",
)
"""Classes that the field implies; of others, which are a choice, the key `class` has the name."""
_DEEPEST = 16
"""Calls within calls, and sections within sections: deeper values are taken as computed."""
_MOST_CALLS, _MOST_VALUES = 1000, 10_000


class _Section(dict[str, Any]):
    """The arguments of a call, with the line of each."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}

    def put(self, key: str, value: object, line: int) -> None:
        if value is None and key == "activation_checkpoint":
            value = "none"  # switches it off, where other keys fall back to their default
        self[key] = value
        self.lines[key] = line


def split_name(where: str) -> tuple[str, str | None]:
    """Returns the file and the name of the configuration in it, which follows `::`.

    Example:
        >>> split_name("config_registry.py::llama3_8b"), split_name("train.py")
        (('config_registry.py', 'llama3_8b'), ('train.py', None))
    """
    file, _, name = where.partition(SEPARATOR)
    return file, name or None


def is_registry(text: str, where: str) -> bool:
    """Returns True if a script calls `Trainer.Config`, as only torchtitan's configurations do.

    Raises:
        RecipeError: the text is not Python.
    """
    if _TRAINER not in text:
        return False
    tree = parse_script(text, where)
    return any(_name_class(node) == _TRAINER for node in ast.walk(tree) if isinstance(node, ast.Call))


def read_registry(text: str, where: str, name: str | None) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns the arguments of a configuration by section, and the line of each.

    Args:
        where: name of the module in errors; its folder is the model's name if the module is torchtitan's own.
        name: of the function; None: the only one.

    Raises:
        RecipeError: the text is not Python, or has no such configuration, or several.

    Example:
        >>> made = "Trainer.Config(model_spec=None, training=TrainingConfig(steps=10 * 2))"
        >>> read_registry(f"def tiny():\\n    return {made}", "f.py", None)[0]
        {'model_spec': None, 'training': {'steps': 20}}
    """
    tree = parse_script(text, where)
    try:
        module = _Module(tree, where)
        config = module.configure(_choose(module, where) if name is None else name)
        lines: dict[tuple[str, ...], int] = {}
        return _flatten(config, (), lines), lines
    except RecursionError:  # an expression that is nested too deep
        raise RecipeError(f"{where}: is nested too deep to be read") from None


def _choose(module: _Module, where: str) -> str:
    names = module.list_configurations()
    if len(names) == 1:
        return names[0]
    if not names:
        raise RecipeError(f"{where}: no function without arguments returns {_TRAINER}(...), which could be read")
    first = f"{where}{SEPARATOR}{names[0]}"
    raise RecipeError(f"{where}: has {len(names)} configurations ({_join(names)}); name one: {shorten(first, 200)}")


def _join(names: list[str]) -> str:
    return shorten(", ".join(names), 200)


def _flatten(section: _Section, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """Returns a section as plain values, and notes the line of each key."""
    into: dict[str, Any] = {}
    lines.setdefault(path, section.line)
    for key, value in section.items():
        lines[*path, key] = section.lines[key]
        into[key] = _flatten_value(value, (*path, key), lines)
    if not path:
        del lines[()]
    return into


def _flatten_value(value: object, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> object:
    if len(path) > _DEEPEST or len(lines) > _MOST_VALUES:
        return Computed(path[-1])
    if isinstance(value, _Section):
        return _flatten(value, path, lines)
    if isinstance(value, list):
        return [_flatten_value(item, (*path, str(index)), lines) for index, item in enumerate(value)]
    return value


class _Module:
    """The functions of a module, and the values of the names that it assigns."""

    def __init__(self, tree: ast.Module, where: str) -> None:
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.names: dict[str, Any] = {}
        self.model = _find_model(tree, where)
        self._where = where
        self._depth = self._calls = 0
        self._run([node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)], self.names)

    def list_configurations(self) -> list[str]:
        """Returns the names of the functions that can be called without arguments and return a configuration."""
        return [
            name
            for name, function in self.functions.items()
            if not name.startswith("_") and not _require(function) and self._is_configuration(function)
        ]

    def configure(self, name: str) -> _Section:
        """Returns the configuration that a function returns.

        Raises:
            RecipeError: there is no such function, or it returns none.
        """
        if name not in self.functions:
            known = _join(self.list_configurations())
            raise RecipeError(f"{self._where}: has no function {shorten(name)}; its configurations: {known}")
        config = self.call(self.functions[name], {})
        if not isinstance(config, _Section):
            line = self.functions[name].lineno
            raise RecipeError(f"{self._where}:{line}: {shorten(name)}: returns no {_TRAINER}(...) that could be read")
        return config

    def _is_configuration(self, function: ast.FunctionDef) -> bool:
        config = self.call(function, {})
        return isinstance(config, _Section) and "class" not in config and "model_spec" in config

    def call(self, function: ast.FunctionDef, arguments: Mapping[str, Any]) -> Any:
        """Returns what a function returns, as far as it can be read."""
        self._calls += 1
        if self._depth == _DEEPEST or self._calls > _MOST_CALLS:
            return Computed(f"{function.name}(...)")
        names = dict(self.names)
        parameters = [*function.args.posonlyargs, *function.args.args]
        defaults = [None] * (len(parameters) - len(function.args.defaults)) + list(function.args.defaults)
        pairs = [
            *zip(parameters, defaults, strict=True),
            *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
        ]
        self._depth += 1
        for parameter, default in pairs:
            value = Computed(parameter.arg) if default is None else self._read(default, names)
            names[parameter.arg] = arguments.get(parameter.arg, value)
        result = self._run(function.body, names)
        self._depth -= 1
        return result

    def _run(self, body: list[Any], names: dict[str, Any]) -> Any:
        """Follows statements, changes `names`, and returns the value of the first `return`; None if there is none."""
        for node in body:
            if isinstance(node, ast.Return):
                return None if node.value is None else self._read(node.value, names)
            if isinstance(node, ast.Assign):
                value = self._read(node.value, names)
                for target in node.targets:
                    _store(target, value, names, node.value.lineno)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                _store(node.target, self._read(node.value, names), names, node.value.lineno)
            elif isinstance(node, ast.Expr):
                # A method such as `append` changes what it is called on.
                if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
                    changed = node.value.func.value
                    _store(changed, Computed(_show(changed)), names, node.lineno)
            elif isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Assert | ast.Pass):
                continue
            else:
                # A branch or a loop: what it sets is not known.
                for target in _list_targets(node):
                    _store(target, Computed(_show(target)), names, target.lineno)
        return None

    def _read(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Returns the value of an expression, or its source if it must be computed."""
        if isinstance(node, ast.Constant) and is_plain(node.value):
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id, Computed(node.id))
        if isinstance(node, ast.Attribute):
            owner = self._read(node.value, names)
            value = owner.get(node.attr) if isinstance(owner, _Section) else None
            return Computed(_show(node)) if value is None else value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._read(node.operand, names)
            return -inner if _is_number(inner) else Computed(_show(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = self._read(node.left, names), self._read(node.right, names)
            product = left * right if _is_number(left) and _is_number(right) else None
            return product if product is not None and is_plain(product) else Computed(_show(node))
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._read(item, names) for item in node.elts]
            return Computed(_show(node)) if any(isinstance(item, Computed) for item in items) else items
        if isinstance(node, ast.Dict):
            section = _Section(node.lineno)
            for key, value in zip(node.keys, node.values, strict=True):
                if not isinstance(key, ast.Constant):
                    return Computed(_show(node))
                section.put(str(key.value), self._read(value, names), value.lineno)
            return section
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "DATASETS":
            return self._read(node.slice, names)
        return self._read_call(node, names) if isinstance(node, ast.Call) else Computed(_show(node))

    def _read_call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = _name_class(node)
        function = self.functions.get(name)
        positional = _list_parameters(function) if function else _POSITIONAL.get(name, ())
        section = _Section(node.lineno)
        for index, value in enumerate(node.args):
            key = positional[index] if index < len(positional) else f"argument {index + 1}"
            section.put(key, self._read(value, names), value.lineno)
        for keyword in node.keywords:
            section.put(keyword.arg or "**", self._read(keyword.value, names), keyword.value.lineno)
        if function:
            return self.call(function, section)
        if name == "model_registry":
            section.put("name", self.model or Computed(name), node.lineno)
            return section
        if not name.endswith("Config") and name not in _POSITIONAL:
            return Computed(_show(node))
        if name not in _NAMED_BY_FIELD:
            named = _Section(node.lineno)
            named.put("class", name.removesuffix(".Config"), node.lineno)
            for key, value in section.items():
                named.put(key, value, section.lines[key])
            return named
        return section


def _find_model(tree: ast.Module, where: str) -> str | None:
    """Returns the package that `model_registry` comes from: torchtitan.models.NAME, or the module's own folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            return node.module.rpartition(".")[2] if node.module else Path(where).parent.name or None
    return None


def _name_class(call: ast.Call) -> str:
    """Returns the name of a function or class; of `A.Config`, which is a class of its own for each A, both parts."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "Config":
        owner = function.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        return f"{name}.Config"
    return name_call(call)


def _list_parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args))


def _require(function: ast.FunctionDef) -> bool:
    """Returns True if a function has arguments without a default."""
    arguments = function.args
    return len(arguments.defaults) < len(arguments.posonlyargs) + len(arguments.args) or None in arguments.kw_defaults


def _store(target: ast.expr, value: object, names: dict[str, Any], line: int) -> None:
    """Assigns a value to a name, or to an attribute of a configuration."""
    if isinstance(target, ast.Name):
        names[target.id] = value
        return
    path: list[str] = []
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    section = names.get(target.id) if isinstance(target, ast.Name) else None
    for key in path[:-1]:
        if isinstance(section, _Section) and key not in section:
            section.put(key, _Section(line), line)
        section = section.get(key) if isinstance(section, _Section) else None
    if path and isinstance(section, _Section):
        section.put(path[-1], value, line)


def _list_targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yields the names and attributes that a statement assigns to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(node: ast.expr) -> str:
    return shorten(ast.unparse(node))
