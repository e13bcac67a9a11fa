"""Deleting a run removes what preheat wrote and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.core.run_records import StepMetrics
from preheat.errors import RunError
from preheat.files import to_json
from preheat.run.removal import remove_run
from preheat.run.writer import Writer


def write_run(folder: Path) -> Writer:
    """Writes a run with a checkpoint and a tokenizer."""
    writer = Writer(folder)
    writer.write_folder("tokenizer", lambda place: (place / "tokenizer.json").write_text("{}"))
    writer.write_text("recipe.yaml", "name: a\n")
    writer.write_metric(StepMetrics(1, loss=2.0))
    checkpoint = folder / "checkpoints" / "step-1"
    checkpoint.mkdir()
    (checkpoint / "w.safetensors").write_text("w")
    (checkpoint / "state.json").write_text("{}")
    names = ("w.safetensors", "state.json")
    (checkpoint / "manifest.json").write_text(to_json({name: {"bytes": 1, "sha256": ""} for name in names}))
    return writer


def test_a_run_is_removed_with_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a").close()
    removal = remove_run(tmp_path / "a")
    assert removal.foreign == ()
    # tokenizer.json, recipe.yaml, metrics.jsonl, preheat.json, three of the checkpoint; the lock is not counted.
    assert removal.files == 7
    assert not (tmp_path / "a").exists()


def test_foreign_files_and_the_targets_of_links_stay(tmp_path: Path) -> None:
    folder, outside = tmp_path / "a", tmp_path / "outside"
    write_run(folder).close()
    outside.mkdir()
    (outside / "manifest.json").write_text('{"mine.txt": {}, "state.json": {}}')
    for name in ("mine.txt", "state.json", "w.safetensors"):
        (outside / name).write_text("mine")
    (folder / "thoughts.md").write_text("mine")
    (folder / "checkpoints" / "step-1" / "mine.bin").write_text("mine")
    (folder / "checkpoints" / "step-2").symlink_to(outside)
    (folder / "report.html").symlink_to(outside / "mine.txt")
    # A manifest that leads out of its folder, and a checkpoint without one.
    (folder / "checkpoints" / "step-3").mkdir()
    (folder / "checkpoints" / "step-3" / "manifest.json").write_text('{"../../../outside/mine.txt": {}}')
    (folder / "checkpoints" / "step-4").mkdir()
    (folder / "checkpoints" / "step-4" / "w.safetensors").write_text("mine")
    assert remove_run(folder).foreign == (
        "checkpoints/step-1/mine.bin",
        "checkpoints/step-2",
        "checkpoints/step-4/w.safetensors",
        "report.html",
        "thoughts.md",
    )
    assert sorted(path.name for path in outside.iterdir()) == [
        "manifest.json",
        "mine.txt",
        "state.json",
        "w.safetensors",
    ]
    assert not (folder / "recipe.yaml").exists()


def test_a_run_that_is_written_and_a_folder_that_is_none_stay(tmp_path: Path) -> None:
    writer = write_run(tmp_path / "a")
    with pytest.raises(RunError, match="another process is writing this run"):
        remove_run(tmp_path / "a")
    assert (tmp_path / "a" / "checkpoints" / "step-1" / "w.safetensors").exists()
    writer.close()
    (tmp_path / "bench").mkdir()
    for mark in (None, '{"kind": "bench", "id": "1", "files": []}'):
        if mark:
            (tmp_path / "bench" / "preheat.json").write_text(mark)
        (tmp_path / "bench" / "recipe.yaml").write_text("mine")
        with pytest.raises(RunError, match="is not a run"):
            remove_run(tmp_path / "bench")
        assert (tmp_path / "bench" / "recipe.yaml").read_text() == "mine"
