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


class FakeEvent:
    """An event of a GPU on which a second passes from record to record."""

    waits = 0
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def synchronize(self):
        FakeEvent.waits += 1

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_a_clock_waits_for_the_device_of_its_run_once_a_step(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "waits", 0)
    for device, expected in ((None, 0), (torch.device("cpu"), 0), (torch.device("cuda"), 1)):
        clock = clocks.Clock(device)
        for name in ("a", "b", "a"):
            with clock.phase(name):
                pass
        clock.move(0.25, "a", "c")
        assert FakeEvent.waits == 0
        seconds = clock.take()
        assert FakeEvent.waits == expected
    assert seconds == {"a": 1.75, "b": 1.0, "c": 0.25}
    assert clock.take() == {}
    assert waits == []


def test_peak_memory_is_that_of_a_process_that_holds_torch():
    held = clocks.memory_metrics(single())
    assert 0.05 < held["memory/host_gb"] < held["memory/peak_gb"] + 0.1 < 1000
