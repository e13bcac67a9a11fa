"""Tensor parallel on 2 and 4 processes against one: losses, gradients, weights; what is held and what is sent; what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from preheat import recipe as recipes
from preheat.core import DATA, Axis, Batch, Build, Finish
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.evaluate import find_likeliest, measure, score_tokens
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models import hf
from preheat.ops.distributed.dtensor_utils import local, runs_of
from preheat.planning.request import Request

from ..architectures.tiny import create_model, tiny_config
from ..conftest import DEVICE, split, tiny, uneven
from .forked import Case, compare, kept_bytes, run, whole
from .processes import ALL, processes

PLAIN = "tensor_parallel: {degree: 2}"
CUT = "tensor_parallel: {degree: 2, sequence_parallel: true}"
AGAIN = "tensor_parallel: {degree: 2, sequence_parallel: true, regather: true}"
WHOLE = "tensor_parallel: {degree: 2, loss_parallel: false}"


def evaluated(made: Build) -> list[float]:
    """What an evaluation says: the mean loss, scores of single tokens, and the likeliest ones."""
    batch, places = uneven(seed=7), torch.tensor([3, 40, 100])
    scores, best = score_tokens(made, batch, places, torch.tensor([5, 6, 7]))
    return [
        measure(made, [batch]).loss,
        *scores.tolist(),
        *best.float().tolist(),
        *find_likeliest(made, batch, places).tolist(),
    ]


def family(kind: str, **more: Any) -> str:
    """A tiny model of a family as the recipe's model in YAML: a folder with a configuration."""
    return (
        f"{{path: {{folder}}/{kind}, weights: random}}" if more.pop("random", True) else f"{{path: {{folder}}/{kind}}}"
    )


def write_models(folder: Path) -> None:
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    } | {"pad_token_id": 60, "bos_token_id": 0, "eos_token_id": 0}
    capped = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    kinds: dict[str, dict[str, Any]] = {"qwen2": {}, "phi3": {}, "gemma2": capped, "gemma3_text": capped}
    for kind, more in kinds.items():
        transformers.AutoConfig.for_model(kind, **sizes, **more).save_pretrained(folder / kind)
    for kind, more in MIXERS.items():
        tiny_config(kind, num_hidden_layers=3, **more).save_pretrained(folder / kind)
    wide = tiny_config("qwen3_5_text", num_hidden_layers=3, hidden_size=512, **MIXERS["qwen3_5_text"])
    wide.save_pretrained(folder / "wide")  # maps of a mixer of 1 MiB and more
    create_model(transformers.AutoConfig.for_model("phi", **sizes)).save_pretrained(folder / "biased")
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model("qwen3", **sizes, head_dim=16, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "written")


EXPERTS = (
    "{family: qwen3_moe, num_layers: 3, hidden_size: 32, num_heads: 4, num_kv_heads: 2, vocab_size: 96, "
    "num_experts: 4, config: {router_aux_loss_coef: 0.5}}"
)
SINKS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "no_rope_layers": [1, 0, 1]}
MIXERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "granite_swa": SINKS,
    "llama4_text": CHUNKS | {"moe_layers": []},
    "glm4_moe": {"num_key_value_heads": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 2},
    "flint": SINKS | {"mlp_only_layers": [0, 1, 2]},  # its attention has no plan
}
CASES = {
    "llama": Case(PLAIN, look=kept_bytes),
    "evaluation": Case("tensor_parallel: {degree: 2, sequence_parallel: true, rows: 50}", look=evaluated),
    "logits gathered": Case(WHOLE, "regularized_loss: {label_smoothing: 0.1}"),
    "qwen3": Case(PLAIN, "gradient_accumulation: {steps: 2}", family="qwen3"),
    "fused": Case(CUT, "fused_operators: {}", family="qwen3", steps=2),
    "fused, not cut": Case(PLAIN, "fused_operators: {}, efficient_attention: {}", steps=2),
    "qwen3 cut": Case(CUT, "efficient_attention: {}, activation_checkpointing: {mode: selective}", family="qwen3"),
    "tied, read from a folder": Case(CUT, model=family("written", random=False), steps=2),
    "a head with a bias": Case(CUT, model=family("biased", random=False), steps=2),
    "a head with a bias, gathered": Case(
        WHOLE, "chunked_loss: {rows: 40}", model=family("biased", random=False), steps=2
    ),
    "all logits at once": Case("tensor_parallel: {degree: 2, rows: 0}", "gradient_accumulation: {steps: 2}", steps=2),
    "gathered again": Case(AGAIN, "gradient_accumulation: {steps: 2}", family="qwen3", steps=2),
    "biases, gathered again": Case(AGAIN, model=family("qwen2"), steps=2),
    "fsdp, gathered again": Case(f"{AGAIN}, fsdp: {{}}", "gradient_accumulation: {steps: 2}", family="qwen3", world=4),
    "phi3": Case(CUT, model=family("phi3"), steps=2),
    "gemma2": Case(CUT, model=family("gemma2"), steps=2),
    "recurrent layers": Case(PLAIN, "activation_checkpointing: {}", model=family("qwen3_5_text"), steps=2),
    "recurrent layers, cut": Case(CUT, model=family("qwen3_5_text"), steps=2),
    "sinks, cut": Case(CUT, model=family("granite_swa"), steps=2),
    "pairs": Case(CUT, "preference: {loss: simpo}", steps=2),
    "lora": Case(CUT, "lora: {rank: 4}", family="qwen3", steps=2),
    "fsdp": Case(f"{CUT}, fsdp: {{}}", "gradient_accumulation: {steps: 2}", family="qwen3", world=4, look=kept_bytes),
    "fsdp and lora": Case(
        f"{PLAIN}, fsdp: {{}}", "lora: {rank: 4, variant: rslora}", model=family("phi3"), world=4, steps=2
    ),
    "data_parallel": Case(f"{CUT}, data_parallel: {{}}", family="qwen3", world=4),
    "four": Case(
        "tensor_parallel: {loss_parallel: false}",
        world=4,
        model="{family: qwen3, num_layers: 3, hidden_size: 32, num_heads: 4, num_kv_heads: 4, vocab_size: 98}",
    ),
}
CASES |= {
    "experts": Case(PLAIN, "gradient_accumulation: {steps: 2}", model=EXPERTS, look=kept_bytes),
    "experts, cut": Case(CUT, "activation_checkpointing: {}", model=EXPERTS),
    "experts, lora": Case(CUT, "lora: {rank: 4, expert_rank: 2}", model=EXPERTS, steps=2),
    "experts by sigmoid, with shared ones": Case(CUT, model=family("glm4_moe"), steps=2),
    "experts, split among devices too": Case(f"{CUT}, fsdp: {{}}, expert_parallel: {{}}", model=EXPERTS, world=4),
    "shared experts, fsdp": Case(f"{PLAIN}, fsdp: {{}}", model=family("glm4_moe"), steps=2, world=4),
}
if ALL:
    CASES |= {
        "experts by sigmoid": Case(PLAIN, model=family("glm4_moe"), steps=2),
        "experts, among devices with copies": Case(
            f"{PLAIN}, data_parallel: {{}}, expert_parallel: {{}}", model=EXPERTS, world=4, steps=2
        ),
        "head gathered": Case(WHOLE, "chunked_loss: {rows: 40}, activation_checkpointing: {}", steps=2),
        "smoothing and z": Case(
            f"{PLAIN[:-1]}, rows: 50}}", "regularized_loss: {label_smoothing: 0.1, z: 0.001}", steps=2
        ),
        "qwen2": Case(CUT, model=family("qwen2"), steps=2),
        "recurrent layers, lora": Case(CUT, "lora: {rank: 4}", model=family("qwen3_5_text"), steps=2),
        "recurrent layers, fsdp": Case(f"{CUT}, fsdp: {{}}", model=family("qwen3_5_text"), steps=2, world=4),
        "sinks in whole attention, cut": Case(CUT, model=family("flint"), steps=2),
        "sinks": Case(PLAIN, model=family("granite_swa"), steps=2),
        "chunks": Case(PLAIN, model=family("llama4_text"), steps=2),
        "chunks, cut": Case(CUT, model=family("llama4_text"), steps=2),
        "gemma3": Case(PLAIN, model=family("gemma3_text"), steps=2),
        "classes": Case(
            "tensor_parallel: {degree: 2, loss_parallel: false, sequence_parallel: true}",
            "classification: {classes: 3}",
            steps=2,
        ),
        "fsdp, tied and read": Case(
            f"{PLAIN}, fsdp: {{reshard_after_forward: false}}", model=family("written", random=False), world=4, steps=2
        ),
    }


def round_otherwise(made: Build) -> None:
    """From the next step on each process has other gradients, as from kernels whose backward pass is not deterministic."""

    def perturb(made: Build) -> None:
        for _, p in made.parameters():
            if p.grad is not None:
                local(p.grad).mul_(1 + made.mesh.index(Axis.TENSOR) / 1000)

    made.hooks.finish_gradients.insert(0, (Finish.REDUCE, perturb))


DRIFTING = {
    name: replace(CASES[of], look=round_otherwise, steps=3, **more)
    for name, of, more in (
        ("whole mixers", "recurrent layers", {}),
        ("whole mixers, cut", "recurrent layers, cut", {}),
        ("large weights", "recurrent layers", {"model": family("wide")}),
        ("norms", "llama", {}),
        ("head and embedding", "four", {}),
        ("with fsdp", "fsdp", {}),
        ("with data_parallel", "data_parallel", {}),
        ("routers", "experts", {}),
    )
}
"""Cases in which the gradients of replicated weights differ between the processes."""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tensor")
    write_models(folder)
    chosen = CASES | DRIFTING
    cases = [replace(case, model=case.model.replace("{folder}", str(folder))) for case in chosen.values()]
    return dict(zip(chosen, run(cases, folder), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_several_processes_compute_what_one_does(several: dict[str, list[dict[str, Any]]], name: str) -> None:
    off = compare(several[name])
    assert off["loss"] < 1e-5
    assert off["norm"] < 1e-4
    assert off["gradients"] < 1e-5
    assert off["weights"] < 3e-3  # where a gradient is nearly 0, AdamW divides its rounding by itself


@pytest.mark.parametrize("name", DRIFTING)
def test_copies_of_a_weight_remain_equal_though_gradients_are_not(
    several: dict[str, list[dict[str, Any]]], name: str
) -> None:
    _, first, *others = several[name]
    assert "weights" in first, first
    for other in others:
        assert other["norms"] == first["norms"]
        unequal = [key for key, value in first["weights"].items() if not torch.equal(other["weights"][key], value)]
        assert not unequal


def test_an_evaluation_says_the_same(several: dict[str, list[dict[str, Any]]]) -> None:
    one, *many = (found["seen"] for found in several["evaluation"])
    assert many[0] == many[1]
    assert many[0] == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(("name", "devices"), [("llama", 2), ("fsdp", 4)])
def test_memory_falls_with_the_devices(several: dict[str, list[dict[str, Any]]], name: str, devices: int) -> None:
    alone = several["llama"][0]["seen"] if name == "llama" else several["fsdp"][0]["seen"]
    for found in several[name][1:]:
        for kind, held in found["seen"].items():
            assert held / alone[kind] == pytest.approx(1 / devices, rel=0.05), kind


def save_and_gather(rank: int, folder: Path) -> None:
    """A step of experts split along their width, with rows of optimizer states among two devices; then a checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    made = build(recipes.override(tiny(SAVED, rows=8), f"model={EXPERTS}"), vocabulary=96, device=DEVICE)
    accumulate_gradients(made, split(uneven(rows=8), [4, 4])[made.mesh.index(*DATA) :][:1], 1e-2)
    update(made, 1e-2)
    tensors = {f"model.{name}": whole(made.parallel.full_parameter(p)) for name, p in made.parameters()}
    for name, p in made.parameters():
        states = made.optimizer.state[p]
        tensors |= {f"optimizer.{name}.{key}": whole(states[key]) for key in ("exp_avg", "exp_avg_sq")}
    if not rank:
        torch.save(tensors, folder / "tensors.pt")
    checkpoint.save(made, checkpoint.Progress(step=1, samples=8), folder / "checkpoints", keep=1)
    dist.destroy_process_group()


SAVED = "{tensor_parallel: {degree: 2}, data_parallel: {}, zero1: {}}"


def test_one_process_reads_the_checkpoint_of_split_experts(tmp_path: Path) -> None:
    with processes(save_and_gather, 4, tmp_path):
        other = build(recipes.override(tiny(rows=8), f"model={EXPERTS}", "seed=7"), vocabulary=96, device=DEVICE)
    path, _ = checkpoint.find(tmp_path / "checkpoints")
    assert path is not None
    checkpoint.load(other, path)
    read = {f"model.{name}": p for name, p in other.parameters()}
    for name, p in other.parameters():
        states = other.optimizer.state[p]
        read |= {f"optimizer.{name}.{key}": states[key] for key in ("exp_avg", "exp_avg_sq")}
    for name, value in torch.load(tmp_path / "tensors.pt").items():
        assert torch.equal(read[name], value), name


@pytest.mark.parametrize("placements", [(0, "both"), (2, "both"), (0, 2), (1, 2), (0, 0), (None, "both")])
def test_ranges_of_a_stack_are_those_of_a_rank(placements: tuple[Any, Any]) -> None:
    """Stochastic rounding draws by the position in the full tensor: experts [3, 8, 6] on 2 x 2 devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kinds = {None: Replicate(), "both": _StridedShard(1, split_factor=2)}
    full = torch.arange(3 * 8 * 6).view(3, 8, 6)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        t = distribute_tensor(full, mesh, [kinds.get(p) or Shard(p) for p in placements], src_data_rank=None)
        runs = runs_of(t)
        places = [runs.start(run) + n for run in range(runs.number) for n in range(runs.length)]
        assert local(t).flatten().tolist() == places
        dist.destroy_process_group()


# --- what is sent, under fake tensors -----------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts collectives and the bytes of the whole tensor of each; DTensors are looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and not name.startswith("wait"):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            whole = out if "all_gather" in name else first
            self.found[name.strip("_").replace("allreduce", "all_reduce"), whole.numel() * whole.element_size()] += 1
        return out


@pytest.fixture
def fake() -> Iterator[Any]:
    """Starts a fake group of some processes, of which this is the first: build and step run, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda world: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    dist.destroy_process_group()


def step_under_fake_tensors(techniques: str, kind: str, rows: int = 4) -> tuple[Build, Counter[tuple[str, int]]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = build(tiny(techniques, family=kind, rows=rows), vocabulary=96, device=DEVICE, dry=mode)
    real = uneven()
    with mode:
        tokens, labels, positions = (torch.empty_like(t) for t in (real.tokens, real.labels, real.positions))
        batch = Batch(tokens, labels, positions, real.mask, real.weight, real.rows)
        for _ in range(2):  # the first may do more
            with Sent() as sent:
                accumulate_gradients(made, [batch], 1e-2)
                assert isinstance(update(made, 1e-2), Tensor)
    return made, sent.found


@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_sent_are_those_of_the_formula(fake: Any, sequence: bool) -> None:
    """Two sums a layer forward and two back, one for the embedding and one for the gradient by the last hidden states."""
    fake(2)
    _, sent = step_under_fake_tensors(
        f"{{tensor_parallel: {{degree: 2, rows: 64, sequence_parallel: {sequence}}}}}", "qwen3"
    )
    stream, layers, chunks = 4 * 32 * 32 * 4, 3, 2  # rows x length x width x bytes
    small = {size: count for (_, size), count in sent.items() if size < stream}
    assert small[64 * 4] == chunks  # the largest logit of each row
    assert small[2 * 64 * 4] == chunks  # a row's sums
    large = {name: count for (name, size), count in sent.items() if size == stream}
    if sequence:
        # Forward 2 a layer gather, and the last norm; backward 2 a layer, and the embedding. As many are scattered, less the last norm's.
        assert large == {
            "all_gather_into_tensor": 4 * layers + 2,
            "reduce_scatter_tensor": 4 * layers + 1,
            "all_reduce": 1,
        }
    else:
        assert large == {"all_reduce": 4 * layers + 2}
    # Norms of the q and k of each head; with the sequence cut all norms: two a layer and the last.
    replicated = (2 * layers + 1) * 32
    partial = layers * 2 * 8 + sequence * replicated
    assert small[partial * 4] == 1
    # Otherwise each device computes the gradients of all these norms, and takes those of the first.
    broadcast = Counter({("broadcast", replicated * 4): 1} if not sequence else {})
    assert Counter({key: count for key, count in sent.items() if key[0] == "broadcast"}) == broadcast
    # And the norm of all gradients.
    assert sum(sent.values()) == sum(large.values()) + 2 * chunks + 1 + broadcast.total() + 1


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_with_experts_sends_what_a_dense_one_does(fake: Any, sequence: bool) -> None:
    fake(2)
    scale = f"{{tensor_parallel: {{degree: 2, rows: 64, sequence_parallel: {sequence}}}}}"
    dense, experts = (step_under_fake_tensors(scale, kind)[1] for kind in ("qwen3", "qwen3_moe"))
    stream = 4 * 32 * 32 * 4  # rows x length x width x bytes
    assert {key: n for key, n in experts.items() if key[1] == stream} == {
        key: n for key, n in dense.items() if key[1] == stream
    }
    # The gradients of routers [8, 32] are summed with those of the norms, in one message.
    norms = 3 * 2 * 8 + sequence * (2 * 3 + 1) * 32
    assert dense["all_reduce", norms * 4] == experts["all_reduce", (norms + 3 * 8 * 32) * 4] == 1
    assert experts.total() == dense.total()


def test_split_experts_are_planned_with_their_part() -> None:
    from preheat.planning.dry_run import observe

    recipe = recipes.override(
        tiny("{fsdp: {}, expert_parallel: {}, tensor_parallel: {degree: 2}}", rows=4), f"model={EXPERTS}"
    )
    observation = observe(Request(recipe, DEVICE, vocabulary=96, world=4))
    sizes = {name: p.numel() for name, p in hf.build_on_meta(hf.configure(recipe, 96)).named_parameters()}
    # FSDP shards what each device of the tensor axis has: norms and routers whole, the rest half.
    copies = sum(n for name, n in sizes.items() if "norm" in name or "gate.weight" in name)
    own = (copies + (sum(sizes.values()) - copies) / 2) / 2
    assert observation.categories["update"]["parameters"] == pytest.approx(4 * own, rel=0.01)
    assert observation.categories["update"]["optimizer"] == pytest.approx(8 * own, rel=0.01)


def gathered_again(regather: bool, mode: str) -> str:
    cut = f"{{degree: 2, rows: 64, sequence_parallel: true, regather: {str(regather).lower()}}}"
    return f"{{mixed_precision: {{mode: {mode}}}, tensor_parallel: {cut}}}"


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_two_gathers_a_layer_more_are_sent_when_gathered_again(fake: Any, mode: str) -> None:
    fake(2)
    more, fewer = (step_under_fake_tensors(gathered_again(on, mode), "qwen3")[1] for on in (True, False))
    assert more - fewer == Counter(
        {("all_gather_into_tensor", 4 * 32 * 32 * 4): 2 * 3}
    )  # rows x length x width x bytes, layers
    assert not fewer - more


def test_what_is_gathered_again_is_kept_in_pieces() -> None:
    from preheat.planning.dry_run import observe

    kept, all_ = (
        observe(Request(tiny(gathered_again(on, "fp32"), family="qwen3", rows=4), DEVICE, vocabulary=96, world=2))
        for on in (True, False)
    )
    stream = 4 * 32 * 32 * 4
    assert all_.peak["forward"] - kept.peak["forward"] == 2 * 3 * stream / 2


@pytest.mark.parametrize("scale", [PLAIN, CUT])
def test_mixers_computed_whole_are_planned_with_all_their_weights(scale: str, tmp_path: Path) -> None:
    from preheat.planning.dry_run import observe

    write_models(tmp_path)
    model = family("qwen3_5_text").replace("{folder}", str(tmp_path))
    recipe = recipes.override(tiny(f"{{{scale}}}", rows=4), f"model={model}")
    observation = observe(Request(recipe, DEVICE, vocabulary=96, world=2))
    sizes = {name: p.numel() for name, p in hf.build_on_meta(hf.configure(recipe, 96)).named_parameters()}
    mixers = sum(n for name, n in sizes.items() if "linear_attn" in name)
    norms = sum(n for name, n in sizes.items() if "norm" in name and "linear_attn" not in name)
    own = mixers + norms + (sum(sizes.values()) - mixers - norms) / 2
    assert mixers > 0.2 * sum(sizes.values())
    for phase in ("forward", "update"):
        assert observation.categories[phase]["parameters"] == pytest.approx(4 * own, rel=0.01)
        assert observation.categories[phase]["optimizer"] == pytest.approx(8 * own, rel=0.01)
    assert observation.categories["update"]["gradients"] == pytest.approx(4 * own, rel=0.01)


def test_a_share_of_a_large_mesh_is_built_and_stepped_under_fake_tensors(fake: Any) -> None:
    fake(64)
    made, sent = step_under_fake_tensors(
        "{tensor_parallel: {degree: 2, sequence_parallel: true}, fsdp: {}}", "llama", rows=32
    )
    assert made.mesh.world == 64
    whole = sum(p.numel() for _, p in made.parameters())
    assert sum(local(p).numel() for _, p in made.parameters()) < whole / 32
    assert {name for name, _ in sent} >= {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("techniques", "more", "words"),
    [
        ("tensor_parallel: {degree: 2}", "gpt2", "degree: transformers has no tensor parallel plan for gpt2"),
        (
            "tensor_parallel: {degree: 4}",
            "llama",
            "degree: 2 key-value heads do not divide by 4 devices; use a degree that divides 2",
        ),
        ("tensor_parallel: {degree: 3}", "llama", "degree: 4 heads do not divide by 3 devices"),
        (
            "tensor_parallel: {degree: 2}",
            f"model={EXPERTS.replace('config', 'intermediate_size: 33, config')}",
            "degree: experts of width 33 do not divide by 2 devices; use a degree that divides 33",
        ),
        (
            "tensor_parallel: {degree: 2, sequence_parallel: true}",
            "batch.seq_len=31",
            "batch.seq_len 31 does not divide by degree 2; use 30",
        ),
        ("tensor_parallel: {degree: 2, regather: true}", "", "regather: nothing is gathered without sequence_parallel"),
        (f"{AGAIN}, lora: {{}}", "", "regather: frozen maps save no input"),
        (f"{AGAIN}, activation_checkpointing: {{}}", "", "regather: recomputed layers gather again anyway"),
        (
            "tensor_parallel: {degree: 2, sequence_parallel: true}, length_curriculum: {}",
            "",
            "the length changes from step to step",
        ),
        ("tensor_parallel: {degree: 2}", "model.vocab_size=97", "a vocabulary of 97 rows does not divide by degree 2"),
        ("tensor_parallel: {degree: 2}, chunked_loss: {}", "", "leave chunked_loss out, or set loss_parallel: false"),
        (
            "tensor_parallel: {degree: 2, rows: 0}, dft: {}",
            "",
            "supports plain cross entropy only; leave dft or rows out",
        ),
        ("tensor_parallel: {degree: 2}, classification: {classes: 3}", "", "the head is over a few classes"),
        ("tensor_parallel: {degree: 2}, muon: {}", "", "muon brings an optimizer"),
        ("tensor_parallel: {degree: 2}, lora: {variant: pissa}", "", "cannot go with lora (modified-base)"),
        ("tensor_parallel: {degree: 2}, compile: {}", "", "cannot go with compile (compiled-layers)"),
        ("tensor_parallel: {degree: 2}, shifted_groups: {group_size: 8}", "", "cannot go with shifted_groups"),
        (
            "tensor_parallel: {degree: 2}",
            "parallel.devices=6",
            "tensor 2 does not multiply to 6 devices; add data_parallel or fsdp",
        ),
    ],
)
def test_what_tensor_parallel_cannot_do_is_refused_by_the_knob(techniques: str, more: str, words: str) -> None:
    kind = more if more.isalnum() and more else "llama"
    degree = techniques.split("degree: ")[1][0]
    recipe = recipes.override(tiny(f"{{{techniques}}}", family=kind), f"parallel.devices={degree}")
    recipe = recipes.override(recipe, more) if "=" in more else recipe
    with pytest.raises(RecipeError) as refused:
        build(recipe, vocabulary=None, device=DEVICE)
    assert words in str(refused.value)


def test_an_inner_size_that_does_not_divide_and_dropout_are_refused_by_name(fake: Any, tmp_path: Path) -> None:
    fake(2)
    write_models(tmp_path)
    dropping = recipes.override(
        tiny(f"{{{PLAIN}}}"), f"model={{path: {tmp_path}/phi3, weights: random, config: {{resid_pdrop: 0.1}}}}"
    )
    with pytest.raises(RecipeError, match=r"resid_attn_dropout drops 0\.1 of its input at random"):
        build(dropping, vocabulary=96, device=DEVICE)
    with pytest.raises(RecipeError, match=r"degree: .*mlp\.gate_proj\.weight \(47, 32\) .* that divides 47"):
        build(recipes.override(tiny(f"{{{PLAIN}}}"), "model.config.intermediate_size=47"), vocabulary=96, device=DEVICE)
