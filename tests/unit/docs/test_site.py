"""The site as it is built: guides first, nothing from the network, a search that works from a folder."""

import ast
import doctest
import html
import importlib.util
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import preheat
from preheat import errors, integrations
from preheat.models.tested_versions import NEWEST_TESTED

ROOT = Path(__file__).parents[3]


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs/build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    build = builder()
    folder = tmp_path_factory.mktemp("docs")
    build.main(folder / "pages", folder / "site")
    return folder / "site"


def test_a_page_of_a_technique_has_all_words_of_its_docstrings_in_order() -> None:
    build = builder()

    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text)

    for name, cls in build.shipped().items():
        module = sys.modules[cls.__module__]
        page = build.technique_page(name, cls)
        told = module.__doc__ or ""
        assert words(told) == words(" ".join(page.split("\nStage ")[0].splitlines()[2:])), name
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                told = ast.get_docstring(node) or ""
                shown = page.partition(f"### {node.name}\n")[2].partition("\n```\n")[2].partition("\n### ")[0]
                assert words(told) == [w for w in words(shown) if w != "pycon"], (name, node.name)


def test_no_page_that_is_generated_loses_words_when_it_is_rendered() -> None:
    markdown = pytest.importorskip("markdown")
    build = builder()
    pages = {name: build.technique_page(name, cls) for name, cls in build.shipped().items()}
    pages |= {"techniques": build.cheat_sheet().partition("---\n# ")[2], "models": build.models_page()}
    for name, page in pages.items():
        text = re.sub(r"<[^>]*>", " ", markdown.markdown(page, extensions=["tables", "fenced_code"]))
        written = Counter(re.findall(r"\w+", re.sub(r"(?m)^```\w*$|\(\S*\.md\)|\]\(\S*\)", " ", page)))
        assert not written - Counter(re.findall(r"\w+", html.unescape(text))), name


def test_links_of_a_clone_lead_to_files() -> None:
    """As a code host shows the pages, before the site is built."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")):
        links = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_what_a_function_returns_is_no_list_of_names() -> None:
    text = """Does it.

    Args:
        a, b: two: the numbers.
            More of them.

    Returns:
        The loss of each update: the mean.

    Raises:
        ValueError: a is less than b.

    Example:
        >>> f(1, 2)
        3

    The end: of it.
    """
    page = "\n".join(builder()._docstring(text))
    assert "- `a, b`: two: the numbers.\nMore of them.\n" in page
    assert "**Returns**\n\nThe loss of each update: the mean.\n" in page
    assert "- `ValueError`: a is less than b.\n" in page
    assert page.endswith("```pycon\n>>> f(1, 2)\n3\n\n```\n\nThe end: of it.")


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
    home = builder().rewrite_links((ROOT / "docs/pages/index.md").read_text(encoding="utf-8"))
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


def test_the_python_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    shown = {heading.rpartition(".")[2] for heading in re.findall(r'<h3 id="([\w.]+)" class="doc doc-heading"', page)}
    names = {*preheat.__all__, *integrations.__all__, "ZeROAdamW", "EfficientAttention", "integration_example"}
    assert names - shown == set()
    assert {name for name in errors.__all__ if name != "suggest_nearest"} - shown == set()
    # Examples are code, and what a function returns is not split at its colons.
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert ">>> layer = EfficientAttention(16, 4, dropout=0.0, causal=True, memory_efficient=True)" in text
    assert (
        "{run, steps, loss, validation_loss, tokens_per_second, peak_gib, predicted: {peak_gib, tokens_per_second}"
        in " ".join(text.split())
    )


def test_pages_name_the_newest_tested_releases() -> None:
    pages = {
        name: (ROOT / f"docs/pages/{name}.md").read_text(encoding="utf-8") for name in ("compatibility", "install")
    }
    torch = NEWEST_TESTED["torch"]
    assert f"torch 2.11 to {torch} and transformers 5.23 and {NEWEST_TESTED['transformers']}." in pages["compatibility"]
    assert f"torch 2.11 to {torch} are tested" in " ".join(pages["install"].split())


def test_the_stored_cheat_sheet_is_of_these_techniques() -> None:
    build = builder()
    assert build.STORED_CHEAT_SHEET.read_text(encoding="utf-8") == build.stored_cheat_sheet(), "run: make docs"
    targets = re.findall(r"\]\((\.\./preheat/techniques/\w+\.py)\)", build.stored_cheat_sheet())
    assert len(targets) == len(build.shipped())
    assert all((ROOT / "docs" / target).is_file() for target in targets)


@pytest.mark.parametrize(
    "page",
    [path for path in sorted((ROOT / "docs/pages").glob("*.md")) if ">>> " in path.read_text()],
    ids=lambda path: path.stem,
)
def test_examples_of_pages(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0
