"""YAML 1.1 output for Kubernetes manifests: quotes `on` and keeps multi-line strings readable."""

from __future__ import annotations

import yaml

__all__ = ["dump_manifest"]


class _Dumper(yaml.SafeDumper):
    # Anchors and aliases are valid YAML, but unreadable in a manifest that people edit.
    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def dump_manifest(value: object) -> str:
    """Returns a value as YAML.

    >>> print(dump_manifest({"name": "on", "run": "a\\nb\\n"}), end="")
    name: 'on'
    run: |
      a
      b
    """
    # The order of keys is that of the source, and a wide line keeps commands in one line.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
