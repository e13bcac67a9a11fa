"""Runs in a browser: filtered, selected while others change, compared, saved, labelled in two tabs, deleted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from preheat.core.run_records import Finished, Resumed, StepMetrics
from preheat.run.reader import Reader
from preheat.run.writer import Writer
from preheat.web.labels import Labels, read_labels

from .conftest import TIMEOUT_MS, Dashboard, open_offline, save_page

expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture
def runs(finished: Path, dashboard: Dashboard) -> Path:
    """Three copies of a finished run; that of `wide` has another recipe, and <b> has markup in its name."""
    for name in ("base", "wide", "<b>bold"):
        shutil.copytree(finished, dashboard.folder / name)
    recipe = dashboard.folder / "wide" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("hidden_size: 32", "hidden_size: 64"))
    return dashboard.folder


def row_of(page: Page, name: str) -> Locator:
    return page.locator("tr", has=page.get_by_role("link", name=name, exact=True))


def test_a_selection_survives_updates_and_is_compared_and_saved(
    runs: Path, dashboard: Dashboard, page: Page, browser: Browser, tmp_path: Path
) -> None:
    page.goto(dashboard.url)
    expect(page.locator("tbody tr")).to_have_count(3)
    row_of(page, "base").get_by_role("checkbox").check()
    row_of(page, "wide").get_by_role("checkbox").focus()
    page.keyboard.press("Space")
    expect(page.locator("#selected")).to_have_text("2 selected")
    page.get_by_label("Tags").fill("half typed")
    # Another process resumes a run: its row changes without a reload, and nothing that the user did is lost.
    step = Reader(runs / "base").metrics()[-1].step + 1
    writer = Writer(runs / "base", resume=True)
    writer.write_event(Resumed(step=step - 1))
    writer.write_metric(StepMetrics(step, tokens=1000, loss=1.2345, tokens_per_second=77.0, elapsed=9.0))
    expect(row_of(page, "base")).to_contain_text("1.234")
    expect(row_of(page, "base")).to_contain_text("running")
    writer.write_event(Finished(steps=step, loss=1.2345))
    writer.close()
    expect(row_of(page, "base")).to_contain_text("finished")
    expect(row_of(page, "base").get_by_role("checkbox")).to_be_checked()
    expect(page.get_by_label("Tags")).to_have_value("half typed")

    # The heading sorts by keyboard, and the filter leaves the rest out.
    page.get_by_role("link", name="Loss", exact=True).press("Enter")
    expect(page.locator("tbody tr").first).to_contain_text("base")
    expect(page.locator('th[aria-sort="ascending"]')).to_contain_text("Loss")
    page.wait_for_load_state()  # the scripts follow the filter from then on
    page.get_by_label("Text").fill("bold")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Text").fill("")
    expect(page.locator("tbody tr")).to_have_count(3)

    for name in ("base", "wide"):
        row_of(page, name).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare").click()
    recipes = page.locator("#recipes")
    expect(recipes).to_contain_text("model.hidden_size")
    expect(recipes.locator("tbody tr")).to_have_count(1)
    expect(page.locator("#curves figure.chart svg").first).to_be_visible()
    page.get_by_role("checkbox", name="gradient norm").check()
    expect(page.locator("#curves figure.chart")).to_have_count(3)
    expect(page.locator("#curves figure.chart svg path.curve")).to_have_count(6)

    # The saved page opens offline, looks alike, and has the curves with their names and values.
    saved = tmp_path / "saved.html"
    save_page(page, saved)
    with open_offline(browser, saved) as offline:
        expect(offline.locator("#recipes")).to_contain_text("model.hidden_size")
        assert offline.locator("figure.chart svg path.curve").count() == 6
        chart = offline.locator("figure.chart").first
        assert chart.locator(".legend li").all_inner_texts() == ["base", "wide"]
        chart.get_by_text("Values as a table").click()
        expect(chart.locator("tbody tr")).to_have_count(24)


def test_a_filter_is_kept_when_a_run_changes_meanwhile(runs: Path, dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url)
    expect(page.locator("tbody tr")).to_have_count(3)
    live = []

    def answer_late(route: Route) -> None:
        writer = Writer(runs / "base", resume=True)
        writer.write_event(Resumed(step=1))
        writer.close()
        page.wait_for_timeout(4_000)  # the server looks for changes each second
        route.continue_()

    page.route("**/?q=bold&*", answer_late, times=1)
    page.on(
        "request", lambda request: live.append(request.url) if request.headers.get("hx-trigger") == "update" else None
    )
    page.get_by_label("Text").fill("bold")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(row_of(page, "<b>bold")).to_be_visible()
    page.get_by_label("Text").fill("base")
    expect(row_of(page, "base")).to_contain_text("killed")  # begun again, by a process that is gone
    assert live
    assert all("q=b" in url for url in live), live  # updates ask for what the filter shows


def test_two_tabs_label_a_run_and_one_deletes_it(runs: Path, dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url)
    row_of(page, "<b>bold").get_by_role("link", name=re.compile("Edit")).click()
    other = page.context.new_page()
    other.goto(page.url)
    page.get_by_label("Name", exact=True).fill("First tab")
    page.get_by_label("Tags").fill("x")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    other.get_by_label("Name", exact=True).fill("Second tab")
    other.get_by_label("Tags").fill("y")
    other.get_by_role("button", name="Save").click()
    expect(other.locator(".notice.bad")).to_contain_text("was changed to 'First tab' by another page")
    expect(other.get_by_label("Name", exact=True)).to_have_value("Second tab")
    assert read_labels(runs / "<b>bold") == Labels("First tab", tags=("x",))
    other.get_by_role("button", name="Save").click()
    expect(other.get_by_text("Saved.")).to_be_visible()
    assert read_labels(runs / "<b>bold") == Labels("Second tab", tags=("x", "y"))

    delete = page.get_by_role("button", name="Delete the run")
    page.get_by_label("to delete the run").fill("Second tab")
    delete.click()
    expect(page.locator(".notice.bad")).to_contain_text("the name of its folder is <b>bold")
    page.get_by_label("to delete the run").fill("<b>bold")
    delete.click()
    expect(page.get_by_role("heading", name="Second tab is deleted")).to_be_visible()
    assert not (runs / "<b>bold").exists()
    # The other tab says so, and keeps nothing alive.
    other.get_by_role("button", name="Save").click()
    expect(other.locator("main")).to_contain_text("does not exist any more")
    assert not (runs / "<b>bold").exists()


@pytest.mark.parametrize("width", [400, 1600])
def test_no_page_scrolls_sideways(runs: Path, dashboard: Dashboard, browser: Browser, width: int) -> None:
    page = dashboard.open_page(browser, width)
    run = dashboard.find_url(runs / "base")
    ids = [dashboard.find_url(runs / name).rpartition("/")[2] for name in ("base", "wide")]
    addresses = (dashboard.url, f"{run}/labels", f"{dashboard.url}/compare?run={ids[0]}&run={ids[1]}")
    for address in (*addresses, f"{dashboard.url}/results"):
        page.goto(address)
        page.wait_for_timeout(1000)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
    page.context.close()
