"""ZeROAdamW on two processes over gloo against AdamW on one: the same losses and weights, and sharded states."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.ops.optim.zero import ZeROAdamW
from preheat.ops.toy_decoder import Decoder, PlainAttention

from ..conftest import difference
from .processes import processes

WORLD, STEPS, LENGTH = 2, 4, 16


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocabulary=40, dim=16, num_layers=2, length=LENGTH, attention=lambda: PlainAttention(16, 2))


def rows() -> torch.Tensor:
    return torch.randint(40, (STEPS, 8, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def train(m: Any, optimizer: Any, clip: Any, share: slice, parts: int) -> list[float]:
    losses = []
    for batch in rows():
        mine, total = batch[share], 0.0
        for part in mine.split(len(mine) // parts):
            loss = m.loss(part[:, :-1], part[:, 1:]) / parts
            loss.backward()
            total += float(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def work(rank: int, folder: Path) -> None:
    """One process: every stage, plain and with accumulation."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for stage, parts in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)):
        m = model()
        whole = sum(p.numel() for p in m.parameters())
        optimizer = ZeROAdamW(m.parameters(), lr=0.01, weight_decay=0.1, stage=stage, module=m if stage == 3 else None)
        share = slice(rank * 4, rank * 4 + 4)
        losses = train(m, optimizer, lambda optimizer=optimizer: optimizer.clip_grad_norm_(0.5), share, parts)
        weights = {n: p.detach() for n, p in m.named_parameters()}
        if stage == 3:
            weights = {n: p.full_tensor() for n, p in weights.items()}  # type: ignore[operator]
        kept = optimizer.state_bytes() / (8 * whole)
        found[f"{stage}-{parts}"] = {"losses": losses, "states": kept}
        torch.save(weights, folder / f"{stage}-{parts}-{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    with processes(work, WORLD, folder):
        pass
    return folder


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_give_the_losses_and_weights_of_one(several: Path, stage: int, parts: int) -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1)
    losses = train(m, optimizer, lambda: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5), slice(0, 8), 1)
    made = [json.loads((several / f"{rank}.json").read_text())[f"{stage}-{parts}"] for rank in range(WORLD)]
    mean = [sum(values) / WORLD for values in zip(*(f["losses"] for f in made), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)
    wanted = dict(m.state_dict())
    for rank in range(WORLD):
        weights = torch.load(several / f"{stage}-{parts}-{rank}.pt")
        assert difference(weights, wanted) < 2e-5
        assert made[rank]["states"] == pytest.approx(1 / WORLD, abs=0.05)


def test_on_one_process_it_is_adamw_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.ops.optim import zero

    monkeypatch.setattr(zero, "_said", set())
    m = model()
    twin = copy.deepcopy(m)
    with pytest.warns(UserWarning, match="nothing is sharded"):
        ours = ZeROAdamW(m.parameters(), lr=0.01, weight_decay=0.1, stage=2)
    ours = ZeROAdamW(m.parameters(), lr=0.01, weight_decay=0.1, stage=2)  # said once
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    losses = train(m, ours, lambda: ours.clip_grad_norm_(0.5), slice(0, 8), 1)
    assert losses == train(twin, theirs, lambda: torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5), slice(0, 8), 1)
    with pytest.warns(UserWarning, match="already on the CPU"):
        ZeROAdamW(m.parameters(), cpu_offload=True)


def test_states_are_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.ops.optim import zero

    monkeypatch.setattr(zero, "_say", lambda words: None)
    m = model()
    a = ZeROAdamW(m.parameters(), lr=0.01)
    train(m, a, lambda: None, slice(0, 8), 1)
    twin = copy.deepcopy(m)
    b = ZeROAdamW(twin.parameters(), lr=0.01)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert train(m, a, lambda: None, slice(0, 8), 1) == train(twin, b, lambda: None, slice(0, 8), 1)


def test_offloaded_states_make_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's copy of the weights is updated and sent back; forced here, where host and device are one."""
    from preheat.ops.optim import zero

    monkeypatch.setattr(zero, "_say", lambda words: None)
    m = model()
    twin = copy.deepcopy(m)
    ours, plain = ZeROAdamW(m.parameters(), lr=0.01), ZeROAdamW(twin.parameters(), lr=0.01)
    ours.offload = True
    assert train(m, ours, lambda: None, slice(0, 8), 1) == train(twin, plain, lambda: None, slice(0, 8), 1)
    assert all("master" in state for state in ours.state.values())


def test_what_zero_refuses() -> None:
    with pytest.raises(ValueError, match="not a ZeRO stage"):
        ZeROAdamW(model().parameters(), stage=4)
    with pytest.raises(ValueError, match="needs module="):
        ZeROAdamW(model().parameters(), stage=3)


def test_the_names_that_users_import() -> None:
    from preheat.techniques import integration_example
    from preheat.techniques.integration import integration_example as same
    from preheat.techniques.zero_optimizer import ZeROAdamW as Lazy

    assert integration_example is same
    assert Lazy is ZeROAdamW


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_example_of_all_together(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.ops.optim import zero
    from preheat.techniques import integration_example

    monkeypatch.setattr(zero, "_say", lambda words: None)
    made = integration_example(32, 1, 2, 2, 2, 2, False, True, precision, length=32, steps=12, lr=0.01)
    assert made["losses"][0] == pytest.approx(5.6, abs=0.4)  # ln 256, before it has learned
    assert made["losses"][-1] < made["losses"][0] - 1
    assert made["tokens_per_second"] > 0
    assert made["optimizer_bytes"] == pytest.approx(8 * made["parameters"], rel=0.01)
    assert "nothing is sharded" in made["on"]["zero"]


def test_accumulation_leaves_the_example_as_it_is() -> None:
    from preheat.techniques import integration_example

    one, four = (
        integration_example(32, 1, 2, 8 // parts, parts, 0, False, False, "fp32", length=32, steps=3)["losses"]
        for parts in (1, 4)
    )
    assert four == pytest.approx(one, rel=1e-5)
