"""Simulation of a run whose generators and trainer have devices of their own, or share them.

Generators complete groups, a trainer takes batches, weights go back; `Admission` decides what may begin and what may be
trained on, as in a run. There is no clock but that of the events: the result depends on the seed alone.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from funrl.asynchrony.admission import Admission, AdmissionRule
from funrl.cost.schedules.engine_times import EngineTimes
from funrl.cost.schedules.generators import SimulatedGenerators
from funrl.cost.schedules.lengths import LengthLaw

GENERATORS = "generators"  # all replicas take new weights at the same time: for the rule they are one
GRAINS = 50  # events of a mean completion


class UpdateLaw(Protocol):
    """Seconds of a trainer."""

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of an update on rows of these lengths [rows], prompts included."""
        ...


class AsyncRun(NamedTuple):
    """A run to simulate_run.

    Trainer and generators have devices of their own. Where they share them, the same numbers describe a run of
    staleness 0: then one waits for the other anyway.

    Attributes:
      rule: places of a batch, staleness and window.
      samples: completions of a prompt.
      lengths: of the completions.
      prompt: tokens of a prompt.
      engine: times of a replica.
      replicas: of the engine.
      slots: rows that a replica runs together at most: see `rows_together`.
      update: times of the trainer.
      transfer: seconds from the end of an update until the generators hold its weights.
      environment: seconds that environments take, of all replies of an episode.
      pieces: updates of a batch, each of which begins as soon as its groups can be consumed.
    """

    rule: AdmissionRule
    samples: int
    lengths: LengthLaw
    prompt: int
    engine: EngineTimes
    replicas: int
    slots: int
    update: UpdateLaw
    transfer: float = 0.0
    environment: float = 0.0
    pieces: int = 1


class Simulated(NamedTuple):
    """Means of a simulated run, but for its first steps.

    Attributes:
      step: mean seconds of a step.
      tokens: tokens that are trained on in a second, prompts included.
      age_mean, age_max: versions from the submission of a group to its update.
      trainer_busy, generators_busy: shares of the time.
    """

    step: float
    tokens: float
    age_mean: float
    age_max: int
    trainer_busy: float
    generators_busy: float

    @property
    def steps_per_hour(self) -> float:
        """Steps of an hour."""
        return 3600 / self.step


class _Trainer:
    """A trainer that updates on pieces of batches, and what it has seen."""

    def __init__(self, run: AsyncRun):
        self.run = run
        self.until = np.inf  # end of the update; infinite: it waits for groups
        self.pending: list[int] = []  # groups of the next piece
        self.ends: list[float] = []  # of batches
        self.busy: list[float] = []  # seconds of each batch's updates
        self.ages: list[list[int]] = [[]]
        self.tokens: list[float] = []
        self.pieces = 0

    @property
    def version(self) -> int:
        return len(self.ends)

    def take(self, admission: Admission, now: float, lengths: dict[int, np.ndarray]) -> Admission:
        """Consume what may be, and begin an update if a piece is complete."""
        run = self.run
        size = run.rule.places // run.pieces
        ages, admission = admission.consume(admission.consumable(size - len(self.pending)))
        self.pending += ages
        self.ages[-1] += ages.values()
        if len(self.pending) < size:
            return admission
        rows = np.concatenate([lengths.pop(place) for place in self.pending]) + run.prompt
        self.pending = []
        seconds = run.update.seconds(rows)
        self.until = now + seconds
        if not self.pieces:
            self.busy.append(0.0)
            self.tokens.append(0.0)
        self.busy[-1] += seconds
        self.tokens[-1] += float(rows.sum())
        return admission

    def finish(self) -> bool:
        """End the update; True if it was the last one of a batch."""
        self.pieces = (self.pieces + 1) % self.run.pieces
        now = self.until
        self.until = np.inf
        if self.pieces:
            return False
        self.ends.append(now)
        self.ages.append([])
        return True


def rows_together(times: EngineTimes, most: int, tokens: float) -> int:
    """Rows that a replica runs together.

    Args:
      most: by the settings of the engine.
      tokens: of a mean row, which limits how many fit into the cache.
    """
    return max(1, min(most, int(times.capacity // tokens)))


def simulate_run(run: AsyncRun, steps: int = 30, seed: int = 0) -> Simulated:
    """Simulate a run.

    Args:
      steps: of the run; those in which the pipeline fills are left out of the means.

    Raises:
      ValueError: pieces do not divide a batch.
    """
    if run.rule.places % run.pieces:
        raise ValueError(f"{run.rule.places} groups of a batch cannot be {run.pieces} equal pieces")
    world = _World(run, steps, seed)
    while world.trainer.version < steps:
        world.submit()
        world.train()
        world.advance()
    return world.measured()


class _World:
    """All that changes in a simulation."""

    def __init__(self, run: AsyncRun, steps: int, seed: int):
        self.run = run
        self.until = (steps + int(run.rule.staleness) + 2) * run.rule.places  # the run goes on after them
        self.random = np.random.default_rng(seed)
        self.generators = SimulatedGenerators(run.engine, run.replicas, run.slots, run.prompt)
        self.trainer = _Trainer(run)
        self.admission = Admission(run.rule.checked()).version_held(GENERATORS, 0)
        self.lengths: dict[int, np.ndarray] = {}
        self.grain = _grain(run)
        self.arrivals: list[tuple[float, int]] = []  # ends of the environments of complete groups, by time
        self.transfers: list[tuple[float, int]] = []  # times at which generators hold versions
        self.first = min(steps - 1, int(run.rule.staleness) + 3)
        self.busy_before = 0.0
        self.now = 0.0

    def submit(self) -> None:
        """Give generators all groups that may be submitted."""
        places, self.admission = self.admission.submit(self.until)
        if places:
            drawn = self.run.lengths.draw(self.random, len(places), self.run.samples)
            for place, row_lengths in zip(places, drawn, strict=True):
                self.lengths[place] = row_lengths
                self.generators.submit(place, row_lengths)
        self.generators.fill()

    def train(self) -> None:
        """Let a trainer that waits take what it may."""
        if self.trainer.until == np.inf:
            self.admission = self.trainer.take(self.admission, self.now, self.lengths)

    def advance(self) -> None:
        """Go to the next event."""
        events = [self.now + max(self.generators.next_end(), self.grain), self.trainer.until]
        events += [queue[0][0] for queue in (self.arrivals, self.transfers) if queue]
        end = min(events)
        for place in self.generators.advance(end - self.now):
            heapq.heappush(self.arrivals, (end + self.run.environment, place))
        self.now = end
        arrived = []
        while self.arrivals and self.arrivals[0][0] <= end:
            arrived.append(heapq.heappop(self.arrivals)[1])
        if arrived:
            self.admission = self.admission.finish(arrived)
        if self.trainer.until <= end and self.trainer.finish():
            heapq.heappush(self.transfers, (end + self.run.transfer, self.trainer.version))
            if self.trainer.version == self.first:
                self.busy_before = self.generators.busy
        while self.transfers and self.transfers[0][0] <= end:
            version = heapq.heappop(self.transfers)[1]
            self.admission = self.admission.version_held(GENERATORS, version)
            self.generators.read_again()

    def measured(self) -> Simulated:
        """Means over the batches after the first ones."""
        trainer = self.trainer
        span = trainer.ends[-1] - trainer.ends[self.first - 1]
        ages = [age for batch in trainer.ages[self.first :] for age in batch]
        return Simulated(
            step=span / (len(trainer.ends) - self.first),
            tokens=sum(trainer.tokens[self.first :]) / span,
            age_mean=sum(ages) / len(ages),
            age_max=max(ages),
            trainer_busy=sum(trainer.busy[self.first :]) / span,
            generators_busy=(self.generators.busy - self.busy_before) / span / self.run.replicas,
        )


def _grain(run: AsyncRun) -> float:
    """Seconds between two looks at the generators while rows end all the time."""
    rows = min(run.slots, run.rule.places * run.samples // run.replicas + 1)
    context = rows * (run.prompt + run.lengths.mean / 2)
    iteration = float(run.engine.without_context(np.array(rows))) + run.engine.token * context
    return iteration * run.lengths.mean / GRAINS
