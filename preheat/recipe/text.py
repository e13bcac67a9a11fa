"""YAML 1.2 for recipes: PyYAML's loader and dumper with the scalars of the core schema, and the line of every key.

PyYAML follows YAML 1.1, which reads 1e-4 as text and off as false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from preheat.errors import RecipeError

__all__ = ["compose", "write"]


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


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
    _class.yaml_implicit_resolvers = {}
    for _tag, (_pattern, _first) in _SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first])
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0) if node.value[:2] in ("0o", "0x") else int(node.value)
)
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(re.sub(r"\.(inf|nan)$", r"\1", node.value.lower()))
)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", repr(value)))


def compose(text: str, where: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """YAML text as plain values and the line of each key. A key that stands twice is an error."""
    lines: dict[tuple[str, ...], int] = {}

    def walk(node: yaml.Node, at: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*at, str(key.value))
                if here in lines:
                    raise RecipeError(
                        f"{where}:{key.start_mark.line + 1}: key '{'.'.join(here)}' stands twice (also in line {lines[here]})"
                    )
                lines[here] = key.start_mark.line + 1
                walk(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*at, str(index))] = value.start_mark.line + 1
                walk(value, (*at, str(index)))

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, lines
        walk(node, ())
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{where}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None


def write(value: Any) -> str:
    """Plain values as YAML that `compose` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
