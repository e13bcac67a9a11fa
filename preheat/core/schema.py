"""Recipe sections: frozen dataclasses whose fields are the keys, with each field's help text below it. No torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from preheat.core.field_types import Bound, Count, Fraction, Long, NonNegative, NonNegativeInt, Positive

# The standard file first; the others are those of families whose tokenizer has no tokenizer.json.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "tokenizer.tiktoken", "tiktoken.model"),
)
"""Files that transformers loads a tokenizer from: the first, or one of the others if it is missing."""
SMALLEST_TOKENIZER = 258
"""Tokens of the smallest BPE: 256 bytes, the end-of-text token and the padding token."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: from a `path`, a `preset` for planning, a `family` and sizes, or a single size (`size: 15M`)."""

    preset: str | None = None
    """Name of a public model's published configuration (`preheat models` lists them), for planning without a download.
    To train, add `path` (checked to be that model) or `weights: random`."""
    path: str | None = None
    """A Hugging Face folder (or hub name) with config.json; also its weights, unless `weights` is random."""
    part: Literal["auto", "text", "whole"] = "auto"
    """Which part of a vision-language checkpoint to train. text: its text part, without the vision part, which
    `preheat export --to hf` copies from `path`. whole: the model with its vision part, for rows with images. auto: the
    whole model of families that are published for images (Qwen-VL, SmolVLM); of others the text part."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """With `path`: load its weights, or initialize new ones for its configuration (or a preset's)."""
    quantized_weights: Literal["auto", "packed", "dequantized"] = "auto"
    """Linear layers, and experts in MXFP4, of a folder that is stored quantized. packed: they stay in the folder's
    format in memory, frozen, under an adapter. dequantized: they are read in full precision, and can be trained. auto:
    packed for GPTQ, AWQ, bitsandbytes and compressed-tensors, dequantized for FP8 and MXFP4."""
    family: Literal["llama", "qwen3", "gpt2", "qwen3_moe", "mixtral", "t5"] = "llama"
    """The architecture of a new model."""
    size: str | None = None
    """Size of a new model, e.g. 15M or 1.1B: parameters without embeddings and head; it determines depth, width, heads
    and learning rate."""
    shape: Literal["balanced", "deep"] = "balanced"
    """With `size`: balanced (width 64 times the depth), or deep and thin (20 times), which suits models below a billion
    parameters."""
    num_layers: Annotated[int, Bound(1, 4096)] | None = None
    """Number of transformer layers of a new model."""
    hidden_size: Annotated[int, Bound(1, 2**20)] | None = None
    """Hidden size of a new model."""
    num_heads: Annotated[int, Bound(1, 2**14)] | None = None
    """Query heads of a new model."""
    num_kv_heads: Annotated[int, Bound(1, 2**14)] | None = None
    """Key-value heads of a new model (grouped queries); as many as `num_heads` by default."""
    intermediate_size: Annotated[int, Bound(1, 2**22)] | None = None
    """Inner width of the feed-forward block of a new model; with experts, of each expert."""
    num_experts: Annotated[int, Bound(1, 2**14)] | None = None
    """Experts per layer of a new qwen3_moe or mixtral; 8 by default."""
    num_experts_per_tok: Annotated[int, Bound(1, 2**14)] | None = None
    """Experts per token; 2 by default."""
    max_positions: Annotated[int, Bound(1, 2**27)] | None = None
    """Longest sequence of a new model; the batch's length by default."""
    vocab_size: Annotated[int, Bound(1, 2**24)] | None = None
    """Rows of the embedding of a new model; the tokenizer's size by default."""
    tie_embeddings: bool | None = None
    """Share one matrix between embedding and head; the family's convention by default."""
    add_tokens: tuple[str, ...] = ()
    """Special tokens to add to the tokenizer of `path`, e.g. those of a chat template; their embeddings start as the
    mean of the others and are trained."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the transformers configuration, e.g. {rope_theta: 500000}."""
    trust_remote_code: bool = False
    """The model needs Python code that comes with `path`. The recipe only declares it: the user must allow it with
    --trust-remote-code."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The settings of the recipe's `data` section: sources, row formats, tokenizer, packing and checks."""

    source: str | tuple[str | Mapping[str, Any], ...] = "stdlib"
    """`stdlib` (Python's own library source), `docstrings` (docstring -> function pairs from it), a file or folder
    (.txt, .py, .jsonl, .json, .parquet, .csv), or a `datasets` name. Several as a list of these or of {source, weight,
    layout, columns, text, prompt, completion, subset, split, limit, text_files}: a weight of 2 reads its documents
    twice per epoch, 0.5 reads half of them. With `streaming`, weights are shares of the sequences."""
    layout: Literal["auto", "text", "prompt", "alpaca", "sharegpt", "messages", "preference", "kto", "classes"] = "auto"
    """Format of a row: text; prompt (and completion); alpaca (instruction, input, output); sharegpt (conversations of
    from and value); messages (role and content, tool calls); preference (chosen, rejected); kto (an answer and
    whether it was liked); classes (text and label). auto: detected from the fields, and reported."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names in the file for the layout's fields, e.g. {messages: dialog} or {text: clause, label: kind}."""
    text: str = "text"
    """The field with the text of a row."""
    prompt: str | None = None
    """The field with a row's prompt, which is read but not trained on; needs `completion`."""
    completion: str | None = None
    """The field with the expected answer; only its tokens are trained."""
    template: str | None = None
    """The chat template: alpaca, chatml, gemma, llama3, mistral, phi3, phi4, qwen, t5, or a .jinja file; the
    tokenizer's own by default. If set, it is also applied to prompt and completion."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Trained part of a conversation: each assistant turn, the last one, or all text."""
    classes: tuple[str, ...] = ()
    """Ordered class names for `layout: classes`; by default those in the data, sorted."""
    preflight: Mapping[str, Literal["block", "warn"]] = field(default_factory=dict)
    """Data checks by name: block (exit code 4) or warn; a warned row that cannot be trained on is left out and counted.
    `preheat data` shows all checks. Some have a threshold: 1 % of rows for broken encodings and for special tokens in
    the text, 1 % of tokens unknown to the tokenizer, 5 % of validation rows that nearly occur in training, 10 % of
    examples cut within their answers; generation_prompt and earlier_turns only warn; all others fail at any
    occurrence."""
    clean: Mapping[str, Any] = field(default_factory=dict)
    """Rows that are left out before training, with counts, e.g. {duplicates: near, filters: [gopher], personal_data:
    mask, against: [humaneval.jsonl]}. Nothing by default."""
    subset: str | None = None
    """Configuration name of a `datasets` source."""
    split: str = "train"
    """Split of a `datasets` source."""
    streaming: bool = False
    """Read the source during training instead of tokenizing all of it first."""
    tokenizer: str | None = None
    """A tokenizer folder; the model's own by default; with neither, a BPE is trained on the data."""
    vocab_size: Annotated[int, Bound(SMALLEST_TOKENIZER, 2**22)] = 4096
    """Vocabulary size of the BPE that is trained if there is no tokenizer."""
    packing: Literal["auto", "stream", "whole"] = "auto"
    """`stream` splits documents at sequence ends; `whole` never splits an example and pads. auto: stream for plain
    text, otherwise whole."""
    image_pixels: Annotated[int, Bound(1024, 2**28)] = 1 << 20
    """For models that read images: maximum pixels per image; larger images are shrunk, like the processor shrinks those
    beyond its own limit. A token of Qwen3-VL covers 32 x 32 pixels."""
    images: Annotated[float, Bound(0, 10_000)] = 1.0
    """For models that read images: images of `image_pixels` per sequence that a plan assumes. A run uses the count of
    the sequence of its data with the most."""
    text_files: Literal["cut", "whole"] = "cut"
    """For .txt files of more than 64 KB: cut: split at blank lines into documents of about 4 KB, which can be shuffled
    and split; whole: one document, as long contexts need."""
    overlong: Literal["split", "refuse"] = "split"
    """Handling of documents longer than a sequence. split: plain text continues in the next sequence, an example is
    truncated (preflight: truncated); refuse: the run does not start (exit code 4). Counted either way."""
    validation: str | float = 0.02
    """Fraction of documents held out (chosen by content hash, so that equal documents fall on one side), or a file or
    folder to validate on."""
    limit: Long | None = None
    """Read at most this many documents."""
    workers: Annotated[int, Bound(0, 1024)] = 0
    """Loader processes. The order of the data does not depend on their number."""
    prefetch: Annotated[int, Bound(1, 65_536)] = 2
    """Batches that each loader process prefetches."""

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
        # `weight` is no field of `Data`; what remains overrides this section's fields for one source.
        weights = [float(part.pop("weight", 1)) for part in listed]
        return [(replace(self, **part), weight) for part, weight in zip(listed, weights, strict=True)]


OptionalFraction = Fraction | None


@dataclass(frozen=True, kw_only=True)
class Clean:
    """The keys of the recipe's `data.clean`: duplicates, quality filters, evaluation data and personal data.

    A threshold sets or overrides one of `filters`; 0 switches off a `min_...`, and 1 a `max_...` that is a fraction.
    """

    duplicates: Literal["keep", "exact", "near"] = "keep"
    """exact: rows that equal an earlier one, its label included, except for white space are left out; near: also rows
    that are similar to an earlier one (MinHash-LSH; needs `pip install 'preheat[clean]'`). Training rows that are
    duplicates of validation rows are left out of training."""
    similarity: Annotated[float, Bound(0.3, 1)] = 0.8
    """near: smallest Jaccard similarity of two rows' sets of 5-word sequences that makes them duplicates."""
    filters: tuple[Literal["gopher", "gopher_repetition", "c4"], ...] = ()
    """Published quality rules: gopher and gopher_repetition (Rae et al. 2021, arXiv:2112.11446, table A1), c4 (Raffel
    et al. 2020, arXiv:1910.10683). Those with stop words are for English."""
    min_words: NonNegativeInt | None = None
    """Smallest number of words (gopher: 50)."""
    max_words: Count | None = None
    """Largest number of words (gopher: 100,000)."""
    min_mean_word_length: NonNegative | None = None
    """Smallest mean number of characters of a word (gopher: 3)."""
    max_mean_word_length: NonNegative | None = None
    """Largest mean number of characters of a word (gopher: 10)."""
    max_symbols: OptionalFraction = None
    """Largest ratio of hash signs, and of ellipses, to words (gopher: 0.1)."""
    max_bullet_lines: OptionalFraction = None
    """Largest fraction of lines that begin with a bullet point (gopher: 0.9)."""
    max_ellipsis_lines: OptionalFraction = None
    """Largest fraction of lines that end with an ellipsis (gopher: 0.3)."""
    min_alphabetic_words: OptionalFraction = None
    """Smallest fraction of words with a letter (gopher: 0.8)."""
    min_stop_words: Annotated[int, Bound(0, 8)] | None = None
    """Smallest number of different words of: the, be, to, of, and, that, have, with (gopher: 2)."""
    max_repeated_lines: OptionalFraction = None
    """Largest fraction of lines that occurred before in the row (gopher_repetition: 0.3)."""
    max_repeated_line_chars: OptionalFraction = None
    """The same as a fraction of the characters (gopher_repetition: 0.2)."""
    max_repeated_paragraphs: OptionalFraction = None
    """Largest fraction of paragraphs that occurred before in the row (gopher_repetition: 0.3)."""
    max_repeated_paragraph_chars: OptionalFraction = None
    """The same as a fraction of the characters (gopher_repetition: 0.2)."""
    max_top_2gram: OptionalFraction = None
    """Largest fraction of the characters of words that are in the row's most frequent pair of words, if it repeats
    (gopher_repetition: 0.2)."""
    max_top_3gram: OptionalFraction = None
    """The same for three words (gopher_repetition: 0.18)."""
    max_top_4gram: OptionalFraction = None
    """The same for four words (gopher_repetition: 0.16)."""
    max_repeated_5gram: OptionalFraction = None
    """Largest fraction of the characters of words that are in five consecutive words that occurred before
    (gopher_repetition: 0.15)."""
    max_repeated_6gram: OptionalFraction = None
    """The same for six words (gopher_repetition: 0.14)."""
    max_repeated_7gram: OptionalFraction = None
    """The same for seven words (gopher_repetition: 0.13)."""
    max_repeated_8gram: OptionalFraction = None
    """The same for eight words (gopher_repetition: 0.12)."""
    max_repeated_9gram: OptionalFraction = None
    """The same for nine words (gopher_repetition: 0.11)."""
    max_repeated_10gram: OptionalFraction = None
    """The same for ten words (gopher_repetition: 0.1)."""
    min_sentences: NonNegativeInt | None = None
    """Smallest number of sentences (c4: 3)."""
    banned_texts: tuple[str, ...] | None = None
    """Rows with one of these texts, in upper or lower case, are left out (c4: lorem ipsum, and a curly bracket)."""
    against: tuple[str, ...] = ()
    """Evaluation data: rows that share `overlap_words` consecutive words with it are left out. Files of rows or text,
    or tasks as in `preheat eval --tasks`: NAME=FILE, FILE.yaml."""
    overlap_words: Annotated[int, Bound(8, 100)] = 13
    """Number of consecutive words that count as an overlap with `against` (13 in GPT-3: Brown et al. 2020,
    arXiv:2005.14165). A shorter evaluation text of 8 words or more counts if all of it occurs in a row."""
    personal_data: Literal["keep", "count", "drop", "mask"] = "keep"
    """E-mail addresses, telephone numbers, IP addresses, card numbers and IBANs: count them, leave such rows out, or
    replace each by its kind, such as <EMAIL>. keep: they are not searched for."""
    personal_kinds: tuple[Literal["email", "phone", "ip", "card", "iban"], ...] = (
        *("email", "phone", "ip", "card", "iban"),
    )
    """Kinds of personal data to search for."""

    @property
    def is_active(self) -> bool:
        """True if rows are read for cleaning."""
        return self != Clean()

    def problems(self) -> list[tuple[str, str]]:
        """Returns settings that contradict each other or change nothing, as (key, message)."""
        default, problems = Clean(), []
        if self.similarity != default.similarity and self.duplicates != "near":
            problems.append(("similarity", f"{self.similarity:g} is for duplicates: near; set it, or leave it out"))
        if self.overlap_words != default.overlap_words and not self.against:
            problems.append(("overlap_words", f"{self.overlap_words} needs against: [FILE]; add it, or leave it out"))
        if self.personal_kinds != default.personal_kinds and self.personal_data == "keep":
            problems.append(("personal_kinds", "needs personal_data: count, drop or mask; add it, or leave it out"))
        if not self.personal_kinds:
            problems.append(("personal_kinds", "names no kind; leave it out, or set personal_data: keep"))
        for less, more in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            low, high = getattr(self, less), getattr(self, more)
            if low is not None and high is not None and low > high:
                problems.append((less, f"{low:g} is above {more} {high:g}, so that no row is left; lower it"))
        if self.banned_texts is not None and not all(text.strip() for text in self.banned_texts):
            problems.append(("banned_texts", "has an empty text, which is in every row; remove it"))
        return problems


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of an optimizer step."""

    size: Annotated[int, Bound(1, 2**24)] = 32
    """Sequences per optimizer step, over all micro-batches and devices: the global batch."""
    seq_len: Annotated[int, Bound(2, 2**24)] = 256
    """Tokens per sequence."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), fused."""

    lr: Literal["auto"] | Positive = "auto"
    """Peak learning rate; auto: from the number of parameters between embedding and head."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the moving averages of the gradients and of their squares."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm; larger gradients are scaled down. 0: no clipping."""
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other settings for some weights: a kind (embeddings, head, norms, biases) or a regular expression for names of
    parameters -> lr_scale, a factor on `lr`, and weight_decay. {embeddings: {lr_scale: 0.1, weight_decay: 0}};
    {lora_B: {lr_scale: 16}} is LoRA+ (Hayou et al. 2024, arXiv:2402.12354)."""
    layer_decay: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Factor on `lr` from each layer to the one below it, and from the first to the embeddings (Clark et al. 2020,
    ELECTRA, arXiv:2003.10555: 0.8 to 0.9 for fine-tuning); 1: one rate for all layers."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate schedule, as fractions of the peak and of the run. Steps that fp16 skips do not advance it."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine; wsd: warmup, stable, linear decay; constant after warmup."""
    warmup_ratio: Fraction = 0.02
    """Fraction of the run in which the rate rises from 0."""
    decay_ratio: Fraction = 0.2
    """wsd only: fraction of the run at the end in which the rate falls."""
    min_lr_ratio: Fraction = 0.1
    """Final rate, as a fraction of the peak."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When to stop; the first limit reached counts. A run that stops early at an evaluation still needs a limit."""

    max_steps: Long | None = None
    """Optimizer steps."""
    tokens: Long | None = None
    """Tokens read."""
    epochs: Positive | None = None
    """Passes over the training data."""
    hours: Positive | None = None
    """Wall-clock hours."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a better score: that of `checkpoint.best`, or the validation
    loss."""
    min_delta: NonNegative = 0.0
    """A score is better if it exceeds the best one so far by more than this."""
    target_loss: Positive | None = None
    """Stop at the first evaluation whose validation loss is at most this; the run reports its time until then."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Validation during the run; the loss is always evaluated at the end, and at the start of a pretrained model."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end."""
    rows: Count = 256
    """Maximum number of sequences of the validation data and of `forgetting`, and of rows of each task."""
    micro_batch_size: Count | None = None
    """Maximum number of sequences at a time; by default a training micro-batch."""
    tasks: tuple[str, ...] = ()
    """Tasks to measure with each evaluation, including the one before the first step: names or files, as in `preheat
    eval --tasks`."""
    forgetting: str | None = None
    """A second text, e.g. from the model's previous training: its loss before and after shows forgetting."""
    baselines: bool = False
    """Also evaluate a unigram and a bigram model of the same split, for comparison."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How often to save checkpoints."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end (and on SIGTERM or Ctrl-C), and the best one."""
    keep: Count = 2
    """Number of most recent checkpoints to keep."""
    best: str | None = None
    """Also keep the checkpoint with the best score, e.g. validation_loss, validation_accuracy or TASK/METRIC of
    `evaluate.tasks`: each evaluation with a better score saves its step. `--checkpoint best` loads it."""
    rewinds: NonNegativeInt = 0
    """At a spike of the loss or of the gradient norm (or a loss that is not finite), go back to the last checkpoint and
    leave out the batches from there to the spike (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1), at most this
    many times in a run; afterwards, and with 0, a spike is only reported."""
    asynchronous: bool | None = None
    """Write during the next steps, from a copy in host memory: of what each process saves (its weights and optimizer
    states), until it is written. By default yes on accelerators, no on CPUs, where the copy uses the run's own
    memory."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Experiment trackers that a run is sent to while it trains; `preheat track` sends a run later. A tracker that
    fails or hangs neither stops nor slows the run, whose folder has everything."""

    to: tuple[str, ...] = ()
    """trackio, wandb, mlflow, tensorboard, swanlab (each is an extra: `pip install 'preheat[wandb]'`), webhook (a
    message to the URL in PREHEAT_WEBHOOK when the run ends or fails, and at alarms such as out of memory), or a tracker
    of another package (entry points `preheat.trackers`) or of a `--plugin`."""
    project: str = "preheat"
    """The project there (in MLflow, the experiment)."""
    name: str | None = None
    """The run's name there; by default that of its folder."""
    tags: tuple[str, ...] = ()
    """Labels of the run there."""
    folder: str | None = None
    """Where trackers keep files on this machine; by default where each keeps them: wandb/, swanlog/ and mlflow.db in
    the current folder, Trackio's cache, and tracking/tensorboard in the run's folder."""
    wait: NonNegative = 30.0
    """Seconds that the end of a run waits for its trackers; they go on sending after it."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device of the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available."""
    threads: Annotated[int, Bound(1, 4096)] | None = None
    """CPU threads; all cores by default."""
    memory: str | None = None
    """Memory that the run may use, e.g. 12GiB; the device's memory by default."""
    segments: Literal["auto", "fixed", "expandable"] = "auto"
    """How torch's allocator requests GPU memory from the driver: fixed: many segments, torch's default; expandable: one
    growing segment, which leaves less memory unused (`PYTORCH_ALLOC_CONF=expandable_segments:True`); auto: expandable
    if torch and the driver support it (NVIDIA on Linux, except WSL)."""
    deterministic: bool = False
    """On a GPU, use deterministic kernels, some of them slower: then a run repeats and resumes bit for bit, as it
    always does on CPUs. Otherwise, up to rounding. An operator without a deterministic kernel ends the run with a
    one-line message."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The number of devices and the engine. Techniques (data_parallel, fsdp, tensor_parallel, ...) split the work."""

    devices: Annotated[int, Bound(1, 2**20)] | None = None
    """Processes, one per device; a run started with another number is rejected, a plan assumes it. By default as many
    as were started."""
    engine: Literal["native", "deepspeed"] = "native"
    """native: PyTorch's own, as defined by techniques; deepspeed: DeepSpeed's ZeRO instead of data_parallel, fsdp and
    zero1 (needs `pip install preheat[deepspeed]`)."""
    zero_stage: Literal[1, 2, 3] = 1
    """With engine deepspeed: shard optimizer states (1), gradients too (2), weights too (3)."""
    timeout: Annotated[float, Bound(0, 10**7, open_low=True)] = 600.0
    """Seconds that a process waits for the others before it reports where each of them is and exits."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text generated for the report: at the end, and before the first step too if the model is pretrained."""

    prompts: tuple[str | tuple[Mapping[str, Any], ...], ...] = ()
    """Texts to continue, or chats (lists of messages) to answer; with neither these nor `rows`: no samples."""
    rows: Annotated[int, Bound(0, 256)] = 0
    """Also answer the questions of this many validation rows, for data that has answers (chats, prompts); each is shown
    next to the row's own answer."""
    max_new_tokens: Annotated[int, Bound(1, 2**24)] = 64
    """Maximum number of tokens for each."""
    temperature: NonNegative = 0.0
    """0: the likeliest token each time; 1: the model's distribution; in between, likelier tokens are preferred."""
    top_p: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Sample from the likeliest tokens that together have this probability (Holtzman et al. 2020, arXiv:1904.09751); 1:
    all."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens; 0: all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the likeliest one's probability (Nguyen et al. 2024,
    arXiv:2407.01082); 0: all."""
    repetition_penalty: Positive = 1.0
    """Above 1: tokens that are in the text already become less likely (Keskar et al. 2019, arXiv:1909.05858)."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which stops before them. The model's own end tokens always do."""
    cache: Literal["auto", "dynamic", "static", "int8"] = "auto"
    """The KV cache: dynamic grows with the text; static is allocated in full at the beginning; int8 grows, in a quarter
    of fp32's memory; auto: static if the model is compiled, otherwise dynamic."""
    window: Annotated[int, Bound(2)] | None = None
    """Each token sees at most this many last tokens, itself included, and the cache keeps no more: changes the text
    once it is longer; null: the model's own."""
    draft_model: str | None = None
    """A smaller model with the same tokenizer (a run or a folder) that proposes tokens, which the model verifies
    several at a time: the same greedy text."""
    draft_tokens: Annotated[int, Bound(1, 1024)] = 4
    """Tokens that the draft proposes at a time."""
    prompt_lookup_tokens: Annotated[int, Bound(1, 1024)] | None = None
    """Propose this many tokens at a time by looking up what followed the previous occurrence of the last tokens: the
    same greedy text, without a draft."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model for single tokens: takes seconds to minutes at the first one, and a static cache. auto: on a
    GPU, outside training, if some thousands of tokens are to be generated one after the other (no draft, no lookup, no
    chat)."""

    @property
    def cache_kind(self) -> Literal["dynamic", "static", "int8"]:
        """The cache type, with `compile: auto` counted as false."""
        if self.cache != "auto":
            return self.cache
        # `auto` compiles only if it pays, which the generation decides later; a static cache serves compiled models.
        return "static" if self.compile is True else "dynamic"

    @property
    def is_active(self) -> bool:
        """Returns True if a run generates samples."""
        return bool(self.prompts or self.rows)

    @property
    def speculates(self) -> bool:
        """Returns True if tokens are proposed and then verified."""
        return self.draft_model is not None or self.prompt_lookup_tokens is not None


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the text under each field of a dataclass: the source of help, schema and comments."""
    docs: dict[str, str] = {}
    # Base classes first, so that a subclass's text replaces theirs.
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        # Python discards these strings when it runs a class, so they are read from its source.
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        # A field's text is the string right behind it.
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
