"""The options of `preheat bench`, by what it measures. The fields are all options that the job reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["InferenceBenchOptions", "TechniqueBenchOptions"]


@dataclass(frozen=True, kw_only=True)
class TechniqueBenchOptions:
    """The options of a comparison of techniques in training."""

    what: tuple[str, ...]
    set: tuple[str, ...]
    ablate: bool
    techniques: str | None
    steps: int
    repeats: int
    profile: int | None
    device: Literal["cpu", "cuda"] | None
    out: Path | None
    json: bool
    from_: str | None = None


@dataclass(frozen=True, kw_only=True)
class InferenceBenchOptions:
    """The options of a measurement of text generation."""

    what: tuple[str, ...]
    set: tuple[str, ...]
    batches: str
    lengths: str
    tokens: int
    repeats: int
    variant: tuple[str, ...]
    text: str | None
    out: Path | None
    json: bool
