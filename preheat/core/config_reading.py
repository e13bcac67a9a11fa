"""The reading of another trainer's configuration: each key is taken over, without effect, or not understood."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AssumedDefault", "ConfigReading", "KeyNotUnderstood", "KeyTaken", "KeyWithoutEffect"]


@dataclass(frozen=True, kw_only=True)
class _Key:
    key: str
    value: str
    line: int
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class KeyTaken(_Key):
    """A key that the recipe has too.

    Attributes:
        key: dotted, as in the file.
        value: as text.
        line: line of the file.
        file: the file beside the configuration that has the key, or the notebook and the cell; empty: the
            configuration itself.
        ours: the keys of the recipe that follow from it, with their values; empty if it switches something off.
        note: how the recipe differs from it; empty if it does not.
    """

    ours: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class KeyWithoutEffect(_Key):
    """A key that changes neither memory, speed nor loss.

    Attributes:
        key: dotted, as in the file.
        value: as text.
        line: line of the file.
        file: the file beside the configuration that has the key, or the notebook and the cell; empty: the
            configuration itself.
        why: what it is for.
    """

    why: str


@dataclass(frozen=True, kw_only=True)
class KeyNotUnderstood(_Key):
    """A key that the recipe cannot express.

    Attributes:
        key: dotted, as in the file.
        value: as text.
        line: line of the file.
        file: the file beside the configuration that has the key, or the notebook and the cell; empty: the
            configuration itself.
        assumed: what the plan assumes instead.
    """

    assumed: str


@dataclass(frozen=True, kw_only=True)
class AssumedDefault:
    """A default of the trainer that the file does not state.

    Attributes:
        ours: the keys of the recipe that follow from it, with their values; empty if nothing is added.
        what: what the trainer does.
        source: the file of the trainer that says so.
    """

    ours: tuple[str, ...]
    what: str
    source: str


@dataclass(frozen=True, kw_only=True)
class ConfigReading:
    """The reading of another trainer's configuration. Every key of the file is in exactly one of the three lists.

    Attributes:
        trainer: the trainer, as in `--from`.
        version: the version of the trainer that the defaults are of.
        file: the file that was read.
        taken: keys that the recipe has too.
        without_effect: keys that change neither memory, speed nor loss.
        not_understood: keys that the recipe cannot express, with what the plan assumes instead.
        defaults: defaults of the trainer that the file does not state.
        assumptions: what the plan assumes of the data and the run, a sentence each.
    """

    trainer: str
    version: str
    file: str
    taken: tuple[KeyTaken, ...]
    without_effect: tuple[KeyWithoutEffect, ...]
    not_understood: tuple[KeyNotUnderstood, ...]
    defaults: tuple[AssumedDefault, ...] = ()
    assumptions: tuple[str, ...] = ()
