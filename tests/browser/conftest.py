"""A dashboard in a process of its own, and pages of it in the system's Chromium.

Where Chromium is absent the tests are skipped, or fail if PREHEAT_BROWSER=required.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from preheat.web.catalogue import Catalogue

from ..conftest import SMALL
from ..e2e.conftest import RECIPE, Command, write_text

TIMEOUT_MS = 60_000
"""Milliseconds for a page to show something: two cores may be shared by many."""


def find_chromium() -> str | None:
    """Returns the path of the system's browser."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# Of a module: as long as Playwright runs, no other test of the process can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        reason = "Chromium is not installed (apt-get install chromium)"
        if os.environ.get("PREHEAT_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs commands in a folder with a recipe (r.yaml) and its text, with a cache that has rates of this machine."""
    from preheat.hardware.benchmark_rates import calibrate
    from preheat.hardware.probe import probe

    folder, cache = tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("cache")
    with mock.patch.dict(os.environ, {"PREHEAT_CACHE": str(cache)}):
        dataclasses.replace(calibrate(probe("cpu"), 1, grid=SMALL), contended=False, machine=None).store()
    write_text(folder)
    (folder / "r.yaml").write_text(RECIPE)
    return Command(folder, cache)


@pytest.fixture(scope="session")
def finished(trainer: Command) -> Path:
    """A run that has finished, with samples; tests do not change it."""
    settings = ("stop.max_steps=60", "sample={prompts: [the], max_new_tokens: 4}", "name=finished")
    trainer.here("train", "r.yaml", *(part for pair in settings for part in ("--set", pair)), "--out", "done/finished")
    return trainer.folder / "done/finished"


class Dashboard:
    """`preheat ui` on a free port."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder, self.environment = folder, environment
        self.port = 0
        self.start()

    def start(self) -> None:
        """Starts it, on the port of before if it is started again."""
        folder, port = str(self.folder), str(self.port)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "preheat", "ui", folder, "--port", port],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", line)
        assert match is not None, f"it printed {line!r}"
        self.login, self.port = match[0], int(match[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)

    def find_url(self, run: Path) -> str:
        """Returns the address of a run's page."""
        (entry,) = [entry for entry in Catalogue((self.folder,)).list_runs() if entry.path == run.resolve()]
        return f"{self.url}/runs/{entry.id}"

    def open_page(self, browser: Browser, width: int = 1600, height: int = 1000) -> Page:
        """Opens a page in a browser profile of its own, logged in. Errors of scripts fail the test that reads them."""
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.context.set_default_timeout(TIMEOUT_MS)  # of further tabs, too
        page.goto(self.login)
        return page


@pytest.fixture
def dashboard(trainer: Command, tmp_path: Path) -> Iterator[Dashboard]:
    """A dashboard of a folder of the test's own."""
    folder = tmp_path / "runs"
    folder.mkdir()
    dashboard = Dashboard(folder, trainer.environment)
    yield dashboard
    dashboard.stop()


@pytest.fixture(scope="module")
def shared_dashboard(trainer: Command, finished: Path) -> Iterator[Dashboard]:
    """A dashboard of a finished run, for tests that only look."""
    dashboard = Dashboard(finished.parent, trainer.environment)
    yield dashboard
    dashboard.stop()


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """A page of `dashboard`, logged in; the test fails if a script raises or the policy blocks something."""
    page = dashboard.open_page(browser)
    with_errors = watch_errors(page)
    yield page
    page.context.close()
    assert with_errors == []


def watch_errors(page: Page) -> list[str]:
    """Returns a list to which the errors of a page are added: of its scripts, and what its policy blocks."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None,
    )
    return errors


def save_page(page: Page, file: Path) -> str:
    """Saves a page by its button, and returns the text of the file, which has no secrets, scripts or addresses."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save this page").click()
    download.value.save_as(file)
    text = file.read_text()
    csrf = re.search(r'X-CSRF-Token": "(\w+)"', page.content().replace("&quot;", '"'))
    assert csrf is not None
    assert csrf[1] not in text
    assert "<script" not in text
    assert not re.search(r"<[^>]*\s(?:hx-\w+|on\w+|src|href|action|data-p\w+)=", text)
    return text


@contextmanager
def open_offline(browser: Browser, file: Path) -> Iterator[Page]:
    """Opens a saved page without a network; nothing in it may be blocked or fail."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    errors = watch_errors(page)
    page.goto(file.as_uri())
    assert page.evaluate("getComputedStyle(document.querySelector('main')).maxWidth") == "1560px"
    yield page
    context.close()
    assert errors == []
