"""Jobs that benchmarks give to their worker processes, and the answers. No torch.

Both ends run the same code. Messages are JSON with NaN, since a loss may be NaN.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.core import MachineUse
from preheat.core.plan import StepSeconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from preheat.core.schema import Sample

__all__ = [
    "Ending",
    "Generation",
    "InferenceJob",
    "OpenedModel",
    "ProfileJob",
    "Turn",
    "TurnJob",
    "ZeroJob",
    "ZeroTurn",
    "encode",
    "read_turn",
]


def encode(message: DataclassInstance) -> str:
    """Returns the line of JSON of a message."""
    return json.dumps(dataclasses.asdict(message))


@dataclass(frozen=True)
class ProfileJob:
    """Steps to profile after the measured ones of a turn.

    Attributes:
        folder: path of the files.
        planned: the step by the plan, by kind of operator; None: unknown.
        planned_seconds: of a step.
    """

    folder: str
    steps: int
    planned: StepSeconds | None
    planned_seconds: float


@dataclass(frozen=True)
class TurnJob:
    """A turn of one contender of `preheat bench`.

    Attributes:
        recipe: YAML text.
        gradient: file for a sample of the first step's gradients, if wanted.
        seconds: of training, after which no further step begins.
        profile: what to profile afterwards, if wanted.
    """

    recipe: str
    steps: int
    gradient: str | None = None
    seconds: float | None = None
    profile: ProfileJob | None = None


@dataclass(frozen=True)
class Turn:
    """Measurements of a turn.

    Attributes:
        seconds: of each step.
        losses: of each step; NaN if not finite.
        startup_seconds: from the start of the process to the end of the first step.
        memory: peak_gib and on a GPU its parts (`preheat.run.layout.MEMORY_KEYS`).
        tokens: of each step.
        changes: {technique: what it changed}.
        notices: what techniques reported about the run.
        finding: the sentence that names the largest gap to the plan, if steps were profiled.
        use: of the machine during the steps.
    """

    seconds: list[float]
    losses: list[float]
    startup_seconds: float
    memory: dict[str, float]
    tokens: list[int]
    changes: dict[str, list[str]]
    notices: list[str]
    finding: str | None = None
    use: MachineUse | None = None


def read_turn(values: Mapping[str, Any]) -> Turn:
    """Returns the turn of a decoded message."""
    # `alone` follows from the rest.
    use = {key: value for key, value in (values["use"] or {}).items() if key != "alone"}
    return Turn(**{**values, "use": MachineUse(**use) if use else None})


@dataclass(frozen=True)
class ZeroJob:
    """A contender of a trial of ZeRO.

    Attributes:
        recipe: YAML text.
        world: processes.
        stage: of ZeRO; 0: replicated optimizer states.
        offload: keep the optimizer states in host memory.
        seconds: of training, after which no further step begins.
    """

    recipe: str
    steps: int
    world: int
    stage: int
    offload: bool
    seconds: float


@dataclass(frozen=True)
class ZeroTurn:
    """Measurements of one process of a trial of ZeRO.

    Attributes:
        seconds: of each step.
        losses: of each step, over all processes.
        tokens: of a step, over all processes.
        peak_gib, optimizer_gib: of this process.
    """

    seconds: list[float]
    losses: list[float]
    tokens: int
    peak_gib: float
    optimizer_gib: float


@dataclass(frozen=True)
class InferenceJob:
    """A contender of `preheat bench --inference`.

    Attributes:
        model: path.
        dtype: fp32, bf16 or fp16; None: as the model is opened.
        engine: preheat or transformers.
        tokens: tokens to generate after each prompt.
        cells: (rows, length) of each shape.
        text: file from which prompts are cut; None: Python's standard library.
        kernel: of torch's attention; None: the fastest, with preheat's own on CPUs.
    """

    model: str
    settings: Sample
    dtype: str | None
    engine: str
    tokens: int
    cells: list[tuple[int, int]]
    text: str | None
    kernel: str | None = None


@dataclass(frozen=True)
class OpenedModel:
    """Sizes of an opened model and the predicted cache of each shape.

    Attributes:
        positions: maximum context, if it has one.
        vocabulary: number of tokens.
        device_kind, device_name, device_memory: of its device; memory in bytes.
        cache_bytes: predicted, of each shape.
        startup_seconds: from the start of the process until the model was open.
    """

    parameters: int
    weights_bytes: int
    dtype: str
    positions: int | None
    vocabulary: int
    device_kind: str
    device_name: str
    device_memory: int
    cache_bytes: list[float]
    startup_seconds: float


@dataclass(frozen=True)
class Generation:
    """Measurements of the generation of one batch.

    Attributes:
        first: seconds until the first tokens.
        rest: seconds from then to the last ones.
        passes: forward passes after the first.
        drawn: tokens from these.
        texts: tokens of each row.
    """

    first: float
    rest: float
    passes: int
    drawn: int
    cache_bytes: int
    texts: list[list[int]]


@dataclass(frozen=True)
class Ending:
    """Measurements after all shapes.

    Attributes:
        beyond_weights_gib: peak memory above that of the opened model; None if the system does not report it.
        loss: mean loss per token of the text, computed through the cache.
    """

    beyond_weights_gib: float | None
    loss: float
