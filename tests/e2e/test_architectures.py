"""Architectures of different kinds through the columns of `make architectures` that the unit tests leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..architectures.columns import COLUMNS, Subject, fault_of, write_data
from ..architectures.fsdp import compare

# Gated delta net, Mamba-2 with experts, sinks with windows, convolution, shared keys and values.
KINDS = ["qwen3_5_text", "granitemoehybrid", "gpt_oss", "lfm2", "gemma4_text"]
BY_COMMANDS = ["plan", "resume", "export", "generation", "LoRA"]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("architectures")
    write_data(folder)
    return {name: Subject(name, folder) for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_an_architecture_passes_the_columns(
    name: str, subjects: dict[str, Subject], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(cache))
    cells = {title: fault_of(COLUMNS[title], subjects[name]) for title in BY_COMMANDS}
    assert cells == dict.fromkeys(BY_COMMANDS, "")


def test_two_processes_train_an_architecture_as_one_does(subjects: dict[str, Subject], tmp_path: Path) -> None:
    assert compare(list(subjects.values()), tmp_path) == dict.fromkeys(KINDS, (True, ""))
