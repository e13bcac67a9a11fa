"""Chunked loss: computes head and cross entropy in chunks of positions, so that the full logits are never in memory.

What: computes logits, loss and gradient for a few hundred positions at a time, in the forward pass and in place.
Helps: logits are tokens x vocabulary, often the largest tensor of a step, and the plain loss holds two or three copies;
here one chunk exists once. Also faster if memory is slow.
Hurts: little; very small chunks slow the matmuls. On CUDA the gradient of an fp32 head is accumulated in fp32 by the
matmuls themselves; that of a bf16 head is rounded once per chunk.
Source: Wijmans et al. 2024, "Cut Your Losses" (arXiv:2411.09009); Hsu et al. 2024, Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, MissingPackage, Numerics, Searchable, Slot, Stage, Technique, Trials
from preheat.recipe import Bound

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ChunkedLoss", "chunked_cross_entropy"]


_KERNELS = ("ours", "torch", "liger")
_ROWS = {"cpu": 512, "cuda": 4096}
"""Rows per chunk by device: on a CPU a chunk should stay in cache; a GPU wants few large matmuls and few passes over
the head's gradient."""


def _choose_kernel(name: str, rows: int, cuda: bool) -> Callable[..., Tensor]:
    from preheat.ops.losses.cross_entropy import sum_chunked_loss, sum_liger_loss, sum_torch_loss

    # Liger chooses its chunks from the shapes.
    if name == "liger":
        return sum_liger_loss
    return (
        functools.partial(sum_torch_loss, rows=rows)
        if name == "torch"
        else functools.partial(sum_chunked_loss, rows=rows, cuda=cuda)
    )


def chunked_cross_entropy(
    hidden: Tensor, head: nn.Module, labels: Tensor, *, rows: int = 512, kernel: str = "ours"
) -> Tensor:
    """Returns the summed cross entropy of `head(hidden)` against `labels` (-100: ignored), `rows` rows at a time.

    Args:
        hidden: [..., width].
        head: a module with `weight` [vocabulary, width] and `bias` [vocabulary] or None.
        labels: [...].
        kernel: `ours`; `torch` for its `linear_cross_entropy` (2.13); `liger` for Liger's on CUDA, which chooses its
            own chunks.

    Raises:
        ValueError: unknown kernel, or torch is too old for its own.

    Example:
        >>> import torch
        >>> head = torch.nn.Linear(8, 50, bias=False)
        >>> loss = chunked_cross_entropy(torch.randn(2, 5, 8), head, torch.randint(50, (2, 5))) / 10
        >>> loss.backward()
    """
    from preheat.ops.losses.cross_entropy import CrossEntropy
    from preheat.torch_compat import why_no_linear_cross_entropy

    if kernel not in _KERNELS:
        raise ValueError(f"kernel: {kernel} is none of {', '.join(_KERNELS)}")
    if kernel == "torch" and (missing := why_no_linear_cross_entropy()):
        raise ValueError(f"kernel: {missing}")
    return _choose_kernel(kernel, rows, hidden.is_cuda)(hidden, head, CrossEntropy(), labels)


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Searchable):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"rows": 7},
            {"rows": 7, "kernel": "torch"},
        )
    )
    supports_encoder_decoder: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OVER_LOGITS})

    rows: Annotated[int, Bound(1)] | None = None
    """Positions with logits in memory at a time; by default 512 on a CPU and 4096 on a GPU (liger chooses its own)."""
    kernel: Literal["auto", "ours", "torch", "liger"] = "auto"
    """The kernel that computes a chunk: ours, torch's linear_cross_entropy (torch 2.13), or Liger's Triton kernel
    (CUDA). auto takes ours, the fastest measured on a CPU (benchmarks/results/loss_kernels.md); the others have not
    been compared with it on CUDA."""

    def _choose_rows(self, kind: str) -> int:
        return self.rows or _ROWS[kind]

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        problems = []
        if self.kernel == "liger":
            import importlib.util

            if context.device.kind != "cuda":
                problems.append("kernel: liger needs a CUDA device; use ours or auto")
            elif importlib.util.find_spec("liger_kernel") is None:
                problems.append(
                    MissingPackage(
                        "kernel: liger is not installed; use ours, or install it", "pip install liger-kernel"
                    )
                )
        if self.kernel == "torch":
            from preheat.torch_compat import why_no_linear_cross_entropy

            if missing := why_no_linear_cross_entropy():
                problems.append(f"kernel: {missing}")
        if self.kernel in ("torch", "liger"):
            # These kernels fuse plain cross entropy: another row loss would be ignored.
            adds = [t.name() for t in context.recipe.techniques.values() if Slot.ROW_LOSS in t.claimed()]
            if adds:
                problems.append(
                    f"kernel: {self.kernel} has plain cross entropy only, without the terms of {adds[0]}; use ours"
                )
            if context.model.logit_softcap:
                problems.append(
                    f"kernel: {self.kernel} would leave out the cap on the logits of {context.model.family}; use ours"
                )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.hf import require_plain_head

        chosen = "ours" if self.kernel == "auto" else self.kernel
        # The kernel multiplies by the head's weight itself, so an adapter on the head would be lost; ours knows a tied
        # one.
        require_plain_head(part, self.name(), tied=chosen == "ours")
        rows = self._choose_rows(build.device.kind)
        build.claim(Slot.OVER_LOGITS, _choose_kernel(chosen, rows, build.device.kind == "cuda"), self.name())
        many = "as many positions as Liger chooses" if chosen == "liger" else f"{rows} positions"
        return Change(f"head and loss {many} at a time, gradients computed in the forward pass", 1, kernel=chosen)

    def options(self, context: Context) -> Iterable[Technique]:
        # Large chunks first: they are faster, small ones save more memory.
        most = (4096, 2048) if context.device.kind == "cuda" else ()
        return [ChunkedLoss(rows=n, kernel=self.kernel) for n in (*most, 1024, 512, 256, 128)]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        rows = self._choose_rows(context.device.kind)
        return [ChunkedLoss(rows=n, kernel=self.kernel) for n in (2048, 1024, 512, 256, 128, 64) if n < rows]
