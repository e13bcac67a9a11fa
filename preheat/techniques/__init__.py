"""One file for each technique. `preheat.core.registry` imports them all; importing one imports that one. No torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`preheat.techniques.integration_example`, the example that puts several together."""
    if name != "integration_example":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.techniques.integration import integration_example

    return integration_example
