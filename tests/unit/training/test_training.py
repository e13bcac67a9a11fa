"""Accumulation equals the big batch; schedules; checkpoints that are whole or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from preheat.core import Slot
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RunError
from preheat.recipe import Schedule, override
from preheat.training.lr_schedule import compute_lr_factor

from ...conftest import DEVICE, difference, split, tiny, uneven


@pytest.mark.parametrize("techniques", ["{}", "{chunked_loss: {rows: 100}, efficient_attention: {}}"])
def test_one_batch_of_32_has_the_gradients_of_4_by_8_and_32_by_1(techniques: str) -> None:
    """With uneven masks and documents, in fp32: relative norm of each tensor within 1e-6."""
    found = []
    for sizes in ([32], [8] * 4, [1] * 32, [5, 20, 7]):
        b = build(tiny(techniques, rows=32), vocabulary=96, device=DEVICE)
        loss = accumulate_gradients(b, split(uneven(rows=32), sizes))
        found.append((float(loss.total / loss.weight), {n: p.grad for n, p in b.parameters()}))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert difference(grads, found[0][1]) < 1e-6


def test_averaging_means_would_not_pass_that_test() -> None:
    """The mean of micro-batches' means, as often done, differs where masks are uneven: the test above can fail."""
    b = build(tiny(rows=32), vocabulary=96, device=DEVICE)
    whole = uneven(rows=32)
    accumulate_gradients(b, [whole])
    right = {n: p.grad.clone() for n, p in b.parameters()}
    b.optimizer.zero_grad()
    for part in split(whole, [8] * 4):
        part.weight *= 4  # each micro-batch's own mean, averaged over four
        accumulate_gradients(b, [part])
    assert difference({n: p.grad for n, p in b.parameters()}, right) > 1e-3


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_schedules(kind: str) -> None:
    schedule, total = Schedule(kind=kind, warmup_ratio=0.1, decay_ratio=0.2, min_lr_ratio=0.1), 1000  # type: ignore[arg-type]
    shares = [compute_lr_factor(schedule, step, total) for step in range(total)]
    assert shares[0] == pytest.approx(1 / 100)
    assert shares[99] == shares[100] == 1.0
    assert max(shares) == 1.0
    if kind == "cosine":
        assert shares[550] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.5)) / 2)
        assert shares[-1] == pytest.approx(0.1, abs=1e-3)
    elif kind == "wsd":
        assert shares[799] == 1.0
        assert shares[900] == pytest.approx(0.55)
        assert shares[-1] == pytest.approx(0.1, abs=0.01)
    else:
        assert set(shares[99:]) == {1.0}


def test_clipping_scales_to_the_limit_and_reports_the_norm_before() -> None:
    def norms(clip: float) -> tuple[float, float]:
        b = build(override(tiny(), f"optimizer.max_grad_norm={clip}"), vocabulary=96, device=DEVICE)
        accumulate_gradients(b, [uneven()])
        before = float(b.slot(Slot.CLIP)(b))
        return before, math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in b.parameters()))

    whole, untouched = norms(0)
    assert whole == pytest.approx(untouched, rel=1e-6)
    before, after = norms(whole / 2)
    assert before == pytest.approx(whole, rel=1e-6)
    assert after == pytest.approx(whole / 2, rel=1e-4)
    assert norms(whole * 2)[1] == pytest.approx(whole, rel=1e-6)


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    b = build(tiny(), vocabulary=96, device=DEVICE)
    accumulate_gradients(b, [uneven()])
    before = {n: p.detach().clone() for n, p in b.parameters()}
    next(p for _, p in b.parameters()).grad[0, 0] = float("inf")
    norm, finite = update(b, 0.1).tolist()
    assert (finite, math.isfinite(norm)) == (0.0, False)
    assert all(torch.equal(p, before[n]) for n, p in b.parameters())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _saved(tmp_path: Path, steps: int = 3, keep: int = 2) -> Path:
    b = build(tiny(), vocabulary=96, device=DEVICE)
    for n in range(1, steps + 1):
        accumulate_gradients(b, [uneven()])
        update(b, 0.01)
        checkpoint.save(b, checkpoint.Progress(step=n), tmp_path, keep=keep)
    return tmp_path


def test_the_last_n_are_kept_and_nothing_is_pickled(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["step-2", "step-3"]
    for file in (folder / "step-3").iterdir():
        assert file.suffix in (".safetensors", ".json"), file
        if file.suffix == ".json":
            json.loads(file.read_text())


def test_a_large_state_is_saved_in_small_files_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 20_000)
    folder = _saved(tmp_path, steps=1)
    assert len(list((folder / "step-1").glob("*.safetensors"))) > 3
    b = build(override(tiny(), "seed=9"), vocabulary=96, device=DEVICE)
    checkpoint.load(b, folder / "step-1")
    again = build(tiny(), vocabulary=96, device=DEVICE)
    accumulate_gradients(again, [uneven()])
    update(again, 0.01)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(b.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-10]), "bytes"),
        (lambda f: f.write_bytes(f.read_bytes()[:5000] + b"\x01" + f.read_bytes()[5001:]), "altered"),
        (lambda f: f.unlink(), "missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, spoil: object, words: str) -> None:
    folder = _saved(tmp_path)
    (file,) = (folder / "step-3").glob("*.safetensors")
    spoil(file)  # type: ignore[operator]
    found, damaged = checkpoint.find(folder)
    assert found is not None
    assert found.name == "step-2"
    assert words in damaged[0][1]


def test_a_full_disk_harms_no_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _saved(tmp_path)
    b = build(tiny(), vocabulary=96, device=DEVICE)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match=r"no space left.*--resume"):
        checkpoint.save(b, checkpoint.Progress(step=4), folder, keep=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step-2", "step-3"]
    assert checkpoint.find(folder)[1] == []
