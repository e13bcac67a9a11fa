"""Text from a model: transformers' own generation with its KV cache, for any model that preheat builds, told while it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from preheat.errors import RunError
from preheat.models.adapter import PATTERN, STANDALONE, head
from preheat.recipe import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["Kept", "Written", "generate", "patterned", "stop_tokens"]

_CONTEXT = 8
"""Tokens of the prompt that its continuation is decoded after."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A piece that spells one byte."""

Ended = Literal["stop token", "stop string", "length", "context"]


@dataclass
class Written:
    """What was written after one prompt.

    Attributes:
        text: without special tokens, and without the string that ended it.
        tokens: as drawn, with the token that ended it.
        ended: by a stop token, a stop string, at the number of tokens asked for, or where the model's positions end.
    """

    text: str
    tokens: list[int]
    ended: Ended


@dataclass
class Kept:
    """A KV cache and the tokens whose keys and values it holds: a prompt that begins with them is read from there on.

    Attributes:
        reused: tokens of the last prompt that the cache held already.
    """

    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    reused: int = 0

    def begin(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        """Makes the cache hold a beginning of `prompt`, of which at least one token is left to be read."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        same = _alike(self.tokens, prompt[:-1])
        extra = len(self.tokens) - same
        # A layer with a window of its own has forgotten what would have to come back.
        if not same or (extra and not all(type(layer) is DynamicLayer for layer in self.cache.layers)):
            self.cache, self.tokens, self.reused = DynamicCache(config=model.config), [], 0
            return
        if extra:
            self.cache.crop(-extra)
        self.tokens, self.reused = list(prompt[:same]), same

    def clear(self) -> None:
        """Forgets everything: after a generation that was broken off, layers may hold different numbers of tokens."""
        self.cache, self.tokens, self.reused = None, [], 0


def patterned(model: PreTrainedModel) -> bool:
    """Whether layers have an attention pattern of preheat's: these are for whole sequences, so there is no cache and no padding."""
    return any(hasattr(m, PATTERN) for m in model.modules())


def stop_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path | None) -> frozenset[int]:
    """Every token that ends a text: the tokenizer's, and those of the folder's generation_config.json."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id}
    if folder is not None and (folder / "generation_config.json").is_file():
        said = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
        found |= set(said) if isinstance(said, list | tuple) else {said}
    return frozenset(token for token in found if token is not None)


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
    kept: Kept | None = None,
) -> list[Written]:
    """Continues each prompt.

    Prompts are written `batch` at a time, padded on the left; one at a time where layers have an attention pattern, which count
    tokens from the row's beginning and read everything again for each token. Random generators are left as they were.

    Args:
        prompts: tokens, at least one each, and fewer than `positions`.
        settings: how many tokens, how they are drawn, and strings that end a text.
        stop: tokens that end a text.
        positions: tokens that the model can read; 0: not stated.
        batch: prompts at a time.
        seed: decides the draws of every batch.
        cached: keep keys and values; without, everything is read again for each token.
        on_text: told (prompt's number, text) as text becomes certain: whole characters, and nothing that may begin a
            stop string; None when it has ended.
        kept: a cache to go on from and to leave for the next call; for one prompt.

    Returns:
        One `Written` for each prompt.

    Raises:
        RunError: the model's head is over classes.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer                             # doctest: +SKIP
        >>> generate(model, tokenizer, [tokenizer.encode("Once")], Sample(tokens=8))[0].text         # doctest: +SKIP
        ' upon a time, there was a'
    """
    import torch

    pieces: int = head(model).weight.shape[0]  # type: ignore[index,assignment]
    if pieces != model.config.get_text_config().vocab_size:
        raise RunError(f"this model's head is over {pieces} classes: it writes no text; measure it with `preheat eval`")
    assert all(prompts), "a prompt without a token"
    assert kept is None or (cached and len(prompts) == 1)
    alone = patterned(model)
    rooms = [min(settings.tokens, positions - len(p)) if positions else settings.tokens for p in prompts]
    assert min(rooms, default=1) > 0, "a prompt that fills the model's positions"
    device = next(model.parameters()).device
    made: list[Written] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _writing(model, alone):
        for rows in _batches(rooms, settings.tokens, 1 if alone else batch):
            torch.manual_seed(seed)
            listeners = [_Text(tokenizer, prompts[row], settings.stop, _told(on_text, row)) for row in rows]
            _write(model, [prompts[row] for row in rows], rooms[rows[0]], settings, stop, listeners, cached and not alone, kept)
            for row, text in zip(rows, listeners, strict=True):
                cut: Ended = "length" if rooms[row] == settings.tokens else "context"
                made.append(text.finish(cut))
    return made


def _told(on_text: Callable[[int, str | None], None] | None, row: int) -> Callable[[str | None], None]:
    return (lambda text: on_text(row, text)) if on_text is not None else (lambda text: None)


def _batches(rooms: Sequence[int], wanted: int, size: int) -> Iterator[list[int]]:
    """Numbers of prompts that are written together. One whose positions end earlier stands alone: others would be cut with it."""
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


@contextmanager
def _writing(model: PreTrainedModel, alone: bool) -> Iterator[None]:
    """The model without dropout and gradients, its attention that of transformers (or preheat's own where layers have patterns)."""
    import torch

    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation(STANDALONE if alone else _plain_attention(model))
    try:
        # A text that is read again for each token has another length each time: a compiled layer would be compiled for each.
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if alone else nullcontext():
            yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def _plain_attention(model: PreTrainedModel) -> str:
    """transformers' fast attention, or the plain one where scores are capped, which the fast one leaves out in silence."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped or not model._supports_sdpa else "sdpa"


def _write(
    model: PreTrainedModel,
    prompts: list[Sequence[int]],
    room: int,
    settings: Sample,
    stop: frozenset[int],
    texts: list[_Text],
    cached: bool,
    kept: Kept | None,
) -> None:
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    pad = min(stop, default=0)
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

    class Listener(StoppingCriteria):
        """Hears each token as it is drawn. Stop strings stand in text and not in tokens, so the text is made here, not by a streamer,
        which is told only after it was decided whether to go on."""

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # type: ignore[override]
            for text, token in zip(texts, input_ids[:, -1].tolist(), strict=True):
                text.add(token, token in stop)
            return torch.tensor([text.ended is not None for text in texts], device=input_ids.device)

    drawn = settings.temperature > 0
    # Everything is said: what is left out comes from the model's folder or from transformers' defaults (which keep 50 tokens).
    how = GenerationConfig(
        max_new_tokens=room,
        do_sample=drawn,
        repetition_penalty=settings.repetition_penalty,
        use_cache=cached,
        eos_token_id=sorted(stop) or None,
        pad_token_id=pad,
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
    more: dict[str, Any] = {}
    if kept is not None and cached:
        kept.begin(model, prompts[0])
        more["past_key_values"] = kept.cache
    try:
        model.generate(
            ids, attention_mask=mask, generation_config=how, stopping_criteria=StoppingCriteriaList([Listener()]), **more
        )
    except BaseException:
        if kept is not None:
            kept.clear()
        raise
    if more and kept is not None:  # the last token was drawn and not read
        kept.tokens = [*prompts[0], *texts[0].tokens][: kept.cache.get_seq_length()]


class _Text:
    """One text as it grows: tokens to characters, held back where a character is not whole or a stop string may begin."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt: Sequence[int],
        stops: Sequence[str],
        tell: Callable[[str | None], None],
    ):
        self.tokenizer, self.stops, self.tell = tokenizer, stops, tell
        self.tokens: list[int] = []
        self.text, self.said = "", 0
        self.ended: Ended | None = None
        # Tokens are decoded after those before them, since decoders treat the first word of a text otherwise.
        self._before, self._fresh = list(prompt[-_CONTEXT:]), list[int]()

    def add(self, token: int, last: bool) -> None:
        if self.ended is not None:  # rows that ended are padded until all have
            return
        self.tokens.append(token)
        if last:
            self._end("stop token")
            return
        self._fresh.append(token)
        more = self._decoded()
        if not more.endswith("\ufffd"):
            self._before, self._fresh = self._fresh, []
            self._grow(more)

    def _decoded(self) -> str:
        if self._before and all(map(self._is_byte, (self._before[-1], self._fresh[0]))):
            # Decoders drop a whole run of such pieces when its end is no character: what was told stays as it is.
            return self.tokenizer.decode(self._fresh, skip_special_tokens=True)
        before, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._before, self._before + self._fresh)
        )
        return whole[_alike(before, whole) :]

    def _grow(self, more: str) -> None:
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += more
        at = min((i for stop in self.stops if (i := self.text.find(stop, searched)) >= 0), default=None)
        if at is not None:
            self.text, self._fresh = self.text[:at], []
            self._end("stop string")
        else:
            self._say(len(self.text) - max((_begun(self.text, stop) for stop in self.stops), default=0))

    def _say(self, upto: int) -> None:
        if upto > self.said:
            self.tell(self.text[self.said : upto])
            self.said = upto

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        if self._fresh:  # bytes that are no whole character
            self.text += self._decoded()
        self._say(len(self.text))
        self.tell(None)

    def finish(self, cut: Ended) -> Written:
        """The whole text; what was held back is told."""
        if self.ended is None:
            self._end(cut)
        assert self.ended is not None
        return Written(self.text, self.tokens, self.ended)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements at the beginnings are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`.

    >>> _begun("one\\nUs", "\\nUser:"), _begun("one", "\\nUser:")
    (3, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
