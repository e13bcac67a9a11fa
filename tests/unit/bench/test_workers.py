"""Worker processes that end early, or write more to stderr than a pipe holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from preheat.bench import inference, zero_trial
from preheat.bench.messages import InferenceJob, ZeroJob
from preheat.core import Device
from preheat.errors import RunError
from preheat.hardware import benchmark_rates, link_rates, rank_processes
from preheat.hardware.benchmark_rates import grid_of
from preheat.recipe import Sample

LOUD = "import signal, sys; signal.alarm(20); sys.stderr.write('x' * 200_000 + '\\n'); "


def runs(monkeypatch: pytest.MonkeyPatch, module: object, code: str) -> None:
    monkeypatch.setattr(module, "tie_to_parent", lambda command: [sys.executable, "-c", code, *command[-2:]])


def test_a_worker_of_an_inference_benchmark_that_ended_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(monkeypatch, inference, "import sys; print('{}', flush=True); sys.exit('out of luck')")
    job = InferenceJob("m", Sample(), None, "preheat", 8, [(1, 8)], None)
    with inference._Worker(inference.InferenceContender("a", "m"), job, tmp_path) as worker:
        worker.send_text()
        assert not worker.failed
        worker._process.wait()
        assert worker.generate((1, 8)) is None
        assert worker.failed == "out of luck"


def test_a_rank_of_a_zero_trial_may_write_much_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 waits for rank 1, as in a collective.
    wait = "import pathlib, time; done = pathlib.Path(sys.argv[1]).with_name('done'); "
    rank_1 = "done.touch(); sys.exit('out of luck')"
    code = f"{LOUD}{wait}\nif sys.argv[2] == '1':\n  {rank_1}\nwhile not done.exists(): time.sleep(0.01)"
    runs(monkeypatch, rank_processes, code)
    assert zero_trial.run_processes(ZeroJob("", 2, 2, 1, False, 9.0)) == "out of luck"


def test_a_calibration_may_write_much_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, benchmark_rates, f"{LOUD}print('[\"matmuls\", 0.5]', flush=True); sys.exit('out of luck')")
    device, progress = Device("cpu", "test", 1 << 30), list[object]()
    with pytest.raises(RunError, match="failed: out of luck"):
        benchmark_rates._measure_in_process(device, 1, lambda *done: progress.append(done), lambda: [grid_of(device)])
    assert progress == [("matmuls", 0.5)]


def test_a_failed_write_of_measurements_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(RunError, match="cannot store the calibration there"):
        link_rates.store_json(tmp_path / "a.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
