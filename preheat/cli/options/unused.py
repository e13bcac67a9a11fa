"""Rejects or reports options and recipe keys that a command ignores in its current mode.

`MODES` lists for each command its modes: the condition, and the options and keys that are then unread. A command with
several jobs has a class of options per job: a job reads the fields of its class, and no other options. `Command` checks
the command line before the command runs; `note_unread` checks a loaded recipe. Keys that are unread because of other
keys of the recipe, whatever the command, are in `preheat.recipe.unused_keys`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer
import typer.core

from preheat.cli.options.bench_options import InferenceBenchOptions, TechniqueBenchOptions
from preheat.cli.options.plan_options import ServingPlanOptions
from preheat.cli.views.output import say
from preheat.core.json_types import JsonObject
from preheat.errors import RecipeError
from preheat.recipe import Recipe
from preheat.recipe.unused_keys import non_default_keys
from preheat.sanitize import quote_value
from preheat.storage import is_url

__all__ = ["FOR_ANOTHER_DEVICE", "MODES", "SERVING", "Command", "Mode", "note_unread"]

# Options that no job of a command refuses, so that a script may pass them always.
_OF_ALL_JOBS = ("json", "verbose", "schema", "trust_remote_code")


@dataclass(frozen=True)
class Mode:
    """A mode of a command, with the options and recipe keys that it ignores.

    Attributes:
        when: predicate on the command's parameters: true in this mode.
        unread: names of the parameters that the mode ignores.
        why: reason, appended to the message.
        read: names of the parameters that the mode reads: it ignores all others. None: those in `unread`.
        keys: recipe keys that the mode reads; a trailing dot includes all keys below; None: all but `unread_keys`.
        unread_keys: recipe keys that the mode ignores.
        named: warn about an ignored `--set` instead of raising, since users often pass one `--set` to several commands.
    """

    when: Callable[[JsonObject], object]
    unread: Collection[str]
    why: str
    read: Collection[str] | None = None
    keys: Sequence[str] | None = None
    unread_keys: Collection[str] = ()
    named: bool = False

    def ignores(self, parameter: str) -> bool:
        """Returns True if this mode ignores the parameter of the command."""
        if self.read is None:
            return parameter in self.unread
        return parameter not in self.read and parameter not in _OF_ALL_JOBS

    def reads(self, key: str) -> bool:
        """Returns True if this mode reads the recipe key."""
        return (self.keys is None or _is_one_of(key, self.keys)) and not _is_one_of(key, self.unread_keys)

    @property
    def readable(self) -> str:
        """Returns a description of the keys that the mode reads, for messages."""
        named = [
            f"{key}*" if key.endswith(".") else key for key in self.keys or () if f"{key}." not in (self.keys or ())
        ]
        return f"it reads {', '.join(named)}" if named else "leave it out"


def _is_one_of(key: str, known: Collection[str]) -> bool:
    # `model.` covers `model.path`, and `model` itself.
    return any(key == k or (k.endswith(".") and f"{key}.".startswith(k)) for k in known)


# Keys by what they describe; modes below read or ignore them as groups.
_OF_THIS_MACHINE = ("hardware.device", "hardware.threads")
_SIZE = ("name", "model.", "model", "batch.seq_len", "data.vocab_size")
_OF_DATA = ("name", "seed", "model.", "data.", "batch.seq_len", "techniques.")


def _collect_names(options: type) -> set[str]:
    return {field.name for field in fields(options)}


SERVING = Mode(
    lambda p: p["inference"],
    (),
    "--inference plans serving, not training",
    read={"inference", *_collect_names(ServingPlanOptions)},
    keys=(*_SIZE, *_OF_THIS_MACHINE, "hardware.memory"),
)
FOR_ANOTHER_DEVICE = Mode(
    lambda p: p["gpu"] is not None,
    (),
    "--gpu plans for another device",
    unread_keys=_OF_THIS_MACHINE,
)

MODES: Mapping[str, Sequence[Mode]] = {
    "plan": (
        Mode(
            lambda p: p["compute_budget"] is not None,
            (),
            "--compute-budget computes the best size of a model, whatever the model and the devices",
            read={"compute_budget"},
        ),
        SERVING,
        Mode(
            lambda p: not p["inference"],
            ("batch",),
            "it is for --inference; the batch of a training step is --batch-tokens, or batch.size of a recipe",
        ),
        FOR_ANOTHER_DEVICE,
    ),
    "train": (
        FOR_ANOTHER_DEVICE,
        Mode(lambda p: p["dry_run"], ("force", "auto_resume", "restarts", "profile"), "--dry-run trains nothing"),
        Mode(
            lambda p: p["nproc"] < 2,
            ("restarts",),
            "one process ends with its run; add --nproc 2 or more, or start it again with --resume",
        ),
        Mode(
            lambda p: p["nproc"] > 1 and "RANK" in os.environ,
            ("nproc", "restarts"),
            "torchrun has started the processes already",
        ),
        Mode(lambda p: p["resume"], ("auto_resume",), "--resume includes it"),
    ),
    "bench": (
        Mode(
            lambda p: p["inference"],
            (),
            "--inference measures generation, and this is for recipes",
            read={"inference", *_collect_names(InferenceBenchOptions)},
        ),
        Mode(
            lambda p: not p["inference"],
            (),
            "techniques are compared in training; add --inference to measure generation",
            read=_collect_names(TechniqueBenchOptions),
        ),
        Mode(
            lambda p: not p["inference"],
            (),
            "a bench measures --steps steps at one learning rate, and writes nothing",
            unread_keys=("stop.", "schedule.", "checkpoint.", "sample."),
            named=True,
        ),
    ),
    "data": (Mode(lambda p: True, (), "this shows data, and trains nothing", keys=_OF_DATA, named=True),),
    "eval": (
        Mode(
            lambda p: p["tasks"] and not _has_text(p),
            ("rows",),
            "no text is named, and it is for texts; add --data, or use --limit for tasks",
        ),
        Mode(
            lambda p: not any(_has_base(Path(m)) for m in p["model"]),
            ("base",),
            "it is for adapters, and none is named",
        ),
        Mode(lambda p: not p["tasks"], ("limit", "samples"), "no task is named; add --tasks"),
    ),
    "generate": (
        Mode(lambda p: p["chat"] is False, ("template",), "it is for chats, and --no-chat turns them off"),
        Mode(
            lambda p: not p["temperature"] and not _is_set(p, "temperature"),
            ("seed",),
            "temperature 0 does not sample; set a temperature, e.g. 0.8",
        ),
    ),
    "chat": (
        Mode(
            lambda p: not p["temperature"] and not _is_set(p, "temperature"),
            ("seed",),
            "temperature 0 does not sample; set a temperature, e.g. 0.8",
        ),
    ),
    "compress": (
        Mode(
            lambda p: p["recipe"] is not None,
            ("method", "settings", "bits", "rows", "length", "within"),
            "--recipe defines the steps itself; copy it (preheat init) and edit the copy",
        ),
        Mode(
            lambda p: _is_classifier(p["model"]),
            ("method", "settings", "bits", "rows", "length", "within", "measured"),
            "MODEL is an image classifier, which goes through a chain of steps (--recipe edge-vision --data IMAGES)",
        ),
    ),
    "doctor": (
        Mode(
            lambda p: p["what"] == "oom", (), "oom reads the folder of a run, and changes nothing", read={"what", "run"}
        ),
        Mode(lambda p: not p["fix"], ("yes",), "it answers the questions of --fix"),
    ),
    "nettest": (
        Mode(lambda p: p["nproc"] is None, ("port",), "torchrun has its own rendezvous; --port goes with --nproc"),
    ),
    "try": (
        Mode(
            lambda p: not _is_search(p, "gradient_accumulation", "integration"),
            ("accumulation_steps",),
            "it is for gradient_accumulation and integration",
        ),
        Mode(
            lambda p: not _is_search(p, "mixed_precision", "integration"),
            ("precision",),
            "it is for mixed_precision and integration",
        ),
        Mode(lambda p: not _is_search(p, "zero"), ("zero_stage", "cpu_offload"), "it is for zero"),
    ),
}


def _is_set(parameters: JsonObject, key: str) -> bool:
    return any(item.partition("=")[0].strip() == f"sample.{key}" for item in parameters["set"] or ())


def _is_search(parameters: JsonObject, *techniques: str) -> bool:
    return parameters["benchmark"] or parameters["technique"].replace("-", "_") in techniques


def _has_text(parameters: JsonObject) -> bool:
    # Of a URL, it is known only after its download.
    runs = any(is_url(model) or (Path(model) / "recipe.yaml").is_file() for model in parameters["model"])
    return bool(parameters["data"] or parameters["forgetting"] or runs)


# A path that does not exist counts too: another check reports it better.
def _has_base(model: Path) -> bool:
    return any((model / name).is_file() for name in ("adapter_config.json", "recipe.yaml")) or not model.is_dir()


def _is_classifier(model: str) -> bool:
    from preheat.models.image_classifiers import is_classifier

    return is_classifier(Path(model))


class Command(typer.core.TyperCommand):
    """A typer command that rejects or reports options that its mode ignores."""

    def invoke(self, context: Any) -> object:
        for mode in MODES.get(self.name or "", ()):
            if not mode.when(context.params):
                continue
            for parameter in self.params:
                source = context.get_parameter_source(parameter.name)
                # Only what the user typed: a default that nothing reads is no mistake.
                if mode.ignores(parameter.name) and source is not None and source.name == "COMMANDLINE":
                    value = context.params[parameter.name]
                    shown = (
                        parameter.metavar or parameter.name
                        if parameter.param_type_name == "argument"
                        else parameter.opts[0]
                    )
                    # Of a repeatable option, the first value.
                    value = value[0] if isinstance(value, list | tuple) and value else value
                    shown_value = "" if isinstance(value, bool) else f" {quote_value(value, 40)}"
                    raise RecipeError(f"{shown}{shown_value}: would change nothing: {mode.why}; leave one of them out")
            # An override on the command line was typed for this command, so it is refused like an option.
            _refuse_keys(context.params.get("set") or (), mode)
        return super().invoke(context)


def _refuse_keys(overrides: Sequence[str], mode: Mode) -> None:
    for item in overrides:
        if not mode.reads(item.partition("=")[0].strip()):
            message = f"--set {quote_value(item, 60)}: would change nothing: {mode.why}; {mode.readable}"
            if not mode.named:
                raise RecipeError(message)
            say(f"warning: {message}", error=True)


def note_unread(modes: Sequence[Mode], recipe: Recipe, *, besides: Collection[str] = ()) -> None:
    """Prints one note per mode with the recipe keys that it ignores.

    It does not raise: the recipe was written for training and may set more than this command reads.

    Args:
        besides: keys to skip, since they do not come from the recipe.
    """
    for mode in modes:
        unread = [key for key in non_default_keys(recipe) if not mode.reads(key) and key not in besides]
        parts = [key.partition(".")[0] for key in unread]
        # Several keys of one section are listed as `section.*`.
        names = [key if parts.count(part) == 1 else f"{part}.*" for part, key in zip(parts, unread, strict=True)]
        if names:
            say(f"note: {mode.why}: nothing reads {', '.join(dict.fromkeys(names))} of the recipe", error=True)
