"""The dry run's short cuts: results from memory, repeated turns counted, observations by several processes. None may change what is seen."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from preheat.core import Device, Phase
from preheat.ops.quantization.nf4 import Packed, Tables, dequantize
from preheat.planning import dispatch_recorder, fake_tensor_cache, observation_cache, worker_pool
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.recipe import override

from ...conftest import DEVICE, tiny

PARAMETER = torch.nn.Parameter(torch.empty(5, 3, device="meta").t())
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda t: t.t() @ t,
    "broadcast": lambda t: t + torch.ones(6),
    "integer keeps the type": lambda t: t.int() + 1,
    "float changes it": lambda t: t.int() + 1.0,
    "truth keeps it": lambda t: t.int() + True,
    "view": lambda t: t.view(-1)[3:9],
    "views": lambda t: t.split(2),
    "unsafe view": lambda t: torch.ops.aten._unsafe_view(t, (6, 4)),
    "strides": lambda t: t.t().expand(2, 6, 4).transpose(0, 2),
    "a copy of strides": lambda t: torch.empty_like(t.t()),
    "in place": lambda t: t.mul_(2),
    "in place of a view": lambda t: t[1].add_(1),
    "lists": lambda t: torch._foreach_mul([t, t[0]], 2.0),
    "several": lambda t: torch.topk(t, 2),
    "changes its shape": lambda t: t.clone().unsqueeze_(0),
    "at random": lambda t: t.random_(generator=torch.Generator()),
    "shape by value": lambda t: t.to(torch.complex64).abs(),
    "a factory": lambda t: torch.zeros(3, 5, dtype=torch.bfloat16),
    "a range": lambda t: torch.arange(6.0),
    "like a parameter on meta": lambda t: torch.empty_like(PARAMETER, device="cpu"),
    "a custom operator": lambda t: dequantize(
        Packed(torch.empty(64, dtype=torch.uint8), t.view(-1)[:2], None), (8, 16), torch.bfloat16, Tables(t, t)
    ),
    "written elsewhere": lambda t: torch.add(t, t, out=torch.empty(4, 6)),
}


class _Through(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, remembered: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self.remembered = remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.remembered and "prim" not in str(func):
            return fake_tensor_cache.run(func, args, kwargs, list(fake_tensor_cache.collect_tensors((args, kwargs))))[0]
        return func(*args, **kwargs)


def _described(name: str, remembered: bool) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True), _Through(remembered):
        made = torch.empty(4, 6)
        out = list(fake_tensor_cache.collect_tensors(OPERATIONS[name](made)))
        mine = made.untyped_storage()
        return [
            (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad) if t is not made else "itself"
            for t in out
        ], [(s._cdata == mine._cdata, s.nbytes()) for s in (t.untyped_storage() for t in out)]


def test_a_cached_fake_tensor_has_all_attributes_of_one_that_torch_makes() -> None:
    with FakeTensorMode() as mode:
        expected = torch.empty(4, 6)
    for _ in range(2):
        fake = fake_tensor_cache._build_fake(mode, torch.empty(4, 6, device="meta"), expected.device)
        assert vars(fake) == vars(expected)
        assert type(fake) is type(expected)
        with mode:
            assert (fake + expected).device == expected.device


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_remembered_is_what_torch_makes(name: str) -> None:
    expected = _described(name, remembered=False)
    assert [_described(name, remembered=True) for _ in range(3)] == [expected] * 3
    assert expected


def _ordered(log: list[tuple[int, int, Phase]]) -> list[tuple[int, int, Phase]]:
    """The log with its last frees sorted: the build releases them at its end, in the order of a set."""
    end = max(n for n, (_, size, _) in enumerate(log) if size >= 0) + 1
    return log[:end] + sorted(log[end:])


GPU = Device("cuda", "a GPU", 8 << 30, (9, 0), at_hand=False)


@pytest.mark.parametrize(
    ("techniques", "device", "world"),
    [
        (
            "{activation_checkpointing: {}, chunked_loss: {rows: 16}, mixed_precision: {mode: bf16_weights}, gradient_accumulation: {steps: 2}}",
            DEVICE,
            1,
        ),
        ("{lora: {rank: 4}, nf4: {}, efficient_attention: {}}", DEVICE, 1),
        (
            "{mixed_precision: {}, efficient_attention: {}, compile: {}, activation_offload: {}, optimizer_offload: {}}",
            GPU,
            1,
        ),
        ("{fsdp: {}, mixed_precision: {}, efficient_attention: {}, activation_checkpointing: {}}", GPU, 2),
        ("{lora: {}, nf4: {}, mixed_precision: {mode: bf16_weights}, fsdp: {offload: true}}", GPU, 2),
        ("{tensor_parallel: {degree: 2}, fused_operators: {}, mixed_precision: {}}", GPU, 2),
    ],
)
def test_a_dry_run_from_memory_sees_the_same(
    techniques: str, device: Device, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tensor_cache._made.clear()
    request = Request(tiny(techniques), device, vocabulary=96, world=world)
    seen = [observe(request) for _ in range(2)]
    assert len(fake_tensor_cache._made) > 50
    monkeypatch.setattr(dispatch_recorder, "run", lambda func, args, kwargs, inputs: (func(*args, **kwargs), None))
    slow = observe(request)
    gc.collect()  # of the models that were observed, now or at any time before
    for quick in seen:
        assert (quick.kernels, quick.at, quick.streams) == (slow.kernels, slow.at, slow.streams)
        assert _ordered(quick.log) == _ordered(slow.log)


@pytest.mark.parametrize(
    ("techniques", "world"),
    [
        (
            "{fsdp: {replicate: 2}, mixed_precision: {}, activation_checkpointing: {}, gradient_accumulation: {steps: 2}}",
            4,
        ),
        ("{fsdp: {reshard_after_forward: false}, lora: {}, nf4: {}}", 2),
        ("{fsdp: {}, tensor_parallel: {degree: 2}}", 4),
    ],
)
def test_resized_weights_are_seen_as_by_looking_at_each_operator(
    techniques: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(tiny(techniques, rows=8), GPU, vocabulary=96, world=world)
    quick = observe(request)
    always = property(lambda self: bool(self._gathered), lambda self, value: None)
    monkeypatch.setattr(dispatch_recorder.Recorder, "_resized", always, raising=False)
    slow = observe(request)
    assert (quick.kernels, quick.at, quick.streams) == (slow.kernels, slow.at, slow.streams)
    assert _ordered(quick.log) == _ordered(slow.log)


def test_no_process_is_copied_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("copied"))
    assert worker_pool.count_processes() == 1
    with worker_pool.start_worker_pool(observation_cache.observe_for_others, 2):
        assert worker_pool.is_serial()
        done: list[Any] = []
        worker_pool.run_tasks([{"n": 1}, {"n": 2}], done.append)
        assert len(done) == 2


def test_what_fails_in_a_helper_is_told_and_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    here = os.getpid()

    def broken(**_: Any) -> None:
        assert os.getpid() == here, "not in a copy"

    monkeypatch.setattr(observation_cache, "observe_cached", broken)
    done: list[int] = []
    with (
        caplog.at_level("DEBUG", logger="preheat"),
        worker_pool.start_worker_pool(observation_cache.observe_for_others, 2),
    ):
        worker_pool.run_tasks([{"n": n} for n in range(3)], lambda task: done.append(task["n"]))
        assert worker_pool.is_serial(), "one that failed is asked no more"
    assert sorted(done) == [0, 1, 2]
    assert "AssertionError('not in a copy" in caplog.text


@pytest.mark.parametrize(
    ("techniques", "world"),
    [
        (
            "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, activation_checkpointing: {}, chunked_loss: {}}",
            1,
        ),
        (
            "{mixed_precision: {}, efficient_attention: {}, compile: {}, activation_offload: {}, optimizer_offload: {}}",
            1,
        ),
        (
            "{lora: {}, nf4: {}, mixed_precision: {mode: bf16_weights}, efficient_attention: {}, fsdp: {offload: true}}",
            2,
        ),
    ],
)
def test_a_dry_run_leaves_a_gpu_at_hand_alone(techniques: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fake tensors are on the CPU there, too, so that it sees what it sees where there is no GPU."""
    recipe, gpu = override(tiny(techniques), "batch.size=4"), Device("cuda", "a GPU", 8 << 30, (9, 0), at_hand=False)
    elsewhere = observe(Request(recipe, gpu, vocabulary=96, world=world))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # torch 2.12's AdamW asks the driver, which this machine may lack.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the GPU was used"))
    here = observe(Request(recipe, gpu, vocabulary=96, world=world))
    assert (here.kernels, here.at) == (elsewhere.kernels, elsewhere.at)


def test_a_worker_pool_observes_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    recipes = [override(tiny(), f"batch.size={rows}") for rows in (1, 2, 3, 4)]
    with worker_pool.start_worker_pool(observation_cache.observe_for_others, 2):
        [helper] = worker_pool._helpers
        here: list[int] = []
        tasks: list[dict[str, Any]] = [
            {"request": Request(recipe, DEVICE, vocabulary=96, world=1), "how": "step"} for recipe in recipes
        ]
        worker_pool.run_tasks(tasks, lambda task: here.append(task["request"].recipe.batch.size))
        assert len(here) < 4, "one process did all of it"
        there = {1, 2, 3, 4} - set(here)
        observation_cache.clear()
        for rows in there:
            assert observation_cache.is_cached(**tasks[rows - 1])
            found = observation_cache.observe_cached(**tasks[rows - 1])
            seen = observe(Request(recipes[rows - 1], DEVICE, vocabulary=96, world=1), evaluated=False)
            assert (found.kernels, found.peak, found.passing) == (seen.kernels, seen.peak, seen.passing)
        os.kill(helper.process, signal.SIGSTOP)  # it hears nothing, and ends with what it was given
        threading.Timer(1.0, os.kill, (helper.process, signal.SIGKILL)).start()
        tasks = [
            {"request": replace(tasks[0]["request"], recipe=override(tiny(), f"batch.size={rows}")), "how": "step"}
            for rows in (5, 6)
        ]
        observation_cache.prefetch(tasks)
        assert observation_cache.is_cached(**tasks[1]), "left undone when a process ended"
    assert not worker_pool._helpers
