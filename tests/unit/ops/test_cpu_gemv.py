"""Kernels of ours for few rows times weights of eight or four bits: against fp64, and what they do with rows that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preheat.errors import RunError
from preheat.ops.quantization import cpu_gemv
from preheat.ops.quantization.linear import Int4Linear, Int8Linear

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernels are of AVX2, which this CPU has not",
)


def maps(inputs: int, outputs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=False)
    return {
        "int8": Int8Linear.of(plain),
        "int4": Int4Linear.of(plain, group=32),
        "int4, zeros": Int4Linear.of(plain, group=96 if inputs % 96 == 0 else 64, symmetric=False),
    }


def product(made: Any, x: Tensor) -> Tensor:
    if isinstance(made, Int8Linear):
        return cpu_gemv.multiply_int8(x, made.codes, made.scales)
    return cpu_gemv.multiply_int4(x, made.codes, made.scales, made.zeros)


@pytest.mark.parametrize("kind", ["int8", "int4", "int4, zeros"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 40), (3, 4160, 17), (4, 192, 16), (11, 2080 * 3, 9)])
def test_a_product_is_that_of_its_values_but_for_sixteen_bits_of_inputs(
    rows: int, inputs: int, outputs: int, kind: str
) -> None:
    made = maps(inputs, outputs)[kind]
    x = torch.randn(rows, inputs).bfloat16()
    x[0] *= 1000  # each row has a scale of its own
    found, wanted = product(made, x), x.double() @ made.weight.double().T
    assert found.dtype == torch.bfloat16
    apart = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(apart.max()) < 2.5e-3  # bf16 has 2e-3 of it
    largest = x.abs().amax(dim=1, keepdim=True).double() / 32767 / 2 * made.weight.double().abs().sum(1)
    assert bool(((found.double() - wanted).abs() <= largest + wanted.abs() * 2**-8).all())


@pytest.mark.parametrize("kind", ["int8", "int4", "int4, zeros"])
def test_rows_alone_and_together_are_the_same_and_those_that_are_not_finite_stay_so(kind: str) -> None:
    made = maps(96, 33)[kind]
    x = torch.randn(6, 96).bfloat16()
    x[1], x[2, 5], x[3, 7], x[4] = 0.0, float("nan"), float("-inf"), 1e-38
    found = product(made, x)
    assert all(torch.equal(product(made, x[n : n + 1])[0], found[n]) for n in (0, 1, 4, 5))
    assert found[[2, 3]].isnan().all()
    assert found[[0, 1, 4, 5]].isfinite().all()
    assert not found[1].any()


def test_tracers_are_sent_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemv, "_has_only_avx2", lambda: True)
    made, x = maps(96, 48)["int8"], torch.randn(2, 96).bfloat16()
    program = torch.export.export(made, (x,))
    assert any("_weight_int8pack_mm" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(made(x), cpu_gemv.multiply_int8(x, made.codes, made.scales))  # and who runs it is not
    assert torch.allclose(program.module()(x).float(), made(x).float(), rtol=2e-2, atol=2e-3)


def test_without_a_compiler_it_is_told_and_aten_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RunError("no C++ compiler was found")

    monkeypatch.setattr("preheat.hardware.cpp_build.load_library", none)
    monkeypatch.setattr(cpu_gemv, "_has_only_avx2", lambda: True)
    cpu_gemv._load_library.cache_clear()
    with pytest.warns(UserWarning, match="two to three times as long: no C"):
        assert cpu_gemv._load_library() is None
    assert not cpu_gemv.is_supported()
    made, x = maps(96, 48)["int4"], torch.randn(1, 96).bfloat16()
    wanted = x.double() @ made.weight.double().T
    assert float((made(x).double() - wanted).norm() / wanted.norm()) < 5e-3
    cpu_gemv._load_library.cache_clear()


@pytest.mark.parametrize("kind", ["int8", "int4", "int4, zeros"])
def test_gradients_go_through_a_map_of_few_rows(kind: str) -> None:
    made, x = maps(96, 48)[kind], torch.randn(2, 96).bfloat16().requires_grad_()
    made(x).float().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad.float(), made.weight.sum(0).expand(2, -1), rtol=2e-2, atol=2e-2)
