"""One file a technique. Importing this package imports every module of the folder; errors propagate. No torch."""

import importlib
import pkgutil
from typing import Any

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Any:
    """`preheat.techniques.integration_example`, the example that puts several together."""
    if name != "integration_example":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.techniques.integration import integration_example

    return integration_example
