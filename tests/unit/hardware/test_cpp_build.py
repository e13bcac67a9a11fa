"""C++ of ours in the cache: only what was built here is loaded, from a folder of our own."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from preheat.hardware import cpp_build

pytestmark = pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 41; }\n')
    return path


def load(source: Path) -> int:
    """In a new process each time, as far as the cache is concerned."""
    cpp_build.load_library.cache_clear()
    return int(cpp_build.load_library(source).answer())


def built(source: Path) -> Path:
    (file,) = (source.parent / "cache" / "native").glob("answer-*.so")
    return file


def test_only_what_was_built_here_is_loaded(source: Path, caplog: pytest.LogCaptureFixture):
    assert load(source) == 41
    first = built(source).stat().st_mtime_ns
    assert load(source) == 41
    assert built(source).stat().st_mtime_ns == first  # not built again
    assert not caplog.messages
    whole = built(source).read_bytes()
    for damage in (lambda f: f.write_bytes(b"garbage"), lambda f: f.write_bytes(whole[:-1]), lambda f: f.chmod(0o777)):
        damaged = built(source)
        copy = damaged.read_bytes()
        damaged.unlink()  # the loaded one stays as it is
        damaged.write_bytes(copy)
        damage(damaged)
        assert load(source) == 41
        assert "is built again" in caplog.messages[-1]
        assert built(source).read_bytes() == whole


def test_the_folder_is_private(source: Path, caplog: pytest.LogCaptureFixture):
    folder = source.parent / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load(source) == 41
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_ones_folder_is_not_used(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    elsewhere = source.parent / "elsewhere"
    elsewhere.mkdir()
    (source.parent / "cache").mkdir()
    (source.parent / "cache" / "native").symlink_to(elsewhere)
    assert load(source) == 41
    assert not list(elsewhere.iterdir())
    assert "others can write there" in caplog.text
