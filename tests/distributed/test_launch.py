"""The jobs that `launch` writes, run here: torchrun on two 'hosts' of this machine, where what they train stands in for `preheat train`."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.training.launch import Job, render_job

from ..conftest import tiny

# A run of three steps: it goes on where its folder says, saves when told (as `train` does), and says in which world it was.
RUN = """
import json, os, signal, sys, time
from pathlib import Path

recipe, out = Path(sys.argv[2]), Path(sys.argv[sys.argv.index("--out") + 1])
assert sys.argv[1] == "train" and "--auto-resume" in sys.argv and "name: run" in recipe.read_text(), sys.argv
told = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: told.append(number))
rank = os.environ["RANK"]
steps = sorted(int(p.name[5:]) for p in (out / "checkpoints").glob("step-*"))
step = steps[-1] if steps else 0


def say(kind):
    if rank == "0":
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        with open(out / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind, "step": step}) + "\\n")


say("resumed" if steps else "started")
with open(out.parent / f"rank-{rank}", "a") as file:
    file.write(" ".join(os.environ[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")) + "\\n")
if not steps:  # the first start waits to be told; no later one does
    end = time.monotonic() + 60
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    assert told, "nobody told this process to save"
    step = 1
else:
    step = 3
if rank == "0":
    (out / "checkpoints" / f"step-{step}").mkdir()
if step == 3:
    say("finished")
"""

SRUN = """#!/bin/bash
# Two tasks, one a host; a signal to the step reaches every process of it, torchrun as well.
while [ "$1" != bash ]; do shift; done
for n in 0 1; do SLURM_NODEID=$n setsid "$@" & echo $! >> "$FAKE/step"; done
code=0
for pid in $(jobs -p); do wait "$pid" || code=$?; done
exit $code
"""


def job(out: Path, **how: object) -> Job:
    recipe = replace(tiny("{data_parallel: {}}"), name="run")
    return Job(recipe=recipe, nodes=2, processes_per_node=1, cpus_per_node=3, out=str(out), env=("EXTRA=a b",), **how)  # type: ignore[arg-type]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `preheat` is the run above and whose Slurm is this machine."""
    package = tmp_path / "site" / "preheat"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(RUN)
    tools = tmp_path / "bin"
    tools.mkdir()
    # torchrun gives its processes sessions of their own; Slurm signals the whole control group.
    kill = 'tree() { for p in $(pgrep -P "$1"); do tree "$p"; done; kill -USR1 "$1"; }; for p in $(cat "$FAKE/step"); do tree "$p"; done'
    for name, text in {
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "srun": SRUN,
        "scancel": f'#!/bin/bash\n[ "$*" = "--signal=USR1 77" ] || exit 9\n{kill}\n',
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$*" >> "$FAKE/queue"; fi\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # what stands in the present folder comes before PYTHONPATH
    for name in ("SLURM_JOB_ID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_slurm_saves_before_its_time_is_over_and_goes_on_to_the_end(stage: Path) -> None:
    script = stage / "job.sbatch"
    script.write_text(render_job(job(stage / "runs" / "r", time="1:00:00", port=29431), "slurm"))
    environment = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost"}
    ranks = [stage / "runs" / f"rank-{n}" for n in range(2)]

    first = Started(["bash", str(script)], environment)
    until(lambda: all(rank.exists() for rank in ranks), first)
    first.process.send_signal(signal.SIGUSR1)  # as Slurm tells the batch script alone
    code, said = first.end()
    assert code == 0, said
    assert "queued again" in said
    assert (stage / "queue").read_text() == "requeue 77\n"

    code, said = Started(["bash", str(script)], environment | {"SLURM_RESTART_COUNT": "1"}).end()
    assert code == 0, said
    assert (stage / "queue").read_text() == "requeue 77\n"  # it has finished: not again
    assert (stage / "runs" / "r" / "checkpoints" / "step-3").exists()
    assert [rank.read_text() for rank in ranks] == ["2 1 3 a b\n" * 2] * 2


def test_slurm_does_not_meet_the_same_fault_for_ever(stage: Path) -> None:
    (stage / "bin" / "python").write_text("#!/bin/bash\nexit 3\n")
    script = stage / "job.sbatch"
    script.write_text(render_job(job(stage / "runs" / "r", restarts=0, port=29432), "slurm"))
    environment = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost"}
    code, said = Started(["bash", str(script)], environment).end()
    assert code == 3
    assert "without a new checkpoint: not queued again" in said
    assert not (stage / "queue").exists()


def test_ray_runs_the_entry_on_two_workers(stage: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed here (pip install 'ray[train]')")
    (stage / "runs" / "r" / "checkpoints" / "step-1").mkdir(parents=True)  # goes on, and finishes
    script = stage / "entry.py"
    script.write_text(render_job(replace(job(stage / "runs" / "r", port=29435), cpus_per_node=1), "ray"))
    code, said = Started([sys.executable, str(script)], {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}).end(200)
    assert code == 0, said
    assert (stage / "runs" / "rank-1").read_text() == "2 1 1 a b\n"
    assert (stage / "runs" / "r" / "checkpoints" / "step-3").exists()


class Started:
    """A process in a group of its own, whose words go to a file: what it started may live on, and hold a pipe open."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=environment, stdout=self.words, stderr=self.words)

    def end(self, seconds: int = 90) -> tuple[int, str]:
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self.words.seek(0)
            said = self.words.read()
            self.words.close()
        return self.process.returncode, said


def until(done: Callable[[], bool], *started: Started) -> None:
    end = time.monotonic() + 60
    while not done():
        for one in started:
            assert one.process.poll() is None, one.end()[1]
        assert time.monotonic() < end, [one.end() for one in started]
        time.sleep(0.05)
