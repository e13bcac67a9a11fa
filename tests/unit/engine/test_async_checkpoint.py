"""Checkpoints written beside the steps: as the steps' own would be, one at a time, and no error of theirs is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from preheat.core import Build
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RunError

from ...conftest import DEVICE, tiny, uneven


def made(*, beside: bool) -> Build:
    torch.manual_seed(0)
    more = f"checkpoint: {{every: 1, keep: 3, asynchronous: {str(beside).lower()}}}\n"
    return build(tiny(more=more), vocabulary=96, device=DEVICE)


def step(b: Build) -> None:
    accumulate_gradients(b, [uneven()])
    update(b, 0.01)


def steps_go_on(saving: Saving) -> None:
    for _ in range(2000):
        saving.poll()
        time.sleep(0.01)


def tensors(folder: Path) -> dict[str, Any]:
    assert checkpoint._find_damage(folder) is None
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it opens."""
    opens = threading.Event()
    write = checkpoint.write

    def waits(*args: Any, **how: Any) -> Path:
        assert opens.wait(20)
        return write(*args, **how)

    monkeypatch.setattr(checkpoint, "write", waits)
    return opens


def test_codes_are_not_read_as_moments(tmp_path: Path) -> None:
    """An optimizer's moments may have been stored in 8 bits by another version: torch would convert the codes."""
    b, fresh = made(beside=False), made(beside=False)
    step(b)
    p = next(p for _, p in b.parameters() if p.ndim == 1)
    b.optimizer.state[p]["exp_avg"] = torch.full_like(p, 127, dtype=torch.uint8)
    path = checkpoint.save(b, checkpoint.Progress(step=1), tmp_path, keep=1)
    with pytest.raises(RunError, match=r"is stored as torch.uint8 and needed as torch.float32: another version"):
        checkpoint.load(fresh, path)


def test_what_is_written_later_is_what_stood_then(tmp_path: Path, gate: threading.Event) -> None:
    plain, b = made(beside=False), made(beside=True)
    torch.manual_seed(1)
    step(plain)
    gate.set()
    assert [s.step for s in Saving(plain, tmp_path / "plain").save(checkpoint.Progress(step=1))] == [1]
    gate.clear()
    torch.manual_seed(1)
    step(b)
    saving = Saving(b, tmp_path / "beside")
    assert saving.save(checkpoint.Progress(step=1)) == []
    torch.rand(3)
    step(b)  # moves weights, states and generators
    assert saving.poll() == []
    assert not (tmp_path / "beside").exists()
    gate.set()
    second = saving.save(checkpoint.Progress(step=2))  # waits for the first: never two at a time
    assert [s.step for s in second] == [1]
    assert (tmp_path / "beside" / "step-1").is_dir()
    assert [s.step for s in saving.wait()] == [2]
    assert saving.wait() == []
    wanted, found = tensors(tmp_path / "plain" / "step-1"), tensors(tmp_path / "beside" / "step-1")
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert not torch.equal(tensors(tmp_path / "beside" / "step-2")["generator.cpu.0"], wanted["generator.cpu.0"])


def test_an_error_of_writing_is_raised_in_the_loop_and_harms_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = made(beside=True)
    saving = Saving(b, tmp_path)
    saving.save(checkpoint.Progress(step=1))
    saving.wait()

    def full(*args: object, **how: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    saving.save(checkpoint.Progress(step=2))
    with pytest.raises(RunError, match=r"step-2: cannot be written \(no space left.*--resume"):
        steps_go_on(saving)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1"]
    assert checkpoint.find(tmp_path)[0] == tmp_path / "step-1"
    saving.save(checkpoint.Progress(step=2))
    assert "no space left" in str(saving.close())  # where the loop has failed already


@pytest.mark.parametrize(
    ("stated", "kind", "beside"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_where_it_is_done(stated: bool | None, kind: str, beside: bool) -> None:
    from preheat.core import Device
    from preheat.recipe import override

    recipe = override(
        tiny(), "checkpoint.every=5", *([] if stated is None else [f"checkpoint.asynchronous={str(stated).lower()}"])
    )
    assert checkpoint.is_async(recipe, Device(kind, "test", 1)) is beside
    assert not checkpoint.is_async(
        override(recipe, "checkpoint.every=0"), Device(kind, "test", 1)
    )  # nothing follows the last
