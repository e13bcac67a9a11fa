"""Compiled layers: one graph for all batches of a shape, a count of every other, and words when no more are made.

The compiler's front half is used (`aot_eager`: graphs, guards, the split into forward and backward); code is made in tests/contract.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from preheat.core import Build, Device, MaskSpec
from preheat.engine.builder import build, build_context
from preheat.engine.step import accumulate_gradients, forward, update
from preheat.errors import RecipeError, RunError
from preheat.models import hf
from preheat.models.hf import find_anatomy
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.custom_op import OpaqueAttention, OpaqueMask
from preheat.ops.attention.sdpa import reference_attention, sdpa_attention
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.recipe import override, parse
from preheat.techniques.compile import _ONE_GRAPH, Compile, compile_layers

from ...architectures.tiny import tiny_config
from ...conftest import DEVICE, difference, tiny, uneven


def _pair(techniques: str = "{}", **settings: Any) -> tuple[Build, Build, Any]:
    plain, other = (build(tiny(techniques), vocabulary=96, device=DEVICE) for _ in range(2))
    return plain, other, compile_layers(find_anatomy(other.trained[0]).layers, **{"backend": "aot_eager", **settings})  # type: ignore[arg-type]


def _grads(b: Build, batch: Any) -> dict[str, torch.Tensor]:
    accumulate_gradients(b, [batch])
    found = {n: p.grad.clone() for n, p in b.parameters()}
    b.optimizer.zero_grad()
    return found


def _cut(*cuts: int) -> Any:
    batch = uneven()
    batch.mask = MaskSpec(documents=tuple((n, 32 - n) if n else (32,) for n in cuts))
    return batch


@pytest.mark.parametrize(
    "kernel", ["{}", "{efficient_attention: {kernel: flash}}", "{efficient_attention: {kernel: blocks}}"]
)
def test_batches_of_other_documents_need_no_other_graph(kernel: str) -> None:
    plain, other, compiled = _pair(kernel)
    for cuts in ((1, 2, 3, 4), (0, 9, 31, 16), (5, 5, 5, 5)):
        assert difference(_grads(other, _cut(*cuts)), _grads(plain, _cut(*cuts))) < 1e-6
    assert compiled.graphs == 1


@pytest.mark.parametrize(
    ("name", "apart", "more"),
    [("lfm2", 1, ""), ("falcon_h1", 2, ", activation_checkpointing: {}"), ("gpt_oss", 2, ""), ("llama4_text", 1, "")],
)
def test_mixers_that_cut_rows_by_documents_stay_out_of_the_graphs(
    name: str, apart: int, more: str, tmp_path: Path
) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    recipe = parse(
        f"model: {{path: {tmp_path}, weights: random}}\nstop: {{max_steps: 1}}\nbatch: {{size: 4, seq_len: 32}}\n"
        f"techniques: {{efficient_attention: {{}}{more}}}"
    )
    plain, other = (build(recipe, vocabulary=96, device=DEVICE) for _ in range(2))
    compiled = compile_layers(find_anatomy(other.trained[0]).layers, backend="aot_eager")  # type: ignore[arg-type]
    assert compiled.apart == apart
    for cuts in ((1, 2, 3, 4), (0, 9, 31, 16)):
        assert difference(_grads(other, _cut(*cuts)), _grads(plain, _cut(*cuts))) < 2e-5
    # A full layer, a norm and a feed-forward block, or a norm, attention and a block: none for other documents.
    assert compiled.graphs == 3
    norm = next(module for module in compiled.modules if type(module).__name__.endswith("Norm"))
    compiled.call_layer(lambda **_: norm(torch.ones(1, 5, 32)), past_key_values=object())
    assert compiled.graphs == 3  # nothing of a layer with a cache is compiled


def test_the_gradients_depend_on_the_documents() -> None:
    """The test above can fail: with another cut they differ."""
    plain, other, _ = _pair()
    assert difference(_grads(other, _cut(1, 2, 3, 4)), _grads(plain, _cut(0, 9, 31, 16))) > 1e-2


@pytest.mark.parametrize("kernel", [reference_attention, sdpa_attention, attend_blockwise])
@pytest.mark.parametrize("documents", [None, ((5, 35), (40,))])
def test_an_opaque_kernel_has_the_kernels_results_and_gradients(kernel: Any, documents: Any) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 40, 16) for heads in (8, 2, 2)]
    slope, mask = torch.randn(2, 8, 40, 16), MaskSpec(documents=documents)
    found = []
    for function, what in ((kernel, mask), (OpaqueAttention(kernel), OpaqueMask.of(mask, 2, 40))):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves, what, 0.25)
        parts = [out, *torch.autograd.grad(out, leaves, slope)]
        found.append({str(i): t.detach() for i, t in enumerate(parts)})
    assert difference(found[1], found[0]) < 1e-6


@pytest.mark.parametrize("kernel", [attend_blockwise, sdpa_attention])
def test_the_operator_keeps_torchs_contract(kernel: Any) -> None:
    attend = OpaqueAttention(kernel)
    q, k, v = (torch.randn(2, heads, 8, 4, requires_grad=True) for heads in (4, 2, 2))
    mask = OpaqueMask.of(MaskSpec(documents=((3, 5), (8,))), 2, 8)
    arguments = (q, k, v, mask.documents, attend.number, True, 0, 0, 0.5, 0.0, kernel is sdpa_attention)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.preheat.attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize("mode", ["full", "selective", "selective, products: 2", "budget, budget: 0.5"])
def test_checkpointed_layers_are_compiled_whole(mode: str) -> None:
    techniques = f"{{activation_checkpointing: {{mode: {mode}}}, mixed_precision: {{}}, efficient_attention: {{}}}}"
    plain, other = (build(tiny(techniques), vocabulary=96, device=DEVICE) for _ in range(2))
    compiled = compile_layers(find_anatomy(other.trained[0]).layers, backend="aot_eager")  # type: ignore[arg-type]
    assert difference(_grads(other, uneven()), _grads(plain, uneven())) < 0.01
    assert compiled.graphs == 1


def test_compiled_layers_keep_what_was_chosen_before_they_were_traced() -> None:
    """Of a layer's nine products eight are kept (no gradient needs the last), four or none; the others are computed twice: by the operators that run."""
    counts = {}
    for mode in ("full", "selective", "selective, products: 2"):
        made = build(tiny(f"{{activation_checkpointing: {{mode: {mode}}}}}"), vocabulary=96, device=DEVICE)
        compile_layers(find_anatomy(made.trained[0]).layers, backend="aot_eager")  # type: ignore[arg-type]
        _grads(made, uneven())
        with FlopCounterMode(display=False) as counter:
            _grads(made, uneven())
        counts[mode] = counter.get_total_flops()
    width, inner, tokens, layers = 32, made.trained[0].config.intermediate_size, 4 * 32, 3
    sizes = (width, width // 2, width // 2, width, inner, inner)  # what q, k, v and o, gate and up give
    maps = [2 * tokens * width * size for size in sizes]
    scores = 2 * tokens * 32 * width  # of 32 tokens with 32, and as much again with the values
    again = [layers * flops for flops in (*maps[:3], scores, scores, *maps[3:])]
    assert counts["full"] - counts["selective"] == sum(again)
    assert counts["selective, products: 2"] - counts["selective"] == sum(again[::2])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_the_plan_keeps_what_compiled_layers_keep(precision: str) -> None:
    """Or little more: the compiler also makes the second residual sum anew."""
    techniques = f"{{efficient_attention: {{}}, mixed_precision: {{mode: {precision}}}}}"
    batch = uneven()
    batch.mask = MaskSpec(documents=((32,),) * 4)

    def kept(b: Build) -> int:
        storages: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in b.trained[0].parameters()}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = forward(b, batch).total
        del loss
        return sum(storages.values())

    plain, other, _ = _pair(techniques, backend="aot_eager_decomp_partition")
    asked = build(tiny(techniques.replace("{eff", "{compile: {}, eff")), vocabulary=96, device=DEVICE)
    with _Dispatch():
        planned = kept(asked)
    compiled = kept(other)
    assert 0.99 * compiled < planned < 1.15 * compiled
    assert planned < 0.9 * kept(plain)


class _Dispatch(TorchDispatchMode):
    """Does nothing: under any mode layers run as they are planned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_other_shapes_are_counted_and_beyond_the_limit_they_run_uncompiled() -> None:
    plain, other, compiled = _pair(limit=2)
    for rows, length in ((4, 32), (4, 32), (2, 32), (3, 16), (4, 32)):
        batch = uneven(rows, length)
        assert difference(_grads(other, batch), _grads(plain, batch)) < 1e-6
    assert compiled.graphs == 2, "the third shape got none"


def test_the_run_is_told_of_recompilations_and_of_the_limit() -> None:
    from preheat.core.run_records import Event
    from preheat.training.loop import _Loop
    from preheat.training.observer import Watch

    told: list[str] = []

    class Told(Watch):
        def notice(self, words: str) -> None:
            told.append(words)

    events: list[Event] = []
    b = build(tiny("{compile: {limit: 2}}"), vocabulary=96, device=DEVICE)
    session: Any = SimpleNamespace(
        recipe=b.recipe,
        build=b,
        progress=SimpleNamespace(step=0),
        ranks=SimpleNamespace(lead=False, fetch=lambda key: 0),
        writer=SimpleNamespace(path=Path("run"), write_event=events.append),
    )
    standing: Any = SimpleNamespace()
    loop = _Loop(session, Told(), standing)
    assert loop._drain_events() == {"recompilations": 0}
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        for rows in (4, 3, 2):
            accumulate_gradients(b, [uneven(rows)])
            update(b, 0.01)
    assert loop._drain_events() == {"recompilations": 1}
    assert [event.kind for event in events] == ["notice"]
    assert len(told) == 1
    assert "compile.limit: 2 graphs" in told[0]


Backend = Callable[..., object]


@pytest.fixture
def counting() -> tuple[Backend, list[int]]:
    """A backend, and a list with the number of calls of compiled forward passes."""
    calls = [0]

    def forward_code(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls[0] += 1
            return graph(*arguments)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=forward_code, bw_compiler=lambda graph, _: make_boxed_func(graph)), calls


LAYERS = 6
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "smollm3": {"no_rope_layers": [1, 1, 0] * 2},
    # Five layers are compiled whole. Of the last, whose attention is in chunks, a norm and the feed-forward block are.
    "llama4_text": {
        "layer_types": ["full_attention"] * 5 + ["chunked_attention"],
        "no_rope_layers": [0] * 5 + [1],
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
    },
}


def _of_kinds(family: str, techniques: str, folder: Path) -> Build:
    tiny_config(family, num_hidden_layers=LAYERS, **KINDS[family]).save_pretrained(folder)
    recipe = parse(
        f"model: {{path: {folder}, weights: random}}\nstop: {{max_steps: 1}}\nbatch: {{size: 4, seq_len: 32}}\n"
        f"techniques: {{efficient_attention: {{}}{techniques}}}"
    )
    return build(recipe, vocabulary=96, device=DEVICE)


@pytest.mark.parametrize(
    ("family", "techniques", "graphs", "calls"),
    [
        ("llama", "", 1, LAYERS),
        ("llama", ", activation_checkpointing: {}", 1, LAYERS),
        ("llama", ", lora: {rank: 2}", 2, LAYERS),  # the first layer's input needs no gradient
        ("gpt2", "", 1, LAYERS),
        ("gemma2", "", 2, LAYERS),  # with and without a window
        ("smollm3", "", 2, LAYERS),  # with and without rotary positions
        ("llama4_text", "", 3, 5 + 2 + 1),  # layers, norms, feed-forward blocks
    ],
)
def test_one_graph_serves_all_layers_of_a_kind(
    family: str, techniques: str, graphs: int, calls: int, counting: tuple[Backend, list[int]], tmp_path: Path
) -> None:
    """Of more layers than the limit: the number of a layer is no constant of its graph."""
    plain, other = (_of_kinds(family, techniques, tmp_path) for _ in range(2))
    backend, called = counting
    compiled = compile_layers(find_anatomy(other.trained[0]).layers, backend=backend, limit=4)  # type: ignore[arg-type]
    for step, cuts in enumerate(((1, 2, 3, 4), (0, 9, 31, 16)), start=1):
        assert difference(_grads(other, _cut(*cuts)), _grads(plain, _cut(*cuts))) < 2e-5
        assert compiled.graphs == graphs
        assert called == [calls * step]
    assert compiled.compilations.total() == compiled.expected_compilations()
    assert compiled.new_notices() == []


def test_evaluation_and_rows_of_one_document_have_graphs_of_their_own(counting: tuple[Backend, list[int]]) -> None:
    plain, other, compiled = _pair("{efficient_attention: {}}", backend=counting[0])
    for cuts, graphs in (((1, 2, 3, 4), 1), ((0, 0, 0, 0), 2), ((5, 6, 7, 8), 2), ((0, 0, 0, 0), 2)):
        assert difference(_grads(other, _cut(*cuts)), _grads(plain, _cut(*cuts))) < 1e-6
        assert compiled.graphs == graphs
    with torch.no_grad():
        assert forward(other, _cut(1, 2, 3, 4)).total == pytest.approx(forward(plain, _cut(1, 2, 3, 4)).total)
    assert compiled.graphs == 3
    assert counting[1] == [5 * 3]


def test_layers_that_share_no_graph_are_reported_and_those_with_one_keep_it(
    counting: tuple[Backend, list[int]], tmp_path: Path
) -> None:
    """The scale of attention differs in each layer here, so that each needs a graph."""
    builds = {}
    for name in ("plain", "other"):
        tiny_config("gpt2", num_hidden_layers=LAYERS, scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path)
        recipe = override(tiny("{}", family="gpt2"), f"model={{path: {tmp_path}, weights: random}}")
        builds[name] = build(recipe, vocabulary=96, device=DEVICE)
    backend, called = counting
    layers = find_anatomy(builds["other"].trained[0]).layers  # type: ignore[arg-type]
    compiled = compile_layers(layers, backend=backend, limit=5)
    for step in (1, 2):
        assert difference(_grads(builds["other"], uneven()), _grads(builds["plain"], uneven())) < 1e-5
        assert called == [5 * step]
    assert compiled.compilations.total() == 5
    assert compiled.expected_compilations() == 4
    kinds, limit = compiled.new_notices()
    assert kinds.startswith("techniques.compile: layers were compiled 5 times for inputs of one shape")
    assert limit.startswith("techniques.compile.limit: 5 graphs are compiled")
    assert compiled.new_notices() == []


def test_what_cannot_be_one_graph_is_refused() -> None:
    stack = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    plain = stack[0].forward

    def chatty(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(x)

    stack[0].forward = chatty  # type: ignore[method-assign]
    compile_layers(stack, backend="aot_eager")
    with pytest.raises(RunError, match="use fullgraph: false"):
        stack[0](torch.ones(1, 2, 4))


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RecipeError, match="needs a C\\+\\+ compiler"):
        build(tiny("{compile: {}}"), vocabulary=96, device=DEVICE)


@pytest.mark.parametrize("mode", ["full", "selective", "budget, budget: 0.5"])
def test_compiled_layers_are_planned_with_every_way_to_checkpoint(mode: str) -> None:
    both = f"{{compile: {{}}, activation_checkpointing: {{mode: {mode}}}, efficient_attention: {{}}}}"
    fused = f"{{fused_operators: {{}}, activation_checkpointing: {{mode: {mode}}}, efficient_attention: {{}}}}"
    seen, like = (observe(Request(tiny(techniques), DEVICE, vocabulary=96)) for techniques in (both, fused))
    assert seen.flops == like.flops
    assert seen.peak["backward"] == pytest.approx(like.peak["backward"], rel=0.02)


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_search_compiles_whole_layers_of_the_families_that_can_be(tmp_path: Path) -> None:
    """One graph of each kind of layer, which a run would otherwise refuse at its first step; others and experts are left to smaller graphs, or alone."""
    for family in sorted(_ONE_GRAPH):
        folder = tmp_path / family
        config = transformers.AutoConfig.for_model(
            family, **SIZES | ({"partial_rotary_factor": 1.0} if family == "phi3" else {})
        )
        config.save_pretrained(folder)
        recipe = override(tiny("{efficient_attention: {}}"), f"model={{path: {folder}, weights: random}}")
        other = build(recipe, vocabulary=96, device=DEVICE)
        [option] = Compile().options(build_context(recipe, hf.configure(recipe, 96), Device("cuda", "a GPU", 1 << 30)))
        assert option.fullgraph  # type: ignore[attr-defined]
        compiled = compile_layers(find_anatomy(other.trained[0]).layers, backend="eager")  # type: ignore[arg-type]
        accumulate_gradients(other, [uneven()])
        assert compiled.graphs >= 1, family


def test_a_search_leaves_experts_and_changing_shapes_uncompiled() -> None:
    gpu = Device("cuda", "a GPU", 1 << 30)
    for settings in (
        ("model={family: qwen3_moe, num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 96}",),
        ("techniques={length_curriculum: {}}",),
    ):
        recipe = override(tiny("{}"), *settings)
        assert not list(Compile().options(build_context(recipe, hf.configure(recipe, 96), gpu)))
