"""torch's deterministic mode (`hardware.deterministic`).

Training on CPUs is deterministic. On a GPU some kernels sum in the order in which threads finish: attention backward,
scatter-adds, and cuBLAS matmuls on several streams.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from preheat.errors import RecipeError
from preheat.sanitize import quote_value

__all__ = ["set_deterministic", "explain_lacking", "is_exact", "describe_exactness"]

# cuBLAS is deterministic with these workspaces only (its documentation on reproducibility).
_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_SERVE = (":4096:8", ":16:8")
_LACKS = "does not have a deterministic implementation"
_before: list[tuple[bool, bool, bool]] = []
"""torch's settings before `set_deterministic` changed them; empty if it has not."""


def set_deterministic(wanted: bool) -> None:
    """Enables or disables torch's deterministic kernels, including compiled ones; call it before CUDA is used.

    An operator without a deterministic kernel then raises a RuntimeError.

    Raises:
        RecipeError: the environment sets a cuBLAS workspace that is not deterministic.
    """
    # Nothing to restore; does not import torch.
    if not wanted and not _before:
        return
    setting = os.environ.get(_WORKSPACES)
    if wanted and setting not in (None, *_SERVE):
        raise RecipeError(
            f"hardware.deterministic: {_WORKSPACES} is {quote_value(setting)} in the environment, "
            f"with which cuBLAS is not deterministic; set it to {_SERVE[0]}, or unset it"
        )
    # cuBLAS reads the environment when its first handle is created, so a later change has no effect.
    if wanted:
        os.environ[_WORKSPACES] = setting or _SERVE[0]
    import torch
    from torch.utils import deterministic

    settings: Any = deterministic  # its attributes are dynamic, so mypy does not know them

    # Only the first call saves, so that repeated calls do not save preheat's own settings.
    if wanted and not _before:
        _before.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                settings.fill_uninitialized_memory,
                torch.backends.cudnn.benchmark,
            )
        )
    # cudnn.benchmark selects kernels by timings, which vary between runs.
    on, fill, benchmark = (True, False, False) if wanted else _before.pop()
    torch.use_deterministic_algorithms(on)
    settings.fill_uninitialized_memory = fill  # preheat reads no uninitialized memory, and filling takes time
    torch.backends.cudnn.benchmark = benchmark
    compiler = sys.modules.get("torch._inductor.config")  # if imported later, it reads the environment variable
    if compiler is not None:
        compiler.deterministic = on  # type: ignore[attr-defined]
    if on:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # without autotuning, whose timings select kernels
    else:
        os.environ.pop("TORCHINDUCTOR_DETERMINISTIC", None)


def explain_lacking(error: BaseException) -> RecipeError | None:
    """Turns torch's error about a missing deterministic kernel into a RecipeError; returns None for other errors.

    Example:
        >>> error = RuntimeError("put_ does not have a deterministic implementation, but you set ...")
        >>> str(explain_lacking(error)).split(";")[0]
        'hardware.deterministic: true, and put_ has no deterministic version'
    """
    message = str(error)
    # Two errors: an operator has no deterministic kernel, or cuBLAS found no deterministic workspace.
    if not isinstance(error, RuntimeError) or (_LACKS not in message and _WORKSPACES not in message):
        return None
    if _LACKS not in message:
        return RecipeError(
            f"hardware.deterministic: cuBLAS was used in this process before {_WORKSPACES} was set; "
            "start the run in a new process"
        )
    # The operator's name is the word before.
    name = message.split(_LACKS)[0].split()[-1]
    return RecipeError(
        f"hardware.deterministic: true, and {name} has no deterministic version; "
        "set it to false, or leave out the technique that uses it"
    )


def is_exact(kind: str, deterministic: bool) -> bool:
    """True if a run repeats and resumes bit for bit.

    Args:
        kind: kind of device.
        deterministic: the recipe's `hardware.deterministic`.

    Example:
        >>> is_exact("cpu", False), is_exact("cuda", False)
        (True, False)
    """
    return kind == "cpu" or deterministic


def describe_exactness(kind: str, deterministic: bool) -> str:
    """Describes how exactly a run repeats; arguments as of `is_exact`."""
    if is_exact(kind, deterministic):
        return "bit for bit"
    return (
        "up to rounding: some of a GPU's kernels add in no fixed order; bit for bit with hardware.deterministic: true"
    )
