"""Tensor parallel in a loop written by hand; on several processes: tests/distributed/test_tensor_parallel.py."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ..conftest import difference


def test_alone_tensor_parallel(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    from preheat.ops.distributed.tensor_parallel import sum_partial
    from preheat.techniques.tensor_parallel import parallelize

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 32, "head_dim": 8}
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    spread = copy.deepcopy(plain)
    tokens = torch.randint(32, (2, 12))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert parallelize(spread, mesh) == 2 * 7 + 2
        found = []
        for model in (plain, spread):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            found.append(loss.item())
        sum_partial(spread.parameters())
        assert found[1] == pytest.approx(found[0], abs=1e-6)
        gradients = {name: p.grad.full_tensor() for name, p in spread.named_parameters()}
        assert difference(gradients, {name: p.grad for name, p in plain.named_parameters()}) < 1e-5
        with pytest.raises(ValueError, match="degree: transformers has no tensor parallel plan for gpt2"):
            parallelize(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)), mesh)
    finally:
        dist.destroy_process_group()
