"""Mixture-of-experts models over 2 and 4 processes on gloo against one: experts split, and the balance loss of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import DATA, Device, conflicts_of
from preheat.engine.builder import build, build_context
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models import hf
from preheat.models.moe import biases
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ..conftest import DEVICE, difference, split, tiny, uneven
from .processes import ALL, processes

ROWS, STEPS = 8, 5
# The balance loss made strong; few experts and an update that is smooth in the gradient, so that no rounding error tips a token to another expert.
STRONG = "model.config={router_aux_loss_coef: 0.5}"
BALANCED = "{expert_balancing: {rate: 0.01, coefficient: 0.5}}"
BY_BIAS = "expert_balancing: {method: bias, rate: 0.01}"  # without a balance loss
SETTINGS = ("model.num_experts=6", "optimizer.eps=0.001")  # 6 experts are not divided evenly among 4 processes
# processes, family, techniques, micro-batches; one process always takes its rows in 4
CASES = [
    (4, "qwen3_moe", "{data_parallel: {}, expert_parallel: {degree: 2}}", 2),
    (4, "qwen3_moe", "{fsdp: {replicate: 2}, expert_parallel: {}, activation_checkpointing: {}}", 2),
    (2, "mixtral", "{data_parallel: {}, expert_parallel: {}}", 2),
    (2, "qwen3_moe", "{fsdp: {}, expert_parallel: {}, expert_balancing: {rate: 0.01, coefficient: 0.5}}", 2),
    (4, "qwen3_moe", "{fsdp: {}}", 2),
    # Each expert's width is split among the devices of the tensor axis, which count the same tokens.
    (2, "mixtral", "{tensor_parallel: {degree: 2, sequence_parallel: true}}", 2),
    (4, "qwen3_moe", "{fsdp: {}, expert_parallel: {}, tensor_parallel: {degree: 2, sequence_parallel: true}}", 2),
    (4, "qwen3_moe", f"{{data_parallel: {{}}, expert_parallel: {{}}, tensor_parallel: {{degree: 2}}, {BY_BIAS}}}", 2),
    # A trace chooses what a layer keeps; it must leave the experts' weights as they are.
    (
        4,
        "qwen3_moe",
        "{fsdp: {reshard_after_forward: false}, expert_parallel: {degree: 2}, activation_checkpointing: {mode: selective}}",
        2,
    ),
    (
        4,
        "qwen3_moe",
        f"{{fsdp: {{}}, expert_parallel: {{degree: 2}}, {BY_BIAS}, activation_checkpointing: {{mode: budget, budget: 0.5}}}}",
        2,
    ),
]
if ALL:
    CASES += [
        (4, "mixtral", "{fsdp: {reduce: last}, expert_parallel: {degree: 2}}", 2),
        (2, "qwen3_moe", "{fsdp: {}, expert_parallel: {}}", 4),
    ]


def train(family: str, techniques: str, micro: int) -> dict[str, Any]:
    """Losses, norms, final parameters and the share of them that this process holds."""
    strong = [] if "expert_balancing" in techniques else [STRONG]
    recipe = recipes.override(tiny(family=family, rows=ROWS), *SETTINGS, *strong, f"techniques={techniques}")
    b = build(recipe, vocabulary=96, device=DEVICE)
    b.state.accumulation = micro  # of this process: the rows of a rank may be cut otherwise than those of one process
    devices, index = b.mesh.size(*DATA), b.mesh.index(*DATA)
    losses, norms, tokens = [], [], 0.0
    for step in range(STEPS):
        batch = uneven(rows=ROWS, seed=step, padded=True)
        mine = split(batch, [ROWS // devices] * devices)[index]
        loss = accumulate_gradients(b, split(mine, [ROWS // devices // micro] * micro), 0.01)
        losses.append(float(b.mesh.add(loss.total.clone(), *DATA)) / batch.weight)
        norms.append(float(update(b, 0.01)[0]))
        tokens += float(b.mesh.add(loss.metrics["expert_tokens"].sum(), *DATA))
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in b.parameters()}
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for n, p in b.parameters() if ".experts." in n)
    kept = {n: bias.clone() for n, bias in biases(b.trained[0]).items()}
    return {"losses": losses, "norms": norms, "parameters": whole, "held": held, "tokens": tokens, "biases": kept}


def work(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    for world in (4, 2):
        if rank >= world:
            break
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
        for n, (wanted, family, techniques, micro) in enumerate(CASES):
            if wanted == world:
                torch.save(train(family, techniques, micro), folder / f"{n}-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    with processes(work, 4, folder):
        alone = {family: train(family, "{}", 4) for family in ("qwen3_moe", "mixtral")}
        alone["balanced"] = train("qwen3_moe", BALANCED, 4)
        alone["by bias"] = train("qwen3_moe", f"{{{BY_BIAS}}}", 4)
        torch.save(alone, folder / "alone.pt")
    return folder


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_several_processes_train_as_one(several: Path, case: int) -> None:
    world, family, techniques, _ = CASES[case]
    alone = torch.load(several / "alone.pt")
    one = alone["by bias" if BY_BIAS in techniques else "balanced" if "expert_balancing" in techniques else family]
    for rank in range(world):
        found = torch.load(several / f"{case}-{rank}.pt")
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert difference(found["parameters"], one["parameters"]) < 1e-5
        assert found["biases"].keys() == one["biases"].keys()
        assert all(
            torch.equal(found["biases"][n], bias) for n, bias in one["biases"].items()
        )  # by the tokens of all ranks
        tokens = int((~uneven(rows=ROWS, padded=True).padding).sum())  # type: ignore[operator]
        assert found["tokens"] == one["tokens"] == STEPS * tokens * 2 * 3  # none is dropped, and no padding counted
        copied = "data_parallel" in techniques or "replicate: 2" in techniques
        copies = world // 2 if copied and "tensor_parallel" not in techniques else 1  # of each expert
        assert found["held"] == one["held"] * copies // world


def problems(techniques: str, devices: int, family: str = "qwen3_moe", rows: int = ROWS) -> str:
    recipe = recipes.override(
        tiny(family=family), f"techniques={techniques}", f"parallel.devices={devices}", f"batch.size={rows}"
    )
    context = build_context(recipe, hf.configure(recipe, 96), DEVICE)
    return "; ".join(map(str, conflicts_of(recipe.techniques.values(), context)))


def test_what_is_refused() -> None:
    assert problems("{fsdp: {}, expert_parallel: {degree: 2}}", 4) == ""
    assert problems("{fsdp: {}, expert_parallel: {}, tensor_parallel: {degree: 2}}", 4) == ""
    assert "does not divide the 2 devices" in problems(
        "{fsdp: {}, expert_parallel: {degree: 4}, tensor_parallel: {degree: 2}}", 4
    )
    assert "degree: 1 leaves all experts" in problems("{fsdp: {}, expert_parallel: {degree: 1}}", 2)
    assert "llama has none" in problems("{fsdp: {}, expert_parallel: {}}", 2, "llama")
    assert "needs reduced-gradients" in problems("{expert_parallel: {}}", 1)
    assert "degree: 3 does not divide the 4 devices" in problems("{fsdp: {}, expert_parallel: {degree: 3}}", 4)
    assert "degree: 16 does not divide the 8 experts" in problems("{fsdp: {}, expert_parallel: {}}", 16, rows=16)
    assert "do not divide both" in problems("{fsdp: {}, expert_parallel: {degree: 2}}", 6)
    assert "compiled-layers" in problems("{fsdp: {}, expert_parallel: {}, compile: {}}", 2)


@pytest.mark.parametrize(
    ("rank", "width", "split", "refused"),
    [
        # The second matrix of gate and up, [2 of 4 experts, 2 x width, rank], is split along 2 x width.
        (2, 32, "tensor_parallel: {degree: 2}, ", True),
        (4, 32, "tensor_parallel: {degree: 2}, ", False),
        # The first of down, [2 of 4 experts, rank, width].
        (3, 6, "", True),
        (3, 8, "", False),
    ],
)
def test_adapters_of_experts_are_sharded_among_devices_that_divide_them(
    rank: int, width: int, split: str, refused: bool
) -> None:
    techniques = f"{{fsdp: {{}}, expert_parallel: {{degree: 2}}, {split}lora: {{expert_rank: {rank}}}}}"
    recipe = recipes.override(
        tiny(techniques, family="qwen3_moe", rows=32), "model.num_experts=4", f"model.intermediate_size={width}"
    )
    request = Request(recipe, DEVICE, vocabulary=96, world=16 if split else 8)
    if not refused:
        assert observe(request).model_flops > 0
        return
    with pytest.raises(RecipeError, match=r"expert_parallel: degree: leaves 4 devices .*; use a larger degree"):
        observe(request)


@pytest.mark.parametrize("mode", ["mode: selective", "mode: budget, budget: 0.5"])
def test_a_layer_is_recomputed_though_its_experts_are_gathered_at_other_times(mode: str) -> None:
    """In the backward pass a gather begins before the layer is recomputed, or within: no operator of it is the layer's."""
    recipe = recipes.parse(
        "model: {preset: glm-4.5-air, weights: random, config: {num_hidden_layers: 4, n_routed_experts: 16}}\n"
        "batch: {size: 8, seq_len: 512}\nstop: {max_steps: 1}\nparallel: {devices: 8}\ntechniques: {efficient_attention: {}, "
        "mixed_precision: {mode: bf16_weights}, fsdp: {gather: bf16}, expert_parallel: {}, activation_checkpointing: "
        f"{{{mode}}}}}"
    )
    gpu = Device("cuda", "H100", 80 * 2**30, (9, 0), at_hand=False)
    assert observe(Request(recipe, gpu, world=8)).model_flops > 0


def test_it_is_dry_run_with_all_experts_loaded_alike() -> None:
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.flop_counter import FlopCounterMode

    from preheat.planning.phases import build_fake_batch

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        counted = []
        for techniques in ("{fsdp: {}}", "{fsdp: {}, expert_parallel: {degree: 4}}"):
            recipe = tiny(techniques, family="qwen3_moe", rows=8)
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            b = build(recipe, vocabulary=96, device=DEVICE, dry=mode)
            b.mesh.group(*DATA)
            with mode, FlopCounterMode(display=False) as counter:
                accumulate_gradients(b, [build_fake_batch(recipe, 1)], 0.01)
                update(b, 0.01)
            counted.append(counter.get_total_flops())
            held = [p.to_local().numel() for n, p in b.parameters() if ".experts." in n]  # type: ignore[attr-defined]
            assert sum(held) == 3 * 8 * 3 * 32 * 64 // 8
        assert counted[0] == counted[1] > 0
    finally:
        dist.destroy_process_group()


def test_what_is_read_from_such_a_run_is_built_on_one_device() -> None:
    from preheat.engine.builder import to_single_device

    for techniques in (
        "{fsdp: {}, expert_parallel: {}, chunked_loss: {}}",
        "{data_parallel: {}, zero1: {}, chunked_loss: {}}",
    ):
        recipe = recipes.override(tiny(techniques, family="qwen3_moe", rows=ROWS), "parallel.devices=2")
        assert list(build(to_single_device(recipe), vocabulary=96, device=DEVICE).changes) == [
            "experts",
            "chunked_loss",
        ]


@pytest.mark.parametrize("gather", ["own", "bf16"])
def test_a_plan_lets_go_of_experts_that_one_device_holds_alone(gather: str) -> None:
    """Where they are used in another precision FSDP copies them into a buffer for each use and empties it; after the step nothing of it stands."""
    recipe = recipes.override(
        tiny(family="qwen3_moe"),
        f"techniques={{fsdp: {{gather: {gather}}}, expert_parallel: {{}}}}",
        "parallel.devices=2",
        f"batch.size={ROWS}",
    )
    seen = observe(Request(recipe, DEVICE, vocabulary=96))
    after = seen.categories["saving"]
    assert after["parameters"] > 0
    assert after["activations"] < 0.01 * after["parameters"]
    assert 0 < seen.categories["forward"]["gathered weights"] < after["parameters"]
