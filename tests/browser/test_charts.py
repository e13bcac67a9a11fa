"""Charts in a browser: drawn from the API, zoomed by keyboard and mouse, and kept up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from playwright.sync_api import expect
from starlette.responses import HTMLResponse
from starlette.routing import Route

from preheat.core.run_records import Checkpoint, EvaluationMetrics, OtherEvent, Started, StepMetrics
from preheat.run.writer import Writer
from preheat.web.app import create_app
from preheat.web.server import open_socket
from preheat.web.settings import Settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from starlette.requests import Request

PAGE = """<!doctype html><html lang="en"><head><title>Charts</title><meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="/static/page.css"><link rel="stylesheet" href="/static/ui.css">
<link rel="stylesheet" href="/static/chart.css"><script src="/static/ui.js" defer></script>
<script src="/static/chart.js" defer></script></head>
<body data-prefix=""><main><p id="connection" role="status"></p><h1>Charts</h1><h2>Curves</h2><div class="two">{figures}</div></main></body></html>"""


@dataclass
class Site:
    """A server whose page /charts shows the charts that its query names."""

    url: str
    runs: Path
    ids: list[str]


def figure(request: Request) -> HTMLResponse:
    runs = request.query_params["runs"]
    figures = "".join(
        f'<figure class="chart" data-runs="{runs}" data-key="{key}"></figure>'
        for key in request.query_params.get("keys", "loss").split(",")
    )
    return HTMLResponse(PAGE.replace("{figures}", figures))


def write_run(folder: Path, steps: int, offset: float) -> None:
    writer = Writer(folder)
    writer.write_text("recipe.yaml", "name: a\n")
    writer.write_event(Started())
    for step in range(1, steps + 1):
        loss = offset + 3 / step**0.3 + 0.05 * (step * 7919 % 11)
        writer.write_metric(
            StepMetrics(step, tokens=1024 * step, loss=loss, lr=1e-3, elapsed=0.5 * step, memory=2**30 + step * 2**20)
        )
        if step % 50 == 0:
            writer.write_metric(EvaluationMetrics(step, validation_loss=loss + 0.2))
            writer.write_event(Checkpoint(step=step, seconds=1.0))
    writer.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("charts")
    write_run(folder / "runs" / "a", 3000, 0.5)
    write_run(folder / "runs" / "<img src=x onerror=alert(1)>", 200, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREHEAT_CACHE", str(folder / "cache"))
        listener = open_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app = create_app(Settings((folder / "runs",), "secret", port))
        app.router.routes.append(Route("/charts", figure))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        ids = {entry.name: entry.id for entry in app.state.ui.catalogue.list_runs()}
        yield Site(f"http://127.0.0.1:{port}", folder / "runs", [ids["a"], ids["<img src=x onerror=alert(1)>"]])
        server.should_exit = True
        thread.join()


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    page = context.new_page()
    page.set_default_timeout(30_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(f"{site.url}/?token=secret")
    yield page
    context.close()
    assert errors == []


def open_charts(page: Page, site: Site, runs: str, keys: str = "loss") -> None:
    page.goto(f"{site.url}/charts?runs={runs}&keys={keys}")
    page.locator("path.curve").first.wait_for(state="attached")


def test_zoom_by_keyboard_reads_the_part_in_full(page: Page, site: Site) -> None:
    open_charts(page, site, site.ids[0])
    assert page.locator("path.band").count() == 1  # 3,000 steps in some hundred bins
    chart = page.locator("figure.chart svg")
    chart.focus()
    for _ in range(4):
        with page.expect_response(lambda answer: "/curves?" in answer.url and "first=" in answer.url):
            page.keyboard.press("+")
        page.locator("figure.chart").get_by_role("button", name="Show all").wait_for()
    page.locator("path.band").wait_for(state="detached")  # each step
    with page.expect_response(lambda answer: "/curves?" in answer.url and "first=" not in answer.url):
        page.keyboard.press("0")
    page.locator("path.band").wait_for(state="attached")


def test_events_are_marked_over_every_axis(page: Page, site: Site) -> None:
    open_charts(page, site, site.ids[0])
    marks = page.locator("figure.chart line.mark")
    places = []
    for axis in ("step", "tokens", "hours"):
        page.get_by_role("combobox", name="Over").select_option(axis)
        page.locator(f'figure.chart svg[aria-label*="over {"steps" if axis == "step" else axis}"]').wait_for()
        assert marks.count() == 60  # a checkpoint every 50 of 3,000 steps
        places.append([float(mark.get_attribute("x1") or "nan") for mark in marks.all()])
    # Tokens and hours grow in proportion to the steps, so the marks stay where they are, to the pixel.
    assert max(abs(place - places[0][n]) for row in places for n, place in enumerate(row)) <= 2


def test_a_new_step_is_drawn_without_loading_the_page(page: Page, site: Site) -> None:
    open_charts(page, site, site.ids[1])
    value = page.locator(".chart-value")
    before = value.inner_text()
    page.wait_for_timeout(1500)  # the server's first look at the files
    writer = Writer(site.runs / "<img src=x onerror=alert(1)>", resume=True)
    writer.write_metric(StepMetrics(201, tokens=1, loss=77.25, elapsed=1.0))
    writer.write_event(OtherEvent(kind="spike<b>", step=201))
    writer.close()
    page.wait_for_function("() => document.querySelector('.chart-value').textContent.includes('77.25')")
    assert before != value.inner_text()


def test_two_runs_have_a_legend_and_a_table(page: Page, site: Site) -> None:
    open_charts(page, site, ",".join(site.ids))
    second = page.get_by_role("button", name="<img src=x onerror=alert(1)>")
    page.locator("path.curve").nth(1).wait_for(state="attached")
    second.click()
    assert second.get_attribute("aria-pressed") == "false"
    assert page.locator("path.curve").count() == 1
    second.click()
    page.get_by_text("Values as a table").click()
    expect(page.locator("figure.chart tbody tr")).to_have_count(24)  # the table is filled after it is open
    assert page.locator("figure.chart thead th").all_inner_texts()[1] == "a"


def test_a_run_that_was_deleted_is_said_in_the_chart(page: Page, site: Site) -> None:
    page.goto(f"{site.url}/charts?runs=0123456789abcdef")
    page.get_by_text("This run does not exist any more").first.wait_for(state="attached")


def test_charts_are_accessible_and_narrow(page: Page, site: Site) -> None:
    from axe_playwright_python.sync_playwright import Axe

    open_charts(page, site, ",".join(site.ids), "loss,validation_loss")
    page.set_viewport_size({"width": 400, "height": 800})
    time.sleep(0.3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        violations = Axe().run(page).response["violations"]
        assert [v["id"] for v in violations if v["impact"] in ("serious", "critical")] == []
