"""Options and keys that nothing reads in the mode at hand are refused or named, in one line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from preheat.cli import app, main
from preheat.cli.options.bench_options import InferenceBenchOptions, TechniqueBenchOptions
from preheat.cli.options.plan_options import ServingPlanOptions, TrainingPlanOptions
from preheat.cli.options.unused import MODES

PLAN = ["plan", "llama-3.1-8b", "--gpu", "RTX-4090"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [*PLAN, "--inference", "--set", "batch.size=512"],
            "--set 'batch.size=512': would change nothing: --inference plans",
        ),
        ([*PLAN, "--inference", "--set", "optimizer.lr=1"], "--set 'optimizer.lr=1'"),
        ([*PLAN, "--inference", "--set", "techniques.lora={}"], "--set 'techniques.lora={}'"),
        ([*PLAN, "--inference", "--method", "lora"], "--method 'lora'"),
        ([*PLAN, "--inference", "--batch-tokens", "4096"], "--batch-tokens 4096"),
        ([*PLAN, "--batch", "4"], "--batch 4: would change nothing: it is for --inference"),
        ([*PLAN, "--inference", "--price", "2USD/h"], "--price '2USD/h'"),
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
        (
            ["eval", "none", "--tasks", "cloze=x.jsonl", "--rows", "4"],
            "--rows 4: would change nothing: no text is named",
        ),
        (["eval", ".", "--data", "x.txt", "--base", "y"], "--base 'y': would change nothing: it is for adapters"),
        (["generate", "runs/x", "--no-chat", "--template", "chatml"], "--template 'chatml'"),
        (["compress", "runs/x", "--recipe", "edge", "--rows", "5"], "--rows 5"),
        (
            ["compress", "runs/x", "--recipe", "edge", "--method", "int8"],
            "--method 'int8': would change nothing: --recipe defines",
        ),
        (["compress", "runs/x", "--recipe", "edge", "--bits", "3"], "--bits 3.0"),
        (["compress", "runs/x", "--recipe", "edge", "--set", "group=3"], "--set 'group=3'"),
        (["plan", "demo", "--aim", "x" * 100_000], "Invalid value for '--aim': 'xxx"),
        (["plan", "demo", f"--{'x' * 100_000}"], "No such option: --xxx"),
        (["nettest", "--port", "29500"], "--port 29500"),
        (["doctor", "--yes"], "--yes: would change nothing: it answers the questions of --fix"),
        (["doctor", "oom", "runs/x", "--fix"], "--fix: would change nothing: oom reads the folder of a run"),
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
    assert len(error) < 400


def test_what_is_read_is_not_refused(capsys: pytest.CaptureFixture[str]):
    for arguments in (
        [*PLAN, "--inference", "--length", "4096", "--set", "batch.seq_len=2048", "--count", "2", "--json"],
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
            assert {*mode.unread, *(mode.read or ())} <= parameters


@pytest.mark.parametrize(
    ("name", "jobs", "choose"),
    [
        ("plan", (TrainingPlanOptions, ServingPlanOptions), {"inference", "compute_budget", "prices", "schema"}),
        ("bench", (TechniqueBenchOptions, InferenceBenchOptions), {"inference"}),
    ],
)
def test_every_option_is_read_by_a_job_or_chooses_one(name: str, jobs: tuple[type, ...], choose: set[str]):
    import typer

    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    read = {field.name for job in jobs for field in fields(job)}
    assert read | choose | {"trust_remote_code"} == {parameter.name for parameter in command.params}


def test_keys_of_a_recipe_that_is_planned_for_inference_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {size: 1M, config: {num_hidden_layers: 2}}\nbatch: {size: 4, seq_len: 64}\noptimizer: {lr: 1.0e-3, eps: 1.0e-7}\n"
        "stop: {max_steps: 3}\nhardware: {threads: 1}\n"
    )

    def told(*more: str) -> tuple[str, dict[str, Any]]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(recipe), "--gpu", "H100", "--json", *more])
        out, error = capsys.readouterr()
        assert ended.value.code == 0, error
        return error, json.loads(out)

    error, two = told("--inference")
    first, second = error.splitlines()
    assert first == (
        "note: --inference plans serving, not training: nothing reads batch.size, optimizer.*, stop.max_steps of the recipe"
    )
    assert second == "note: --gpu plans for another device: nothing reads hardware.threads of the recipe"
    # `model.config` is read: a layer less.
    _, one = told("--inference", "--set", "model.config.num_hidden_layers=1")
    assert one["parameters"] < two["parameters"]
    assert one["cache_bytes_per_token"] == two["cache_bytes_per_token"] / 2


def test_keys_that_a_look_at_data_or_a_bench_does_not_read_are_named(capsys: pytest.CaptureFixture[str]):
    for arguments, said in (
        (
            ["data", "gone.yaml", "--set", "batch.size=8", "--set", "batch.seq_len=16"],
            "--set 'batch.size=8': would change nothing",
        ),
        (
            ["bench", "gone.yaml", "--ablate", "--set", "stop.max_steps=8", "--set", "optimizer.lr=1"],
            "--set 'stop.max_steps=8'",
        ),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        warning, error = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {said}")
        assert error.startswith("error: gone.yaml: no such file")
