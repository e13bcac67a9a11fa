"""A chat in a browser: a long answer is stopped, and the conversation continues."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from ..e2e.conftest import Command
from .conftest import Dashboard
from .test_first_run import PATIENCE_MS

POSITIONS = 100_000
"""Tokens of an answer that takes minutes even with the smallest model."""


def test_an_answer_is_stopped_and_the_next_one_begins(page: Page, dashboard: Dashboard, trainer: Command) -> None:
    run = dashboard.folder / "long"
    settings = ("stop.max_steps=2", f"model.max_positions={POSITIONS}")
    trainer.here("train", "r.yaml", *(f"--set={pair}" for pair in settings), "--out", str(run))
    id = dashboard.find_url(run).rpartition("/")[2]
    page.goto(f"{dashboard.url}/chat?a={id}&tokens={POSITIONS - 1000}")
    page.get_by_role("button", name="Open").click()
    side = page.locator("[data-chat]")
    stop = page.get_by_role("button", name="Stop the answer")
    expect(side).to_have_attribute("data-state", "ready", timeout=PATIENCE_MS)
    expect(stop).to_be_disabled()
    answers = page.locator(".turn.model pre")
    for n, text in enumerate(("the", "of")):
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        expect(answers.nth(n)).not_to_be_empty(timeout=PATIENCE_MS)
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        stop.click()
        expect(side).to_have_attribute("data-state", "ready", timeout=PATIENCE_MS)
        expect(side.get_by_role("status")).to_contain_text("interrupted; the text so far stays")
        expect(stop).to_be_disabled()
        answer = answers.nth(n).inner_text()
        page.wait_for_timeout(1000)
        assert answers.nth(n).inner_text() == answer
    # A reload shows the same conversation, and continues it.
    turns = page.locator(".turn pre").all_inner_texts()
    assert (turns[0], turns[2], len(turns)) == ("the", "of", 4)
    page.reload()
    expect(page.locator(".turn pre")).to_have_text(turns, timeout=PATIENCE_MS)
    expect(side).to_have_attribute("data-state", "ready")
    page.get_by_role("button", name="Start over").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="End", exact=True).click()
    expect(page.get_by_text("The chat has ended; open it again.")).to_be_visible()
