"""The parts of a recipe: frozen dataclasses whose fields are the keys and the text under each field its help. No torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from preheat.errors import RecipeError, nearest
from preheat.recipe.bounds import Bound, Count, Long, NonNegative, Positive, Seed, Share, Whole
from preheat.recipe.sample import Sample
from preheat.recipe.unread import refused
from preheat.technique import Technique
from preheat.text import quoted

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "tokenizer.tiktoken", "tiktoken.model"),
)
"""What transformers makes a tokenizer from: the first, or where there is none one of the others."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: from a `path`, a `preset` to plan with, a `family` and sizes, or one dial (`size: 15M`)."""

    preset: str | None = None
    """A public model's published configuration by name (`preheat models` lists them), to plan without a download. To train, add `path`
    (checked to be that model) or `weights: random`."""
    path: str | None = None
    """A Hugging Face folder (or hub name) with config.json; its weights too, unless `weights` is random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `path`: load the weights that stand there, or draw new ones for its configuration (or a preset's)."""
    family: Literal["llama", "qwen3", "gpt2", "qwen3_moe", "mixtral", "t5"] = "llama"
    """The architecture of a new model."""
    size: str | None = None
    """One dial for a new model, e.g. 15M or 1.1B: the parameters outside the embeddings and head; depth, width, heads and learning rate follow."""
    shape: Literal["balanced", "deep"] = "balanced"
    """With `size`: balanced (width 64 times the depth), or deep and thin (20 times), which suits models below a billion parameters."""
    layers: Annotated[int, Bound(1, 4096)] | None = None
    """Number of transformer layers of a new model."""
    width: Annotated[int, Bound(1, 2**20)] | None = None
    """Hidden size of a new model."""
    heads: Annotated[int, Bound(1, 2**14)] | None = None
    """Query heads of a new model."""
    kv_heads: Annotated[int, Bound(1, 2**14)] | None = None
    """Key-value heads of a new model (grouped queries); as many as `heads` when not stated."""
    feed_forward: Annotated[int, Bound(1, 2**22)] | None = None
    """Inner width of the feed-forward block of a new model; of each expert where it has experts."""
    experts: Annotated[int, Bound(1, 2**14)] | None = None
    """Experts of each layer of a new qwen3_moe or mixtral; 8 when not stated."""
    experts_per_token: Annotated[int, Bound(1, 2**14)] | None = None
    """Experts that a token goes to; 2 when not stated."""
    positions: Annotated[int, Bound(1, 2**27)] | None = None
    """Longest sequence of a new model; the batch's length when not stated."""
    vocabulary: Annotated[int, Bound(1, 2**24)] | None = None
    """Rows of the embedding of a new model; the tokenizer's size when not stated."""
    tie_embeddings: bool | None = None
    """Let embedding and head share one matrix; the family's habit when not stated."""
    add_tokens: tuple[str, ...] = ()
    """Special tokens that the tokenizer of `path` is given, e.g. those of a chat template; their rows begin as the mean of the others and are trained."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the transformers configuration, e.g. {rope_theta: 500000}."""
    trust_remote_code: bool = False
    """The model needs Python code that comes with `path`. A recipe only says so: who runs it must allow it by --trust-remote-code."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    source: str | tuple[str | Mapping[str, Any], ...] = "stdlib"
    """`stdlib` (Python's own library source), `docstrings` (docstring -> function pairs drawn from it), a file or folder (.txt, .py, .jsonl, .json, .parquet, .csv), or a `datasets` name. Several as a list of these or of {source, weight, layout, columns, text, prompt, completion, subset, split, limit, text_files}: a weight of 2 reads its documents twice an epoch, 0.5 reads half of them."""
    layout: Literal["auto", "text", "prompt", "alpaca", "sharegpt", "messages", "preference", "unpaired", "classes"] = "auto"
    """What a row is: text; prompt (and completion); alpaca (instruction, input, output); sharegpt (conversations of from and value); messages (role and content, tool calls); preference (chosen, rejected); unpaired (an answer and whether it was liked); classes (text and label). auto: recognised by the fields, and said."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """What the file calls the layout's fields, e.g. {messages: dialog} or {text: clause, label: kind}."""
    text: str = "text"
    """The field that holds the text of a row."""
    prompt: str | None = None
    """The field that holds a row's prompt, which is read but not trained on; needs `completion`."""
    completion: str | None = None
    """The field that holds what the model should answer; only its tokens are trained."""
    template: str | None = None
    """The chat template: alpaca, chatml, gemma, llama3, mistral, phi3, phi4, qwen, t5, or a .jinja file; the tokenizer's own when not stated. Stated, it is also put around prompt and completion."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which of a conversation is trained on: each turn of the assistant, the last of them, or all of the text."""
    classes: tuple[str, ...] = ()
    """Names of the classes in their order, for `layout: classes`; those that stand in the data, sorted, when not stated."""
    preflight: Mapping[str, Literal["block", "warn"]] = field(default_factory=dict)
    """Checks of the data by name: block (exit code 4) or warn; where a warned row cannot be trained on it is left out and counted. `preheat data` shows them all. Some begin at a share: 1 % of rows for broken encodings and special tokens in the text, 1 % of tokens that the tokenizer does not know, 5 % of validation rows that nearly stand in training, 10 % of examples cut within their answers; generation_prompt is told only; all others begin at the first row."""
    subset: str | None = None
    """Configuration name of a `datasets` source."""
    split: str = "train"
    """Split of a `datasets` source."""
    streaming: bool = False
    """Read the source while training instead of tokenizing all of it first."""
    tokenizer: str | None = None
    """A tokenizer folder; the model's own when not stated; with neither, a BPE is trained on the data."""
    vocabulary: Annotated[int, Bound(258, 2**22)] = 4096
    """Pieces of the BPE that is trained when there is no tokenizer."""
    packing: Literal["auto", "stream", "whole"] = "auto"
    """`stream` cuts documents at row ends; `whole` never cuts an example and pads. auto: stream for plain text, else whole."""
    image_pixels: Annotated[int, Bound(1024, 2**28)] = 1 << 20
    """Of a model that reads images: at most so many pixels of each; larger images are shrunk, as its processor shrinks those beyond its own limit. Qwen3-VL makes a token of 32 x 32."""
    images: Annotated[float, Bound(0, 10_000)] = 1.0
    """Of a model that reads images: images of `image_pixels` in each row, as a plan counts them. A run counts those of the fullest row of its data."""
    text_files: Literal["cut", "whole"] = "cut"
    """A .txt file of more than 64 KB: cut at blank lines into documents of some 4 KB, which can be shuffled and split; or one whole document, as long contexts need."""
    longer: Literal["split", "refuse"] = "split"
    """What becomes of a document longer than a row. split: running text goes on in the next row, an example keeps its beginning (preflight: truncated); refuse: the run does not begin (exit code 4). Counted either way."""
    validation: str | float = 0.02
    """Share of documents held out (chosen by their content, so that equal documents fall on one side), or a file or folder to validate on."""
    limit: Long | None = None
    """Read at most so many documents."""
    workers: Annotated[int, Bound(0, 1024)] = 0
    """Loader processes. The order of the data is the same for any number."""
    prefetch: Annotated[int, Bound(1, 65_536)] = 2
    """Batches that each loader process prepares ahead."""

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the list of sources, as (key, words)."""
        known = ("source", "weight", *_OF_A_SOURCE)
        found = []
        for n, part in enumerate(self.source if not isinstance(self.source, str) else ()):
            if isinstance(part, str):
                continue
            at, weight = f"data.source.{n}", part.get("weight", 1)
            found += [(f"{at}.{key}", f"unknown key; {nearest(str(key), list(known))}") for key in part if key not in known]
            if not isinstance(part.get("source"), str):
                found.append((f"{at}.source", f"names a file, a folder or a dataset, got {quoted(part.get('source'))}"))
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 100:
                found.append((f"{at}.weight", f"must be a number above 0 and at most 100, got {quoted(weight)}"))
        if not self.source:
            found.append(("data.source", "is empty; name a file, a folder or a dataset"))
        if self.longer == "refuse" and self.streaming:
            found.append(("data.longer", "refuse needs all documents read beforehand; set data.streaming: false"))
        if not isinstance(self.source, str) and self.streaming:
            found.append(("data.streaming", "reads one source; name one, or set data.streaming: false"))
        return found

    def parts(self) -> list[tuple[Data, float]]:
        """Each source by itself, as settings, and its weight.

        Example:
            >>> [(d.source, d.layout, w) for d, w in Data(source=("a.txt", {"source": "b.json", "weight": 2.0})).parts()]
            [('a.txt', 'auto', 1.0), ('b.json', 'auto', 2.0)]
        """
        if isinstance(self.source, str):
            return [(self, 1.0)]
        listed = [{"source": part} if isinstance(part, str) else dict(part) for part in self.source]
        weights = [float(part.pop("weight", 1)) for part in listed]
        return [(replace(self, **part), weight) for part, weight in zip(listed, weights, strict=True)]


_OF_A_SOURCE = ("layout", "columns", "text", "prompt", "completion", "subset", "split", "limit", "text_files")
"""Settings that a source of a list may have for itself."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the optimizer sees in one step."""

    size: Annotated[int, Bound(1, 2**24)] = 32
    """Rows (packed sequences) per optimizer step, over all micro-batches and devices: the global batch."""
    length: Annotated[int, Bound(2, 2**24)] = 256
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

    steps: Long | None = None
    """Optimizer steps."""
    tokens: Long | None = None
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
    micro: Count | None = None
    """At most so many rows at a time; as many as a micro-batch of training where not stated."""
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
    asynchronous: bool | None = None
    """Write while the next steps run, from a copy in host memory: of what each process saves (its weights and optimizer states), until it is
    written. On accelerators yes, on CPUs no when not stated: there the copy is of the memory that the run has."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    threads: Annotated[int, Bound(1, 4096)] | None = None
    """CPU threads; all cores when not stated."""
    memory: str | None = None
    """Memory that the run may use, e.g. 12GiB; what the device has when not stated."""
    segments: Literal["auto", "fixed", "expandable"] = "auto"
    """Of a GPU, how torch's allocator takes memory from the driver: fixed: many segments, torch's default; expandable: one that grows, of which less stays
    unused (`PYTORCH_ALLOC_CONF=expandable_segments:True`); auto: expandable where torch and the driver have it (NVIDIA's on Linux, but for WSL)."""
    deterministic: bool = False
    """On a GPU, choose kernels that give the same bits each time, some of them slower: then a run repeats and resumes bit for bit, as it always
    does on CPUs. Without it, up to rounding. An operator that has no such kernel ends the run in one line."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Over how many devices, and what runs them. How the work is shared out is said by techniques: data_parallel, fsdp, tensor_parallel and others."""

    devices: Annotated[int, Bound(1, 2**20)] | None = None
    """Processes, one a device; a run started with another number is refused, a plan takes it. As many as were started when not stated."""
    engine: Literal["native", "deepspeed"] = "native"
    """native: PyTorch's own, as techniques say; deepspeed: DeepSpeed's ZeRO in place of data_parallel, fsdp and zero1 (needs `pip install preheat[deepspeed]`)."""
    zero: Literal[1, 2, 3] = 1
    """Of engine deepspeed: share out optimizer states (1), gradients too (2), weights too (3)."""
    timeout: Annotated[float, Bound(0, 10**7, open_low=True)] = 600.0
    """Seconds that one process waits for the others before it says where each stands and ends."""


MOST_PARAMETERS = 10**15
_MOST_TOKENS = 10**10
"""Of a step: beyond them torch's sizes overflow, and no machine there is could hold either."""
_MOST_SCORES = 2**60
"""Of attention in one layer, for the rows of a step: their bytes still fit 64 bits."""


def size_problem(size: str) -> str | None:
    """What is wrong with a text that should be a number of parameters, as 15M is; None: nothing."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMB])", size)
    if not found:
        return f"{quoted(size)} is not a size; write it like 15M or 1.1B"
    if not 1 <= float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[found[2]] <= MOST_PARAMETERS:
        return f"{quoted(size)} must be from 1 to {MOST_PARAMETERS:.0e} parameters"
    return None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Frozen: `dataclasses.replace` or `override` make another."""

    name: str = "run"
    """A short name, used for the run's folder."""
    seed: Seed = 0
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
    parallel: Parallel = field(default_factory=Parallel)
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
        given = [
            k for k in ("layers", "width", "heads", "kv_heads", "feed_forward", "experts") if getattr(model, k) is not None
        ]
        if (where := "path" if model.path else "preset" if model.preset else None) and (model.size or given):
            named = (model.size and "size") or given[0]
            found.append(
                (
                    f"model.{where}",
                    f"a model from a {where} brings its sizes; remove {named} (--set 'model={{{where}: ...}}' does)",
                )
            )
        if model.shape != "balanced" and (model.size is None or given):
            found.append(
                (
                    "model.shape",
                    f"{model.shape} is for model.size alone; remove it, or state a size and no {given[0] if given else 'layers'}",
                )
            )
        if model.size is not None and (words := size_problem(model.size)):
            found.append(("model.size", words))
        if model.family not in ("qwen3_moe", "mixtral") and (given_experts := model.experts or model.experts_per_token):
            found.append(("model.experts", f"{given_experts}: {model.family} has no experts; use family: qwen3_moe or mixtral"))
        elif (model.experts_per_token or 2) > (model.experts or 8):
            found.append(
                (
                    "model.experts_per_token",
                    f"{model.experts_per_token or 2} is more than the {model.experts or 8} experts; lower it",
                )
            )
        if model.heads and model.kv_heads and model.heads % model.kv_heads:
            found.append(("model.kv_heads", f"{model.kv_heads} does not divide heads {model.heads}"))
        if model.width and model.heads and model.width % model.heads:
            found.append(("model.width", f"{model.width} is not a multiple of heads {model.heads}"))
        parameters = (model.layers or 1) * (model.width or 1) * (
            4 * (model.width or 1) + 3 * (model.feed_forward or 1) * (model.experts or 1)
        ) + (model.vocabulary or 1) * (model.width or 1)
        if parameters > MOST_PARAMETERS:
            words = f"these sizes make a model of {parameters:.1e} parameters, more than {MOST_PARAMETERS:.0e}; lower them"
            found.append(("model", words))
        if (tokens := self.batch.size * self.batch.length) > _MOST_TOKENS:
            words = f"size times length is {tokens:.1e} tokens a step, more than {_MOST_TOKENS:.0e}; lower one of them"
            found.append(("batch", words))
        elif (scores := self.batch.size * (model.heads or 256) * self.batch.length**2) > _MOST_SCORES:
            words = f"attention among rows of {self.batch.length:,} tokens has {scores:.1e} scores a layer, more than can be counted; lower it"
            found.append(("batch.length", words))
        if model.add_tokens and not model.path:
            found.append(
                (
                    "model.add_tokens",
                    "is for a model from a path; a new model's tokenizer is trained or named by data.tokenizer",
                )
            )
        if len(set(model.add_tokens)) < len(model.add_tokens) or not all(token.strip() for token in model.add_tokens):
            found.append(
                ("model.add_tokens", f"{quoted(list(model.add_tokens))} has one that is empty or stands twice; write each once")
            )
        if (data.prompt is None) != (data.completion is None):
            found.append(("data.prompt", "prompt and completion go together; state both or neither"))
        found += data.problems()
        if data.streaming and self.stop.epochs:
            found.append(
                (
                    "stop.epochs",
                    "a streamed source has no known length; use stop.steps or stop.tokens, or data.streaming: false",
                )
            )
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
        if self.evaluate.baselines and data.streaming:
            words = "counts the training rows, and those of a stream are not known before; set it to false, or data.streaming: false"
            found.append(("evaluate.baselines", words))
        found += [(f"sample.{key}", words) for key, words in self.sample.problems()]
        found += refused(self)
        if problem := folder_name_problem(self.name):
            found.append(("name", problem))
        return found


def folder_name_problem(name: str) -> str | None:
    """What keeps a name from naming a folder beside others: it must neither be hidden, nor lead elsewhere, nor be too long for a file system.

    Example:
        >>> folder_name_problem("demo"), folder_name_problem("..")
        (None, "'..' must be letters, digits, '.', '_' or '-', not begin with '.', and be at most 100 bytes long")
    """
    if re.fullmatch(r"[\w-][\w.-]*", name) and len(name.encode()) <= 100:
        return None
    return f"{quoted(name)} must be letters, digits, '.', '_' or '-', not begin with '.', and be at most 100 bytes long"


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
