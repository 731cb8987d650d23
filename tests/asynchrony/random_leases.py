"""Random schedules of generators that come, die, stop, hang and go, driven through `Leases`.

    python tests/asynchrony/random_leases.py 10000

What holds is checked from outside: each unit is delivered once, nothing is leased to two generators at a time, a
generator that is silent is out of service in time, and the run ends.
"""

import random
import sys
from typing import Any, NamedTuple

from funrl.asynchrony.leases import Lease, LeaseRule, Leases

TICKS = 20_000  # in which every schedule of this size has ended


class ScheduleError(AssertionError):
    """What must hold does not."""


class Late(NamedTuple):
    """An answer on its way."""

    arrives: int
    generator: str
    lease: Lease


class Machine:
    """A generator as it is, whatever the leases say of it."""

    def __init__(self, name, room):
        self.name = name
        self.room = room
        self.stopped_until = -1  # SIGSTOP
        self.hangs = False  # beats, and its engine stands still
        self.iterations = 0
        self.works: dict[int, Lease] = {}
        self.left: dict[int, int] = {}  # ticks of each lease

    def take(self, lease, ticks):
        self.works[lease.number] = lease
        self.left[lease.number] = ticks


class World:
    """Machines and units around the leases."""

    def __init__(self, seed, kind=Leases):
        pick = self.random = random.Random(seed)
        self.rule = LeaseRule(silent_s=pick.choice([3, 8]), stuck_s=pick.choice([15, 40]))
        self.leases = kind(self.rule)
        self.units: list[Any] = [("group", number) for number in range(pick.randint(1, 40))]
        self.dies = pick.choice([0.0, 0.02, 0.1])
        self.stops = pick.choice([0.0, 0.02, 0.1])
        self.hangs = pick.choice([0.0, 0.01])
        self.goes = pick.choice([0.0, 0.02])
        self.delay = pick.choice([0, 3, 30])
        self.machines: dict[str, Machine] = {}
        self.count = 0
        self.answers: list[Late] = []
        self.delivered: dict = {}
        self.withdrawn: set = set()
        self.opened = 0
        self.discarded = 0
        self.lost = []

    def run(self):
        for tick in range(TICKS):
            self.tick(tick)
            if len(self.delivered) + len(self.withdrawn) == len(self.units):
                self.drain(tick)
                return self
        raise ScheduleError(f"after {TICKS} ticks {len(self.delivered)} of {len(self.units)} units are delivered")

    def tick(self, now):
        pick = self.random
        if self.opened < len(self.units) and pick.random() < 0.3:
            some = self.units[self.opened : self.opened + pick.randint(1, 8)]
            self.leases.open(some)
            self.opened += len(some)
        if pick.random() < (0.05 if self.machines else 0.5):
            self.join(now)
        for machine in list(self.machines.values()):
            self.act(machine, now)
        for answer in [a for a in self.answers if a.arrives <= now]:
            self.answers.remove(answer)
            self.arrive(answer)
        self.expire(now)
        if self.opened and pick.random() < 0.005:
            self.withdraw(pick.choice(self.units[: self.opened]))
        self.check()

    def join(self, now):
        name = f"g{self.count}"
        self.count += 1
        self.machines[name] = Machine(name, self.random.randint(1, 5))
        self.leases.enter(name, now)

    def act(self, machine, now):
        pick = self.random
        if pick.random() < self.dies:
            del self.machines[machine.name]  # nobody says so: it is silent
            if pick.random() < 0.5:  # its socket is closed
                self.returned(self.leases.leave(machine.name, "dead"))
            return
        if machine.stopped_until >= now:
            return
        if pick.random() < self.stops:
            machine.stopped_until = now + pick.choice([2, 20, 200])
            return
        if pick.random() < self.goes:
            del self.machines[machine.name]
            self.returned(self.leases.leave(machine.name))
            return
        machine.hangs = machine.hangs or pick.random() < self.hangs
        if not machine.hangs:
            machine.iterations += 1
            self.work(machine, now)
        if not self.leases.heard(machine.name, now, machine.iterations):
            if machine.hangs:  # whoever started it ends it
                del self.machines[machine.name]
                return
            self.leases.enter(machine.name, now)
        for lease in self.leases.take(machine.name, machine.room - len(machine.works), now):
            machine.take(lease, self.ticks())

    def ticks(self):
        return max(1, round(self.random.lognormvariate(1.5, 1)))

    def work(self, machine, now):
        for number in list(machine.works):
            machine.left[number] -= 1
            if machine.left[number] <= 0:
                lease = machine.works.pop(number)
                del machine.left[number]
                self.answers.append(Late(now + self.random.randint(0, self.delay), machine.name, lease))

    def arrive(self, answer):
        unit = self.leases.deliver(answer.generator, answer.lease.number)
        if unit is None:
            self.discarded += 1
            return
        if unit != answer.lease.unit or unit in self.delivered or unit in self.withdrawn:
            raise ScheduleError(f"{unit} is delivered and was {answer.lease.unit}, or is delivered twice")
        self.delivered[unit] = answer.generator

    def expire(self, now):
        for lost in self.leases.expire(now):
            self.returned(lost)
            self.lost.append(lost)
        for name in self.leases.generators:
            machine = self.machines.get(name)
            silent = machine is None or machine.stopped_until >= now
            if silent and now - self.heard(name) > self.rule.silent_s:
                raise ScheduleError(f"{name} has been silent since {self.heard(name)} and is in service at {now}")

    def heard(self, name):
        return self.leases._holders[name].heard

    def returned(self, lost):
        if lost is not None and any(unit in self.delivered for unit in lost.units):
            raise ScheduleError(f"{lost} gives back what is delivered")

    def withdraw(self, unit):
        if unit in self.delivered or unit in self.withdrawn:
            return
        self.leases.withdraw([unit])
        self.withdrawn.add(unit)

    def check(self):
        held = [lease.unit for name in self.leases.generators for lease in self.leases.held_by(name)]
        if len(held) != len(set(held)):
            raise ScheduleError(f"leased twice: {sorted(held)}")
        known = len(held) + self.leases.waiting + len(self.delivered) + len(self.withdrawn)
        if known != self.opened:
            raise ScheduleError(f"{self.opened} units are opened and {known} accounted for")

    def drain(self, now):
        """Late answers after the end are discarded too."""
        for answer in self.answers:
            self.arrive(answer)


def main(count):
    lost = discarded = 0
    for seed in range(count):
        world = World(seed).run()
        lost += len(world.lost)
        discarded += world.discarded
    return f"{count} schedules: {lost} generators lost, {discarded} late answers discarded, each unit delivered once"


if __name__ == "__main__":
    print(main(int(sys.argv[1])))
