"""Text generation with transformers' `generate` and our KV caches, for any model that preheat builds; streams text."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError, RunError
from preheat.models.encoder_decoder import start_token
from preheat.models.generation.config import ends_of, read_generation
from preheat.models.generation.detokenizer import Ended, IncrementalDetokenizer, Written, common_prefix_length
from preheat.models.hf import PATTERN, STANDALONE, head
from preheat.models.token_mixers import pass_cache
from preheat.models.vision import set_attention
from preheat.recipe import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "KERNELS",
    "PrefixCache",
    "Timed",
    "Written",
    "evaluate_cached_loss",
    "generate",
    "has_attention_pattern",
    "resolve_auto",
    "stop_tokens",
]

KERNELS = {"cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION", "math": "MATH"}
"""Kernels of torch's attention that generation can be limited to -> torch's name."""

_PASSES = 2000
"""Single-token passes from which compiling a model on a GPU pays off: compiling takes about one second per layer, and
without it a layer costs about 0.5 ms per pass in Python and launches (some 25 of 10 to 20 microseconds), which a CUDA
graph removes almost entirely. Both grow with the number of layers."""

_GRAPHS = 64
"""Graphs per process; torch's default of 8 is too low for one sliding-window model at three batch sizes."""


@dataclass
class PrefixCache:
    """A KV cache and its tokens: a prompt that begins with these tokens is only read from there on.

    Attributes:
        reused: tokens of the last prompt that were in the cache already.
        kind: the kind of cache, and its window.
    """

    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    reused: int = 0
    kind: tuple[str, int | None] = ("dynamic", None)

    def begin(self, prompt: Sequence[int], settings: Sample, empty: Callable[[], Cache]) -> Cache:
        """Returns the cache with a prefix of `prompt`, at least one token short; else an `empty` one."""
        # The last token of the prompt is always read: a pass needs an input to predict the next token from.
        same = common_prefix_length(self.tokens, prompt[:-1])
        if self.kind != (settings.cache_kind, settings.window):
            same, self.kind = 0, (settings.cache_kind, settings.window)
        # A new cache if it has another kind, shares no token with the prompt, or cannot be cropped to what they share.
        if not same or not self._forget(len(self.tokens) - same):
            self.cache, self.tokens = empty(), []
        self.reused = len(self.tokens)
        return self.cache

    def end(self, tokens: Sequence[int]) -> None:
        """Records the cache's content after generating `tokens`; crops rejected proposals behind their end."""
        # The two lengths differ by one or more tokens: the last sampled token was never read, and speculation may leave
        # rejected proposals in the cache.
        self.tokens = list(tokens[: self.cache.get_seq_length()])
        extra = self.cache.get_seq_length() - len(self.tokens)
        self.tokens += [-1] * extra  # placeholders that match no token
        if not self._forget(extra):
            self.clear()

    def _forget(self, extra: int) -> bool:
        """Crops the last tokens. False if a sliding-window layer has dropped the ones that would have to return."""
        from transformers.cache_utils import DynamicLayer

        from preheat.models.generation.kv_cache import Int8Layer

        if not extra:
            return True
        # Exact classes: transformers' sliding-window layer is a subclass of DynamicLayer.
        if not all(type(layer) in (DynamicLayer, Int8Layer) and not layer.is_sliding for layer in self.cache.layers):
            return False
        self.cache.crop(-extra)
        del self.tokens[-extra:]
        return True

    def clear(self) -> None:
        """Empties the cache: after an aborted generation, layers may hold different numbers of tokens."""
        self.cache, self.tokens, self.reused = None, [], 0


@dataclass
class Timed:
    """Token timings of one batch and the memory of its cache.

    Attributes:
        begun: start of the first pass, in seconds of `time.perf_counter`.
        at: time at which each pass had its tokens.
        tokens: number of tokens of each pass, over all rows.
        cache_bytes: size of keys and values after the last pass.
    """

    begun: float = 0.0
    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cache_bytes: int = 0


def has_attention_pattern(model: PreTrainedModel) -> bool:
    """True if layers have one of preheat's attention patterns, which need whole sequences: no cache, no padding."""
    return any(hasattr(m, PATTERN) for m in model.modules())


def stop_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path | None) -> frozenset[int]:
    """All end-of-text tokens: the tokenizer's, and those of the folder's generation_config.json."""
    tokens = {tokenizer.eos_token_id, *ends_of(read_generation(folder)[0])}
    return frozenset(token for token in tokens if token is not None)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    settings: Sample,
    *,
    stop: frozenset[int] = frozenset(),
    positions: int = 0,
    batch: int = 8,
    seed: int = 0,
    cached: bool = True,
    on_text: Callable[[int, str | None], None] | None = None,
    kept: PrefixCache | None = None,
    draft: PreTrainedModel | None = None,
    timed: Timed | None = None,
    kernel: str | None = None,
) -> list[Written]:
    """Continues each prompt.

    Prompts are processed `batch` at a time with left padding; one at a time with speculative decoding, and with
    attention patterns, which count tokens from the start of the row and recompute the sequence for each token. Random
    generators are restored afterwards.

    Args:
        prompts: tokens, at least one each, and fewer than `positions`.
        settings: number of tokens, sampling, cache and stop strings.
        stop: end-of-text tokens.
        positions: the model's context length; 0: unknown.
        batch: prompts at a time.
        seed: seeds the sampling of every batch.
        cached: use a KV cache; otherwise the sequence is recomputed for each token.
        on_text: called with (index of the prompt, text) as text becomes final: complete characters that cannot begin a
            stop string; None at its end.
        kept: a cache to continue from and to leave for the next call; for a single prompt.
        draft: the model that `settings.draft_model` names.
        timed: receives token timings; for a single batch.
        kernel: of torch's attention, a key of `KERNELS`; None: the fastest, on CPUs also preheat's.

    Returns:
        One `Written` per prompt.

    Raises:
        RunError: the model has a classification head.
        RecipeError: this model does not support the settings.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer                             # doctest: +SKIP
        >>> generate(model, tokenizer, [tokenizer.encode("Once")], Sample(max_new_tokens=8))[0].text  # doctest: +SKIP
        ' upon a time, there was a'
    """
    import torch

    # A classification head in place of the model's own would turn class scores into tokens.
    pieces: int = head(model).weight.shape[0]  # type: ignore[index,assignment]
    if pieces != model.config.get_text_config().vocab_size:
        raise RunError(
            f"this model's head is over {pieces} classes: it generates no text; measure it with `preheat eval`"
        )
    assert all(prompts), "a prompt without a token"
    assert kept is None or (cached and len(prompts) == 1)
    assert (draft is None) == (settings.draft_model is None), (
        "the model that settings.draft_model names is opened by the caller"
    )
    alone = has_attention_pattern(model)
    if _has_own_cache(model):
        kept = None  # such a cache cannot be cropped to a prefix
    _require(model, settings, alone, cached, kept)
    # Tokens that each prompt may get: as many as wanted, or up to the end of the model's context.
    rooms = [
        min(settings.max_new_tokens, positions - len(p)) if positions else settings.max_new_tokens for p in prompts
    ]
    assert min(rooms, default=1) > 0, "a prompt that fills the model's positions"
    batches = list(_group_batches(rooms, settings.max_new_tokens, 1 if alone or settings.speculates else batch))
    # Compiling needs passes over single tokens and a cache of a fixed size, which patterns and chats do not have.
    ordinary = cached and not alone and kept is None
    settings = resolve_auto(settings, model, sum(rooms[rows[0]] for rows in batches) if ordinary else 0)
    # One length for all batches: a compiled model recompiles, or records another graph, for each length.
    longest = max((max(len(prompts[row]) for row in rows) + rooms[rows[0]] - 1 for rows in batches), default=0)
    caches: dict[int, Cache] = {}  # of a compiled model, by number of rows
    device = next(model.parameters()).device
    texts: list[Written] = []
    # The generator of the CPU is always forked; a GPU's only if the model is there.
    devices = [device] if device.type == "cuda" else []
    attention = _choose_attention(model, settings, alone, kernel)
    with (
        torch.random.fork_rng(devices=devices),
        _prepare_generation(model, attention, alone, kernel),
        nullcontext()
        if draft is None
        else _prepare_generation(draft, _choose_attention(draft, Sample(), False), False),
        _allow_recompiles() if settings.compile is True else nullcontext(),
    ):
        for rows in batches:
            torch.manual_seed(seed)
            # An encoder-decoder's answer is a text of its own; any other continues its prompt.
            before = {row: () if model.config.is_encoder_decoder else prompts[row] for row in rows}
            listeners = [
                IncrementalDetokenizer(tokenizer, before[row], settings.stop, _build_listener(on_text, row))
                for row in rows
            ]
            _write(
                model,
                [prompts[row] for row in rows],
                rooms[rows[0]],
                settings,
                stop,
                listeners,
                cached=cached and not alone,
                kept=kept,
                draft=draft,
                timed=timed,
                longest=longest,
                caches=caches if settings.compile is True else None,
            )
            for row, text in zip(rows, listeners, strict=True):
                cut: Ended = "length" if rooms[row] == settings.max_new_tokens else "context"
                texts.append(replace(text.finish(cut), compiled=settings.compile is True))
    return texts


def resolve_auto(settings: Sample, model: PreTrainedModel, passes: int) -> Sample:
    """Resolves `compile: auto`, and the cache kind with it.

    Args:
        passes: upper bound of single-token passes; 0: generation cannot be compiled here.

    Raises:
        RecipeError: `compile: true` for a model that cannot be compiled.
    """
    if settings.compile == "auto":
        long = model.device.type == "cuda" and passes >= _PASSES
        compilable = (
            long
            and settings.cache in ("auto", "static")
            and not settings.speculates
            and not model.config.is_encoder_decoder
        )
        supported = getattr(model, "_can_compile_fullgraph", False)  # transformers' flag of the family
        return replace(settings, compile=bool(compilable and supported and not _describe_uncompilable(model, settings)))
    if settings.compile and (why := _describe_uncompilable(model, settings)):
        raise RecipeError(f"sample.compile: {why}")
    return settings


def _describe_uncompilable(model: PreTrainedModel, settings: Sample) -> str:
    """Why a model's decoding cannot be compiled here; "" if it can."""
    from preheat.hardware.cpp_build import describe_missing_compiler
    from preheat.models.generation.kv_cache import make_cache

    kind = model.config.get_text_config(decoder=True).model_type
    if "llama4" in kind:  # transformers never compiles this family
        return f"transformers compiles no model of the family {kind}; leave it out"
    if not make_cache(model.config, replace(settings, compile=True, cache="static"), 1).is_compileable:
        return f"the cache of this model ({kind}) changes its shape with each token; leave it out"
    return describe_missing_compiler(model.device.type)


def evaluate_cached_loss(model: PreTrainedModel, rows: Tensor, settings: Sample, kernel: str | None = None) -> float:
    """Mean loss per token in nats with the cache and window of `settings`: measures their cost in quality.

    Args:
        rows: tokens [rows, length], one text per row.
        kernel: as in `generate`.
    """
    import torch

    from preheat.models.generation.kv_cache import make_cache

    alone = has_attention_pattern(model)
    _require(model, settings, alone, True, None)
    total = 0.0
    with _prepare_generation(model, _choose_attention(model, settings, alone, kernel), alone, kernel):
        # One row per pass, so that each row has a cache of its own and none needs padding.
        for row in rows.to(model.device):
            cache = {} if alone else pass_cache(model, make_cache(model.config, settings, len(row)))
            # Logits [length - 1, vocabulary]: the last token of a row has no successor to predict.
            logits = model(input_ids=row[None], use_cache=bool(cache), **cache).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum"))
    return total / (rows.numel() - len(rows))


def _build_listener(on_text: Callable[[int, str | None], None] | None, row: int) -> Callable[[str | None], None]:
    return (lambda text: on_text(row, text)) if on_text is not None else (lambda text: None)


def _group_batches(rooms: Sequence[int], wanted: int, size: int) -> Iterator[list[int]]:
    """Groups prompts into batches. A prompt with less room is processed alone, because it would cut others short."""
    rows: list[int] = []
    for row, room in enumerate(rooms):
        if rows and (room < wanted or len(rows) == size):
            yield rows
            rows = []
        rows.append(row)
        if room < wanted:
            yield rows
            rows = []
    if rows:
        yield rows


def _require(model: PreTrainedModel, settings: Sample, alone: bool, cached: bool, kept: PrefixCache | None) -> None:
    """Raises RecipeError if this model does not support the settings."""
    from preheat.models.generation.kv_cache import has_recurrent_state

    # Every setting that differs from its default; the first one names the conflict in the messages below.
    chosen = [
        f"sample.{name}"
        for name, plain in (
            ("cache", ("auto", "dynamic")),
            ("compile", ("auto", False)),
            ("window", (None,)),
            ("draft_model", (None,)),
            ("prompt_lookup_tokens", (None,)),
        )
        if getattr(settings, name) not in plain
    ]
    if chosen and (alone or not cached):
        raise RecipeError(
            f"{chosen[0]}: this model's layers have attention patterns (block_sparse_attention, shifted_groups, "
            "sliding_window), so it recomputes all tokens for each new one and keeps no cache; leave it out"
        )
    if chosen and _has_own_cache(model):
        raise RecipeError(
            f"{chosen[0]}: {model.config.model_type} has a cache of its own in transformers, which has no such "
            "setting; leave it out"
        )
    if model.config.is_encoder_decoder and (chosen or kept is not None):
        raise RecipeError(
            f"{(*chosen, 'chat')[0]}: an encoder-decoder reads its prompt once and writes with transformers' own "
            "cache; leave it out"
        )
    if kept is not None and settings.cache == "static":
        raise RecipeError("sample.cache: static has room for one text, and a chat keeps growing; use dynamic or int8")
    if kept is not None and settings.compile is True:
        raise RecipeError(
            "sample.compile: needs a static cache, which has room for one text, and a chat keeps growing; leave it out"
        )
    if settings.speculates and has_recurrent_state(model.config):
        raise RecipeError(
            f"{chosen[0]}: layers of {model.config.model_type} keep a recurrent state, which cannot be rolled back "
            "when a proposed token is rejected; leave it out"
        )
    if settings.window is not None and _choose_plain_attention(model) != "sdpa":
        raise RecipeError(
            f"sample.window: {settings.window}: this model's attention (capped scores, or one of its own) supports no "
            "further window; leave it out"
        )


def _has_own_cache(model: PreTrainedModel) -> bool:
    """True for a model whose cache is a class of its own (MiniMax), or has no tokens to keep or drop (Mamba)."""
    from preheat.models.generation.kv_cache import has_token_cache

    return not model._supports_default_dynamic_cache() or not has_token_cache(model.config)


def _choose_attention(model: PreTrainedModel, settings: Sample, alone: bool, kernel: str | None = None) -> str:
    """The name of the attention implementation for generation.

    Raises:
        RecipeError: the model's attention does not use the kernel that is asked for.
    """
    plain = _choose_plain_attention(model)
    if kernel is not None:
        _require_kernel(model, settings, kernel, chooses=plain == "sdpa" and not alone)
        return plain
    if alone:
        return STANDALONE
    from preheat.models.generation.kv_cache import register_cache_attention

    # Models that do not dispatch through transformers' attention registry select sdpa by name.
    ours = model._supports_attention_backend and model.device.type == "cpu" and plain == "sdpa"
    return register_cache_attention(settings.window) if ours or settings.window is not None else plain


def _require_kernel(model: PreTrainedModel, settings: Sample, kernel: str, *, chooses: bool) -> None:
    """Raises RecipeError if torch's attention cannot use the kernel for this model.

    Args:
        chooses: the model calls torch's attention, which has several kernels.
    """
    import torch

    from preheat.models.layer_sizes import head_dim

    if not chooses or settings.window is not None:
        raise RecipeError(
            f"efficient_attention.kernel: {kernel}: this model generates with a mask or attention of its own "
            "(patterns, capped scores, ALiBi, sample.window), which has no choice of kernels; leave it out"
        )
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    name = str(dtype).removeprefix("torch.")
    probe = torch.zeros(1, 1, 8, head_dim(model.config.get_text_config()), dtype=dtype, device=model.device)
    try:
        # torch warns of each reason, and raises without them.
        with _use_kernel(kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.functional.scaled_dot_product_attention(probe, probe, probe, is_causal=True)
    except RuntimeError:
        raise RecipeError(
            f"efficient_attention.kernel: {kernel}: torch has no such kernel for {name} and heads of "
            f"{probe.shape[-1]} on {model.device.type}; math supports everything"
        ) from None


def _use_kernel(kernel: str) -> AbstractContextManager[None]:
    """Context manager in which torch's attention uses no other kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, KERNELS[kernel]))


@contextmanager
def _prepare_generation(
    model: PreTrainedModel, attention: str, alone: bool, kernel: str | None = None
) -> Iterator[None]:
    """Puts the model into eval mode with the given attention and without its folder's generation settings."""
    import torch
    from transformers import GenerationConfig

    # Everything changed here is restored on exit, because training also generates texts between its steps.
    training, before, folder = model.training, model.config._attn_implementation, model.generation_config
    parallel = os.environ.get("TOKENIZERS_PARALLELISM")  # transformers changes it when it compiles
    model.eval()
    set_attention(model, attention)
    model.generation_config = GenerationConfig()  # the folder's end token must not end texts unasked
    try:
        # Recomputed sequences have a new length each time: a compiled layer would recompile for each.
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager") if alone else nullcontext(),
            nullcontext() if kernel is None else _use_kernel(kernel),
        ):
            yield
    finally:
        if parallel is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallel
        model.generation_config = folder
        set_attention(model, before)
        model.train(training)


@contextmanager
def _allow_recompiles() -> Iterator[None]:
    """Allows the graphs of several models, windows and batches; beyond that raises, where torch would run eager."""
    import torch
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        # torch counts the graphs of all models together, since transformers compiles one shared function.
        with torch._dynamo.config.patch(recompile_limit=_GRAPHS, fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit:
        raise RunError(
            f"sample.compile: {_GRAPHS} graphs are compiled, and this model and batch need another; generate with "
            "fewer different batches, or leave it out"
        ) from None


def _choose_plain_attention(model: PreTrainedModel) -> str:
    """transformers' sdpa, or eager attention if scores are capped, because sdpa silently ignores the cap."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped or not model._supports_sdpa else "sdpa"


def _write(
    model: PreTrainedModel,
    prompts: list[Sequence[int]],
    room: int,
    settings: Sample,
    stop: frozenset[int],
    texts: list[IncrementalDetokenizer],
    *,
    cached: bool,
    kept: PrefixCache | None,
    draft: PreTrainedModel | None,
    timed: Timed | None,
    longest: int,
    caches: dict[int, Cache] | None,
) -> None:
    import torch
    from transformers import CompileConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    from preheat.models.generation.kv_cache import cache_nbytes, make_cache

    device = next(model.parameters()).device
    # Left padding: the last token of every prompt is in the last column, whose logits predict the next tokens.
    # The mask hides the padding, so any token serves; transformers also fills the rows that have ended with it.
    width, encoder = max(map(len, prompts)), model.config.is_encoder_decoder
    pad = min(stop, default=0)
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)  # [rows, width]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)

    class Listener(StoppingCriteria):
        """Receives the tokens of each pass. Stop strings are matched in text, so text is decoded here: a streamer would
        be called only after the decision to stop."""

        heard = 1 if encoder else width  # a decoder begins with its start token

        def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:  # type: ignore[override]
            fresh = input_ids[:, self.heard :].tolist()
            if timed is not None:  # `tolist` has waited for the device
                timed.at.append(time.perf_counter())
                timed.tokens.append(sum(map(len, fresh)))
            self.heard = input_ids.shape[1]
            # An ended row receives padding until all rows end; its detokenizer ignores these tokens.
            for text, tokens in zip(texts, fresh, strict=True):
                for token in tokens:
                    text.add(token, token in stop)
            return torch.tensor([text.ended is not None for text in texts], device=input_ids.device)

    # Temperature 0 means greedy decoding; as a divisor of the logits it would be invalid.
    drawn = settings.temperature > 0
    # reduce-overhead records CUDA graphs, which remove the launches that dominate a pass over a single token.
    compiling = CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default")
    # Without this flag transformers compiles on accelerators only, and a CPU model would silently run eager.
    compiling._compile_all_devices = True  # type: ignore[assignment]
    # Set everything explicitly: transformers' defaults include top_k=50.
    generation = GenerationConfig(
        max_new_tokens=room,
        do_sample=drawn,
        repetition_penalty=settings.repetition_penalty,
        use_cache=cached,
        eos_token_id=sorted(stop) or None,
        pad_token_id=pad,
        decoder_start_token_id=start_token(model.config) if encoder else None,
        disable_compile=settings.compile is not True,
        compile_config=compiling if settings.compile is True else None,
        **(
            {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k,
                "min_p": settings.min_p or None,
            }
            if drawn
            else {}
        ),
    )
    cache: Cache | None = None
    # transformers manages the two caches of an encoder-decoder, and those of models with a cache of their own.
    if cached and not encoder and not _has_own_cache(model):
        tokens = width + room - 1 if caches is None else longest  # the last token is not read
        empty = functools.partial(make_cache, model.config, settings, tokens)
        if caches is None:
            cache = empty() if kept is None else kept.begin(prompts[0], settings, empty)
        elif len(prompts) in caches:  # the memory that the CUDA graph was captured with
            cache = caches[len(prompts)]
            cache.reset()
        else:
            cache = caches[len(prompts)] = empty()
    more: dict[str, Any] = {} if cache is None else {**pass_cache(model, cache)}
    # Drafts and prompt lookup replace transformers' decoding loop by one that verifies proposals.
    if settings.speculates:
        more["custom_generate"] = _build_speculation(model, settings, draft)
    if timed is not None:
        timed.begun = time.perf_counter()
    try:
        model.generate(
            ids,
            attention_mask=mask,
            generation_config=generation,
            stopping_criteria=StoppingCriteriaList([Listener()]),
            **more,
        )
    # Also on KeyboardInterrupt: an interrupted pass may have updated the cache of some layers only.
    except BaseException:
        if kept is not None:
            kept.clear()
        raise
    if kept is not None and cached:  # the last token was sampled and not read
        kept.end([*prompts[0], *texts[0].tokens])
    if timed is not None and cache is not None:
        timed.cache_bytes = cache_nbytes(cache)


def _build_speculation(
    model: PreTrainedModel, settings: Sample, draft: PreTrainedModel | None
) -> Callable[..., Tensor]:
    """The speculative decoding loop for one text, in place of transformers' own."""
    from preheat.models.generation.speculative import DraftModel, PromptLookup, Proposer, speculate

    proposer: Proposer
    if draft is not None:
        proposer = DraftModel(draft, settings.draft_tokens, model.config.get_text_config().vocab_size)
    else:
        assert settings.prompt_lookup_tokens is not None
        proposer = PromptLookup(settings.prompt_lookup_tokens)
    return functools.partial(speculate, proposer=proposer)
