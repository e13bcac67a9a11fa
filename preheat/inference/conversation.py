"""A chat of several turns: keeps the turns and their KV cache, and drops the oldest when the context window is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.errors import RecipeError
from preheat.inference.text_generation import tokenize_prompt
from preheat.models.generation.generate import PrefixCache, Written
from preheat.recipe import Sample

if TYPE_CHECKING:
    from preheat.data.chat.template import Template
    from preheat.inference.load import LoadedModel

__all__ = ["Answer", "Conversation"]


@dataclass(frozen=True)
class Answer:
    """The assistant's reply to one message.

    Attributes:
        written: its text and tokens.
        dropped: number of old messages dropped to make room for it.
        prompt: tokens of the prompt.
        read: prompt tokens that were not in the cache yet.
    """

    written: Written
    dropped: int
    prompt: int
    read: int


class Conversation:
    """A chat of several turns.

    Args:
        opened: the model (`load_model`).
        template: formats the messages.
        settings: the length of a reply and how tokens are sampled.
        system: the system message.
        seed: seeds the sampling, together with the turn number.

    Example:
        >>> talk = Conversation(load_model("runs/mine"), template)                                 # doctest: +SKIP
        >>> talk.say("Who are you?").written.text                                                  # doctest: +SKIP
    """

    def __init__(
        self,
        opened: LoadedModel,
        template: Template,
        settings: Sample | None = None,
        *,
        system: str | None = None,
        seed: int = 0,
    ):
        self.opened, self.template, self.settings = opened, template, settings or Sample(max_new_tokens=256)
        self.system, self.seed = system, seed
        self.turns: list[dict[str, str]] = []
        self._kept, self._asked = PrefixCache(), 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the model will read it."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns.clear()
        self._asked = 0
        self._kept.clear()

    def say(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """Sends a message and returns the reply, which joins the conversation.

        Args:
            on_text: called with each part of the reply. If it raises KeyboardInterrupt, the turn ends with the text so
                far.

        Raises:
            RecipeError: the message alone leaves no room for a reply. The conversation is then unchanged.
            DataError: the template does not render the conversation.
        """
        # A copy, since making room deletes old turns: a failed turn must give these back.
        before = list(self.turns)
        # Each turn draws other numbers, and a conversation with the same seed and messages repeats itself.
        self._asked += 1
        self.turns.append({"role": "user", "content": text})
        parts: list[str] = []

        def tell(_: int, part: str | None) -> None:
            if part is not None:
                parts.append(part)
                if on_text is not None:
                    on_text(part)

        try:
            # Room is made before the model reads anything; the cache then drops its
            # tokens from the first changed one on.
            count, dropped = self._fit_context()
            (written,) = self.opened.write(
                [self.messages],
                self.settings,
                template=self.template,
                seed=self.seed + self._asked,
                on_text=tell,
                kept=self._kept,
            )
        # The user stopped the reply: the text so far stays in the conversation.
        except KeyboardInterrupt:
            self._add_answer("".join(parts))
            raise
        # Otherwise the next message would follow a question that was never answered.
        except BaseException:
            self.turns = before
            raise
        self._add_answer(written.text)
        # `reused` was set as the prompt was read: the rest is what this turn had to compute.
        return Answer(written, dropped, count, count - self._kept.reused)

    def _add_answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def _fit_context(self) -> tuple[int, int]:
        """Drops the oldest turns until a reply fits. Returns the prompt's tokens and the number of messages dropped."""
        positions = self.opened.build.model.positions
        # A long reply may be cut rather than drop the conversation: at most a quarter of the positions is kept free.
        room = min(self.settings.max_new_tokens, max(1, positions // 4))
        dropped = 0
        while True:
            # Counted anew after each deletion: templates add tokens around messages, so counts do not add up.
            count = len(tokenize_prompt(self.opened.tokenizer, self.messages, self.template))
            if not positions or count + room <= positions:
                return count, dropped
            later = next((n for n, turn in enumerate(self.turns) if n and turn["role"] == "user"), None)
            # Only the current question is left. A short answer is better than none, as long as one token fits.
            if later is None:
                if count >= positions:
                    raise RecipeError(
                        f"the message has {count:,} tokens with the template, the model only {positions:,} positions; "
                        "shorten it"
                    )
                return count, dropped
            # Up to the next question of the user, so that the conversation still begins with one.
            del self.turns[:later]
            dropped += later
