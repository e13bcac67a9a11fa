"""Pipelines of 2 and 4 processes over gloo against one process: losses, norms, every parameter, and what an evaluation finds."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import DATA, Axis, Build
from preheat.engine.builder import build
from preheat.engine.evaluate import measure
from preheat.engine.step import accumulate_gradients, update
from preheat.models.moe import biases
from preheat.ops.distributed.dtensor_utils import local
from preheat.techniques.pipeline_parallel import record_timeline

from ..architectures.tiny import tiny_config
from ..conftest import DEVICE, difference, split, tiny, uneven
from .processes import processes

PROCESSES, STEPS = 4, 5


class Case(NamedTuple):
    world: int
    techniques: str
    family: str = "llama"
    plain: str = "{gradient_accumulation: {steps: 4}}"
    sets: tuple[str, ...] = ()
    rows: int = 8


UNTIED, TIED = ("model.config={tie_word_embeddings: false}",), ("model.config={tie_word_embeddings: true}",)
DEEP = ("model.num_layers=5",)
RECURRENT_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
RECURRENT = ("model={path: {folder}/qwen3_5_text, weights: random}",)
# A strong balance loss, and an update that is smooth in the gradient, so that no rounding error tips a token over.
EXPERTS = ("model.num_experts=6", "model.config={router_aux_loss_coef: 0.5}", "optimizer.eps=0.001")
# The first stage of several has no experts.
DENSE_FIRST = ("optimizer.eps=0.001", "model={path: {folder}/glm4_moe, weights: random}")
LATENT = ("optimizer.eps=0.001", "model={path: {folder}/deepseek_v3, weights: random}")
BY_BIAS = "expert_balancing: {rate: 0.01}"
RECOMPUTED = "gradient_accumulation: {steps: 4}, activation_checkpointing: {}"
CASES = {
    "1f1b, recurrent layers": Case(2, "{pipeline_parallel: {micro_batches: 4}}", sets=RECURRENT),
    "1f1b": Case(2, "{pipeline_parallel: {micro_batches: 4}}"),
    "gpipe, uneven rows, tied, learned positions": Case(
        2,
        "{pipeline_parallel: {schedule: gpipe, micro_batches: 4}}",
        "gpt2",
        sets=("model.config={resid_pdrop: 0, embd_pdrop: 0}",),
        rows=10,
    ),
    "1f1b, 4 devices, tied": Case(
        4, "{pipeline_parallel: {degree: 4, micro_batches: 4}}", "qwen3", sets=(*DEEP, *TIED)
    ),
    "interleaved": Case(
        2,
        "{pipeline_parallel: {schedule: interleaved}, gradient_accumulation: {steps: 4}}",
        "qwen3",
        sets=(*DEEP, *TIED),
    ),
    "zero_bubble": Case(4, "{pipeline_parallel: {degree: 4, schedule: zero_bubble, micro_batches: 4}}", sets=DEEP),
    "zero_bubble, learned positions": Case(2, "{pipeline_parallel: {schedule: zero_bubble, micro_batches: 4}}", "gpt2"),
    "zbv": Case(2, "{pipeline_parallel: {schedule: zbv, micro_batches: 4}}", sets=(*DEEP, *UNTIED)),
    "data parallel": Case(4, "{pipeline_parallel: {micro_batches: 2}, data_parallel: {}}", "gpt2"),
    "fsdp": Case(4, "{pipeline_parallel: {micro_batches: 2}, fsdp: {reduce: last}}", "llama", sets=TIED),
    "fsdp, zero_bubble": Case(
        4,
        "{pipeline_parallel: {schedule: zero_bubble, micro_batches: 2}, fsdp: {reduce: last, reshard_after_forward: false}}",
        "qwen3",
    ),
    "experts, 1f1b, recomputed": Case(
        2, f"{{pipeline_parallel: {{}}, {RECOMPUTED}}}", "qwen3_moe", f"{{{RECOMPUTED}}}", EXPERTS
    ),
    "experts, interleaved": Case(
        2, "{pipeline_parallel: {schedule: interleaved, micro_batches: 4}}", "qwen3_moe", sets=(*DEEP, *EXPERTS)
    ),
    "experts, zero_bubble": Case(
        4,
        "{pipeline_parallel: {schedule: zero_bubble, degree: 4, micro_batches: 4}}",
        "qwen3_moe",
        sets=(*DEEP, *EXPERTS),
    ),
    "experts, zbv": Case(
        2, "{pipeline_parallel: {schedule: zbv, micro_batches: 4}}", "mixtral", sets=(*DEEP, *EXPERTS)
    ),
    "experts, fsdp, expert parallel, uneven rows": Case(
        4,
        "{pipeline_parallel: {micro_batches: 2}, fsdp: {reduce: last}, expert_parallel: {}}",
        "qwen3_moe",
        sets=EXPERTS,
        rows=10,
    ),
    "experts, data parallel, expert parallel, interleaved": Case(
        4,
        "{pipeline_parallel: {schedule: interleaved, micro_batches: 4}, data_parallel: {}, expert_parallel: {}}",
        "qwen3_moe",
        sets=(*DEEP, *EXPERTS),
    ),
    "experts, tensor parallel": Case(
        4,
        "{pipeline_parallel: {micro_batches: 4}, tensor_parallel: {degree: 2, sequence_parallel: true}}",
        "qwen3_moe",
        sets=EXPERTS,
    ),
    "experts, context and expert parallel": Case(
        4,
        "{pipeline_parallel: {micro_batches: 2}, data_parallel: {}, context_parallel: {degree: 2, kind: ulysses}, "
        "expert_parallel: {}}",
        "qwen3_moe",
        sets=EXPERTS,
    ),
    "experts, by bias, dense first layers": Case(
        2,
        f"{{pipeline_parallel: {{micro_batches: 4}}, {BY_BIAS}}}",
        plain=f"{{gradient_accumulation: {{steps: 4}}, {BY_BIAS}}}",
        sets=DENSE_FIRST,
    ),
    "experts, by bias, expert parallel, dense first layers": Case(
        4,
        f"{{pipeline_parallel: {{micro_batches: 4}}, fsdp: {{reduce: last}}, expert_parallel: {{}}, {BY_BIAS}}}",
        plain=f"{{gradient_accumulation: {{steps: 4}}, {BY_BIAS}}}",
        sets=DENSE_FIRST,
    ),
    "experts, by bias, latent attention, interleaved": Case(
        2,
        f"{{pipeline_parallel: {{schedule: interleaved, micro_batches: 4}}, {BY_BIAS}}}",
        plain=f"{{gradient_accumulation: {{steps: 4}}, {BY_BIAS}}}",
        sets=LATENT,
    ),
}


def run(case: Case, folder: Path, name: str, *, rank: int = 0, world: int = 1) -> None:
    """Trains one side and writes down what it found."""
    techniques = case.techniques if world > 1 else case.plain
    sets = [setting.replace("{folder}", str(folder)) for setting in case.sets]
    recipe = recipes.override(tiny(family=case.family, rows=case.rows), f"techniques={techniques}", *sets)
    padded = name.startswith("experts")  # of which padding is not counted
    made = build(recipe, vocabulary=96, device=DEVICE)
    found: dict[str, Any] = {"losses": [], "norms": []}
    shares, mine = made.mesh.size(*DATA), made.mesh.index(*DATA)
    for step in range(STEPS):
        whole = uneven(rows=case.rows, seed=step, padded=padded)
        rows = split(whole, [case.rows // shares] * shares)[mine]
        micro = -(-len(rows.tokens) // made.state.accumulation)
        sizes = [min(micro, len(rows.tokens) - start) for start in range(0, len(rows.tokens), micro)]
        loss = accumulate_gradients(made, split(rows, sizes), 0.01)
        total = made.mesh.add(loss.total.clone(), Axis.PIPELINE, Axis.CONTEXT, *DATA)
        found["losses"].append(float(total) / whole.weight)
        if "expert_tokens" in loss.metrics:
            found["tokens"] = made.mesh.add(loss.metrics["expert_tokens"].clone(), Axis.PIPELINE, Axis.CONTEXT, *DATA)
            found["scores"] = made.loss.scores({"expert_tokens": found["tokens"]}, 1.0)
        found["norms"].append(update(made, 0.01).tolist()[0])
    if name == "1f1b" and world > 1:
        with record_timeline(made) as spans:
            accumulate_gradients(made, split(uneven(rows=8), [2] * 4))
        made.optimizer.zero_grad()
        found["spans"] = [tuple(vars(span).values()) for span in spans]
    found["evaluated"] = measure(made, [uneven(rows=3, seed=9), uneven(rows=4, seed=10)]).loss
    found["weights"] = weights(made)
    found["biases"] = {name: bias.clone() for part in made.trained for name, bias in biases(part).items()}
    torch.save(found, folder / f"{name}.{world}.{rank}")


def weights(made: Build) -> dict[str, torch.Tensor]:
    return {name: (p.full_tensor() if local(p) is not p else p).detach() for name, p in made.parameters()}  # type: ignore[operator]


def work(rank: int, folder: Path) -> None:
    """One process: its part of the references, then every case that has a place for it."""
    import torch.distributed as dist

    names = json.loads((folder / "names.json").read_text())
    for number, name in enumerate(names):
        if number % PROCESSES == rank:
            run(CASES[name], folder, name)
    for number, name in enumerate(names):
        world = CASES[name].world
        if rank < world:
            patience = datetime.timedelta(seconds=200)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world, timeout=patience
            )
            run(CASES[name], folder, name, rank=rank, world=world)
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pipeline")
    run_all(place, list(CASES))
    return place


def run_all(place: Path, names: list[str]) -> None:
    tiny_config("qwen3_5_text", num_hidden_layers=3, layer_types=RECURRENT_LAYERS).save_pretrained(
        place / "qwen3_5_text"
    )
    for family in ("glm4_moe", "deepseek_v3"):
        tiny_config(family, num_hidden_layers=5, first_k_dense_replace=3).save_pretrained(place / family)
    (place / "names.json").write_text(json.dumps(names))
    with processes(work, PROCESSES, place):
        pass


def compare(name: str, folder: Path) -> tuple[dict[str, float], set[str]]:
    """The largest differences from one process, and the parameters that more than one device has."""
    case = CASES[name]
    one = torch.load(folder / f"{name}.1.0")
    many = [torch.load(folder / f"{name}.{case.world}.{rank}") for rank in range(case.world)]
    found = {
        "loss": max(abs(a - b) for m in many for a, b in zip(m["losses"], one["losses"], strict=True)),
        "norm": max(abs(a - b) / a for m in many for a, b in zip(one["norms"], m["norms"], strict=True)),
        "evaluated": max(abs(m["evaluated"] - one["evaluated"]) for m in many),
    }
    union: dict[str, torch.Tensor] = {}
    twice: set[str] = set()
    for m in many:
        twice |= union.keys() & m["weights"].keys()
        found["copies"] = max(
            [
                found.get("copies", 0.0),
                *(float((union[k] - m["weights"][k]).abs().max()) for k in union.keys() & m["weights"].keys()),
            ]
        )
        union |= m["weights"]
    for whole in (
        union,
        one["weights"],
    ):  # a bias of all keys changes no attention, so its gradient is what rounding left
        for key in [key for key in whole if key.endswith("c_attn.bias")]:
            whole[key] = whole[key][: len(whole[key]) // 3]
    found["weights"] = difference(union, one["weights"])
    return found, twice


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("experts")])
def test_stages_record_the_loads_and_move_the_biases_of_their_own_experts(folder: Path, name: str) -> None:
    one = torch.load(folder / f"{name}.1.0")
    stages = [torch.load(folder / f"{name}.{CASES[name].world}.{rank}") for rank in range(CASES[name].world)]
    assert all(torch.equal(found["tokens"], one["tokens"]) for found in stages)
    assert all(found["scores"] == one["scores"] for found in stages)
    assert set().union(*(found["biases"] for found in stages)) == set(one["biases"])
    assert bool(one["biases"]) == ("by bias" in name)
    for found in stages:
        assert all(torch.equal(bias, one["biases"][name]) for name, bias in found["biases"].items())


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process_does(folder: Path, name: str) -> None:
    found, _ = compare(name, folder)
    assert found["loss"] < 1e-5
    assert found["norm"] < 1e-4
    assert found["evaluated"] < 1e-5
    assert found["weights"] < 2e-5
    assert found["copies"] == 0


def test_the_timeline_is_that_of_the_schedule(folder: Path) -> None:
    spans = torch.load(folder / "1f1b.2.0")["spans"]
    assert spans == torch.load(folder / "1f1b.2.1")["spans"]
    for device, order in ((0, "f0 f1 b0 f2 b1 f3 b2 b3"), (1, "f0 b0 f1 b1 f2 b2 f3 b3")):
        own = [span for span in spans if span[0] == device]
        assert " ".join(f"{what[0]}{micro}" for _, _, micro, what, _, _ in own) == order
        assert all(start < end for *_, start, end in own)
        assert all(before[5] <= after[4] for before, after in itertools.pairwise(own))
        assert {span[1] for span in own} == {device}


if __name__ == "__main__":  # python -m tests.distributed.test_pipeline [words of cases]: prints the differences
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        chosen = [name for name in CASES if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
        run_all(Path(made), chosen)
        for name in chosen:
            print(name, *compare(name, Path(made)))
