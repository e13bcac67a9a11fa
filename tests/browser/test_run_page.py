"""The page of a run, watched in a browser while the run trains."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from preheat.core.run_records import Checkpoint, Resumed, StepMetrics, Stopping
from preheat.run.reader import Reader
from preheat.run.writer import Writer

from ..e2e.conftest import Command
from .conftest import TIMEOUT_MS, Dashboard, open_offline, save_page, watch_errors

LONG = ("--set", "stop.max_steps=100000", "--set", "schedule.kind=constant", "--set", "checkpoint.every=0")
expect.set_options(timeout=TIMEOUT_MS)


def wait_for_run(page: Page, run: Path) -> None:
    """Waits until a training has steps."""
    for _ in range(3000):
        if (run / "recipe.yaml").exists() and (run / "metrics.jsonl").exists():
            return
        page.wait_for_timeout(100)
    raise AssertionError("the run did not start")


def read_step(page: Page) -> int:
    return int(page.locator("#live .tiles dd").first.inner_text().replace(",", ""))


def wait_for_step(page: Page, step: int) -> None:
    """Waits until the page shows a step, without being loaded again."""
    page.wait_for_function(
        "step => Number(document.querySelector('#live .tiles dd').textContent.replaceAll(',', '')) >= step", arg=step
    )


def test_a_run_is_watched_saved_stopped_in_another_tab_resumed_to_its_end_and_killed(
    trainer: Command, dashboard: Dashboard, page: Page
) -> None:
    run = dashboard.folder / "small"
    process = trainer.start("train", "r.yaml", *LONG, "--out", str(run))
    try:
        wait_for_run(page, run)
        page.goto(dashboard.find_url(run))
        state = page.locator("#state")
        expect(state).to_have_attribute("data-state", "running")
        wait_for_step(page, read_step(page) + 5)
        expect(page.locator("#judgement")).to_contain_text("planned")

        page.get_by_role("button", name="Save now").click()
        expect(page.locator("#message")).to_contain_text("saves a checkpoint")
        expect(page.locator("#timeline")).to_contain_text("checkpoint")
        assert process.poll() is None
        (saved,) = Reader(run).events(Checkpoint)
        assert (run / f"checkpoints/step-{saved.step}/manifest.json").exists()

        other = page.context.new_page()
        other.goto(page.url)
        other.on("dialog", lambda dialog: dialog.accept())
        with other.expect_response(lambda response: response.request.method == "POST") as answer:
            other.get_by_role("button", name="Stop").click()
        assert "finishes the step" in answer.value.text()  # a fast run removes it from the page by ending
        process.communicate(timeout=100)
        assert process.returncode == 143
        for tab in (page, other):
            expect(tab.locator("#state")).to_have_attribute("data-state", "stopped")
            expect(tab.get_by_role("button", name="Stop")).to_be_hidden()
        other.close()
        assert [event.signal for event in Reader(run).events(Stopping)] == ["SIGTERM"]

        command = shlex.split(page.locator("#resume-command").inner_text())
        assert command[0] == "preheat"
        last = read_step(page)
        end = f"stop.max_steps={last + 40}"
        process = trainer.start(*command[1:], "--set", end)
        expect(state).to_have_attribute("data-state", "running")
        process.communicate(timeout=200)
        assert process.returncode == 0
        expect(state).to_have_attribute("data-state", "finished")
        assert read_step(page) == last + 40

        process = trainer.start(*command[1:], "--set", "stop.max_steps=100000")
        wait_for_step(page, last + 45)
        process.kill()
        process.communicate()
        expect(state).to_have_attribute("data-state", "killed")
        expect(page.locator("#resume-command")).to_contain_text("--resume")

        # By the page itself, with no terminal.
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#unfinished")).to_contain_text("output")
        expect(state).to_have_attribute("data-state", "running", timeout=150_000)
        wait_for_step(page, last + 50)
        page.get_by_role("button", name="Stop").click()
        expect(state).to_have_attribute("data-state", "stopped", timeout=60_000)
        assert "saving step" in run.with_name("small-resumed-1.log").read_text()
    finally:
        process.kill()
        process.communicate()


def test_the_page_says_that_the_server_ended_was_restarted_and_that_a_run_was_deleted(
    dashboard: Dashboard, page: Page, finished: Path
) -> None:
    run = dashboard.folder / "copied"
    shutil.copytree(finished, run)
    page.wait_for_timeout(500)  # an unknown run is looked for at most four times a second, and the list was just read
    page.goto(dashboard.find_url(run))
    expect(page.locator("#state")).to_have_attribute("data-state", "finished")
    expect(page.locator("#details")).to_contain_text("Memory by phase")
    dashboard.stop()
    connection = page.locator("#connection")
    expect(connection).to_contain_text("connection is lost")
    dashboard.start()
    expect(connection).to_contain_text("started again")
    page.goto(dashboard.login)
    page.goto(dashboard.find_url(run))
    expect(page.locator("#state")).to_have_attribute("data-state", "finished")
    shutil.rmtree(run)
    expect(page.locator("#live")).to_contain_text("does not exist any more")


def test_the_last_of_several_quick_changes_is_shown(dashboard: Dashboard, page: Page, finished: Path) -> None:
    run = dashboard.folder / "copied"
    shutil.copytree(finished, run)
    page.wait_for_timeout(500)
    page.goto(dashboard.find_url(run))
    timeline = page.locator("#timeline")
    expect(timeline).to_contain_text("finished")
    writer = Writer(run, resume=True)
    # The events are asked for every three seconds at most: the second change falls between.
    for kind, event in (("resumed", Resumed(step=7)), ("SIGTERM", Stopping(step=8, signal="SIGTERM"))):
        writer.write_event(event)
        expect(timeline).to_contain_text(kind)
    writer.close()


def test_a_chart_out_of_view_is_drawn_when_it_comes_into_view(
    browser: Browser, dashboard: Dashboard, finished: Path
) -> None:
    run = dashboard.folder / "copied"
    shutil.copytree(finished, run)
    page = dashboard.open_page(browser, height=500)
    page.wait_for_timeout(500)
    page.goto(dashboard.find_url(run))
    expect(page.locator("#timeline")).to_contain_text("finished")
    charts = page.locator("figure.chart")
    expect(page.locator("figure.chart path.curve")).to_have_count(charts.count())
    last = charts.filter(has_text="Learning rate")
    step = Reader(run).metrics()[-1].step + 1
    writer = Writer(run, resume=True)
    writer.write_metric(StepMetrics(step, tokens=1, loss=77.25, lr=5.5, elapsed=9.0))
    writer.close()
    expect(charts.first.locator(".chart-value")).to_contain_text("77.25")
    assert "5.5" not in last.locator(".chart-value").inner_text()
    last.scroll_into_view_if_needed()
    expect(last.locator(".chart-value")).to_contain_text("5.5")
    page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_narrow_page_does_not_scroll_sideways(
    browser: Browser, shared_dashboard: Dashboard, finished: Path, theme: str
) -> None:
    page = shared_dashboard.open_page(browser, width=400)
    errors = watch_errors(page)
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.goto(shared_dashboard.find_url(finished))
    expect(page.locator("#details")).to_contain_text("Recipe")
    expect(page.locator("#timeline")).to_contain_text("finished")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.context.close()
    assert errors == []


def test_the_saved_page_opens_offline(
    browser: Browser, shared_dashboard: Dashboard, finished: Path, tmp_path: Path
) -> None:
    page = shared_dashboard.open_page(browser)
    page.goto(shared_dashboard.find_url(finished))
    expect(page.locator("#details")).to_contain_text("Recipe")
    expect(page.locator("#timeline")).to_contain_text("finished")
    expect(page.locator("path.curve").first).to_be_attached()
    curves = page.locator("figure.chart").count()
    expect(page.locator("figure.chart svg")).to_have_count(curves)
    save_page(page, tmp_path / "run.html")
    page.context.close()
    with open_offline(browser, tmp_path / "run.html") as offline:
        expect(offline.locator("figure.chart svg")).to_have_count(curves)
        expect(offline.locator("#timeline")).to_contain_text("finished")
        expect(offline.locator("#memory .stack").first).to_be_visible()
        # The saved page leaves out everything that needs the server: its buttons, the choice of another curve, the link to the log.
        expect(offline.get_by_role("button")).to_have_count(0)
        for text in ("Save now", "Another curve", "Smoothing", "terminal"):
            expect(offline.get_by_text(text)).to_have_count(0)
