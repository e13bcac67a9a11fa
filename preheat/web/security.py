"""Guards every request: the host that it names, the token, the origin of changes, its size; adds security headers."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from preheat.web.settings import Settings

__all__ = ["Guard"]

_LARGEST_BODY = 1 << 20
"""Bytes of a request: forms and chat messages are smaller, and uploads do not exist."""

_HEADERS = {
    # Scripts and styles are files of ours. Attributes of style carry the colours of plots; they cannot load anything.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; frame-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Wraps an ASGI app: what fails a check gets an answer of one line, and the app does not see it."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    # A saved page brings a policy of its own, which is stricter.
                    headers.setdefault(name, value)
            await send(message)

        path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        self._strip_prefix(scope)
        refusal = self._check(scope, path)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        await self.app(scope, _limit_body(receive), send_guarded)

    def _strip_prefix(self, scope: Scope) -> None:
        """Accepts paths with the prefix of a proxy and without it: proxies differ in what they forward."""
        prefix = self.settings.prefix
        if prefix and (scope["path"] == prefix or scope["path"].startswith(prefix + "/")):
            scope["path"] = scope["path"].removeprefix(prefix) or "/"
            scope.pop("raw_path", None)

    def _check(self, scope: Scope, path: str) -> Response | None:
        """Returns the refusal of a request, or its redirection after the token in its URL; None: it may pass.

        Args:
            path: as it came, perhaps with the prefix, and with characters escaped.
        """
        headers, settings = Headers(scope=scope), self.settings
        host = headers.get("host", "")
        if _name_of(host) not in settings.hosts:
            return _refuse_stranger(
                "This server does not answer to this host name; open the address that preheat ui printed, or start it "
                "with --allow-host NAME.\n"
            )
        if _read_length(headers) > _LARGEST_BODY:
            return PlainTextResponse("The request is larger than 1 MiB.\n", 413, {"connection": "close"})
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is not None and scope["method"] == "GET" and _is_equal(given, settings.token):
            # Out of the address bar, where it would be copied and stay in the history.
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            # Relative, because jupyter-server-proxy puts its prefix before absolute paths, and because a path with two
            # slashes at its front would name another host.
            target = f"./{path.rpartition('/')[2]}{'/' if path == settings.prefix else ''}"
            redirect = RedirectResponse(target + (f"?{rest}" if rest else ""), 303)
            redirect.set_cookie(
                settings.cookie, settings.token, httponly=True, samesite="strict", path=f"{settings.prefix}/"
            )
            return redirect
        # As browsers read them: a cookie of another server on this host, of any form, must not hide ours.
        cookie = cookie_parser(headers.get("cookie", "")).get(settings.cookie, "")
        if not _is_equal(cookie, settings.token):
            return _refuse_stranger(
                "Open the address that preheat ui printed when it started: it contains the token that this page "
                "needs.\n"
            )
        if scope["method"] in ("GET", "HEAD"):
            return None
        if settings.read_only:
            return PlainTextResponse("This server was started with --read-only.\n", 403)
        # A proxy may end TLS, so the scheme is not compared; host and port are.
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return PlainTextResponse("The request comes from another site.\n", 403)
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return PlainTextResponse("The request comes from another site.\n", 403)
        if not _is_equal(headers.get("x-csrf-token", ""), settings.csrf_token):
            return PlainTextResponse("The page is older than the server; load it again.\n", 403)
        return None


def _refuse_stranger(text: str) -> Response:
    """Returns a refusal that closes the connection: only those who have the token may occupy one."""
    return PlainTextResponse(text, 403, {"connection": "close"})


def _name_of(host: str) -> str:
    """Returns a Host header without its port."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdigit() else host).lower()


def _read_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else _LARGEST_BODY + 1


def _is_equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _limit_body(receive: Receive) -> Receive:
    """Ends the connection of a request whose body is longer than its header claims."""
    total = 0

    async def receive_limited() -> Message:
        nonlocal total
        message = await receive()
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            if total > _LARGEST_BODY:
                return {"type": "http.disconnect"}
        return message

    return receive_limited
