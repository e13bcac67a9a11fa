"""Rows cut among processes over gloo against one process: the same losses, gradients and weights; what is sent; memory a device."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preheat import recipe as recipes
from preheat.core import DATA, Axis, Build, MaskSpec, Mesh, ModelFacts, Slot
from preheat.engine.builder import build
from preheat.engine.evaluate import find_likeliest, score_tokens, set_eval_mode
from preheat.engine.step import accumulate_gradients, forward, transform, update
from preheat.errors import RecipeError
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.sdpa import build_dense_mask, is_packed, reference_attention, sdpa_attention
from preheat.ops.distributed import ring_attention_blocks
from preheat.ops.distributed.context_parallel import cut_rows, local_positions, ulysses_bytes
from preheat.ops.distributed.ring_attention import ring_bytes
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.techniques.context_parallel import shard_attention

from ..architectures.tiny import tiny_config
from ..conftest import DEVICE, difference, split, tiny, uneven
from ..unit.ops.test_attention import random_documents
from .processes import ALL, processes

SPREAD = (*DATA, Axis.CONTEXT)
ROWS, STEPS = 4, 5
FOLDED = "fsdp: {}, gradient_accumulation: {steps: 2}, activation_checkpointing: {}, chunked_loss: {rows: 7}, efficient_attention: {}"

# name -> (family, length, techniques of one process, what several add)
TWO = {
    f"{family} {kind}": (family, 32, also, f"context_parallel: {{kind: {kind}}}, data_parallel: {{}}")
    for (family, also), kind in itertools.product(
        [("llama", ""), ("qwen3", "efficient_attention: {}"), ("gpt2", "gradient_accumulation: {steps: 3}")],
        ["ulysses", "ring"],
    )
    if ALL or (family, kind) in {("llama", "ulysses"), ("qwen3", "ring"), ("gpt2", "ring")}
} | {
    # The balance of experts counts neither the padding of rows nor that of the split.
    "experts": ("qwen3_moe", 31, "", "context_parallel: {kind: ulysses}, data_parallel: {}"),
}
FOUR = {
    "heads copied": ("llama", 32, "", "context_parallel: {degree: 4, kind: ulysses}, data_parallel: {}"),
    # Devices with other rows or other positions have other experts.
    "experts split": (
        "qwen3_moe",
        31,
        "",
        "context_parallel: {degree: 2, kind: ring}, data_parallel: {}, expert_parallel: {}",
    ),
    "ring of four": (
        "qwen3",
        32,
        "efficient_attention: {}, activation_checkpointing: {mode: budget, budget: 0.6}",
        "context_parallel: {degree: 4, kind: ring}, data_parallel: {}",
    ),
    "rows of no such length": ("gpt2", 27, "", "context_parallel: {degree: 4}, data_parallel: {}"),
    "window": (
        "llama",
        32,
        "sliding_window: {window: 9, every: 2}",
        "context_parallel: {kind: ring}, data_parallel: {}",
    ),
    "groups": ("llama", 32, "shifted_groups: {group_size: 10}", "context_parallel: {kind: ulysses}, fsdp: {}"),
    "sharded ulysses": ("llama", 32, FOLDED, "context_parallel: {kind: ulysses}"),
}
if ALL:
    FOUR |= {
        "replicated": ("llama", 30, "efficient_attention: {}", "context_parallel: {kind: ring}, data_parallel: {}"),
        "sharded ring": ("qwen3", 32, FOLDED, "context_parallel: {kind: ring}"),
    }
CASES = TWO | FOUR

# name -> (kernel, mask, softcap): of whole rows of 64 places, in fp32, against the reference in fp64
_CUTS = ((64,), (1, 30, 33), (16, 16, 32), (7, 5, 40, 12))
_PACKED = MaskSpec(documents=_CUTS)
_DRAWN = MaskSpec(documents=random_documents(4, 64, torch.Generator().manual_seed(5)))
KERNELS: dict[str, tuple[Any, MaskSpec, float | None]] = {
    "flash": (sdpa_attention, MaskSpec(), None),
    "flash of documents": (sdpa_attention, _PACKED, None),
    "flash of random documents": (sdpa_attention, _DRAWN, None),
    "plain": (reference_attention, _PACKED, None),
    "window": (attend_blockwise, MaskSpec(window=13), 3.0),
    "window in documents": (attend_blockwise, MaskSpec(window=7, documents=_CUTS, global_tokens=2), None),
    "sinks": (reference_attention, MaskSpec(window=9), None),
    "sinks of flash": (sdpa_attention, _PACKED, None),
    "both ways": (reference_attention, MaskSpec(causal=False, window=9), None),
}
HEADS = {
    "ulysses": (8, 2),
    "ring": (6, 2),
}  # of queries, and of keys and values: fewer than four, and in a ring no multiple of it


def train(case: str, *, several: bool) -> tuple[dict[str, list[Any]], dict[str, torch.Tensor]]:
    """Five steps, an evaluation and scores of single tokens: losses and norms, and the weights after them."""
    family, length, also, more = CASES[case]
    techniques = ", ".join(t for t in (also, more if several else "") if t)
    if not several:
        techniques = techniques.replace("fsdp: {}, ", "")
    # A large eps: the true gradient of GPT-2's key biases is 0, and AdamW would make whole steps of its rounding.
    r = recipes.override(
        tiny(family=family, rows=ROWS, length=length), f"techniques={{{techniques}}}", "optimizer.eps=1e-4"
    )
    b = build(r, vocabulary=96, device=DEVICE)
    shares, place = b.mesh.size(*DATA), b.mesh.index(*DATA)
    losses, norms = [], []
    for step in range(STEPS):
        batch = uneven(rows=ROWS, length=length, seed=step, padded=family.endswith("moe"))
        mine = split(batch, [ROWS // shares] * shares)[place]
        micro = -(-len(mine.rows) // b.state.accumulation)
        loss = accumulate_gradients(
            b,
            split(mine, [micro] * (len(mine.rows) // micro) + [len(mine.rows) % micro] * bool(len(mine.rows) % micro)),
        )
        losses.append(float(b.mesh.add(loss.total.clone(), *SPREAD)) / batch.weight)
        norms.append(float(update(b, 0.01)[0]))
    held_out = uneven(rows=ROWS, length=length, seed=STEPS)
    with set_eval_mode(b):
        total = forward(b, transform(b, split(held_out, [ROWS // shares] * shares)[place])).total
    losses.append(float(b.mesh.add(total.clone(), *SPREAD)) / held_out.weight)
    # Single tokens: the first place twice, so that devices have different numbers of them.
    places = torch.tensor([0, length - 1, length + length // 2, ROWS * length - 2, 0])
    most = find_likeliest(b, held_out, places)
    scores, best = score_tokens(b, held_out, places, torch.where(places == 0, (most + 1) % 96, most))
    judged = {"scores": scores.tolist(), "best": best.tolist(), "likeliest": most.tolist()}
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in b.parameters()}
    return {"losses": losses, "norms": norms} | judged, {n: w.detach().clone() for n, w in weights.items()}


class Sent(TorchDispatchMode):
    """Bytes that this process sends to others."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            import torch.distributed as dist

            x, _, sizes = args[:3]
            self.bytes += (
                sum(n for to, n in enumerate(sizes) if to != dist.get_rank()) * x[0].numel() * x.element_size()
            )
        return func(*args, **(kwargs or {}))


def attend(name: str, kind: Any, rank: int) -> dict[str, Any]:
    """Of one kernel: how far its result and gradients are from the reference, and what was sent, forward and backward."""
    import torch.distributed as dist

    from preheat.models.sinks import attend_with_sinks

    kernel, mask, softcap = KERNELS[name]
    heads, shared = HEADS[kind]
    g = torch.Generator().manual_seed(7)
    whole = [torch.randn(4, n, 64, 16, generator=g, dtype=torch.float64) for n in (heads, shared, shared, heads)]
    wanted_q, wanted_k, wanted_v = wanted = [t.clone().requires_grad_() for t in whole[:3]]
    extra: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    sinks = torch.linspace(-1, 3, heads, dtype=torch.float64) if "sinks" in name else None
    if sinks is None:
        out = reference_attention(wanted_q, wanted_k, wanted_v, mask, 0.3, **extra)
    else:
        wanted.append(sinks.requires_grad_())
        out = attend_with_sinks(reference_attention, wanted_q, wanted_k, wanted_v, mask, 0.3, sinks)
    made = [out.detach(), *torch.autograd.grad(out, wanted, whole[3])]
    slope_of_sinks = made.pop() if sinks is not None else None
    places = torch.from_numpy(local_positions(64, 4, rank, zigzag=kind == "ring"))
    q, k, v, slope = (t[:, :, places].float() for t in whole)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    stated = mask if mask.documents else MaskSpec(mask.causal, mask.window, ((64,),) * 4, mask.global_tokens)
    if sinks is not None:
        extra["sinks"] = sinks.detach().float().requires_grad_()
        tensors.append(extra["sinks"])
    with Sent() as sent:
        out = shard_attention(kernel, dist.group.WORLD, kind=kind)(*tensors[:3], stated, 0.3, **extra)
        forward = sent.bytes
        found = [out.detach(), *torch.autograd.grad(out, tensors, slope)]
    if slope_of_sinks is not None:
        dist.all_reduce(of_sinks := found.pop())  # of each device's heads, or of its positions
        assert (of_sinks - slope_of_sinks).norm() / slope_of_sinks.norm() < 1.5e-6
    apart = max(float((a - b[:, :, places]).norm() / b[:, :, places].norm()) for a, b in zip(found, made, strict=True))
    return {"apart": apart, "forward": forward, "backward": sent.bytes - forward}


def work(process: int, folder: Path) -> None:
    """One process of four: first two pairs of them, then all together."""
    import torch.distributed as dist

    found: dict[str, Any] = {}

    def train_all(cases: list[str], rank: int) -> None:
        for case in cases:
            found[case], weights = train(case, several=True)
            if rank == 0:
                torch.save(weights, folder / f"{case}.pt")

    pair, rank = divmod(process, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/pair{pair}", rank=rank, world_size=2)
    train_all(list(TWO)[pair::2], rank)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/all", rank=process, world_size=4)
    train_all(list(FOUR), process)
    for name, kind in itertools.product(KERNELS, HEADS):
        found[f"{name} {kind}"] = attend(name, kind, process)
    (folder / f"{process}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what four processes found, and one."""
    folder = tmp_path_factory.mktemp("context")
    with processes(work, 4, folder):
        first = {
            settings[:3]: case for case, settings in CASES.items()
        }  # what one process does is the same for several cases
        torch.save({key: train(case, several=False) for key, case in first.items()}, folder / "alone.pt")
    return folder


@functools.cache
def alone(folder: Path) -> Any:
    return torch.load(folder / "alone.pt")


@pytest.mark.parametrize("case", CASES)
def test_several_processes_give_the_losses_norms_and_weights_of_one(several: Path, case: str) -> None:
    wanted, weights = alone(several)[CASES[case][:3]]
    shown = [json.loads((several / f"{n}.json").read_text()).get(case) for n in range(4)]
    found = [f for f in shown if f]
    assert len(found) == (2 if case in TWO else 4)
    for f in found:
        assert f["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert f["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        assert f["scores"] == pytest.approx(wanted["scores"], abs=1e-4)
        assert f["likeliest"] == wanted["likeliest"]
        assert f["best"] == wanted["best"] == [False, True, True, True, False]
    assert difference(torch.load(several / f"{case}.pt"), weights) < 1e-5


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", KERNELS)
def test_attention_over_processes_is_that_of_whole_rows_and_sends_what_theory_says(
    several: Path, name: str, kind: str
) -> None:
    heads, shared = HEADS[kind]
    sizes: dict[str, Any] = {"places": 4 * 64 // 4, "shared": shared, "head_dim": 16, "degree": 4, "size": 4}
    for n in range(4):
        found = json.loads((several / f"{n}.json").read_text())[f"{name} {kind}"]
        assert found["apart"] < 1.5e-6
        if kind == "ulysses":
            assert found["forward"] == found["backward"] == ulysses_bytes(heads=heads, **sizes)
        else:
            assert found["forward"] == ring_bytes(**sizes)
            assert found["backward"] == ring_bytes(**sizes, backward=True)


@pytest.mark.parametrize(
    ("kind", "rest"), [("ulysses", "fsdp: {}, activation_checkpointing: {}"), ("ring", "data_parallel: {}")]
)
def test_a_dry_run_sees_activations_fall_with_the_devices(kind: str, rest: str) -> None:
    text = f"{{{rest}, efficient_attention: {{}}, chunked_loss: {{rows: 8}}"
    kept = {}
    for degree in (2, 4):
        cut = f", context_parallel: {{degree: {degree}, kind: {kind}}}}}"
        r = recipes.override(tiny(length=512), f"techniques={text}{cut}", "model.num_kv_heads=4", "batch.size=4")
        rows = 4 // (4 // degree)
        kept[degree] = observe(Request(r, DEVICE, vocabulary=96, world=4)).categories["forward"]["activations"] / rows
    assert kept[4] / kept[2] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("name", "share"), [("qwen3_5_text", 0.5), ("nemotron_h", 0.5), ("lfm2", 0.5), ("jamba", 1.0)])
def test_a_dry_run_sees_the_heads_of_recurrent_layers_split(name: str, share: float, tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 4} if "qwen" in name else {}
    tiny_config(name, max_position_embeddings=512, **heads).save_pretrained(tmp_path)
    kept = {}
    for degree in (2, 4):
        text = (
            f"fsdp: {{}}, efficient_attention: {{}}, chunked_loss: {{rows: 8}}, context_parallel: {{degree: {degree}}}"
        )
        model = {"path": str(tmp_path), "weights": "random"}
        r = recipes.override(tiny(f"{{{text}}}", length=512), f"model={model}", "batch.size=4")
        seen = observe(Request(r, DEVICE, vocabulary=96, world=4))
        kept[degree] = seen.categories["forward"]["activations"] / degree  # a device has so many rows
    assert kept[4] / kept[2] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("documents", [((48,),), ((1, 22, 25), (48,), (12, 12, 24)), (tuple([1] * 48),)])
def test_the_pieces_of_a_ring_are_the_mask_and_all_devices_have_as_much_to_do(documents: Any) -> None:
    degree = 3
    seen = torch.zeros(len(documents), 48, 48, dtype=torch.int64)
    work = []
    for rank, source in itertools.product(range(degree), repeat=2):
        mine, theirs = (torch.from_numpy(local_positions(48, degree, n, zigzag=True)) for n in (rank, source))
        pairs = 0
        for rows, queries, keys, causal in ring_attention_blocks.visible_tiles(documents, degree, rank, source):
            q, k = mine[queries, None], theirs[None, keys]
            inside = (q >= k) if causal else torch.ones(q.shape[0], k.shape[1], dtype=torch.bool)
            seen[rows, q, k] += inside.long()
            pairs += int(inside.sum())
        work.append(pairs)
    assert torch.equal(
        seen.bool(), build_dense_mask(MaskSpec(documents=documents), len(documents), 48, torch.device("cpu"))[:, 0]
    )
    assert seen.max() == 1
    if documents == ((48,),):
        assert len({sum(work[n * degree : (n + 1) * degree]) for n in range(degree)}) == 1


@pytest.mark.parametrize(
    ("techniques", "more", "words"),
    [
        ("context_parallel: {}", [], "nothing sums them; add data_parallel or fsdp"),
        (
            "context_parallel: {kind: ulysses, degree: 3}, data_parallel: {}",
            ["parallel.devices=3"],
            "4 heads across 3 devices",
        ),
        (
            "context_parallel: {}, data_parallel: {}, preference: {}",
            [],
            "the loss of preference is over whole sequences",
        ),
        ("context_parallel: {}, data_parallel: {}", ["batch.seq_len=3"], "sequences of 3 tokens; use at most 1"),
        (
            "context_parallel: {}, data_parallel: {}, rope_scaling: {kind: dynamic, original_length: 16}",
            [],
            "dynamic depend on the longest",
        ),
        ("context_parallel: {}, data_parallel: {}", ["parallel.devices=3"], "context 2 does not multiply to 3 devices"),
    ],
)
def test_what_it_refuses_and_why(techniques: str, more: list[str], words: str) -> None:
    r = recipes.override(tiny(), f"techniques={{{techniques}}}", "parallel.devices=2", *more)
    with pytest.raises(RecipeError, match=words):
        build(r, vocabulary=96, device=DEVICE)


@pytest.mark.parametrize(
    ("length", "heads", "kernel", "kind"),
    [
        (64, 4, "flash", "ulysses"),
        (8192, 4, "flash", "ring"),
        (8192, 4, "efficient", "ulysses"),
        (64, 5, "flash", "ring"),
    ],
)
def test_auto_takes_what_heads_and_lengths_suit(length: int, heads: int, kernel: str, kind: str) -> None:
    r = recipes.override(tiny(length=length), "techniques={context_parallel: {}}", "parallel.devices=2")
    sizes = dict.fromkeys(Axis, 1) | {Axis.CONTEXT: 2}
    model = ModelFacts("llama", 3, 32, heads, 1, 8, 96, length, True)
    b = Build(
        recipe=r, device=DEVICE, model=model, tags=frozenset(), torch_device=torch.device("cpu"), mesh=Mesh(sizes)
    )
    b.claim(Slot.ATTENTION_KERNEL, functools.partial(sdpa_attention, kernel=kernel), "plain")
    technique: Any = r.techniques["context_parallel"]
    chosen, why = technique._choose_kind(b)
    assert chosen == kind
    assert why


def test_a_ring_refuses_a_kernel_without_statistics() -> None:
    with pytest.raises(ValueError, match="kernel efficient does not return; flash and blocks do"):
        ring_attention_blocks.choose_tiles(functools.partial(sdpa_attention, kernel="efficient"))


def test_rows_of_no_such_length_are_made_longer_where_nothing_sees_it() -> None:
    batch = uneven(rows=2, length=27, padded=True)
    shares = [cut_rows(batch, 2, rank, zigzag=True) for rank in range(2)]
    assert sorted(torch.cat([s.labels for s in shares], dim=1)[0].tolist()) == sorted([*batch.labels[0].tolist(), -100])
    assert batch.padding is not None
    assert sum(int((~s.padding).sum()) for s in shares if s.padding is not None) == int((~batch.padding).sum())
    assert all(sum(cuts) == 28 for cuts in shares[0].mask.documents or ())
    assert int(shares[0].positions.max()) <= int(batch.positions.max())  # a table of learned positions may end there
    assert is_packed(shares[0].mask)
    assert shares[0].weight == batch.weight
