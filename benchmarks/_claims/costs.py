"""Claims on memory and speed: precision at 1B, attention alone, ZeRO in processes, and the four together."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import attention_cpu
import attention_memory
import torch
import two_processes

from _claims.cookbooks import GIB, LLAMA_1B, build_recipe
from preheat.core import Device
from preheat.hardware.probe import probe
from preheat.planning.dry_run import observe
from preheat.planning.observation import Observation
from preheat.planning.request import Request

__all__ = [
    "AttentionCost",
    "PrecisionCost",
    "ProcessCost",
    "describe_machine",
    "measure_attention",
    "measure_precision",
    "measure_together",
    "measure_zero",
]

_STATES = ("parameters", "gradients", "optimizer")


def describe_machine() -> str:
    """Returns the device's name and the release of torch."""
    return f"{probe('cpu').name}, torch {torch.__version__}"


@dataclass(frozen=True)
class PrecisionCost:
    """Memory of a step by the dry run.

    Attributes:
        peak_gib: highest total of any phase.
        states_gib: weights, gradients and optimizer states, in the phase with the most.
    """

    name: str
    tokens: int
    peak_gib: float
    states_gib: float


PRECISIONS = {
    "fp32": "",
    "mixed_precision bf16": "mixed_precision: {mode: bf16}, ",
    "mixed_precision bf16_weights": "mixed_precision: {mode: bf16_weights}, ",
}
LEAN = "efficient_attention: {}, chunked_loss: {}, activation_checkpointing: {}"
"""With these, activations are a small part of the memory of one sequence: weights dominate."""


def measure_precision() -> list[PrecisionCost]:
    """A 1B Llama with weights that dominate (one sequence, checkpointed), and with activations that do (8, all stored)."""
    costs = []
    for rows, techniques in ((1, LEAN), (8, "efficient_attention: {}, chunked_loss: {}")):
        for name, precision in PRECISIONS.items():
            recipe = build_recipe("claims", LLAMA_1B, rows, 2048, f"{{{precision}{techniques}}}")
            observation = observe(Request(recipe, Device("cpu", "any", 999 * GIB)))
            costs.append(
                PrecisionCost(name, rows * 2048, max(observation.peak.values()) / GIB, _count_states(observation))
            )
            print(costs[-1], flush=True)
    return costs


def _count_states(observation: Observation) -> float:
    """GiB of weights, gradients and optimizer states, in the phase with the most."""
    return max(sum(phase.get(part, 0.0) for part in _STATES) for phase in observation.categories.values()) / GIB


@dataclass(frozen=True)
class AttentionCost:
    """Forward and backward pass of one attention kernel.

    Attributes:
        ratios: time of the plain form by that of this kernel, in each turn; above 1 is faster.
        peak_mib: bytes that torch allocates at most, inputs and gradients included (two heads).
    """

    kernel: str
    length: int
    ratios: tuple[float, ...]
    peak_mib: float


_MEMORY_NAMES = {"plain": "plain form (scores in memory)", "flash": "flash (torch)", "blocks": "blocks"}


def measure_attention(lengths: tuple[int, ...] = (256, 512, 1024, 2048), turns: int = 7) -> list[AttentionCost]:
    """Attention alone against its plain form: time in alternation (8 heads of 64, fp32), and memory in processes."""
    # Before anything is computed here: the processes are forked.
    memory = {
        (kernel, length): attention_memory.measure_in_process(name, length)[0] / 2**20
        for kernel, name in _MEMORY_NAMES.items()
        for length in lengths
    }
    costs = []
    for length in lengths:
        tensors = [torch.randn(1, 8, length, 64).requires_grad_() for _ in range(3)]
        slope = torch.randn(1, 8, length, 64)
        seconds: dict[str, list[float]] = {kernel: [] for kernel in attention_cpu.KERNELS}
        for turn in range(turns + 1):  # the first warms up
            for kernel in seconds:
                taken = attention_cpu.time_once(kernel, tensors, slope)
                if turn:
                    seconds[kernel].append(taken)
        for kernel, times in seconds.items():
            ratios = tuple(plain / other for plain, other in zip(seconds["plain"], times, strict=True))
            costs.append(AttentionCost(kernel, length, ratios, memory[kernel, length]))
            print(kernel, length, f"{statistics.median(ratios):.2f} x", f"{memory[kernel, length]:.1f} MiB", flush=True)
    return costs


@dataclass(frozen=True)
class ProcessCost:
    """A contender on two processes.

    Attributes:
        speeds: tokens per second of each round.
        peaks: highest memory of the first process in each round, GiB.
        loss: of the last step of the first round.
    """

    name: str
    speeds: tuple[float, ...]
    peaks: tuple[float, ...]
    loss: float


WEIGHTY = """name: zero
model: {family: llama, num_layers: 8, hidden_size: 512, num_heads: 8, intermediate_size: 1536, vocab_size: 16384, tie_embeddings: true}
data: {source: stdlib, vocab_size: 4096}
batch: {size: 4, seq_len: 64}
stop: {max_steps: 6}
evaluate: {}
techniques: {chunked_loss: {}, efficient_attention: {}}
hardware: {device: cpu, threads: 1}
"""
"""35M parameters and 128 tokens per process: weights, gradients and states are nearly all of the memory."""
STAGES = {
    "data_parallel": ("data_parallel={}",),
    "ZeRO-1: data_parallel, zero1": ("data_parallel={}", "zero1={}"),
    "ZeRO-2: fsdp, reshard_after_forward: false": ("fsdp={reshard_after_forward: false}",),
    "ZeRO-3: fsdp": ("fsdp={}",),
}


def measure_zero(rounds: int = 3) -> list[ProcessCost]:
    """The stages of ZeRO on two processes (gloo), in alternation."""
    return _measure_in_processes(WEIGHTY, STAGES, rounds)


TOGETHER = """name: together
model: {family: llama, num_layers: 6, hidden_size: 288, num_heads: 6, intermediate_size: 768, tie_embeddings: true}
data: {source: stdlib, vocab_size: 4096}
batch: {size: 16, seq_len: 512}
stop: {max_steps: 5}
evaluate: {}
hardware: {device: cpu, threads: 1}
"""
FOUR = (
    "mixed_precision={mode: bf16}",
    "efficient_attention={}",
    "gradient_accumulation={steps: 4}",
    "fsdp={}",
)
CONTENDERS = {
    "plain: data_parallel, fp32": ("data_parallel={}",),
    "the four": FOUR,
    "the four, but fp32": FOUR[1:],
}


def measure_together(rounds: int = 3) -> list[ProcessCost]:
    """Mixed precision, fused attention, accumulation and ZeRO-3 at once against plain data parallelism.

    Also without bf16, which is slow on a CPU without instructions for it.
    """
    return _measure_in_processes(TOGETHER, CONTENDERS, rounds)


def _measure_in_processes(text: str, contenders: dict[str, tuple[str, ...]], rounds: int) -> list[ProcessCost]:
    names = list(contenders)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(text, encoding="utf-8")
        for turn in range(rounds):
            for number in range(len(names)):
                name = names[(turn + number) % len(names)]
                options = ["--nproc", "2", *two_processes.list_overrides(contenders[name])]
                runs[name].append(two_processes.run(recipe, Path(folder) / f"{turn}-{number}", options))
                print(name, runs[name][-1], flush=True)
    return [
        ProcessCost(
            name,
            tuple(run["speed"] for run in runs[name]),
            tuple(run["peak"] for run in runs[name]),
            runs[name][0]["loss"],
        )
        for name in names
    ]
