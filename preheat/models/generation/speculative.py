"""Speculative greedy decoding: a proposer suggests tokens, and the model verifies several of them in one pass.

Every accepted token is the argmax of the model's own logits, as in plain greedy decoding; a proposal only decides when
it becomes available. So texts are identical token by token unless an argmax depends on rounding: a pass over several
tokens sums in another order than one over a single token. In fp32 that is about 1e-6 of a logit. In bf16 a logit has 8
bits, two tokens may tie, and texts may diverge at a tie, as they do between batch sizes.
Helps when a pass over several tokens takes little longer than over one (weights are read once), and proposals are often
right. Hurts when proposals are often wrong: their verification is wasted.
Source: Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318). Lookup: Saxena 2023
(apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from preheat.models.generation.detokenizer import common_prefix_length
from preheat.models.token_mixers import find_cache, pass_cache

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, GenerationConfig, PreTrainedModel

__all__ = ["DraftModel", "PromptLookup", "Proposer", "speculate"]


class Proposer(Protocol):
    """Proposes the next tokens of a text."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens to follow `tokens`, which only grow between calls; [] if it has no proposal."""


class PromptLookup:
    """Prompt-lookup decoding: proposes the tokens that followed the last earlier occurrence of the current suffix.

    Args:
        count: tokens per proposal.
        longest, shortest: lengths of the suffix to look up; the longest match counts.

    Example:
        >>> PromptLookup(2).propose([7, 8, 9, 5, 7, 8], most=9)
        [9, 5]
    """

    def __init__(self, count: int, *, longest: int = 3, shortest: int = 2):
        self.count, self.sizes = count, range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """n-gram -> the position after its last occurrence."""
        self._read = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for end in range(self._read, len(tokens)):  # excludes the end of the text, which nothing follows yet
            # Later occurrences overwrite earlier ones, so that the most recent one decides.
            self._after |= {tuple(tokens[end - size : end]): end for size in self.sizes if end >= size}
        self._read = len(tokens)
        # Longest suffix first: a longer match is more often right.
        at = next((after for size in self.sizes if (after := self._after.get(tuple(tokens[-size:])))), None)
        return [] if at is None else list(tokens[at : at + min(self.count, most)])


class DraftModel:
    """Proposes the greedy continuation of a smaller model.

    Args:
        model: with the same tokenizer as the verifying model, on the same device.
        count: tokens per proposal.
        vocabulary: vocabulary of the verifying model; the draft's head may have more rows.
    """

    def __init__(self, model: PreTrainedModel, count: int, vocabulary: int):
        from transformers import DynamicCache

        self.model, self.count, self.vocabulary = model, count, vocabulary
        self.cache = DynamicCache(config=model.config)
        self.tokens: list[int] = []
        """Tokens whose keys and values are in the cache."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        # At least one token stays unread, since a pass needs an input. The crop removes proposals that were rejected.
        same = min(common_prefix_length(self.tokens, tokens), len(tokens) - 1)
        if self.tokens:
            self.cache.crop(same - len(self.tokens))
        self.tokens, fresh, proposed = self.tokens[:same], list(tokens[same:]), list[int]()
        for _ in range(min(self.count, most)):
            # [vocabulary] of the verifying model: padding rows of the draft's head have no token there.
            scores = _compute_logits(self.model, fresh, self.cache, keep=1)[0, : self.vocabulary]
            if not self.tokens:  # recording starts after the prompt: tokens dropped while reading it need not return
                self.cache.activate_past_recording()
            self.tokens += fresh
            # The next pass reads this token; the last proposal is read by no pass and is not in the cache.
            fresh = [int(scores.argmax())]
            proposed += fresh
        return proposed


def _compute_logits(model: PreTrainedModel, tokens: Sequence[int], cache: Cache, *, keep: int) -> Tensor:
    """Reads tokens into a cache; returns fp32 logits of the last `keep`, [keep, vocabulary]."""
    import torch

    ids = torch.tensor([tokens], device=model.device)
    more: dict[str, int] = {"logits_to_keep": keep} if model._supports_logits_to_keep() else {}
    output = model(input_ids=ids, use_cache=True, **pass_cache(model, cache), **more)
    return output.logits[0, -keep:].float()


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
    """Greedy decoding of one row with proposals: a `custom_generate` for transformers' `generate`.

    Args:
        input_ids: [1, tokens], whose first ones may be in the cache.
        logits_processor: changes logits [1, vocabulary] by the tokens before them, such as a repetition penalty.
        stopping_criteria: called after each pass, which may add several tokens.
        model_kwargs: with the cache. (As a named parameter, transformers would not pass it.)

    Returns:
        [1, tokens] with the generated ones.
    """
    import torch

    assert input_ids.shape[0] == 1, "proposals are checked for one sequence at a time"
    ends = frozenset(generation_config.eos_token_id or ())
    cache, text, proposed = find_cache(model_kwargs), input_ids[0].tolist(), list[int]()
    assert cache is not None, "proposals are checked with a cache"
    recording, limit = False, generation_config.max_length
    while True:
        # One pass over the unread tokens and all proposals. Row n of [proposals + 1, vocabulary] predicts the token
        # after the first n proposals.
        logits = _compute_logits(model, text[cache.get_seq_length() :] + proposed, cache, keep=len(proposed) + 1)
        # A penalty depends on the tokens before a position, so each row sees its own prefix, as in plain decoding.
        for n in range(len(proposed) + 1) if len(logits_processor) else ():
            before = torch.tensor([text + proposed[:n]], device=logits.device)
            logits[n] = logits_processor(before, logits[n : n + 1])[0]  # type: ignore[operator]
        # Accepted are the proposals up to the first that differs from the model's choice; that choice follows them,
        # so a pass gives at least one token.
        likeliest = logits.argmax(-1).tolist()
        drawn = likeliest[: common_prefix_length(proposed, likeliest) + 1]
        # The text ends at the first end token, even if later proposals were accepted too.
        cut = next((n for n, token in enumerate(drawn, 1) if token in ends), len(drawn))
        # The cache holds the text and all proposals, but not the model's own last token: cut - 1 proposals remain.
        # The first pass has no proposals, so nothing needs a crop before recording begins.
        if recording:
            cache.crop(cut - 1 - len(proposed))
        text += drawn[:cut]
        grown = torch.tensor([text], device=input_ids.device)
        if bool(stopping_criteria(grown, None).all()):
            return grown
        if not recording:  # only now: tokens that leave a window while the prompt is read need not return
            cache.activate_past_recording()
            recording = True
        # A pass gives one token more than it verifies.
        proposed = proposer.propose(text, limit - len(text) - 1) if limit - len(text) > 1 else []
