"""`preheat ui` as a user starts it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from .conftest import Command


def open_page(url: str) -> str:
    # Without the proxy of the environment, and with a jar for the cookie that replaces the token.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
    )
    with opener.open(url, timeout=30) as answer:
        return answer.read().decode()


def test_the_printed_address_opens_and_ctrl_c_ends_the_server(preheat: Command) -> None:
    (preheat.folder / "runs").mkdir()
    process = preheat.start_alone("ui", "--port", "0")
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        url = lines[0].removeprefix("preheat ui: ").strip()
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=[\w-]{32}", url)[1]
        assert lines[1].startswith(f"from another machine: ssh -L {port}:127.0.0.1:{port} ")
        assert "There are no runs in runs yet." in open_page(url)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            open_page(url.partition("?")[0])
    finally:
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "interrupted by SIGINT\n")
    assert "Traceback" not in out


def test_mistakes_are_one_line_each(preheat: Command, tmp_path: Path) -> None:
    (preheat.folder / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, code, message in (
            (("ui", "--port", port), 1, f"--port {port}: cannot listen on 127.0.0.1 (Address already in use); name "),
            (
                ("ui", "https://host/runs"),
                2,
                "FOLDER https://host/runs: preheat knows s3://, gs://, az://, hf://; name ",
            ),
            (("ui", "s3://bucket"), 2, "s3://bucket: names no folder; write s3://BUCKET/FOLDER"),
            (("ui", "nowhere"), 2, "nowhere: no such folder; name the folder that holds your runs"),
            (("ui", "file"), 2, "file: is not a folder; name the folder that holds your runs"),
            (("ui", "--host", "192.0.2.1"), 1, "--host 192.0.2.1: "),
            (("ui", "--port", "70000"), 2, "Invalid value for '--port': Input should be less than or equal to 65535"),
        ):
            out, error = preheat(*arguments, code=code)
            assert error.startswith(f"error: {message}"), arguments
            assert (out, error.count("\n")) == ("", 1)


def test_a_damaged_queue_of_trainings_is_one_line(preheat: Command) -> None:
    runs = preheat.folder / "runs"
    runs.mkdir()
    process = preheat.start_alone("ui", "--port", "0")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    digest = hashlib.blake2b(os.fsencode(runs.resolve()), digest_size=8).hexdigest()
    file = Path(preheat.environment["PREHEAT_CACHE"]) / f"ui/queue-{digest}.json"
    assert file.with_suffix(".lock").exists()
    file.write_text("[{")
    out, error = preheat("ui", "--port", "0", code=1)
    assert error.startswith(f"error: {file}: the queue of trainings is damaged (not JSON: ")
    assert error.endswith("; move the file away\n")
    assert (out, error.count("\n")) == ("", 1)


def test_a_server_for_all_addresses_is_warned_of(preheat: Command) -> None:
    process = preheat.start_alone("ui", "--port", "0", "--host", "0.0.0.0")
    try:
        assert process.stderr.readline().startswith("warning: --host 0.0.0.0: everyone who can reach this machine")
        url = process.stdout.readline().removeprefix("preheat ui: ").strip()
        assert "There are no runs in runs yet." in open_page(url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 143
