"""Renders the templates, with everything escaped that a page shows."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse

from preheat.report.formatting import (
    count,
    format_clock,
    format_duration,
    format_gib,
    format_grouped,
    format_loss,
    format_percent,
    format_signed_percent,
    read_number,
)
from preheat.sanitize import shorten
from preheat.web.settings import state_of

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["build_url", "format_age", "render"]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("preheat.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ago=format_age,
        clock=format_clock,
        count=count,
        duration=_format_whole_seconds,
        gib=format_gib,
        grouped=format_grouped,
        loss=format_loss,
        percent=format_percent,
        shorten=shorten,
        signed_percent=format_signed_percent,
    )
    return environment


def _format_whole_seconds(seconds: object) -> str:
    """Returns a time that has passed or is left; fractions of a second would only flicker on a live page."""
    finite = read_number(seconds)
    return format_duration(None if finite is None else round(finite))


def format_age(time_: float | None) -> str:
    """Returns the time since a moment in seconds since 1970, in one unit; "–" if it is unknown.

    Example:
        >>> format_age(time.time() - 7300), format_age(None)
        ('2 h ago', '–')
    """
    if time_ is None:
        return "–"
    seconds = time.time() - time_
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"


def build_url(request: Request, path: str, **query: str) -> str:
    """Returns the URL of a page of ours, behind the prefix of a proxy."""
    rest = "&".join(f"{quote(key)}={quote(value, safe='')}" for key, value in query.items())
    return f"{state_of(request).settings.prefix}{quote(path)}" + (f"?{rest}" if rest else "")


def render(request: Request, template: str, status: int = 200, **values: object) -> HTMLResponse:
    """Renders a template as a response.

    Args:
        template: name of the file in templates/; a fragment of a page begins with an underscore.
        values: its variables; `url(path, **query)`, `csrf`, `path` and `settings` are there for all.
    """
    settings = state_of(request).settings

    def url(path: str, **query: str) -> str:
        return build_url(request, path, **query)

    markup = (
        _environment()
        .get_template(template)
        .render(url=url, csrf=settings.csrf_token, path=request.url.path, settings=settings, **values)
    )
    # Names of files may hold bytes that are no text, and JSON lone surrogates; UTF-8 has neither.
    return HTMLResponse(markup.encode("utf-8", "replace"), status)
