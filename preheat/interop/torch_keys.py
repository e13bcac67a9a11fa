"""Handlers of keys that trainers with a loop of their own share: torch's class names, and the global batch."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.interop.keys import Assumed, Entry, Outcome, Takes
from preheat.interop.settings import Settings
from preheat.sanitize import shorten

__all__ = [
    "OPTIMIZERS",
    "adapt_to_planner",
    "last_name",
    "read_betas",
    "read_optimizer_class",
    "read_warmup",
    "split_global_batch",
]

OPTIMIZERS = {
    "Adam": "adamw_torch",
    "AdamW": "adamw_torch",
    "FusedAdam": "adamw_torch",
    "PagedAdamW": "paged_adamw",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "AdamW8bit": "adamw_8bit",
    "Adam8bit": "adamw_8bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "AdamW4bit": "adamw_torch_4bit",
    "Adafactor": "adafactor",
    "Lion": "lion",
    "Muon": "muon",
}
"""Class of an optimizer -> its name among transformers' optimizers."""


def last_name(entry: Entry) -> str:
    """Returns the last part of a dotted name of a Python object, which is never imported."""
    return entry.text().rpartition(".")[2]


def read_optimizer_class(settings: Settings, entry: Entry) -> Outcome:
    """Reads an optimizer from the name of its Python class."""
    name = last_name(entry)
    if name not in OPTIMIZERS:
        return Assumed("the plan takes AdamW, with two fp32 moments per trained weight")
    settings.optimizer = OPTIMIZERS[name]
    return Takes(("optimizer",), "planned as AdamW, of the same memory" if name == "Adam" else "")


def read_betas(settings: Settings, entry: Entry) -> Outcome:
    """Reads both of Adam's betas.

    Raises:
        RecipeError: they are not two numbers of at least 0 and below 1.
    """
    pair = entry.value
    if not isinstance(pair, list) or len(pair) != 2:
        raise entry.error(f"must be two numbers, got {shorten(str(pair))}")
    first, second = (Entry(entry.path, beta, entry.where, entry.line).fraction() for beta in pair)
    settings.betas = (first, second)
    return Takes(("betas",))


def split_global_batch(settings: Settings, entries: Mapping[str, Entry], *keys: str) -> list[str]:
    """Sets the micro-batches per step that make up the stated global batch on the devices of the run, rounded down.

    Args:
        entries: the keys of the file.
        keys: those of the batch, the first of which an error names.

    Returns:
        Notes on what is planned in place of a global batch that does not divide evenly.

    Raises:
        RecipeError: the global batch is smaller than one micro-batch in each data-parallel rank.
    """
    assert settings.global_batch is not None
    each = settings.micro_batch * settings.ranks
    settings.accumulation = settings.global_batch // each
    shares = f"{settings.micro_batch} sequences in each of {settings.ranks} data-parallel ranks"
    if settings.accumulation < 1:
        blamed = next((entries[key] for key in keys if key in entries), next(iter(entries.values())))
        raise blamed.error(
            f"a global batch of {settings.global_batch} is less than {shares}; use {each}, or fewer devices"
        )
    if rest := settings.global_batch % each:
        return [
            f"the global batch of {settings.global_batch} is no multiple of {shares}: "
            f"{settings.global_batch - rest} are planned, as the trainer does"
        ]
    return []


def adapt_to_planner(settings: Settings) -> list[str]:
    """Leaves out what cannot be planned beside a split model, and returns what is planned instead."""
    notes = []
    if settings.compiled and max(settings.tensor_parallel, settings.expert_parallel) > 1:
        settings.compiled = False
        settings.fused_norm = settings.fused_gate = True
        notes.append("with tensor or expert parallelism, fused norms and gates are planned in place of the compiler")
    if settings.fp8 and settings.tensor_parallel > 1:
        settings.fp8 = False
        notes.append("with tensor parallelism, matmuls are planned in half precision: fp8 takes less time")
    return notes


def read_warmup(settings: Settings, entry: Entry) -> Outcome:
    """Reads the steps of the warmup; 0 for none."""
    if not entry.number():
        settings.warmup_ratio = 0.0
        return Takes(("warmup_ratio",))
    settings.warmup_steps = entry.whole()
    return Takes(("warmup_steps",))
