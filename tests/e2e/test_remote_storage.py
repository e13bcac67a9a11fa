"""Runs, exports and data in object storage: S3 by moto's server, Google Cloud Storage by an emulator, both here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import RunError
from preheat.run import remote_copy
from preheat.run.remote_copy import LostFolder, RemoteCopy
from preheat.run.remote_runs import RemoteRuns
from preheat.storage import RemoteFolder, StorageError, Unreachable, download_source
from preheat.web.catalogue import Catalogue

from .conftest import Command, losses
from .test_ui import open_page

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
boto3 = pytest.importorskip("boto3")

URL = "s3://bucket/runs/a"
_SERVE = """
import sys, time
import boto3
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False).start()
boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}").create_bucket(Bucket="bucket")
print("up", flush=True)
time.sleep(600)
"""


@dataclass
class Server:
    """moto's S3 server in a process of its own. It keeps objects in memory, so that a restart loses them."""

    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**names, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def start(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self.port)],
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    @property
    def client(self) -> Any:
        """Writes keys that a file system has no names for."""
        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    @property
    def fs(self) -> Any:
        return s3fs.S3FileSystem(
            key="test",
            secret="test",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            use_listings_cache=False,
        )

    def manifest(self, folder: str = "bucket/runs/a") -> dict[str, Any]:
        try:
            return json.loads(self.fs.cat_file(f"{folder}/preheat-manifest.json"))
        except FileNotFoundError:
            return {"files": {}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(free_port())
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3(server: Server, preheat: Command, tmp_path: Path) -> Server:
    """An empty bucket, and a cache without copies of runs but with the rates of the shared one."""
    for path in server.fs.find("bucket"):
        server.fs.rm_file(path)
    own = tmp_path / "cache"
    shutil.copytree(preheat.environment["PREHEAT_CACHE"], own)
    preheat.environment |= server.environment | {"PREHEAT_CACHE": str(own)}
    return server


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def forget(preheat: Command) -> None:
    """Makes this machine a fresh one: it has no copy of any run."""
    shutil.rmtree(Path(preheat.environment["PREHEAT_CACHE"]) / "remote")


def local_folder(preheat: Command) -> Path:
    (state,) = (Path(preheat.environment["PREHEAT_CACHE"]) / "remote").glob("*/state.json")
    return Path(json.loads(state.read_text())["folder"])


def test_a_run_resumes_from_its_url_alone_on_a_fresh_machine_bit_for_bit(
    preheat: Command, s3: Server, tmp_path: Path
) -> None:
    # Without a schedule, whose rates depend on the number of steps.
    constant = ("--set", "schedule.kind=constant", "--set", "schedule.warmup_ratio=0")
    preheat.here("train", "r.yaml", "--out", "whole", *constant)
    preheat.here("train", "r.yaml", "--out", URL, "--set", "stop.max_steps=7", *constant)
    manifest = s3.manifest()
    assert not manifest["active"]
    assert {"recipe.yaml", "metrics.jsonl", "report.html", "checkpoints/step-7/state.json"} <= manifest["files"].keys()
    # At its end, the remote folder is the folder of a run, and holds nothing else.
    names = {path.removeprefix("bucket/runs/a/") for path in s3.fs.find("bucket/runs/a")}
    assert names == {*manifest["files"], "preheat-manifest.json"}
    # Moved to another folder, and resumed there by a machine that has never seen it, in another working folder.
    for path in s3.fs.find("bucket/runs/a"):
        s3.fs.mv(path, path.replace("runs/a", "moved/b"))
    forget(preheat)
    reader = Command(preheat.folder, tmp_path / "reader")
    reader.environment |= s3.environment
    (before,) = reader.here.json("track", "s3://bucket/moved/b", "--to", "tensorboard")["sent"]
    (preheat.folder / "elsewhere").mkdir()
    elsewhere = Command(preheat.folder / "elsewhere", Path(preheat.environment["PREHEAT_CACHE"]))
    elsewhere.environment |= s3.environment
    result = elsewhere.here.json("train", "--resume", "s3://bucket/moved/b", "--set", "stop.max_steps=12")
    assert result["url"] == "s3://bucket/moved/b"
    assert losses(Path(result["run"])) == losses(preheat.folder / "whole")
    assert "checkpoints/step-12/state.json" in s3.manifest("bucket/moved/b")["files"]
    # Other commands read it by its URL.
    (text,) = preheat.here.json("generate", "s3://bucket/moved/b", "--prompt", "the", "--tokens", "4")["texts"]
    assert text["step"] == 12
    # A tracker goes on in the same run, though the copy was downloaded anew.
    (after,) = reader.here.json("track", "s3://bucket/moved/b", "--to", "tensorboard")["sent"]
    assert (before["step"], after["step"], after["url"]) == (7, 12, before["url"])
    assert len(list(Path(after["url"].rpartition(" ")[2]).glob("events.out.tfevents.*"))) == 2


def newest_step(files: dict[str, Any]) -> int:
    steps = [re.fullmatch(r"checkpoints/step-(\d+)/manifest.json", path) for path in files]
    return max((int(match[1]) for match in steps if match), default=0)


def test_a_killed_server_never_stops_the_run_and_gets_everything_when_it_is_back(preheat: Command, s3: Server) -> None:
    limits = ("--set", "stop.max_steps=100000", "--set", "checkpoint.every=20")
    run = preheat.start("train", "r.yaml", "--out", URL, *limits)
    try:
        wait_for(lambda: newest_step(s3.manifest()["files"]) > 0)
        local = local_folder(preheat)
        s3.stop()
        stopped = max(losses(local))

        def notices() -> list[str]:
            lines = map(json.loads, (local / "events.jsonl").read_text().splitlines())
            return [line["message"] for line in lines if line["kind"] == "notice"]

        wait_for(lambda: len(notices()) == 1)
        assert notices()[0].startswith(URL)
        assert "training is not affected" in notices()[0]
        assert max(losses(local)) > stopped
        s3.start()  # with an empty bucket
        wait_for(lambda: newest_step(s3.manifest()["files"]) > stopped)
        run.send_signal(signal.SIGTERM)
        out, error = run.communicate(timeout=120)
        assert run.returncode == 143, error
        assert [message.partition(": ")[2] for message in notices()][1:] == ["reachable again; the run is uploaded"]
        # The last state is there, and is what was written here.
        files = s3.manifest()["files"]
        assert newest_step(files) == max(losses(local))
        assert (
            s3.fs.cat_file(f"bucket/runs/a/{files['metrics.jsonl']['object']}")
            == (local / "metrics.jsonl").read_bytes()
        )
        assert f"--out {URL} --resume" in out
    finally:
        run.kill()
        run.wait()


def test_bad_folders_are_one_line_before_training(preheat: Command, s3: Server) -> None:
    def refuse(*arguments: str, code: int = 1) -> str:
        _, error = preheat.here("train", *arguments, code=code)
        (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
        assert not list((preheat.folder / "runs").glob("*"))
        return line

    assert "s3://absent/a" in (line := refuse("r.yaml", "--out", "s3://absent/a"))
    assert "does not exist" in line
    assert "holds no run to resume" in refuse("--resume", URL)
    s3.fs.pipe_file("bucket/notes/mine.txt", b"x")
    assert "files that preheat did not write (mine.txt)" in refuse("r.yaml", "--out", "s3://bucket/notes")
    entry = {"object": "recipe.yaml", "bytes": 1, "sha256": "0"}
    other = {"kind": "run", "id": "1", "writer": "w", "revision": 1, "active": False, "files": {"recipe.yaml": entry}}
    s3.fs.pipe_file("bucket/other/preheat-manifest.json", json.dumps(other | {"format": 1}).encode())
    assert "holds a run already; add --resume" in refuse("r.yaml", "--out", "s3://bucket/other")
    assert "adlfs, which is not installed: pip install" in refuse("r.yaml", "--out", "az://bucket/a", code=2)
    assert "preheat knows s3://" in refuse("r.yaml", "--out", "https://host/a", code=2)
    for url in ("s3://bucket", "s3://"):
        assert f"{url}: names no folder; write s3://BUCKET/FOLDER" in refuse("r.yaml", "--out", url, code=2)
    assert "add --resume" in refuse(URL, code=2)
    assert "data.source s3://bucket/absent.jsonl" in refuse(
        "r.yaml", "--set", "data.source=s3://bucket/absent.jsonl", code=4
    )
    del preheat.environment["AWS_ACCESS_KEY_ID"], preheat.environment["AWS_SECRET_ACCESS_KEY"]
    preheat.environment |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(preheat.folder)}
    # In a process of its own, whose environment has no others.
    _, error = preheat("train", "r.yaml", "--out", URL, code=1)
    assert "access denied" in error
    assert "AWS_ACCESS_KEY_ID" in error


def test_data_and_exports_are_remote_too(preheat: Command, s3: Server) -> None:
    for file in sorted((preheat.folder / "text").iterdir()):
        s3.fs.put_file(str(file), f"bucket/text/{file.name}")
    source = ("--set", "data.source=s3://bucket/text")
    preheat.here("train", "r.yaml", "--out", "local", *source)
    preheat.here("train", "r.yaml", "--out", "files")
    assert losses(preheat.folder / "local") == losses(preheat.folder / "files")
    # Resuming notices that an object has changed.
    s3.fs.pipe_file("bucket/text/00.txt", b"Other words than before.")
    _, error = preheat.here(
        "train", "r.yaml", "--out", "local", "--resume", "--set", "stop.max_steps=14", *source, code=1
    )
    assert "the data (the source, tokenizer or packing) changed" in error
    preheat.here("export", "local", "--out", "s3://bucket/exports/e")
    manifest = s3.manifest("bucket/exports/e")
    assert (manifest["kind"], manifest["active"]) == ("export", False)
    assert "model.safetensors" in manifest["files"]
    forget(preheat)
    (text,) = preheat.here.json("generate", "s3://bucket/exports/e", "--prompt", "the", "--tokens", "4")["texts"]
    assert text["text"]
    _, error = preheat.here("export", "local", "--out", "s3://bucket/exports/e", code=1)
    assert "holds an export already" in error


# --- the copy of a folder -------------------------------------------------------------------------------------------


class Machine:
    """A machine of its own: with its own cache."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch):
        self.cache, self.monkeypatch = cache, monkeypatch
        self.said: list[str] = []

    def copy(self, url: str, folder: Path | None = None) -> RemoteCopy:
        self.monkeypatch.setenv("PREHEAT_CACHE", str(self.cache))
        return RemoteCopy(url, folder or Path(), period=0.5)


def write_run(folder: Path) -> Path:
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: a\n")
    (folder / "metrics.jsonl").write_text('{"step": 5}\n')
    write_checkpoint(folder, 5)
    return folder


def write_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "state.json").write_text(f"{step}" * 1000)
    (checkpoint / "manifest.json").write_text('{"state.json": {}}')


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def machines(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Machine]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Machine(tmp_path / "one", monkeypatch), Machine(tmp_path / "two", monkeypatch)


def test_readers_find_the_last_complete_state_after_a_broken_upload(
    machines: tuple[Machine, Machine], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    run = write_run(tmp_path / "run")
    sender = one.copy("s3://bucket/broken/a", run)
    sender.claim(resume=True, say=one.said.append)
    sender.send(active=True)
    before = contents(run)
    # Everything changes: a checkpoint comes, another goes, and files are appended to. The link breaks in between.
    write_checkpoint(run, 10)
    shutil.rmtree(run / "checkpoints" / "step-5")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10}\n')
    upload, sent = RemoteFolder.upload, list[str]()

    def break_at_last(remote: RemoteFolder, file: Path, name: str) -> None:
        if len(sent) == 2:
            raise Unreachable("the link broke")
        sent.append(name)
        upload(remote, file, name)

    monkeypatch.setattr(remote_copy, "_PARALLEL", 1)
    monkeypatch.setattr(RemoteFolder, "upload", break_at_last)
    with pytest.raises(Unreachable):
        sender.send(active=True)
    monkeypatch.undo()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    assert len(sent) == 2
    assert contents(two.copy("s3://bucket/broken/a").fetch(two.said.append)) == before
    # The next upload sends the rest, after which the other machine finds the new state.
    sender.send(active=False)
    fetched = two.copy("s3://bucket/broken/a").fetch(two.said.append)
    assert contents(fetched) == contents(run)
    assert not list(two.cache.rglob("*.aside-*"))
    assert set(contents(fetched)) == {
        path.removeprefix("bucket/broken/a/")
        for path in server.fs.find("bucket/broken/a")
        if not path.endswith("preheat-manifest.json")
    }
    # An object that somebody changed is noticed.
    server.fs.pipe_file("bucket/broken/a/recipe.yaml", b"name: b\n")
    shutil.rmtree(two.cache)
    with pytest.raises(RunError, match=r"recipe\.yaml: was altered"):
        two.copy("s3://bucket/broken/a").fetch(two.said.append)


def test_a_remote_folder_has_one_writer(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    one, two = machines
    first = one.copy("s3://bucket/one-writer/a")
    first.claim(resume=False, say=one.said.append)
    other = one.copy("s3://bucket/one-writer/a")
    with first.session(), pytest.raises(RunError, match="another process of this machine"), other.session():
        pass
    # The first run is preparing its data on another machine, and shows that it lives.
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.2):
            first.send(active=True)

    thread = threading.Thread(target=live)
    thread.start()
    second = two.copy("s3://bucket/one-writer/a")
    try:
        with pytest.raises(RunError, match="another process is writing there"):
            second.claim(resume=False, say=two.said.append)
    finally:
        ended.set()
        thread.join()
    # It is lost without its end: after a while another machine takes over, and the first one, if it comes back, sees.
    second.claim(resume=False, say=two.said.append)
    write_run(first.folder)
    with pytest.raises(LostFolder, match=f"preheat upload {first.folder} URL"):
        first.send(active=True)
    assert second.read_manifest().files == {}


def test_a_token_without_rights_is_one_line(machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    strict = Server(free_port())
    try:
        strict.start(INITIAL_NO_AUTH_ACTION_COUNT="1")  # one action for the bucket; then tokens are checked
        monkeypatch.setenv("AWS_ENDPOINT_URL", strict.environment["AWS_ENDPOINT_URL"])
        with pytest.raises(StorageError, match=r"access denied \(.*\); check AWS_ACCESS_KEY_ID") as error:
            machines[0].copy(URL).claim(resume=False, say=print)
        assert not isinstance(error.value, Unreachable)
    finally:
        strict.stop()


def test_google_cloud_storage(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gcsfs")
    port = free_port()
    serve = "from gcp_storage_emulator.server import create_server; import sys; create_server('127.0.0.1', int(sys.argv[1]), in_memory=True, default_bucket='bucket').run()"
    process = subprocess.Popen(
        [sys.executable, "-c", serve, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: answers(port))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # The emulator knows no hierarchical buckets, for which gcsfs would ask Google itself.
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        one, two = machines
        run = write_run(tmp_path / "run")
        sender = one.copy("gs://bucket/runs/a", run)
        sender.claim(resume=True, say=one.said.append)
        sender.send(active=True)
        write_checkpoint(run, 10)
        (run / "metrics.jsonl").write_text('{"step": 10}\n')
        sender.send(active=False)
        assert contents(two.copy("gs://bucket/runs/a").fetch(two.said.append)) == contents(run)
        (tmp_path / "rows").mkdir()
        rows = download_source("gs://bucket/runs/a/metrics.jsonl")
        assert rows.read_text() == '{"step": 10}\n'
        with pytest.raises(StorageError, match="gs://bucket/absent"):
            download_source("gs://bucket/absent")
        with pytest.raises(StorageError, match="does not exist"):
            one.copy("gs://absent/a").claim(resume=False, say=one.said.append)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def watched(preheat: Command, s3: Server, monkeypatch: pytest.MonkeyPatch) -> RemoteRuns:
    """A run at URL, seen by this process as by a machine without a copy of it."""
    preheat("train", "r.yaml", "--set", "stop.max_steps=4", "--out", URL)
    forget(preheat)
    for name, value in preheat.environment.items():
        if name.startswith(("AWS_", "PREHEAT_CACHE")):
            monkeypatch.setenv(name, value)
    return RemoteRuns("s3://bucket/runs")


def test_the_dashboard_shows_runs_of_a_bucket_without_downloading_their_checkpoints(
    preheat: Command, s3: Server, watched: RemoteRuns
) -> None:
    process = preheat.start_alone("ui", "s3://bucket/runs", "--port", "0")
    try:
        assert process.stdout.readline() == "s3://bucket/runs: 1 run, copied without checkpoints\n"
        url = process.stdout.readline().removeprefix("preheat ui: ").strip()
        listed = open_page(url)
        assert ">finished<" in listed
        (id,) = set(re.findall(r"/runs/([0-9a-f]{16})\b", listed))
        page = open_page(url.replace("/?", f"/runs/{id}?"))
        assert f"<code>{URL}</code>" in page
        assert "it leaves the list" in open_page(url.replace("/?", f"/runs/{id}/labels?"))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    copied = {path.relative_to(watched.folder).as_posix() for path in watched.folder.rglob("*") if path.is_file()}
    assert {"a/preheat.json", "a/recipe.yaml", "a/metrics.jsonl", "a/plan.json"} <= copied
    assert not [name for name in copied if "checkpoints" in name or "tokenizer" in name]


def test_the_copy_of_runs_follows_what_is_uploaded_removed_and_altered(
    preheat: Command, s3: Server, watched: RemoteRuns
) -> None:
    assert watched.update() == 1
    run = watched.folder / "a"
    assert watched.find_url(run) == URL
    before = losses(run)
    (run / "labels.json").write_text('{"name": "mine"}')
    preheat("train", "--resume", URL, "--set", "stop.max_steps=6")
    fresh = RemoteRuns("s3://bucket/runs")
    assert (fresh.update(), len(losses(run))) == (1, 6)
    assert before.items() <= losses(run).items()
    assert (run / "labels.json").read_text() == '{"name": "mine"}'

    for path in s3.fs.find("bucket/runs/a"):
        s3.fs.cp_file(path, path.replace("runs/a", "runs/sweep/b"))
    s3.fs.pipe_file("bucket/runs/sweep/b/metrics.jsonl", b"{}")
    fresh = RemoteRuns("s3://bucket/runs")
    assert fresh.update() == 2
    assert fresh.problem.startswith("s3://bucket/runs/sweep/b/metrics.jsonl: was altered since preheat uploaded it")

    for path in s3.fs.find("bucket/runs/sweep/b"):
        s3.fs.rm_file(path)
    assert (fresh.update(), fresh.problem, (watched.folder / "sweep/b").exists()) == (1, "", False)
    manifest = s3.manifest()
    manifest["files"]["../out"] = manifest["files"]["recipe.yaml"]
    s3.fs.pipe_file(f"{URL.removeprefix('s3://')}/preheat-manifest.json", json.dumps(manifest).encode())
    fresh = RemoteRuns("s3://bucket/runs")
    fresh.update()
    assert "names '../out', which is not a file of the folder" in fresh.problem
    with pytest.raises(StorageError, match="s3://absent/runs: does not exist"):
        RemoteRuns("s3://absent/runs").update()
    s3.stop()
    try:
        ends = iter([False, True])
        fresh.watch(lambda seconds: next(ends))
        assert fresh.problem.startswith("s3://bucket/runs: cannot be reached")
        assert len(losses(run)) == 6
    finally:
        s3.start()


def test_names_of_objects_do_not_lead_out_of_the_copy_and_exports_are_no_runs(
    preheat: Command, s3: Server, watched: RemoteRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.dumps(s3.manifest())
    for key in ("runs/../../secret", "runs//nameless", "runs/export"):
        s3.client.put_object(Bucket="bucket", Key=f"{key}/preheat-manifest.json", Body=manifest.encode())
    export = json.dumps(s3.manifest() | {"kind": "export"})
    s3.client.put_object(Bucket="bucket", Key="runs/export/preheat-manifest.json", Body=export.encode())
    s3.client.put_object(Bucket="bucket", Key="runs/", Body=b"")  # as consoles mark a folder
    assert (watched.update(), watched.problem) == (1, "")
    assert [path.name for path in watched.folder.iterdir()] == ["a"]
    # The cache may be a link; the catalogue's paths are resolved.
    link = tmp_path / "link"
    link.symlink_to(preheat.environment["PREHEAT_CACHE"])
    monkeypatch.setenv("PREHEAT_CACHE", str(link))
    linked = RemoteRuns("s3://bucket/runs")
    linked.update()
    (entry,) = Catalogue((), (linked,)).list_runs()
    assert entry.url == URL
