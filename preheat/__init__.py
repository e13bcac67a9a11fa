"""preheat predicts if a training run fits and how fast it is, trains it, and reports what was measured.

from preheat import load_recipe, plan, train

recipe = load_recipe("demo", ["stop.max_steps=50"])
print(plan(recipe).peak_gib)
train(recipe, out="runs/first")  # progress=False: no progress lines
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preheat._version import __version__ as __version__

__all__ = ["add_lora", "checkpoint_layers", "load_recipe", "plan", "train", "watch"]

# For type checkers and editors, which do not follow `__getattr__`.
if TYPE_CHECKING:
    from preheat.integrations.plain_loop import watch
    from preheat.planning.plan_request import plan_on_this_machine as plan
    from preheat.recipe import load as load_recipe
    from preheat.techniques.activation_checkpointing import checkpoint_layers
    from preheat.techniques.lora import add_lora
    from preheat.training.loop import train

# Public name -> (module, attribute).
_HOME = {
    "add_lora": ("preheat.techniques.lora", "add_lora"),
    "checkpoint_layers": ("preheat.techniques.activation_checkpointing", "checkpoint_layers"),
    "load_recipe": ("preheat.recipe", "load"),
    "plan": ("preheat.planning.plan_request", "plan_on_this_machine"),
    "train": ("preheat.training.loop", "train"),
    "watch": ("preheat.integrations.plain_loop", "watch"),
}


# Names that are not imported yet appear in completions too.
def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that `import preheat` is fast."""
    if name not in _HOME:
        raise AttributeError(f"module 'preheat' has no attribute {name!r}")
    import importlib

    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)
