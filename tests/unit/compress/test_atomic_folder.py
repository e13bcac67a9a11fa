"""A folder is whole or not there, and nothing that is not preheat's is removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from preheat.compress.atomic_folder import MARK, NewFolder, choose_home, describe_write_error, require_new
from preheat.errors import RunError


def test_what_is_written_takes_its_name_when_all_went_well(tmp_path: Path) -> None:
    out = tmp_path / "some/where/out"
    with NewFolder(out) as folder:
        (folder / "a.txt").write_text("a")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a.txt"]
    (tmp_path / "empty").mkdir()
    with NewFolder(tmp_path / "empty") as folder:
        (folder / "a.txt").write_text("a")
    assert (tmp_path / "empty/a.txt").is_file()


@pytest.mark.parametrize(
    "error", [ValueError("ours"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_what_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    expected = RunError if isinstance(error, OSError) else type(error)

    def write() -> None:
        with NewFolder(tmp_path / "new/out") as folder:
            (folder / "half").mkdir()
            raise error

    with pytest.raises(expected):
        write()
    assert not list(tmp_path.iterdir()), "folders that were made for it go, too"


def test_only_what_preheat_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "out.writing"
    left.mkdir()
    (left / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="exists and is not from preheat"), NewFolder(tmp_path / "out"):
        pass
    assert (left / "mine.txt").read_text() == "mine"
    (left / MARK).touch()  # as a killed process leaves it
    with (left / MARK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is writing it"), NewFolder(tmp_path / "out"):
            pass
    with NewFolder(tmp_path / "out") as folder:
        assert [p.name for p in folder.iterdir()] == [MARK]
    (tmp_path / "other.writing").mkdir()  # as a process leaves it that is killed before it marks it
    with NewFolder(tmp_path / "other") as folder:
        (folder / "a.txt").write_text("a")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["a.txt"]
    (tmp_path / "file.writing").touch()
    with pytest.raises(RunError, match="exists and is not from preheat"), NewFolder(tmp_path / "file"):
        pass


@pytest.mark.parametrize("left", [False, True])
def test_without_locks_nothing_stays_open_or_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if left:
        (tmp_path / "new/out.writing").mkdir(parents=True)
        (tmp_path / "new/out.writing" / MARK).touch()
    before = sorted(tmp_path.rglob("*"))
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RunError, match="No locks available"), NewFolder(tmp_path / "new/out"):
        pass
    assert len(os.listdir("/proc/self/fd")) == opened
    assert sorted(tmp_path.rglob("*")) == before, "a mark that a killed process left stays its mark"


def test_places_where_nothing_can_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/step-3").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    for out, words in (
        (run, "already exists"),
        (run / "checkpoints/step-4", "is inside a folder of the run"),
        (run / "tokenizer", "is inside a folder of the run"),
        (tmp_path / "link", "is a link"),
        (tmp_path / "file", "is an existing file"),
        (tmp_path / "file/out", "is a file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(RunError, match=words) as told:
            require_new(out, run)
        assert len(str(told.value).splitlines()) == 1
    require_new(run / "export-hf", run)
    assert choose_home(run / "checkpoints/step-3") == (run, "-step-3")
    assert choose_home(tmp_path / "file") == (tmp_path / "file", "")


@contextlib.contextmanager
def limit_of(size: int):  # type: ignore[no-untyped-def]
    """Files of this process end there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_librarys_error_of_a_full_disk_is_known(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE({f"token{n}": n for n in range(500)}, []))
    array = torch.zeros(4096)

    def by_tofile(file: Path) -> None:
        with file.open("wb", buffering=0) as opened:
            array.numpy().tofile(opened)

    for n, write in enumerate(
        (
            lambda file: save_file({"a": array}, file),
            lambda file: torch.save({"a": array}, file),
            lambda file: tokenizer.save(str(file)),
            lambda file: file.write_bytes(bytes(9000)),
            by_tofile,
        )
    ):
        with pytest.raises(Exception) as failed, limit_of(2000):  # noqa: PT011  # whatever that library raises
            write(tmp_path / str(n))
        assert describe_write_error(failed.value) in (
            os.strerror(errno.EFBIG),
            "the disk is full, or the size of files has a limit",
        ), n
    assert not describe_write_error(ValueError("too large to show"))
    assert not describe_write_error(KeyboardInterrupt())
    assert not describe_write_error(RunError("x: No space left on device"))
