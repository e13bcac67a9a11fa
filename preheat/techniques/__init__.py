"""One module per technique. `preheat.core.registry` imports them all. No torch."""


def __getattr__(name: str) -> object:
    """Provides `preheat.techniques.integration_example`, which combines several techniques."""
    # On first access, since the example imports its siblings.
    if name != "integration_example":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.techniques.integration import integration_example

    return integration_example
