"""llm-compressor as a process: a folder is written, its Python runs `llm_compressor_worker.py` there, and what that wrote is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.errors import RunError
from preheat.hardware.child_processes import ended_by, tethered
from preheat.ops.quantization.grids import Groups
from preheat.run_dir import to_json

__all__ = ["Found", "python_of", "run", "unpacked"]

VARIABLE = "PREHEAT_LLM_COMPRESSOR"
_INSTALL = f"python3 -m venv lc && lc/bin/pip install llmcompressor, then --set python=lc/bin/python or {VARIABLE}=lc/bin/python"


@dataclass(frozen=True)
class Found:
    """What llm-compressor chose.

    Attributes:
        maps: by name the codes: `Groups` of four bits; (int8 [out, in], bf16 [out]) of eight.
        version: of llm-compressor.
    """

    maps: Mapping[str, Any]
    version: str


def run(model: Any, rows: Sequence[Tensor], asked: Mapping[str, Any], python: str | None) -> Found:
    """Codes for the maps that are asked for; every other weight of the model takes the value that llm-compressor left it.

    Args:
        model: of transformers, in fp32; it is not quantized here.
        rows: [1, length] tokens each.
        asked: {by, bits, maps: {name: group, or None for a scale of each output}}, as the worker takes it.
        python: of the environment; $PREHEAT_LLM_COMPRESSOR when None.

    Raises:
        RunError: there is no such environment, or the process fails.
    """
    program, why = python_of(python)
    if why:
        raise RunError(f"--method llm_compressor: {why}")
    with tempfile.TemporaryDirectory(prefix="preheat-llm-compressor-") as name:
        folder = Path(name)
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")  # the folder must not name our own attention
        model.save_pretrained(folder / "model")
        model.set_attn_implementation(attention)
        (folder / "asked.json").write_text(
            to_json({**asked, "rows": [row[0].tolist() for row in rows]}), encoding="utf-8"
        )
        worker = Path(__file__).with_name("llm_compressor_worker.py")
        # Nothing of this environment: the other has a torch and a transformers of its own.
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            tethered([program, str(worker), str(folder)]),
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it says nothing"]
            raise RunError(f"--method llm_compressor: its process {ended_by(done.returncode)}: {said[-1].strip()}")
        return _read(folder / "made", model, asked)


def python_of(stated: str | None) -> tuple[str, str]:
    """The Python of the environment, and why it cannot serve; empty when it can."""
    named = stated or os.environ.get(VARIABLE)
    if named is None:
        return "", f"python: it runs in an environment of its own, and none is named: {_INSTALL}"
    found = shutil.which(named)
    if found is None:
        return "", f"python: {named} is no program; {_INSTALL}"
    seen = subprocess.run([found, "-c", "import llmcompressor"], capture_output=True, text=True, check=False)
    return found, f"python: {named} has no llm-compressor; {_INSTALL}" if seen.returncode else ""


def _read(made: Path, model: Any, asked: Mapping[str, Any]) -> Found:
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    for file in sorted(made.glob("*.safetensors")):
        stored |= load_file(file)
    maps: dict[str, Any] = {}
    for name in asked["maps"]:
        parts = {kind: stored.pop(f"{name}.weight_{kind}", None) for kind in ("packed", "scale", "shape")}
        if parts["packed"] is None or parts["scale"] is None:
            raise RunError(f"--method llm_compressor: left {name} as it was; please report it")
        rows, inputs = model.get_submodule(name).weight.shape
        codes, scales = unpacked(parts["packed"], asked["bits"], inputs), parts["scale"].to(torch.bfloat16)
        maps[name] = (
            Groups(codes, scales, None)
            if asked["bits"] == 4
            else ((codes.to(torch.int16) - 128).to(torch.int8), scales.view(rows))
        )
    own = dict(model.named_parameters(remove_duplicate=False))  # a tied head by its own name too
    if unknown := sorted(stored.keys() - own.keys()):
        raise RunError(f"--method llm_compressor: wrote {unknown[0]}, which the model has not; please report it")
    with torch.no_grad():
        for name, weight in stored.items():
            own[name].copy_(weight)
    version = json.loads((made / "version.json").read_text(encoding="utf-8"))
    return Found(maps, str(version))


def unpacked(words: Tensor, bits: int, inputs: int) -> Tensor:
    """Codes uint8 [out, inputs], from 0 on, of int32 words [out, ceil(inputs * bits / 32)], the first in the lowest bits (pack-quantized).

    Example:
        >>> unpacked(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 8).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :inputs].to(torch.uint8)
