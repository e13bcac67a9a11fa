"""Speculative decoding: tokens are proposed cheaply, and the model checks several of them in one pass. The text is the greedy one.

Each token that is taken is the likeliest by the model's own logits after the tokens before it, as in plain greedy decoding; a proposal only decides
whether it is had earlier. So texts are the same token for token wherever the likeliest token does not hang on rounding: a pass over several tokens
sums products in another order than one over a single token. In fp32 that is about 1e-6 of a logit. In bf16 a logit has 8 bits, two tokens may tie, and texts may
part at a tie, as they do between batch sizes.
Helps where a pass over several tokens takes little longer than over one (the weights are read once), and where proposals are often right.
Hurts where they are not: checked in vain.
Source: Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318). Lookup: Saxena 2023 (apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from preheat.models.generation.detokenizer import alike

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["DraftModel", "PromptLookup", "Proposer", "speculate"]


class Proposer(Protocol):
    """What proposes how a text goes on."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens after `tokens`, which grew since the last call and never shrank; none where it knows nothing."""


class PromptLookup:
    """Proposes what followed the last tokens where they stood before: free, and right where a text repeats itself or its prompt.

    Args:
        count: tokens at a time.
        longest, shortest: how many of the last tokens are looked up; the longest that is found counts.

    Example:
        >>> Lookup(2).propose([7, 8, 9, 5, 7, 8], most=9)
        [9, 5]
    """

    def __init__(self, count: int, *, longest: int = 3, shortest: int = 2):
        self.count, self.sizes = count, range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """Some tokens -> the position after them, where they stood last."""
        self._read = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for end in range(self._read, len(tokens)):  # the text's own end is followed by nothing yet
            self._after |= {tuple(tokens[end - size : end]): end for size in self.sizes if end >= size}
        self._read = len(tokens)
        at = next((found for size in self.sizes if (found := self._after.get(tuple(tokens[-size:])))), None)
        return [] if at is None else list(tokens[at : at + min(self.count, most)])


class DraftModel:
    """Proposes what a smaller model finds likeliest.

    Args:
        model: with the tokenizer of the model that checks, on the same device.
        count: tokens at a time.
        vocabulary: pieces that the checking model has; the draft's head may have rows to spare.
    """

    def __init__(self, model: PreTrainedModel, count: int, vocabulary: int):
        from transformers import DynamicCache

        self.model, self.count, self.vocabulary = model, count, vocabulary
        self.cache = DynamicCache(config=model.config)
        self.tokens: list[int] = []
        """Whose keys and values the cache holds."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        same = min(alike(self.tokens, tokens), len(tokens) - 1)
        if self.tokens:
            self.cache.crop(same - len(self.tokens))
        self.tokens, fresh, made = self.tokens[:same], list(tokens[same:]), list[int]()
        for _ in range(min(self.count, most)):
            scores = _logits(self.model, fresh, self.cache, keep=1)[0, : self.vocabulary]
            if not self.tokens:  # what leaves a window while the prompt is read need not come back
                self.cache.activate_past_recording()
            self.tokens += fresh
            fresh = [int(scores.argmax())]
            made += fresh
        return made


def _logits(model: PreTrainedModel, tokens: Sequence[int], cache: Any, *, keep: int) -> Tensor:
    """Reads tokens into a cache; fp32 logits after the last `keep` of them, [keep, vocabulary]."""
    import torch

    ids = torch.tensor([tokens], device=model.device)
    more: dict[str, Any] = {"logits_to_keep": keep} if model._supports_logits_to_keep() else {}
    found = model(input_ids=ids, past_key_values=cache, use_cache=True, **more)
    return found.logits[0, -keep:].float()


def speculate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    proposer: Proposer,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]],
    stopping_criteria: Callable[..., Tensor],
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Tensor:
    """Greedy decoding of one row with proposals: to be handed to transformers' `generate` as `custom_generate`.

    Args:
        input_ids: [1, tokens], of which the cache may hold the first ones.
        logits_processor: what changes logits [1, vocabulary] by the tokens before them, a repetition penalty for one.
        stopping_criteria: asked after each pass; several tokens may have come.
        model_kwargs: `past_key_values` is the cache. (By its name, transformers would not take it for a cache.)

    Returns:
        [1, tokens] with those that were drawn.
    """
    import torch

    assert input_ids.shape[0] == 1, "proposals are checked for one row at a time"
    ends = frozenset(generation_config.eos_token_id or ())
    cache, text, proposed = model_kwargs["past_key_values"], input_ids[0].tolist(), list[int]()
    recording, limit = False, generation_config.max_length
    while True:
        logits = _logits(model, text[cache.get_seq_length() :] + proposed, cache, keep=len(proposed) + 1)
        for n in range(len(proposed) + 1) if len(logits_processor) else ():
            before = torch.tensor([text + proposed[:n]], device=logits.device)
            logits[n] = logits_processor(before, logits[n : n + 1])[0]  # type: ignore[operator]
        likeliest = logits.argmax(-1).tolist()
        drawn = likeliest[: alike(proposed, likeliest) + 1]
        cut = next((n for n, token in enumerate(drawn, 1) if token in ends), len(drawn))
        if recording:
            cache.crop(cut - 1 - len(proposed))
        text += drawn[:cut]
        grown = torch.tensor([text], device=input_ids.device)
        if bool(stopping_criteria(grown, None).all()):
            return grown
        if not recording:  # only now: what leaves a window while the prompt is read need not come back
            cache.activate_past_recording()
            recording = True
        # The pass gives one token more than it checks.
        proposed = proposer.propose(text, limit - len(text) - 1) if limit - len(text) > 1 else []
