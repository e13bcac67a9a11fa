"""Techniques of several devices as plain functions, in a loop written by hand on a group of one; on several processes: tests/distributed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from preheat.core import MaskSpec

from ..conftest import difference, uneven


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """torch's mesh of one device, with a gloo group under it."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def llama(kind: str = "Llama", **more: Any) -> Any:
    import transformers

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "vocab_size": 32,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


TOKENS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def test_alone_data_parallel(mesh: Any) -> None:
    from preheat.techniques.data_parallel import replicate_all

    plain, spread = llama(), llama()
    assert replicate_all(spread, spread.model.layers, mesh) == 5
    assert difference(gradients(spread), gradients(plain)) < 1e-6


def test_alone_fsdp(mesh: Any) -> None:
    from preheat.techniques.fsdp import shard_fully

    plain, spread = llama(), llama()
    assert shard_fully(spread, spread.model.layers, mesh, reshard=False) == 5
    assert difference(gradients(spread), gradients(plain)) < 1e-6


def test_alone_zero1(mesh: Any) -> None:
    from preheat.techniques.zero1 import shard_optimizer

    plain, spread = llama(), llama()
    for model, make in ((plain, torch.optim.AdamW), (spread, None)):
        groups = [{"params": list(model.parameters())}]
        optimizer = make(groups, lr=0.01) if make else shard_optimizer(torch.optim.AdamW, groups, mesh, lr=0.01)
        for _ in range(3):
            gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    found, wanted = (dict(model.named_parameters()) for model in (spread, plain))
    assert difference({n: p.detach() for n, p in found.items()}, {n: p.detach() for n, p in wanted.items()}) < 1e-6


def test_alone_pipeline_parallel() -> None:
    from preheat.techniques.pipeline_parallel import split_into_stages

    model = llama().eval()
    stages = split_into_stages(model, 3, length=12)
    hidden = stages[0].model(input_ids=TOKENS, use_cache=False).last_hidden_state
    for stage in stages[1:-1]:
        hidden = stage.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    logits = stages[-1](inputs_embeds=hidden, use_cache=False).logits
    assert torch.allclose(logits, model(input_ids=TOKENS, use_cache=False).logits, atol=1e-6)
    names = [set(dict(stage.named_parameters())) for stage in stages]
    assert set.union(*names) == set(dict(model.named_parameters()))
    assert sum(map(len, names)) == len(set.union(*names)), "each parameter stands in one stage"


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_alone_context_parallel(mesh: Any, kind: Any) -> None:
    from preheat.ops.attention.sdpa import reference_attention
    from preheat.techniques.context_parallel import cut_rows, shard_attention

    batch = uneven(2, 12)
    mine = cut_rows(batch, 1, 0, zigzag=kind == "ring")
    assert torch.equal(mine.tokens, batch.tokens)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    mask = MaskSpec(documents=batch.mask.documents)
    out = shard_attention(reference_attention, mesh.get_group(), kind=kind)(q, k, v, mask, 0.3)
    assert torch.allclose(out, reference_attention(q, k, v, mask, 0.3), atol=1e-5)


def test_alone_expert_parallel(mesh: Any) -> None:
    from preheat.ops.grouped_mm import compute_experts
    from preheat.techniques.expert_parallel import shard_experts

    plain = llama(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=4, decoder_sparse_step=1
    )
    spread = copy.deepcopy(plain)
    assert shard_experts(spread, mesh, mesh) == 4
    whole, part = (model.model.layers[1].mlp.experts for model in (plain, spread))
    hidden, weights = torch.randn(6, 16), torch.rand(6, 2)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2], [1, 3]])
    for name, p in list(part._parameters.items()):  # as fsdp and data_parallel have them where they are used
        assert torch.equal(p.to_local(), whole._parameters[name])
        part._parameters[name] = torch.nn.Parameter(p.to_local().detach())
    found = []
    for experts, compute in (
        (whole, lambda *given: whole(*given)),
        (part, lambda *given: compute_experts(part, *given)),
    ):
        compute(hidden, chosen, weights).square().sum().backward()
        found.append({name: p.grad for name, p in experts.named_parameters()})
    assert difference(found[1], found[0]) < 1e-5
