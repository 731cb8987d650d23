"""Trackers: where the metrics of each step go."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from funrl.track.records.run_directory import open_lines

StepMetrics = Mapping[str, float]


class Tracker(NamedTuple):
    """Somewhere metrics go: `tracker.write(step, metrics)` after every step, `tracker.close()` once."""

    write: Callable[[int, StepMetrics], None]
    close: Callable[[], object]


def jsonl(path: Path) -> Tracker:
    """Add one JSON object a step to a file; what is not finite becomes null."""
    lines = open_lines(path)
    return Tracker(lambda step, metrics: lines.write({"step": step} | dict(metrics)), lines.close)


def tensorboard(directory: Path) -> Tracker:
    """Write TensorBoard events, readable after every step.

    Only tensorboard's record format is imported (0.2 s; torch's writer takes seconds), and no thread is started.

    Raises:
      ImportError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard events need tensorboard (pip install tensorboard): {error}") from error
    directory.mkdir(parents=True, exist_ok=True)
    now = time.time()
    name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
    file = open(directory / name, "ab")  # noqa: SIM115  (closed by the caller)
    records = RecordWriter(file)

    def add(event: Event) -> None:
        records.write(event.SerializeToString())
        file.flush()

    def write(step: int, metrics: StepMetrics) -> None:
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    add(Event(wall_time=now, file_version="brain.Event:2"))
    return Tracker(write, file.close)
