"""Qwen3-VL on two processes, which have different images or none: sharded weights and shared experts train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.core import DATA, Shape
from preheat.data.loader import batches
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.recipe import Recipe, parse
from preheat.training.session import data_of

from ..conftest import DEVICE, difference
from ..unit.seeing import questions, tiny_folder, written
from .processes import processes

STEPS = 3
CASES = [
    ("qwen3_vl", "{fsdp: {}}", "{}"),
    ("qwen3_vl", "{data_parallel: {}, activation_checkpointing: {}, chunked_loss: {rows: 16}}", "{}"),
    ("qwen3_vl", "{fsdp: {}, lora: {rank: 2}, vision_tower: {}}", "{lora: {rank: 2}, vision_tower: {}}"),
    ("qwen3_vl_moe", "{fsdp: {}, expert_parallel: {degree: 2}}", "{}"),
    ("gemma3", "{fsdp: {}, activation_checkpointing: {}}", "{}"),
    ("gemma4", "{fsdp: {}, activation_checkpointing: {}}", "{}"),
    ("mistral3", "{fsdp: {}, lora: {rank: 2}}", "{lora: {rank: 2}}"),
]
LENGTH = {"gemma4": 128}  # an image has up to 70 tokens


def recipe_of(folder: Path, family: str, techniques: str) -> Recipe:
    """Rows of one conversation: some of the two processes' micro-batches have images, others text alone."""
    return parse(
        f"model: {{path: {folder / family}, part: whole}}\ndata: {{source: {folder / 'rows.jsonl'}, validation: 0}}\nbatch: {{size: 4, seq_len: {LENGTH.get(family, 48)}}}\n"
        f"optimizer: {{lr: 0.01}}\nstop: {{max_steps: {STEPS}}}\ntechniques: {techniques}\n"
    )


def train(recipe: Recipe) -> dict[str, Any]:
    rows: Any = data_of(recipe).train
    b = build(recipe, vocabulary=None, device=DEVICE)
    share = (b.mesh.index(*DATA), b.mesh.size(*DATA))
    losses, norms, blank = [], [], 0
    read = batches(rows, seed=1, committed=0, shape=lambda step: Shape(4, recipe.batch.seq_len, 1), share=share)
    for _ in range(STEPS):
        step = next(read)
        blank += sum(not len(batch.images.positions) for batch in step if batch.images is not None)
        loss = accumulate_gradients(b, step, 0.01)
        losses.append(float(b.mesh.add(loss.total.detach().clone(), *DATA)) / float(loss.weight))
        norms.append(float(update(b, 0.01)[0]))
    read.close()
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in b.parameters()}
    return {"losses": losses, "norms": norms, "parameters": whole, "blank": blank}


def work(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for n, (family, techniques, _) in enumerate(CASES):
        torch.save(train(recipe_of(folder, family, techniques)), folder / f"{n}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREHEAT_CACHE", str(folder / "cache"))
        for family in sorted({family for family, _, _ in CASES}):
            tiny_folder(folder / family, family)
        text = {
            "messages": [
                {"role": "user", "content": "Which colours?"},
                {"role": "assistant", "content": "Red and blue."},
            ]
        }
        written(folder, [*questions(folder), text, text | {"n": 2}, text, text])
        alone = {
            case: train(recipe_of(folder, case[0], case[2])) for case in CASES
        }  # the data is cached for the processes
        with processes(work, 2, folder):
            pass
        yield folder, alone


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{family}-{techniques}" for family, techniques, _ in CASES])
def test_two_processes_train_as_one(folder: Any, case: int) -> None:
    place, alone = folder
    one = alone[CASES[case]]
    assert one["blank"]  # a micro-batch without images stood beside one that had some
    for rank in range(2):
        found = torch.load(place / f"{case}-{rank}.pt")
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert difference(found["parameters"], one["parameters"]) < 1e-4
