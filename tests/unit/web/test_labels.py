"""Labels of runs: stored with the run, and no page loses the changes of another."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.errors import RunError
from preheat.files import parse_json
from preheat.web.labels import Conflict, Labels, change_labels, merge_labels, read_labels

ADD_TAGS = """
import sys
from dataclasses import replace
from pathlib import Path
from preheat.web.labels import change_labels
for n in range(5):
    change_labels(Path(sys.argv[1]), lambda labels: replace(labels, tags=(*labels.tags, f"{sys.argv[2]}{n}")))
"""


def test_servers_that_change_labels_at_once_lose_nothing(tmp_path: Path) -> None:
    servers = [subprocess.Popen([sys.executable, "-c", ADD_TAGS, str(tmp_path), name]) for name in "abc"]
    assert [server.wait(timeout=120) for server in servers] == [0, 0, 0]
    assert sorted(read_labels(tmp_path).tags) == [f"{name}{n}" for name in "abc" for n in range(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]


def test_two_tabs_merge_by_label_and_say_what_contradicts() -> None:
    seen = Labels("a", "note", ("x", "y"))
    current = Labels("a", "other note", ("x", "y", "z"), archived=True)
    wanted = Labels("b", "note", ("w", "x"))
    assert merge_labels(current, seen, wanted) == Labels("b", "other note", ("x", "z", "w"), archived=True)
    with pytest.raises(Conflict, match="note: was changed to 'other note'"):
        merge_labels(current, seen, replace(wanted, note="mine"))
    # Both changed it to the same.
    assert merge_labels(current, seen, replace(seen, note="other note")) == current


def test_a_damaged_key_is_not_set_and_a_later_key_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('{"name": 3, "note": "n", "colour": "red"}')
    assert read_labels(tmp_path) == Labels(note="n")
    for text in ("[1", "3", ""):
        (tmp_path / "labels.json").write_text(text)
        assert read_labels(tmp_path) == Labels()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Labels(name="n" * 121), "name: has 121 characters; use at most 120"),
        (Labels(note="n" * 10_001), "note: has 10,001 characters"),
        (Labels(tags=tuple(map(str, range(21)))), "tags: 21 tags; use at most 20"),
        (Labels(tags=("t" * 41,)), "has 41 characters; use at most 40"),
    ],
)
def test_labels_that_are_too_long_are_refused(tmp_path: Path, labels: Labels, message: str) -> None:
    change_labels(tmp_path, lambda _: Labels("before"))
    with pytest.raises(RunError, match=message):
        change_labels(tmp_path, lambda _: labels)
    assert parse_json((tmp_path / "labels.json").read_bytes())["name"] == "before"


def test_a_folder_that_is_gone_or_not_writable_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"labels cannot be stored there \(No such file"):
        change_labels(tmp_path / "gone", lambda labels: labels)
    (tmp_path / "labels.json").mkdir()
    with pytest.raises(RunError, match=r"labels cannot be stored there \(Is a directory"):
        change_labels(tmp_path, lambda labels: labels)
