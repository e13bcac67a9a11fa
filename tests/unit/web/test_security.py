"""Requests that the guard of the dashboard refuses, and the headers that it adds."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from starlette.testclient import TestClient

from preheat.web.app import create_app
from preheat.web.security import Guard
from preheat.web.settings import Settings

TOKEN = "a-token-of-this-test"
HOST = "127.0.0.1:8170"
OURS = {"host": HOST, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}


def settings_of(folder: Path, **changes: object) -> Settings:
    return Settings((folder,), TOKEN, 8170, **changes)  # type: ignore[arg-type]


def client_of(settings: Settings) -> TestClient:
    return TestClient(create_app(settings), base_url=f"http://{HOST}", follow_redirects=False)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return client_of(settings_of(tmp_path))


@pytest.fixture
def guarded(tmp_path: Path) -> tuple[TestClient, Settings]:
    """A client of an app behind the guard that answers every request with what reached it; and its settings."""
    settings = settings_of(tmp_path)

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return TestClient(Guard(app, settings), base_url=f"http://{HOST}", cookies={settings.cookie: TOKEN}), settings


def test_the_token_of_the_url_becomes_a_cookie_and_leaves_the_url(client: TestClient) -> None:
    answer = client.get("/?a=1&token=" + TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "./?a=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert client.get("/").status_code == 200  # the client keeps the cookie


def test_a_redirection_never_names_another_host(client: TestClient) -> None:
    for path in ("//evil.example/", "/\\evil.example/", "///evil.example", "/http://evil.example"):
        answer = client.get(f"http://{HOST}{path}?token={TOKEN}")
        target = answer.headers["location"]
        assert target.startswith("./")
        assert urlsplit(urljoin(f"http://{HOST}{path}", target)).netloc == HOST


@pytest.mark.parametrize(
    "path", ["/", "/static/ui.js", "/api/runs", "/events", "/nowhere", "/?token=wrong", "/?token=", "/?token=é"]
)
def test_without_the_token_nothing_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 403
    assert answer.text.startswith("Open the address that preheat ui printed")
    assert TOKEN not in answer.text + str(answer.headers)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8170", "127.0.0.1.evil.example", "", "localhost.evil.example:8170", "[::2]"]
)
def test_a_host_name_that_is_not_ours_is_refused_even_with_the_token(client: TestClient, host: str) -> None:
    assert client.get(f"/?token={TOKEN}", headers={"host": host}).status_code == 403


def test_a_change_needs_our_origin_and_the_secret_of_our_pages(guarded: tuple[TestClient, Settings]) -> None:
    client, settings = guarded
    secret = {"x-csrf-token": settings.csrf_token}
    assert client.post("/", headers=OURS | secret).status_code == 200
    for changed in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-csrf-token": "0" * 64},
        {"x-csrf-token": ""},
        {"x-csrf-token": TOKEN},
    ):
        assert client.post("/", headers=OURS | secret | changed).status_code == 403, changed
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        assert client.request(method, "/", headers=OURS).status_code == 403, method


def test_nothing_is_changed_by_a_server_that_is_read_only(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, read_only=True)
    client = client_of(settings)
    client.cookies.set(settings.cookie, TOKEN)
    answer = client.post("/", headers=OURS | {"x-csrf-token": settings.csrf_token})
    assert (answer.status_code, "--read-only" in answer.text) == (403, True)


def test_a_large_request_is_refused_also_if_its_header_claims_less(guarded: tuple[TestClient, Settings]) -> None:
    client, settings = guarded
    headers = OURS | {"x-csrf-token": settings.csrf_token}
    assert client.post("/", headers=headers, content=b"x" * 2**20).status_code == 200
    assert client.post("/", headers=headers, content=b"x" * (2**20 + 1)).status_code == 413
    assert client.post("/", headers=headers | {"content-length": "-1"}).status_code == 413

    def endless():  # type: ignore[no-untyped-def]
        for _ in range(40):
            yield b"x" * 2**16

    with pytest.raises(ConnectionResetError):
        client.post("/", headers=headers, content=endless())


def test_every_answer_has_the_headers(client: TestClient) -> None:
    for answer in (client.get("/"), client.get(f"/?token={TOKEN}"), client.get("/"), client.get("/static/ui.css")):
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"


def test_a_proxy_may_forward_the_prefix_or_not(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, prefix="/user/me/proxy/8170")
    client = client_of(settings)
    for path, target in (
        ("/", "./"),  # jupyter-server-proxy would put its prefix before an absolute one
        ("/runs/abc", "./abc"),
        ("/user/me/proxy/8170/", "./"),
        ("/user/me/proxy/8170", "./8170/"),
    ):
        answer = client.get(f"{path}?token={TOKEN}")
        assert answer.headers["location"] == target
    assert "Path=/user/me/proxy/8170/" in answer.headers["set-cookie"]
    cookie = {"cookie": f"{settings.cookie}={TOKEN}"}
    for path in ("/", "/user/me/proxy/8170/", "/user/me/proxy/8170"):
        page = client.get(path, headers=cookie)
        assert page.status_code == 200
        assert 'href="/user/me/proxy/8170/static/ui.css"' in page.text
    assert client.get("/user/me/proxy/8170/static/ui.css", headers=cookie).status_code == 200
    assert client.get("/user/me/proxy/81700", headers=cookie).status_code == 404


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"]
)
def test_static_files_are_those_of_their_folder(client: TestClient, path: str) -> None:
    client.get(f"/?token={TOKEN}")
    answer = client.get(path)
    assert answer.status_code == 404
    assert "create_app" not in answer.text
    assert "root:" not in answer.text
