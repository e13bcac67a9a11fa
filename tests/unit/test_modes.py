"""Options and keys that nothing reads in the mode at hand are refused, in one line."""

from __future__ import annotations

import pytest

from preheat.cli import app, main
from preheat.cli.modes import MODES

PLAN = ["plan", "llama-3.1-8b", "--gpu", "RTX-4090"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN, "--inference", "--set", "batch.size=512"], "--set 'batch.size=512': would change nothing: --inference plans"),
        ([*PLAN, "--inference", "--set", "optimizer.lr=1"], "--set 'optimizer.lr=1'"),
        ([*PLAN, "--inference", "--set", "techniques.lora={}"], "--set 'techniques.lora={}'"),
        ([*PLAN, "--inference", "--method", "lora"], "--method 'lora'"),
        ([*PLAN, "--inference", "--batch-tokens", "4096"], "--batch-tokens 4096"),
        ([*PLAN, "--inference", "--price", "2"], "--price 2.0"),
        ([*PLAN, "--inference", "--out", "x.yaml"], "--out"),
        ([*PLAN, "--compute-budget", "1e21"], "MODEL|RECIPE 'llama-3.1-8b': would change nothing"),
        (["plan", "--compute-budget", "1e21", "--gpu", "H100"], "--gpu 'H100'"),
        (["plan", "--compute-budget", "1e21", "--inference"], "--inference: would change nothing"),
        ([*PLAN, "--set", "hardware.threads=2"], "--set 'hardware.threads=2': would change nothing: --gpu plans"),
        (["train", "demo", "--restarts", "2"], "--restarts 2: would change nothing: one process"),
        (["train", "demo", "--dry-run", "--force"], "--force: would change nothing: --dry-run trains nothing"),
        (["bench", "demo", "--ablate", "--tokens", "64"], "--tokens 64: would change nothing: techniques"),
        (["bench", "demo", "--ablate", "--variant", "cache=int8"], "--variant"),
        (["bench", "runs/x", "--inference", "--steps", "5"], "--steps 5"),
        (["eval", "runs/x", "--limit", "5"], "--limit 5: would change nothing: no task"),
        (["eval", "runs/x", "--samples", "x.jsonl"], "--samples"),
        (["generate", "runs/x", "--seed", "5"], "--seed 5: would change nothing: temperature 0"),
        (["chat", "runs/x", "--seed", "5"], "--seed 5"),
        (["compress", "runs/x", "--recipe", "edge", "--rows", "5"], "--rows 5"),
        (["nettest", "--port", "29500"], "--port 29500"),
        (
            ["try", "--technique", "mixed_precision", "--zero-stage", "2"],
            "--zero-stage 2: would change nothing: it is for zero",
        ),
        (["try", "--technique", "zero", "--precision", "fp16"], "--precision 'fp16'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_nothing_reads_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"error: {said}"), error
    assert error.count("\n") == 1


def test_what_is_read_is_not_refused(capsys: pytest.CaptureFixture[str]):
    for arguments in (
        [*PLAN, "--inference", "--length", "4096", "--set", "batch.length=2048", "--count", "2", "--json"],
        ["plan", "--compute-budget", "1e21", "--json"],
        ["plan", "demo", "--no-such-option"],  # told by its own message
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "would change nothing" not in capsys.readouterr().err


def test_every_mode_names_parameters_of_its_command():
    import typer

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, modes in MODES.items():
        parameters = {parameter.name for parameter in commands[name].params}
        assert type(commands[name]).__name__ == "Command"
        for mode in modes:
            assert set(mode.unread) <= parameters
