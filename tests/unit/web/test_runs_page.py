"""The table of runs: filter and order, changes of several runs, and what it says of bad ones."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from preheat.core.run_records import Finished, Measured, Started, StepMetrics
from preheat.run.writer import Writer
from preheat.web import catalogue as catalogue_module
from preheat.web import index
from preheat.web.app import create_app
from preheat.web.catalogue import Catalogue
from preheat.web.jobs import JobState
from preheat.web.labels import Labels, change_labels, read_labels
from preheat.web.settings import Settings

LOSSES = {"a": 3.0, "b": 1.0, "study/c": 2.0}


def write_run(folder: Path, loss: float) -> None:
    writer = Writer(folder)
    writer.write_text("recipe.yaml", f"name: {folder.name}\nmodel: {{family: llama, size: 10M}}\n")
    writer.write_event(Started(step=0))
    writer.write_metric(StepMetrics(1, tokens=100, loss=loss, tokens_per_second=50.0))
    writer.write_event(Measured(tokens_per_second=50.0, peak_gib=1.5))
    writer.write_event(Finished(steps=1, loss=loss))
    writer.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    # Enough for all that a test reads, however busy the machine is.
    monkeypatch.setattr(index, "_INLINE_S", 1e6)
    for name, loss in LOSSES.items():
        write_run(tmp_path / "runs" / name, loss)
    return tmp_path / "runs"


def connect(runs: Path, *, read_only: bool = False) -> TestClient:
    settings = Settings((runs,), "secret", 80, read_only=read_only)
    client = TestClient(create_app(settings), base_url="http://127.0.0.1", cookies={settings.cookie: "secret"})
    client.headers["x-csrf-token"] = settings.csrf_token
    return client


@pytest.fixture
def client(runs: Path) -> TestClient:
    return connect(runs)


def list_names(page: str) -> list[str]:
    return re.findall(r'<a id="open-\w+" href="[^"]+">([^<]+)</a>', page)


@pytest.mark.parametrize("place", ["/runs/{}", "/chat?a={}"])
def test_a_run_that_is_newer_than_the_list_has_its_pages(client: TestClient, runs: Path, place: str) -> None:
    assert set(list_names(client.get("/").text)) == set(LOSSES)
    write_run(runs / "d", 1.0)
    (entry,) = [entry for entry in Catalogue((runs,)).list_runs() if entry.name == "d"]
    page = client.get(place.format(entry.id))
    assert page.status_code == 200
    assert entry.id in page.text


def test_unknown_runs_are_searched_four_times_a_second_at_most(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(catalogue_module.time, "monotonic", lambda: clock[0])
    catalogue = Catalogue((runs,))
    readings: list[float] = []
    read = catalogue._find
    monkeypatch.setattr(catalogue, "_find", lambda: (readings.append(clock[0]), read())[1])
    for _ in range(20):
        with pytest.raises(HTTPException):
            catalogue.find("0123456789abcdef")
        clock[0] += 0.0625
    assert readings == [100.0, 100.25, 100.5, 100.75, 101.0]


def find_id(page: str, name: str) -> str:
    match = re.search(rf'<a id="open-(\w+)" href="[^"]+">{re.escape(name)}</a>', page)
    assert match is not None
    return match[1]


def test_the_headings_sort_and_say_so(client: TestClient) -> None:
    page = client.get("/?sort=loss&order=up").text
    assert list_names(page) == ["b", "study/c", "a"]
    assert page.count('aria-sort="ascending"') == 1
    # The same heading again turns the order round.
    link = re.search(r'id="sort-loss" href="([^"]+)"', page)
    assert link is not None
    assert list_names(client.get(link[1].replace("&amp;", "&")).text) == ["a", "study/c", "b"]
    # Runs without the value come last in both orders.
    for order in ("up", "down"):
        assert list_names(client.get(f"/?sort=cost&order={order}").text) == ["a", "b", "study/c"]
    assert client.get("/?sort=__class__").status_code == 200


def test_text_tag_state_and_archive_select_runs(runs: Path, client: TestClient) -> None:
    change_labels(runs / "a", lambda _: Labels("Best so far", tags=("baseline",)))
    change_labels(runs / "b", lambda _: Labels(note="Diverged later", archived=True))
    page = client.get("/").text
    assert sorted(list_names(page)) == ["Best so far", "study/c"]
    assert "1 archived hidden" in page
    assert list_names(client.get("/?q=SO+best").text) == ["Best so far"]
    assert list_names(client.get("/?q=diverged&archived=1").text) == ["b"]
    assert list_names(client.get("/?tag=baseline").text) == ["Best so far"]
    assert len(list_names(client.get("/?state=finished").text)) == 2
    assert "No run matches the filter; 1 archived run is hidden." in client.get("/?q=diverged").text


def test_several_runs_are_tagged_and_archived_at_once(runs: Path, client: TestClient) -> None:
    page = client.get("/").text
    ids = [find_id(page, name) for name in ("a", "b")]
    answer = client.post("/runs/labels", data={"run": ids, "action": "add-tags", "tags": "x, y"})
    assert "2 runs changed." in answer.text
    client.post("/runs/labels", data={"run": ids[1], "action": "remove-tags", "tags": "x"})
    client.post("/runs/labels", data={"run": ids[1], "action": "archive"})
    assert read_labels(runs / "a") == Labels(tags=("x", "y"))
    assert read_labels(runs / "b") == Labels(tags=("y",), archived=True)
    # Mistakes change nothing, and say what to do.
    assert "tick the boxes" in client.post("/runs/labels", data={"action": "archive"}).text
    assert "No tag is given" in client.post("/runs/labels", data={"run": ids, "action": "add-tags", "tags": " ,"}).text
    assert client.post("/runs/labels", data={"run": ids, "action": "burn"}).status_code == 400
    shutil.rmtree(runs / "a")
    answer = client.post("/runs/labels", data={"run": ids, "action": "restore"})
    assert "1 run changed." in answer.text
    assert "does not exist any more" in answer.text
    assert not (runs / "a").exists()


def test_a_server_for_reading_changes_nothing(runs: Path) -> None:
    client = connect(runs, read_only=True)
    page = client.get("/").text
    assert 'id="do-archive"' not in page
    answer = client.post("/runs/labels", data={"run": find_id(page, "a"), "action": "archive"})
    assert answer.status_code == 403
    assert not (runs / "a" / "labels.json").exists()


def test_names_and_notes_cannot_be_markup(runs: Path, client: TestClient) -> None:
    script = "<script>alert(1)</script>"
    write_run(runs / '"><img src=x>', 1.0)
    change_labels(runs / "a", lambda _: Labels(script, script, (script,)))
    page = client.get("/").text
    for bad in ("<script>alert", "<img"):
        assert bad not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_bad_runs_are_said_on_the_page(runs: Path, client: TestClient) -> None:
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    # Of a later version: unknown keys and events.
    (runs / "b" / "preheat.json").write_text('{"kind": "run", "id": "1", "files": [], "format": 9}')
    with (runs / "b" / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "kind": "quantum", "flux": 3}\n')
    # Half-written: it has a mark and no recipe yet, so it is no run.
    (runs / "half").mkdir()
    (runs / "half" / "preheat.json").write_text('{"kind": "run", "id": "2", "files": []}')
    (runs / "study" / "c" / "recipe.yaml").write_bytes(b"\xff\xfe{[")
    page = client.get("/").text
    assert sorted(list_names(page)) == ["a", "b", "study/c"]
    assert re.search(r"metrics.jsonl[^<]*line 2", page)
    assert re.search(r"recipe.yaml[^<]*left out", page)


def test_a_folder_without_runs_says_what_to_do(tmp_path: Path) -> None:
    page = connect(tmp_path).get("/").text
    assert f"There are no runs in {tmp_path}" in page
    assert "preheat train RECIPE" in page


def test_labels_are_edited_and_a_conflict_keeps_the_text(runs: Path, client: TestClient) -> None:
    url = f"/runs/{find_id(client.get('/').text, 'a')}/labels"
    page = client.get(url).text
    seen = '{"name": "", "note": "", "tags": [], "archived": false}'
    assert seen in page.replace("&#34;", '"')
    first = client.post(url, data={"seen": seen, "name": " My  run ", "note": "n\r\nm", "tags": "x,y"})
    assert first.status_code == 200
    assert read_labels(runs / "a") == Labels("My run", "n\nm", ("x", "y"))
    # Another tab that was opened earlier.
    second = client.post(url, data={"seen": seen, "name": "Theirs", "note": "", "tags": "z"})
    assert second.status_code == 409
    assert "name: was changed to &#39;My run&#39;" in second.text
    assert 'value="Theirs"' in second.text
    assert read_labels(runs / "a").name == "My run"
    # Saving again, from the page that said so, replaces the name; the tags of both stay.
    shown = re.search(r'name="seen" value="([^"]+)"', second.text)
    tags = re.search(r'name="tags" value="([^"]*)"', second.text)
    assert shown is not None
    assert tags is not None
    note = re.search(r"<textarea[^>]*>([^<]*)<", second.text)
    assert note is not None
    fields = {"seen": shown[1].replace("&#34;", '"'), "name": "Theirs", "note": note[1], "tags": tags[1]}
    assert client.post(url, data=fields).status_code == 200
    assert read_labels(runs / "a") == Labels("Theirs", "n\nm", ("x", "y", "z"))
    assert client.post(url, data={"seen": "{", "name": "x"}).status_code == 400
    fields["seen"] = '{"name": "Theirs", "note": "n\\nm", "tags": ["x", "y", "z"], "archived": false}'
    assert client.post(url, data={**fields, "note": "n" * 10_001}).status_code == 422


def test_two_runs_never_have_the_same_name(runs: Path, client: TestClient) -> None:
    url = f"/runs/{find_id(client.get('/').text, 'a')}/labels"
    answer = client.post(url, data={"seen": "{}", "name": "b"})
    assert answer.status_code == 422
    assert f"Not saved: the run in {runs / 'b'} is called b already; choose another name." in answer.text
    assert client.post(url, data={"seen": "{}", "name": "c"}).status_code == 200
    assert ">c (a)</option>" in client.get("/data?recipe=demo").text


def test_a_training_that_is_starting_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    client = connect(tmp_path / "runs")
    jobs = client.app.state.ui.jobs  # type: ignore[attr-defined]
    training = jobs.queue_training("first", ["train", "--", "no-such-recipe"], tmp_path / "runs" / "first")
    page = client.get("/").text
    assert "first is starting" in page or "first waits in the queue" in page
    assert "There are no runs" not in page
    end = time.monotonic() + 90
    while training.state in (JobState.WAITING, JobState.RUNNING):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "There are no runs" in client.get("/").text
    jobs.close()


def test_a_run_is_deleted_after_its_name_is_typed(runs: Path, client: TestClient) -> None:
    page = client.get("/").text
    url = f"/runs/{find_id(page, 'a')}/delete"
    (runs / "a" / "mine.txt").write_text("mine")
    refused = client.post(url, data={"typed": "A"})
    assert refused.status_code == 422
    assert "Not deleted: the name of its folder is a;" in refused.text
    assert (runs / "a" / "recipe.yaml").exists()
    done = client.post(url, data={"typed": "a"})
    assert done.status_code == 200
    assert "mine.txt" in done.text
    assert [path.name for path in (runs / "a").iterdir()] == ["mine.txt"]
    assert client.post(url, data={"typed": "a"}).status_code == 404
    # One that is being written stays.
    writer = Writer(runs / "b", resume=True)
    refused = client.post(f"/runs/{find_id(page, 'b')}/delete", data={"typed": "b"})
    writer.close()
    assert refused.status_code == 422
    assert "stop it first" in refused.text
    assert (runs / "b" / "recipe.yaml").exists()
