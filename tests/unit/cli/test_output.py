"""What commands print: foreign text is cleaned, and is never read as markup."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import preheat
from preheat.cli import main
from preheat.cli.views.output import build_console, build_progress_bar, print_progress, say, write_text

FOREIGN = "d[/x] [bold]b[/bold] :smile: \x1b[31mred\x07\x9b2J\u202e"
CLEAN = "d[/x] [bold]b[/bold] :smile: ␛[31mred␇�2J�"
HOUSE = Path(preheat.__file__).parent / "cli"


def test_only_the_screen_prints():
    """Safe by default: no command can print but through `preheat.cli.views.output`."""
    for path in HOUSE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        if path.name != "output.py":
            assert not names & {"print"}, path
            assert not imported & {"Console", "TextColumn", "Progress", "Status"}, path


def test_rich_shows_foreign_text_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    monkeypatch.setenv("COLUMNS", "200")
    screen = build_console()
    table = Table(FOREIGN, title=FOREIGN, box=None)
    table.add_row(FOREIGN)
    for part in (FOREIGN, Text(FOREIGN), table, Rule(FOREIGN)):
        screen.print(part, soft_wrap=True)
    screen.note(FOREIGN)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert out.count("d[/x] [bold]b[/bold] :smile: ␛[31mred") == 7


def test_status_and_bars_take_foreign_text(capsys: pytest.CaptureFixture[str]):
    screen = build_console()
    with screen.status(FOREIGN) as status:
        status.update(FOREIGN)
    with build_progress_bar(screen, "{task.description}") as progress:
        progress.update(progress.add_task("x"), description=FOREIGN)
    assert "\x1b[31m" not in capsys.readouterr().out


def test_plain_lines(capsys: pytest.CaptureFixture[str]):
    say(FOREIGN)
    say(FOREIGN, error=True)
    print_progress(FOREIGN)
    write_text("\x1b[31m")  # a model's text goes into a pipe as it is
    out, error = capsys.readouterr()
    assert out == f"{CLEAN}\n\x1b[31m"
    assert error == f"{CLEAN}\n{CLEAN}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--count", "a\x1b[31m" + "9" * 100_000],
        ["plan", "--aim", "\x1b[31m[/x]" + "z" * 100_000],
        ["plan", "--no-such\x1b[31m" + "z" * 100_000],
        ["nope\x1b[31m" + "z" * 100_000],
        ["train"],
        ["launch", "demo", "--scheduler", "\x07\n\n"],
    ],
    ids=["number", "choice", "option", "command", "nothing", "lines"],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    out, error = capsys.readouterr()
    assert ended.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 700
    assert "\x1b" not in error
    assert "\x07" not in error
    assert json.loads(out)["exit_code"] == 2


def test_shells_complete_commands_and_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("_PREHEAT_COMPLETE", "complete_bash")
    for line, place, expected in (
        ("preheat tr", 1, {"track", "train", "try"}),
        ("preheat launch x --scheduler s", 4, {"slurm", "skypilot"}),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(place))
        with pytest.raises(SystemExit):
            main([])
        assert set(capsys.readouterr().out.split()) == expected


def test_a_passing_line_is_no_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A line that wraps stays on the screen: clearing reaches its last row alone."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    print_progress("x" * 200)
    assert capsys.readouterr().err.count("x") == 39
