"""Provenance of a run: command, machine and versions."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from preheat.core import Device
from preheat.core.run_records import Environment, MachineRecord
from preheat.sanitize import mask_secrets

__all__ = ["compute_digest", "record_environment", "list_versions"]


def compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_versions() -> dict[str, str]:
    """Returns the versions that must be equal on all hosts for equal losses, and a digest of preheat's source."""
    import importlib.metadata as metadata

    package = Path(__file__).parents[1]
    # The version is not enough: two hosts may have different working copies of the same version.
    source = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()[:16]
    return {
        "preheat's source": source,
        **{f"version of {name}": metadata.version(name) for name in ("torch", "transformers")},
    }


def record_environment(device: Device, threads: int, processes: int, repeats: str) -> Environment:
    """Returns the record of what this session runs on; see `Environment` for `repeats`."""
    import importlib.metadata as metadata

    from preheat._version import __version__

    packages = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "peft", "numpy")
    segments = "expandable" if device.expandable else "fixed"
    return Environment(
        command=mask_secrets(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        device=device.kind,
        segments=segments if device.kind == "cuda" else None,
        threads=threads,
        machine=MachineRecord(
            device=device.name,
            memory_gib=round(device.memory / 2**30, 2),
            cores=os.cpu_count(),
            system=platform.platform(),
        ),
        versions={
            "python": platform.python_version(),
            "preheat": __version__,
            **{name: metadata.version(name) for name in packages},
        },
        processes=processes,
        repeats=repeats,
    )
