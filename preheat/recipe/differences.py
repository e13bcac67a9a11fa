"""Differences between two recipes, by dotted key."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from preheat.core import Recipe, Technique

__all__ = ["describe_differences", "flatten_leaves", "list_overrides"]


def flatten_leaves(values: object, at: str = "") -> dict[str, object]:
    """Returns the values of plain nested data by dotted key; an empty mapping is a value.

    Example:
        >>> flatten_leaves({"batch": {"size": 8}, "model": {}})
        {'batch.size': 8, 'model': {}}
    """
    # An empty mapping is a leaf: adding the first key to it must count as a change.
    if isinstance(values, dict) and values:
        return {
            k: v
            for key, value in values.items()
            for k, v in flatten_leaves(value, f"{at}.{key}" if at else str(key)).items()
        }
    return {at: values}


def list_overrides(before: Recipe, after: Recipe) -> list[str]:
    """Returns the differences between two recipes of the same model, as `key=value` after `--set`.

    Example:
        >>> from preheat.recipe import override, parse
        >>> plain = parse("{stop: {max_steps: 1}, techniques: {compile: {}}}")
        >>> list_overrides(plain, override(plain, "batch.size=64", "techniques.lora.rank=8"))
        ['batch.size=64', 'techniques.lora={"rank": 8}']
        >>> list_overrides(plain, override(plain, "techniques={lora: {}}"))
        ['techniques={"lora": {}}']
    """
    was, now = ({**asdict(r), "techniques": {}} for r in (before, after))
    old, new = flatten_leaves(was), flatten_leaves(now)
    overrides = [_format(key, value) for key, value in new.items() if old.get(key) != value]
    if before.techniques.keys() - after.techniques.keys():
        # No single override removes a technique: an empty one has its defaults.
        return [*overrides, _format("techniques", {name: _list_settings(t) for name, t in after.techniques.items()})]
    for name, t in after.techniques.items():
        if name not in before.techniques:
            overrides.append(_format(f"techniques.{name}", _list_settings(t)))
            continue
        settings = asdict(before.techniques[name])
        overrides += [_format(f"techniques.{name}.{k}", v) for k, v in asdict(t).items() if v != settings[k]]
    return overrides


def describe_differences(before: Recipe, after: Recipe) -> list[str]:
    """Returns the differences between two recipes for people: as `list_overrides`, and the techniques that are gone.

    Example:
        >>> from preheat.recipe import override, parse
        >>> plain = parse("{stop: {max_steps: 1}, techniques: {compile: {}}}")
        >>> describe_differences(plain, override(plain, "techniques={lora: {}}"))
        ['techniques.lora={}', 'without techniques.compile']
    """
    gone = {name: t for name, t in before.techniques.items() if name not in after.techniques}
    without = replace(after, techniques={**after.techniques, **gone})
    return [*list_overrides(before, without), *(f"without techniques.{name}" for name in gone)]


def _list_settings(technique: Technique) -> dict[str, object]:
    """Returns the settings that differ from the defaults."""
    plain = asdict(type(technique)())
    return {key: value for key, value in asdict(technique).items() if value != plain[key]}


def _format(key: str, value: object) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
