"""Switch and error reporting for the custom CUDA kernels.

`PREHEAT_PLAIN=nf4_values,half_adamw` makes these operators use torch's kernels; `all` applies to every one. There is no
automatic fallback: if a kernel fails, the run ends with an error that names the operator and this switch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from preheat.errors import RunError
from preheat.hardware.oom import is_oom
from preheat.sanitize import quote_value, shorten

__all__ = ["OPERATORS", "Operator", "is_plain", "name_failures"]

Operator = Literal["nf4_values", "half_adamw", "int8_product", "int4_product", "gated_silu", "rotary"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
SWITCH = "PREHEAT_PLAIN"


def is_plain(operator: Operator) -> bool:
    """True if the user has disabled an operator's kernel.

    Raises:
        RunError: the switch names an unknown operator.
    """
    names = {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}
    if unknown := sorted(names - {*OPERATORS, "all"}):
        raise RunError(
            f"{SWITCH}: {quote_value(unknown[0])} is not an operator with a kernel; use {', '.join(OPERATORS)} or all"
        )
    return operator in names or "all" in names


@contextmanager
def name_failures(operator: Operator) -> Iterator[None]:
    """Context manager that turns compile and launch failures into errors with the operator's name; OOM passes through.

    Raises:
        RunError: the kernel failed.
    """
    try:
        yield
    except _kernel_errors() as error:
        # Recovery handles a lack of memory, but not a failed kernel.
        if is_oom(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise RunError(
            f"the CUDA kernel of {operator} failed ({type(error).__name__}: {shorten(lines[0], 200)}); "
            f"set {SWITCH}={operator} in the environment to compute it by torch's own kernels"
        ) from error


def _kernel_errors() -> tuple[type[Exception], ...]:
    """Returns what compiling and launching a kernel can raise: torch, Triton, its compilers, outdated libraries."""
    kinds = (ImportError, AttributeError, RuntimeError, OSError, subprocess.SubprocessError)
    # Only if something has imported it: without CUDA, it may not be installed.
    triton = sys.modules.get("triton")
    return kinds if triton is None else (*kinds, triton.TritonError)
