"""A new user, without a line of YAML: from a plan to a run that trains, its page, and a chat with it."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from .conftest import Dashboard, open_offline, save_page

PATIENCE_MS = 150_000
"""Milliseconds for a command that imports torch, on cores that many share."""


def test_from_a_plan_to_a_chat(page: Page, dashboard: Dashboard, browser: Browser, tmp_path: Path) -> None:
    page.get_by_role("link", name="Plan", exact=True).click()
    page.get_by_label("Model or recipe").fill("0.1M")
    for label, value in (("Length", "64"), ("Batch", "4"), ("Steps", "20")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("heading", name="All candidates")).to_be_visible(timeout=PATIENCE_MS)
    # The question is in the address, so that it can be kept and sent.
    expect(page).to_have_url(f"{dashboard.url}/plan?model=0.1M&length=64&batch=4&steps=20")
    # Candidates by the keyboard: another one is described.
    points = page.get_by_role("group", name="All candidates")
    points.locator("circle.best").focus()
    chosen = page.locator("#candidate h3")
    expect(page.locator("#candidate")).to_contain_text("chosen")
    before = chosen.inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(chosen).not_to_have_text(before)
    save_page(page, tmp_path / "plan.html")
    with open_offline(browser, tmp_path / "plan.html") as offline:
        expect(offline.locator("circle.best")).to_be_visible()
        expect(offline.locator("#candidate")).to_contain_text(chosen.inner_text())
        expect(offline.locator("#memory")).to_be_visible()
        expect(offline.get_by_text("Train this")).to_have_count(0)
    # The plan becomes a run.
    page.get_by_role("link", name="Train this").click()
    name = page.get_by_label("Name of the run").input_value()
    page.get_by_role("button", name="Train", exact=True).click()
    page.wait_for_url(re.compile(r"/runs/[0-9a-f]{16}$"), timeout=PATIENCE_MS)
    run = page.url.rpartition("/")[2]
    assert dashboard.find_url(dashboard.folder / name) == page.url
    # The queue says when it is done, and then the run answers.
    page.goto(f"{dashboard.url}/start")
    expect(page.get_by_role("row", name=name).get_by_role("cell", name="done")).to_be_visible(timeout=PATIENCE_MS)
    page.goto(f"{dashboard.url}/chat?a={run}&b=before&tokens=8")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("[data-chat][data-state=ready]")).to_have_count(2, timeout=PATIENCE_MS)
    page.get_by_label("Message", exact=True).fill("def main(")
    page.keyboard.press("Enter")
    for side in (name, f"{name}, before training"):
        log = page.get_by_role("log", name=f"Messages with {side}", exact=True)
        expect(log.locator(".turn.user pre")).to_have_text("def main(")
        expect(log.locator(".turn.model pre")).not_to_be_empty(timeout=PATIENCE_MS)
    expect(page.get_by_text("tokens a second")).to_have_count(2, timeout=PATIENCE_MS)
    page.get_by_role("button", name="End", exact=True).click()
    expect(page.get_by_text("The chat has ended; open it again.")).to_have_count(2)


def test_mistakes_are_sentences_on_the_page(page: Page, dashboard: Dashboard) -> None:
    (dashboard.folder / "bad.yaml").write_text("model: {size: 1M}\nbatch: {sise: 3}\n")
    page.goto(f"{dashboard.url}/plan")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Model or recipe: is empty; name a model")
    page.get_by_label("Model or recipe").fill("../secret")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("'../secret': must be a name")
    # The command line's own message, with the key and the fix.
    page.get_by_label("... or from your folders").select_option(label="bad.yaml")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("did you mean 'size'?", timeout=PATIENCE_MS)
    page.goto(f"{dashboard.url}/start")
    page.get_by_label("Recipe", exact=True).select_option(label="bad.yaml")
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("did you mean 'size'?", timeout=PATIENCE_MS)
    page.goto(f"{dashboard.url}/chat")
    # Without runs there is nothing to choose from.
    expect(page.locator(".notice")).to_contain_text("There are no runs and no models in")
