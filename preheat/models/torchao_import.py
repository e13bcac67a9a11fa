"""Drops what torchao logs when it is first imported, which transformers' models and peft do if it is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silence_torchao"]

# Logger -> parts of its messages that nobody can act on: kernels of other Python versions and devices that do not load,
# and torch's news about a call in torchao.
_DROPPED = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("is an Enum subclass",),
}


@contextmanager
def silence_torchao() -> Iterator[None]:
    """Context manager for an import that may be the first of torchao; all other messages are logged as always.

    Example:
        >>> with silence_torchao():
        ...     from transformers import PreTrainedModel
    """

    def is_shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(part in message for part in _DROPPED[record.name])

    for name in _DROPPED:
        logging.getLogger(name).addFilter(is_shown)
    try:
        yield
    finally:
        for name in _DROPPED:
            logging.getLogger(name).removeFilter(is_shown)
