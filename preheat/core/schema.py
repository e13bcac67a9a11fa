"""The parts of a recipe: frozen dataclasses whose fields are the keys and the text under each field its help. No
torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from preheat.core.field_types import Bound, Count, Long, NonNegative, Positive, Share, Whole

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "tokenizer.tiktoken", "tiktoken.model"),
)
"""Files that transformers loads a tokenizer from."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: from a `path`, a `preset` to plan with, a `family` and sizes, or one dial (`size: 15M`)."""

    preset: str | None = None
    """A public model's published configuration by name (`preheat models` lists them), to plan without a download. To
    train, add `path` (checked to be that model) or `weights: random`."""
    path: str | None = None
    """A Hugging Face folder (or hub name) with config.json; its weights too, unless `weights` is random."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `path`: load the weights that stand there, or draw new ones for its configuration (or a preset's)."""
    family: Literal["llama", "qwen3", "gpt2", "qwen3_moe", "mixtral", "t5"] = "llama"
    """The architecture of a new model."""
    size: str | None = None
    """One dial for a new model, e.g. 15M or 1.1B: the parameters outside the embeddings and head; depth, width, heads
    and learning rate follow."""
    shape: Literal["balanced", "deep"] = "balanced"
    """With `size`: balanced (width 64 times the depth), or deep and thin (20 times), which suits models below a billion
    parameters."""
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
    """Special tokens that the tokenizer of `path` is given, e.g. those of a chat template; their rows begin as the mean
    of the others and are trained."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the transformers configuration, e.g. {rope_theta: 500000}."""
    trust_remote_code: bool = False
    """The model needs Python code that comes with `path`. A recipe only says so: who runs it must allow it by
    --trust-remote-code."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    source: str | tuple[str | Mapping[str, Any], ...] = "stdlib"
    """`stdlib` (Python's own library source), `docstrings` (docstring -> function pairs drawn from it), a file or
    folder (.txt, .py, .jsonl, .json, .parquet, .csv), or a `datasets` name. Several as a list of these or of {source,
    weight, layout, columns, text, prompt, completion, subset, split, limit, text_files}: a weight of 2 reads its
    documents twice an epoch, 0.5 reads half of them."""
    layout: Literal["auto", "text", "prompt", "alpaca", "sharegpt", "messages", "preference", "unpaired", "classes"] = (
        "auto"
    )
    """What a row is: text; prompt (and completion); alpaca (instruction, input, output); sharegpt (conversations of
    from and value); messages (role and content, tool calls); preference (chosen, rejected); unpaired (an answer and
    whether it was liked); classes (text and label). auto: recognised by the fields, and said."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """What the file calls the layout's fields, e.g. {messages: dialog} or {text: clause, label: kind}."""
    text: str = "text"
    """The field that holds the text of a row."""
    prompt: str | None = None
    """The field that holds a row's prompt, which is read but not trained on; needs `completion`."""
    completion: str | None = None
    """The field that holds what the model should answer; only its tokens are trained."""
    template: str | None = None
    """The chat template: alpaca, chatml, gemma, llama3, mistral, phi3, phi4, qwen, t5, or a .jinja file; the
    tokenizer's own when not stated. Stated, it is also put around prompt and completion."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which of a conversation is trained on: each turn of the assistant, the last of them, or all of the text."""
    classes: tuple[str, ...] = ()
    """Names of the classes in their order, for `layout: classes`; those that stand in the data, sorted, when not
    stated."""
    preflight: Mapping[str, Literal["block", "warn"]] = field(default_factory=dict)
    """Checks of the data by name: block (exit code 4) or warn; where a warned row cannot be trained on it is left out
    and counted. `preheat data` shows them all. Some begin at a share: 1 % of rows for broken encodings and special
    tokens in the text, 1 % of tokens that the tokenizer does not know, 5 % of validation rows that nearly stand in
    training, 10 % of examples cut within their answers; generation_prompt is told only; all others begin at the first
    row."""
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
    """`stream` cuts documents at row ends; `whole` never cuts an example and pads. auto: stream for plain text, else
    whole."""
    image_pixels: Annotated[int, Bound(1024, 2**28)] = 1 << 20
    """Of a model that reads images: at most so many pixels of each; larger images are shrunk, as its processor shrinks
    those beyond its own limit. Qwen3-VL makes a token of 32 x 32."""
    images: Annotated[float, Bound(0, 10_000)] = 1.0
    """Of a model that reads images: images of `image_pixels` in each row, as a plan counts them. A run counts those of
    the fullest row of its data."""
    text_files: Literal["cut", "whole"] = "cut"
    """A .txt file of more than 64 KB: cut at blank lines into documents of some 4 KB, which can be shuffled and split;
    or one whole document, as long contexts need."""
    longer: Literal["split", "refuse"] = "split"
    """What becomes of a document longer than a row. split: running text goes on in the next row, an example keeps its
    beginning (preflight: truncated); refuse: the run does not begin (exit code 4). Counted either way."""
    validation: str | float = 0.02
    """Share of documents held out (chosen by their content, so that equal documents fall on one side), or a file or
    folder to validate on."""
    limit: Long | None = None
    """Read at most so many documents."""
    workers: Annotated[int, Bound(0, 1024)] = 0
    """Loader processes. The order of the data is the same for any number."""
    prefetch: Annotated[int, Bound(1, 65_536)] = 2
    """Batches that each loader process prepares ahead."""

    def parts(self) -> list[tuple[Data, float]]:
        """Returns each source as its own settings, and its weight.

        Example:
            >>> data = Data(source=("a.txt", {"source": "b.json", "weight": 2.0}))
            >>> [(part.source, part.layout, weight) for part, weight in data.parts()]
            [('a.txt', 'auto', 1.0), ('b.json', 'auto', 2.0)]
        """
        if isinstance(self.source, str):
            return [(self, 1.0)]
        listed = [{"source": part} if isinstance(part, str) else dict(part) for part in self.source]
        weights = [float(part.pop("weight", 1)) for part in listed]
        return [(replace(self, **part), weight) for part, weight in zip(listed, weights, strict=True)]


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
    """Peak learning rate; auto: by the model's size (see models/size_dial.py)."""
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
    """Loss on the validation rows during the run; it is always taken at the end, and before the first step where the
    model is a pretrained one."""

    every: Whole = 0
    """Steps between evaluations; 0: only at the end."""
    rows: Count = 256
    """At most so many validation rows, and rows of `forgetting` and of each task."""
    micro: Count | None = None
    """At most so many rows at a time; as many as a micro-batch of training where not stated."""
    tasks: tuple[str, ...] = ()
    """Tasks to measure with each evaluation, the one before the first step included: names or files, as `preheat eval
    --tasks` takes them."""
    forgetting: str | None = None
    """A second text, such as what the model was trained on before: its loss before and after shows what is
    forgotten."""
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
    """Write while the next steps run, from a copy in host memory: of what each process saves (its weights and optimizer
    states), until it is written. On accelerators yes, on CPUs no when not stated: there the copy is of the memory that
    the run has."""


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
    """Of a GPU, how torch's allocator takes memory from the driver: fixed: many segments, torch's default; expandable:
    one that grows, of which less stays unused (`PYTORCH_ALLOC_CONF=expandable_segments:True`); auto: expandable where
    torch and the driver have it (NVIDIA's on Linux, but for WSL)."""
    deterministic: bool = False
    """On a GPU, choose kernels that give the same bits each time, some of them slower: then a run repeats and resumes
    bit for bit, as it always does on CPUs. Without it, up to rounding. An operator that has no such kernel ends the run
    in one line."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Over how many devices, and what runs them. How the work is shared out is said by techniques: data_parallel, fsdp,
    tensor_parallel and others."""

    devices: Annotated[int, Bound(1, 2**20)] | None = None
    """Processes, one a device; a run started with another number is refused, a plan takes it. As many as were started
    when not stated."""
    engine: Literal["native", "deepspeed"] = "native"
    """native: PyTorch's own, as techniques say; deepspeed: DeepSpeed's ZeRO in place of data_parallel, fsdp and zero1
    (needs `pip install preheat[deepspeed]`)."""
    zero: Literal[1, 2, 3] = 1
    """Of engine deepspeed: share out optimizer states (1), gradients too (2), weights too (3)."""
    timeout: Annotated[float, Bound(0, 10**7, open_low=True)] = 600.0
    """Seconds that one process waits for the others before it says where each stands and ends."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the model writes, for the report: at the end, and before the first step too where the model is a
    pretrained one."""

    prompts: tuple[str | tuple[Mapping[str, Any], ...], ...] = ()
    """Beginnings to continue, or chats (lists of messages) to answer; with neither these nor `rows`: no samples."""
    rows: Annotated[int, Bound(0, 256)] = 0
    """Also answer the questions of so many validation rows, of data that has answers (chats, prompts); each is shown
    beside the row's own answer."""
    tokens: Annotated[int, Bound(1, 2**24)] = 64
    """At most so many tokens for each."""
    temperature: NonNegative = 0.0
    """0: the likeliest token each time; 1: as the model believes; between, likelier tokens are preferred."""
    top_p: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Draw from the likeliest tokens that together have this share of the probability (Holtzman et al. 2020,
    arXiv:1904.09751); 1: all."""
    top_k: Whole = 0
    """Draw from so many of the likeliest tokens; 0: all."""
    min_p: Share = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024,
    arXiv:2407.01082); 0: all."""
    repetition_penalty: Positive = 1.0
    """Above 1: what stands in the text already becomes less likely (Keskar et al. 2019, arXiv:1909.05858)."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which stops before them. The model's own end tokens always do."""
    cache: Literal["auto", "dynamic", "static", "int8"] = "auto"
    """How keys and values are kept: dynamic grows with the text; static is taken whole at the beginning; int8 grows, in
    a quarter of fp32's memory; auto: static if the model is compiled, else dynamic."""
    window: Annotated[int, Bound(2)] | None = None
    """Each token sees at most so many tokens back, itself included, and the cache keeps no more: other text, once it is
    longer; null: the model's own."""
    draft: str | None = None
    """A smaller model with the same tokenizer (a run or a folder) that proposes tokens, which the model checks several
    at a time: the same greedy text."""
    draft_tokens: Annotated[int, Bound(1, 1024)] = 4
    """Tokens that the draft proposes at a time."""
    lookup: Annotated[int, Bound(1, 1024)] | None = None
    """Propose so many tokens at a time by looking up what followed the last ones where they stood before: the same
    greedy text, without a draft."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model for single tokens: takes seconds to minutes at the first one, and a static cache. auto: on a
    GPU, outside training, if some thousands of tokens are to be written one after the other (no draft, no lookup, no
    chat)."""

    @property
    def cache_kind(self) -> Literal["dynamic", "static", "int8"]:
        """The cache type, with `compile: auto` counted as false."""
        if self.cache != "auto":
            return self.cache
        return "static" if self.compile is True else "dynamic"

    @property
    def wanted(self) -> bool:
        """True if a run writes samples."""
        return bool(self.prompts or self.rows)

    @property
    def speculates(self) -> bool:
        """True if tokens are proposed by a draft and then checked."""
        return self.draft is not None or self.lookup is not None


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the text under each field of a dataclass: the source of help, schema and comments."""
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
