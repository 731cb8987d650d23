"""Ages and waits of a log, by hand."""

import pytest

from funrl.asynchrony.admission import Admission, AdmissionRule
from funrl.asynchrony.schedule_log import ScheduleEvent, Wait, age_metrics, waited_seconds, waits_of

LOG = [
    ScheduleEvent(0.0, "submitted", "a"),
    ScheduleEvent(0.0, "submitted", "a"),
    ScheduleEvent(0.0, "submitted", "b"),
    ScheduleEvent(2.0, "finished", "a"),
    ScheduleEvent(3.0, "finished", "b"),  # b has nothing more to do until the trainer has ended
    ScheduleEvent(5.0, "finished", "a"),
    ScheduleEvent(5.0, "began"),
    ScheduleEvent(9.0, "ended"),
    ScheduleEvent(9.0, "submitted", "b"),
    ScheduleEvent(9.5, "submitted", "a"),
    ScheduleEvent(12.0, "finished", "a"),
    ScheduleEvent(14.0, "finished", "b"),
    ScheduleEvent(14.0, "began"),
    ScheduleEvent(15.0, "ended"),
    ScheduleEvent(15.0, "began"),  # its groups were there: nobody waited
]


def test_who_waited_for_whom():
    assert waits_of(LOG) == [
        Wait("trainer", "a", 0.0, 5.0),
        Wait("b", "trainer", 3.0, 9.0),
        Wait("a", "trainer", 5.0, 9.5),
        Wait("trainer", "b", 9.0, 14.0),
    ]
    assert waited_seconds(waits_of(LOG)) == {
        ("b", "trainer"): 6.0,
        ("trainer", "a"): 5.0,
        ("trainer", "b"): 5.0,
        ("a", "trainer"): 4.5,
    }
    assert next(iter(waited_seconds(waits_of(LOG)))) == ("b", "trainer") and waits_of([]) == []


def test_ages_are_those_that_the_admission_gives():
    admission = Admission(AdmissionRule(places=2, staleness=1)).version_held("a", 0)
    places, admission = admission.submit(until=4)
    _, admission = admission.finish(places).consume([0, 1])
    ages, _ = admission.consume([2, 3])
    assert age_metrics(ages) == {"rollout/age_mean": 1.0, "rollout/age_max": 1.0}
    assert age_metrics({4: 0, 5: 3}) == {"rollout/age_mean": pytest.approx(1.5), "rollout/age_max": 3.0}
