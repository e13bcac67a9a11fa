"""TF32 for fp32 products on a GPU: torch's switch and when it goes back, who may ask, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from preheat.core import Device, Tag
from preheat.engine.builder import build, build_context
from preheat.errors import RecipeError
from preheat.hardware.catalogue import find_accelerator
from preheat.hardware.tf32 import allow_tf32, has_tf32
from preheat.models import hf
from preheat.planning.dry_run import observe
from preheat.planning.plan import describe
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.techniques.mixed_precision import MixedPrecision

from ...conftest import DEVICE, tiny

PRODUCTS: Any = torch.backends.cuda.matmul
FP32 = "{mixed_precision: {mode: fp32}}"
TF32 = "{mixed_precision: {mode: fp32, tf32: true}}"


class Owner:
    pass


def test_the_switch_goes_back_when_the_last_who_asked_is_gone() -> None:
    before = PRODUCTS.fp32_precision
    assert before != "tf32"
    first, second = Owner(), Owner()
    end = allow_tf32(first)
    allow_tf32(second)
    # Both of torch's names say so: its compiler asks by the older one, which raises if only the newer was set.
    assert (PRODUCTS.fp32_precision, PRODUCTS.allow_tf32, torch.get_float32_matmul_precision()) == (
        "tf32",
        True,
        "high",
    )
    assert torch.backends.mkldnn.matmul.fp32_precision != "tf32", "products on the CPU stay as they are"
    del first
    assert PRODUCTS.fp32_precision == "tf32"
    del second
    assert (PRODUCTS.fp32_precision, PRODUCTS.allow_tf32, torch.get_float32_matmul_precision()) == (
        before,
        False,
        "highest",
    )
    end()
    assert PRODUCTS.fp32_precision == before


def test_whoever_turned_it_on_keeps_it() -> None:
    before = PRODUCTS.fp32_precision
    PRODUCTS.allow_tf32 = True
    try:
        owner = Owner()
        allow_tf32(owner)
        del owner
        assert PRODUCTS.fp32_precision == "tf32"
    finally:
        PRODUCTS.allow_tf32 = False
        PRODUCTS.fp32_precision = before


def test_a_build_on_a_gpu_has_it_as_long_as_it_lives() -> None:
    before = PRODUCTS.fp32_precision
    made: Any = Owner()
    made.torch_device = torch.device("cuda")
    change = MixedPrecision(mode="fp32", tf32=True).apply(made, torch.nn.Linear(4, 4))
    assert change.what == "weights and optimizer in fp32, matmuls in TF32"
    assert PRODUCTS.fp32_precision == "tf32"
    del made
    assert PRODUCTS.fp32_precision == before


@pytest.mark.parametrize("device", [DEVICE, *(Roofline.of(name).as_device for name in ("T4", "V100-32GB", "MI300X"))])
def test_devices_without_it_are_refused_in_one_line(device: Device) -> None:
    assert not has_tf32(device)
    recipe = tiny(TF32)
    (why,) = recipe.techniques["mixed_precision"].check(build_context(recipe, hf.configure(recipe, 96), device))
    assert why == f"tf32: {device.name} has no TF32, which NVIDIA's GPUs have from Ampere on; leave it out"
    assert MixedPrecision(tf32=True).read_on(device) == MixedPrecision(), "a run from a GPU can be read anywhere"


def test_a_build_on_a_cpu_refuses_it() -> None:
    with pytest.raises(RecipeError, match=r"mixed_precision.*tf32: .* has no TF32"):
        build(tiny(TF32), vocabulary=96, device=DEVICE)


def test_data_sheets_have_it_at_half_of_bf16() -> None:
    rates = {name: find_accelerator(name).peaks().get("tf32") for name in ("A100-80GB", "H100", "L40S", "RTX-4090")}
    assert rates == pytest.approx(
        {"A100-80GB": 156e12, "H100": 494.7e12, "L40S": 183e12, "RTX-4090": 82.6e12}, rel=0.02
    )
    assert not any("tf32" in find_accelerator(name).peaks() for name in ("T4", "V100-32GB", "MI300X"))


def test_a_plan_takes_its_rate_for_products_alone() -> None:
    gpu, before = Roofline.of("A100-80GB"), PRODUCTS.fp32_precision
    plans, seen = {}, {}
    for name, techniques in (("fp32", FP32), ("tf32", TF32)):
        recipe = tiny(techniques)
        seen[name] = observe(Request(recipe, gpu.as_device, vocabulary=96))
        plans[name] = describe(Request(recipe, gpu.as_device, rates=gpu, in_use=0), seen[name])
    assert PRODUCTS.fp32_precision == before, "a plan computes nothing"
    assert seen["tf32"].flops["tf32"] + seen["tf32"].flops.get("fp32", 0) == seen["fp32"].flops["fp32"]
    kernels = {replace(k, dtype="fp32" if k.dtype == "tf32" else k.dtype): n for k, n in seen["tf32"].kernels.items()}
    assert kernels == dict(seen["fp32"].kernels)
    assert {k.operator for k in seen["tf32"].kernels if k.dtype == "tf32"} <= {
        "mm",
        "bmm",
        "addmm",
        "addmm_",
        "baddbmm",
    }
    large = replace(next(k for k in seen["tf32"].kernels if k.dtype == "tf32" and k.operator == "mm"), flops=10**12)
    assert gpu._time_matmul(replace(large, dtype="fp32")) / gpu._time_matmul(large) == pytest.approx(156 * 0.82 / 19.5)
    assert plans["tf32"].matrix_rate == 156e12
    assert plans["fp32"].matrix_rate == 19.5e12


def test_it_gives_up_rounding_and_no_search_adds_it() -> None:
    asked = MixedPrecision(mode="fp32", tf32=True)
    assert (asked.search_numerics(), MixedPrecision(mode="fp32").search_numerics()) == ("rounding", "exact")
    assert MixedPrecision(mode="bf16_pure", tf32=True).search_numerics() == "different"
    assert Tag.TF32_PRODUCTS in asked.provided()
    recipe = tiny("{}")
    context = build_context(recipe, hf.configure(recipe, 96), Roofline.of("A100-80GB").as_device)
    # bf16 is faster on every device that has TF32, and one option more cost a search of 64 devices the best layout.
    assert asked not in list(MixedPrecision().options(context))
