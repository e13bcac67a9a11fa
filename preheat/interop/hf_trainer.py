"""transformers' Trainer: TrainingArguments as JSON or in a script, and the files of run_clm.py: one table of keys.

Read from transformers 5.23 (training_args) and examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preheat.interop.hf_keys import find_source, read_of_source
from preheat.interop.keys import Entry, NoEffect, Outcome, Takes, assume, ignore, switch, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.trainer_defaults import TRANSFORMERS as DEFAULTS
from preheat.interop.training_arguments import (
    ARGUMENTS,
    CALLS,
    RENAMED,
    RUN_CLM,
    VARIANTS,
    finish_run,
    read_dtype,
    read_model_name,
    read_path,
)

__all__ = ["HF_TRAINER"]


def _read_train_file(settings: Settings, entry: Entry) -> Outcome:
    settings.sources = [{"source": entry.text(), "layout": "text"}]
    return Takes(("sources", "sources.layout"))


def _read_config_name(settings: Settings, entry: Entry) -> Outcome:
    if settings.model is None:
        settings.model, settings.random_weights = entry.text(), True
        return Takes(("model", "random_weights"))
    return NoEffect("the model's own configuration is read")


def _read_limit(settings: Settings, entry: Entry) -> Outcome:
    find_source(settings, entry)["limit"] = entry.whole()
    return Takes(("sources.limit",))


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of run_clm.py and of a script with Trainer."""
    notes = finish_run(settings, entries)
    calls = {"TrainingArguments", "Trainer"} & {entry.path[0] for entry in entries.values()}
    if (RUN_CLM & entries.keys() or "dataset_name" in entries) and not calls:
        if not {"validation_split_percentage", "validation_file"} & entries.keys():
            settings.validation = 0.05
            notes.append("run_clm.py holds 5 % of the rows out, unless the data has a split for that")
        notes.append("run_clm.py joins texts without the tokenizer's end token, which rows have here")
    if RUN_CLM & entries.keys() or "dataset_name" in entries:
        settings.packing = True  # run_clm.py groups texts into blocks
        for source in settings.sources:
            source.setdefault("layout", "text")
    if "block_size" not in entries:
        notes.append(
            f"the length of a sequence is not stated: {settings.length:,} tokens are planned (--set batch.seq_len=N)"
        )
    return notes


HF_TRAINER = Format(
    name="transformers",
    title="transformers' Trainer",
    requires=frozenset(),
    unique=frozenset(
        {"per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "TrainingArguments", "Trainer"}
        | RUN_CLM
    ),
    without=frozenset({"model", "base_model"}),
    general=True,
    defaults=DEFAULTS,
    variants=VARIANTS,
    finish=_finish,
    renamed=RENAMED | {f"TrainingArguments.{old}": f"TrainingArguments.{new}" for old, new in RENAMED.items()},
    table={
        **ARGUMENTS,
        **CALLS,
        # The arguments of run_clm.py.
        "model_name_or_path": read_model_name,
        "config_name": _read_config_name,
        "config_overrides": assume("the model's own configuration is planned"),
        "tokenizer_name": take("tokenizer", Entry.text),
        "dtype": read_dtype,
        "torch_dtype": read_dtype,
        "train_file": _read_train_file,
        "dataset_name": read_path,
        "dataset_config_name": read_of_source("subset"),
        "streaming": switch("streaming"),
        "block_size": take("length", Entry.whole),
        "validation_split_percentage": take("validation", lambda entry: entry.number() / 100),
        "validation_file": assume("nothing is held out"),
        "max_train_samples": _read_limit,
        **dict.fromkeys(("model_type", "keep_linebreaks", "model_revision", "token"), ignore("loading")),
        "max_eval_samples": ignore("evaluation"),
    },
)
