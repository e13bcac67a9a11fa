"""The settings that a plan assumed, and the command to type after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.cli.options.plan_options import TrainingPlanOptions
    from preheat.cli.options.subject import Subject
    from preheat.core.plan import Plan

__all__ = ["list_assumed_settings", "build_next_command", "build_smaller_command"]


def list_assumed_settings(subject: Subject, result: Plan, again: Sequence[str], *, per_host: int) -> list[str]:
    """Returns the settings of a model's plan that the command does not state, with the options that do."""
    from preheat.planning.plan_request import lacks_tokenizer

    batch, count = subject.recipe.batch, result.devices
    stated = {item.partition("=")[0].strip() for item in again}

    def open_(option: str, *keys: str) -> bool:
        return not stated & {option, *keys, *(key.partition(".")[0] for key in keys)}

    rows = batch.size * batch.seq_len
    return [
        text
        for missing, text in (
            (open_("--method", "techniques.lora"), "all weights (--method)"),
            (open_("--length", "batch.seq_len"), f"{batch.seq_len:,} tokens a sequence (--length)"),
            (open_("--batch-tokens", "batch.size"), f"{rows:,} tokens a step (--batch-tokens)"),
            (count > per_host and open_("--nodes"), f"{per_host} devices a host (--nodes)"),
            # A model of the hub has a tokenizer there, which a plan does not download.
            (
                subject.checkpoint is None and lacks_tokenizer(subject.recipe),
                "a tokenizer for the model's embedding (--set data.tokenizer)",
            ),
            (not result.steps, "no end (--set stop.tokens=1e9)"),
        )
        if missing
    ]


def build_next_command(
    result: Plan, subject: Subject, options: TrainingPlanOptions, again: Sequence[str], *, per_host: int
) -> list[str]:
    """Returns the command to type after this plan; empty if there is none.

    Args:
        again: the command that was typed, without its output options.
    """
    from preheat.core.plan import Verdict
    from preheat.recipe import Data

    out, devices, searched = options.out, result.devices, bool(result.searched.candidates)
    improved = result.improvements.together if result.improvements else None
    if not result.fits and improved and improved.keys and improved.fits_safely:
        if options.write is None:
            return [*again, "--write", f"improved{Path(options.what or '').suffix}"]
        return [str(options.write) if word == options.what else word for word in again]
    if not result.fits or (searched and result.verdict is Verdict.UNSAFE):
        return build_smaller_command(result, again, searched=searched)
    if out is None and (searched or options.what is None):
        return [*again, "--out", "recipe.yaml"]
    written = options.write if improved else None  # another trainer's file with its improvements
    recipe = str(out or written or options.what)
    # The written recipe contains the settings already; a model's recipe lacks the data.
    typed = [*options.foreign.list_typed().items(), *(("--set", item) for item in options.set)]
    settings = [] if out is not None else [part for pair in typed for part in pair]
    if out is not None and not subject.from_user and subject.recipe.data.source == Data().source:
        settings += ["--set", "data.source=DATA.jsonl"]
    gpu = _find_option_value(again, "--gpu")
    if devices > 1 and gpu is not None:
        hosts = max(options.nodes, math.ceil(devices / per_host))
        return [
            *("preheat", "launch", recipe, *settings, "--scheduler", "slurm", "--nodes", str(hosts)),
            *("--gpus-per-node", str(per_host), "-o", "job.sbatch"),
        ]
    # Trained elsewhere: the last check before it.
    last = ["--dry-run", "--gpu", gpu] if gpu is not None else []
    return ["preheat", "train", recipe, *settings, *last]


def build_smaller_command(result: Plan, again: Sequence[str], *, searched: bool) -> list[str]:
    """Returns the command that plans the smallest change that may fit."""

    def append_option(*options: str) -> list[str]:
        arguments = list(again)
        for option, value in zip(options[::2], options[1::2], strict=True):
            if option in arguments and option != "--set":
                arguments[arguments.index(option) + 1] = value
            else:
                arguments += [option, value]
        return arguments

    if instead := [a.options for a in result.alternatives if a.options]:
        return append_option(*instead[0])
    if result.searched.interrupted:
        return list(again)
    if not searched:
        return append_option("--aim", "fastest")
    # The numerics first: they cost no hardware.
    if _find_option_value(again, "--allow") != "different":
        return append_option("--allow", "different")
    if _find_option_value(again, "--gpu") is None:
        return []
    if nodes := _find_option_value(again, "--nodes"):
        return append_option("--nodes", str(2 * int(nodes)))
    return append_option("--count", str(2 * result.devices))


def _find_option_value(command: Sequence[str], option: str) -> str | None:
    """Returns the value of an option of a command; None if it was not typed."""
    return command[command.index(option) + 1] if option in command else None
