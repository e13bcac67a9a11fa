"""Network connectivity. Does not import torch."""

from __future__ import annotations

import socket

__all__ = ["hub_reachable"]


def hub_reachable() -> bool:
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
