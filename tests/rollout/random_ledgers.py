"""Random schedules of a run, driven through a ledger, and what must hold in each of them.

    python tests/rollout/random_ledgers.py 10000

What holds is checked from outside, with versions and counts of this file's own: the age of each place is at most
S + ceil((W - 1) / P), each place is taken once, in the window, with its current attempt, and the run ends. Without
staleness the batches are the same whatever the runners and their timing.
"""

import copy
import math
import random
import sys
import types
from pathlib import Path

import funrl.rollout.ledger

TICKS = 2_000  # in which every schedule of this size has ended
SOURCE = Path(funrl.rollout.ledger.__file__)


class ScheduleError(AssertionError):
    """What must hold does not."""


def require(holds, message):
    if not holds:
        raise ScheduleError(message)


class Group:
    """A place on its way, as the schedule sees it."""

    def __init__(self):
        self.prompt = None
        self.attempt = 0
        self.owner = None  # while it runs
        self.born = None  # version at which it began
        self.left = 0  # ticks
        self.written = False
        self.scored = False


class World:
    """Runners, groups, late messages and a trainer around a ledger."""

    def __init__(self, seed, module, calm=False):
        pick = random.Random(seed)
        self.seed = seed
        self.module = module
        self.calm = calm
        places = pick.choice([1, 2, 3, 5, 8])
        staleness = pick.choice([0, 0, 1, 2, 0.5])
        window = pick.choice([1, 1, 2, places, 2 * places + 1]) if staleness else 1
        self.rule = module.LedgerRule(places, staleness, window, pick.choice([1, 2, 3]), pick.random() < 0.3).checked()
        self.rounds = self.rule.scores or staleness == 0
        self.until = places * pick.randint(1, 6)
        self.ledger = module.Ledger(self.rule, self.until)
        self.random = random.Random(0 if calm else seed + 1)
        self.kills, self.crashes = (0, 0) if calm else (pick.choice([0, 0.02]), pick.choice([0, 0.005, 0.03]))
        self.crashes_left = 10  # a run that crashes before its first batch begins with nothing each time
        self.spread = pick.choice([0.2, 1.0, 2.0])
        self.runners = dict.fromkeys(range(1 if calm else pick.randint(1, 4)), 0)  # -> version held
        self.names = len(self.runners)
        self.groups = {}
        self.messages = []  # late deliveries: runner, place, attempt
        self.prompts = 0
        self.spent = {}
        self.version = 0
        self.updating = 0  # ticks that the update still takes
        self.ready = 0  # version that runners may take
        self.taken = []
        self.joined = {}
        self.batches = []
        self.saved = ([], 0)  # of a checkpoint: places taken in the window, and further prompts that were used
        self.events = dict.fromkeys(("begun", "lost", "refilled", "taken"), 0)

    def happens(self, chance):
        return self.random.random() < chance

    def run(self):
        for _ in range(TICKS):
            self.change_runners()
            self.begin()
            self.write()
            self.receive()
            self.train()
            if len(self.taken) == self.until:
                require(sorted(self.taken) == list(range(self.until)), f"places {self.taken} are taken")
                counts = {name: self.ledger.counts[name] for name in self.events}
                require(counts == self.events, f"counts {self.events} are {counts}")
                require(not self.ledger.places and self.ledger.version == self.version, "the ledger is not at its end")
                return self.batches
        raise ScheduleError(f"deadlock: {len(self.taken)} of {self.until} places are taken; {self.ledger}")

    def change_runners(self):
        for owner in list(self.runners):
            if self.runners[owner] < self.ready and (self.calm or self.happens(0.5)):
                self.runners[owner] = self.random.randint(self.runners[owner] + 1, self.ready)
            if self.happens(self.kills):
                self.lose(owner)
                self.runners[self.names] = self.ready
                self.names += 1
        if self.crashes_left and self.happens(self.crashes):
            self.crashes_left -= 1
            self.crash()

    def lose(self, owner):
        del self.runners[owner]
        own = [number for number, group in self.groups.items() if group.owner == owner]
        for number in own:
            self.groups[number].owner = None
            self.groups[number].born = None
        self.events["lost"] += len(own)
        require(self.ledger.lost(owner) == sorted(own), f"runner {owner} had places {sorted(own)}")

    def crash(self):
        """Continue from the checkpoint of the last batch: nothing else is left of the run."""
        overtaken, self.prompts = self.saved
        self.ledger = self.module.Ledger.restored(self.rule, self.until, self.version, overtaken)
        self.runners = {self.names + number: self.version for number in range(len(self.runners))}
        self.names += len(self.runners)
        self.groups = {number: group for number, group in self.groups.items() if number in self.taken}
        self.messages, self.joined, self.spent = [], {}, {}
        self.ready, self.updating = self.version, 0
        self.events = dict.fromkeys(self.events, 0)
        waiting = [number for number in range(max(self.taken, default=-1) + 1) if number not in self.taken]
        require(self.ledger.waiting == waiting, f"a resumed run waits for {waiting}, not {self.ledger.waiting}")
        oldest = next(n for n in range(self.until + 1) if n not in self.taken)
        overtaken = {number for number in self.taken if number > oldest}
        require(self.ledger.overtaken == overtaken, f"a resumed run has taken {overtaken}, not {self.ledger.overtaken}")

    def begin(self):
        for owner, version in self.runners.items():
            room = self.until if self.calm else self.random.randint(0, 3)
            numbers = self.ledger.next_places(version, room)
            if self.happens(0.02):
                self.refuses_other_places(owner, version)
            if self.happens(0.2):  # a link whose runners share a counter reports places in any order
                self.random.shuffle(numbers)
                numbers = numbers[: len(numbers) // 2]
            require(len(numbers) <= room, f"{len(numbers)} places for {room}")
            for number, attempt in self.ledger.begin(owner, numbers, version).items():
                group = self.groups.setdefault(number, Group())
                idle = group.owner is None and not group.written and number not in self.taken
                require(
                    idle and 0 <= number < self.until, f"place {number} begins and runs, is written, or beyond the run"
                )
                require(self.may_begin(number, version), f"place {number} begins at version {version}")
                require(attempt > group.attempt, f"place {number} begins attempt {attempt} after {group.attempt}")
                if group.prompt is None:
                    group.prompt = ("first", number)
                group.attempt, group.owner = attempt, owner
                group.born = version
                group.left = min(60, 5 * self.random.lognormvariate(0, self.spread))
                self.events["begun"] += 1

    def may_begin(self, number, version):
        ahead = round(self.rule.staleness * self.rule.places)
        return math.floor((number - ahead) / self.rule.places) <= version <= self.version

    def refuses_other_places(self, owner, version):
        """Try to begin a place that does not wait, or needs another version."""
        busy = [number for number, group in self.groups.items() if group.owner is not None or group.written]
        idle = [number for number in range(self.until) if number not in self.taken and number not in busy]
        early = [number for number in idle if not self.may_begin(number, version)]
        attempts = [(number, version) for number in (*busy, self.until, *early)]
        attempts += [(number, self.version + 1) for number in idle]  # a version that is not trained yet
        number, version = self.random.choice(attempts)
        before = copy.deepcopy(self.ledger)
        try:
            self.ledger.begin(owner, [number], version)
        except self.module.LedgerError:
            require(self.ledger == before, "a refused begin changes the ledger")
            return
        raise ScheduleError(f"place {number} begins at version {version}")

    def write(self):
        for number, group in sorted(self.groups.items()):
            if group.owner is None:
                continue
            group.left -= 1
            if group.left <= 0 and (group.owner, number, group.attempt) not in self.messages:
                self.messages.append((group.owner, number, group.attempt))

    def receive(self):
        self.random.shuffle(self.messages)
        count = len(self.messages) if self.calm else self.random.randint(0, len(self.messages))
        arrived, self.messages = self.messages[:count], self.messages[count:]
        for owner, number, attempt in arrived:
            group = self.groups[number]
            current = group.owner == owner and group.attempt == attempt
            before = copy.deepcopy(self.ledger)
            require(self.ledger.deliver(owner, number, attempt) == current, f"place {number}: attempt {attempt}")
            if not current:
                require(self.ledger == before, f"place {number}: a delivery of attempt {attempt} changes the ledger")
                continue
            require(not self.ledger.deliver(owner, number, attempt), f"place {number} is delivered twice")
            group.owner, group.written = None, True
            if self.happens(0.2):
                self.messages.append((owner, number, attempt))  # and once more later, perhaps to another attempt
            if not self.rounds and self.drops(number):
                self.refill([number])

    def drops(self, number):
        return random.Random(str((self.seed, self.groups[number].prompt))).random() < 0.3

    def refill(self, numbers):
        budget = self.rule.places * (self.rule.prompts - 1)
        refilled = []
        for number in sorted(numbers):
            batch = self.version if self.rounds else number // self.rule.places
            if self.spent.get(batch, 0) < budget:
                self.spent[batch] = self.spent.get(batch, 0) + 1
                refilled.append(number)
        require(self.ledger.refill(numbers) == refilled, f"places {refilled} of {numbers} are to be refilled")
        for number in refilled:
            group = self.groups[number]
            group.prompt, self.prompts = ("further", self.prompts), self.prompts + 1
            group.written = group.scored = False
            group.born = None
        self.events["refilled"] += len(refilled)

    def train(self):
        self.updating -= 1
        if self.updating > 0:
            return
        self.ready = self.version
        if self.happens(0.3):  # the trainer need not look at once
            return
        most = self.random.choice([None, 1])
        for number, age in self.ledger.fill_batch(most).items():
            oldest = next(n for n in range(self.until + 1) if n not in self.taken and n not in self.joined)
            require(number < oldest + self.rule.window, f"place {number} overtakes {oldest} beyond {self.rule.window}")
            require(age == self.version - self.groups[number].born, f"place {number} has another age than {age}")
            self.joined[number] = age
        oldest = next(n for n in range(self.until + 1) if n not in self.taken and n not in self.joined)
        require(self.ledger.oldest == oldest, f"the oldest place in no batch is {oldest}, not {self.ledger.oldest}")
        whole = len(self.joined) == self.rule.places and all(self.groups[number].written for number in self.joined)
        running = [number for number, group in self.groups.items() if group.owner is not None]
        early = running if not self.rounds else [] if whole else list(self.joined)
        if early and self.happens(0.2):
            self.refuses_early_refill(self.random.choice(early))
        if whole and self.rounds:
            self.filter()
            whole = all(self.groups[number].scored for number in self.joined)
        batch = self.ledger.take()
        require((batch is not None) == whole, f"a batch is {'whole' if whole else 'not whole'}: {batch}")
        if batch is not None:
            self.end_batch(batch)

    def refuses_early_refill(self, number):
        before = copy.deepcopy(self.ledger)
        try:
            self.ledger.refill([number])
        except self.module.LedgerError:
            require(self.ledger == before, "a refused refill changes the ledger")
            return
        raise ScheduleError(f"place {number} is refilled before it is written, or its batch")

    def filter(self):
        """Score the batch, and refill what the filter drops, as far as the budget lasts."""
        if self.rule.scores:
            require(self.ledger.take() is None, "a batch is taken before models score it")
        self.refill([number for number in sorted(self.joined) if not self.groups[number].scored and self.drops(number)])
        for number in self.joined:
            group = self.groups[number]
            if group.written and not group.scored and all(self.groups[n].written for n in self.joined):
                if self.rule.scores:
                    self.ledger.score([number])
                group.scored = True

    def end_batch(self, batch):
        require(batch == tuple(sorted(self.joined)), f"places {batch} are taken, not {sorted(self.joined)}")
        for number in batch:
            age = self.version - self.groups[number].born
            bound = math.ceil(self.rule.staleness + (self.rule.window - 1) / self.rule.places)
            require(age <= bound, f"place {number} has age {age}, and the bound is {bound}")
            require(number not in self.taken, f"place {number} is taken twice")
        self.batches.append([(number, self.groups[number].prompt) for number in batch])
        self.taken += batch
        self.events["taken"] += len(batch)
        self.joined = {}
        self.version += 1
        self.saved = (self.ledger.taken_in_window, self.prompts)
        self.updating = self.random.randint(0, 0 if self.calm else 20)


def planted(before, after):
    """The ledger's module with one line changed."""
    source = SOURCE.read_text()
    if source.count(before) != 1:
        raise ValueError(f"{before!r} stands {source.count(before)} times in {SOURCE.name}")
    module = types.ModuleType("planted_ledger")
    sys.modules[module.__name__] = module  # dataclasses look for it
    exec(compile(source.replace(before, after), SOURCE.name, "exec"), module.__dict__)
    return module


def failures(seeds, module=funrl.rollout.ledger):
    """Message of the first schedule in which something does not hold; [] if there is none."""
    for seed in seeds:
        try:
            world = World(seed, module)
            batches = world.run()
            if not world.rule.staleness:
                require(batches == World(seed, module, calm=True).run(), "batches depend on runners or timing")
        except (
            ScheduleError,
            module.LedgerError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:
            return [f"seed {seed}: {type(error).__name__}: {error}"]
    return []


if __name__ == "__main__":
    count = int(sys.argv[1])
    messages = failures(range(count))
    print(*messages or [f"{count} schedules: no failure"])
    sys.exit(bool(messages))
