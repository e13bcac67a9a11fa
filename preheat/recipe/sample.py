"""The `sample` part of a recipe, which is also how `preheat generate` and `preheat chat` are told to draw. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from preheat.recipe.bounds import Bound, NonNegative, Positive, Share, Whole
from preheat.text import quoted

__all__ = ["Sample"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the model writes, for the report: at the end, and before the first step too where the model is a pretrained one."""

    prompts: tuple[str | tuple[Mapping[str, Any], ...], ...] = ()
    """Beginnings to continue, or chats (lists of messages) to answer; with neither these nor `rows`: no samples."""
    rows: Annotated[int, Bound(0, 256)] = 0
    """Also answer the questions of so many validation rows, of data that has answers (chats, prompts); each is shown beside the row's own answer."""
    tokens: Annotated[int, Bound(1, 2**24)] = 64
    """At most so many tokens for each."""
    temperature: NonNegative = 0.0
    """0: the likeliest token each time; 1: as the model believes; between, likelier tokens are preferred."""
    top_p: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Draw from the likeliest tokens that together have this share of the probability (Holtzman et al. 2020, arXiv:1904.09751); 1: all."""
    top_k: Whole = 0
    """Draw from so many of the likeliest tokens; 0: all."""
    min_p: Share = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024, arXiv:2407.01082); 0: all."""
    repetition_penalty: Positive = 1.0
    """Above 1: what stands in the text already becomes less likely (Keskar et al. 2019, arXiv:1909.05858)."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which stops before them. The model's own end tokens always do."""
    cache: Literal["auto", "dynamic", "static", "int8"] = "auto"
    """How keys and values are kept: dynamic grows with the text; static is taken whole at the beginning; int8 grows, in a quarter of fp32's memory; auto:
    static if the model is compiled, else dynamic."""
    window: Annotated[int, Bound(2)] | None = None
    """Each token sees at most so many tokens back, itself included, and the cache keeps no more: other text, once it is longer; null: the model's own."""
    draft: str | None = None
    """A smaller model with the same tokenizer (a run or a folder) that proposes tokens, which the model checks several at a time: the same greedy text."""
    draft_tokens: Annotated[int, Bound(1, 1024)] = 4
    """Tokens that the draft proposes at a time."""
    lookup: Annotated[int, Bound(1, 1024)] | None = None
    """Propose so many tokens at a time by looking up what followed the last ones where they stood before: the same greedy text, without a draft."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model for single tokens: takes seconds to minutes at the first one, and a static cache. auto: on a GPU, outside training, if some
    thousands of tokens are to be written one after the other (no draft, no lookup, no chat)."""

    @property
    def cache_kind(self) -> Literal["dynamic", "static", "int8"]:
        """The cache, where `compile` is no longer auto (it counts as false)."""
        if self.cache != "auto":
            return self.cache
        return "static" if self.compile is True else "dynamic"

    @property
    def wanted(self) -> bool:
        """Whether a run writes samples."""
        return bool(self.prompts or self.rows)

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed and then checked."""
        return self.draft is not None or self.lookup is not None

    def problems(self) -> list[tuple[str, str]]:
        """What contradicts itself, as (key, words)."""
        found = []
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if self.temperature == 0 and (value := getattr(self, name)) != neutral:
                found.append(
                    (name, f"{value:g} chooses among drawn tokens, and temperature 0 draws none; set a temperature, e.g. 0.8")
                )
        if self.draft is None and self.draft_tokens != type(self).draft_tokens:
            lacking = "there is no draft to propose them; name one (draft), or leave it out"
            found.append(("draft_tokens", f"{self.draft_tokens} changes nothing: {lacking}"))
        if self.speculates:
            name = "draft" if self.draft is not None else "lookup"
            if self.draft is not None and self.lookup is not None:
                found.append(("lookup", "proposes tokens, and so does the draft; leave one of them out"))
            if self.temperature > 0:
                found.append((name, "proposes tokens of greedy text, and a temperature draws others; set temperature 0"))
            if self.compile is True:
                found.append(("compile", f"decodes one token at a time, and {name} reads several; leave one of them out"))
            elif self.cache == "static":
                found.append(
                    ("cache", f"static cannot forget proposals that were wrong; use dynamic or int8, or leave {name} out")
                )
        if self.compile is True and self.cache not in ("auto", "static"):
            found.append(("compile", f"needs a cache that does not grow, and this one is {self.cache}; leave cache out"))
        if "" in self.stop:
            found.append(("stop", "an empty string would end every text at once; remove it"))
        for number, prompt in enumerate(self.prompts, 1):
            if not isinstance(prompt, str) and (problem := _chat_problem(prompt)):
                found.append(("prompts", f"prompt {number}: {problem}"))
        return found


def _chat_problem(messages: tuple[Mapping[str, Any], ...]) -> str | None:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return f"{quoted(dict(message))} is no message; write {{role: user, content: ...}}"
    if not messages or messages[-1]["role"] == "assistant":
        return "a chat to answer ends with the user's message"
    return None
