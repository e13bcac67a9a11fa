"""Runs llm-compressor in its own Python environment, as a subprocess.

The model is written to a folder, `llm_compressor_worker.py` quantizes it there, and the result is read back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
from torch import Tensor

from preheat.errors import RunError
from preheat.files import to_json
from preheat.hardware.child_processes import describe_exit, tie_to_parent
from preheat.ops.quantization.grids import Groups
from preheat.ops.quantization.stored import unpack_codes as unpack_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["QuantizedWeights", "find_python", "run", "unpack_codes"]

VARIABLE = "PREHEAT_LLM_COMPRESSOR"
_INSTALL = (
    "python3 -m venv lc && lc/bin/pip install llmcompressor, then --set python=lc/bin/python or "
    f"{VARIABLE}=lc/bin/python"
)


@dataclass(frozen=True)
class QuantizedWeights:
    """Quantized weights from llm-compressor.

    Attributes:
        maps: codes by name of the linear map: `Groups` for four bits, (int8 [out, in], bf16 [out]) for eight.
        version: of llm-compressor.
    """

    maps: Mapping[str, Groups | tuple[Tensor, Tensor]]
    version: str


class QuantizationRequest(TypedDict):
    """Settings of a quantization: algorithm, bits, and {map: group size, or None for one scale per output}."""

    by: Literal["gptq", "awq", "awq_gptq", "nearest"]
    bits: Literal[4, 8]
    maps: dict[str, int | None]


def run(
    model: PreTrainedModel, rows: Sequence[Tensor], request: QuantizationRequest, python: str | None
) -> QuantizedWeights:
    """Returns the codes of the requested linear maps; copies llm-compressor's values into all other weights, in place.

    Args:
        model: of transformers, in fp32; it is not quantized here.
        rows: [1, length] tokens each.
        request: as the worker reads it.
        python: of the environment; None: $PREHEAT_LLM_COMPRESSOR.

    Raises:
        RunError: there is no such environment, or the process fails.
    """
    program, why = find_python(python)
    if why:
        raise RunError(f"--method llm_compressor: {why}")
    with tempfile.TemporaryDirectory(prefix="preheat-llm-compressor-") as name:
        folder = Path(name)
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")  # the folder must not name our own attention
        model.save_pretrained(folder / "model")
        # The caller's model is unchanged.
        model.set_attn_implementation(attention)
        # Token ids instead of text: the worker needs no tokenizer of ours.
        (folder / "asked.json").write_text(
            to_json({**request, "rows": [row[0].tolist() for row in rows]}), encoding="utf-8"
        )
        worker = Path(__file__).with_name("llm_compressor_worker.py")
        # The other environment has its own torch and transformers, so ours must not leak into its path.
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        process = subprocess.run(
            tie_to_parent([program, str(worker), str(folder)]),
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )
        # Python's last line is the exception; the lines before are its traceback.
        if process.returncode:
            errors = [line for line in process.stderr.strip().splitlines() if line.strip()] or ["no output"]
            raise RunError(
                f"--method llm_compressor: its process {describe_exit(process.returncode)}: {errors[-1].strip()}"
            )
        return _read(folder / "made", model, request)


def find_python(python: str | None) -> tuple[str, str]:
    """Returns the environment's Python, and why it is unusable ('' if it is usable)."""
    named = python or os.environ.get(VARIABLE)
    if named is None:
        return "", f"python: it runs in an environment of its own, and none is named: {_INSTALL}"
    executable = shutil.which(named)
    if executable is None:
        return "", f"python: {named} is not a program; {_INSTALL}"
    # Asks that Python itself, because its packages are not on our path.
    check = subprocess.run([executable, "-c", "import llmcompressor"], capture_output=True, text=True, check=False)
    return executable, f"python: {named} has no llm-compressor; {_INSTALL}" if check.returncode else ""


def _read(folder: Path, model: PreTrainedModel, request: QuantizationRequest) -> QuantizedWeights:
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    maps: dict[str, Groups | tuple[Tensor, Tensor]] = {}
    for name in request["maps"]:
        # Popped, so that `stored` ends with the weights that are not quantized.
        parts = {kind: stored.pop(f"{name}.weight_{kind}", None) for kind in ("packed", "scale", "shape")}
        if parts["packed"] is None or parts["scale"] is None:
            raise RunError(f"--method llm_compressor: left {name} unchanged; please report it")
        rows, inputs = model.get_submodule(name).weight.shape
        codes, scales = unpack_codes(parts["packed"], request["bits"], inputs), parts["scale"].to(torch.bfloat16)
        # Eight-bit codes are stored with an offset of 128.
        maps[name] = (
            Groups(codes, scales, None)
            if request["bits"] == 4
            else ((codes.to(torch.int16) - 128).to(torch.int8), scales.view(rows))
        )
    own = dict(model.named_parameters(remove_duplicate=False))  # includes a tied head under its own name
    if unknown := sorted(stored.keys() - own.keys()):
        raise RunError(f"--method llm_compressor: wrote {unknown[0]}, which the model does not have; please report it")
    # AWQ moves its factors into other weights, so these changed too.
    with torch.no_grad():
        for name, weight in stored.items():
            own[name].copy_(weight)
    version = json.loads((folder / "version.json").read_text(encoding="utf-8"))
    return QuantizedWeights(maps, str(version))


def unpack_codes(packed: Tensor, bits: int, inputs: int) -> Tensor:
    """Unpacks codes uint8 [out, inputs] from int32 [out, ceil(inputs * bits / 32)], lowest bits first (pack-quantized).

    Example:
        >>> unpack_codes(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 8).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    # A word's bytes begin with its lowest.
    return unpack_bytes(packed.contiguous().view(torch.uint8), bits, inputs)
