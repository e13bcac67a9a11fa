"""Windows, sparse patterns, FlexAttention and FlashAttention's packages against slow references; which kernel is taken."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from preheat import recipe as recipes
from preheat.core import Batch, Device, MaskSpec, Phase, conflicts_of
from preheat.engine.builder import build, build_context
from preheat.engine.step import accumulate_gradients
from preheat.errors import RecipeError
from preheat.hardware.cpp_build import find_compiler
from preheat.models.hf import configure
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.custom_op import OpaqueMask
from preheat.ops.attention.flex import build_block_mask
from preheat.ops.attention.multihead import attend_in_chunks
from preheat.ops.attention.patterns import limit_to_shifted_groups, limit_to_window
from preheat.ops.attention.sdpa import build_dense_mask, reference_attention, sdpa_attention
from preheat.planning.dispatch_recorder import Recorder
from preheat.planning.dry_run import peak_by_phase
from preheat.techniques.efficient_attention import EfficientAttention

from ...conftest import DEVICE, difference, split, tiny, uneven

COMPILED = (
    "flash" if find_compiler() is None else "blocks"
)  # without its C++ kernel blocks is slower than torch's in fp32
DOCUMENTS = ((300,), (150, 20, 130), (1, 299))


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=0.1))  # a gradient may be 0: of a window of one token


def qkv(length: int = 300, rows: int = 3, heads: int = 4, shared: int = 2, dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, h, length, dim, requires_grad=True) for h in (heads, shared, shared)]


def agrees(kernel: Any, reference: Any, tensors: list[Tensor], mask: MaskSpec, tolerance: float = 3e-6) -> None:
    a, b = kernel(*tensors, mask, 0.3), reference(*tensors, mask, 0.3)
    assert apart(a, b) < tolerance
    weight = torch.randn_like(a)
    grads = [torch.autograd.grad((out * weight).sum(), tensors) for out in (a, b)]
    assert max(apart(x, y) for x, y in zip(*grads, strict=True)) < tolerance


def by_definition(mask: MaskSpec, row: int, i: int, j: int, length: int) -> bool:
    """MaskSpec's words, one pair of places at a time."""
    cuts = mask.documents[row] if mask.documents else (length,)
    begin = 0
    for n in cuts:
        if begin <= i < begin + n:
            break
        begin += n
    if not begin <= j < begin + n or (mask.causal and j > i):
        return False
    if mask.window is None or min(i, j) - begin < mask.global_tokens:
        return True
    return abs(i - j) < mask.window


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "shared"), [(None, 0), (3, 0), (3, 2), (1, 1), (None, 2)])
@pytest.mark.parametrize("documents", [None, ((12,), (5, 1, 6))])
def test_the_mask_says_what_its_words_say(causal: bool, window: int | None, shared: int, documents: Any) -> None:
    mask = MaskSpec(causal, window, documents, shared)
    may = build_dense_mask(mask, 2, 12, torch.device("cpu")).expand(2, 1, 12, 12)
    for row, i, j in itertools.product(range(2), range(12), range(12)):
        assert bool(may[row, 0, i, j]) == by_definition(mask, row, i, j, 12), (row, i, j)


@pytest.mark.parametrize("window", [1, 2, 5, 100, 127, 128, 129, 200, 299])
@pytest.mark.parametrize("more", [{}, {"documents": DOCUMENTS}, {"causal": False}, {"global_tokens": 3}], ids=str)
def test_blocks_of_a_window_agree_forward_and_backward(window: int, more: dict[str, Any]) -> None:
    agrees(attend_blockwise, reference_attention, qkv(), MaskSpec(window=window, **more))


@pytest.mark.parametrize(("window", "shared"), [(5, 20), (40, 128), (40, 200), (130, 150)])
def test_blocks_with_global_tokens_in_documents_agree(
    window: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import preheat.ops.attention.blockwise as module

    mask = MaskSpec(window=window, global_tokens=shared, documents=DOCUMENTS)
    agrees(attend_blockwise, reference_attention, qkv(), mask)
    monkeypatch.setattr(module, "_SCRATCH", 1 << 15)  # one head at a time
    agrees(attend_blockwise, reference_attention, qkv(), MaskSpec(window=window, global_tokens=shared))


def test_a_window_costs_length_times_window() -> None:
    def flops(length: int, mask: MaskSpec) -> int:
        recorder = Recorder(rounding=1)
        tensors = qkv(length, 1, 1, 1)
        with recorder:
            attend_blockwise(*tensors, mask, 1.0).sum().backward()
        return sum(k.flops * n for k, n in recorder.kernels.items())

    narrow = [flops(n, MaskSpec(window=64)) for n in (512, 1024, 2048)]
    assert narrow[2] - narrow[1] == 2 * (narrow[1] - narrow[0]), "every block beyond the first costs the same"
    assert narrow[2] < flops(2048, MaskSpec()) / 4


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("documents", [None, ((300,), (150, 20, 130), (1, 299))])
@pytest.mark.parametrize("kernel", [sdpa_attention, attend_blockwise, reference_attention])
def test_shifted_groups_are_what_their_paper_says(heads: int, shared: int, documents: Any, kernel: Any) -> None:
    """Half of the heads in groups of 40, the other half in groups that begin 20 later."""
    group, length = 40, 300
    place = torch.arange(length)
    begins = torch.stack(
        [torch.cat([torch.arange(n) for n in d]) for d in documents or ((length,),) * 3]
    )  # place in the document
    owner = (begins == 0).cumsum(1)
    if shared % 2 == 0:
        late = torch.arange(heads) >= heads // 2
    else:  # half of the heads of each key
        late = torch.arange(heads) % (heads // shared) >= heads // shared // 2
    number = torch.where(late[None, :, None], (begins[:, None] + group // 2) // group, begins[:, None] // group)
    may = (place[:, None] >= place) & (owner[:, None, :, None] == owner[:, None, None, :])
    may = may & (number[..., :, None] == number[..., None, :])

    def slow(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
        k, v = (t.repeat_interleave(heads // shared, dim=1) for t in (k, v))
        return torch.softmax((q @ k.transpose(-1, -2) * scale).masked_fill(~may, float("-inf")), -1) @ v

    agrees(limit_to_shifted_groups(kernel, group), slow, qkv(heads=heads, shared=shared), MaskSpec(documents=documents))


def test_patterns_refuse_what_they_cannot_do() -> None:
    q, k, v = qkv(8, heads=3, shared=3)
    with pytest.raises(ValueError, match="not 3"):
        limit_to_shifted_groups(reference_attention, 4)(q, k, v, MaskSpec(), 1.0)
    with pytest.raises(ValueError, match="use_cache=False"):
        limit_to_window(reference_attention, 4)(q[:, :, :1], k, v, MaskSpec(), 1.0)


@pytest.mark.parametrize(
    "mask",
    [
        MaskSpec(),
        MaskSpec(window=70),
        MaskSpec(causal=False, window=70),
        MaskSpec(documents=DOCUMENTS),
        MaskSpec(documents=DOCUMENTS, window=50, global_tokens=4),
        MaskSpec(window=50, global_tokens=4),
        MaskSpec(causal=False, window=9, global_tokens=200),
    ],
    ids=str,
)
def test_flex_sees_what_the_mask_says(mask: MaskSpec) -> None:
    """Its blocks: none is left out in which something may be seen, none is taken for full that is not, and none is there twice."""
    from preheat.ops.attention.flex import build_block_mask

    blocks = build_block_mask(mask, 300, torch.device("cpu"))
    may = build_dense_mask(mask, 3, 300, torch.device("cpu"))
    tiles = nn.functional.pad(may, (0, 84, 0, 84)).unflatten(2, (3, 128)).unflatten(4, (3, 128))
    some, every = tiles.any(5).any(3), tiles.all(5).all(3)

    def dense(count: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(index.shape, dtype=torch.bool)
        for place in itertools.product(*(range(n) for n in count.shape)):
            out[(*place, index[place][: int(count[place])].long())] = True
        return out

    partial = dense(blocks.kv_num_blocks, blocks.kv_indices)
    full = dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not bool((partial & full).any())
    assert torch.equal(partial | full, some)
    assert torch.equal(full, every)


def test_flex_agrees_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiler, which takes long, and without gradients, which it does not have on a CPU."""
    from torch.nn.attention import flex_attention as theirs

    import preheat.ops.attention.flex as module

    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(module, "_compile_kernel", lambda: theirs.flex_attention)
    for mask in (MaskSpec(window=70), MaskSpec(documents=DOCUMENTS, window=50, global_tokens=4)):
        tensors = [t.detach() for t in qkv()]
        assert (
            apart(module.compiled_flex_attention(*tensors, mask, 0.3), reference_attention(*tensors, mask, 0.3)) < 3e-6
        )
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        module.compiled_flex_attention(*qkv(), MaskSpec(), 0.3)


@pytest.mark.parametrize("seed", range(6))
def test_all_kernels_agree_on_random_documents(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in fp32; flex has no backward on a CPU. Ring and Ulysses do so over processes: test_context_parallel."""
    from torch.nn.attention import flex_attention as theirs

    import preheat.ops.attention.flex as module

    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(module, "_compile_kernel", lambda: theirs.flex_attention)
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(20, 260, (), generator=generator))
    mask = MaskSpec(documents=random_documents(3, length, generator))
    tensors = qkv(length)
    full = limit_to_window(sdpa_attention, window=length, global_tokens=4)  # a pattern that hides nothing
    for kernel in (sdpa_attention, functools.partial(sdpa_attention, kernel="math"), attend_blockwise, full):
        agrees(kernel, reference_attention, tensors, mask)
    plain = [t.detach() for t in tensors]
    assert apart(module.compiled_flex_attention(*plain, mask, 0.3), reference_attention(*plain, mask, 0.3)) < 3e-6


def random_documents(rows: int, length: int, generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    """Each row cut at up to eight places, drawn: documents of one token and of the whole row are among them."""
    made = []
    for _ in range(rows):
        count = int(torch.randint(9, (), generator=generator))
        cuts = sorted({*(torch.randint(1, length, (count,), generator=generator).tolist()), 0, length})
        made.append(tuple(b - a for a, b in itertools.pairwise(cuts)))
    return tuple(made)


@pytest.mark.parametrize("techniques", ["{}", "{efficient_attention: {}}", "{efficient_attention: {kernel: blocks}}"])
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_rows_give_the_loss_and_gradients_of_their_documents_one_by_one(techniques: str, seed: int) -> None:
    """In fp64: what a document gains or loses by its neighbours would be far above 1e-6; padding and its positions count for nothing."""
    generator = torch.Generator().manual_seed(seed)
    length = 48
    documents = random_documents(3, length, generator)
    tokens = torch.randint(96, (3, length), generator=generator)
    made = [build(tiny(techniques, length=length), vocabulary=96, device=DEVICE) for _ in range(2)]
    for b in made:
        b.trained[0].double()
    packed, alone = [], []
    for row, cuts in enumerate(documents):
        labels, begin = torch.full((length,), -100), 0
        for n in cuts:
            of = slice(begin, begin + n)
            labels[begin : begin + n - 1] = tokens[row, begin + 1 : begin + n]
            alone.append(batch_of(tokens[row : row + 1, of], labels[None, of], ((n,),)))
            begin += n
        packed.append(labels)
    whole = batch_of(tokens, torch.stack(packed), documents)
    losses = [
        float(accumulate_gradients(made[0], [whole]).total),
        float(accumulate_gradients(made[1], [b for b in alone if b.weight]).total),
    ]
    assert losses[0] == pytest.approx(losses[1], rel=3e-7)  # summed in fp32
    grads = [{name: p.grad for name, p in b.parameters()} for b in made]
    assert difference(*grads) < 1e-6


def batch_of(tokens: Tensor, labels: Tensor, documents: tuple[tuple[int, ...], ...]) -> Batch:
    positions = torch.stack([torch.cat([torch.arange(n) for n in cuts]) for cuts in documents])
    weight = int((labels != -100).sum())
    return Batch(tokens, labels, positions, MaskSpec(documents=documents), weight, tuple(range(len(tokens))))


@pytest.mark.parametrize(
    "mask", [MaskSpec(), MaskSpec(documents=DOCUMENTS, window=50), MaskSpec(causal=False, window=9)], ids=str
)
@pytest.mark.parametrize("version", [2, 3])
def test_flash_packages_are_told_the_mask(mask: MaskSpec, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow stand-in with their documented arguments: what reaches the package means what the mask says."""
    from preheat.ops.attention.flash_package import flash_package_attention

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Any:
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_k.diff().max())
        left, right = (n if n >= 0 else 10**6 for n in window_size)
        out = []
        for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
            ours, i = [t[a:b].transpose(0, 1) for t in (q, k, v)], torch.arange(b - a)
            ours[1:] = [t.repeat_interleave(2, dim=0) for t in ours[1:]]
            may = (i[None] >= i[:, None] - left) & (i[None] <= i[:, None] + (0 if causal else right))
            scores = (ours[0] @ ours[1].transpose(-1, -2) * softmax_scale).masked_fill(~may, float("-inf"))
            out.append((scores.softmax(-1) @ ours[2]).transpose(0, 1))
        return torch.cat(out) if version == 2 else (torch.cat(out), None)

    package = types.ModuleType("package")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn" if version == 2 else "flash_attn_interface", package)
    agrees(lambda *args: flash_package_attention(*args, version=version), reference_attention, qkv(), mask)
    with pytest.raises(ValueError, match="global tokens"):
        flash_package_attention(*qkv(), MaskSpec(window=4, global_tokens=1), 0.3, version=version)


def _bytes(run: Any) -> int:
    recorder = Recorder(rounding=64)
    with recorder:
        recorder.phase = Phase.FORWARD
        run()
    return max(peak_by_phase(recorder).values())


@pytest.mark.parametrize("kernel", [sdpa_attention, attend_blockwise])
def test_rows_of_many_documents_keep_no_more_than_rows_of_one(kernel: Any) -> None:
    def kept(documents: Any) -> int:
        q, k, v = (t.contiguous() for t in qkv(length=320, dim=64))
        found: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            kernel(q, k, v, MaskSpec(documents=documents), 0.3)
        return sum(found.values())

    one, many = kept(None), kept(((320,), (1, 1, 70, 3, 245), (100, 100, 120)))
    assert many == pytest.approx(
        one, rel=0.02
    )  # flash: one number more for each padded place and head, where the result has 64


@pytest.mark.parametrize("kernel", ["flash", "blocks", "window", "shifted", "chunks", "module"])
def test_memory_is_linear_in_length(kernel: str) -> None:
    layer = EfficientAttention(16, 1, dropout=0.1, causal=True, memory_efficient=True)

    def run(length: int) -> None:
        if kernel == "module":
            layer(torch.randn(1, length, 16)).sum().backward()
            return
        function, mask = {
            "flash": (sdpa_attention, MaskSpec()),
            "blocks": (attend_blockwise, MaskSpec()),
            "window": (attend_blockwise, MaskSpec(window=64, global_tokens=4)),
            "shifted": (limit_to_shifted_groups(attend_blockwise, length // 4), MaskSpec()),
            "chunks": (attend_in_chunks, MaskSpec()),
        }[kernel]
        function(*qkv(length, 1, 2, 2, 16), mask, 0.3).sum().backward()

    short, long = (_bytes(lambda n=n: run(n)) for n in (2048, 4096))
    assert long < 2.1 * short


@pytest.mark.parametrize("form", ["reference", "module"])
def test_the_plain_form_is_quadratic(form: str) -> None:
    """So that the test above can fail."""
    layer = EfficientAttention(8, 1, memory_efficient=False)

    def run(length: int) -> None:
        if form == "module":
            layer(torch.randn(1, length, 8)).sum().backward()
        else:
            reference_attention(*qkv(length, 1, 1, 1), MaskSpec(), 0.3).sum().backward()

    short, long = (_bytes(lambda n=n: run(n)) for n in (512, 1024))
    assert long > 3.5 * short


# --- the kernel that the technique takes ------------------------------------------------------------------------------

CUDA, TURING = (Device("cuda", "test", 80 << 30, capability) for capability in ((8, 0), (7, 5)))
WIDE = "model: {num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, vocab_size: 96}\nbatch: {size: 4, seq_len: 32}\nstop: {max_steps: 1}\n"


@pytest.mark.parametrize(
    ("techniques", "device", "found"),
    [
        ("{efficient_attention: {}}", DEVICE, COMPILED),
        ("{efficient_attention: {}, sliding_window: {}}", DEVICE, "blocks"),
        ("{efficient_attention: {}, shifted_groups: {}}", DEVICE, COMPILED),
        ("{efficient_attention: {}, block_sparse_attention: {}, mixed_precision: {mode: bf16}}", CUDA, "flex"),
        ("{efficient_attention: {}, mixed_precision: {mode: bf16}}", CUDA, "flash"),
        ("{efficient_attention: {}, mixed_precision: {mode: bf16}, sliding_window: {}}", CUDA, "flash"),
        (
            "{efficient_attention: {kernel: cudnn}, mixed_precision: {mode: bf16}, sliding_window: {}}",
            CUDA,
            "cudnn does not support windows",
        ),
        ("{efficient_attention: {}, sliding_window: {}}", CUDA, "flex"),
        ("{efficient_attention: {}}", CUDA, "efficient"),
        ("{efficient_attention: {}, mixed_precision: {mode: fp16}}", TURING, "efficient"),
        ("{efficient_attention: {kernel: flash}, mixed_precision: {mode: fp16}}", TURING, "flash needs an Ampere GPU"),
        (
            "{efficient_attention: {kernel: flash}, sliding_window: {}}",
            DEVICE,
            "flash does not support windows.*use blocks, flex or auto",
        ),
        ("{efficient_attention: {kernel: flex}}", DEVICE, "no backward pass for it on a CPU; use blocks"),
        ("{efficient_attention: {kernel: flash2}}", DEVICE, "needs a CUDA device"),
        (
            "{efficient_attention: {kernel: flash2}, mixed_precision: {}}",
            CUDA,
            "pip install flash-attn --no-build-isolation",
        ),
        ("{efficient_attention: {kernel: flash2}}", CUDA, "needs bf16"),
        ("{efficient_attention: {kernel: flash2}, block_sparse_attention: {}}", CUDA, "flash2 has no global tokens"),
        ("{efficient_attention: {kernel: flash3}, mixed_precision: {}}", CUDA, "needs a Hopper GPU"),
        ("{sliding_window: {window: 32}}", DEVICE, "window: 32 of 32 tokens hides nothing"),
        ("{sliding_window: {every: 3}}", DEVICE, "every: 3 of 2 layers leaves none full"),
        ("{block_sparse_attention: {local: 30, global_tokens: 2}}", DEVICE, "hide nothing"),
        ("{shifted_groups: {group_size: 40}}", DEVICE, "group_size: 40 of 32 tokens splits nothing"),
        ("{sliding_window: {}, shifted_groups: {}}", DEVICE, "attention-pattern"),
    ],
)
def test_the_kernel_is_chosen_by_what_the_mask_needs(techniques: str, device: Device, found: str) -> None:
    recipe = recipes.parse(f"{WIDE}techniques: {techniques}")
    context = build_context(recipe, configure(recipe), device)
    problems = conflicts_of(recipe.techniques.values(), context)
    if problems:
        assert re.search(found, " ".join(problem.text for problem in problems)), problems
    else:
        assert recipe.techniques["efficient_attention"]._choose_kernel(context) == found  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", ["window: 0", "window: -1", "every: 1"])
def test_no_window_below_one(words: str) -> None:
    with pytest.raises(RecipeError, match="at least"):
        recipes.parse(f"{WIDE}techniques: {{sliding_window: {{{words}}}}}")


@pytest.mark.parametrize(
    "pattern",
    [
        "sliding_window: {window: 5, every: 2}",
        "block_sparse_attention: {local: 6, global_tokens: 2}",
        "shifted_groups: {}",
        "gradient_accumulation: {steps: 2}",
    ],
)
def test_patterns_mean_the_same_to_every_kernel_and_computed_twice(pattern: str) -> None:
    """The last has no pattern of ours: the model brings its own windows."""
    own = "model.config={sliding_window: 6, layer_types: [sliding_attention, full_attention, sliding_attention]}"
    more = [own, "model.family=qwen3"] if pattern.startswith("gradient") else []
    seen = []
    for others in (
        "",
        ", efficient_attention: {kernel: blocks}",
        ", efficient_attention: {}, activation_checkpointing: {}",
    ):
        recipe = recipes.override(tiny(f"{{{pattern}{others}}}"), *more)
        made = build(recipe, vocabulary=96, device=DEVICE)
        accumulate_gradients(made, split(uneven(), [4]) if not more else split(uneven(), [2, 2]))
        seen.append({name: p.grad for name, p in made.parameters()})
    assert max(difference(grads, seen[0]) for grads in seen[1:]) < 5e-6
    plain = build(recipes.override(tiny(), *more[1:]), vocabulary=96, device=DEVICE)
    accumulate_gradients(plain, [uneven()])
    assert difference(seen[0], {name: p.grad for name, p in plain.parameters()}) > 1e-3, (
        "less is seen than by the plain model"
    )


def test_a_dry_run_sees_flex_and_flash_packages_as_one_kernel_per_pass() -> None:
    """Neither runs under fake tensors: torch's own flash attention takes their place."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from preheat.ops.attention.flash_package import flash_package_attention
    from preheat.ops.attention.flex import compiled_flex_attention
    from preheat.ops.attention.varlen import attend_varlen

    found = []
    for kernel in (attend_varlen, compiled_flex_attention, functools.partial(flash_package_attention, version=2)):
        recorder = Recorder(rounding=64)
        with FakeTensorMode(), recorder:
            kernel(*qkv(), MaskSpec(window=70), 0.3).sum().backward()
        found.append(recorder.kernels)
    assert len([kernel for kernel in found[0] if kernel.flops]) == 2
    assert found[0] == found[1] == found[2]


def test_a_dry_run_leaves_no_fake_tensors_to_a_run_of_the_same_documents() -> None:
    mask = MaskSpec(causal=True, documents=((7, 93), (41, 59)))  # no other test has these
    with FakeTensorMode():
        sdpa_attention(*qkv(length=100, rows=2), mask, 0.3)
        build_block_mask(mask, 100, torch.device("cpu"))
        OpaqueMask.of(mask, 2, 100)
    out = sdpa_attention(*qkv(length=100, rows=2), mask, 0.3)
    assert apart(out, reference_attention(*qkv(length=100, rows=2), mask, 0.3)) < 3e-6
    real = (out, build_block_mask(mask, 100, torch.device("cpu")).kv_indices, OpaqueMask.of(mask, 2, 100).documents)
    assert not any(isinstance(t, FakeTensor) for t in real)
