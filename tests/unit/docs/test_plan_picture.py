"""The picture of a plan in the README is an image that browsers accept, of what the README says."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]


def test_the_picture_is_well_formed_and_shows_the_readmes_answer() -> None:
    picture = ElementTree.fromstring((ROOT / "docs" / "plan.svg").read_text(encoding="utf-8"))
    texts = [e for e in picture.iter() if e.tag.endswith("}text")]
    lines: dict[str, str] = {}
    for element in texts:
        lines[element.get("y", "")] = lines.get(element.get("y", ""), "") + (element.text or "")
    shown = {" ".join(line.split()) for line in lines.values()}
    excerpt = re.findall(r"^#   (.*)$", (ROOT / "README.md").read_text(encoding="utf-8").split("--method qlora\n")[1].split("```")[0], re.MULTILINE)  # fmt: skip
    assert len(excerpt) >= 3
    for line in excerpt:
        assert " ".join(line.split()) in shown, line
