"""Compressed weights on a device against the same weights, dequantized and multiplied in fp64 on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _gpu.case import Skip, Where, Wrong

METHODS = ("int8", "int8_dynamic", "int8_static", "int4", "awq", "gptq", "nf4", "fp8")
ROUNDED = {"int8": 0.03, "int4": 0.2, "nf4": 0.15, "fp8": 0.08}
"""The most that a map's results may differ from those of its original weight, by its kind, as a relative norm.

The largest of 64 to 256 normal values is at 2.4 to 2.9 standard deviations, and rounding in steps s has an error of s / sqrt(12): for a step of
largest / 127 0.7 % of a weight, largest / 8 10 %; NF4 has 9 %, and e4m3's three bits of mantissa 2.6 %. Each bound is about twice that, or four times if the
inputs are rounded, too.
"""
CLIPPED = 0.2
"""The same for `int8_static`, which clips inputs that are larger than any in calibration; 8 % on a CPU for random tokens."""
PRODUCT = 0.01
"""The most that a product may differ from fp64 with the same codes and scales: its result is rounded to bf16, 0.17 % as a relative norm; a rounding of the
dequantized weight adds as much, and inputs that fall to the other of two codes 0.5 %."""
LOGITS = 0.02
"""As above, after all layers, whose roundings to bf16 add up."""
RISE = 0.2
"""The most that perplexity may change by, in either direction: the run is short, and a model without weights may be better or worse than it."""
ROWS = {"few rows": 1, "many rows": 8}
"""Rows of 12 tokens: products of few rows have kernels of their own (`ops.quantization.linear.FEW`: 16 and 64)."""


def check(method: str, run: Path, where: Where) -> dict[str, Any]:
    """Compresses a run and compares the folder's weights, products and logits.

    Raises:
        Skip: the method needs another device.
        Wrong: a figure is beyond its bound.
    """
    from preheat.compress.compress import compress, read_variant
    from preheat.errors import RecipeError
    from preheat.inference.load import load_model

    folder = Path(where.folder) / f"compressed-{method}"
    try:
        summary = compress(run, [read_variant(method)], folder, rows=16, measured=16, turns=1)
    except RecipeError as error:
        if method == "fp8" and "compute capability 8.9" in str(error):
            raise Skip(str(error)) from None
        raise Wrong(f"refused: {error}", {}) from None
    original: Any = load_model(run, device="cpu").build.trained[0]
    here: Any = load_model(folder, device=where.kind).build.trained[0]  # type: ignore[arg-type]
    figures = {"perplexity rise": summary.variants[0].perplexity_rise} | compare(here, original)
    return check_bounds(figures, {"rounding to int8": CLIPPED} if method == "int8_static" else {})


def compare(model: Any, original: Any) -> dict[str, float]:
    """Returns the largest errors of a compressed model: by rounding to each kind, of its products, and of its logits.

    Args:
        model: with compressed weights, on the device to check.
        original: the same model before, on the CPU.
    """
    import torch

    from preheat.models.hf import compute_reference_logits
    from preheat.ops.quantization.serialization import find_quantized_modules

    modules = find_quantized_modules(model)
    assert modules, "nothing is compressed"
    plain = _build_plain_copy(model, modules)
    figures: dict[str, float] = {}
    for label, rows in ROWS.items():
        tokens = torch.randint(model.config.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(rows))
        for key, error in _measure_products(model, original, modules, tokens).items():
            key = f"products, {label}" if key == "products" else key
            figures[key] = max(figures.get(key, 0.0), error)
        figures[f"logits, {label}"] = _relative_error(
            compute_reference_logits(model, tokens), compute_reference_logits(plain, tokens)
        )
    return figures


def check_bounds(figures: dict[str, float], wider: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Returns figures that are within their bounds, or within the wider ones of a method.

    Raises:
        Wrong: others are not.
    """
    bounds = {f"rounding to {kind}": bound for kind, bound in ROUNDED.items()}
    bounds |= {f"products, {label}": PRODUCT for label in ROWS} | {f"logits, {label}": LOGITS for label in ROWS}
    bounds |= {"perplexity rise": RISE, **wider}
    beyond = [
        f"{key}: {figures[key]:.2g}, at most {bounds[key]:g}" for key in figures if not abs(figures[key]) <= bounds[key]
    ]
    if beyond:
        raise Wrong("; ".join(beyond), figures)
    return figures


def _relative_error(value: Any, reference: Any) -> float:
    """Relative norm of the difference."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    return float((value - reference).norm() / reference.norm().clamp(min=1e-300))


def _compute_product(module: Any, x: Any) -> Any:
    """The result of a compressed module in fp64, from its codes and scales alone; inputs are rounded as its form says."""
    import torch
    from torch.nn import functional

    from preheat.ops.quantization.grids import round_inputs
    from preheat.ops.quantization.serialization import find_form

    form = find_form(module)
    assert form is not None
    weight = module.weight.detach().cpu().double()  # input factors included
    if not x.is_floating_point():  # an embedding
        return functional.embedding(x.cpu(), weight)
    x = x.detach().cpu().double()
    if form.get("inputs"):
        factors = 1.0 if module.input_scales is None else module.input_scales.detach().cpu().double()
        if form["kind"] == "fp8":
            scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
            x = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
        else:
            static = None if module.input_scale is None else module.input_scale.detach().cpu()
            codes, scale = round_inputs((x * factors).float().flatten(0, -2), static)
            x = (codes.double() * scale.double()).view(x.shape)
        weight = weight / factors
    bias = getattr(module, "bias", None)
    return functional.linear(x, weight, None if bias is None else bias.detach().cpu().double())


def _measure_products(model: Any, original: Any, modules: dict[str, Any], tokens: Any) -> dict[str, float]:
    """The largest errors of compressed modules in a forward pass, each from the inputs that it gets there."""
    from torch.nn import functional

    from preheat.models.hf import compute_reference_logits
    from preheat.ops.quantization.serialization import find_form

    errors: dict[str, float] = {}

    def compare_with(name: str, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        form, x = find_form(module), inputs[0].detach().cpu()
        assert form is not None
        before = original.get_submodule(name)
        weight, bias = before.weight.double(), getattr(before, "bias", None)
        exact = (
            functional.linear(x.double(), weight, None if bias is None else bias.double())
            if x.is_floating_point()
            else functional.embedding(x, weight)
        )
        key = f"rounding to {form['kind'].removesuffix('_embedding')}"
        errors[key] = max(errors.get(key, 0.0), _relative_error(output, exact))
        errors["products"] = max(errors.get("products", 0.0), _relative_error(output, _compute_product(module, x)))

    hooks = [module.register_forward_hook(functools.partial(compare_with, name)) for name, module in modules.items()]
    try:
        compute_reference_logits(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return errors


def _build_plain_copy(model: Any, modules: dict[str, Any]) -> Any:
    """A copy on the CPU in fp64 whose compressed modules multiply by dequantized weights."""
    from torch import nn

    from preheat.ops.quantization.serialization import put_in

    class Plain(nn.Module):
        def __init__(self, module: Any):
            super().__init__()
            self.of = [module]  # in a list, so that casts of the copy do not reach it

        def forward(self, x: Any) -> Any:
            return _compute_product(self.of[0], x)

    plain = copy.deepcopy(model).cpu().double()
    for name, module in modules.items():
        put_in(plain, name, Plain(module))
    return plain
