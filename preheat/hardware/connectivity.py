"""What this machine can reach. No torch."""

from __future__ import annotations

import socket

__all__ = ["hub_reachable"]


def hub_reachable() -> bool:
    """Whether the Hugging Face hub can be asked. Without this look its client tries again for half a minute."""
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return True  # offline mode answers at once from its cache; a proxy resolves names itself
    address = urllib.parse.urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), timeout=5
        ):
            return True
    except OSError:
        return False
