"""The plain functions of techniques for experts, on models and in loops made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from .by_hand import by_hand, falls, plain_backward


def mixtral(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, vocab_size=96, num_local_experts=8, **more)
    )


def test_alone_expert_balancing() -> None:
    from preheat.models.moe import read_router_records, record_routers, routers
    from preheat.techniques.expert_balancing import add_bias, move_bias

    model, tokens = mixtral(), torch.randint(96, (16, 32))
    with torch.no_grad():
        for router in routers(model):
            router.weight *= torch.linspace(0.5, 40, 8)[:, None]  # type: ignore[operator]
    ledger = record_routers(model)
    ledger.open = True
    biases = add_bias(model)
    assert add_bias(model)[0] is biases[0]
    loads = []

    class Balanced(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            counts = read_router_records(model)[0]
            assert counts.sum(1).tolist() == [16 * 32 * 2] * 2  # no token is dropped
            loads.append(float((counts.max(1).values / counts.mean(1)).max()))
            move_bias(biases, counts, 0.01)

    falls(model, tokens, Balanced(model.parameters(), lr=0.003), plain_backward)
    still = Balanced(model.parameters(), lr=0.0)
    for _ in range(30):
        with torch.no_grad():
            model(tokens, use_cache=False)
        still.step()
    assert loads[-1] - 1 < 0.5 * (max(loads) - 1), loads
    # A bias changes who is chosen, and not how the chosen are weighed; an evaluation routes without it.
    router, hidden = routers(model)[0], torch.randn(5, 32)
    shares = torch.nn.functional.linear(hidden, router.weight).softmax(-1)  # type: ignore[arg-type]
    biases[0][3] += 10.0
    _, weights, chosen = router(hidden)
    assert bool((chosen == 3).any(1).all())
    picked = shares.gather(1, chosen)
    torch.testing.assert_close(weights, picked / picked.sum(1, keepdim=True))
    assert torch.equal(router.eval()(hidden)[2].sort().values, shares.topk(2).indices.sort().values)
    assert not any("bias" in key for key in model.state_dict())


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
def test_alone_upcycling(family: str) -> None:
    from preheat.techniques.upcycling import upcycle

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=96, head_dim=8, rms_norm_eps=1e-4)
    dense = getattr(transformers, f"{family}ForCausalLM")(config)
    tokens = torch.randint(96, (4, 16))
    made: Any = upcycle(dense, 4)
    wanted = dense(tokens).logits.detach()
    assert float((made(tokens).logits.detach() - wanted).norm() / wanted.norm()) < 1e-5
    experts = made.model.layers[1].mlp.experts
    assert torch.equal(experts.down_proj[3], dense.model.layers[1].mlp.down_proj.weight)
    falls(made, tokens, torch.optim.AdamW(made.parameters(), lr=0.003), plain_backward)
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])


def test_a_share_of_the_channels_is_drawn_anew_in_both_matrices_of_an_expert() -> None:
    from preheat.techniques.upcycling import upcycle

    dense, _ = by_hand()
    made: Any = upcycle(dense, 3, chosen=1, redrawn=0.25)
    block, experts = dense.model.layers[2].mlp, made.model.layers[2].mlp.experts
    chosen = set()
    for n in range(3):
        changed = [
            (experts.gate_up_proj[n, :64] != block.gate_proj.weight).any(1),
            (experts.gate_up_proj[n, 64:] != block.up_proj.weight).any(1),
            (experts.down_proj[n] != block.down_proj.weight).any(0),
        ]
        assert int(changed[0].sum()) == 16
        assert all(torch.equal(c, changed[0]) for c in changed)
        drawn, whole = experts.down_proj[n][:, changed[2]].detach(), block.down_proj.weight.detach()
        assert float(drawn.std()) == pytest.approx(float(whole.std()), rel=0.15)
        chosen.add(tuple(changed[0].tolist()))
    assert len(chosen) == 3
