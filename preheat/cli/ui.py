"""The `preheat ui` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preheat.cli.views.output import say
from preheat.errors import RecipeError

__all__ = ["ui"]


def ui(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Folders with runs, or URLs of object storage, such as s3://bucket/runs; default: runs. Nothing else "
            "is read.",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8170,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Beyond this machine: use an SSH tunnel instead.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Host name under which a proxy serves it; repeatable."),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option("--prefix", metavar="PATH", help="Path of the pages behind a proxy, as in /user/me/proxy/8170."),
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Show runs; start, stop and change nothing.")] = False,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser while they train, compare them, and plan and start new ones.

    Example: preheat ui runs
    """
    import secrets
    import socket

    from preheat.storage import is_url, require_scheme
    from preheat.web.server import build_server, open_socket
    from preheat.web.settings import Settings

    for folder in folders or ():
        require_scheme("FOLDER", folder)
    urls = [folder.rstrip("/") for folder in folders or () if is_url(folder)]
    named = [Path(folder) for folder in folders or () if not is_url(folder)]
    for path in named:
        if not path.exists():
            raise RecipeError(f"{path}: no such folder; name the folder that holds your runs")
    paths = named or [Path("runs")]
    for path in paths:
        if path.exists() and not path.is_dir():
            raise RecipeError(f"{path}: is not a folder; name the folder that holds your runs")
    prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
    is_local = host in ("127.0.0.1", "localhost", "::1")
    listener = open_socket(host, port)
    port = listener.getsockname()[1]
    names = {"127.0.0.1", "localhost", "[::1]", *(name.lower() for name in allow_host or ())}
    if not is_local:
        names |= {socket.gethostname().lower(), *map(_bracket, (host.lower(), *_list_addresses(host)))}
    token = secrets.token_urlsafe(24)
    settings = Settings(tuple(paths), token, port, frozenset(names), prefix, read_only, tuple(dict.fromkeys(urls)))
    server = build_server(settings, say)
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, _bracket(host))
    url = f"http://{shown}:{port}{prefix}/?token={token}"
    if not is_local:
        say(
            f"warning: --host {host}: everyone who can reach this machine and has the token can read these runs and "
            "start commands as you, and the connection is not encrypted",
            error=True,
        )
    say(f"preheat ui: {url}")
    say(f"from another machine: ssh -L {port}:127.0.0.1:{port} {_name_login()}, then open that address there")
    say("stop it with Ctrl-C")
    if open_browser:
        import webbrowser

        webbrowser.open(url)
    server.run(sockets=[listener])


def _list_addresses(host: str) -> set[str]:
    """Returns the addresses of this machine if the server listens on all of them."""
    import socket

    import psutil

    if host not in ("0.0.0.0", "::"):
        return set()
    return {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def _bracket(host: str) -> str:
    """Returns an address as URLs have it."""
    return f"[{host}]" if ":" in host else host


def _name_login() -> str:
    import getpass
    import socket

    return f"{getpass.getuser()}@{socket.gethostname()}"
