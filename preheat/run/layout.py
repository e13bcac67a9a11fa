"""The run folder: the only interface between running and reporting. Append-only and readable during the run. No torch.

preheat.json      marks the folder as written by preheat: {kind, id, files}; checkpoints carry the run's `id`,
                  `files` lists the files of tokenizer/
recipe.yaml       the recipe with every default written out; `preheat train recipe.yaml` repeats the run
plan.json         the prediction (see `core.plan.Plan`)
environment.json  `Environment`: machine, versions, threads, command
changes.json      technique -> the `core.slots.Change`s that it made
data.json         `DataRecord`: source, layout and counts of the data
metrics.jsonl     one line per step (`StepMetrics`) and one per evaluation (`EvaluationMetrics`)
system.jsonl      one line per 10 s (`SystemMetrics`): what the process, its machine and its GPUs use, and the `Usage`
                  of the run so far; the last line of a session has its end
status.json       `ProcessStatus`, written every 5 s and removed at the end of a session: the process that writes the
                  run, and what each rank does
before.json       `StoredResults`: the evaluation before the first step, row by row
evaluation.json   `Evaluation`: the newest evaluation
events.jsonl      one line per `Event`
samples.json      a list of `SampleTexts` (see `Reader.samples`)
checkpoints/      step-N/ (engine/checkpoint.py), and best: the name of the best one
tokenizer/        the tokenizer in transformers' format
tracking/         of each tracker, how much of the run it has, and its log (tracking/progress.py)
profile/          of `--profile`: profile.json (`core.step_profile.StepProfile`), trace.json.gz, profile.html; on a GPU
                  memory.pickle and out-of-memory.pickle, which preheat never reads
report.html, report.json
labels.json       name, note and tags that the user gave the run in the dashboard (web/labels.py)
compressed-*/     models that `preheat compress` wrote, by method
serving/          exports that `preheat serve` wrote, by format
upload.writing/   links and copies of what is being uploaded (run/remote_copy.py)
lock              held by the process that writes the run

The types are those of `core.run_records`. JSON never holds NaN or infinities (`files.to_json`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.errors import RunError
from preheat.files import parse_json, read_bytes, read_record, to_json, write_atomic
from preheat.sanitize import shorten

__all__ = ["LABELS", "MARK", "MEMORY_KEYS", "PROFILE", "STATUS", "Mark", "abbreviate", "claim_folder", "read_mark"]

MARK = "preheat.json"
"""The file that marks a folder as written by preheat."""
STATUS = "status.json"
"""The file of a `ProcessStatus`."""
LABELS = "labels.json"
"""The file of a run with the labels that the user gave it."""
PROFILE = "profile"
"""The folder of a run that holds the profile of its steps."""

MEMORY_KEYS = {
    "peak_gib": "peak memory, GiB: resident on a CPU, reserved and the context on a GPU",
    "allocated_gib": "on a GPU, of it tensors, with cuBLAS's workspaces",
    "reserved_gib": "on a GPU, what torch's allocator has from the driver for them",
    "context_gib": (
        "on a GPU, what the process holds in addition, by the driver; left out if it does not report that (pip install "
        "nvidia-ml-py)"
    ),
}
"""Keys of measured memory in the event `measured`; `core.plan.Predicted` holds the prediction of each."""


@dataclass(frozen=True)
class Mark:
    """The content of the file `MARK`.

    Attributes:
        kind: of the folder's content: "run", or the result of another command, such as "bench".
        id: identity of a run, which its checkpoints carry.
        files: names of the files that preheat wrote there; of a run those of tokenizer/.
    """

    kind: str
    id: str
    files: tuple[str, ...] = ()

    @classmethod
    def create_mark(cls, kind: str, files: Sequence[str] = ()) -> Mark:
        return cls(kind, uuid.uuid4().hex, tuple(files))

    def write(self, folder: Path) -> None:
        """Writes the mark of a folder.

        Raises:
            OSError: it cannot be written.
        """
        write_atomic(folder / MARK, to_json(vars(self), indent=1) + "\n")


def read_mark(folder: Path) -> Mark | None:
    """Returns the mark of a folder, or None if it has none.

    Raises:
        RunError: the mark is damaged.
    """
    file = folder / MARK
    if not file.exists():
        return None
    try:
        # Damage is an error: the mark decides which files may be overwritten or removed.
        return read_record(Mark, parse_json(read_bytes(file)))
    except ValueError as error:
        raise RunError(f"{file}: is damaged ({error}); restore an intact copy of it, or name another folder") from None


def claim_folder(folder: str | Path, kind: str, files: Sequence[str]) -> None:
    """Creates a folder for results of preheat and marks it.

    Args:
        kind: kind of result, such as "bench".
        files: names of the files to be written; a marked folder may list more.

    Raises:
        RunError: the folder holds files that no earlier call wrote, or cannot be written.
    """
    folder = Path(folder)
    mark = read_mark(folder)
    # Without a mark, nothing in the folder is known to be preheat's.
    if mark is None and folder.is_dir() and (names := sorted(os.listdir(folder))):
        raise RunError(
            f"{folder}: holds files that preheat did not write ({abbreviate(names)}); name an empty or new folder "
            "with --out"
        )
    # A marked folder may list more files than this call will write.
    if mark is not None and (mark.kind != kind or not set(files) <= set(mark.files)):
        raise RunError(f"{folder}: holds a {shorten(mark.kind)} of preheat; name an empty or new folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark is None:
            Mark.create_mark(kind, files).write(folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); name another folder with --out") from None


def abbreviate(names: Sequence[str], most: int = 5) -> str:
    """Joins the first names, and counts the rest.

    Example:
        >>> abbreviate(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(shorten(name, 40) for name in names[:most]) + (f" and {more} more" if more > 0 else "")
