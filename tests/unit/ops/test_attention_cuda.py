"""Attention on CUDA as far as a CPU shows it: operators on a CPU and on fake tensors, and what a plan sees."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._gpu.attention import cases, run
from preheat import recipe as recipes
from preheat.core import Build, Device, MaskSpec, Phase, Slot
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients
from preheat.models.hf import find_anatomy
from preheat.ops.attention import multihead, sdpa
from preheat.ops.attention import varlen as attention_varlen
from preheat.ops.attention.custom_op import OpaqueAttention, OpaqueMask
from preheat.ops.attention.multihead import attend_fastest
from preheat.ops.attention.per_document import Passes, attend
from preheat.ops.attention.sdpa import reference_attention, sdpa_attention
from preheat.ops.attention.varlen import compute_bounds, varlen_attention, varlen_attention_backward
from preheat.planning.dispatch_recorder import Recorder
from preheat.planning.dry_run import observe, peak_by_phase
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.techniques.compile import compile_layers

from ...conftest import DEVICE, difference, tiny, uneven
from ...gpu.conftest import copy_weights

DOCUMENTS = ((90,), (40, 1, 49), (1, 1, 88))
VARLEN = functools.partial(sdpa_attention, varlen=True)


def qkv(dim: int = 16, heads: int = 4, shared: int = 2, length: int = 90, **more: Any) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(3, length, h, dim, **more).transpose(1, 2) for h in (heads, shared, shared)]
    return [t.requires_grad_() for t in made]


def both(kernel: Any, tensors: list[Tensor], mask: MaskSpec) -> dict[str, Tensor]:
    """The result and the gradients, by name."""
    out = kernel(*tensors, mask, 0.3)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return dict(zip("oqkv", (out.detach(), *torch.autograd.grad(out, tensors, slope)), strict=True))


@pytest.mark.parametrize("case", [c for c in cases("cpu") if c.kernel != "blocks"], ids=str)
def test_the_checks_for_a_gpu_pass_on_a_cpu(case: Any) -> None:
    errors = run(case, "cpu")
    assert max(errors.values()) < case.bound, errors


@pytest.mark.parametrize("opaque", [False, True])
def test_one_call_gives_what_a_call_for_each_length_gives(opaque: bool) -> None:
    """In one operator and, as compiled layers call it, beneath autograd."""
    mask, tensors = MaskSpec(documents=DOCUMENTS), qkv()
    other: Any = OpaqueAttention(VARLEN) if opaque else VARLEN
    asked: Any = OpaqueMask.of(mask, 3, 90) if opaque else mask
    ours, wanted = both(other, tensors, asked), both(functools.partial(sdpa_attention, varlen=False), tensors, mask)
    assert difference(ours, wanted) < 1e-6
    far = both(VARLEN, tensors, MaskSpec(documents=((90,),) * 3))
    assert difference(far, wanted) > 0.1, "the documents matter"


@pytest.mark.parametrize("causal", [True, False])
def test_windows_are_those_of_the_mask(causal: bool) -> None:
    mask = MaskSpec(causal=causal, window=7, documents=DOCUMENTS)
    tensors = qkv()
    assert difference(both(VARLEN, tensors, mask), both(reference_attention, tensors, mask)) < 1e-5


def test_the_operators_keep_torchs_contract() -> None:
    q, k, v = qkv(8)
    settings = (*compute_bounds(MaskSpec(documents=DOCUMENTS), 3, 90, q), True, 9, 0.3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.preheat.varlen_attention.default, (q, k, v, *settings), test_utils=checks)
    out, lse = (t.detach() for t in torch.ops.preheat.varlen_attention(q, k, v, *settings))
    plain = [t.detach() for t in (q, k, v)]
    torch.library.opcheck(
        torch.ops.preheat.varlen_attention_backward.default,
        (torch.randn_like(out), *plain, out, lse, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


@contextmanager
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was read back from the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, read)
        yield


@pytest.mark.parametrize("mask", [MaskSpec(documents=DOCUMENTS), MaskSpec(documents=DOCUMENTS, window=20)], ids=str)
def test_a_layer_makes_one_call_a_pass_and_reads_nothing(mask: MaskSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, layers = Recorder(rounding=512), 3
    with FakeTensorMode(), recorder:
        x, k, v = qkv(dtype=torch.bfloat16)
        with nothing_is_read(monkeypatch):
            for _ in range(layers):
                x = VARLEN(x, k, v, mask, 0.3)
            x.sum().backward()
    counts: Counter[str] = Counter()
    for kernel, count in recorder.kernels.items():
        counts[kernel.operator.removeprefix("preheat::")] += count
    assert counts["varlen_attention"] == counts["varlen_attention_backward"] == layers
    assert not {"index_select", "_to_copy", "copy_", "cat"} & counts.keys()


def test_bounds_are_sent_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(
        attention_varlen, "to_device", lambda array, device: sent.append(array.tolist()) or torch.from_numpy(array)
    )
    attention_varlen._compute_offsets.cache_clear()
    for documents in (DOCUMENTS, ((30, 60),) * 3):
        for _ in range(3):  # layers
            both(VARLEN, qkv(), MaskSpec(documents=documents))
    assert sent == [[0, 90, 130, 131, 180, 181, 182, 270], [0, 30, 90, 120, 180, 210, 270]]
    attention_varlen._compute_offsets.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 89, 200])
def test_flops_are_counted_by_documents(causal: bool, window: int | None) -> None:
    mask = MaskSpec(causal=causal, window=window, documents=DOCUMENTS)
    recorder = Recorder(rounding=64)
    with FakeTensorMode(), recorder:
        attention_varlen.attend_varlen(*qkv(), mask, 0.3).sum().backward()
    found = {k.operator.removeprefix("preheat::"): k for k in recorder.kernels if k.flops}
    pairs = 0
    for n in itertools.chain.from_iterable(DOCUMENTS):
        if window is None or window >= n:
            pairs += n * n  # as torch counts; who halves it for causal attention does so afterwards
        else:
            seen = sum(abs(i - j) < window and (j <= i or not causal) for i in range(n) for j in range(n))
            pairs += 2 * seen if causal else seen
    assert found["varlen_attention"].flops == 4 * 4 * 16 * pairs
    assert found["varlen_attention_backward"].flops == 10 * 4 * 16 * pairs
    assert {k.causal for k in found.values()} == {causal}


# --- fp32, for which keys and values are repeated


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_repeated_keys_have_the_sum_of_their_heads_gradients(documents: Any) -> None:
    """The passes of the efficient kernel, with the CPU's flash attention in its place."""
    mask, tensors = MaskSpec(documents=documents), qkv()
    passes = sdpa._build_efficient_passes(True, 0.3)
    ours = both(lambda q, k, v, mask, scale: attend(passes, q, k, v, mask.documents), tensors, mask)
    assert difference(ours, both(reference_attention, tensors, mask)) < 1e-5


def test_torchs_operators_for_a_gpu_take_what_they_are_handed() -> None:
    """On meta tensors, which run what CUDA tensors do here, by torch's own account of shapes."""
    q, k, v = (t.detach().to("meta", torch.bfloat16) for t in qkv())
    settings = (torch.empty(8, dtype=torch.int32, device="meta"), 90, 1, True, 20, 0.3)
    for passes in (
        sdpa._build_efficient_passes(True, 0.3),
        sdpa._build_flash_passes(True, 0.3),
        Passes(
            lambda *t: varlen_attention._init_fn(*t, *settings),
            lambda *t: varlen_attention_backward._init_fn(*t, *settings),
            statistics=True,
        ),
    ):
        out, lse = passes.forward(q, k, v)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        grads = passes.backward(torch.empty_like(out), q, k, v, out, lse)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_the_plan_sees_repeated_keys_while_they_are_there_and_not_kept() -> None:
    peak, kept = {}, {}
    for kernel in ("flash", "efficient"):
        recorder, saved = Recorder(rounding=64), {}

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[id(t.untyped_storage())] = t.untyped_storage().nbytes()
            return t

        with FakeTensorMode(), recorder:
            tensors = qkv(64, 8, 1)
            recorder.phase = Phase.FORWARD
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                out = sdpa_attention(*tensors, MaskSpec(), 0.3, kernel=kernel)
            peak[kernel], kept[kernel] = peak_by_phase(recorder)["forward"], sum(saved.values())
            del out
    whole = 3 * 90 * 8 * 64 * 4
    assert kept["efficient"] == kept["flash"]
    assert peak["efficient"] >= peak["flash"] + 2 * whole * 7 // 8


@pytest.mark.parametrize("card", ["H100", "RTX-4090"])
def test_fp32_recipes_of_grouped_heads_are_planned_for_a_gpu(card: str) -> None:
    recipe = tiny("{efficient_attention: {}}")
    seen = observe(Request(recipe, Roofline.of(card).as_device, vocabulary=96))
    (change,) = seen.changes["efficient_attention"]
    assert change.kernel == "efficient"
    flops = sum(k.flops * n for k, n in seen.kernels.items() if "attention" in k.operator)
    assert flops == 3 * 14 * 4 * 4 * 32 * 32 * 8


# --- techniques around it


def test_packed_rows_are_planned_as_one_call_a_layer() -> None:
    """Of pairs a plan knows that rows are packed."""
    recipe = tiny("{efficient_attention: {}, mixed_precision: {mode: bf16}, preference: {}}")
    seen = observe(Request(recipe, Roofline.of("H100").as_device, vocabulary=96))
    counts: Counter[str] = Counter()
    for kernel, count in seen.kernels.items():
        counts[kernel.operator] += count
    assert counts["preheat::varlen_attention"] == 2 * 3, "of the policy and of what it is compared with"
    assert counts["preheat::varlen_attention_backward"] == 3


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _with_varlen(techniques: str) -> Build:
    made = build(tiny(techniques), vocabulary=96, device=DEVICE)
    made.claim(Slot.ATTENTION_KERNEL, VARLEN, "efficient_attention")
    return made


def _grads(made: Build) -> dict[str, Tensor]:
    accumulate_gradients(made, [uneven()])
    found = {n: p.grad.clone() for n, p in made.parameters()}
    made.optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("mode", "calls"), [("full", 6), ("selective", 3)])
def test_checkpointed_layers_keep_the_result_where_they_keep_attention(mode: str, calls: int) -> None:
    made = _with_varlen(f"{{activation_checkpointing: {{mode: {mode}}}}}")
    with _Count() as count:
        ours = _grads(made)
    assert difference(ours, _grads(build(tiny(), vocabulary=96, device=DEVICE))) < 1e-5
    assert count.found["preheat::varlen_attention"] == calls


@pytest.mark.parametrize("varlen", [False, True])
def test_compiled_layers_attend_once(varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows in compiled layers: the backward pass has the result and its statistics."""
    calls: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (calls.update([name]), plain(*a, **k))[1])

    made = _with_varlen("{}") if varlen else build(tiny("{efficient_attention: {}}"), vocabulary=96, device=DEVICE)
    compile_layers(find_anatomy(made.trained[0]).layers, backend="aot_eager")  # type: ignore[arg-type]
    wanted = _grads(build(tiny(), vocabulary=96, device=DEVICE))
    assert difference(_grads(made), wanted) < 1e-5
    for module, name in ((sdpa, "flash_forward"), (attention_varlen, "_attend_by_document")):
        counted(module, name)
    assert difference(_grads(made), wanted) < 1e-5
    if varlen:
        assert calls == {"_attend_by_document": 3}
    else:  # once a layer and group of about equal length, all of which are padded to the row's
        assert calls == {"flash_forward": 3}


def test_a_window_is_traced_by_the_compiler() -> None:
    tensors, mask = qkv(), MaskSpec(window=20)
    traced = torch.compile(functools.partial(VARLEN, mask=mask, scale=0.3), backend="aot_eager", fullgraph=True)
    ours = both(lambda q, k, v, *_: traced(q, k, v), tensors, mask)
    assert difference(ours, both(reference_attention, tensors, mask)) < 1e-5


@pytest.mark.parametrize("mask", [MaskSpec(documents=DOCUMENTS), MaskSpec(window=20)], ids=str)
def test_half_precision_takes_the_variable_length_form(mask: MaskSpec) -> None:
    """On a fake CUDA device, where no technique says so."""
    with FakeTensorMode(), torch.no_grad(), _Count() as count:
        out = attend_fastest(*qkv(dtype=torch.bfloat16, device="cuda"), mask, 0.3)
    assert out.shape == (3, 4, 90, 16)
    assert {name for name in count.found if "attention" in name} == {"preheat::varlen_attention"}


def test_fp32_never_meets_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(multihead, "sdpa_attention", lambda *_, kernel="flash": taken.append(kernel))
    with FakeTensorMode():
        attend_fastest(*qkv(device="cuda"), MaskSpec(documents=DOCUMENTS), 0.3)
    assert taken == ["efficient"]


def test_weights_are_copied_between_builds_of_other_seeds() -> None:
    """What the tests on a GPU compare by: each device draws weights of its own."""
    techniques = "{mixed_precision: {mode: bf16}, lora: {}, preference: {}}"
    plain = build(tiny(techniques), vocabulary=96, device=DEVICE)
    other = build(recipes.override(tiny(techniques), "seed=5"), vocabulary=96, device=DEVICE)
    states = [{n: t.clone() for n, t in b.trained[0].state_dict().items()} for b in (plain, other)]
    assert difference(states[1], states[0]) > 0.1
    copy_weights(plain, other)
    assert difference(other.trained[0].state_dict(), states[0]) == 0


CUDA = Device("cuda", "test", 80 << 30, (8, 0))


@pytest.mark.parametrize("version", [91501, 90800, None])
def test_hopper_takes_cudnns_attention_where_torch_does(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.engine.builder import build_context
    from preheat.models.hf import configure

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    recipe = tiny("{efficient_attention: {}, mixed_precision: {mode: bf16}}")
    hopper = Device("cuda", "test", 80 << 30, (9, 0))
    technique: Any = recipe.techniques["efficient_attention"]
    chosen = technique._choose_kernel(build_context(recipe, configure(recipe), hopper))
    assert chosen == ("cudnn" if version == 91501 else "flash")


def test_bounds_reach_a_device_under_fakes_too() -> None:
    """The budget of selective checkpointing looks at a layer in fakes, which know no pinned memory."""
    from preheat.hardware.transfers import to_device

    bounds = torch.arange(4).numpy()
    with FakeTensorMode():
        assert to_device(bounds, torch.device("meta")).shape == (4,)


def test_the_cost_of_attention_with_shared_keys_is_known() -> None:
    from preheat.ops.memory.selective_checkpoint import _count_cost

    q, k = torch.empty(2, 8, 64, 32, device="meta"), torch.empty(2, 2, 64, 32, device="meta")
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _count_cost(flash, (q, k, k), (q,), []) == 4 * 2 * 8 * 64 * 64 * 32
