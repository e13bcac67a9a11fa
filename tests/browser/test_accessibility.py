"""axe-core finds nothing serious on any page."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser
from starlette.routing import Route

from preheat.web.app import PAGES

from .conftest import Dashboard

# Addresses without parameters that show a page; the others are data, or a part of a page.
ADDRESSES = [
    route.path
    for page in PAGES
    for route in page.routes()
    if isinstance(route, Route)
    and "GET" in (route.methods or ())
    and "{" not in route.path
    and not route.path.startswith(("/api", "/events"))
]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("address", [*ADDRESSES, "run"])
def test_axe_finds_nothing_serious(
    browser: Browser, shared_dashboard: Dashboard, finished: Path, address: str, theme: str
) -> None:
    page = shared_dashboard.open_page(browser)
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    response = page.goto(
        shared_dashboard.find_url(finished) if address == "run" else f"{shared_dashboard.url}{address}"
    )
    assert response is not None
    if not response.text().startswith("<!doctype html>"):
        page.context.close()
        pytest.skip("data, or a part of a page")
    # Fragments are loaded after the page; the streams of events never end.
    page.wait_for_timeout(2000)
    violations = Axe().run(page).response["violations"]
    serious = [
        (violation["id"], node["target"], node.get("failureSummary"))
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
    page.context.close()
    assert serious == []
