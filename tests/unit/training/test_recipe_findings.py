"""Findings about a recipe on this machine: all at once, each with its key and its fix."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from preheat.core.finding import Finding, FixKind, Severity
from preheat.training.recipe_findings import check_recipe

TINY = """\
name: tiny
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 320}
data: {vocab_size: 300}
hardware: {device: cpu}
stop: {max_steps: 1}
"""


def check(more: str) -> list[Finding]:
    findings = check_recipe(TINY + more)
    assert all(finding.of_recipe for finding in findings)
    return findings


def test_a_recipe_that_runs_here_is_one_finding() -> None:
    (finding,) = check("techniques: {efficient_attention: {}, chunked_loss: {rows: 64}}\n")
    assert (finding.part, finding.severity) == ("recipe", Severity.OK)


def test_all_problems_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torchao" else find(name, *more)
    )
    text = TINY.replace("data: {", "data: {source: none.jsonl, ") + "tracking: {to: [nix]}\ntechniques: {fp8: {}}\n"
    findings = check_recipe(text)
    assert {finding.severity for finding in findings} == {Severity.STOPS}
    # Several of fp8: no GPU, no bf16, no torchao.
    assert list(dict.fromkeys((finding.part, finding.message.split(":")[0]) for finding in findings)) == [
        ("tracking", "tracking.to"),
        ("data", "data.source none.jsonl"),
        ("techniques", "techniques.fp8"),
    ]
    fixes = [finding.fix for finding in findings if finding.fix is not None]
    assert [(fix.kind, fix.command) for fix in fixes] == [(FixKind.INSTALL, "pip install torchao")]


def test_a_model_that_is_not_here_stops_the_checks_that_need_it() -> None:
    (finding,) = check_recipe("name: x\nmodel: {path: ./none}\nhardware: {device: cpu}\nstop: {max_steps: 1}\n")
    assert (finding.part, finding.severity) == ("model", Severity.STOPS)
    assert "none" in finding.message


def test_bf16_on_a_cpu_without_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    (finding,) = check("techniques: {mixed_precision: {mode: bf16_weights}}\n")
    assert finding.severity is Severity.SLOWS
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert check("techniques: {mixed_precision: {mode: bf16_weights}}\n")[0].severity is Severity.OK
