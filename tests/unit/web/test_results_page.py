"""Results of other commands are shown as their pages, which can do nothing in the dashboard."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from preheat.core.lr_range import LrPoint, LrRange
from preheat.files import to_json
from preheat.report.lr_range_page import write_lr_range
from preheat.run.layout import claim_folder

from .test_runs_page import connect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the page of a learning rate test, as the command writes it."""
    place = tmp_path / "runs" / "deep" / "lr"
    claim_folder(place, "find-lr", ("lr-range.json", "lr-range.html"))
    points = tuple(LrPoint(10.0**-n, 3.0 - n / 10, 3.0, 1.0) for n in range(6, 0, -1))
    result = LrRange(steps=6, points=points, diverged_at=None, lowest=0.01, steepest=0.1, suggested=0.001, present=0.1)
    (place / "lr-range.json").write_text(to_json(result))
    write_lr_range(place / "lr-range.json")
    return tmp_path / "runs"


def test_a_result_is_listed_and_shown_as_its_page(folder: Path) -> None:
    client = connect(folder)
    page = client.get("/results").text
    links = re.findall(r'href="(/results/\w+)">([^<]+)<', page)
    assert [name for _, name in links] == ["deep/lr"]
    assert "Learning rate test" in page
    url = links[0][0]
    assert f'src="{url}/file" sandbox="allow-same-origin"' in client.get(url).text
    answer = client.get(f"{url}/file")
    assert answer.text == (folder / "deep" / "lr" / "lr-range.html").read_text()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script" not in policy
    assert client.get(f"{url}/file?save=1").headers["content-disposition"] == 'attachment; filename="lr-range.html"'


def test_foreign_pages_links_and_paths_are_not_shown(folder: Path, tmp_path: Path) -> None:
    client = connect(folder)
    url = re.findall(r'href="(/results/\w+)"', client.get("/results").text)[0]
    (tmp_path / "secret.html").write_text((folder / "deep" / "lr" / "lr-range.html").read_text())
    for path in ("../../secret.html", "..%2f..%2fsecret.html", "lr-range.json", "/etc/passwd"):
        assert client.get(f"{url}/{path}").status_code in (400, 404)
    page = folder / "deep" / "lr" / "lr-range.html"
    page.unlink()
    assert (
        "lr-range.html does not exist, or is a link, which is not followed; run the command again."
        in client.get(url).text
    )
    page.symlink_to(tmp_path / "secret.html")
    assert client.get(f"{url}/file").status_code == 404
    page.unlink()
    page.write_text("<html><body>mine</body></html>")
    assert "was not written by preheat" in client.get(url).text
    (folder / "deep" / "lr" / "lr-range.json").unlink()
    assert client.get(url).status_code == 404
    assert "There are no results in" in connect(folder).get("/results").text
    # A pipe would block the server for ever.
    os.mkfifo(folder / "deep" / "lr" / "bench.json")
    assert "There are no results in" in connect(folder).get("/results").text
