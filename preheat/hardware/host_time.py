"""Host time of a training step: Python, autograd, views and launches, in seconds per operator.

Steps of small models take as long as the host needs to launch their operators. That is several times the time of one
operator called alone, and differs between machines more than devices do, so it is measured: steps of a tiny
transformer, whose tensors are so small that the device waits for the host. Custom operators, which call Python from the
dispatcher, are measured apart: the same steps with norms by such an operator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["HostTime", "measure_host_time"]

_WIDTH, _TOKENS, _VOCABULARY, _LAYERS = 32, 8, 64, 4
_STEPS = 24
"""Timed steps, whose lower quartile counts: the others may have waited for a core."""
_NAME = "preheat_host_time::scaled"


class HostTime(NamedTuple):
    """Seconds of the host per call in a training step.

    Attributes:
        operator: of an operator of torch, with its share of Python, autograd and views.
        custom: of a custom operator written in Python; forward and backward are one call each.
    """

    operator: float
    custom: float


def measure_host_time(device: str) -> HostTime:
    """Measures the host's time on a device (`cpu`, `cuda`); leaves the random generators as they were."""
    seconds, calls, _ = _measure(device, custom=False)
    operator = seconds / calls
    with_custom, calls, custom_calls = _measure(device, custom=True)
    # What the steps take beyond their ordinary operators. A call is never cheaper than one of torch's.
    custom = (with_custom - (calls - custom_calls) * operator) / custom_calls
    return HostTime(operator, max(custom, operator))


def _measure(device: str, *, custom: bool) -> tuple[float, int, int]:
    """Returns the seconds of a step, its operators, and how many of them are custom ones."""
    step = _build_training_step(device, custom=custom)
    counts = _count_operators(step)
    return _lower_quartile(step, device), sum(counts.values()), counts.get(_NAME, 0) + counts.get(f"{_NAME}_back", 0)


def _build_training_step(device: str, *, custom: bool) -> Callable[[], None]:
    """Returns a step of the tiny model, which ran twice: the first one imports, compiles and allocates."""
    import torch
    from torch.nn import functional as F

    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        model = _build_model(_register_scale_operator() if custom else None).to(device)
        tokens = torch.randint(_VOCABULARY, (1, _TOKENS), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run_step() -> None:
        with torch.enable_grad():
            logits = model(tokens)
            F.cross_entropy(logits.float().view(-1, _VOCABULARY), tokens.view(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    run_step()
    run_step()
    return run_step


def _lower_quartile(step: Callable[[], None], device: str) -> float:
    import torch

    samples = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        # Once a step, as the loop waits for the loss.
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[_STEPS // 4]


def _count_operators(step: Callable[[], None]) -> dict[str, int]:
    """Returns the calls of each operator that runs a kernel, as dry runs count them (planning/dispatch_recorder.py)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[str, int] = {}

    class _Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func._schema.name
            if not (func.is_view or name in _NO_KERNEL or func.namespace == "profiler"):
                counts[name] = counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with _Counting():  # type: ignore[no-untyped-call]
        step()
    return counts


_NO_KERNEL = {f"aten::{name}" for name in ("detach", "alias", "_unsafe_view", "empty", "empty_like", "empty_strided")}


@functools.cache  # an operator is registered once in a process
def _register_scale_operator() -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a custom operator with a gradient, registered as those of `preheat.ops` are."""
    import torch

    def scale(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    def scale_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * weight, (gradient * x).sum((0, 1))

    forward = torch.library.custom_op(_NAME, scale, mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
    backward = torch.library.custom_op(
        f"{_NAME}_back",
        scale_backward,
        mutates_args=(),
        schema="(Tensor gradient, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    )

    def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, gradient):  # type: ignore[no-untyped-def]
        return backward(gradient, *ctx.saved_tensors)

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _build_model(scaled: Callable[[Tensor, Tensor], Tensor] | None) -> nn.Module:
    """Returns a transformer of the kind that is trained, with norms by operators of torch or by a custom one."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(_WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if scaled is not None:
                return scaled(x, self.weight)
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def build_linear() -> nn.Linear:
        return nn.Linear(_WIDTH, _WIDTH, bias=False)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Norm(), Norm()
            self.query, self.key, self.value, self.out = build_linear(), build_linear(), build_linear(), build_linear()
            self.gate, self.up, self.down = build_linear(), build_linear(), build_linear()

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            h = self.before(x)
            # (1, tokens, width) -> (1, heads, tokens, width of a head)
            q, k, v = (part(h).view(1, _TOKENS, 4, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
            q, k = _rotate_half(q, cos, sin), _rotate_half(k, cos, sin)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, _TOKENS, _WIDTH)
            x = x + self.out(h)
            h = self.after(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))
            self.norm = Norm()

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            angles = torch.ones(_TOKENS, _WIDTH // 4, device=tokens.device)
            cos, sin = angles.cos(), angles.sin()
            for layer in self.layers:
                x = layer(x, cos, sin)
            return F.linear(self.norm(x), self.embedding.weight)

    return Model()


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
