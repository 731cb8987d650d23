"""Trackers: metrics reach JSON lines and TensorBoard events, readable while the run continues."""

import json
import math
import subprocess
import sys

import pytest

from funrl.track.records.trackers import jsonl, tensorboard


def test_jsonl_writes_one_valid_object_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = jsonl(path)
    tracker.write(1, {"reward/mean": 0.5, "actor/pg_loss": math.nan})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5, "actor/pg_loss": None}
    tracker.write(2, {"reward/mean": math.inf})
    tracker.close()
    last = json.loads(path.read_text().splitlines()[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert last == {"step": 2, "reward/mean": None}


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    tracker = tensorboard(tmp_path / "tb")
    tracker.write(1, {"reward/mean": 0.25, "actor/entropy": 1.5})
    tracker.write(2, {"reward/mean": 0.75})
    (path,) = (tmp_path / "tb").iterdir()
    events = list(EventFileLoader(str(path)).Load())  # before it is closed: flushed at every step
    tracker.close()
    results = {(event.step, value.tag): value.tensor.float_val[0] for event in events for value in event.summary.value}
    assert results == {(1, "reward/mean"): 0.25, (1, "actor/entropy"): 1.5, (2, "reward/mean"): 0.75}
    assert events[0].file_version == "brain.Event:2"


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path):
    program = (
        "import sys, pathlib; from funrl.track.records.trackers import tensorboard\n"
        "assert 'tensorboard' not in sys.modules\n"
        "tensorboard(pathlib.Path(sys.argv[1])).write(1, {'a': 1.0})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
