"""Fixes that `preheat doctor --fix` runs: which ones, in which order, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from preheat.cli import main
from preheat.cli.doctor import _apply_fixes, _list_commands
from preheat.core.finding import AppliedFix, Finding, Fix, FixKind, Severity


def test_what_preheat_may_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir(mode=0o777)
    install, mode = Fix(FixKind.INSTALL, "pip --version"), Fix(FixKind.SAFE, f"chmod 700 '{folder}'")
    findings = [
        Finding("kernels", Severity.RISKS, "broken", fix=install),
        Finding("kernels", Severity.NOTE, "optional", fix=Fix(FixKind.INSTALL, "pip install never")),
        Finding("driver", Severity.STOPS, "old", fix=Fix(FixKind.MANUAL, "sudo never")),
        Finding("cache", Severity.SLOWS, "open", fix=mode),
        Finding("cache", Severity.SLOWS, "open", fix=mode),
        Finding("hub", Severity.RISKS, "absent"),
    ]
    commands = _list_commands(findings)
    assert list(commands) == [mode.command, install.command], "what installs packages comes last"
    commands |= {"false": FixKind.SAFE, "preheat-has-no-such-program": FixKind.SAFE}
    assert _apply_fixes(commands, ask=False, quiet=False) == [
        AppliedFix(mode.command, 0),
        AppliedFix(install.command, 0),
        AppliedFix("false", 1),
        AppliedFix("preheat-has-no-such-program", 127),
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    out, error = capfd.readouterr()
    assert out == "", "--json prints one object and nothing else"
    assert "fix: pip --version (installs a package into this environment)" in error
    assert f"(python {sys.version_info.major}.{sys.version_info.minor})" in error, "pip of this environment"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oom"], "doctor oom: names no run"),
        (["demo", "other"], "other: one recipe is checked at a time"),
        (["--set", "batch.size=2"], "--set batch.size=2: no recipe is named"),
        (["--fix"], "--fix: nobody can be asked here; add --yes"),
        (["demo", "--set", "techniques.lorra={}"], "--set techniques.lorra={}: unknown technique 'lorra'"),
        (["llama-3.1-8b"], "llama-3.1-8b: is a model, not a recipe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}"), error
    assert error.count("\n") == 1
