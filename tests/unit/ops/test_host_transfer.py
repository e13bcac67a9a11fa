"""Offload without a device: copies that are made as late as their events allow, so that a wait that is missing is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.core import Build, Phase, Slot, registry
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RunError
from preheat.ops.memory.activation_offload import ActivationOffload
from preheat.ops.memory.host_transfer import AsyncHostCopy, Copy, HostCopy
from preheat.ops.optim.cpu_adamw import HostAdamW
from preheat.ops.optim.optimizers import group_by_decay
from preheat.planning.dispatch_recorder import Recorder
from preheat.planning.dry_run import peak_by_phase
from preheat.techniques.activation_checkpointing import checkpoint_layers

from ...conftest import DEVICE, difference, tiny, uneven


class _Late:
    """An event of a copy that is made only when somebody waits for it."""

    def __init__(self, copy: Copy, link: LateLink):
        self.copy, self.link = copy, link

    def wait(self) -> None:
        self.link.finish(self.copy)

    synchronize = wait


class LateLink(HostCopy):
    """As streams may do at worst: a target holds NaN until its copy is waited for; copies of one direction end in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.open: dict[str, list[tuple[Copy, Tensor, Tensor]]] = {"out": [], "back": []}

    def _begin(self, way: str, source: Tensor, target: Tensor) -> Copy:
        self.log.append((way, source.numel()))
        copy = Copy(target.fill_(float("nan")), source)
        copy.event = _Late(copy, self)
        self.open[way].append((copy, source, target))
        return copy

    def out(self, t: Tensor, into: Tensor | None = None) -> Copy:
        return self._begin("out", t, torch.empty_like(t) if into is None else into)

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        assert all(target is not sent for _, _, target in self.open["out"]), "it has not arrived yet"
        return self._begin("back", sent, into)

    def _end(self, way: str) -> None:
        copy, source, target = self.open[way].pop(0)
        assert copy.source is not None, "the source was let go before the copy ended"
        target.copy_(source)

    def finish(self, copy: Copy) -> None:
        for way, waiting in self.open.items():
            while any(copy is other for other, _, _ in waiting):
                self._end(way)


class _Streams:
    """Stands for torch.cuda's streams: a copy's event knows what must have ended before the copy does."""

    def __init__(self) -> None:
        self.current = self.main = _Stream(self)

    def enter(self, stream: _Stream) -> Any:
        @contextlib.contextmanager
        def within() -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        return within()


class _Stream:
    def __init__(self, streams: _Streams) -> None:
        self.streams, self.done, self.count = streams, set[Any](), 0

    def wait_stream(self, other: _Stream) -> None:
        self.done |= other.done

    def record_event(self) -> Any:
        self.done = {*self.done, (self, self.count)}
        self.count += 1
        done = frozenset(self.done)
        event = SimpleNamespace(done=done, last=(self, self.count - 1))
        event.wait = lambda: self.streams.current.done.update(done)
        event.synchronize = lambda: None
        return event


def test_weights_come_back_while_gradients_still_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device waits for its own way out, and not for those that were begun behind it."""
    streams = _Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.enter)
    link = AsyncHostCopy(torch.device("cuda"))
    sent = [link.out(torch.ones(4)) for _ in range(3)]
    sent[0].for_host()
    back = link.back(sent[0].value, torch.empty(4))
    assert not {copy.event.last for copy in sent[1:]} & back.event.done
    sent[1].for_device()  # of activations the computing stream waits, not the host
    assert sent[1].event.last in link.back(sent[1].value, torch.empty(4)).event.done


def stack(count: int = 5, width: int = 16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
            for _ in range(count)
        )
    )


def run(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_to_the_bit_however_late_copies_end(checkpointed: bool) -> None:
    model, x = stack(), torch.randn(8, 16)
    plain = run(model, x)
    if checkpointed:
        checkpoint_layers(model)
    link = LateLink()
    # Not empty tensors, which checkpoints of torch 2.11 save beside the input.
    ActivationOffload(list(model), stay=2, least=1, link=link)
    for _ in range(2):  # and a second pass finds nothing left of the first
        assert all(torch.equal(a, b) for a, b in zip(run(model, x), plain, strict=True))
        assert not link.open["back"]
    went, came = ([n for way, n in link.log if way == kind] for kind in ("out", "back"))
    assert sorted(went) == sorted(came)
    sent_by_a_layer = (
        [8 * 16] if checkpointed else [8 * 16, 8 * 32, 8 * 32]
    )  # inputs of both products and of GELU: each once, no weight
    assert went == 2 * 3 * sent_by_a_layer
    with torch.no_grad():
        model(x)
    assert [n for way, n in link.log if way == "out"] == went


def test_a_layer_is_brought_back_while_the_next_one_is_differentiated() -> None:
    model, link = stack(), LateLink()
    for index, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, index=index: link.log.append(("done", index)))
    ActivationOffload(list(model), stay=1, least=0, link=link)
    run(model, torch.randn(8, 16, requires_grad=True))
    marks = [entry for entry in link.log if entry[0] != "out"]
    order = [index if way == "done" else way for way, index in marks]
    # Before layer n is done, the three tensors of layer n - 1 are on their way, and those of no layer before.
    assert order == ["back"] * 3 + [4] + ["back"] * 3 + [3] + ["back"] * 3 + [2] + ["back"] * 3 + [1, 0]


def test_small_tensors_and_weights_stay() -> None:
    model, link = stack(), LateLink()
    ActivationOffload(list(model), least=8 * 32 * 4, link=link)
    run(model, torch.randn(8, 16))
    assert {n for _, n in link.log} == {8 * 32}


@pytest.mark.parametrize("frozen", [False, True])
def test_autocasts_copies_of_weights_stay(frozen: bool) -> None:
    """Weights in bf16 cross no link, trained or frozen: only the inputs of both products and of GELU do."""
    model, x, link = stack(), torch.randn(2, 8, 16, requires_grad=True), LateLink()
    if frozen:
        model.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.autograd.grad(model(x).square().sum(), x)[0]
        ActivationOffload(list(model), stay=1, least=0, link=link)
        out = model(x).square().sum()
    assert torch.equal(torch.autograd.grad(out, x)[0], plain)
    wide, narrow = 2 * 8 * 32, 2 * 8 * 16
    each = [wide] if frozen else [narrow, wide, wide]
    assert sorted(n for way, n in link.log if way == "out") == sorted(4 * each)


def test_a_graph_can_be_differentiated_twice() -> None:
    model, x = stack(), torch.randn(8, 16)
    plain = run(model, x)
    ActivationOffload(list(model), least=0, link=LateLink())
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None)


def _peak(model: torch.nn.Module, x: Tensor, fake: Any = None) -> int:
    recorder = Recorder(rounding=64)
    with fake or torch.enable_grad(), recorder:
        recorder.phase = Phase.FORWARD
        model(x).square().sum().backward()
    peak = peak_by_phase(recorder)
    model.zero_grad()
    return max(peak.values())


def test_the_dry_run_sees_what_leaves_the_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    peaks = {}
    for offloaded in (False, True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = stack(count=12)
        if offloaded:
            ActivationOffload(list(model), least=0)
        real = _peak(model, torch.randn(4096, 16))
        with mode:
            fake = stack(count=12)
            x = torch.empty(4096, 16)
        if offloaded:
            ActivationOffload(list(fake), least=0)
        peaks[offloaded] = _peak(fake, x, mode)
        assert peaks[offloaded] == real
    layer = 4096 * (16 + 2 * 32) * 4
    assert peaks[False] > 12 * layer
    assert peaks[True] < 5 * layer, "those of two layers, what is being computed, and gradients"


def _trained(make: Any, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Any]:
    model, x = stack(2), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for step in range(4):
        if step == 2:
            optimizer.found_inf = torch.ones(())
        elif step == 3:
            optimizer.found_inf = torch.zeros(())
        if dtype == torch.bfloat16 and step == 0:
            optimizer.prepare()
        run(model, x.to(dtype))
        optimizer.step()
    return [p.detach() for p in model.parameters()], optimizer


def test_the_hosts_adamw_is_torchs() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    ours, optimizer = _trained(lambda p: HostAdamW(p, link=LateLink(), **settings))
    torchs, _ = _trained(lambda p: torch.optim.AdamW(p, fused=True, **settings))
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}, "the step that was not finite is not counted"


def test_bf16_weights_are_those_of_the_host_rounded() -> None:
    low, optimizer = _trained(lambda p: HostAdamW(p, link=LateLink(), lr=1e-4), torch.bfloat16)
    masters = [s["master"] for s in optimizer.state.values()]
    begin = [p.detach() for p in stack(2).parameters()]
    assert all(torch.equal(a, m.bfloat16()) for a, m in zip(low, masters, strict=True))
    moved = [float((m - b).abs().mean()) for m, b in zip(masters, begin, strict=True)]
    assert all(1e-4 < m < 4e-4 for m in moved), "three updates of about lr, most of them below bf16's step"


def _step(b: Build) -> tuple[float, dict[str, Tensor]]:
    loss = accumulate_gradients(b, [uneven()], 0.01)
    return float(loss.total / loss.weight), {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None}


def test_applied_to_a_build_activations_wait_on_the_host() -> None:
    """What `check` refuses on a CPU, since it gains nothing there, computes the same all the same."""
    plain, offloaded = (build(tiny("{activation_checkpointing: {}}"), vocabulary=96, device=DEVICE) for _ in range(2))
    change = registry()["activation_offload"](least_kib=0, stay=2).apply(offloaded, offloaded.trained[0])  # type: ignore[call-arg]
    assert change.count == 1
    (loss, grads), (wanted, plain_grads) = _step(offloaded), _step(plain)
    assert loss == wanted
    assert difference(grads, plain_grads) == 0


def _offload_optimizer(b: Build, weights: str = "fp32") -> None:
    registry()["optimizer_offload"](weights=weights).apply(b, b.trained[0])  # type: ignore[call-arg]
    b.optimizer = b.slot(Slot.OPTIMIZER)(group_by_decay(b.parameters(), 0.1), lr=0.01, betas=(0.9, 0.95), eps=1e-8)


def test_the_optimizer_moves_to_the_host_and_back_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A fallback on a GPU: every state is moved exactly, and three steps there and three back are six without it."""
    plain, offloaded, back = (build(tiny(), vocabulary=96, device=DEVICE) for _ in range(3))
    _offload_optimizer(offloaded)

    def train(b: Build) -> None:
        for _ in range(3):
            _step(b)
            update(b, 0.01)

    train(plain)
    checkpoint.save(plain, checkpoint.Progress(step=3), tmp_path, keep=9)
    checkpoint.load(offloaded, tmp_path / "step-3")
    for (_, p), (_, moved) in zip(plain.parameters(), offloaded.parameters(), strict=True):
        states = offloaded.optimizer.state[moved]
        assert torch.equal(states["master"], p)
        assert all(torch.equal(states[key], value) for key, value in plain.optimizer.state[p].items())
    train(plain)
    train(offloaded)
    checkpoint.save(offloaded, checkpoint.Progress(step=6), tmp_path, keep=9)
    checkpoint.load(back, tmp_path / "step-6")
    for b in (plain, back):
        train(b)
    ours, wanted = ({n: p.detach() for n, p in b.parameters()} for b in (back, plain))
    assert difference(ours, wanted) == 0
    # Weights that were rounded are no masters.
    rounded = build(tiny(), vocabulary=96, device=DEVICE)
    _offload_optimizer(rounded, "bf16")
    with pytest.raises(RunError, match="does not hold what this model needs"):
        checkpoint.load(rounded, tmp_path / "step-3")


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_applied_to_a_build_the_optimizer_is_on_the_host(weights: str) -> None:
    plain, offloaded = (build(tiny(), vocabulary=96, device=DEVICE) for _ in range(2))
    _offload_optimizer(offloaded, weights)
    losses = []
    for _ in range(8):
        for b in (plain, offloaded):
            losses.append(_step(b)[0])
            assert update(b, 0.01).tolist()[1] == 1
    assert {p.dtype for _, p in offloaded.parameters()} == {torch.float32 if weights == "fp32" else torch.bfloat16}
    ours, wanted = ({n: p.detach() for n, p in b.parameters()} for b in (offloaded, plain))
    if weights == "fp32":
        assert difference(ours, wanted) == 0
    assert losses[-1] < losses[1] - 0.15
