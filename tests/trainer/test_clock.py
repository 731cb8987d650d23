"""The clock and the memory of the loop."""

import pytest
import torch

from funrl.mesh.mesh import single
from funrl.trainer.steps import clock as clocks


def test_a_clock_adds_recurring_phases_and_is_emptied_even_where_a_phase_fails():
    clock = clocks.Clock()
    for _ in range(2):
        with clock.phase("a"):
            pass
    with pytest.raises(KeyError), clock.phase("b"):
        raise KeyError
    first = clock.take()
    assert set(first) == {"a", "b"} and all(s >= 0 for s in first.values())
    assert clock.take() == {}


def test_seconds_move_between_phases_and_their_sum_stays():
    clock = clocks.Clock()
    clock.seconds = {"a": 3.0, "b": 1.0}
    clock.move(0.5, "a", "b")
    clock.move(0.25, "a", "c")
    assert clock.take() == {"a": 2.25, "b": 1.5, "c": 0.25}


def test_a_clock_waits_for_the_device_of_its_run_alone(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    for device in (None, torch.device("cpu"), torch.device("cuda")):
        with clocks.Clock(device).phase("a"):
            pass
    assert len(waits) == 1


def test_peak_memory_is_that_of_a_process_that_holds_torch():
    held = clocks.memory_metrics(single())
    assert 0.05 < held["memory/host_gb"] < held["memory/peak_gb"] + 0.1 < 1000
