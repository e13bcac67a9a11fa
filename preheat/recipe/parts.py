"""The parts of a recipe: frozen dataclasses whose fields are the keys and the text under each field its help. No torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from preheat.errors import RecipeError
from preheat.technique import Technique

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
    shape: Literal["balanced", "deep"] = "balanced"
    """With `size`: balanced (width 64 times the depth), or deep and thin (20 times), which suits models below a billion parameters."""
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
    vocabulary: Annotated[int, Bound(258)] = 4096
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
    """Loss on the validation rows during the run; it is always taken at the end, and before the first step where the model is a pretrained one."""

    every: Whole = 0
    """Steps between evaluations; 0: only at the end."""
    rows: Count = 256
    """At most so many validation rows, and rows of `forgetting` and of each task."""
    tasks: tuple[str, ...] = ()
    """Tasks to measure with each evaluation, the one before the first step included: names or files, as `preheat eval --tasks` takes them."""
    forgetting: str | None = None
    """A second text, such as what the model was trained on before: its loss before and after shows what is forgotten."""
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
            found.append(("model.path", f"a model from a path brings its sizes; remove {(model.size and 'size') or given[0]}"))
        if model.shape != "balanced" and (model.size is None or given):
            found.append(
                (
                    "model.shape",
                    f"{model.shape} is for model.size alone; remove it, or state a size and no {given[0] if given else 'layers'}",
                )
            )
        if model.size is not None and not re.fullmatch(r"\d+(\.\d+)?[KMB]", model.size):
            found.append(("model.size", f"{model.size!r} is not a size; write it like 15M or 1.1B"))
        if model.heads and model.kv_heads and model.heads % model.kv_heads:
            found.append(("model.kv_heads", f"{model.kv_heads} does not divide heads {model.heads}"))
        if model.width and model.heads and model.width % model.heads:
            found.append(("model.width", f"{model.width} is not a multiple of heads {model.heads}"))
        if (data.prompt is None) != (data.completion is None):
            found.append(("data.prompt", "prompt and completion go together; state both or neither"))
        if isinstance(data.validation, float | int) and not 0 <= data.validation < 1:
            found.append(
                ("data.validation", f"{data.validation} is no share; use a number from 0 up to (not with) 1, or a path")
            )
        if not (self.stop.steps or self.stop.tokens or self.stop.epochs or self.stop.hours):
            found.append(("stop", "says no end; state steps, tokens, epochs or hours"))
        counted = self.stop.steps or self.stop.tokens or self.stop.epochs
        if self.stop.hours and not counted and self.schedule.kind != "constant":
            words = f"schedule {self.schedule.kind} needs a length in steps, tokens or epochs; add one (hours still ends the run early) or use schedule.kind: constant"
            found.append(("stop.hours", words))
        if not re.fullmatch(r"[\w.-]+", self.name):
            found.append(("name", f"{self.name!r} must be letters, digits, '.', '_' or '-'"))
        return found


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
