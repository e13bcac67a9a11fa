"""The `preheat upload` command: sends a folder to object storage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.output import say
from preheat.core.units import format_bytes

if TYPE_CHECKING:
    from preheat.run.remote_copy import RemoteCopy

__all__ = ["upload"]


def upload(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run or of an export.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: s3://, gs://, az:// or hf://.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    follow: Annotated[bool, typer.Option("--follow", hidden=True)] = False,
) -> None:
    """Send a run or an export to object storage, or the rest of a run that could not be sent while it trained.

    Example: preheat upload runs/demo s3://bucket/runs/demo; on another machine: preheat train --resume
    s3://bucket/runs/demo
    """
    from preheat.errors import RecipeError
    from preheat.files import to_json
    from preheat.run.remote_copy import RemoteCopy
    from preheat.storage import is_url

    if not is_url(url):
        raise RecipeError(f"URL {url}: names no object storage; write s3://, gs://, az:// or hf://BUCKET/FOLDER")
    if follow:
        _follow(RemoteCopy(url, folder))
        return
    if not folder.is_dir():
        raise RecipeError(f"{folder}: is not a folder; name that of a run or of an export")
    kind = "run" if (folder / "recipe.yaml").is_file() else "export"
    copy = RemoteCopy(url, folder, kind)

    def tell(message: str) -> None:
        say(message, error=True)

    with copy.session(), copy.sending(tell):
        copy.claim(resume=kind == "run", say=tell, download=False)
        sent = copy.send(active=False)
    if json:
        say(to_json({"folder": str(folder), "url": copy.url, "bytes": sent}))
    else:
        say(f"{copy.url}: sent {format_bytes(sent)}; it now holds all of {folder}")


def _follow(copy: RemoteCopy) -> None:
    """Uploads a run until standard input closes."""
    from preheat.training.uploader import follow

    os.nice(10)  # the run comes first
    with copy.sending(say):
        follow(copy, sys.stdin, say)
