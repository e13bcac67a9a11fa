"""The index of a run follows its files as they grow, shrink and break, and agrees with `run.reader`."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.core.phases import Phase
from preheat.core.run_records import (
    Checkpoint,
    EvaluationMetrics,
    Failed,
    Finished,
    Measured,
    OutOfMemory,
    Resumed,
    Started,
    StepMetrics,
    Usage,
)
from preheat.run.reader import Reader
from preheat.run.writer import Writer
from preheat.web import index as index_module
from preheat.web.catalogue import Catalogue, RunEntry
from preheat.web.index import list_keys, read_marks, read_outline, read_rows, summarize


def step(number: int, loss: float = 2.0, **values: float) -> StepMetrics:
    return StepMetrics(
        number,
        tokens=128 * number,
        loss=loss,
        lr=1e-3,
        gradient_norm=1.0,
        seconds=0.5,
        tokens_per_second=256.0,
        memory=2**30,
        elapsed=0.5 * number,
        length=32,
        scores=values,
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    """A run folder that no process writes, and a cache of its own."""
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index_module, "_INDEXES", index_module._Indexes())
    # Enough for all that a test reads, however busy the machine is.
    monkeypatch.setattr(index_module, "_INLINE_S", 1e6)
    monkeypatch.setattr(index_module, "_SLICE_S", 1e6)
    folder = tmp_path / "runs" / "a"
    writer = Writer(folder)
    writer.write_text("recipe.yaml", "name: a\nmodel: {family: llama, size: 10M}\n")
    writer.close()
    (entry,) = Catalogue((tmp_path / "runs",)).list_runs()
    return entry


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets everything that only the process knows."""
    monkeypatch.setattr(index_module, "_INDEXES", index_module._Indexes())


def write(entry: RunEntry, *lines: StepMetrics | EvaluationMetrics) -> None:
    writer = Writer(entry.path, resume=True)
    for line in lines:
        writer.write_metric(line)
    writer.close()


def read_losses(entry: RunEntry) -> dict[int, float | None]:
    outline = read_outline(entry, "loss", points=10**6)
    return {int(x): y for x, y in zip(outline.x, outline.mean, strict=True)}


def expect_losses(entry: RunEntry) -> dict[int, float]:
    return {line.step: line.loss for line in Reader(entry.path).metrics() if line.loss is not None}


def test_new_lines_are_added_and_old_ones_are_not_read_again(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, *(step(n, 3 - n / 100) for n in range(1, 101)))
    assert read_losses(run) == expect_losses(run)
    write(run, step(101, 0.5), EvaluationMetrics(101, validation_loss=1.25))
    restart(monkeypatch)
    lines: list[bytes] = []
    read = index_module.read_metrics

    def record(line: bytes) -> StepMetrics | EvaluationMetrics:
        lines.append(line)
        return read(line)

    monkeypatch.setattr(index_module, "read_metrics", record)
    summary = summarize(run)
    assert (summary.step, summary.loss, summary.validation_loss, summary.tokens_per_second) == (101, 0.5, 1.25, 256)
    assert read_losses(run) == expect_losses(run)
    assert len(lines) == 2
    assert list_keys(run)[:3] == ["loss", "validation_loss", "tokens_per_second"]


def test_a_run_that_went_back_loses_its_later_steps(run: RunEntry) -> None:
    write(run, *(step(n, 3) for n in range(1, 21)), EvaluationMetrics(20, validation_loss=9.0))
    summarize(run)  # on disk
    write(run, *(step(n, 1) for n in range(11, 14)), EvaluationMetrics(13, validation_loss=2.0))
    assert read_losses(run) == expect_losses(run) == {**dict.fromkeys(range(1, 11), 3), 11: 1, 12: 1, 13: 1}
    assert [*read_outline(run, "validation_loss").x] == [13]
    write(run, *(step(n, 5) for n in range(14, 30)), *(step(n, 4) for n in range(5, 8)))  # within one reading
    assert read_losses(run) == expect_losses(run)


def test_half_written_broken_and_endless_lines(run: RunEntry) -> None:
    file = run.path / "metrics.jsonl"
    with file.open("ab") as stream:
        stream.write(b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_losses(run) == {1: 2.5}
    with file.open("ab") as stream:
        stream.write(b'ss": 2.25}\nnot a line\n{"step": 3, "loss": "x"}\n' + b"[" * (3 << 20))
    summary = summarize(run)
    assert read_losses(run) == {1: 2.5, 2: 2.25}
    assert summary.problem is not None
    assert summary.problem.startswith("metrics.jsonl: line 3 (not JSON")
    assert "2 more left out" in summary.problem
    with file.open("ab") as stream:
        stream.write(b"[" * (1 << 20) + b'\n{"step": 4, "loss": 1.0}\n')
    assert read_losses(run) == {1: 2.5, 2: 2.25, 4: 1.0}


def test_replaced_and_truncated_files_are_read_again(run: RunEntry) -> None:
    file = run.path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n')
    assert read_losses(run) == {1: 2.5, 2: 2.0}
    file.write_bytes(b'{"step": 1, "loss": 2.5}\n')
    assert read_losses(run) == {1: 2.5}
    copy = file.with_name("copy")
    copy.write_bytes(b'{"step": 1, "loss": 7.5}\n{"step": 2, "loss": 7.0}\n{"step": 3, "loss": 6.0}\n')
    copy.replace(file)
    assert read_losses(run) == {1: 7.5, 2: 7.0, 3: 6.0}
    file.unlink()
    assert read_losses(run) == {}


def test_a_damaged_index_is_written_again(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, *(step(n) for n in range(1, 11)))
    summarize(run)
    folder = index_module.cache_folder() / "dashboard" / run.id
    for damage in (
        lambda: (folder / "index.json").write_text("{"),
        lambda: (folder / "steps-1.column").write_bytes(b""),
        lambda: (folder / "steps-0.column").unlink(),
    ):
        damage()
        restart(monkeypatch)
        assert read_losses(run) == expect_losses(run)


def test_late_keys_values_that_are_not_finite_and_axes(run: RunEntry) -> None:
    write(run, step(1), step(2, math.nan), step(3, accuracy=0.5), EvaluationMetrics(3, validation_loss=1.0))
    loss = read_outline(run, "loss", x="tokens")
    assert ([*loss.x], [*loss.mean], [*loss.broken]) == ([128, 256, 384], [2, None, 2], [256])
    accuracy = read_outline(run, "accuracy", x="hours")
    assert [*accuracy.x] == pytest.approx([1.5 / 3600])
    assert [*accuracy.mean] == [0.5]
    assert [*read_outline(run, "validation_loss", x="tokens").x] == [384]
    assert [*read_outline(run, "nothing").x] == []
    header, *rows = read_rows(run)
    assert [dict(zip(header, row, strict=True))["accuracy"] for row in rows] == [None, None, 0.5]
    assert math.isnan(rows[1][header.index("loss")])  # type: ignore[arg-type]
    assert rows[2][header.index("validation_loss")] == 1.0


def test_a_long_curve_keeps_its_extremes_at_every_zoom(run: RunEntry) -> None:
    count = (1 << 16) + 5_000
    losses = [2 + math.sin(n / 500) for n in range(1, count + 1)]
    losses[40_000], losses[count - 1], losses[50_000] = 100.0, -50.0, math.nan
    lines = "".join(
        f'{{"step": {n}, "loss": {"null" if loss != loss else loss}}}\n' for n, loss in enumerate(losses, 1)
    )
    (run.path / "metrics.jsonl").write_text(lines)
    outline = read_outline(run, "loss", points=500)
    assert len(outline.x) <= 500
    assert (outline.rows, outline.is_exact, outline.first, outline.last) == (count, False, 1, count)
    assert outline.newest == -50.0
    # Also if the last row would fill a block.
    assert read_outline(run, "loss", last=1 << 16, points=500).newest == losses[(1 << 16) - 1]
    assert max(filter(None, outline.high)) == 100.0
    assert min(filter(None, outline.low)) == -50.0
    (broken,) = outline.broken
    assert abs(broken - 50_001) < 2 * count / 500
    # The bins of blocks together cover each row once: the mean of all is that of the values.
    part = read_outline(run, "loss", first=30_000, last=30_099)
    assert [*part.mean] == losses[29_999:30_099]
    assert part.is_exact
    # Going back shortens the outline too.
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 30001, "loss": 0.25}\n')
    outline = read_outline(run, "loss", points=500)
    assert (outline.rows, outline.last, max(filter(None, outline.high)) <= 3) == (30_001, 30_001, True)


def test_states(run: RunEntry) -> None:
    assert summarize(run).state == "not started"
    writer = Writer(run.path, resume=True)
    writer.write_event(Started())
    writer.write_metric(step(1))
    assert summarize(run).state == "running"
    writer.write_event(Measured(peak_gib=2.5, usage=Usage(device_hours=1, cost=1.5, currency="EUR")))
    writer.write_event(Finished(steps=1, loss=2.0))
    writer.close()
    summary = summarize(run)
    assert (summary.state, summary.peak_gib, summary.cost, summary.currency) == ("finished", 2.5, 1.5, "EUR")
    assert summary.model == "llama of size 10M"
    writer = Writer(run.path, resume=True)
    writer.write_event(Resumed(step=1))
    writer.write_event(Failed(reason="the disk is full"))
    writer.close()
    assert summarize(run).state_text == "Failed at step 1: the disk is full."


def test_a_killed_process_and_another_machine(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys, time; from preheat.run.writer import Writer; from preheat.core.run_records import *\n"
        "writer = Writer(sys.argv[1], resume=True); writer.write_event(Started()); print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(run.path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    restart(monkeypatch)
    assert summarize(run).state == "running"
    process.kill()
    process.wait()
    process.stdout.close()
    restart(monkeypatch)
    assert summarize(run).state == "killed"
    # Lines that appear while no process here has the lock were copied from, or written by, another machine.
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1, "loss": 2.5}\n')
    assert summarize(run).state == "elsewhere"


def test_looking_does_not_lock_the_run(run: RunEntry) -> None:
    for _ in range(50):
        summarize(run)
        Writer(run.path, resume=True).close()


def test_marks_have_the_text_of_the_report(run: RunEntry) -> None:
    writer = Writer(run.path, resume=True)
    writer.write_event(Checkpoint(step=5, seconds=2.0))
    event = OutOfMemory(
        phase=Phase.BACKWARD, step=7, rank=0, message="<b>", requested=1, room=1, overhead=0, in_use={}, allocator={}
    )
    writer.write_event(event)
    writer.close()
    first, second = read_marks(run)
    assert (first.kind, first.step, first.text, first.is_bad) == ("checkpoint", 5, "step 5; took 2 s", False)
    assert (second.kind, second.step, second.is_bad) == ("out of memory", 7, True)


def test_long_runs_are_read_in_the_background(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, *(step(n) for n in range(1, 3_001)))
    monkeypatch.setattr(index_module, "_INLINE_S", 0.0)
    monkeypatch.setattr(index_module, "_SLICE_S", 0.01)
    summary = summarize(run)
    assert summary.progress < 1
    thread = index_module._INDEXES._thread
    assert thread is not None
    for _ in range(600):
        if summary.progress == 1:
            break
        thread.join(0.05)
        summary = summarize(run)
    assert (summary.progress, summary.step) == (1, 3_000)


def test_a_cache_that_cannot_be_written_is_said(run: RunEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(index_module.RunError, match="set PREHEAT_CACHE"):
        summarize(replace(run))


def test_a_server_that_was_started_again_shows_what_it_had(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, *(step(n) for n in range(1, 11)))
    summarize(run)
    restart(monkeypatch)
    monkeypatch.setattr(index_module, "_INLINE_S", 0.0)
    summary = summarize(run)
    assert (summary.step, summary.model, summary.progress) == (10, "llama of size 10M", 1)
