"""Leases: each unit is delivered once, whatever happens to generators."""

import pytest
from random_leases import ScheduleError, World

from funrl.asynchrony.leases import Lease, LeaseRule, Leases


def test_units_of_a_silent_generator_go_to_others_and_its_late_answer_is_discarded():
    leases = Leases(LeaseRule(silent_s=20))
    leases.open(["a", "b", "c"])
    leases.enter("first", 0)
    leases.enter("second", 0)
    assert leases.take("first", 2, 1) == (Lease(0, "a"), Lease(1, "b"))
    leases.heard("second", 19)
    (lost,) = leases.expire(21)
    assert lost.generator == "first" and lost.units == ("a", "b") and "silent for 21 s" in lost.reason
    assert leases.take("second", 9, 22) == (Lease(2, "a"), Lease(3, "b"), Lease(4, "c"))
    assert leases.deliver("first", 0) is None
    assert leases.deliver("second", 2) == "a" and leases.deliver("second", 2) is None
    assert not leases.heard("first", 23)
    leases.enter("first", 23)
    assert leases.take("first", 1, 23) == ()


def test_a_generator_that_beats_and_stands_still_loses_its_units_and_an_idle_one_stays():
    leases = Leases(LeaseRule(silent_s=20, stuck_s=100))
    leases.open(["a"])
    for name in ("works", "idles"):
        leases.enter(name, 0)
    leases.take("works", 1, 0)
    for now in range(10, 200, 10):
        for name in ("works", "idles"):
            leases.heard(name, now, progress=7)
        if lost := leases.expire(now):
            break
    assert now == 120 and lost[0].units == ("a",) and "no progress for 110 s" in lost[0].reason
    assert leases.generators == ("idles",)


def test_what_is_given_back_comes_before_what_was_opened_later():
    leases = Leases()
    leases.open("abc")
    leases.enter("one", 0)
    leases.take("one", 2, 0)
    lost = leases.leave("one")
    assert lost is not None and lost.units == ("a", "b") and leases.leave("one") is None
    leases.enter("two", 0)
    assert [lease.unit for lease in leases.take("two", 3, 0)] == ["a", "b", "c"]
    assert leases.withdraw("ab") == {"two": (2, 3)} and leases.held_by("two") == (Lease(4, "c"),)
    with pytest.raises(ValueError, match="'c' is open already"):
        leases.open("c")
    with pytest.raises(ValueError, match="'two' is in service already"):
        leases.enter("two", 1)


def test_random_schedules_deliver_each_unit_once():
    worlds = [World(seed).run() for seed in range(150)]
    assert sum(len(world.lost) for world in worlds) > 50
    assert sum(world.discarded for world in worlds) > 20


class Trusting(Leases):
    """Takes an answer of anybody who once had the unit."""

    def __init__(self, rule):
        super().__init__(rule)
        self.units = {}

    def take(self, generator, most, now):
        taken = super().take(generator, most, now)
        self.units |= {lease.number: lease.unit for lease in taken}
        return taken

    def deliver(self, generator, number):
        super().deliver(generator, number)
        return self.units[number]


class Patient(Leases):
    """Never gives up on a generator."""

    def expire(self, now):
        return ()


@pytest.mark.parametrize("kind", [Trusting, Patient])
def test_the_schedules_find_leases_that_are_wrong(kind):
    with pytest.raises(ScheduleError):
        for seed in range(60):
            World(seed, kind).run()
