"""The result of a dry run: memory by phase and category, kernels and FLOPs of one optimizer step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from preheat.core import Axis, Phase
from preheat.planning.dispatch_recorder import Kernel

if TYPE_CHECKING:
    from preheat.core import Change

__all__ = ["BESIDE", "CATEGORIES", "FROM_OTHERS", "Observation"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary")
FROM_OTHERS = ("gathered weights", "communication buffers")
"""Categories of several devices: weights gathered from the shards of other devices, while layers use them or until
backward has used them, and buffers that pack weights and gradients for sending and receiving. The collective library's
own buffers are in neither."""
BESIDE = ("rounding", *FROM_OTHERS)
"""Other allocations: the allocator's rounding, and `FROM_OTHERS`."""


@dataclass
class Observation:
    """Memory and kernels of one optimizer step, as the dry run recorded them.

    Attributes:
        peak: {phase: bytes} peak of allocated memory in each phase.
        categories: {phase: {category: bytes}} at that phase's peak; categories are `CATEGORIES` and `BESIDE`.
        kernels: how often each kernel runs in one optimizer step, all micro-batches included.
        flops: {dtype: FLOPs} of one optimizer step.
        model_flops: FLOPs of one optimizer step without the recomputation of activation checkpointing.
        parameters, trained: number of weights; a 4-bit weight counts as one weight, whatever its storage.
        experts: those of `parameters` that belong to experts.
        tokens: tokens of one optimizer step.
        passing: peak in bytes of everything except parameters, gradients and optimizer states.
        log: every allocation and release, in order: (block, bytes allocated or -bytes freed, phase).
        slots: {slot: owner}; changes: the changes that each technique made.
        at: {(phase, place in the model): {category: bytes}} at each place's peak.
        reserved: bytes that the allocator reserves, for observations without a log.
        streams: {block: stream} for the blocks in the log that are not allocated on the main stream.
        unrounded: {block: bytes before rounding} for the blocks in the log.
        groups: {group of a kernel: mesh axes that the process group spans}.
        compiled: True if the compiler fuses the layers' small operators in the real run.
        cudnn: True if attention over rows of one document is cuDNN's.
        slowed: factor on the host time per operator, from techniques that run Python between operators.
        idle: idle time of this device as a fraction of its busy time: the bubble of a pipeline, and waiting for devices
            with more to compute.
    """

    peak: dict[str, int]
    categories: dict[str, dict[str, int]]
    kernels: Counter[Kernel]
    flops: dict[str, int]
    model_flops: int
    parameters: int
    trained: int
    tokens: int
    experts: int = 0
    passing: int = 0
    log: list[tuple[int, int, Phase]] = field(default_factory=list)
    slots: dict[str, str] = field(default_factory=dict)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    at: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    reserved: int | None = None
    streams: dict[int, str] = field(default_factory=dict)
    unrounded: dict[int, int] = field(default_factory=dict)
    groups: dict[tuple[int, int], tuple[Axis, ...]] = field(default_factory=dict)
    compiled: bool = False
    cudnn: bool = False
    slowed: float = 1.0
    idle: float = 0.0

    @property
    def peak_phase(self) -> str:
        return max(self.peak, key=lambda phase: self.peak[phase])
