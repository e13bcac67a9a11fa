"""Settings of the dashboard's server, and the state that its pages share."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from preheat.run.remote_runs import RemoteRuns
    from preheat.web.catalogue import Catalogue
    from preheat.web.jobs import Jobs
    from preheat.web.results import ResultFinder
    from preheat.web.user_files import UserFiles

__all__ = ["Settings", "State", "state_of"]


@dataclass(frozen=True)
class Settings:
    """The options of `preheat ui`.

    Attributes:
        folders: folders below which runs are shown; nothing outside of them is read. New runs go to the first.
        token: secret that the first request carries in its URL, and a cookie afterwards.
        port: port of the server; part of the cookie's name, since cookies of one host are shared by all ports.
        hosts: host names that a request may be addressed to; others are refused, so that a foreign page cannot reach a
            server on loopback by a name that it controls (DNS rebinding).
        prefix: path before all pages behind a proxy, such as "/user/me/proxy/8080", or "".
        read_only: show runs, but start, stop and change nothing.
        urls: object storage whose runs are shown too, from copies in the cache.
    """

    folders: tuple[Path, ...]
    token: str
    port: int
    hosts: frozenset[str] = frozenset({"127.0.0.1", "localhost", "[::1]"})
    prefix: str = ""
    read_only: bool = False
    urls: tuple[str, ...] = ()

    @property
    def places(self) -> str:
        """The folders and URLs, for a sentence."""
        return ", ".join((*map(str, self.folders), *self.urls))

    @property
    def cookie(self) -> str:
        return f"preheat-ui-{self.port}"

    @property
    def csrf_token(self) -> str:
        """The secret that every changing request carries in the header X-CSRF-Token; pages hold it."""
        return hmac.new(self.token.encode(), b"csrf", hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class State:
    """The objects that all pages use."""

    settings: Settings
    catalogue: Catalogue
    jobs: Jobs
    files: UserFiles
    results: ResultFinder
    remotes: tuple[RemoteRuns, ...]


def state_of(connection: HTTPConnection) -> State:
    """Returns the state of the app that serves a request."""
    state: State = connection.app.state.ui
    return state
