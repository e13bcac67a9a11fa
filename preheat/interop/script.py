"""The calls of a training script as keys, read from its source without running it. No torch.

`SFTConfig(learning_rate=2e-5)` is the key `SFTConfig.learning_rate`. Values are constants, names that are assigned one
constant in the whole script, dtypes of torch, whether the GPU has bf16, and lists and mappings of these; all others are
`Computed`. What follows `if False:` is not read.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from preheat.errors import RecipeError
from preheat.interop.keys import Computed, Reference
from preheat.sanitize import shorten

__all__ = [
    "ARGUMENT_CALLS",
    "FAST_CALLS",
    "FAST_CLASSES",
    "is_plain",
    "name_call",
    "parse_code",
    "parse_script",
    "read_calls",
    "read_script",
]

ARGUMENT_CALLS = ("TrainingArguments", "SFTConfig", "DPOConfig")
"""Classes of which preheat reads the arguments of a run."""

FAST_CLASSES = ("FastLanguageModel", "FastModel", "FastTextModel", "FastVisionModel", "FastSentenceTransformer")
"""unsloth's classes that load models and add adapters."""
FAST_CALLS = frozenset(f"{name}.{verb}" for name in FAST_CLASSES for verb in ("from_pretrained", "get_peft_model"))

_TRAINER = ("model", "args")
_REFERENCE = ("pretrained_model_name_or_path",)
_CALLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("TrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "PPOConfig", "RLOOConfig"),
            *("KTOConfig", "ORPOConfig", "CPOConfig", "DistillationConfig"),
        ),
        ("output_dir",),
    ),
    "UnslothTrainingArguments": ("embedding_learning_rate",),
    **{f"{name}.from_pretrained": ("model_name", "max_seq_length", "dtype", "load_in_4bit") for name in FAST_CLASSES},
    **{
        f"{name}.get_peft_model": ("model", "r", "target_modules", "lora_alpha", "lora_dropout", "bias")
        for name in FAST_CLASSES
    },
    "get_chat_template": ("tokenizer", "chat_template", "mapping"),
    "train_on_responses_only": ("trainer", "instruction_part", "response_part"),
    "UnslothTrainer": _TRAINER,
    **dict.fromkeys(("Trainer", "SFTTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer"), _TRAINER),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), ("model", "reward_funcs", "args")),
    **dict.fromkeys(("RewardTrainer", "PPOTrainer", "DistillationTrainer"), _TRAINER),
    "DPOTrainer": ("model", "ref_model", "args"),
    "LoraConfig": ("task_type",),
    "prepare_model_for_kbit_training": ("model", "use_gradient_checkpointing"),
    "BitsAndBytesConfig": ("load_in_8bit", "load_in_4bit"),
    "AutoModelForCausalLM.from_pretrained": _REFERENCE,
    "AutoModelForCausalLM.from_config": ("config",),
    "AutoModelForSequenceClassification.from_pretrained": _REFERENCE,
    "AutoModelForImageTextToText.from_pretrained": _REFERENCE,
    "AutoConfig.from_pretrained": _REFERENCE,
    "AutoTokenizer.from_pretrained": _REFERENCE,
    "load_dataset": ("path", "name"),
}
"""Calls that are read, with the names of their positional arguments."""
_SEVERAL = ("load_dataset",)
"""Calls of which a script may have several that are all of use: the key has their number."""
_BF16_TESTS = ("is_bfloat16_supported", "is_bf16_supported")
"""Functions that tell whether the GPU has bf16: a script's `bf16=is_bf16_supported()` is `bf16: auto` of a file."""
_DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float", "half")


def read_script(text: str, where: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns the arguments of the calls of a script by the call's name, and the line of each.

    The second call of a name is `NAME#2`: only one of them can be the run's.

    Args:
        where: name of the script in errors.

    Raises:
        RecipeError: the text is not Python.

    Example:
        >>> read_script("rate = 1e-5\\nargs = SFTConfig('out', learning_rate=rate, seed=int(1))", "f.py")[0]
        {'SFTConfig': {'output_dir': 'out', 'learning_rate': 1e-05, 'seed': 'int(1)'}}
    """
    return read_calls(parse_script(text, where))


def read_calls(tree: ast.Module) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns what `read_script` does, of code that is parsed already."""
    tree = _DropDeadBranches().visit(tree)
    names = _find_constants(tree)
    values: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    for call in _list_calls(tree):
        if (name := name_call(call)) not in _CALLS:
            continue
        path: tuple[str, ...] = (name,)
        if name in _SEVERAL:
            path = (name, str(len(values.setdefault(name, []))))
            lines.setdefault((name,), call.lineno)
        elif name in values:
            count = sum(key.partition("#")[0] == name for key in values)
            path = (f"{name}#{count + 1}",)
        arguments: dict[str, Any] = {}
        for key, node in _list_arguments(call, _CALLS[name], names):
            arguments[key] = _read_value(node, names)
            _note_lines(node, (*path, key), names, lines)
        lines[path] = call.lineno
        if name in _SEVERAL:
            values[name].append(arguments)
        else:
            values[path[0]] = arguments
    return values, lines


def parse_script(text: str, where: str) -> ast.Module:
    """Returns the syntax tree of a script.

    Raises:
        RecipeError: the text is not Python.
    """
    try:
        return parse_code(text)
    except SyntaxError as error:
        raise RecipeError(f"{where}:{error.lineno or 1}: not Python: {shorten(error.msg)}") from None
    except (ValueError, RecursionError, MemoryError):  # NUL characters; nested too deep for the parser
        raise RecipeError(f"{where}: not Python that can be read: it holds NUL, or is nested too deep") from None


def parse_code(text: str) -> ast.Module:
    """Returns the syntax tree of Python; `await` may stand outside functions, as in notebooks.

    Raises:
        SyntaxError: the text is not Python.
        ValueError: it holds NUL characters. RecursionError, MemoryError: it is nested too deep.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the script's own texts
        tree = compile(text, "<script>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


class _DropDeadBranches(ast.NodeTransformer):
    """Drops what follows `if False:`, by which notebooks keep code that is not for this run."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant) and not node.test.value:
            return node.orelse or ast.copy_location(ast.Pass(), node)
        return node


def _list_calls(tree: ast.Module) -> list[ast.Call]:
    """Returns all calls, in the order of the file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def name_call(call: ast.Call) -> str:
    """Returns the name of the function or class, with its class if it is a constructor of one: `A.from_pretrained`."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    owner = function.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    # peft's own get_peft_model has no class.
    if not function.attr.startswith("from_") and f"{name}.{function.attr}" not in FAST_CALLS:
        return function.attr
    # The classes of single families load what the automatic class loads.
    return f"{'AutoModelForCausalLM' if name.endswith('ForCausalLM') else name}.{function.attr}"


def _list_arguments(
    call: ast.Call, positional: tuple[str, ...], names: Mapping[str, ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    for index, node in enumerate(call.args):
        yield (positional[index] if index < len(positional) else f"argument {index + 1}"), node
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
            continue
        inner = names.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
        pairs = list(zip(inner.keys, inner.values, strict=True)) if isinstance(inner, ast.Dict) else []
        if pairs and all(isinstance(key, ast.Constant) for key, _ in pairs):
            yield from ((str(key.value), node) for key, node in pairs if isinstance(key, ast.Constant))
        else:
            yield "**", keyword.value


def _find_constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the names that the script binds once, by an assignment; their value holds wherever they are used."""
    bound: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            bound.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.alias):
            bound.setdefault((node.asname or node.name).partition(".")[0], []).append(None)
    stores = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {
        name: values[0]
        for name, values in bound.items()
        if len(values) == 1 and values[0] is not None and stores.count(name) == 1
    }


def _read_value(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Returns the value of an expression, or its source if it must be computed."""
    if isinstance(node, ast.Constant):
        return node.value if is_plain(node.value) else Computed(_show(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _read_value(node.operand, names, depth)
        return -inner if isinstance(inner, int | float) and not isinstance(inner, bool) else Computed(_show(node))
    if _tests_bf16(node):
        return "auto"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        if _tests_bf16(node.operand):
            return False  # fp16 on a GPU without bf16
        inner = _read_value(node.operand, names, depth)
        return not inner if isinstance(inner, bool) else Computed(_show(node))
    if isinstance(node, ast.Name) and node.id in names and depth < _DEEPEST:
        value = _read_value(names[node.id], names, depth + 1)
        return Computed(node.id) if type(value) is Computed else value
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        return {"float": "float32", "half": "float16"}.get(node.attr, node.attr)
    if isinstance(node, ast.List | ast.Tuple | ast.Set) and depth < _DEEPEST:
        items = [_read_value(item, names, depth + 1) for item in node.elts]
        return Computed(_show(node)) if any(isinstance(item, Computed) for item in items) else items
    if isinstance(node, ast.Dict) and depth < _DEEPEST and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            str(key.value): _read_value(item, names, depth + 1) for key, item in pairs if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.Call) and name_call(node) in _CALLS:
        return Reference(name_call(node))
    if isinstance(node, ast.Call) and name_call(node) == "dict" and not node.args and depth < _DEEPEST:
        return {item.arg or "**": _read_value(item.value, names, depth + 1) for item in node.keywords}
    return Computed(_show(node))


def _tests_bf16(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and not node.args and name_call(node) in _BF16_TESTS


def is_plain(value: object) -> bool:
    """Returns True for a constant that a YAML file may hold too."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -(2**63) <= value < 2**63)


_DEEPEST = 16
"""Maximum depth of resolved names and nested lists; deeper values are taken as computed."""


def _show(node: ast.expr) -> str:
    return shorten(ast.unparse(node))


def _note_lines(
    node: ast.expr, path: tuple[str, ...], names: Mapping[str, ast.expr], lines: dict[tuple[str, ...], int]
) -> None:
    """Notes the line of an argument, and of the keys of a mapping."""
    lines[path] = node.lineno
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), ast.Dict):
        node = names[node.id]
    if isinstance(node, ast.Dict):
        for key, item in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                _note_lines(item, (*path, str(key.value)), {}, lines)
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None:
                lines[(*path, keyword.arg)] = keyword.value.lineno
