"""Experts in NF4 and MXFP4: adapters on them have the loss and gradients of adapters on the rounded base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks

from preheat import recipe as recipes
from preheat.core import Build
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients
from preheat.errors import PreheatError
from preheat.models.hf import compute_reference_logits, head
from preheat.models.moe import experts_of
from preheat.ops.adapters.peft_layers import count_parameters, merge
from preheat.ops.grouped_mm import stacks_of
from preheat.ops.quantization.nf4 import build_tables, dequantize, quantize
from preheat.ops.quantization.packed_experts import (
    Mxfp4Experts,
    Nf4Experts,
    pack_experts_,
    pack_mxfp4_,
)

from ...architectures.tiny import create_model, tiny_config
from ...conftest import DEVICE, difference, uneven

LORA = "lora: {target_modules: [attention, experts], rank: 4}"


def opened(folder: Path, techniques: str, *more: str) -> Build:
    recipe = recipes.parse(
        f"model: {{path: {folder}}}\nbatch: {{size: 4, seq_len: 32}}\nstop: {{max_steps: 9}}\ntechniques: {techniques}",
        overrides=list(more),
    )
    return build(recipe, vocabulary=96, device=DEVICE)


def round_(weight: torch.Tensor) -> None:
    weight.copy_(dequantize(quantize(weight), tuple(weight.shape), torch.float32, build_tables()))


def draw_adapters(b: Build) -> None:
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in b.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_packed_experts_are_those_on_the_rounded_base(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = create_model(tiny_config(name))
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for module in model.modules():
            if type(module) is torch.nn.Linear and module is not head(model):
                round_(module.weight)
            for stack in stacks_of(module):
                round_(module.get_parameter(stack))
    model.save_pretrained(tmp_path / "rounded")
    packed = opened(tmp_path / "base", f"{{{LORA}, nf4: {{}}}}")
    plain = opened(tmp_path / "rounded", f"{{{LORA}}}")
    layers = [m for m in packed.trained[0].modules() if isinstance(m, Nf4Experts)]
    assert len(layers) == len(experts_of(packed.trained[0])) > 0
    assert f"and the experts of {len(layers)} layers in NF4" in str(packed.changes["nf4"][0])
    assert count_parameters(packed.trained[0]) == count_parameters(plain.trained[0])
    shapes = {
        shape for m in layers for stack in m.packed_shapes.values() for shape in (stack, stack[:1] + stack[:0:-1])
    }
    results = []
    for b in (packed, plain):
        draw_adapters(b)
        saved: set[tuple[int, ...]] = set()

        def note(t: torch.Tensor, saved: set[tuple[int, ...]] = saved) -> torch.Tensor:
            saved.add(tuple(t.shape))
            return t

        with saved_tensors_hooks(note, lambda t: t):
            loss = accumulate_gradients(b, [uneven()], 0.01)
        grads = {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None}
        results.append((float(loss.total), grads, bool(saved & shapes)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert any("experts" in key for key in results[0][1])
    assert difference(results[0][1], results[1][1]) < 1e-5
    assert [has_stack for *_, has_stack in results] == [False, True], "the backward pass dequantizes a stack again"
    tokens = uneven().tokens
    logits = [compute_reference_logits(b.trained[0], tokens) for b in (packed, plain)]  # type: ignore[arg-type]
    for b in (packed, plain):
        merge(b.trained[0])
    merged = [dict(b.trained[0].state_dict()) for b in (packed, plain)]
    assert difference(merged[0], merged[1]) < 1e-6
    logits.append(compute_reference_logits(packed.trained[0], tokens))  # type: ignore[arg-type]
    assert difference({"": logits[0]}, {"": logits[1]}) < 1e-5
    assert difference({"": logits[2]}, {"": logits[1]}) < 1e-5


@pytest.mark.parametrize(("kind", "transposed"), [("nf4", False), ("nf4", True), ("plain", False), ("mxfp4", True)])
def test_few_rows_meet_the_matrices_of_their_experts_alone(kind: str, transposed: bool) -> None:
    """32 blocks an expert, so that a range of 256 scales has those of several experts."""
    torch.manual_seed(0)
    experts: Any = torch.nn.Module()
    experts.is_transposed = transposed
    for name in ("up_proj", "down_proj"):
        experts.register_parameter(name, torch.nn.Parameter(torch.randn(10, 32, 64) * 0.1))
    if kind == "mxfp4":
        pack_mxfp4_(experts)
        for p in experts.parameters():
            p.data = torch.randint(118, 124, p.shape, dtype=torch.uint8)
    else:
        pack_experts_([experts], double=kind == "nf4")
    expert = torch.tensor([1, 1, 4, 9])
    ends = torch.bincount(expert, minlength=10).cumsum(0).to(torch.int32)
    for name in ("up_proj", "down_proj"):
        stack = getattr(experts, name)
        matrices = stack.mT if transposed else stack
        rows = torch.randn(4, matrices.shape[2])
        with torch.no_grad():
            few = experts.multiply_packed(name, rows, ends)
        wanted = torch.stack([matrices[e] @ row for e, row in zip(expert, rows, strict=True)])
        torch.testing.assert_close(few, wanted)
        torch.testing.assert_close(experts.multiply_packed(name, rows, ends), wanted)


def test_experts_can_stay_in_full_precision(tmp_path: Path) -> None:
    create_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    b = opened(tmp_path, f"{{{LORA}, nf4: {{experts: false}}}}")
    assert not [m for m in b.trained[0].modules() if isinstance(m, Nf4Experts)]
    assert "experts" not in str(b.changes["nf4"][0])


def write_in_mxfp4(folder: Path) -> None:
    """A small gpt-oss whose experts are random bytes."""
    create_model(tiny_config("gpt_oss", intermediate_size=64)).save_pretrained(folder)
    files: dict[str, torch.Tensor] = {}
    g = torch.Generator().manual_seed(0)
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = value
            continue
        experts, inner, outer = value.shape
        shape = (experts, outer, inner // 32)
        files[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=g, dtype=torch.uint8)
        files[f"{name}_scales"] = torch.randint(116, 124, shape, generator=g, dtype=torch.uint8)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_stay_packed_with_the_values_that_transformers_reads(tmp_path: Path) -> None:
    write_in_mxfp4(tmp_path)
    builds = [opened(tmp_path, f"{{{LORA}}}", f"model.quantized_weights={how}") for how in ("packed", "dequantized")]
    layers = [m for m in builds[0].trained[0].modules() if isinstance(m, Mxfp4Experts)]
    assert len(layers) == len(experts_of(builds[1].trained[0])) > 0
    assert f"the experts of {len(layers)} layers stay in mxfp4" in str(builds[0].changes["quantized_weights"][0])
    assert not builds[0].weights.notes
    weights, packed_bytes = layers[0].count_weights(), layers[0].count_packed_bytes()
    assert packed_bytes == weights * (1 / 2 + 1 / 32)
    results = []
    for b in builds:
        draw_adapters(b)
        loss = accumulate_gradients(b, [uneven()], 0.01)
        results.append((float(loss.total), {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert difference(results[0][1], results[1][1]) < 1e-5
    for b in builds:
        merge(b.trained[0])
    merged = [dict(b.trained[0].state_dict()) for b in builds]
    assert difference(merged[0], merged[1]) == 0


def test_packed_mxfp4_is_refused_for_full_training_and_without_a_tensor(tmp_path: Path) -> None:
    write_in_mxfp4(tmp_path)
    with pytest.raises(PreheatError, match="is stored in mxfp4, and packed weights cannot be trained"):
        opened(tmp_path, "{}", "model.quantized_weights=packed")
    files = load_file(tmp_path / "model.safetensors")
    name = next(key for key in files if key.endswith("gate_up_proj_scales"))
    save_file({k: v for k, v in files.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PreheatError, match="gate_up_proj_scales is missing; its files do not fit"):
        opened(tmp_path, f"{{{LORA}}}", "model.quantized_weights=packed")
