"""Network connectivity, and look-ups in the hub's cache. Does not import torch."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

__all__ = ["find_cached_folder", "is_hub_offline", "is_hub_reachable"]


def is_hub_reachable() -> bool:
    """True if the Hugging Face Hub is reachable. Without this check its client retries for half a minute."""
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return True  # offline mode reads the cache only; a proxy resolves names itself
    address = urllib.parse.urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), timeout=5
        ):
            return True
    except OSError:
        return False


def is_hub_offline() -> bool:
    """True if nothing can be downloaded from the hub: HF_HUB_OFFLINE is set, or it is not reachable."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or not is_hub_reachable()


def find_cached_folder(name: str, files: Iterable[str]) -> Path | None:
    """Returns the folder of the hub's cache that holds any of the files of a repository; None if none is there.

    Args:
        name: `owner/name`.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in files:
        try:
            path = try_to_load_from_cache(name, file)
        except HFValidationError:  # not the form of a repository's name
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None
