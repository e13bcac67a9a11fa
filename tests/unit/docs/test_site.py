"""The site as it is built: guides first, nothing from the network, a search that works from a folder."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs/build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder = tmp_path_factory.mktemp("docs")
    build.main(folder / "pages", folder / "site")
    return folder / "site"


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    loads = re.compile(
        r"<(?!a\b)\w+[^>]*\s(?:src|href|srcset|data|poster|action)=[\"']?(?:https?:)?//[^>]*>|url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*"
    )
    pages = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(pages) > 50
    found = {}
    for page in pages:
        hits = [hit for hit in loads.findall(page.read_text(encoding="utf-8")) if 'rel="canonical"' not in hit]
        if hits:
            found[page.name] = hits
    assert not found


def test_the_search_works_without_a_server(site: Path) -> None:
    """Browsers start no worker and fetch no file from file://: the index is a script, and our shim takes the worker's place."""
    index = (site / "search/search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    assert {"planning.html", "devices.html", "compress.html"} <= {entry["location"] for entry in entries}
    for page, up in (("index.html", ""), ("techniques/lora.html", "../")):
        scripts = re.findall(r'<script src="([^"]*)"', (site / page).read_text(encoding="utf-8"))
        assert scripts[0] == f"{up}assets/iframe-worker.js", "before the bundle that starts the worker"
    assert "window.Worker" in (site / "assets/iframe-worker.js").read_text(encoding="utf-8")


def test_guides_come_first_and_the_home_page_names_every_page() -> None:
    entries = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sections = [next(iter(entry)) for entry in entries]
    assert sections.index("Guides") < sections.index("Techniques")
    home = (ROOT / "docs/pages/index.md").read_text(encoding="utf-8")
    listed = [
        page
        for entry in entries
        for pages in entry.values()
        if isinstance(pages, list)
        for item in pages
        for page in item.values()
    ]
    assert len(listed) >= 14
    assert not [page for page in listed if f"({page})" not in home]
