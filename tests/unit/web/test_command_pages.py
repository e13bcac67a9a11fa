"""The pages that run commands: Plan, Start, Data and Chat, with the real app and real child processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from starlette.testclient import TestClient

from preheat.web.app import create_app
from preheat.web.forms import describe_key
from preheat.web.settings import Settings

TOKEN = "t" * 32


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    folder.mkdir()
    settings = Settings((folder,), TOKEN, 8170)
    with TestClient(create_app(settings), base_url="http://localhost:8170") as client:
        client.cookies.set(settings.cookie, TOKEN)
        client.headers["x-csrf-token"] = settings.csrf_token
        yield client


def ask(client: TestClient, path: str, **values: str) -> tuple[str, str]:
    """Submits a form; returns its last answer and the address of the form's state."""
    answer = client.post(path, data=values)
    url = answer.headers.get("hx-push-url", "")
    end = time.monotonic() + 120
    while (job := re.search(r'class="job" hx-get="([^"]+)"', answer.text)) and time.monotonic() < end:
        time.sleep(0.1)
        answer = client.get(job[1])
    return answer.text, url


def test_a_plan_for_serving_has_its_table_and_its_address(client: TestClient) -> None:
    text, url = ask(client, "/plan", model="qwen2.5-0.5b", device="RTX-4090", find="serving", length="1,024", data="")
    assert "Serving qwen2.5-0.5b on RTX-4090" in text
    assert "sequences of 1,024 tokens" in text
    assert url == "/plan?model=qwen2.5-0.5b&device=RTX-4090&length=1%2C024&find=serving"
    # The page of this address shows the same form, and asks again at once.
    page = client.get(url).text
    assert 'value="1,024"' in page
    assert '<option value="RTX-4090" selected>' in page
    assert 'hx-trigger="submit, load"' in page


def test_the_help_of_a_field_is_that_of_the_recipe(client: TestClient) -> None:
    assert describe_key("batch.seq_len") == "Tokens per sequence."
    assert '<p class="help" id="help-length">Tokens per sequence.</p>' in client.get("/plan").text


def test_an_empty_folder_leads_to_the_first_run(client: TestClient) -> None:
    assert 'href="/start?recipe=demo"' in client.get("/").text
    page = client.get("/start?recipe=demo").text
    assert '<option value="demo" selected>' in page
    # An empty choice says what it means.
    assert '<option value="">as in the recipe</option>' in page


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Model or recipe: is empty"),
        ({"model": "/etc"}, "&#39;/etc&#39;: must be a name"),
        ({"model": "a/../../b"}, "must be a name"),
        ({"model": "--help"}, "must be a name"),
        ({"model": "a\x00b"}, "has a null character"),
        ({"model": "1M", "length": "-3"}, "Length: &#39;-3&#39;: must be a whole number of at least 2"),
        ({"model": "1M", "length": "many"}, "Length: &#39;many&#39;: must be a whole number"),
        ({"model": "1M", "device": "name=x,memory=1"}, "is not in the catalogue"),
        ({"model": "1M", "data": "/etc/passwd"}, "does not exist any more"),
        ({"local": "../../etc"}, "does not exist any more"),
        ({"model": "1M", "device": "H100", "method": "<b>"}, "&lt;b&gt;"),
        ({"model": "1M", "device": "H100", "find": "slowest"}, "Question: &#39;slowest&#39;: is not in the list"),
        ({"model": "no-such-model", "device": "H100"}, "no-such-model"),
    ],
)
def test_mistakes_of_the_form_are_sentences(client: TestClient, values: dict[str, str], message: str) -> None:
    text, _ = ask(client, "/plan", **values)
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize("address", ["/plan?model=1M&data=gone", "/data?recipe=demo&data=gone", "/data?recipe=gone"])
def test_a_choice_that_is_gone_stays_in_the_form(client: TestClient, address: str) -> None:
    """The form sends it and is refused: without it, the default would answer another question."""
    assert '<option value="gone" selected>gone</option>' in client.get(address).text
    path, _, query = address.partition("?")
    text, _ = ask(client, path, **dict(parse_qsl(query)))
    assert "does not exist any more" in text


def test_data_that_the_form_states_is_not_called_unstated(client: TestClient) -> None:
    text, _ = ask(client, "/plan", model="0.1M", device="H100", data="stdlib", length="64", batch="4", steps="2")
    assert "0.1M" in text
    assert "data.source is not stated" not in text


def test_a_changing_request_needs_the_token_of_the_page(client: TestClient) -> None:
    del client.headers["x-csrf-token"]
    for path in ("/plan", "/start", "/start/launch", "/data", "/chat"):
        assert client.post(path, data={"model": "1M"}).status_code == 403


def test_data_shows_rows_and_marks_and_escapes_them(client: TestClient, tmp_path: Path) -> None:
    rows = [{"prompt": f"<script>{n}</script>", "completion": f"answer {n}"} for n in range(40)]
    (tmp_path / "runs/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "secret.jsonl").write_text("{}")
    (tmp_path / "runs/link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    page = client.get("/data").text
    assert "rows.jsonl" in page
    assert "link.jsonl" not in page
    id = re.search(r'value="([0-9a-f]{16})"[^>]*>rows\.jsonl', page)
    assert id is not None
    text, url = ask(client, "/data", recipe="demo", data=id[1], rows="1")
    assert url == f"/data?recipe=demo&data={id[1]}&rows=1"
    assert re.search(r"<mark>[^<]*answer", text), text[:2000]
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


def test_a_job_file_is_written_for_elsewhere(client: TestClient) -> None:
    form = {"recipe": "demo", "scheduler": "slurm", "nodes": "1", "gpus_per_node": "1", "time": "1:00:00"}
    text, _ = ask(client, "/start/launch", **form)
    assert "#SBATCH --nodes=1" in text
    text, _ = ask(client, "/start/launch", **{**form, "time": "$(touch x)"})
    assert "notice bad" in text
    assert "--time" in text


def test_a_name_of_a_run_stays_in_its_folder(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "runs/taken").mkdir()
    for name, message in (("../x", "use up to 80 letters"), ("taken", "choose another name"), ("-x", "use up to 80")):
        assert message in client.post("/start", data={"recipe": "demo", "name": name}).text
    assert "Recipe: is empty" in client.post("/start", data={"name": "x"}).text


def test_a_training_that_cannot_start_says_why(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "runs/bad.yaml").write_text("model: {size: 1M}\nstop: {max_steps: 1}\nbatch: {sise: 2}\n")
    id = re.search(r'value="([0-9a-f]{16})"[^>]*>bad\.yaml', client.get("/start").text)
    assert id is not None
    place = client.post("/start", data={"recipe": id[1], "name": "first"}).headers["hx-redirect"]
    end = time.monotonic() + 60
    while "alert" not in (page := client.get(f"{place}/state").text) and time.monotonic() < end:
        time.sleep(0.1)
    assert "did you mean &#39;size&#39;?" in page
    assert "first" in client.get("/start/queue").text
    assert (tmp_path / "runs/first.log").read_text().startswith("error: ")
