"""The recipe: what to train, on what, with which techniques. Data, not code; YAML both ways; no torch.

>>> recipe = parse("model: {size: 15M}\\ndata: {source: stdlib}\\nstop: {steps: 10}")
>>> recipe.model.size, recipe.batch.size
('15M', 32)
>>> parse("modle: {}")
Traceback (most recent call last):
...
preheat.errors.RecipeError: recipe:1: unknown key 'modle'; did you mean 'model'?
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from preheat.errors import RecipeError, nearest
from preheat.technique import Technique, registry

__all__ = [
    "Batch",
    "Checkpoint",
    "Data",
    "Evaluate",
    "Hardware",
    "Model",
    "Optimizer",
    "Recipe",
    "Sample",
    "Schedule",
    "Stop",
    "dump",
    "field_docs",
    "json_schema",
    "load",
    "override",
    "parse",
]

# Bounds, as pydantic metadata: enforced at the YAML boundary only. A plain tuple keeps pydantic out of this import.


@dataclass(frozen=True)
class Bound:
    """A closed or half-open range that a number must lie in."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def problem(self, value: float) -> str | None:
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return f"must be {'above' if self.open_low else 'at least'} {self.low:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:g}"
        return None


Count = Annotated[int, Bound(1)]
Whole = Annotated[int, Bound(0)]
Positive = Annotated[float, Bound(0, open_low=True)]
NonNegative = Annotated[float, Bound(0)]
Share = Annotated[float, Bound(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: from a `path`, from a `family` and sizes, or from one dial (`size: 15M`)."""

    path: str | None = None
    """A Hugging Face folder (or hub name) with config.json; its weights too, unless `weights` is random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `path`: load the weights that stand there, or draw new ones for its configuration."""
    family: Literal["llama", "qwen3", "gpt2"] = "llama"
    """The architecture of a new model."""
    size: str | None = None
    """One dial for a new model, e.g. 15M or 1.1B: the parameters outside the embeddings and head; depth, width, heads and learning rate follow."""
    layers: Count | None = None
    """Number of transformer layers of a new model."""
    width: Count | None = None
    """Hidden size of a new model."""
    heads: Count | None = None
    """Query heads of a new model."""
    kv_heads: Count | None = None
    """Key-value heads of a new model (grouped queries); as many as `heads` when not stated."""
    feed_forward: Count | None = None
    """Inner width of the feed-forward block of a new model."""
    positions: Count | None = None
    """Longest sequence of a new model; the batch's length when not stated."""
    vocabulary: Count | None = None
    """Rows of the embedding of a new model; the tokenizer's size when not stated."""
    tie_embeddings: bool | None = None
    """Let embedding and head share one matrix; the family's habit when not stated."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the transformers configuration, e.g. {rope_theta: 500000}."""
    trust_remote_code: bool = False
    """Run model code that comes with `path`. Off unless you trust its author."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    source: str = "stdlib"
    """`stdlib` (Python's own library source), `docstrings` (docstring -> function pairs drawn from it), a file or folder (.txt, .py, .jsonl, .json, .parquet), or a `datasets` name."""
    text: str = "text"
    """The field that holds the text of a row (JSONL, Parquet, datasets)."""
    prompt: str | None = None
    """The field that holds a row's prompt, which is read but not trained on; needs `completion`."""
    completion: str | None = None
    """The field that holds what the model should answer; only its tokens are trained."""
    subset: str | None = None
    """Configuration name of a `datasets` source."""
    split: str = "train"
    """Split of a `datasets` source."""
    streaming: bool = False
    """Read the source while training instead of tokenizing all of it first."""
    tokenizer: str | None = None
    """A tokenizer folder; the model's own when not stated; with neither, a BPE is trained on the data."""
    vocabulary: Annotated[int, Bound(257)] = 4096
    """Pieces of the BPE that is trained when there is no tokenizer."""
    packing: Literal["auto", "stream", "whole"] = "auto"
    """`stream` cuts documents at row ends; `whole` never cuts an example and pads. auto: whole for prompt/completion rows, else stream."""
    validation: str | float = 0.02
    """Share of documents held out (chosen by their content, so that equal documents fall on one side), or a file or folder to validate on."""
    limit: Count | None = None
    """Read at most so many documents."""
    workers: Whole = 0
    """Loader processes. The order of the data is the same for any number."""
    prefetch: Count = 2
    """Batches that each loader process prepares ahead."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the optimizer sees in one step."""

    size: Count = 32
    """Rows (packed sequences) per optimizer step, over all micro-batches and devices: the global batch."""
    length: Annotated[int, Bound(2)] = 256
    """Tokens in a row."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), fused."""

    lr: Literal["auto"] | Positive = "auto"
    """Peak learning rate; auto: by the model's size (see models/sizes.py)."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the running mean of the gradients and of their squares."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on matrices only (norms and biases are left alone)."""
    clip: NonNegative = 1.0
    """Largest norm of the gradients; larger ones are scaled down. 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the run, as a share of the peak."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine; wsd: warmup, stable, linear decay; constant after warmup."""
    warmup: Share = 0.02
    """Share of the run in which the rate rises from 0."""
    decay: Share = 0.2
    """wsd only: share of the run at the end in which the rate falls."""
    floor: Share = 0.1
    """Where the rate ends, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When to stop; what is reached first counts."""

    steps: Count | None = None
    """Optimizer steps."""
    tokens: Count | None = None
    """Tokens read."""
    epochs: Positive | None = None
    """Passes over the training rows."""
    hours: Positive | None = None
    """Wall-clock hours."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Loss on the validation rows during the run; it is always taken at the end."""

    every: Whole = 0
    """Steps between evaluations; 0: only at the end."""
    rows: Count = 256
    """At most so many validation rows."""
    baselines: bool = False
    """Also take the loss of a unigram and a bigram model of the same split, to compare with."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a crash may cost."""

    every: Whole = 0
    """Steps between checkpoints; 0: only at the end (and on SIGTERM or Ctrl-C)."""
    keep: Count = 2
    """So many of the newest checkpoints stay."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the trained model writes at the end, for the report."""

    prompts: tuple[str, ...] = ()
    """Beginnings to continue; none: no samples."""
    tokens: Count = 64
    """Tokens to write for each."""
    temperature: NonNegative = 0.0
    """0: the likeliest token each time."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    threads: Count | None = None
    """CPU threads; all cores when not stated."""
    memory: str | None = None
    """Memory that the run may use, e.g. 12GiB; what the device has when not stated."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Frozen: `dataclasses.replace` or `override` make another."""

    name: str = "run"
    """A short name, used for the run's folder."""
    seed: Whole = 0
    """Decides weights, data order and every other draw."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    stop: Stop = field(default_factory=Stop)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    sample: Sample = field(default_factory=Sample)
    hardware: Hardware = field(default_factory=Hardware)
    techniques: Mapping[str, Technique] = field(default_factory=dict)
    """Techniques by name with their settings; the order does not matter (their stages decide)."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise RecipeError("; ".join(f"{key}: {text}" for key, text in problems))

    def problems(self) -> list[tuple[str, str]]:
        """What contradicts itself in this recipe, as (key, words)."""
        found: list[tuple[str, str]] = []
        model, data = self.model, self.data
        given = [k for k in ("layers", "width", "heads", "kv_heads", "feed_forward") if getattr(model, k) is not None]
        if model.path and (model.size or given):
            found.append(("model.path", f"a model from a path brings its sizes; remove {model.size and 'size' or given[0]}"))
        if model.size is not None and not re.fullmatch(r"\d+(\.\d+)?[KMB]", model.size):
            found.append(("model.size", f"{model.size!r} is not a size; write it like 15M or 1.1B"))
        if model.heads and model.kv_heads and model.heads % model.kv_heads:
            found.append(("model.kv_heads", f"{model.kv_heads} does not divide heads {model.heads}"))
        if model.width and model.heads and model.width % model.heads:
            found.append(("model.width", f"{model.width} is not a multiple of heads {model.heads}"))
        if (data.prompt is None) != (data.completion is None):
            found.append(("data.prompt", "prompt and completion go together; state both or neither"))
        if isinstance(data.validation, float | int) and not 0 <= data.validation < 1:
            found.append(("data.validation", f"{data.validation} is no share; use a number from 0 up to (not with) 1, or a path"))
        if not (self.stop.steps or self.stop.tokens or self.stop.epochs or self.stop.hours):
            found.append(("stop", "says no end; state steps, tokens, epochs or hours"))
        if self.stop.hours and not (self.stop.steps or self.stop.tokens or self.stop.epochs):
            if self.schedule.kind != "constant":
                found.append(("stop.hours", f"schedule {self.schedule.kind} needs a length in steps, tokens or epochs; add one (hours still ends the run early) or use schedule.kind: constant"))
        if not re.fullmatch(r"[\w.-]+", self.name):
            found.append(("name", f"{self.name!r} must be letters, digits, '.', '_' or '-'"))
        return found


def _is_part(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass: the one source of help, schema and comments."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[node.target.id] = inspect.cleandoc(after.value.value)
    return docs


# --- YAML 1.2 ---------------------------------------------------------------------------------------------------
# PyYAML follows 1.1, which reads 1e-4 as text and off as false. Same loader, the scalars of YAML 1.2's core schema.


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_SCALARS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+0123456789."),
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN\0"),
}
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, (_pattern, _first) in _SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first])
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0) if node.value[:2] in ("0o", "0x") else int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(re.sub(r"\.(inf|nan)$", r"\1", node.value.lower())))
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", repr(value)))


def _compose(text: str, where: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """YAML text as plain values and the line of each key. A key that stands twice is an error."""
    lines: dict[tuple[str, ...], int] = {}

    def walk(node: yaml.Node, at: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*at, str(key.value))
                if here in lines:
                    raise RecipeError(f"{where}:{key.start_mark.line + 1}: key '{'.'.join(here)}' stands twice (also in line {lines[here]})")
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


# --- the boundary: plain values -> Recipe -------------------------------------------------------------------------


@functools.cache
def _adapter(cls: type) -> Any:
    """A pydantic validator for one flat dataclass: strict types in JSON's sense, unknown keys refused, bounds kept."""
    import pydantic

    def bounded(bound: Bound) -> pydantic.AfterValidator:
        def check(value: Any) -> Any:
            words = bound.problem(value) if isinstance(value, int | float) else None
            if words:
                raise ValueError(words)
            return value

        return pydantic.AfterValidator(check)

    def convert(kind: Any) -> Any:
        import types
        import typing

        origin = typing.get_origin(kind)
        if origin is Annotated:
            base, *extra = typing.get_args(kind)
            return Annotated[(convert(base), *(bounded(e) if isinstance(e, Bound) else e for e in extra))]
        if origin in (typing.Union, types.UnionType):
            return typing.Union[tuple(convert(a) for a in typing.get_args(kind))]  # noqa: UP007
        if origin is tuple:
            return tuple[tuple(convert(a) if a is not Ellipsis else a for a in typing.get_args(kind))]
        return kind

    import typing

    hints = typing.get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {
        f.name: (convert(hints[f.name]), f.default if f.default is not dataclasses.MISSING else ...)
        if f.default_factory is dataclasses.MISSING
        else (convert(hints[f.name]), pydantic.Field(default_factory=f.default_factory))
        for f in dataclasses.fields(cls)
    }
    # protected_namespaces: a technique may have a field called model_…
    return pydantic.create_model(cls.__name__, __config__=pydantic.ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields)


def _words(error: Any) -> str:
    """pydantic's error in one short clause."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "missing":
        return "is needed"
    if kind == "value_error":
        return str(context["error"])
    return {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "tuple_type": "must be a list",
        "dict_type": "must be a mapping",
    }.get(kind, error["msg"][0].lower() + error["msg"][1:])


class _Reader:
    def __init__(self, where: str, lines: Mapping[tuple[str, ...], int]):
        self.where, self.lines, self.found = where, lines, list[str]()

    def say(self, at: Sequence[Any], text: str) -> None:
        at = tuple(str(a) for a in at)
        line = next((self.lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.lines), None)
        message = f"{self.where}:{line}: {text}" if line else f"{self.where}: {text}"
        if message not in self.found:
            self.found.append(message)

    def flat(self, cls: type, values: Any, at: tuple[str, ...]) -> Any:
        """One dataclass without nested ones, or None after saying why not."""
        import pydantic

        values = {} if values is None else values
        name = ".".join(at)
        if not isinstance(values, Mapping):
            self.say(at, f"{name}: must be a mapping of settings, got {values!r}")
            return None
        known = [f.name for f in dataclasses.fields(cls)]
        try:
            made = _adapter(cls).model_validate_json(json.dumps(values, default=str))
        except pydantic.ValidationError as problem:
            seen: dict[str, list[Any]] = {}
            for error in problem.errors():
                seen.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
            for key, errors in seen.items():
                here = (*at, key)
                if errors[0]["type"] == "extra_forbidden":
                    self.say(here, f"unknown key '{'.'.join(here)}'; {nearest(key, known)}")
                    continue
                words = " or ".join(dict.fromkeys(_words(e) for e in errors))
                self.say(here, f"{'.'.join(here)}: {words}, got {values.get(key)!r}")
            return None
        try:
            return cls(**{k: getattr(made, k) for k in known})
        except ValueError as problem:  # a technique's own __post_init__
            self.say(at, f"{name}: {problem}")
            return None

    def recipe(self, values: Any) -> Recipe:
        if not isinstance(values, Mapping):
            raise RecipeError(f"{self.where}: a recipe is a mapping of keys, got {type(values).__name__}")
        parts = {f.name: f for f in dataclasses.fields(Recipe)}
        top = _top_scalars()
        made: dict[str, Any] = {}
        scalars = self.flat(top, {k: v for k, v in values.items() if k in ("name", "seed")}, ())
        if scalars is not None:
            made.update(dataclasses.asdict(scalars))
        for key, value in values.items():
            if key not in parts:
                self.say((key,), f"unknown key '{key}'; {nearest(str(key), list(parts))}")
            elif key == "techniques":
                made[key] = self.techniques(value)
            elif key not in ("name", "seed"):
                cls = parts[key].default_factory
                assert _is_part(cls)
                made[key] = self.flat(cls, value, (key,))  # type: ignore[arg-type]
        if self.found:
            raise RecipeError("\n".join(self.found))
        try:
            return Recipe(**made)
        except RecipeError:
            blank = object.__new__(Recipe)
            for f in dataclasses.fields(Recipe):
                default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
                object.__setattr__(blank, f.name, made.get(f.name, default))
            for key, text in blank.problems():
                self.say(key.split("."), f"{key}: {text}")
            raise RecipeError("\n".join(self.found)) from None

    def techniques(self, values: Any) -> dict[str, Technique]:
        known = registry()
        if isinstance(values, list) and all(isinstance(v, str) for v in values):  # a list of names means their defaults
            twice = {v for v in values if values.count(v) > 1}
            for name in sorted(twice):
                self.say(("techniques",), f"techniques: '{name}' stands twice")
            values = dict.fromkeys(values)
        if values is None:
            return {}
        if not isinstance(values, Mapping):
            self.say(("techniques",), f"techniques: must be names with their settings, got {values!r}")
            return {}
        made = {}
        for name, settings in values.items():
            if name not in known:
                self.say(("techniques", name), f"unknown technique '{name}'; {nearest(str(name), list(known))}")
                continue
            made[name] = self.flat(known[name], settings, ("techniques", name))
        return made


@functools.cache
def _top_scalars() -> type:
    """name and seed, which stand at the top level."""
    return dataclasses.make_dataclass(
        "Top", [("name", str, field(default="run")), ("seed", Whole, field(default=0))], frozen=True, kw_only=True
    )


def parse(text: str, *, where: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from YAML text.

    Args:
        text: the YAML.
        where: the name that errors give the text, usually the file's.
        overrides: `a.b=c` each, as after `--set`; the value is read as YAML.

    Raises:
        RecipeError: every problem found, a line each: file, line, key, value and the nearest right name.
    """
    values, lines = _compose(text, where)
    for item in overrides:
        values = _assign(values, item)
        key = tuple(item.split("=", 1)[0].split("."))
        for at in [a for a in lines if a[: len(key)] == key]:
            del lines[at]
    return _Reader(where, lines).recipe(values)


def _assign(values: Any, item: str) -> Any:
    key, equals, raw = item.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {item}: write it as key=value, e.g. --set batch.size=64")
    value, _ = _compose(raw, f"--set {item}")
    value = None if raw.strip() == "" else value
    path = key.strip().split(".")
    values = dict(values) if isinstance(values, Mapping) else values
    at = values
    for step in path[:-1]:
        inner = at.get(step)
        if step in at and inner is not None and not isinstance(inner, Mapping):
            raise RecipeError(f"--set {item}: '{step}' is {inner!r}, which has no settings inside")
        at[step] = dict(inner or {})
        at = at[step]
    at[path[-1]] = value
    return values


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, or by the name of a built-in one.

    Example:
        >>> load("demo", ["batch.size=8"]).batch.size
        8
    """
    file = Path(path)
    if not file.exists():
        built_in = Path(__file__).parent / "recipes" / f"{path}.yaml"
        if not built_in.exists():
            names = sorted(p.stem for p in built_in.parent.glob("*.yaml"))
            raise RecipeError(f"{path}: no such file, and no built-in recipe of that name; {nearest(str(path), names)}")
        file = built_in
    if file.is_dir():
        raise RecipeError(f"{path}: is a folder; name a recipe file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not text in UTF-8") from None
    return parse(text, where=str(path), overrides=overrides)


def override(recipe: Recipe, *items: str) -> Recipe:
    """The recipe with `a.b=c` settings replaced."""
    return parse(dump(recipe), where=recipe.name, overrides=items)


def as_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, all defaults written out."""
    values = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    return {
        key: {name: dataclasses.asdict(t) for name, t in value.items()}
        if key == "techniques"
        else ({k: dict(v) if isinstance(v, Mapping) else v for k, v in dataclasses.asdict(value).items()} if dataclasses.is_dataclass(value) and not isinstance(value, type) else value)
        for key, value in values.items()
    }


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; `parse` gives the same recipe back."""
    return yaml.dump(as_values(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors (`preheat recipes schema`)."""

    def flat(cls: type) -> dict[str, Any]:
        schema: dict[str, Any] = _adapter(cls).model_json_schema()
        hints = {f.name: cls.__dataclass_fields__[f.name] for f in dataclasses.fields(cls)}
        for name, text in field_docs(cls).items():
            if name in hints:
                schema["properties"][name]["description"] = text
        schema["description"] = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
        schema["additionalProperties"] = False
        return schema

    properties: dict[str, Any] = {
        "name": {"type": "string", "description": field_docs(Recipe)["name"]},
        "seed": {"type": "integer", "minimum": 0, "description": field_docs(Recipe)["seed"]},
    }
    for f in dataclasses.fields(Recipe):
        if f.name not in ("name", "seed", "techniques"):
            properties[f.name] = flat(f.default_factory)  # type: ignore[arg-type]
    properties["techniques"] = {
        "type": "object",
        "description": field_docs(Recipe)["techniques"],
        "additionalProperties": False,
        "properties": {name: {"anyOf": [flat(cls), {"type": "null"}]} for name, cls in registry().items()},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "preheat recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
