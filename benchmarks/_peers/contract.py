"""What the driver and its workers agree on: a job goes in as a JSON file, one JSON line comes out. No torch.

Every contender runs as `PYTHON WORKER.py JOB.json` in a process of its own, maybe in an environment of its own, so this
module needs nothing but Python. What a library prints on the way does not matter: the result is the last line.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["UNTIMED", "Clock", "Job", "read_memory", "read_job", "report"]

UNTIMED = 3
"""Steps at the beginning that train but are not timed: allocator, caches and compilers settle there."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, the same for every contender but for `name` and `settings`.

    The model is trained on the rows of `tokens` in their order, `batch` rows a step, with AdamW at a constant learning rate.
    A row's last token has no label, so `length - 1` tokens of each row are trained.
    """

    name: str
    """The contender."""
    model: str
    """A Hugging Face folder with the initial weights in fp32."""
    litgpt_model: str
    """The same weights as litgpt's own converter writes them."""
    tokens: str
    """A .npy file, int32 [rows, length], rows = steps * batch."""
    scratch: str
    """An empty folder to write to."""
    batch: int
    length: int
    steps: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """What makes this contender: {"bf16": true}, {"precision": "bf16-mixed"} ..."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_job() -> Job:
    """The job named on the command line."""
    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return Job(**{**values, "betas": tuple(values["betas"])})


def read_memory() -> dict[str, int]:
    """{"now", "peak"}: resident bytes of this process and their high-water mark, from the kernel (Linux)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {"now": int(lines["VmRSS"].split()[0]) * 1024, "peak": int(lines["VmHWM"].split()[0]) * 1024}


class Clock:
    """Takes the time and the memory between steps.

    Make it once the imports are done: what they took is kept apart. `tick` once before the first step and once after each.
    """

    def __init__(self) -> None:
        self.after_imports = read_memory()["now"]
        self.times: list[float] = []
        self.peak = 0

    def tick(self) -> None:
        self.times.append(time.perf_counter())
        self.peak = read_memory()["peak"]  # here, so that saving at a trainer's end does not count


def report(job: Job, clock: Clock, losses: list[float], packages: tuple[str, ...]) -> None:
    """Prints the result, {name, versions, tokens_per_second, spread, loss_at_end, losses, peak_rss_bytes, ...}, as one line.

    Args:
        losses: the mean training loss of each step, nats a token, of the weights before that step's update.
        packages: whose versions stand in the result.
    """
    if len(clock.times) != job.steps + 1 or len(losses) != job.steps:
        raise RuntimeError(
            f"{job.name}: {job.steps} steps make {job.steps + 1} ticks and {job.steps} losses, "
            f"got {len(clock.times)} and {len(losses)}"
        )
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    rates = sorted(job.batch * job.length / s for s in seconds[UNTIMED:])
    tenths = statistics.quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else rates * 9
    result = {
        "name": job.name,
        "settings": job.settings,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "tokens_per_second": statistics.median(rates),
        "spread": [tenths[0], tenths[-1]],
        "loss_at_end": statistics.fmean(losses[-5:]),
        "losses": losses,
        "peak_rss_bytes": clock.peak,
        "rss_after_imports": clock.after_imports,
        "untimed_seconds": sum(seconds[:UNTIMED]),
        "seconds": clock.times[-1] - clock.times[0],
    }
    print("\n" + json.dumps(result), flush=True)
