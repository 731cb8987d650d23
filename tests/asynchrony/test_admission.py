"""The rule of admission: by hand on a small case, on random schedules, and with faults planted in it."""

import pytest
from random_schedules import failures

from funrl.asynchrony.admission import Admission, AdmissionError, AdmissionRule

QUICK = 500  # schedules; `python tests/asynchrony/random_schedules.py 10000` runs more
FAULTS = 400


def started(places=2, staleness=1.0, window=1):
    return Admission(AdmissionRule(places, staleness, window)).version_held(0)


def test_groups_are_submitted_by_the_oldest_version_in_service():
    assert Admission(AdmissionRule(2, 1.0)).submit(until=100)[0] == ()
    places, admission = started().submit(until=100)
    assert places == (0, 1, 2, 3)  # floor(i / 2) - 1 <= 0
    ages, admission = admission.finish(places).consume([0, 1])
    assert ages == {0: 0, 1: 0} and admission.batch == 1
    assert admission.submit(until=100)[0] == ()  # a generator still holds version 0
    assert admission.version_held(1).submit(until=100)[0] == (4, 5)
    assert admission.version_held(1).submit(until=5)[0] == (4,)  # the run ends


def test_a_resumed_run_submits_what_was_overtaken_first():
    admission = Admission(AdmissionRule(2, 1, 3), fresh=2, overtaken=frozenset({1}), again=(0,)).version_held(0)
    assert admission.submit(until=6)[0] == (0, 2, 3)


def test_a_window_of_one_keeps_the_order_and_a_larger_one_takes_what_is_ready():
    for window, ready in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 2))):
        _, admission = started(window=window).submit(until=4)
        admission = admission.finish([3, 1, 2])
        assert admission.consumable() == ready  # a batch has two
        assert admission.finish([0]).consumable() == (0, 1)


@pytest.mark.parametrize("staleness,ahead,most", [(0, 0, 0), (0.25, 1, 1), (0.5, 2, 1), (1, 4, 1), (1.25, 5, 2)])
def test_a_fraction_of_a_batch_may_be_ahead(staleness, ahead, most):
    rule = AdmissionRule(places=4, staleness=staleness)
    assert rule.ahead == ahead and rule.most_age == most
    assert rule.submitted_by(0) == 4 + ahead
    assert [rule.least_version(i) <= 0 for i in range(12)] == [i < 4 + ahead for i in range(12)]


@pytest.mark.parametrize("places,staleness,window,most", [(4, 2, 1, 2), (4, 2, 2, 3), (4, 2, 5, 3), (4, 2, 6, 4)])
def test_the_bound_is_the_published_one(places, staleness, window, most):
    assert AdmissionRule(places, staleness, window).most_age == most


@pytest.mark.parametrize(
    "ask,message",
    [
        (lambda a: a.finish([4]), "group 4 has finished and was not running"),
        (lambda a: a.finish([0]).finish([0]), "a group finishes once"),
        (lambda a: a.finish([1]).consume([1]), "group 1 is to be consumed while 0 is not: the window is 1"),
        (lambda a: a.consume([0]), "group 0 is to be consumed and waits for no trainer"),
        (lambda a: a.finish([0, 1, 2]).consume([0, 1, 2]), "batch 0 has all of its groups"),
        (lambda a: a.version_held(1), "generators report version 1; they held 0, and the trainer is at 0"),
        (lambda a: AdmissionRule(0).checked(), "places and window are at least 1"),
    ],
)
def test_what_the_rule_does_not_allow_is_refused(ask, message):
    admission = started().submit(until=100)[1]
    with pytest.raises(AdmissionError) as error:
        ask(admission)
    assert message in str(error.value)


@pytest.mark.slow
def test_random_schedules():
    assert failures(Admission, range(QUICK)) == []


@pytest.mark.parametrize("places,staleness,window", [(1, 1, 1), (4, 1, 1), (4, 2, 3), (4, 2, 5), (4, 2, 6), (3, 4, 9)])
def test_the_bound_is_reached(places, staleness, window):
    """One group is late until the trainer can take no other: no smaller bound holds."""
    admission = Admission(AdmissionRule(places, staleness, window))
    late = places * (staleness + 1) - 1  # the last of the first batch that is not submitted at once
    ages = {}
    while late not in ages:
        version = len(ages) // places
        new, admission = admission.version_held(version).submit(until=1000)
        admission = admission.finish(i for i in new if i != late)
        taken = admission.consumable()
        if not taken:
            admission = admission.finish([late])
            taken = admission.consumable()
        new_ages, admission = admission.consume(taken)
        ages |= new_ages
    assert ages[late] == max(ages.values()) == admission.rule.most_age


class OneMore(Admission):
    """A group too many is submitted: an error by one in the bound."""

    def submit(self, until):
        version = self.version
        if version is None or self.fresh >= min(until, self.rule.submitted_by(version) + 1):
            return super().submit(until)
        places, after = super().submit(until)
        return (*places, after.fresh), after._replace(
            fresh=after.fresh + 1, running={**after.running, after.fresh: version}
        )


class WideWindow(Admission):
    """The window is one too wide."""

    def consumable(self, most=None):
        return Admission(*self._replace(rule=self.rule._replace(window=self.rule.window + 1))).consumable(most)

    def consume(self, places):
        ages, after = Admission(*self._replace(rule=self.rule._replace(window=self.rule.window + 1))).consume(places)
        return ages, type(self)(*after._replace(rule=self.rule))


class Doubled(Admission):
    """A group that has finished is submitted again too."""

    def finish(self, places):
        after = super().finish(places)
        return after._replace(again=(*after.again, *places))


class Forgotten(Admission):
    """A resumed run does not submit again what was overtaken."""

    def submit(self, until):
        return super(Forgotten, self._replace(again=())).submit(until)


class Endless(Admission):
    """Groups beyond the end of the run are submitted."""

    def submit(self, until):
        return super().submit(until + 1)


@pytest.mark.parametrize(
    "fault",
    [OneMore, WideWindow, Doubled, Forgotten, Endless],
)
def test_a_planted_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr("random_schedules.TICKS", 2000)
    assert failures(fault, range(FAULTS))
