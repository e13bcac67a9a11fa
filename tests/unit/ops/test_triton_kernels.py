"""Our Triton kernels in Triton's interpreter on a CPU, against their references, and compiled for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from preheat.errors import RunError
from preheat.ops import cuda_kernels, rowwise_cuda
from preheat.ops.optim import half_adamw
from preheat.ops.optim.half_precision import MasterAdamW
from preheat.ops.optim.optimizers import StochasticAdamW
from preheat.ops.quantization import nf4
from preheat.ops.quantization.linear import Int8Linear, multiply_int8_codes
from preheat.planning.dispatch_recorder import Recorder

TRITON = find_spec("triton") is not None
interpreted = pytest.mark.skipif(
    not TRITON or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton (pip install triton) and TRITON_INTERPRET=1",
)


@interpreted
@pytest.mark.parametrize("count", [1, 65, 1000, 64 * 256 * 3 + 7])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_is_dequantized_to_the_bits_of_the_plain_form(count: int, double: bool) -> None:
    torch.manual_seed(0)
    packed, look = nf4.quantize(torch.randn(count) * 0.02 + 0.001, double=double), nf4.build_tables()
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(
            nf4.dequantize_by_triton(*packed, *look, dtype)[:count], nf4.dequantize(packed, (count,), dtype, look)
        )
    half, plain = (
        nf4.dequantize_by_triton(*packed, *look, torch.bfloat16)[:count],
        nf4.dequantize(packed, (count,), torch.float32, look),
    )
    assert ((half.float() - plain).abs() <= plain.abs() * 2**-7).all()  # the interpreter cuts bf16 off


def reference(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    w, g, m, v = (x.double() for x in (w, g, m, v))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8), m, v


def update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, master: Tensor | None = None, **more: Any) -> None:
    settings: dict[str, Any] = {"t": 1, "lr": 1e-3, "decay": 0.1, "seed": 77, "first": 0, "found_inf": None} | more
    step = torch.tensor(float(settings["t"] - 1))
    rest = (settings["lr"], 0.9, 0.999, 1e-8, settings["decay"], settings["seed"], settings["first"])
    ranges = {key: settings[key] for key in ("number", "apart", "inner", "far") if key in settings}
    half_adamw.launch(w, g, m, v, master, step, settings["found_inf"], *rest, **ranges)


def draw(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(count).bfloat16(),
        torch.randn(count).bfloat16(),
        torch.randn(count) * 0.1,
        torch.rand(count) * 0.01,
    )


def difference(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@interpreted
@pytest.mark.parametrize("step", [1, 2, 1000, 200_000])
@pytest.mark.parametrize("count", [1, 4097])
def test_half_adamw_is_adamw(step: int, count: int) -> None:
    w, g, m, v = draw(count)
    if step == 1:
        m, v = torch.zeros_like(m), torch.zeros_like(v)
    truth = reference(w, g, m, v, step, 1e-2, 0.1)
    half, mean, square, master = w.clone(), m.clone(), v.clone(), w.float()
    update(half, g, mean, square, t=step, lr=1e-2)
    assert difference(half, truth[0]) < 2**-7
    assert max(difference(mean, truth[1]), difference(square, truth[2])) < 2e-7
    update(w.clone(), g, m.clone(), v.clone(), master, t=step, lr=1e-2)
    assert difference(master, truth[0]) < 2e-7


@interpreted
def test_half_adamw_rounds_right_on_average_and_alike_on_shares() -> None:
    count = 60_000
    w, g = torch.ones(count, dtype=torch.bfloat16), torch.ones(count, dtype=torch.bfloat16)
    whole = w.clone()
    update(whole, g, torch.zeros(count), torch.zeros(count), lr=1e-4, decay=0.0)
    assert set(whole.tolist()) == {1.0, 1 - 2**-8}
    assert float(1 - whole.double().mean()) == pytest.approx(1e-4, rel=0.08)  # 4 standard deviations
    other = w.clone()
    update(other, g, torch.zeros(count), torch.zeros(count), lr=1e-4, decay=0.0, seed=78 << 40)
    assert not torch.equal(other, whole)
    parts = [slice(0, 777), slice(777, 4096), slice(4096, count)]
    for part in parts:
        share = w[part].clone()
        update(
            share,
            g[part],
            torch.zeros_like(share.float()),
            torch.zeros_like(share.float()),
            lr=1e-4,
            decay=0.0,
            first=part.start,
        )
        assert torch.equal(share, whole[part])


@interpreted
def test_half_adamw_rounds_ranges_of_a_stack_as_the_whole() -> None:
    """Experts whose rows are sharded: one range of the full parameter for each."""
    experts, rows, columns = 3, 6, 700
    count = experts * rows * columns
    w, g, m, v = draw(count)
    whole = w.clone()
    update(whole, g, m.clone(), v.clone(), lr=1e-2)
    assert not torch.equal(whole, w)
    for first in (0, 2, 4):
        share, slope, mean, square = (
            t.view(experts, rows, columns)[:, first : first + 2].contiguous() for t in (w, g, m, v)
        )
        update(share, slope, mean, square, lr=1e-2, first=first * columns, number=experts, apart=rows * columns)
        assert torch.equal(share, whole.view(experts, rows, columns)[:, first : first + 2])
        # Their columns too: a range for each row, in groups of an expert's.
        share, slope, mean, square = (
            t.view(experts, rows, columns)[:, first : first + 2, 90:].contiguous() for t in (w, g, m, v)
        )
        start = first * columns + 90
        update(
            share,
            slope,
            mean,
            square,
            lr=1e-2,
            first=start,
            number=experts * 2,
            apart=columns,
            inner=2,
            far=rows * columns,
        )
        assert torch.equal(share, whole.view(experts, rows, columns)[:, first : first + 2, 90:])


@interpreted
def test_half_adamw_changes_nothing_where_gradients_are_not_finite() -> None:
    for master in (False, True):
        w, g, m, v = draw(3000)
        g[5] = float("nan")
        held = [w, m, v, w.float() if master else None]
        before = [None if t is None else t.clone() for t in held]
        update(w, g, m, v, held[3], found_inf=torch.tensor(1.0))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(held, before, strict=True))
        update(w, g, m, v, held[3], found_inf=torch.tensor(0.0))
        assert w.isnan().nonzero().tolist() == [[5]]


@interpreted
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 20, 50), (16, 256, 32), (33, 129, 40)])
def test_eight_bits_are_multiplied_as_the_values_they_stand_for(rows: int, inputs: int, outputs: int) -> None:
    made = Int8Linear.of(torch.nn.Linear(inputs, outputs, bias=False))
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).half()
    out = multiply_int8_codes(x, made.codes, made.scales)
    assert out.dtype == x.dtype
    assert difference(out, x.double() @ made.weight.double().t()) < 1e-3


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_silu_and_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, a, b = (torch.randn(3, 1401).mul(4).to(dtype) for _ in range(3))
    wide = [t.double().requires_grad_() for t in (a, b)]
    truth = torch.nn.functional.silu(wide[0]) * wide[1]
    slopes = torch.autograd.grad(truth, wide, grad.double())
    close = 1e-6 if dtype == torch.float32 else 2e-3
    assert difference(rowwise_cuda.launch_gate(a, b), truth.detach()) < close
    for overwrite in (False, True):
        given = grad.clone()
        ours = rowwise_cuda.launch_gate_backward(given, a, b, overwrite=overwrite)
        assert max(difference(one, other) for one, other in zip(ours, slopes, strict=True)) < close
        if overwrite:
            assert difference(given, truth.detach()) < close
        else:
            assert torch.equal(given, grad)


@interpreted
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (3, 6)])
@pytest.mark.parametrize("angle_rows", [1, 2])
def test_rotary_embedding_turns_and_turns_back(heads: int, width: int, angle_rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, heads, width).transpose(1, 2)  # as attention sees what projections store
    angles = torch.randn(angle_rows, 5, width)  # the two halves need not be alike
    cos, sin = angles.cos(), angles.sin()
    wide = x.double().requires_grad_()
    one, other = wide.chunk(2, dim=-1)
    truth = wide * cos.double().unsqueeze(1) + torch.cat((-other, one), dim=-1) * sin.double().unsqueeze(1)
    turned = rowwise_cuda.launch_rotary(x, cos, sin, False)
    assert turned.is_contiguous()
    assert difference(turned.transpose(1, 2), truth.detach()) < 1e-6
    grad = torch.randn(truth.shape)
    (slope,) = torch.autograd.grad(truth, wide, grad.double())
    assert difference(rowwise_cuda.launch_rotary(grad, cos, sin, True).transpose(1, 2), slope) < 1e-6


COMPILED = """
import json, triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from preheat.ops import triton_kernels as kernels

def compiled(kernel, types, constants, capability):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    wide = [["tt.divisibility", 16]]  # what Triton finds out of the pointers and sizes that it is started with
    attributes = {(names.index(n),): wide for n in names if signature[n].startswith("*") or n in ("n", "n_bytes", "inputs", "outputs", "width") or n.endswith("stride")}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    read = ptx.count("ld.global.v4") + ptx.count("ld.global.v2") + ptx.count("cp.async.cg.shared")
    return read, ptx.count("st.global.v4") + ptx.count("st.global.v2")

wide = {}
types = dict(codes="*u8", scales="*u8", ranges="*fp32", pairs="*fp32", levels="*fp32", out="*bf16", n_bytes="i32", last="i32")
wide["nf4"] = compiled(kernels.nf4_kernel, types, dict(DOUBLE=True, BYTES=1024), 80)
types = {name: "fp32" for name in kernels.adamw_kernel.arg_names}
types |= dict(weight="*bf16", grad="*bf16", mean="*fp32", square="*fp32", master="*fp32", step="*fp32", found_inf="*fp32")
types |= dict(seed_low="i32", seed_high="i32", base="i32", shift="i32", n="i32", apart="i32", inner="i32", far="i32")
for capability, master in ((80, True), (90, False)):
    constants = dict(MASTER=master, GUARDED=True, SHIFTED=False, RUNS=False, LANES=512)
    wide[f"adamw {master}"] = compiled(kernels.adamw_kernel, types, constants, capability)
constants |= dict(SHIFTED=True, RUNS=True)
wide["adamw of ranges"] = compiled(kernels.adamw_kernel, types | dict(base="i64", apart="i64", far="i64"), constants, 90)
types = dict(grad="*bf16", a="*bf16", b="*bf16", out="*bf16", by_a="*bf16", by_b="*bf16", n="i32")
wide["gate"] = compiled(kernels.gated_silu_kernel, types, dict(LANES=2048), 90)
wide["gate backward"] = compiled(kernels.gated_silu_backward_kernel, types, dict(OVERWRITE=True, LANES=2048), 90)
types = {name: "i32" for name in kernels.rotary_kernel.arg_names} | dict(x="*bf16", cos="*bf16", sin="*bf16", out="*bf16")
wide["rotary"] = compiled(kernels.rotary_kernel, types, dict(BACK=True, HEADS=32, HALF=64), 90)
types = dict(x="*bf16", codes="*i8", scales="*bf16", out="*bf16", rows="i32", outputs="i32", inputs="i32")
wide["eight bits"] = compiled(kernels.eight_bits_kernel, types, dict(ROWS=16, OUTPUTS=32, INPUTS=128), 80)
print(json.dumps(wide))
"""


@pytest.mark.skipif(not TRITON, reason="triton is not installed; pip install triton")
def test_kernels_compile_for_gpus_and_read_and_write_in_wide_pieces() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    wide = json.loads(done.stdout)
    assert wide["nf4"][1] == 2, "16 weights a thread, 8 a store"
    assert wide["adamw True"] == [16, 16], "four tensors in four parts, read and written"
    assert wide["adamw False"] == [16, 12]
    assert wide["gate"] == [4, 2], "16 elements a thread, 8 a load"
    assert wide["gate backward"] == [6, 6]
    assert min(wide["rotary"]) >= 2
    assert wide["eight bits"][0] == 12, "copied ahead, 16 bytes at a time"


@pytest.mark.parametrize(("kind", "moved"), [(StochasticAdamW, 22), (MasterAdamW, 28)])
def test_a_fused_update_of_a_half_parameter_is_one_operator_without_scratch(kind: Any, moved: int) -> None:
    with FakeTensorMode(), Recorder(512) as recorder:
        p = torch.nn.Parameter(torch.empty(3000, 1000, dtype=torch.bfloat16))
        optimizer = kind([p], lr=1e-3, fused=True)
        p.grad, optimizer.found_inf = torch.empty_like(p), torch.zeros(())
        before, entries = recorder.mark(), len(recorder.log)
        optimizer.step()
        (kernel,) = (k for k in recorder.kernels - before.kernels if not k.operator.startswith("profiler"))
    assert kernel.operator == "preheat::half_adamw_"
    assert (kernel.bytes_read + kernel.bytes_written) / p.numel() == pytest.approx(
        moved, abs=2.01
    )  # the weight is given too
    assert recorder.log[entries:] == []


def test_failures_name_the_operator_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(TritonError=CompilationError))
    for error in (
        CompilationError("at 3:4"),
        RuntimeError("Triton Error [CUDA]: no kernel image"),
        ImportError("No module named 'triton'"),
    ):
        with (
            pytest.raises(RunError, match=r"kernel of half_adamw failed .*PREHEAT_PLAIN=half_adamw") as caught,
            cuda_kernels.name_failures("half_adamw"),
        ):
            raise error
        assert str(error) in str(caught.value)
    for other in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        KeyError("a fault of ours"),
    ):
        with pytest.raises(type(other)), cuda_kernels.name_failures("nf4_values"):
            raise other
    monkeypatch.setenv("PREHEAT_PLAIN", "nf4_values, half_adamw")
    assert cuda_kernels.is_plain("nf4_values")
    assert not cuda_kernels.is_plain("int8_product")
    monkeypatch.setenv("PREHEAT_PLAIN", "nf4,all")
    with pytest.raises(RunError, match="PREHEAT_PLAIN: 'nf4' is not an operator with a kernel; use nf4_values"):
        cuda_kernels.is_plain("nf4_values")
