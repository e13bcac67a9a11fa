"""The precision that `mode: auto` chooses, by the device alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import Device
from preheat.engine.builder import build
from preheat.hardware.probe import probe
from preheat.techniques.mixed_precision import MixedPrecision

from ...conftest import tiny


@pytest.mark.parametrize(
    ("device", "half", "mode"),
    [
        (Device("cuda", "an H100", 80 << 30, (9, 0), at_hand=False), torch.bfloat16, "bf16"),
        (Device("cuda", "a GPU of the catalogue", 80 << 30, at_hand=False), torch.bfloat16, "bf16"),
        (Device("cuda", "a T4", 16 << 30, (7, 5), at_hand=False), torch.bfloat16, "fp16"),
        (Device("cpu", "a CPU with AVX512", 16 << 30), torch.bfloat16, "bf16"),
        (Device("cpu", "a CPU without", 16 << 30), torch.float32, "fp32"),
    ],
)
def test_auto_is_the_precision_of_the_device(
    device: Device, half: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.techniques.mixed_precision.fastest_half_dtype", lambda: half)
    settings = MixedPrecision(mode="auto", keep_fp32="norm" if mode != "fp32" else ())
    assert settings.on(device) == replace(settings, mode=mode)
    assert settings.on(device).on(device).mode == mode


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float32])
def test_a_build_with_auto_is_one_with_the_chosen_mode(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preheat.techniques.mixed_precision.fastest_half_dtype", lambda: half)
    mode = "bf16" if half == torch.bfloat16 else "fp32"
    recipe = tiny("{mixed_precision: {mode: auto}}")
    chosen = recipes.override(recipe, f"techniques.mixed_precision.mode={mode}")
    changes = [build(r, vocabulary=96, device=probe("cpu")).changes["mixed_precision"] for r in (recipe, chosen)]
    assert changes[0] == changes[1]
