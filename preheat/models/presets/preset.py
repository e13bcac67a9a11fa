"""What a preset is, and what the tables of models share. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["APACHE", "MIT", "OWN", "TIED", "Licence", "Preset", "sizes"]

OWN = "its tokenizer's own"
TIED: dict[str, Any] = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Licence:
    """A model's licence.

    Attributes:
        name: as its publisher calls it.
        gate: what the hub asks before a download; empty: nothing.
    """

    name: str
    gate: str = ""

    def __str__(self) -> str:
        return f"{self.name}; {f'gated: {self.gate}' if self.gate else 'not gated'}"


APACHE = Licence("Apache 2.0")
MIT = Licence("MIT")


@dataclass(frozen=True)
class Preset:
    """A public model.

    Attributes:
        hub: the checkpoint whose configuration this is; chat: its sibling that was tuned to converse.
        parameters: as published, a tied head counted once.
        template: chat template of `chat` by its name in recipes (`data.template`), or that only its tokenizer brings it.
        licence: with what the hub asks before a download.
        config: as in config.json.
    """

    hub: str
    chat: str
    parameters: int
    template: str
    licence: Licence
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of `config` that is about text; all of it where the model reads text alone."""
        found: Mapping[str, Any] = self.config.get("text_config", self.config)
        return found


def sizes(
    width: int, feed_forward: int, layers: int, heads: int, kv_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    """Keys of config.json; more of them may follow. Families without grouped queries state no `kv_heads`."""
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **grouped,
        **more,
    }
