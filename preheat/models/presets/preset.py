"""The type of a preset, and helpers for the tables of models. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject


__all__ = ["APACHE", "MIT", "NOT_TRAINED", "OWN", "TIED", "Licence", "Preset", "sizes"]

OWN = "its tokenizer's own"
TIED: JsonObject = {"tie_word_embeddings": True}
_INDEXER = "attends to positions that an indexer chooses, which preheat's kernels do not support"
NOT_TRAINED = {
    "bloom": "adds positions to attention's scores (ALiBi), which preheat's kernels do not support",
    "deepseek_v2": "has a router and rotary positions of its own, which preheat does not support",
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "attends to compressed positions, which preheat's kernels do not support",
    "glm_moe_dsa": _INDEXER,
}
"""Families (`model_type`) that can only be planned for inference -> the reason."""


@dataclass(frozen=True)
class Licence:
    """A model's licence.

    Attributes:
        name: as its publisher calls it.
        gate: what the hub requires before a download; empty: nothing; None: not known.
    """

    name: str
    gate: str | None = ""

    def __str__(self) -> str:
        if self.gate is None:
            return self.name
        return f"{self.name}; {f'gated: {self.gate}' if self.gate else 'not gated'}"


APACHE = Licence("Apache 2.0")
MIT = Licence("MIT")


@dataclass(frozen=True)
class Preset:
    """A public model.

    Attributes:
        hub: the checkpoint whose configuration this is; chat: its chat-tuned variant.
        parameters: of the model that transformers builds, a tied head counted once.
        template: name of the chat template of `chat` in recipes (`data.template`), or that only its tokenizer has it.
        licence: with the hub's requirements before a download.
        config: as in config.json.
        active: of a mixture of experts, the parameters that compute a token: all but the experts not chosen for it.
        stored: number of values in the hub's files, if they hold more than `parameters`; stored_more: what that is.
        also: other checkpoints with this configuration.
        unconfirmed: keys of the configuration, as transformers names them, that no public copy of the file confirms;
            never sizes.
    """

    hub: str
    chat: str
    parameters: int
    template: str
    licence: Licence
    config: JsonObject
    active: int | None = None
    stored: int | None = None
    stored_more: str = ""
    also: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Names on the hub of all checkpoints with this configuration."""
        # In order and once each: `hub` and `chat` are equal for models without a base checkpoint.
        return tuple(dict.fromkeys((self.hub, self.chat, *self.also)))

    @property
    def not_trained(self) -> str | None:
        """Why preheat cannot train the model; None: it can."""
        return NOT_TRAINED.get(self.text["model_type"])

    @property
    def text(self) -> JsonObject:
        """The text part of `config`; all of it for text models."""
        config: JsonObject = self.config.get("text_config", self.config)
        return config


def sizes(
    width: int, feed_forward: int, layers: int, heads: int, kv_heads: int | None = None, **more: object
) -> JsonObject:
    """Keys of config.json; `more` adds others. Families without grouped-query attention have no `kv_heads`."""
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **grouped,
        **more,
    }
