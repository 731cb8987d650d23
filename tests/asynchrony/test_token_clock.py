"""The clock of engines: by hand on a small case, on random schedules with random times, and with planted faults."""

import pytest
import random_clocks

from funrl.asynchrony.admission import AdmissionError, AdmissionRule
from funrl.asynchrony.token_clock import EndedGroups, EngineTime, ReplicaClock

QUICK = 200  # schedules; `python tests/asynchrony/random_clocks.py 10000` runs more
FAULTS = 200


def test_a_replica_waits_when_its_groups_before_the_lead_have_ended():
    clock = ReplicaClock(AdmissionRule(places=2, staleness=1), lambda ticket: ticket if ticket < 7 else None, 0, 1)
    assert clock.at_gate and clock.time == (0, 0) and not clock.may_begin
    clock.pass_gate()
    begun = [clock.begin() for _ in range(9) if clock.may_begin]
    assert begun == [0, 1, 2, 3] and clock.next_group == 4
    clock.tick = 5
    assert clock.end(1) == clock.time == EngineTime(0, 5)
    assert clock.end(0) == EngineTime(0, 5) and not clock.at_gate  # the lead is one group
    clock.tick = 6
    assert clock.end(2) == EngineTime(0, 6)
    assert clock.at_gate and clock.time == (1, 0) and clock.running == {3}
    clock.pass_gate()
    assert clock.may_begin and clock.time == (1, 0) and clock.begin() == 4


def test_groups_are_taken_in_the_order_of_their_ends_up_to_the_horizon():
    ended = EndedGroups()
    for number, time in ((4, (1, 0)), (1, (0, 9)), (0, (0, 9)), (3, (0, 2))):
        ended.add(number, time)
    assert [ended.take((0, 9)) for _ in range(2)] == [3, None]
    assert [ended.take((1, 0)) for _ in range(3)] == [0, 1, None]
    assert [ended.take() for _ in range(2)] == [4, None]


@pytest.mark.slow
def test_random_times_change_nothing_and_no_schedule_waits_for_ever():
    for seed in range(QUICK):
        random_clocks.check(seed)


class LateGate(ReplicaClock):
    """Waits for a gate only once all groups have ended that may begin, and one more."""

    @property
    def _lead(self):
        return self._rule.ahead + 1


class TooEarly(ReplicaClock):
    """Begins a batch one turn early."""

    @property
    def may_begin(self):
        return self.next_group is not None and self.next_group < self._rule.submitted_by(self.turn + 1)


class AnyOrder(EndedGroups):
    """Groups as they are delivered."""

    def take(self, horizon=None):
        return super().take()


@pytest.mark.parametrize("fault", [LateGate, TooEarly, AnyOrder])
def test_faults_are_found(fault, monkeypatch):
    monkeypatch.setattr(random_clocks, fault.__base__.__name__, fault)
    monkeypatch.setattr(random_clocks, "EVENTS", 10_000)
    with pytest.raises((AssertionError, AdmissionError)):
        for seed in range(FAULTS):
            random_clocks.check(seed)
