"""TensorBoard event files, by default in `tracking/tensorboard` of the run's folder: `tensorboard --logdir runs`.

Source: https://www.tensorflow.org/tensorboard and its summary formats (2.21). torch and TensorFlow are not needed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from preheat.tracking.tracker import Start, Status, Table, Tracker, why_not_writable

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["TensorBoard"]


def _choose_folder(start: Start) -> Path:
    return start.folder / "tracking" / "tensorboard" if start.local is None else start.local / start.name


class TensorBoard(Tracker):
    """Scalars, texts and parameters. A resumed session adds a file, which TensorBoard joins to the earlier ones."""

    name = "tensorboard"
    package = "tensorboard"
    pip = "preheat[tensorboard]"
    # From `start` on. Not tensorboard's EventFileWriter: its thread may lose an event to a full disk after `flush`
    # has returned, and the event would count as sent.
    _file: BinaryIO
    _records: RecordWriter

    def __init__(self) -> None:
        self._folder = Path()
        self._step = 0

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        folder = _choose_folder(start)
        if start.local is not None and folder.exists() and any(folder.iterdir()):
            return f"{folder} has another run's files already"
        return why_not_writable(folder)

    def start(self, start: Start, known: str | None) -> str:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = _choose_folder(start)
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds files by the first part of the name, and sorts them by the second.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = (self._folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if known is None:
            rows = [(key, str(value)) for key, value in start.parameters.items()]
            self.table(0, "parameters", Table(("key", "value"), rows))
            # For programs: one text with all of them.
            self._add_text(0, "parameters.json", json.dumps(dict(start.parameters)))
        return str(self._folder)

    @property
    def url(self) -> str | None:
        return f"tensorboard --logdir {self._folder}"

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def _add(self, step: int, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._step = max(self._step, step)
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, Summary(value=[Summary.Value(tag=n, simple_value=value) for n, value in values.items()]))

    def _add_text(self, step: int, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name=name, description="")
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._add(step, Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)]))

    def table(self, step: int, name: str, table: Table) -> None:
        self._add_text(step, name, table.render_markdown())

    def summary(self, values: Mapping[str, float]) -> None:
        self.metrics(self._step, values)

    def artifact(self, file: Path) -> None:
        # TensorBoard has no artifacts; the page is linked from a text.
        self._add_text(self._step, file.stem, f"[{file.name}]({file.absolute().as_uri()})")

    def flush(self) -> None:
        self._records.flush()

    def finish(self, status: Status) -> None:
        self._add_text(self._step, "status", status)
        self._file.close()
