"""Active and total parameters of plans of training: by the shapes of the experts, whatever form they are stored in."""

from __future__ import annotations

from torch import nn

from preheat.models import moe
from preheat.ops.adapters.peft_layers import count_parameters
from preheat.ops.quantization.nf4 import pack_
from preheat.planning.analytic import count_model_parameters
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import observe_few_layers
from preheat.planning.plan import count_active_parameters
from preheat.planning.request import Request
from preheat.recipe import parse

from ...conftest import DEVICE

LAYERS, WIDTH, INNER, TOKENS = 3, 32, 24, 4 * 64
EXPERT = 3 * WIDTH * INNER  # gate, up and down


def request_of(model: str, techniques: str = "{}") -> Request:
    return Request(
        parse(
            f"model: {model}\nbatch: {{size: 4, seq_len: 64}}\nstop: {{max_steps: 2}}\n"
            f"data: {{source: text}}\ntechniques: {techniques}\n"
        ),
        DEVICE,
        vocabulary=300,
    )


def mixture(experts: int, chosen: int, techniques: str = "{}", layers: int = LAYERS) -> Request:
    return request_of(
        f"{{family: qwen3_moe, num_layers: {layers}, hidden_size: {WIDTH}, num_heads: 2, num_experts: {experts}, "
        f"num_experts_per_tok: {chosen}, config: {{moe_intermediate_size: {INNER}}}}}",
        techniques,
    )


def test_active_parameters_leave_out_the_experts_that_are_not_chosen() -> None:
    request = mixture(8, 2)
    seen = observe(request)
    assert seen.experts == LAYERS * 8 * EXPERT
    assert count_active_parameters(request, seen) == seen.parameters - LAYERS * 6 * EXPERT
    dense = request_of(f"{{family: qwen3, num_layers: 2, hidden_size: {WIDTH}, num_heads: 2}}")
    assert count_active_parameters(dense, seen := observe(dense)) == seen.parameters


def test_experts_count_in_4_bits_and_with_adapters() -> None:
    request = mixture(8, 2, "{lora: {rank: 2, expert_rank: 2}, nf4: {}}")
    pairs = 2 * (WIDTH + 2 * INNER) + 2 * (INNER + WIDTH)
    assert observe(request).experts == LAYERS * 8 * (EXPERT + pairs)
    apart = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))})
    pack_(list(apart["experts"]))  # type: ignore[arg-type]
    assert [count_parameters(module)[1] for module in moe.all_experts(apart)] == [3 * 64 * 64]


def test_experts_that_transformers_computes_without_its_registry_count_too() -> None:
    family = "{preset: llama-4-scout, config: {num_hidden_layers: 1, hidden_size: 64}}"
    size = count_model_parameters(request_of(family).recipe)
    config = size.config.get_text_config()
    assert size.experts == 16 * 3 * 64 * config.intermediate_size
    assert size.active == size.parameters - size.experts * 15 // 16


def test_flops_are_those_of_the_chosen_experts() -> None:
    of = {
        (experts, chosen): observe(mixture(experts, chosen)).model_flops
        for experts, chosen in ((8, 2), (8, 4), (16, 2))
    }
    # Two for each weight and token, and twice that in the backward pass.
    assert of[8, 4] - of[8, 2] == 6 * TOKENS * LAYERS * 2 * EXPERT
    assert of[16, 2] - of[8, 2] == 6 * TOKENS * LAYERS * 8 * WIDTH  # the routers alone


def test_few_layers_tell_the_active_parameters_of_many() -> None:
    request = mixture(4, 1, layers=30)
    assert observe_few_layers(request, heap=False).experts == 30 * 4 * EXPERT
