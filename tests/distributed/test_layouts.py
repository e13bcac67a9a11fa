"""A checkpoint of one layout goes on in any other: the next losses are those of the run that was never interrupted. On demand: PREHEAT_SCALE=all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import DATA, Build
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, read_step_stats, update
from preheat.hardware.child_processes import local_group

from ..conftest import DEVICE, split, tiny, uneven

ROWS, LENGTH, BEFORE, AFTER = 8, 32, 3, 3
FSDP_TP, PP_FSDP, PP_FSDP_EP = (
    "{fsdp: {}, tensor_parallel: {degree: 2}}",
    "{pipeline_parallel: {micro_batches: 2}, fsdp: {reduce: last}}",
    "{pipeline_parallel: {micro_batches: 2}, fsdp: {reduce: last}, expert_parallel: {}}",
)
# processes and techniques; family: what writes, and what goes on from each
LAYOUTS: dict[str, tuple[list[tuple[int, str]], list[tuple[int, str]]]] = {
    "llama": (
        [
            (4, "{fsdp: {replicate: 2}}"),
            (4, FSDP_TP),
            (4, PP_FSDP),
            (4, "{fsdp: {}, context_parallel: {kind: ulysses, degree: 2}}"),
            (1, "{}"),
        ],
        [
            (1, "{}"),
            (2, "{fsdp: {}}"),
            (2, "{tensor_parallel: {degree: 2}}"),
            (2, "{pipeline_parallel: {schedule: gpipe, micro_batches: 4}}"),
            (2, "{data_parallel: {}, zero1: {}}"),
            (4, "{fsdp: {}}"),
            (4, FSDP_TP),
            (4, PP_FSDP),
            (4, "{data_parallel: {}, context_parallel: {kind: ring, degree: 2}}"),
        ],
    ),
    "qwen3_moe": (
        [
            (4, "{fsdp: {replicate: 2}, expert_parallel: {}}"),
            (4, "{data_parallel: {}, expert_parallel: {degree: 2}}"),
            (4, PP_FSDP_EP),
            (4, "{fsdp: {}, expert_parallel: {}, tensor_parallel: {degree: 2}}"),
            (4, "{data_parallel: {}, zero1: {}, tensor_parallel: {degree: 2}}"),
        ],
        [
            (1, "{}"),
            (2, "{fsdp: {}, expert_parallel: {}}"),
            (2, "{fsdp: {}}"),
            (4, "{fsdp: {}}"),
            (4, "{data_parallel: {}, expert_parallel: {degree: 2}}"),
            (4, PP_FSDP_EP),
            (4, FSDP_TP),
            (4, "{data_parallel: {}, context_parallel: {kind: ring, degree: 2}, expert_parallel: {}}"),
        ],
    ),
}
JOBS = [
    (family, source, target)
    for family, (sources, targets) in LAYOUTS.items()
    for source in sources
    for target in (None, *targets)
]


def made(family: str, techniques: str, seed: int) -> Build:
    # No step as long for a gradient that is all rounding as for another: a large eps, as in the tests of each technique.
    more = [
        "optimizer.eps=1e-3",
        "checkpoint.every=1",
        "checkpoint.asynchronous=true",
        *(["model.num_experts=4"] if "moe" in family else []),
    ]
    recipe = recipes.override(tiny(techniques, family=family, rows=ROWS, length=LENGTH), f"seed={seed}", *more)
    return build(recipe, vocabulary=96, device=DEVICE)


def steps(b: Build, first: int, count: int) -> list[float]:
    """Losses as the loop reads them; a row's place in the data is that of its step."""
    found = []
    for step in range(first, first + count):
        devices = b.mesh.size(*DATA)
        rows = ROWS // devices
        mine = split(uneven(rows=ROWS, length=LENGTH, seed=step), [rows] * devices)[b.mesh.index(*DATA)]
        micro = -(-rows // b.state.accumulation)
        loss = accumulate_gradients(b, split(mine, [micro] * (rows // micro)), 0.01)
        stats = update(b, 0.01)
        total, _, weight, *_ = read_step_stats(
            b, loss, torch.stack([*stats, torch.zeros_like(stats[0])]), (False, False)
        )
        found.append(total / weight)
    return found


def one_job(number: int, folder: Path) -> dict[str, Any]:
    family, source, target = JOBS[number]
    place = folder / f"{family}-{LAYOUTS[family][0].index(source)}"
    try:
        if target is None:
            b = made(family, source[1], seed=0)
            saving = Saving(b, place)
            losses = steps(b, 0, BEFORE)
            saving.save(checkpoint.Progress(step=BEFORE, samples=BEFORE * ROWS))
            losses += steps(b, BEFORE, AFTER)  # while it is written
            return {"losses": losses, "saved": len(saving.wait())}
        b = made(family, target[1], seed=7)
        found, damaged = checkpoint.find(place)
        assert found is not None, damaged
        progress = checkpoint.load(b, found)
        return {"losses": steps(b, progress.step, AFTER), "samples": progress.samples}
    except Exception:  # noqa: BLE001  # the other jobs go on; the comparison fails with these words
        return {"failed": traceback.format_exc()[-2500:]}


def _work(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    for number, (_, source, target) in enumerate(JOBS):
        world = (target or source)[0]
        done = folder / f"{number}.pt"
        if rank >= world:
            until = 600
            while not done.exists() and until > 0:
                until -= multiprocessing.Event().wait(0.05) or 0.05
            continue
        if world > 1:
            wait = timedelta(seconds=120)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=world, timeout=wait
            )
        found = one_job(number, folder)
        if world > 1:
            dist.destroy_process_group()
        if rank == 0:
            torch.save(found, folder / f"{number}.part")
            os.replace(folder / f"{number}.part", done)


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_work, args=(rank, folder)) for rank in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in started))


@pytest.mark.skipif(os.environ.get("PREHEAT_SCALE") != "all", reason="takes minutes: make test-scale")
def test_any_layout_goes_on_from_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, pathlib; from tests.distributed import test_layouts; test_layouts._main(pathlib.Path(sys.argv[1]))"
    )
    environment = {**os.environ, **local_group(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=3000, check=False)
    assert done.returncode == 0
    found = [torch.load(tmp_path / f"{number}.pt") for number in range(len(JOBS))]
    whole: dict[Any, list[float]] = {}
    wrong, worst = [], 0.0
    for (family, source, target), made_here in zip(JOBS, found, strict=True):
        name = f"{family}: {source} -> {target}"
        if "failed" in made_here:
            wrong.append(f"{name}: {made_here['failed']}")
        elif target is None:
            whole[family, source] = made_here["losses"]
        else:
            wanted = whole[family, source][BEFORE:]
            off = max(abs(a - b) for a, b in zip(made_here["losses"], wanted, strict=True))
            worst = max(worst, off)
            if off > 1e-6 or made_here["samples"] != BEFORE * ROWS:
                wrong.append(f"{name}: off by {off:.1e}")
    with capsys.disabled():
        print(f"\n{len(JOBS) - len(whole)} resumptions in another layout: losses off by {worst:.1e} at most")
    assert not wrong, "\n".join(wrong)
