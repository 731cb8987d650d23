"""Log of the schedule of an asynchronous run: the ages of its groups, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

TRAINER = "trainer"


class ScheduleEvent(NamedTuple):
    """One event.

    Attributes:
      seconds: since the beginning of the run.
      kind: a group was submitted to a generator, or has finished there; the trainer began an update, or ended it.
      generator: name; "" for events of the trainer.
    """

    seconds: float
    kind: Literal["submitted", "finished", "began", "ended"]
    generator: str = ""


class Wait(NamedTuple):
    """Seconds in which one side had nothing to do.

    Attributes:
      who: the trainer or a generator.
      whom: the generator whose group came last, or the trainer, whose new version lets groups be submitted.
    """

    who: str
    whom: str
    begin: float
    end: float


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """Metrics of a batch's groups: "rollout/age_mean" and "rollout/age_max", in versions.

    Args:
      ages: by the numbers of the groups, as `Admission.consume` returns them.

    Example:
      >>> age_metrics({0: 1, 1: 2})
      {'rollout/age_mean': 1.5, 'rollout/age_max': 2.0}
    """
    return {"rollout/age_mean": sum(ages.values()) / len(ages), "rollout/age_max": float(max(ages.values()))}


def waits_of(events: Iterable[ScheduleEvent]) -> list[Wait]:
    """The waits of a log, by their ends.

    A trainer that is not updating waits for the generator that finishes the last group before it begins. A generator
    without a group waits for the trainer.

    Args:
      events: in the order of time.
    """
    waits = []
    running: dict[str, int] = {}
    idle: dict[str, float] = {}
    trainer_idle: float | None = 0.0
    last = ""
    for seconds, kind, generator in events:
        if kind == "submitted":
            begin = idle.pop(generator, seconds)
            if seconds > begin:
                waits.append(Wait(generator, TRAINER, begin, seconds))
            running[generator] = running.get(generator, 0) + 1
        elif kind == "finished":
            last = generator
            running[generator] -= 1
            if not running[generator]:
                idle[generator] = seconds
        elif kind == "ended":
            trainer_idle = seconds
        elif trainer_idle is not None:
            if seconds > trainer_idle:
                waits.append(Wait(TRAINER, last, trainer_idle, seconds))
            trainer_idle = None
    return waits


def waited_seconds(waits: Iterable[Wait]) -> dict[tuple[str, str], float]:
    """Seconds by (who, whom), the longest first."""
    totals: dict[tuple[str, str], float] = {}
    for who, whom, begin, end in waits:
        totals[who, whom] = totals.get((who, whom), 0.0) + end - begin
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))
