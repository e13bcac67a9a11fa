"""`preheat export --push` against a server with the hub's requests, answers and status codes."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from huggingface_hub import ModelCard, close_session, constants, hf_hub_download

from preheat.core.units import format_memory

from .conftest import Command
from .test_export import base_of

# By the client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_onlyForThisTest"
RECIPE = """\
name: mine
model: {path: base}
data: {source: SOURCE, validation: 0.2}
batch: {size: 4, seq_len: 32}
optimizer: {lr: 1.0e-2}
stop: {max_steps: 2}
evaluate: {rows: 4}
hardware: {threads: 1}
tracking: {folder: /home/someone/trackers}
techniques: {lora: {rank: 2}}
"""


class Hub(ThreadingHTTPServer):
    """A hub with one user, `me`.

    Attributes:
        repositories: {name: {private, files, messages}}.
        fails: part of a path -> the status to answer with, or 0 to drop the connection.
        lfs: whether weights are uploaded as large files, or in the commit.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fails: dict[str, int] = {}
        self.lfs = True


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, status: int, content: object = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do(self) -> None:
        body = self.body()
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"{self.command} {path}")
        for part, status in self.server.fails.items():
            if part in path:
                return self.refuse(status)
        if path.startswith("/objects/"):  # the storage, which has signed URLs instead of tokens
            return self.store(path.removeprefix("/objects/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            front = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
            ok = front is not None and isinstance(yaml.safe_load(front[1]), dict)
            return self.answer(200 if ok else 400, {"errors": [] if ok else [{"message": "no YAML"}], "warnings": []})
        for pattern, act in (
            (r"/api/models/(\w+/\w+)", self.info),
            (r"/api/models/(\w+/\w+)/preupload/main", self.modes),
            (r"/api/models/(\w+/\w+)/commit/main", self.commit),
            (r"/(\w+/\w+)\.git/info/lfs/objects/batch", self.batch),
            (r"/(\w+/\w+)/resolve/main/(.+)", self.resolve),
        ):
            if match := re.fullmatch(pattern, path):
                if match[1] not in self.server.repositories:
                    return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
                return act(self.server.repositories[match[1]], body, *match.groups()[1:])
        raise AssertionError(f"unexpected: {self.command} {path}")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    do_GET = do_HEAD = do_POST = do_PUT = do

    def refuse(self, status: int) -> None:
        if status == 0:
            self.close_connection = True
            return
        messages = {
            401: "Invalid username or password.",
            403: 'You don\'t have the rights to create a model under the namespace "others"',
            404: "Repository not found",
            409: f"A commit has happened since. (Authorization: Bearer {TOKEN})",
        }
        self.answer(status, {"error": messages[status]}, **({"X_Error_Code": "RepoNotFound"} if status == 404 else {}))

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if asked["organization"] != "me":
            self.refuse(403)
        elif name in self.server.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": url})
        else:
            private = asked.get("visibility") == "private"
            self.server.repositories[name] = {"private": private, "files": {}, "messages": []}
            self.answer(200, {"url": url, "name": name, "id": "1"})

    def info(self, repository: dict[str, Any], body: bytes) -> None:
        self.answer(200, {"_id": "1", "id": "me/x", "private": repository["private"], "sha": "0" * 40, "siblings": []})

    def modes(self, repository: dict[str, Any], body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if self.server.lfs and file["path"].endswith((".safetensors", ".gguf"))
                else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files})

    def batch(self, repository: dict[str, Any], body: bytes) -> None:
        objects = [
            {**file, "actions": {"upload": {"href": f"{self.server.url}/objects/{file['oid']}"}}}
            for file in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self.answer(200)

    def commit(self, repository: dict[str, Any], body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository["messages"].append(value["summary"])
            elif line["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            else:
                repository["files"][value["path"]] = self.server.objects[value["oid"]]
        name = self.path.split("/models/")[1].partition("/commit/")[0]
        self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def resolve(self, repository: dict[str, Any], body: bytes, file: str) -> None:
        content = repository["files"][file]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.answer(200, content, ETag=etag, X_Repo_Commit="0" * 40)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in (("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1"), ("HF_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    # What the client reads from the environment when it is imported.
    for name, setting in (
        ("ENDPOINT", server.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
    ):
        monkeypatch.setattr(constants, name, setting)
    # The client is kept, with the proxies of its start.
    close_session()
    yield server
    close_session()
    server.shutdown()
    server.server_close()


def trained(preheat: Command) -> str:
    base_of(preheat.folder / "base")
    (preheat.folder / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (preheat.folder / "mine.yaml").write_text(RECIPE.replace("SOURCE", str(preheat.folder / "text")))
    run: str = preheat.here.json("train", "mine.yaml", "--out", "run")["run"]
    return run


def test_exports_are_pushed_and_read_back(preheat: Command, hub: Hub, tmp_path: Path) -> None:
    run = trained(preheat)
    formats = ["peft", "hf"] + ["gguf"] * (importlib.util.find_spec("gguf") is not None)
    for to in formats:
        name = f"me/{to}"
        dry = preheat.here.json("export", run, "--to", to, "--push", name, "--private", "--push-dry-run")
        assert not hub.requests, "a dry run sends nothing"
        planned = dry["push"]
        assert (planned["repository"], planned["private"], planned["url"]) == (name, True, None)
        assert planned["card"] == f"{dry['path']}/README.md"

        # Weights of adapters go through the commit, as with the client's other way of uploading.
        hub.lfs, constants.HF_HUB_DISABLE_XET = to != "peft", to != "peft"
        (preheat.folder / dry["path"] / ".env").write_text("SECRET=1")
        sent = preheat.here.json("export", dry["path"], "--push", name, "--private")["push"]
        assert sent == planned | {"url": f"{hub.url}/{name}"}
        repository = hub.repositories[name]
        assert repository["private"]
        assert repository["messages"] == [planned["message"]]
        assert planned["message"].startswith("run: ")
        assert planned["message"].endswith(", step 2")
        assert {file["path"]: file["bytes"] for file in planned["files"]} == {
            path: len(content) for path, content in repository["files"].items()
        }

        got = {
            path: Path(hf_hub_download(name, path, token=TOKEN, cache_dir=tmp_path / "got"))
            for path in repository["files"]
        }
        on_disk = {
            p.name: p for p in (preheat.folder / dry["path"]).iterdir() if p.name not in (".env", "preheat_export.json")
        }
        assert got.keys() == on_disk.keys()
        changed = {path for path in got if got[path].read_bytes() != on_disk[path].read_bytes()}
        assert changed == ({"README.md", "adapter_config.json", "preheat_base.json"} if to == "peft" else set())
        for path, file in got.items():
            content = file.read_bytes()
            assert str(tmp_path).encode() not in content, path
            assert TOKEN.encode() not in content, path
            assert b"/home/someone" not in content, path
        hub.requests.clear()

        card = ModelCard.load(got["README.md"])
        assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
        relation = "adapter" if to == "peft" else "finetune"
        assert (card.data.base_model, card.data.base_model_relation, card.data.license) == (
            "base",
            relation,
            "apache-2.0",
        )
        assert (card.data.library_name, card.data.pipeline_tag, card.data.tags) == (
            {"hf": "transformers"}.get(to, to),
            "text-generation",
            ["preheat"],
        )
        evaluation = json.loads((preheat.folder / run / "evaluation.json").read_text())
        figures = [evaluation[when]["texts"]["validation"]["metrics"]["loss"]["value"] for when in ("before", "after")]
        plan = json.loads((preheat.folder / run / "plan.json").read_text())
        for words in (
            "- data: `text`, 40 rows read, ",
            f"| validation: loss | {figures[0]:.5g} | {figures[1]:.5g} |",
            f"| peak memory | {format_memory(plan['peak_gib'])} | ",
            "folder: trackers",
        ):
            assert words in card.text, words
    assert json.loads(got["config.json"].read_text())["model_type"] == "llama" if "config.json" in got else True


def test_what_keeps_an_export_from_the_hub_is_one_line(
    preheat: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_of(preheat.folder / "base")

    def refused(*arguments: str, code: int = 1) -> str:
        out, error = preheat.here("export", *arguments, code=code)
        assert error.count("\n") == 1
        assert TOKEN not in out + error
        return error

    text = ("base", "--dtype", "float32")
    for push, words in (
        (("--push", "alone"), "--push 'alone': it has no owner; write OWNER/NAME"),
        (("--push", "me/a..b"), "--push 'me/a..b': Cannot have -- or .. in repo_id"),
        (("--private",), "--private: would change nothing without --push"),
        (("--push", "me/x", "--to", "aoti"), "--push: an AOTInductor package is compiled for this machine's processor"),
    ):
        assert words in refused("base", *push, code=2)
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set, so nothing can be sent; unset it, use --push-dry-run" in refused(
            *text, "--push", "me/x"
        )
    with monkeypatch.context() as patched:
        patched.delenv("HF_TOKEN")
        patched.setattr(constants, "HF_TOKEN_PATH", str(preheat.folder / "none"))
        assert "there is no token for the hub; run `hf auth login` or set HF_TOKEN" in refused(*text, "--push", "me/x")
    assert not hub.requests
    assert not (preheat.folder / "base/export-hf").exists(), "these are known before the export is written"

    # The first failure comes after the export was written; the command of its line pushes it later.
    error = refused(*text, "--push", "others/x", "--private")
    assert (
        "the token has no right to write to others/x; use a token with write access, or another owner (403: You don't"
        in error
    )
    command = "preheat export base/export-hf --push others/x --private"
    assert error.endswith(f"; the export stays; to push it later: {command}\n")
    later = shlex.split(command.replace("others/", "me/"))[2:]
    assert "already exists; push it as it is: preheat export base/export-hf --push me/x;" in refused(
        *text, "--push", "me/x"
    )
    for part, status, words in (
        ("/preupload/", 404, "the hub has no me/x that the token can see (404"),
        ("/api/", 401, "the hub does not accept the token; run `hf auth login`"),
        (
            "/commit/",
            409,
            "another change of the repository was in the way; try again (409: A commit has happened since.",
        ),
        ("/commit/", 403, "the token has no right to write to me/x"),
        ("/objects/", 403, "the token has no right to write to me/x"),
        ("/commit/", 0, f"the connection to {hub.url} failed (RemoteProtocolError: Server disconnected"),
    ):
        hub.fails = {part: status}
        error = refused(*later)
        assert words in error
        assert error.endswith(f"; the export stays; to push it later: preheat export {shlex.join(later)}\n")
    hub.fails = {}
    assert not hub.repositories["me/x"]["files"]

    hub.repositories["me/x"]["private"] = False
    assert "the repository exists and is public, so nothing was sent" in refused(*later)
    said, _ = preheat.here("export", "base/export-hf", "--push", "me/x")
    assert f"pushed to {hub.url}/me/x (public; " in said
    assert "model.safetensors" in hub.repositories["me/x"]["files"]

    (preheat.folder / "base/export-hf/notes.md").write_text(f"See {preheat.folder}/text.")
    assert f"base/export-hf/notes.md: names the folder {preheat.folder} of this machine" in refused(*later)
    assert "base: is not an export" not in refused("base/export-hf", "--push", "me/x", "--out", "base")
