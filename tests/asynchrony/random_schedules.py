"""Random schedules of an asynchronous run, driven through an `Admission`, and what must hold in each of them.

    python tests/asynchrony/random_schedules.py 10000

What holds is checked from outside, with versions and counts of this file's own: the age of each group is at most
S + ceil((W - 1) / P), each place is filled once, in the window, and the run ends.
"""

import math
import random
import sys
from typing import NamedTuple

from funrl.asynchrony.admission import Admission, AdmissionError, AdmissionRule

TICKS = 20_000  # in which every schedule of this size has ended


class ScheduleError(AssertionError):
    """What must hold does not."""


class Chances(NamedTuple):
    """Of what happens in a tick, and of how a group ends."""

    switches: float
    restarts: float
    most_ticks: int  # of an update
    spread: float  # of the logarithm of a group's ticks


class Running(NamedTuple):
    born: int
    left: float


class World:
    """Generators, groups and a trainer around an admission."""

    def __init__(self, seed: int, kind: type[Admission]):
        self.random = random.Random(seed)
        pick = self.random
        places = pick.choice([1, 2, 3, 5, 8])
        self.rule = AdmissionRule(places, pick.choice([0, 1, 2, 3]), pick.choice([1, 1, 2, places, 2 * places + 1]))
        self.admission = kind(self.rule)
        self.until = places * pick.randint(1, 6)
        self.chances = Chances(
            switches=pick.choice([0.1, 0.5, 1.0]),
            restarts=pick.choice([0.0, 0.0, 0.01]),
            most_ticks=pick.choice([0, 3, 20]),
            spread=pick.choice([0.2, 1.0, 2.0]),
        )
        self.version = 0
        self.updating: int | None = None  # ticks that the update still takes
        self.taken: list[int] = []  # of the trainer's batch
        self.filled: list[int] = []  # all places, in the order in which the trainer took them
        self.held: int | None = None  # version of the generators
        self.running: dict[int, Running] = {}
        self.births: dict[int, int] = {}
        self.ages: list[int] = []

    def run(self) -> "World":
        for _ in range(TICKS):
            self.change_weights()
            self.submit()
            self.generate()
            self.train()
            if len(self.filled) >= self.until and self.updating is None:
                self.end()
                return self
        raise ScheduleError(f"deadlock: {len(self.filled)} of {self.until} places are filled; {self.admission}")

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def change_weights(self) -> None:
        if self.happens(self.chances.restarts):
            taken = [place for place in range(self.until) if place in self.filled]
            oldest = next((place for place in range(self.until) if place not in self.filled), self.until)
            fresh = max(taken, default=-1) + 1
            again = tuple(place for place in range(oldest, fresh) if place not in self.filled)
            overtaken = frozenset(place for place in taken if place > oldest)
            kind = type(self.admission)
            self.admission = kind(self.rule, max(fresh, oldest), oldest, overtaken=overtaken, again=again)
            self.held = None
            self.running = {}
        if self.held is None:
            self.hold(self.random.randint(max(0, self.version - 3), self.version))
        elif self.held < self.version and self.happens(self.chances.switches):
            self.hold(self.random.randint(self.held + 1, self.version))

    def hold(self, version: int) -> None:
        self.held = version
        self.admission = self.admission.version_held(version)

    def submit(self) -> None:
        places, self.admission = self.admission.submit(self.until)
        for place in places:
            if place in self.running or place in self.filled or not 0 <= place < self.until:
                raise ScheduleError(f"group {place} is submitted and runs, is consumed, or is beyond the run")
            least = place // self.rule.places - self.rule.staleness
            if self.held is None or self.held < least:
                raise ScheduleError(f"group {place} is submitted, and generators hold {self.held}, not {least}")
            ticks = 5 * self.random.lognormvariate(0, self.chances.spread)
            self.running[place] = Running(self.held, ticks)

    def generate(self) -> None:
        complete = []
        for place, group in sorted(self.running.items()):
            self.running[place] = group._replace(left=group.left - 1)
            if group.left <= 1:
                complete.append(place)
        for place in complete:
            self.admission = self.admission.finish([place])
            self.births[place] = self.running.pop(place).born

    def train(self) -> None:
        if self.updating is not None:
            self.updating -= 1
            if self.updating < 0:
                self.updating = None
                self.version += 1
            return
        places = self.admission.consumable()
        if self.happens(0.3):  # the trainer need not take all at once
            places = places[: self.random.randint(0, len(places))]
        _, self.admission = self.admission.consume(places)
        for place in places:
            if place in self.filled:
                raise ScheduleError(f"place {place} is filled twice")
            oldest = next(i for i in range(self.until + 1) if i not in self.filled)
            if place >= oldest + self.rule.window:
                raise ScheduleError(f"group {place} overtakes {oldest} beyond the window {self.rule.window}")
            age = self.version - self.births[place]
            bound = self.rule.staleness + math.ceil((self.rule.window - 1) / self.rule.places)
            if age > bound:
                raise ScheduleError(f"group {place} has age {age}, and the bound is {bound}")
            self.ages.append(age)
            self.filled.append(place)
            self.taken.append(place)
        if len(self.taken) == self.rule.places:
            self.taken = []
            self.updating = self.random.randint(0, self.chances.most_ticks)

    def end(self) -> None:
        if sorted(self.filled) != list(range(self.until)):
            raise ScheduleError(f"places {sorted(self.filled)} are filled, and the run has {self.until}")
        if self.rule.window == 1 and self.filled != sorted(self.filled):
            raise ScheduleError(f"window 1 is strict order, and groups were taken as {self.filled}")


def failures(kind: type[Admission], seeds: range) -> list[str]:
    """Message of the first schedule in which something does not hold; [] if there is none."""
    for seed in seeds:
        try:
            World(seed, kind).run()
        except (ScheduleError, AdmissionError, KeyError) as error:
            return [f"seed {seed}: {error}"]
    return []


if __name__ == "__main__":
    count = int(sys.argv[1])
    messages = failures(Admission, range(count))
    print(*messages or [f"{count} schedules: no failure"])
    sys.exit(bool(messages))
