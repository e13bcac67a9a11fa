"""Compares ZeRO with replicated optimizer states: `python -m preheat.bench.zero_trial JOB.json RANK` is one process.

A plain training loop over the recipe's model and data, with several processes on one machine, over gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from preheat.bench.messages import ZeroJob, ZeroTurn, encode
from preheat.hardware.child_processes import describe_exit
from preheat.hardware.probe import count_cores
from preheat.hardware.rank_processes import RankProcesses

__all__ = ["main", "run_processes", "take_steps"]


def run_processes(job: ZeroJob) -> list[ZeroTurn] | str:
    """Runs one contender; returns the measurements of each process, or the reason why it did not run."""
    with tempfile.TemporaryDirectory() as folder, RankProcesses(job.world, keep_errors=True) as ranks:
        path = Path(folder) / "job.json"
        path.write_text(encode(job), encoding="utf-8")
        # Whatever the user has set: ranks that use all cores each wait for each other.
        threads = {"OMP_NUM_THREADS": str(max(1, count_cores() // job.world))}
        for rank in range(job.world):
            command = [sys.executable, "-m", "preheat.bench.zero_trial", str(path), str(rank)]
            ranks.start(command, environment=threads, stdout=subprocess.DEVNULL)
        if (failed := ranks.wait()) is not None:
            code = ranks.processes[failed].returncode
            last = ranks.last_error_line(failed) if code > 0 else ""
            return last or f"a process {describe_exit(code)}"
        results = [(Path(folder) / f"{rank}.json").read_text(encoding="utf-8") for rank in range(job.world)]
        return [ZeroTurn(**json.loads(text)) for text in results]


def take_steps(job: ZeroJob, rank: int, folder: Path) -> ZeroTurn:
    """Trains on one rank: the same model everywhere, own rows, averaged gradients; with stage 0, replicated optimizer
    states.

    Args:
        folder: shared by the processes.
    """
    import torch
    import torch.distributed as dist

    from preheat import recipe as recipes
    from preheat.core import Device, Shape
    from preheat.data import batches, prepare
    from preheat.hardware.probe import peak_resident_bytes
    from preheat.model_folder import count_embedding_rows
    from preheat.models import hf, size_dial
    from preheat.models.weights import WeightSource, materialize
    from preheat.ops.attention.sdpa import sdpa_attention
    from preheat.ops.optim.optimizers import fused_adamw, group_by_decay
    from preheat.ops.optim.zero import ZeROAdamW
    from preheat.training.session import reset_memory_baseline

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world, recipe = job.world, recipes.parse(job.recipe)
    # A store in a file needs no free port.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    data = prepare(recipe.data, length=recipe.batch.seq_len, seed=recipe.seed)
    imports = reset_memory_baseline(Device("cpu", "here", 0))
    model = hf.build_on_meta(hf.configure(recipe, count_embedding_rows(data.tokenizer)))
    materialize(model, torch.device("cpu"))
    # Equal seeds give equal weights on all ranks, without a broadcast.
    WeightSource().fill(model, seed=recipe.seed)
    # Parameters outside of embedding and head, as the fit counts them.
    lr = size_dial.learning_rate(sum(p.numel() for p in model.base_model.layers.parameters()))
    groups = group_by_decay(model.named_parameters(), recipe.optimizer.weight_decay)
    betas = recipe.optimizer.betas
    optimizer: torch.optim.Optimizer = (
        ZeROAdamW(groups, lr=lr, betas=betas, stage=job.stage, cpu_offload=job.offload, module=model)
        if job.stage
        else fused_adamw(groups, lr=lr, betas=betas, eps=1e-8)
    )
    # Every rank reads the whole batch and takes its own micro-batch, so that `weight` covers all of them.
    shape = Shape(recipe.batch.size, recipe.batch.seq_len, recipe.batch.size // world)
    seconds, losses = [], []
    with closing(batches(data.train, seed=recipe.seed, committed=0, shape=lambda samples: shape)) as stream:
        for _ in range(job.steps):
            start = time.perf_counter()
            parts = next(stream)
            mine, weight = parts[rank], sum(part.weight for part in parts)
            logits = model(
                input_ids=mine.tokens,
                position_ids=mine.positions,
                use_cache=False,
                preheat_attention=sdpa_attention,
                preheat_mask=mine.mask,
            ).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine.labels.flatten(), reduction="sum")
            loss = loss / (weight / world)  # averaging over processes then gives the mean over all tokens
            loss.backward()
            # [tokens, vocabulary], the largest tensor of the step: freed before the optimizer's peak.
            del logits
            # torch's own function would see only the gradients that this process owns.
            if isinstance(optimizer, ZeROAdamW):
                optimizer.clip_grad_norm_(recipe.optimizer.max_grad_norm)
            else:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(world)
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Each rank's loss is scaled by world / weight: the sum over ranks divided by world is the mean per token.
            mean = loss.detach() / world
            dist.all_reduce(mean)
            losses.append(float(mean))
            seconds.append(time.perf_counter() - start)
            # One rank's clock must not decide alone: the others would wait in the next collective.
            late = torch.tensor(float(len(seconds) > 1 and sum(seconds) > job.seconds))
            dist.all_reduce(late)  # so that all ranks stop at the same step
            if late:
                break
    state_bytes = (
        optimizer.state_bytes()
        if isinstance(optimizer, ZeROAdamW)
        else sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    )
    peak = max(peak_resident_bytes() - imports, 0)
    dist.destroy_process_group()
    return ZeroTurn(seconds, losses, shape.rows * shape.length, peak / 2**30, state_bytes / 2**30)


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = ZeroJob(**json.loads(path.read_text(encoding="utf-8")))
    path.with_name(f"{rank}.json").write_text(encode(take_steps(job, rank, path.parent)), encoding="utf-8")


if __name__ == "__main__":
    main()
