"""The formats that preheat writes, by name, and the text of their files. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from preheat.interop.axolotl import AXOLOTL
from preheat.interop.companion_writing import (
    ACCELERATE_VERSION,
    DEEPSPEED_VERSION,
    write_accelerate,
    write_deepspeed,
)
from preheat.interop.llama_factory import LLAMA_FACTORY
from preheat.interop.megatron_writing import VERSION as MEGATRON_VERSION
from preheat.interop.megatron_writing import render_script, write_megatron
from preheat.interop.ms_swift_writing import VERSION as MS_SWIFT_VERSION
from preheat.interop.ms_swift_writing import write_ms_swift
from preheat.interop.reading import Format
from preheat.interop.trl import TRL
from preheat.interop.writing import Write, Written

__all__ = ["TARGETS", "Target", "render"]


@dataclass(frozen=True)
class Target:
    """A format that preheat writes.

    Attributes:
        name: as in `--to`.
        title: the trainer's own spelling.
        version: the version whose source was read.
        write: writes a recipe as such a file.
        form: of the file.
        file: name of the file in a folder; `{name}` is the recipe's.
    """

    name: str
    title: str
    version: str
    write: Write
    form: Literal["yaml", "json", "script"] = "yaml"
    file: str = "{name}.yaml"


def _target_of(format: Format) -> Target:
    assert format.write is not None
    return Target(format.name, format.title, format.defaults.version, format.write)


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        *(_target_of(format) for format in (AXOLOTL, LLAMA_FACTORY, TRL)),
        Target("ms-swift", "ms-swift", MS_SWIFT_VERSION, write_ms_swift),
        Target("deepspeed", "DeepSpeed", DEEPSPEED_VERSION, write_deepspeed, "json", "deepspeed.json"),
        Target("accelerate", "accelerate", ACCELERATE_VERSION, write_accelerate, file="accelerate.yaml"),
        Target("megatron", "Megatron-LM", MEGATRON_VERSION, write_megatron, "script", "{name}.sh"),
    )
}
"""Formats by name."""


def render(target: Target, written: Written, head: Sequence[str] = ()) -> str:
    """Returns the text of a file.

    Args:
        head: lines of a comment at its head; JSON has none.
    """
    values = written.brief()
    if target.form == "json":
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    comment = "".join(f"# {line}\n" for line in head)
    if target.form == "script":
        return render_script(values, comment)
    # By YAML 1.1, which these trainers read: there 1e-6 is text, and 1.0e-06 a number.
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
