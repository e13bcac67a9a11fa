"""The options that say how another trainer's file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from preheat.errors import RecipeError
from preheat.sanitize import shorten

__all__ = ["RECOGNIZED", "ForeignOptions"]


@dataclass(frozen=True)
class ForeignOptions:
    """Options for reading another trainer's file.

    Attributes:
        format: name of its format; None: recognized by its keys.
        deepspeed: DeepSpeed's JSON beside it; None: the file that it names.
        accelerate: accelerate's YAML beside it.
        changes: path of a key of the file -> the value to read in place of the file's.
    """

    format: str | None = None
    deepspeed: Path | None = None
    accelerate: Path | None = None
    changes: Mapping[tuple[str, ...], object] = field(default_factory=dict)

    def list_typed(self) -> dict[str, str]:
        """Returns the options that were given, with their values, for a command that does the same."""
        named = {"--from": self.format, "--deepspeed": self.deepspeed, "--accelerate": self.accelerate}
        return {option: str(value) for option, value in named.items() if value is not None}

    def require_none(self, what: str | None) -> None:
        """Raises RecipeError if a file is named beside what is no other trainer's file."""
        files = {option: file for option, file in self.list_typed().items() if option != "--from"}
        for option, file in files.items():
            name = shorten(what or "the model", 200)
            raise RecipeError(f"{option}: {file}: belongs beside another trainer's file; {name} is none, leave it out")


RECOGNIZED = ForeignOptions()
"""The format is recognized by the file's keys, and no file is beside it."""
