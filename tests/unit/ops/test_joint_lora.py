"""LoRA layers computed together, against each alone and against fp64."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from preheat.ops.adapters import joint_lora
from preheat.ops.adapters.peft_layers import prevent_fp32_cast
from preheat.techniques.fused_operators import fuse_operators
from preheat.techniques.lora import add_lora
from preheat.techniques.mixed_precision import keep_in_fp32
from preheat.techniques.nf4 import quantize_to_nf4

from ...conftest import difference

TOKENS = torch.arange(48).view(2, 24) % 31


def model(*, nf4: bool = False, biased: bool = False, dropout: float = 0.0, targets: Any = "all-linear") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=40, attention_bias=biased, mlp_bias=biased,
    )  # fmt: skip
    built = LlamaForCausalLM(config)
    if nf4:
        quantize_to_nf4(built)
    add_lora(built, rank=4, dropout=dropout, targets=targets)
    for name, p in built.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.05)
    return built


def gradients(built: Any, *, autocast: bool = False) -> dict[str, Tensor]:
    built.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = built(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return {"loss": loss.detach().double()} | {
        name: p.grad.double() for name, p in built.named_parameters() if p.grad is not None
    }


def fused(built: Any) -> Any:
    fuse_operators(built, norm=False, adapters=True, device="cuda")
    return built


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_those_of_each_layer_alone(nf4: bool, biased: bool) -> None:
    alone = model(nf4=nf4, biased=biased)
    together = fused(copy.deepcopy(alone))
    ours, theirs = gradients(together), gradients(alone)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 1 + 2 * 2 * 7
    assert difference(ours, theirs) < 1e-5


def test_under_autocast_they_are_as_close_to_fp64_as_each_layer_alone() -> None:
    exact = model().double()
    # As techniques.lora prepares a half-precision base: adapters in fp32, whose inputs are not cast.
    alone = model()
    for p in alone.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    prevent_fp32_cast(alone)
    together = fused(copy.deepcopy(alone))
    truth = gradients(exact)
    ours, theirs = gradients(together, autocast=True), gradients(alone, autocast=True)
    assert all(p.grad.dtype == torch.float32 for p in together.parameters() if p.grad is not None)
    assert difference(ours, truth) < 1.2 * difference(theirs, truth) + 1e-3


def test_the_product_behind_the_gate_is_not_saved() -> None:
    bytes_saved = []
    for prepare in (lambda built: fuse_operators(built, norm=False, device="cuda"), fused):
        built, sizes = model(), {}
        prepare(built)
        own = {p.untyped_storage().data_ptr() for p in built.parameters()}

        def pack(t: Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> Tensor:
            if t.untyped_storage().data_ptr() not in own:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = built(input_ids=TOKENS, labels=TOKENS).loss
        bytes_saved.append(sum(sizes.values()))
        del loss
    tokens, layers, intermediate = TOKENS.numel(), 2, 96
    assert bytes_saved[0] - bytes_saved[1] >= tokens * layers * intermediate * 4


@pytest.mark.parametrize(
    "unlike",
    [
        "dropout",
        "some layers without LoRA",
        "switched off",
        "trained base",
        "hook",
        "forward of its own",
    ],
)
def test_what_cannot_be_joined_is_computed_alone(unlike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = model(
        dropout=0.1 if unlike == "dropout" else 0.0,
        targets=("k_proj", "up_proj") if unlike.startswith("some") else "all-linear",
    ).train()
    together = fused(copy.deepcopy(alone))
    for built in (alone, together):
        for layer in built.model.layers:
            if unlike == "switched off":
                layer.self_attn.k_proj._disable_adapters = layer.self_attn.o_proj._disable_adapters = True
                layer.mlp.down_proj._disable_adapters = True
            if unlike == "trained base":
                for projection in ("k_proj", "o_proj"):
                    getattr(layer.self_attn, projection).base_layer.weight.requires_grad_(True)
                layer.mlp.up_proj.base_layer.weight.requires_grad_(True)
            if unlike == "forward of its own":  # as keep_fp32 does
                for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj):
                    base = projection.base_layer
                    base.forward = functools.partial(lambda forward, x: forward(x) * 2, base.forward)
            if unlike == "hook":
                for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.gate_proj):
                    projection.base_layer.register_forward_hook(lambda module, args, out: out * 2)

    def never(*_: object) -> None:
        raise AssertionError("joined")

    monkeypatch.setattr(joint_lora, "compute_joint_lora", never)
    monkeypatch.setattr(joint_lora, "compute_gated_block", never)
    results = []
    for built in (together, alone):
        torch.manual_seed(1)  # of dropout
        results.append(gradients(built))
    assert difference(*results) < 1e-5


def test_another_input_between_the_calls_gets_its_own_result() -> None:
    attention = fused(model()).model.layers[0].self_attn
    x, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    with torch.no_grad():
        # Without the call that computes all three.
        expected, of_other = (attention.k_proj(x), attention.v_proj(x)), attention.k_proj(other)
        queries = attention.q_proj(x)
        torch.testing.assert_close(attention.k_proj(other), of_other)
        assert not torch.equal(attention.k_proj(other), expected[0])
        torch.testing.assert_close(attention.k_proj(x), expected[0])
        again = attention.q_proj(x)
        torch.testing.assert_close(attention.k_proj(x), expected[0])
        torch.testing.assert_close(attention.v_proj(x), expected[1])
    assert torch.equal(queries, again)


def test_a_copy_computes_with_its_own_weights() -> None:
    together = fused(model())
    other = copy.deepcopy(together)
    for p in other.parameters():
        p.data.mul_(1.5)
    alone = model()
    alone.load_state_dict(other.state_dict())
    # Weights that are 1.5 times as large round by more: 1.1e-5 with AVX2.
    assert difference(gradients(other), gradients(alone)) < 3e-5
    assert difference(gradients(together), gradients(model())) < 1e-5


def test_modules_that_are_kept_in_fp32_are_not_joined_in_half_precision() -> None:
    together, alone = model(), model()
    for built in (together, alone):
        for p in built.parameters():
            if not p.requires_grad:
                p.data = p.data.bfloat16()
        prevent_fp32_cast(built)
        for name, module in built.named_modules():
            if name.endswith(("up_proj", "k_proj", "o_proj")):
                module.float()
    fused(together)
    fuse_operators(alone, norm=False, device="cuda")
    for built in (together, alone):
        keep_in_fp32(built, ["up_proj$", "k_proj$", "o_proj$"])
    assert difference(gradients(together, autocast=True), gradients(alone, autocast=True)) < 1e-5


def test_an_error_between_the_calls_keeps_no_graph_alive() -> None:
    together = fused(model())
    attention = together.model.layers[1].self_attn
    results = []

    def fail(x: Tensor) -> Tensor:
        results.append(weakref.ref(x))
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.k_proj, "forward", fail)  # q_proj has computed all three
        with pytest.raises(RuntimeError):
            together(input_ids=TOKENS)
    gc.collect()
    assert results[0]() is None
    assert difference(gradients(copy.deepcopy(together)), gradients(model())) < 1e-5


def test_hooks_of_whole_layers_run() -> None:
    alone = model()
    together = fused(copy.deepcopy(alone))
    for built in (alone, together):
        for layer in built.model.layers:
            for projection in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                projection.register_forward_hook(lambda module, args, out: out * 2)
    assert difference(gradients(together), gradients(alone)) < 1e-5


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_recomputed_layers_and_evaluation_have_the_same_results(checkpointed: bool) -> None:
    together = fused(model())
    if checkpointed:
        together.gradient_checkpointing_enable({"use_reentrant": False})
    together.train()
    assert difference(gradients(together), gradients(model())) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(
            together(input_ids=TOKENS).logits, model()(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-5
        )


def test_dora_is_computed_alone_and_not_counted() -> None:
    torch.manual_seed(0)
    built = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16)
    )
    add_lora(built, rank=4, variant="dora")
    counts = fuse_operators(built, norm=False, adapters=True, device="cuda")
    assert counts == {"gated activations": 1}
