"""Which operators run as one kernel on CUDA, how to switch one off, and whose failure is told.

`PREHEAT_PLAIN=nf4_values,half_adamw` lets operators run by torch's own kernels instead; `all` does so for every one. Nothing else
falls back: a kernel that fails ends the run with the operator's name and this switch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from preheat.errors import RunError
from preheat.hardware.oom import is_oom
from preheat.sanitize import quoted, shorten

__all__ = ["OPERATORS", "Operator", "is_plain", "named_failures"]

Operator = Literal["nf4_values", "half_adamw", "int8_product", "int4_product"]
OPERATORS: tuple[Operator, ...] = ("nf4_values", "half_adamw", "int8_product", "int4_product")
SWITCH = "PREHEAT_PLAIN"


def is_plain(operator: Operator) -> bool:
    """Whether the user has switched an operator's kernel off.

    Raises:
        RunError: the switch names an operator that there is not.
    """
    names = {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}
    if unknown := sorted(names - {*OPERATORS, "all"}):
        raise RunError(
            f"{SWITCH}: {quoted(unknown[0])} is no operator with a kernel; use {', '.join(OPERATORS)} or all"
        )
    return operator in names or "all" in names


@contextmanager
def named_failures(operator: Operator) -> Iterator[None]:
    """Within, the failure of a kernel to compile or to start names the operator and the switch; out of memory passes as it is.

    Raises:
        RunError: it failed.
    """
    try:
        yield
    except _failures() as error:
        if is_oom(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise RunError(
            f"the CUDA kernel of {operator} failed ({type(error).__name__}: {shorten(lines[0], 200)}); "
            f"set {SWITCH}={operator} in the environment to compute it by torch's own kernels"
        ) from error


def _failures() -> tuple[type[Exception], ...]:
    """What compiling and starting a kernel raises: torch, Triton, the compilers that it calls, and libraries that are too old."""
    kinds = (ImportError, AttributeError, RuntimeError, OSError, subprocess.SubprocessError)
    triton = sys.modules.get("triton")
    return kinds if triton is None else (*kinds, triton.TritonError)
