"""The page on data and tasks says what the code does: its rows, settings, checks and tasks are read by it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from preheat.data.chat.template import Template
from preheat.data.preflight import CHECKS
from preheat.data.rows.formats import detect_layout
from preheat.data.rows.schemas import LAYOUTS
from preheat.evaluation.best import Criterion, criterion_of
from preheat.evaluation.tasks import find_built_in, load_task
from preheat.recipe import Data, parse

PAGE = (Path(__file__).parents[3] / "docs/pages/data.md").read_text(encoding="utf-8")
ROWS, TASK_ROW = (
    [json.loads(line) for line in block.splitlines()] for block in re.findall(r"```json\n(.*?)\n```", PAGE, re.S)
)


def table(first: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = PAGE.split(f"| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def test_its_rows_are_recognised_and_each_layout_has_one() -> None:
    found = [detect_layout(Data(), list(row), row, "row").kind for row in ROWS]
    assert found == ["text", "prompt", "alpaca", "messages", "sharegpt", "preference", "kto"]
    names, needs, reads = ([tuple(re.findall(r"`(\w+)`", row[n])) for row in table("layout")] for n in range(3))
    assert {name: found for (name,), *found in zip(names, needs, reads, strict=True)} == {
        k: list(v) for k, v in LAYOUTS.items()
    }


def test_its_checks_are_those_that_there_are() -> None:
    rows = {re.findall(r"\w+", row[0])[0]: row for row in table("check")}
    assert list(rows) == list(CHECKS)
    for name, check in CHECKS.items():
        assert rows[name][1] == check.what
        above = f"above {100 * check.above:.0f} %" if check.above else "any occurrence"
        begins = "never: warning only" if check.above == 1 else above
        assert rows[name][2] == begins
        assert (rows[name][3] == "left out") is check.drops


def test_its_settings_and_tasks_are_read(tmp_path: Path) -> None:
    settings, warned, cleaned, task, early = re.findall(r"```yaml\n(.*?)\n```", PAGE, re.S)
    for block in (settings, warned, cleaned):
        parse(yaml.safe_dump({**yaml.safe_load(block), "stop": {"max_steps": 1}}))
    assert criterion_of(parse(early)) == Criterion("validation_loss", False, 0.002, 4, 1.8, keep=True)
    (tmp_path / "colours.yaml").write_text(task)
    assert load_task(tmp_path / "colours.yaml").kind == "multiple_choice"
    assert set(TASK_ROW[0]) == {"question", "options", "right"}
    assert {re.findall(r"\w+", row[0])[0] for row in table("built in")} == set(find_built_in())


def test_its_template_marks_what_the_assistant_says() -> None:
    (text,) = re.findall(r"```jinja\n(.*?)\n```", PAGE, re.S)
    template = Template(text, variables={"eos_token": "</s>"}, special=("</s>",))
    talk = [
        {"role": r, "content": c}
        for r, c in (("user", "Hi"), ("assistant", "Hello"), ("user", "So?"), ("assistant", "Yes"))
    ]
    pieces = template.spans(talk)
    assert [piece.text for piece in pieces if piece.trained] == ["Hello</s>", "Yes</s>"]
    assert "".join(piece.text for piece in pieces) == "user: Hi\nHello</s>user: So?\nYes</s>"
