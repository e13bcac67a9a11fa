"""Child processes of the dashboard, with the real command line."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from preheat.core.run_records import Resumed, Started, Stopping
from preheat.errors import RunError
from preheat.run.writer import Writer
from preheat.web import jobs as jobs_module
from preheat.web.jobs import Jobs, JobState, read_answer, read_running_training


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    jobs = Jobs(limit_s=120)
    yield jobs
    jobs.close()


def wait_for(condition: object, seconds: float = 90) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


def test_an_answer_is_read(jobs: Jobs) -> None:
    job = jobs.start("Models", ["models", "show", "--json", "--", "qwen2.5-0.5b"])
    assert job.wait(60)
    assert job.state is JobState.DONE, job.problem
    answer = read_answer(job)
    assert isinstance(answer, dict)
    assert answer["name"] == "qwen2.5-0.5b"
    assert jobs.find(job.id) is job


def test_the_message_of_a_failed_command_is_its_problem(jobs: Jobs) -> None:
    job = jobs.start("Plan", ["plan", "--json", "--gpu=H1000", "--", "1M"])
    assert job.wait(60)
    assert job.state is JobState.FAILED
    assert job.exit_code == 2
    assert "H1000" in job.problem
    assert "\n" not in job.problem
    assert not job.problem.startswith("error")


def test_a_program_that_cannot_be_started_is_named(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o644)  # not executable
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(jobs_module, "tie_to_parent", list)
    job = jobs.start("Models", ["models", "--json"])
    assert job.wait(10)
    assert f"{python}: Permission denied; create or allow it" in job.problem
    training = jobs.queue_training("r", ["train", "r.yaml"], tmp_path / "r")
    wait_for(lambda: training.state is JobState.FAILED)
    assert f"{python}: Permission denied" in training.problem


def test_text_that_looks_like_an_option_stays_text(jobs: Jobs) -> None:
    job = jobs.start("Models", ["models", "show", "--json", "--", "--help"])
    assert job.wait(60)
    assert job.exit_code == 2
    assert "--help" in job.problem


def test_cancelling_ends_the_process(jobs: Jobs) -> None:
    job = jobs.start("Plan", ["plan", "--json", "--gpu=H100", "--", "qwen2.5-0.5b"])
    wait_for(lambda: job._process is not None)
    assert job._process is not None
    pid = job._process.pid
    job.cancel()
    assert job.wait(10)
    assert job.state is JobState.CANCELLED
    assert job.problem == ""
    assert not psutil.pid_exists(pid)


def test_the_time_limit_is_a_problem(jobs: Jobs) -> None:
    job = jobs.start("Plan", ["plan", "--json", "--gpu=H100", "--", "qwen2.5-0.5b"], limit_s=0.2)
    assert job.wait(10)
    assert job.state is JobState.FAILED
    assert "longer than" in job.problem


def test_output_is_bounded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_MOST_OUTPUT", 1000)
    job = jobs.start("Models", ["models"])
    assert job.wait(60)
    assert job.state is JobState.FAILED
    assert "MiB" in job.problem
    assert job.output.stat().st_size <= 1000


def test_answers_are_limited_in_number_and_end_with_the_server(jobs: Jobs) -> None:
    running = [jobs.start("Plan", ["plan", "--gpu=H100", "--", "7B"]) for _ in range(jobs_module._MOST_ANSWERS)]
    with pytest.raises(RunError, match="cancel"):
        jobs.start("Plan", ["plan", "--gpu=H100", "--", "7B"])
    folders = [job.folder for job in running]
    jobs.close()
    assert not any(job.is_running for job in running)
    assert not any(folder.exists() for folder in folders)


TINY = ["--set=batch.seq_len=64", "--set=batch.size=2"]


def test_trainings_queue_and_survive_the_server(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.queue_training("a", ["train", f"--out={tmp_path / 'a'}", *TINY, "--", "demo"], tmp_path / "a")
    second = jobs.queue_training("b", ["train", f"--out={tmp_path / 'b'}", *TINY, "--", "demo"], tmp_path / "b")
    with pytest.raises(RunError, match="already"):
        jobs.queue_training("a", ["train", "--", "demo"], tmp_path / "a")
    wait_for(lambda: first.pid is not None)
    assert second.state is JobState.WAITING
    # The server ends; the training does not, and the next server finds it and queues behind it.
    jobs.close()
    assert first.pid is not None
    assert psutil.pid_exists(first.pid)
    record = read_running_training()
    assert record is not None
    assert record.pid == first.pid
    assert record.run == str(tmp_path / "a")
    later = Jobs()
    (other,) = later.list_trainings()
    assert other.run == tmp_path / "a"
    assert other.state is JobState.RUNNING
    third = later.queue_training("c", ["train", "--", "no-such-recipe"], tmp_path / "c")
    time.sleep(0.5)
    assert third.state is JobState.WAITING
    # The trainer has set its handler by the time that it writes its first line.
    wait_for(lambda: first.log.stat().st_size > 0)
    later.cancel_training(other.id)
    wait_for(lambda: third.state is JobState.FAILED)
    assert "no-such-recipe" in third.problem
    assert not psutil.pid_exists(first.pid) or psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE
    assert read_running_training() is None
    later.close()


def open_queue(runs: Path) -> Jobs:
    jobs = Jobs()
    jobs.take_over(runs)
    return jobs


def test_the_next_server_goes_on_with_the_queue(jobs: Jobs, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    before = open_queue(runs)
    first = before.queue_training("a", ["train", f"--out={runs / 'a'}", *TINY, "--", "demo"], runs / "a")
    before.queue_training("b", ["train", "--", "no-such-recipe"], runs / "b")
    wait_for(lambda: first.pid is not None)
    # A second server of the same folder neither starts the trainings again nor takes the queue.
    assert [training.run.name for training in open_queue(runs).list_trainings()] == ["a"]
    before.close()
    later = open_queue(runs)
    earlier, waiting = later.list_trainings()
    assert (earlier.id, earlier.state, waiting.state) == (first.id, JobState.RUNNING, JobState.WAITING)
    assert first.pid is not None
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: waiting.state is JobState.FAILED)
    assert "no-such-recipe" in waiting.problem
    wait_for(lambda: earlier.state is JobState.FAILED)
    assert "records no end" in earlier.problem
    later.close()
    last = open_queue(runs)
    assert [(t.title, t.state) for t in last.list_trainings()] == [("a", JobState.FAILED), ("b", JobState.FAILED)]
    last.close()


def test_the_end_of_an_earlier_session_is_not_that_of_a_resumed_training(jobs: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "runs/a"
    writer = Writer(run)
    writer.write_text("recipe.yaml", "name: a\n")
    writer.write_event(Started(step=0))
    writer.write_event(Stopping(signal="SIGTERM", step=4))
    writer.write_event(Resumed(step=4))
    writer.close()
    before = open_queue(run.parent)
    training = before.queue_training("a", ["train", "--", "no-such-recipe"], run, log=run.with_name("a-resumed-1.log"))
    wait_for(lambda: training.state is JobState.FAILED)
    before.close()
    (file,) = (tmp_path / "cache/ui").rglob("*.json")
    # As the file is while the training runs, after its server and the training itself were killed.
    file.write_text(file.read_text().replace('"failed"', '"running"'))
    later = open_queue(run.parent)
    (ended,) = later.list_trainings()
    assert ended.log == run.with_name("a-resumed-1.log")
    wait_for(lambda: ended.state is JobState.FAILED)
    assert "records no end" in ended.problem
    later.close()


def test_the_folder_of_a_refused_job_is_removed(jobs: Jobs) -> None:
    with pytest.raises(RunError), jobs.create_folder() as folder:
        raise RunError("a field of the form is wrong")
    assert not folder.exists()


def test_a_waiting_training_can_be_taken_out(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.queue_training("a", ["train", f"--out={tmp_path / 'a'}", *TINY, "--", "demo"], tmp_path / "a")
    second = jobs.queue_training("b", ["train", f"--out={tmp_path / 'b'}", *TINY, "--", "demo"], tmp_path / "b")
    wait_for(lambda: first.pid is not None)
    jobs.cancel_training(second.id)
    assert second.state is JobState.CANCELLED
    assert first.pid is not None
    os.killpg(first.pid, signal.SIGKILL)
    wait_for(lambda: first.state is JobState.FAILED)
    assert "SIGKILL" in first.problem
    assert second.pid is None
