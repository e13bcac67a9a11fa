"""Options and keys that the mode at hand does not read are refused: they would change nothing, and nobody would notice.

A mode is a row of `MODES`: when a command is in it, and which options it then leaves unread. `Command` looks at what stands on the
command line before the command begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
import typer.core

from preheat.errors import RecipeError
from preheat.text import quoted

__all__ = ["MODES", "Command", "Mode"]


@dataclass(frozen=True)
class Mode:
    """Options that a command leaves unread in one of its modes.

    Attributes:
        when: whether the command is in it, by its parameters.
        unread: the parameters that it does not read.
        why: what the mode is, as the message ends.
        keys: of recipes that `--set` may name in this mode, a dot at the end for all below; None: any.
        unread_keys: of recipes that `--set` may not name in this mode.
    """

    when: Callable[[Mapping[str, Any]], Any]
    unread: Collection[str]
    why: str
    keys: Sequence[str] | None = None
    unread_keys: Collection[str] = ()


_OF_THIS_MACHINE = ("hardware.device", "hardware.threads")
_SIZE = ("name", "model.", "model", "batch.length", "data.vocabulary")

MODES: Mapping[str, Sequence[Mode]] = {
    "plan": (
        Mode(
            lambda p: p["compute_budget"] is not None,
            ("what", "set", "gpu", "count", "nodes", "length", "batch_tokens", "method", "aim", "allow", "price", "inference", "out", "html"),
            "--compute-budget says how large a model is worth training, whatever the model and the devices",
        ),
        Mode(
            lambda p: p["inference"],
            ("batch_tokens", "method", "aim", "allow", "price", "out", "html"),
            "--inference plans serving, not training",
            (*_SIZE, *_OF_THIS_MACHINE, "hardware.memory"),
        ),
        Mode(
            lambda p: p["gpu"] is not None,
            (),
            "--gpu plans for another device",
            unread_keys=_OF_THIS_MACHINE,
        ),
    ),
    "train": (
        Mode(
            lambda p: p["gpu"] is not None,
            (),
            "--gpu plans for another device",
            unread_keys=_OF_THIS_MACHINE,
        ),
        Mode(lambda p: p["dry_run"], ("force", "auto_resume", "restarts"), "--dry-run trains nothing"),
        Mode(lambda p: p["nproc"] < 2, ("restarts",), "one process ends with its run; add --nproc 2 or more, or start it again with --resume"),
        Mode(lambda p: p["nproc"] > 1 and "RANK" in os.environ, ("nproc", "restarts"), "torchrun has started the processes already"),
        Mode(lambda p: p["resume"], ("auto_resume",), "--resume says so already"),
    ),
    "bench": (
        Mode(lambda p: p["inference"], ("ablate", "techniques", "steps", "device"), "--inference measures models as they write, and this is for recipes"),
        Mode(lambda p: not p["inference"], ("batches", "lengths", "tokens", "variant", "text"), "techniques are compared in training; add --inference to measure how models write"),
    ),
    "eval": (
        Mode(lambda p: not p["tasks"], ("limit", "samples"), "no task is named; add --tasks"),
    ),
    "generate": (
        Mode(lambda p: not p["temperature"] and not _sets(p, "temperature"), ("seed",), "temperature 0 draws nothing; set a temperature, e.g. 0.8"),
    ),
    "chat": (
        Mode(lambda p: not p["temperature"] and not _sets(p, "temperature"), ("seed",), "temperature 0 draws nothing; set a temperature, e.g. 0.8"),
    ),
    "compress": (
        Mode(lambda p: p["recipe"] is not None, ("rows", "length", "within"), "--recipe says itself what is done; copy it (preheat init) and edit the copy"),
    ),
    "nettest": (
        Mode(lambda p: p["nproc"] is None, ("port",), "torchrun has its own rendezvous; --port goes with --nproc"),
    ),
    "try": (
        Mode(lambda p: not _tries(p, "gradient_accumulation", "integration"), ("accumulation_steps",), "it is for gradient_accumulation and integration"),
        Mode(lambda p: not _tries(p, "mixed_precision", "integration"), ("precision",), "it is for mixed_precision and integration"),
        Mode(lambda p: not _tries(p, "zero"), ("zero_stage", "cpu_offload"), "it is for zero"),
    ),
}  # fmt: skip


def _sets(parameters: Mapping[str, Any], key: str) -> bool:
    return any(item.partition("=")[0].strip() == f"sample.{key}" for item in parameters["set"] or ())


def _tries(parameters: Mapping[str, Any], *techniques: str) -> bool:
    return parameters["benchmark"] or parameters["technique"].replace("-", "_") in techniques


class Command(typer.core.TyperCommand):
    """A command that refuses the options that its mode leaves unread."""

    def invoke(self, context: Any) -> Any:
        for mode in MODES.get(self.name or "", ()):
            if not mode.when(context.params):
                continue
            for parameter in self.params:
                source = context.get_parameter_source(parameter.name)
                if parameter.name in mode.unread and source is not None and source.name == "COMMANDLINE":
                    value = context.params[parameter.name]
                    shown = (
                        parameter.metavar or parameter.name if parameter.param_type_name == "argument" else parameter.opts[0]
                    )
                    said = "" if isinstance(value, bool) else f" {quoted(value, 40)}"
                    raise RecipeError(f"{shown}{said}: would change nothing: {mode.why}; leave one of them out")
            if mode.keys is not None or mode.unread_keys:
                _refuse_keys(context.params["set"] or (), mode)
        return super().invoke(context)


def _refuse_keys(overrides: Sequence[str], mode: Mode) -> None:
    for item in overrides:
        key = item.partition("=")[0].strip()
        if mode.keys is not None and not any(key == k or (k.endswith(".") and key.startswith(k)) for k in mode.keys):
            readable = ", ".join(f"{k}*" if k.endswith(".") else k for k in mode.keys if k != "model")
            raise RecipeError(f"--set {quoted(item, 60)}: would change nothing: {mode.why}; it reads {readable}")
        if key in mode.unread_keys:
            raise RecipeError(f"--set {quoted(item, 60)}: would change nothing: {mode.why}; leave it out")
