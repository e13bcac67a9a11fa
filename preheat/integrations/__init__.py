"""Plans and measures training loops that are not preheat's: transformers' Trainer, TRL's trainers, a plain loop.

from preheat.integrations import PlanCallback, accelerate_trainer

accelerate_trainer(trainer)  # exact changes: equal losses, less memory and time
trainer.add_callback(PlanCallback())
trainer.train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Acceleration", "PlanCallback", "WatchedLoop", "accelerate_trainer", "watch"]

# For type checkers and editors, which do not follow `__getattr__`.
if TYPE_CHECKING:
    from preheat.integrations.plain_loop import WatchedLoop, watch
    from preheat.integrations.plan_callback import PlanCallback
    from preheat.integrations.trainer_changes import Acceleration, accelerate_trainer

_HOME = {
    "Acceleration": "trainer_changes",
    "PlanCallback": "plan_callback",
    "WatchedLoop": "plain_loop",
    "accelerate_trainer": "trainer_changes",
    "watch": "plain_loop",
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use: `PlanCallback` is a class of transformers, whose import takes seconds."""
    if name not in _HOME:
        raise AttributeError(f"module 'preheat.integrations' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"preheat.integrations.{_HOME[name]}"), name)
