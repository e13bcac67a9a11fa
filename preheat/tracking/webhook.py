"""A message to a webhook when a run ends, fails or needs attention: Slack, Discord, Mattermost, or any URL.

The URL is in the variable `PREHEAT_WEBHOOK` and not in the recipe, because who has it can post there.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

from preheat.tracking.tracker import Start, Status, Table, Tracker

__all__ = ["Webhook"]

_SECONDS = 20
_VARIABLE = "PREHEAT_WEBHOOK"


class Webhook(Tracker):
    """Posts one JSON object per message: {text, content, run, status, step, loss}.

    `text` is what Slack and Mattermost show, `content` what Discord does; the others are for programs.
    """

    name = "webhook"
    package = "urllib"
    pip = "preheat"

    def __init__(self) -> None:
        self._name = ""
        self._step, self._loss = 0, float("nan")

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        address = os.environ.get(_VARIABLE, "")
        if urlsplit(address).scheme not in ("http", "https"):
            return f"no URL to post to; put it into the variable {_VARIABLE}"
        return None

    def start(self, start: Start, known: str | None) -> str:
        self._name = start.name
        return start.run

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        # Figures of the system come after the steps, with the steps at which they were taken.
        self._step, self._loss = max(step, self._step), values.get("train/loss", self._loss)

    def table(self, step: int, name: str, table: Table) -> None:
        """Does nothing: a message has no tables."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Does nothing: the message at the end has the loss."""

    def artifact(self, file: Path) -> None:
        """Does nothing: a message has no files."""

    def event(self, kind: str, text: str) -> None:
        self._post_message(kind, f"{self._name}: {kind.replace('_', ' ')} at step {self._step:,}: {text}")

    def finish(self, status: Status) -> None:
        loss = f", loss {self._loss:.4f}" if self._loss == self._loss else ""
        self._post_message(status, f"{self._name}: {status} at step {self._step:,}{loss}")

    def _post_message(self, status: str, text: str) -> None:
        message = {"text": text, "content": text, "run": self._name, "status": status, "step": self._step}
        message |= {"loss": self._loss} if self._loss == self._loss else {}
        request = urllib.request.Request(
            os.environ[_VARIABLE],
            data=json.dumps(message).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "preheat"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS):
                pass
        except URLError as error:
            # Without the URL, which is a secret, and without the traceback, which has it.
            raise ConnectionError(f"the webhook did not take the message ({error.reason})") from None
