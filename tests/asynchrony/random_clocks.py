"""Random schedules by the clock of engines, with the same groups and other times: the order is the same.

    python tests/asynchrony/random_clocks.py 10000

Prompts have lengths in iterations, replicas have rooms; iterations, rewards, updates and transfers take random times. A
filter drops some prompts, and others replace them. Versions and counts are this file's own; what replicas and trainer
decide comes from `token_clock`, `Admission` and `GroupPrompts`.
"""

import collections
import heapq
import itertools
import random
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from funrl.asynchrony.admission import Admission, AdmissionRule
from funrl.asynchrony.token_clock import EndedGroups, ReplicaClock
from funrl.mesh.pools.groups import GroupPlan
from funrl.trainer.placement.group_prompts import GroupPrompts

EVENTS = 50_000  # in which every schedule of this size has ended


class Sizes(NamedTuple):
    rule: AdmissionRule
    replicas: int
    rooms: list[int]
    spread: float  # of the logarithm of a prompt's iterations
    batches: int
    seed: int
    dropped: float  # share of the prompts
    most: int  # prompts of a place in the mean

    @property
    def count(self) -> int:
        return self.rule.places * self.batches

    def length(self, position: int) -> int:
        pick = random.Random(1_000_003 * self.seed + position)
        return 1 + min(100, int(5 * pick.lognormvariate(0, self.spread)))

    def drops(self, position: int) -> bool:
        return random.Random(f"{self.seed} {position}").random() < self.dropped


def sizes_of(seed: int) -> Sizes:
    pick = random.Random(seed)
    places = pick.choice([1, 2, 3, 5, 8])
    rule = AdmissionRule(places, pick.choice([1, 2, 3]), pick.choice([1, 1, 2, 3, places, 2 * places + 1]))
    replicas = pick.choice([1, 2, 3, 5])
    batches = pick.randint(1, 6)
    spread = pick.choice([0.2, 1.0, 2.0])
    rooms = [pick.choice([1, 2, 10]) for _ in range(replicas)]
    return Sizes(rule, replicas, rooms, spread, batches, seed, pick.choice([0.0, 0.3, 0.9]), pick.choice([1, 2, 4]))


class Replica:
    """A replica: running groups have iterations left, and each iteration samples a token of each."""

    def __init__(self, number: int, sizes: Sizes):
        self.clock = ReplicaClock(sizes.rule, lambda t: t if t < sizes.count else None, number, sizes.replicas)
        board = cast(Any, SimpleNamespace(replicas=sizes.replicas))
        self.prompts = GroupPrompts(sizes.rule, sizes.most, board, number)
        self.plan = GroupPlan(0, sizes.count, 1)
        self.positions: dict[int, list[int]] = {}  # of each group: its prompt is the last one
        self.room = sizes.rooms[number]
        self.sizes = sizes
        self.left: dict[int, int] = {}
        self.versions: dict[int, list[int]] = {}  # of each token
        self.ended: dict[int, tuple[int, int]] = {}  # and not delivered, as rewards take time

    def advance(self, arrived: int) -> list[int]:
        """One look: groups that end; steps where it may."""
        done = []
        for number in sorted(number for number, left in self.left.items() if not left):
            prompt = None
            if self.sizes.drops(self.positions[number][-1]) and self.prompts.replaced:
                prompt = self.prompts.replace(number, self.plan)
            if prompt is None:
                del self.left[number]
                self.ended[number] = self.clock.end(number)
                done.append(number)
            else:
                self.positions[number].append(prompt.position)
                self.left[number] = self.sizes.length(prompt.position)
        while self.clock.at_gate:
            if arrived <= self.clock.turn:
                return done
            self.clock.pass_gate()
        while self.clock.may_begin and len(self.left) < self.room:
            number = self.clock.begin()
            prompt = self.prompts.begin(number, self.plan)
            self.positions[number] = [prompt.position]
            self.left[number] = self.sizes.length(prompt.position)
            self.versions[number] = []
        if self.left:
            self.clock.tick += 1
            for number in self.left:
                self.left[number] -= 1
                self.versions[number].append(self.clock.turn)
        return done


def run(sizes: Sizes, times: random.Random) -> tuple[list[list[int]], dict[int, list[int]], dict[int, list[int]]]:
    """Groups of each batch, the version of each token and the positions of all prompts, with random times."""
    slow = [times.choice([0.5, 1.0, 4.0]) for _ in range(sizes.replicas + 3)]
    replicas = [Replica(number, sizes) for number in range(sizes.replicas)]
    arrived = [0] * sizes.replicas
    count = itertools.count()
    events: list[tuple[float, int, str, int]] = [(0.0, next(count), "look", r) for r in range(sizes.replicas)]
    events.append((0.0, next(count), "train", 0))
    admission = Admission(sizes.rule)
    ended = EndedGroups()
    batches: list[list[int]] = []
    taken: list[int] = []

    def after(now: float, kind: str, number: int, pace: float) -> None:
        heapq.heappush(events, (now + times.expovariate(1 / pace), next(count), kind, number))

    for _ in range(EVENTS):
        now, _, kind, number = heapq.heappop(events)
        if kind == "look":
            for group in replicas[number].advance(arrived[number]):
                after(now, "deliver", group, slow[-1])
            after(now, "look", number, slow[number])
        elif kind == "deliver":
            ended.add(number, replicas[number % sizes.replicas].ended.pop(number))
        elif kind.startswith("weights"):
            arrived[number] = max(arrived[number], int(kind.removeprefix("weights")))
        else:
            horizon = min(min([r.clock.time, *r.ended.values()]) for r in replicas)
            admission = admission.version_held("replicas", admission.batch)
            _, admission = admission.submit(sizes.count)
            batch = admission.batch
            while admission.batch == batch:
                if places := admission.consumable():
                    _, admission = admission.consume(places)
                    taken += places
                elif (group := ended.take(horizon if sizes.rule.window > 1 else None)) is not None:
                    admission = admission.finish([group])
                else:
                    break
            if admission.batch > batch:
                batches.append(taken)
                taken = []
                if len(batches) == sizes.batches:
                    versions = {n: v for r in replicas for n, v in r.versions.items()}
                    return batches, versions, {n: p for r in replicas for n, p in r.positions.items()}
                update = now + times.expovariate(1 / slow[-2])
                heapq.heappush(events, (update, next(count), "train", 0))
                for replica in range(sizes.replicas):
                    after(update, f"weights{len(batches)}", replica, slow[-3])
            else:
                after(now, "train", 0, 1.0)
    raise AssertionError(f"deadlock: {len(batches)} of {sizes.batches} batches are complete; {sizes}")


def check(seed: int) -> None:
    """Two runs of a schedule are the same, fill each place once, and keep the bound of age and the window."""
    sizes = sizes_of(seed)
    batches, versions, positions = run(sizes, random.Random(2 * seed))
    again = run(sizes, random.Random(2 * seed + 1))
    assert (batches, versions, positions) == again, f"seed {seed}: {sizes}: {batches}, then {again[0]}"
    assert sorted(itertools.chain(*batches)) == list(range(sizes.count))
    check_prompts(sizes, positions)
    for batch, groups in enumerate(batches):
        assert sizes.rule.window > 1 or groups == sorted(groups)
        ages = [batch - version for group in groups for version in versions[group]]
        assert min(ages) >= 0 and max(ages) <= sizes.rule.most_age, f"seed {seed}: ages {ages} in batch {batch}"


def check_prompts(sizes: Sizes, positions: dict[int, list[int]]) -> None:
    """No prompt comes twice, all but the last one of a group were dropped, and a batch has at most its share."""
    used = list(itertools.chain(*positions.values()))
    assert len(used) == len(set(used)), f"{sizes}: a prompt came twice"
    assert all(sizes.drops(position) for group in positions.values() for position in group[:-1])
    sampled = collections.Counter[int]()
    unusable = set()
    for number, group in positions.items():
        sampled[number // sizes.rule.places] += len(group)
        if sizes.drops(group[-1]):
            unusable.add((number // sizes.rule.places, number % sizes.replicas))
    bound = sizes.rule.places * sizes.most
    assert max(sampled.values()) <= bound, f"{sizes}: {sampled} prompts of batches, and at most {bound}"
    if sizes.replicas == 1:  # it has given up only where no prompt was left
        assert all(sampled[batch] == bound for batch, _ in unusable), f"{sizes}: {sampled}"


if __name__ == "__main__":
    for chosen in range(int(sys.argv[1])):
        check(chosen)
