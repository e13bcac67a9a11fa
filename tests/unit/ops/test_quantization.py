"""Grids, codes and the maps that hold them, against slow references."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from preheat.errors import RunError
from preheat.ops.quantization import int4_unpack
from preheat.ops.quantization.awq_gptq import compute_output_error, quantize_awq, quantize_gptq, smooth
from preheat.ops.quantization.bit_allocation import allocate_bits
from preheat.ops.quantization.grids import (
    Groups,
    dequantize_groups,
    nearest_divisor,
    pack,
    quantize_groups,
    quantize_rows,
    round_groups,
    unpack,
)
from preheat.ops.quantization.linear import (
    FEW,
    Fp8Linear,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    fits_int4_kernel,
    multiply_integers,
    tile_codes,
)
from preheat.ops.quantization.module_filter import group_of, select_kept


def weight(rows: int = 32, columns: int = 64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * torch.rand(rows, 1, generator=g)


def inputs(tokens: int, columns: int, seed: int = 1) -> Tensor:
    """With outliers in a few places and inputs that go together, as in real models."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns // 4, generator=g) @ torch.randn(columns // 4, columns, generator=g)
    x = x + 0.3 * torch.randn(tokens, columns, generator=g)
    x[:, ::13] *= 12
    return x


@pytest.mark.parametrize("columns", [8, 7, 1])
def test_what_is_packed_is_unpacked(columns: int) -> None:
    codes = torch.randint(16, (5, columns), dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (5, math.ceil(columns / 2))
    assert torch.equal(unpack(packed, columns), codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_rounded_as_a_loop_over_numbers_does(symmetric: bool) -> None:
    w = weight(3, 24)
    w[1, 8:16] = 0
    made = quantize_groups(w, 8, symmetric=symmetric)
    for row, group in itertools.product(range(3), range(3)):
        values = w[row, group * 8 : group * 8 + 8].tolist()
        scale = float(made.scales[row, group])
        zero = float(made.zeros[row, group]) if made.zeros is not None else 0.0
        if any(values) and symmetric:
            extreme = max(values, key=abs)
            assert scale == pytest.approx(extreme / -8, rel=2**-8)
        for place, value in enumerate(values):
            best = min(range(16), key=lambda code: abs((code - 8) * scale + zero - value))
            code = int(made.codes[row, group * 8 + place])
            assert abs((code - 8) * scale + zero - value) == pytest.approx(
                abs((best - 8) * scale + zero - value), abs=1e-6
            )
    assert bool((dequantize_groups(made)[1, 8:16] == 0).all())


def test_a_symmetric_grid_keeps_what_was_rounded_to_it() -> None:
    once = quantize_groups(weight(64, 128), 32)
    again = quantize_groups(dequantize_groups(once), 32)
    assert torch.equal(again.codes, once.codes)
    assert torch.equal(again.scales, once.scales)


def test_eight_bits_are_off_by_half_a_step_at_most() -> None:
    w = weight()
    codes, scales = quantize_rows(w)
    steps = scales.float()[:, None]
    assert float(((codes.float() * steps - w).abs() / steps).max()) <= 0.5 + 127 * 2**-8
    assert codes.abs().amax(dim=1).min() >= 126


@pytest.mark.parametrize("tokens", [1, FEW["int4"], FEW["int4"] + 1])
@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (64, False), (8, True)])
def test_four_bits_multiply_as_the_values_they_stand_for(tokens: int, group: int, symmetric: bool) -> None:
    linear = nn.Linear(64, 48)
    made = Int4Linear.of(linear, group=group, symmetric=symmetric)
    x = inputs(tokens, 64).bfloat16()
    wanted = x.float() @ made.weight.t() + made.bias.detach()
    found = made(x[None])[0].detach()
    assert found.shape == (tokens, 48)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 8e-3
    exact = made(x.float())
    assert float((exact - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("tokens", [1, 5, FEW["int8"] + 1])
@pytest.mark.parametrize("columns", [80, 172, 20])  # aten's kernel reads beyond rows that are no multiple of 16
def test_eight_bits_multiply_as_the_values_they_stand_for(tokens: int, columns: int) -> None:
    made = Int8Linear.of(nn.Linear(columns, 50))
    x = inputs(tokens, columns).bfloat16()
    wanted = x.float() @ made.weight.t() + made.bias.detach()
    assert float((made(x).float() - wanted).norm() / wanted.norm()) < 8e-3


def _in_tiles(codes: Tensor, inner: int) -> Tensor:
    """The codes [out, in] in the order of an m16n8k16 product's second operand, number by number (torch, native/cuda/int4mm.cu)."""
    outputs, inputs = codes.shape
    out = torch.zeros(outputs // 8, inputs // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for tile, outer, lane, word in itertools.product(*map(range, out.shape)):
        first = (outer * inner + 2 * word) * 16 + lane % 4 * 2
        places = [first + n for n in (0, 1, 8, 9, 16, 17, 24, 25)]
        values = codes[tile * 8 + lane // 4, places].tolist()
        out[tile, outer, lane, word] = sum(values[n] << 4 * shift for shift, n in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return out


def _convert(packed: Tensor, inner: int) -> Tensor:
    """Twin of `_convert_weight_to_int4pack` on CUDA: from uint8 [out, in / 2], the even place in the high half."""
    return _in_tiles(torch.stack([packed >> 4, packed & 15], dim=2).flatten(1).long(), inner)


@pytest.mark.parametrize(("inputs_", "inner"), [(256, 8), (64, 4), (96, 2)])
def test_four_bits_lie_as_cudas_kernel_reads_them(inputs_: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Int4Linear.of(nn.Linear(inputs_, 16), group=32, symmetric=False)
    assert fits_int4_kernel(made)
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", _convert)
    packed, grid = tile_codes(made)
    assert torch.equal(packed, _in_tiles(unpack(made.codes, inputs_).long(), inner))
    codes, scale, zero = (
        unpack(made.codes, inputs_).float(),
        *(t.t().repeat_interleave(32, 1) for t in grid.float().unbind(2)),
    )
    assert torch.equal((codes - 8) * scale + zero, made.weight.detach())
    monkeypatch.undo()
    with FakeTensorMode():
        fake = torch.ops.aten._convert_weight_to_int4pack(torch.empty(16, inputs_ // 2, dtype=torch.uint8), inner)
        assert fake.shape == packed.shape
        x = torch.empty(3, inputs_, dtype=torch.bfloat16)
        assert torch.ops.aten._weight_int4pack_mm(x, fake, 32, torch.empty(grid.shape, dtype=grid.dtype)).shape == (
            3,
            16,
        )


def test_few_rows_of_integers_are_filled_up_for_cuda() -> None:
    x, codes = (torch.randint(-127, 128, (n, 24), dtype=torch.int8) for n in (3, 16))
    assert torch.equal(multiply_integers(x, codes, least=17), (x.long() @ codes.long().t()).int())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_products_of_eight_bit_integers_are_those_of_whole_numbers(kind: str) -> None:
    linear, x = nn.Linear(64, 48, bias=False), inputs(20, 64)
    factors = smooth(linear.weight, x.abs().amax(dim=0))
    scale = (x * factors.float()).abs().max() / 127 if kind == "static" else None
    made = Int8Linear.of(linear, inputs=kind, input_scales=factors, input_scale=scale)
    smoothed = x * factors.float()
    step = (
        smoothed.abs().amax(dim=1, keepdim=True) / 127 if kind == "dynamic" else made.input_scale.float()  # type: ignore[union-attr]
    )
    codes = (smoothed / step).round().clamp(-127, 127).long()
    sums = codes @ made.codes.long().t()
    wanted = sums.double() * step.double() * made.scales.double()
    assert float((made(x) - wanted).norm() / wanted.norm()) < 1e-6
    plain = linear(x).detach()
    assert float((made(x) - plain).norm() / plain.norm()) < 0.03


def test_smoothing_changes_no_output_and_moves_outliers_into_the_weight() -> None:
    w, x = weight(), inputs(40, 64)
    factors = smooth(w, x.abs().amax(dim=0)).float()
    assert float(((x * factors) @ (w / factors).t() - x @ w.t()).norm() / (x @ w.t()).norm()) < 1e-6
    spread = lambda t: float(t.abs().amax(dim=0).max() / t.abs().amax(dim=0).median())  # noqa: E731
    assert spread(x * factors) < 0.5 * spread(x)


def test_eight_bit_floats_are_off_by_their_mantissa_at_most() -> None:
    linear, x = nn.Linear(64, 48, bias=False), inputs(20, 64)
    made = Fp8Linear.of(linear)
    plain = linear.weight.detach()
    assert float(((made.weight - plain).abs() / plain.abs().clamp(min=1e-3)).max()) < 2**-4 + 2**-7
    wanted = linear(x).detach()
    assert 1e-3 < float((made(x) - wanted).norm() / wanted.norm()) < 0.05


def test_an_embedding_in_eight_bits_gives_its_rows() -> None:
    plain = nn.Embedding(20, 16)
    made = Int8Embedding.of(plain)
    tokens = torch.tensor([[3, 19, 3]])
    assert made(tokens).dtype == torch.bfloat16
    assert torch.allclose(made(tokens).float(), made.weight[tokens], rtol=8e-3)
    assert float((made.weight - plain.weight.detach()).abs().max()) < 0.02


@pytest.mark.parametrize("without_compiler", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [2, 48, 32, 3])
def test_four_bits_are_unpacked_in_bf16_as_in_fp32(
    symmetric: bool, group: int, without_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_compiler:
        monkeypatch.setattr("preheat.ops.quantization.int4_unpack._load_library", lambda: None)
    made = Int4Linear.of(nn.Linear(96, 300, bias=False), group=group, symmetric=symmetric)
    assert torch.equal(made.values(torch.bfloat16), made.values(torch.float32).bfloat16())


def test_unpacking_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RunError("no C++ compiler was found")

    monkeypatch.setattr("preheat.hardware.cpp_build.load_library", none)
    int4_unpack._load_library.cache_clear()
    with pytest.warns(UserWarning, match="several times as long: no C"):
        assert int4_unpack._load_library() is None
    int4_unpack._load_library.cache_clear()


def test_precision_and_place_may_change() -> None:
    made = Int4Linear.of(nn.Linear(64, 32), group=32)
    x = inputs(2, 64).bfloat16()
    first = made(x)
    made.to(torch.float64)
    assert made(x.double()).dtype == torch.float64
    made.to(torch.bfloat16)
    assert torch.equal(made(x), first)


# --- codes chosen by outputs -----------------------------------------------------------------------------------------


def slow_gptq(w: Tensor, gram: Tensor, scales: Tensor, group: int, damping: float) -> Tensor:
    """Optimal brain quantization in GPTQ's order by its definition: after each column the least-squares update of all that are free."""
    curve = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    free = gram.diagonal().argsort(descending=True).tolist()
    left, codes = w.double().clone(), torch.zeros_like(w, dtype=torch.uint8)
    while free:
        inverse = torch.linalg.inv(curve[free][:, free])
        column, scale = free[0], scales[:, free[0] // group].double()
        code = (left[:, column] / scale + 8).round().clamp(0, 15)
        codes[:, column] = code.to(torch.uint8)
        error = (left[:, column] - (code - 8) * scale) / inverse[0, 0]
        left[:, free] -= error[:, None] * inverse[0][None]
        free = free[1:]
    return codes


def test_gptq_is_what_its_definition_gives() -> None:
    w, x = weight(6, 24), inputs(200, 24)
    gram = x.t() @ x
    made = quantize_gptq(w, gram, 8, damping=0.05, block=5)
    wanted = slow_gptq(w, gram, made.scales, 8, 0.05)
    assert (made.codes != wanted).float().mean() <= 0.02, "fp32 may decide a tie otherwise"


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_and_awq_lose_less_of_the_outputs_than_the_nearest_codes(symmetric: bool) -> None:
    w, x = weight(), inputs(500, 64)
    gram = x.t() @ x
    nearest = compute_output_error(dequantize_groups(quantize_groups(w, 32, symmetric=symmetric)) - w, gram)
    by_gptq = compute_output_error(dequantize_groups(quantize_gptq(w, gram, 32, symmetric=symmetric)) - w, gram)
    made, factors = quantize_awq(w, gram, 32, symmetric=symmetric)
    by_awq = compute_output_error(dequantize_groups(made) * factors.float() - w, gram)
    assert by_gptq < 0.6 * nearest
    assert by_awq < 0.8 * nearest
    direct = ((x @ (dequantize_groups(made) * factors.float() - w).t()) ** 2).sum()
    assert by_awq == pytest.approx(float(direct), rel=1e-3)


def test_gptq_bears_inputs_that_are_always_zero() -> None:
    x = inputs(100, 16)
    x[:, 5] = 0
    made = quantize_gptq(weight(4, 16), x.t() @ x, 16)
    assert bool(dequantize_groups(made).isfinite().all())


def test_awq_computes_what_its_codes_say() -> None:
    linear, x = nn.Linear(64, 32), inputs(300, 64)
    made, factors = quantize_awq(linear.weight, x.t() @ x, 32)
    held = Int4Linear.of(linear, made, input_scales=factors)
    wanted = (x * factors.float()) @ dequantize_groups(made).t() + linear.bias
    assert torch.allclose(held(x), wanted, atol=1e-4)
    assert torch.allclose(held.weight, dequantize_groups(made) * factors.float())


def test_codes_on_a_grid_are_the_nearest() -> None:
    w = weight(4, 16)
    made = quantize_groups(w, 16)
    assert torch.equal(round_groups(w, made.scales, None), made.codes)
    assert dequantize_groups(Groups(made.codes, made.scales, None)).shape == w.shape


# --- a budget --------------------------------------------------------------------------------------------------------


def test_bits_are_shared_out_nearly_as_well_as_by_trying_everything() -> None:
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        maps = 5
        sizes = torch.randint(1, 5, (maps,), generator=g).tolist()
        bits = [[4.0 * n, 5.0 * n, 8.0 * n, 16.0 * n] for n in sizes]
        worst = torch.rand(maps, generator=g).tolist()
        rises = [[w, 0.5 * w, 0.02 * w, 0.0] for w in worst]
        budget = 6.0 * sum(sizes)
        chosen = allocate_bits(bits, rises, budget)
        spent = sum(b[n] for b, n in zip(bits, chosen, strict=True))
        rise = sum(r[n] for r, n in zip(rises, chosen, strict=True))
        best = min(
            sum(r[n] for r, n in zip(rises, way, strict=True))
            for way in itertools.product(range(4), repeat=maps)
            if sum(b[n] for b, n in zip(bits, way, strict=True)) <= budget
        )
        assert spent <= budget
        assert rise <= best + 0.5 * max(worst), "off by less than one step"
        assert rise < sum(r[1] for r in rises), "better than five bits for all"


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 8 bits"):
        allocate_bits([[4, 8], [4, 8]], [[1, 0], [1, 0]], 7)


# --- which maps ------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_named_by_roles_parts_or_expressions() -> None:
    names = ["l.0.up", "l.0.down", "l.1.up", "l.1.down", "head"]
    where = {"head": ["head"], "first": ["l.0.up", "l.0.down"], "embedding": []}
    assert select_kept(names, ("head", "embedding"), where) == {"head"}
    assert select_kept(names, r"l\.1\..*", where) == {"l.1.up", "l.1.down"}
    assert select_kept(names, ("down", "first"), where) == {"l.0.down", "l.1.down", "l.0.up"}
    with pytest.raises(ValueError, match=r"matches no linear map.*did you mean 'down'"):
        select_kept(names, ("dwn",), where)
    with pytest.raises(ValueError, match="not a regular expression"):
        select_kept(names, "(", where)


def test_a_group_that_does_not_divide_names_the_map_and_the_nearest() -> None:
    assert [nearest_divisor(n, 32) for n in (768, 172, 97)] == [32, 43, 97]
    with pytest.raises(
        ValueError, match=r"32 does not divide the 172 inputs of m\.down_proj; the closest that does is 43"
    ):
        group_of("m.down_proj", 172, 32)


def test_codes_loaded_after_a_decode_step_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """aten's kernel on CPUs reads the weight in an order of its own, which a decode step makes and keeps."""
    monkeypatch.setattr("preheat.ops.quantization.linear.is_supported", lambda: False)
    torch.manual_seed(0)
    old, new = (Int4Linear.of(nn.Linear(64, 32, bias=False), group=32) for _ in range(2))
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    expected = new(x)
    assert not torch.equal(old(x), expected)
    old.load_state_dict(new.state_dict())
    assert torch.equal(old(x), expected)
