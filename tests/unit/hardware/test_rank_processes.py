"""Groups of processes on this host: the one that fails is named, and none outlives the block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.hardware.rank_processes import RankProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, sys, time; {code}"]


def test_ranks_split_the_cores_and_know_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "X")
    code = f"import json; print(json.dumps([os.environ[n] for n in {names}] + [os.environ['OMP_NUM_THREADS']]))"
    with RankProcesses(2) as ranks:
        for rank in range(2):
            ranks.start(python(code), environment={"X": f"x{rank}"}, stdout=subprocess.PIPE)
        output = [process.stdout.read() for process in ranks.processes if process.stdout]
        assert ranks.wait() is None
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [json.loads(text) for text in output] == [
        [str(rank), str(rank), "2", "2", "127.0.0.1", "lo", f"x{rank}", threads] for rank in range(2)
    ]


def test_the_rank_that_failed_is_named_and_the_others_end() -> None:
    with RankProcesses(2, keep_errors=True) as ranks:
        for end in ("time.sleep(99)", "sys.exit('no room')"):
            ranks.start(python(end))
        assert ranks.wait() == 1
        assert ranks.last_error_line(1) == "no room"
    assert ranks.processes[0].returncode == -9


def test_a_rank_that_was_killed_is_named_before_one_that_it_made_fail(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    follows = f'exec("while not os.path.exists({str(killed)!r}): time.sleep(0.01)"); sys.exit(3)'
    with RankProcesses(2) as ranks:
        for end in (follows, f"open({str(killed)!r}, 'w'); os.kill(os.getpid(), 9)"):
            ranks.start(python(end))
        assert ranks.wait() == 1


def test_an_error_in_the_block_leaves_no_process() -> None:
    with pytest.raises(KeyboardInterrupt), RankProcesses(1) as ranks:  # noqa: PT012
        ranks.start(python("time.sleep(99)"))
        raise KeyboardInterrupt
    assert ranks.processes[0].returncode == -9
