"""Simulation of a run whose generators and trainer have devices of their own, or share them.

Generators complete groups, a trainer takes batches, weights go back; the `Ledger` decides what may begin and what may
be trained on, as in a run. There is no clock but that of the events: the result depends on the seed alone.

Replicas of an engine advance together, as arrays. Between two events a replica has the same rows, and each row gains a
token an iteration. So n iterations take n (time without context) + (time of a cached token) (n c + b n^2 / 2), for b
rows that attend to c tokens together when they begin. A row ends when the replica's count of iterations reaches the
count at its beginning plus its length. Lengths of completions have a lognormal law with a greatest length, and each
group shares a part of it.

A dry run simulates ways to split its devices between training and generation, and bounds of the ledger at the best of
them. Times of a trainer are those of a trace.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.cost.dry_run import RankWork, TraceMemo, plain_job, pool_estimate, pool_settings
from funrl.cost.rows import rows_of_step
from funrl.cost.tracing.estimate import Estimate, turns_of
from funrl.cost.tracing.hardware import USABLE, Hardware, collective_seconds, message_seconds
from funrl.cost.verdict import duration_text, step_seconds, table
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.placement import Placement
from funrl.mesh.text import ROW_AXES, devices
from funrl.models import Model
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, open_rows, saved_steps
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError, blaming, parts
from funrl.trainer.settings.settings import Settings, with_flags

GRAPH_KERNELS = 10  # of a layer, in a CUDA graph, whose launches are in part hidden


class EngineTimes(NamedTuple):
    """Seconds of one replica.

    An iteration with b rows, which attend to c tokens together, takes
    fixed + max(weights + experts (1 - idle^b), row b) + token c.

    Attributes:
      fixed: launches and the latency of collectives.
      weights: reading all weights that every token meets.
      experts: reading all experts.
      idle: share of a layer's experts that a token does not meet; the experts that b tokens meet are 1 - idle^b.
      row: arithmetic of one row.
      token: reading the cache of one token.
      read: reading one token of a prompt, or of a row whose cache is computed again.
      capacity: tokens that the caches of all groups of its devices hold.
    """

    fixed: float
    weights: float
    experts: float
    idle: float
    row: float
    token: float
    read: float
    capacity: float

    def without_context(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of an iteration but for reading the cache, by the number of rows."""
        streamed = self.weights + self.experts * (1 - self.idle**rows)
        return self.fixed + np.maximum(streamed, self.row * rows)


def engine_times(model: Model, hardware: Hardware, tensor: int = 1, item: int = 2, expert: int = 1) -> EngineTimes:
    """Times of a replica of `tensor` times `expert` devices.

    Args:
      model: that it generates with.
      hardware: of each device.
      tensor: devices that split each layer.
      item: bytes per number.
      expert: groups of these devices that split the experts, each of which has rows of its own. A layer gathers the
        rows of all groups and adds up the results.
    """
    cost = model.abilities.cost
    speed = hardware.bandwidth * hardware.efficiency.memory
    rate = {2: hardware.half, 8: hardware.double}.get(item, hardware.single) * hardware.efficiency.engine
    own = cost.expert_parameters
    whole = trees.count(model.shapes)
    table = model.config.vocab * model.config.embed
    tables = table * (1 if model.config.tied or not model.generates else 2)
    tabled = tables / (1 if model.config.tied else 2) + cost.looked_up  # few of their rows are read
    dense = whole - own - tabled
    routers = model.abilities.routers
    layers = model.config.layers
    per_node = min(tensor, hardware.node)
    sums = 2 * layers * (tensor > 1)
    row_sums = collective_seconds(hardware, "all_reduce", 0, 2.0 * layers * model.config.embed * item, tensor, per_node)
    flops = 2 * (cost.used_parameters(whole) - tables / 2)
    cached = cost.cached(tensor) * item
    state = cost.state(tensor) * max(item, 4)
    ranks = tensor * expert
    resting = item * ((whole - own) / tensor + own / ranks)
    exchanges = 2 * layers * (expert > 1)
    row_bytes = float(exchanges * model.config.embed * item)
    exchanged = collective_seconds(hardware, "all_gather", 0, row_bytes, expert, max(1, hardware.node // tensor))
    read = (flops / tensor / rate + row_sums) / expert + exchanged
    return EngineTimes(
        fixed=layers * GRAPH_KERNELS * hardware.launch + (sums + exchanges) * hardware.latency,
        weights=item * dense / tensor / speed,
        experts=item * own / ranks / speed,
        idle=0.0 if routers is None else 1 - routers.per_token / routers.experts,
        row=read + 2 * state / speed / expert,
        token=cached / speed / expert,
        read=read,
        capacity=expert * max(0.0, hardware.memory * USABLE - resting) / cached,
    )


def replica_ranks(sizes: Mapping[str, int]) -> int:
    """Devices of a replica on a mesh to generate on."""
    return sizes["expert"] * sizes["tensor"]


SPREAD = 0.8  # deviation of the logarithm, where none is given
SHARED = 0.5  # share of that variance which the completions of one prompt have in common
LEAST = 1  # tokens of the shortest completion
LONGEST_DEVIATIONS = 3.0  # deviations of the longest completion of a step from the median, for about a thousand of them


class LengthError(ValueError):
    """A text that describes no law of lengths."""


class Lengths(Protocol):
    """Lengths of completions.

    Attributes:
      most: tokens of the longest.
      mean: tokens of a mean one.
    """

    @property
    def most(self) -> int: ...

    @property
    def mean(self) -> float: ...

    def draw(self, random: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Lengths [groups, samples] in tokens."""
        ...


class LengthLaw(NamedTuple):
    """Lengths of completions, exp(normal), cut at the greatest.

    Attributes:
      median: tokens, before the cut.
      spread: deviation of the logarithm.
      most: tokens at which a completion is cut.
    """

    median: float
    spread: float
    most: int

    @property
    def mean(self) -> float:
        """Mean tokens of a completion after the cut."""
        if not self.spread:
            return min(self.median, self.most)
        bound = math.log(self.most / self.median) / self.spread
        below = self.median * math.exp(self.spread**2 / 2) * _normal(bound - self.spread)
        return below + self.most * (1 - _normal(bound))

    def draw(self, random: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Lengths [groups, samples] in tokens."""
        tokens = self.median * np.exp(_group_normal(random, groups, samples, self.spread))
        return np.clip(tokens, min(LEAST, self.most), self.most)


class LoggedLengths(NamedTuple):
    """Lengths of a log: completions of a prompt resemble each other as much as those of a `LengthLaw`.

    Attributes:
      tokens: of each completion, in ascending order.
      cut: number of completions that were longer in the log than a completion may be.

    Example:
      >>> LoggedLengths((2, 3, 7)).mean
      4.0
    """

    tokens: Sequence[float]
    cut: int = 0

    @property
    def most(self) -> int:
        """Tokens of the longest completion."""
        return int(self.tokens[-1])

    @property
    def mean(self) -> float:
        """Mean tokens of a completion."""
        return sum(self.tokens) / len(self.tokens)

    def draw(self, random: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Lengths [groups, samples] in tokens."""
        normal = torch.from_numpy(_group_normal(random, groups, samples, 1.0))
        ranks = (torch.special.ndtr(normal).numpy() * len(self.tokens)).astype(np.int64)
        return np.asarray(self.tokens, dtype=np.float64)[ranks.clip(0, len(self.tokens) - 1)]


def _group_normal(random: np.random.Generator, groups: int, samples: int, spread: float) -> np.ndarray:
    """Normal numbers [groups, samples], of whose variance each group shares a part."""
    prompt = random.normal(0, spread * math.sqrt(SHARED), (groups, 1))
    own = random.normal(0, spread * math.sqrt(1 - SHARED), (groups, samples))
    return prompt + own


def _normal(x: float) -> float:
    """The standard normal distribution's share below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def law_of_mean(mean: float, most: int, spread: float = SPREAD) -> LengthLaw:
    """The law with a mean after the cut.

    Raises:
      LengthError: the mean is not between the shortest and the greatest length.
    """
    if not LEAST <= mean < most:
        raise LengthError(f"a mean of {mean:g} tokens is not between {LEAST} and the greatest length, {most}")
    low = 1e-3
    high = 1e3 * most
    for _ in range(100):
        middle = math.sqrt(low * high)
        if LengthLaw(middle, spread, most).mean < mean:
            low = middle
        else:
            high = middle
    return LengthLaw(low, spread, most)


def parse_lengths(text: str) -> LengthLaw:
    """The law of "mean:2000,max:16384", with "spread:0.8" behind it where that is known.

    Raises:
      LengthError: the text is another.

    Example:
      >>> round(parse_lengths("mean:2000,max:16384").median)
      1457
    """
    numbers: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.partition(":")
        try:
            numbers[name] = float(number)
        except ValueError:
            numbers[name] = math.nan
    known = {"mean", "max"} <= set(numbers) <= {"mean", "max", "spread"}
    if not known or not all(map(math.isfinite, numbers.values())) or numbers.get("spread", 0.0) < 0:
        raise LengthError(f"{text!r} is not a law of lengths; write mean:2000,max:16384, perhaps with ,spread:0.8")
    return law_of_mean(numbers["mean"], int(numbers["max"]), numbers.get("spread", SPREAD))


def law_of_run(directory: Path) -> LengthLaw:
    """The law of the completions of a run, from its metrics: their mean, the share that was cut off, the longest.

    Raises:
      LengthError: it logged no completions, or all have one length.
    """
    if not (directory / "metrics.jsonl").is_file():
        raise LengthError(f"{directory} has no metrics.jsonl: give the --run_dir of a run, or mean:2000,max:16384")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if {"response_length/mean", "response_length/max"} <= set(row)]
    if not rows:
        raise LengthError(f"{directory}/metrics.jsonl has no step with response_length/mean and response_length/max")
    mean = sum(row["response_length/mean"] for row in rows) / len(rows)
    longest = sum(row["response_length/max"] for row in rows) / len(rows)
    most = int(max(row["response_length/max"] for row in rows))
    if not LEAST <= mean < longest:
        raise LengthError(f"{directory}: completions of {mean:g} tokens in the mean, {longest:g} at most, have no law")
    cut = sum(row.get("response_length/clip_ratio", 0.0) for row in rows) / len(rows)
    low = 0.01
    high = 3.0
    for _ in range(50):
        spread = (low + high) / 2
        law = law_of_mean(mean, most, spread)
        beyond = 1 - _normal(math.log(most / law.median) / spread)
        expected = law.median * math.exp(LONGEST_DEVIATIONS * spread)
        if (beyond < cut) if cut else (expected < longest):
            low = spread
        else:
            high = spread
    return law_of_mean(mean, most, low)


LENGTH_FIELDS = ("tokens", "response_length", "completion_tokens")  # of a log whose lines are objects


def logged_lengths(path: Path, most: int) -> LoggedLengths:
    """The lengths of a log, a line a completion: a number of tokens, or an object with one of `LENGTH_FIELDS`.

    Args:
      path: such as eval_samples.jsonl of a run.
      most: tokens at which a completion is cut.

    Raises:
      LengthError: a line is another, or there is none.
    """
    lengths = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            value = next((value[name] for name in LENGTH_FIELDS if name in value), None)
        if type(value) is not int or value < LEAST:
            fields = ", ".join(LENGTH_FIELDS)
            raise LengthError(f"{path}:{number}: give a number of tokens a line, or objects with one of {fields}")
        lengths.append(value)
    if not lengths:
        raise LengthError(f"{path} has no lengths")
    return _cut_lengths(lengths, most)


def _cut_lengths(lengths: Sequence[int], most: int) -> LoggedLengths:
    tokens = tuple(sorted(min(length, most) for length in lengths))
    return LoggedLengths(tokens, cut=sum(length > most for length in lengths))


def lengths_of_run(directory: Path, most: int) -> Lengths:
    """The lengths of the rows that a run has saved by --save_rollouts, or the law of its metrics.

    Args:
      most: tokens at which a completion is cut.

    Raises:
      LengthError: as of `law_of_run`.
    """
    folder = directory / ROLLOUTS
    lengths: list[int] = []
    for step in saved_steps(folder):
        saved = open_rows(folder, step)
        masks = saved.lines("drawn", range(len(saved.owner("drawn"))), names=["mask"])["mask"]
        lengths += [count for mask in masks if (count := int(mask.sum()))]
    return _cut_lengths(lengths, most) if lengths else law_of_run(directory)


NEVER = np.inf


class SimulatedGenerators:
    """Replicas, the rows that each of them runs, and a queue of groups that wait for room.

    A group runs on one replica, the one with the fewest rows, so its prompt is read once.

    Args:
      times: of each replica.
      replicas: their number, G.
      slots: rows that a replica runs together at most, M.
      prompt: tokens of a prompt.
    """

    def __init__(self, times: EngineTimes, replicas: int, slots: int, prompt: int):
        self.times = times
        self.prompt = prompt
        self.slots = slots
        self.iterations_G = np.zeros(replicas)
        self.rows_G = np.zeros(replicas, dtype=np.int64)
        self.offset_G = np.zeros(replicas)  # tokens that rows attend to, less rows times iterations
        self.debt_G = np.zeros(replicas)  # seconds of reading prompts, or caches under new weights, still to be spent
        self.ends_GM = np.full((replicas, slots), NEVER)
        self.begins_GM = np.zeros((replicas, slots))
        self.group_GM = np.zeros((replicas, slots), dtype=np.int64)
        self.waiting: deque[tuple[int, np.ndarray]] = deque()
        self.left: dict[int, int] = {}  # rows of a group that have not ended
        self.busy = 0.0  # seconds of replicas with rows

    def submit(self, group: int, lengths: np.ndarray) -> None:
        """Queue a group whose rows will have these lengths."""
        self.left[group] = len(lengths)
        for begin in range(0, len(lengths), self.slots):
            self.waiting.append((group, lengths[begin : begin + self.slots]))

    def fill(self) -> None:
        """Give queued groups to replicas with room."""
        while self.waiting:
            group, lengths = self.waiting[0]
            count = len(lengths)
            replica = int(self.rows_G.argmin())
            if self.rows_G[replica] + count > self.slots:
                return
            self.waiting.popleft()
            free = np.flatnonzero(self.ends_GM[replica] == NEVER)[:count]
            begin = self.iterations_G[replica]
            self.ends_GM[replica, free] = begin + lengths
            self.begins_GM[replica, free] = begin
            self.group_GM[replica, free] = group
            self.rows_G[replica] += count
            self.offset_G[replica] += count * (self.prompt - begin)
            self.debt_G[replica] += self.times.read * self.prompt

    def read_again(self) -> None:
        """Compute the caches of all rows again: replicas have new weights."""
        context_G = self.offset_G + self.rows_G * self.iterations_G
        self.debt_G += self.times.read * context_G

    def next_end(self) -> float:
        """Seconds until the first row ends; infinite if no row runs."""
        running_G = self.rows_G > 0
        if not running_G.any():
            return NEVER
        count_G = self.ends_GM.min(axis=1)[running_G] - self.iterations_G[running_G]
        context_G = (self.offset_G + self.rows_G * self.iterations_G)[running_G]
        rows_G = self.rows_G[running_G]
        seconds_G = count_G * (self.times.without_context(rows_G) + self.times.token * context_G)
        seconds_G += self.times.token * rows_G * count_G**2 / 2
        return float((seconds_G + self.debt_G[running_G]).min())

    def advance(self, seconds: float) -> list[int]:
        """Let all replicas run; groups whose last row has ended."""
        running_G = self.rows_G > 0
        self.busy += seconds * int(running_G.sum())
        paid_G = np.minimum(self.debt_G, seconds)
        self.debt_G -= paid_G
        left_G = np.where(running_G, seconds - paid_G, 0.0)
        slope_G = self.times.without_context(self.rows_G)
        slope_G = slope_G + self.times.token * (self.offset_G + self.rows_G * self.iterations_G)
        bend_G = self.times.token * self.rows_G / 2
        self.iterations_G += 2 * left_G / (slope_G + np.sqrt(slope_G**2 + 4 * bend_G * left_G))
        ended_GM = self.ends_GM <= self.iterations_G[:, None] + 1e-6
        if not ended_GM.any():
            return []
        replica_N, slot_N = np.nonzero(ended_GM)
        begins_N = self.begins_GM[replica_N, slot_N]
        np.subtract.at(self.rows_G, replica_N, 1)
        np.subtract.at(self.offset_G, replica_N, self.prompt - begins_N)
        self.ends_GM[replica_N, slot_N] = NEVER
        return self._ended(self.group_GM[replica_N, slot_N])

    def _ended(self, groups_N: np.ndarray) -> list[int]:
        complete = []
        for group, count in zip(*(x.tolist() for x in np.unique(groups_N, return_counts=True)), strict=True):
            self.left[group] -= count
            if not self.left[group]:
                del self.left[group]
                complete.append(group)
        return complete


GRAINS = 50  # looks at the generators in a mean completion, while rows end all the time


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
      environment: seconds that environments may take of an episode; each episode draws one.
      pieces: updates of a batch; each begins as soon as its groups can be consumed.
    """

    rule: LedgerRule
    samples: int
    lengths: Lengths
    prompt: int
    engine: EngineTimes
    replicas: int
    slots: int
    update: UpdateLaw
    transfer: float = 0.0
    environment: Sequence[float] = (0.0,)
    pieces: int = 1

    def iteration_seconds(self, rows: int) -> float:
        """Seconds of an iteration of a replica with `rows` rows, half of whose completions are written."""
        context = rows * (self.prompt + self.lengths.mean / 2)
        return float(self.engine.without_context(np.array(rows))) + self.engine.token * context


class Simulated(NamedTuple):
    """Means of a simulated run, but for its first steps.

    Attributes:
      step: mean seconds of a step.
      tokens: tokens that are trained on in a second, prompts included.
      age_mean, age_max: versions from the begin of a group to its update.
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

    def take(self, ledger: Ledger, now: float, lengths: dict[int, np.ndarray]) -> None:
        """Take what may be taken, and begin an update if a piece is complete."""
        run = self.run
        size = run.rule.places // run.pieces
        ages = ledger.fill_batch(size - len(self.pending))
        ledger.take()
        self.pending += ages
        self.ages[-1] += ages.values()
        if len(self.pending) < size:
            return
        rows = np.concatenate([lengths.pop(place) for place in self.pending]) + run.prompt
        self.pending = []
        seconds = run.update.seconds(rows)
        self.until = now + seconds
        if not self.pieces:
            self.busy.append(0.0)
            self.tokens.append(0.0)
        self.busy[-1] += seconds
        self.tokens[-1] += float(rows.sum())

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


def rows_together(times: EngineTimes, most: int, tokens: float, groups: int = 1) -> int:
    """Rows that a replica runs together.

    Args:
      most: by the settings of the engine.
      tokens: of a mean row, which limits how many fit into the cache.
      groups: of its devices, each of which has a cache of its own rows.
    """
    return max(1, min(most, groups * int(times.capacity / groups // tokens)))


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
        self.random_waits = np.random.default_rng([seed, 1])
        self.generators = SimulatedGenerators(run.engine, run.replicas, run.slots, run.prompt)
        self.trainer = _Trainer(run)
        self.ledger = Ledger(run.rule.checked(), self.until)
        self.held = 0  # version of the generators
        self.lengths: dict[int, np.ndarray] = {}
        rows = min(run.slots, run.rule.places * run.samples // run.replicas + 1)
        self.grain = run.iteration_seconds(rows) * run.lengths.mean / GRAINS
        self.arrivals: list[tuple[float, int]] = []  # ends of the environments of complete groups, by time
        self.transfers: list[tuple[float, int]] = []  # times at which generators hold versions
        self.first = min(steps - 1, int(run.rule.staleness) + 3)
        self.busy_before = 0.0
        self.now = 0.0

    def submit(self) -> None:
        """Give generators all groups that may begin."""
        places = self.ledger.next_places(self.held, self.until)
        self.ledger.begin(0, places, self.held)
        if places:
            drawn = self.run.lengths.draw(self.random, len(places), self.run.samples)
            for place, row_lengths in zip(places, drawn, strict=True):
                self.lengths[place] = row_lengths
                self.generators.submit(place, row_lengths)
        self.generators.fill()

    def train(self) -> None:
        """Let a trainer that waits take what it may."""
        if self.trainer.until == np.inf:
            self.trainer.take(self.ledger, self.now, self.lengths)

    def advance(self) -> None:
        """Go to the next event."""
        events = [self.now + max(self.generators.next_end(), self.grain), self.trainer.until]
        events += [queue[0][0] for queue in (self.arrivals, self.transfers) if queue]
        end = min(events)
        for place in self.generators.advance(end - self.now):
            waits = self.random_waits.choice(self.run.environment, self.run.samples)
            heapq.heappush(self.arrivals, (end + float(waits.max()), place))
        self.now = end
        while self.arrivals and self.arrivals[0][0] <= end:
            self.ledger.deliver(0, heapq.heappop(self.arrivals)[1], attempt=1)
        if self.trainer.until <= end and self.trainer.finish():
            heapq.heappush(self.transfers, (end + self.run.transfer, self.trainer.version))
            if self.trainer.version == self.first:
                self.busy_before = self.generators.busy
        while self.transfers and self.transfers[0][0] <= end:
            self.held = heapq.heappop(self.transfers)[1]
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


class UpdateTimes(NamedTuple):
    """Seconds of scoring and training one batch.

    Attributes:
      ranks: groups of devices that have rows of their own.
      token: of one token of a row, scoring and all epochs.
      pair: of one pair of tokens of a row.
      fixed: of a mini-batch whatever its rows: optimizer, sums of gradients.
      minibatches: updates of a batch.
    """

    ranks: int
    token: float
    pair: float = 0.0
    fixed: float = 0.0
    minibatches: int = 1

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of a batch.

        Rows of a mini-batch are balanced over the ranks, and the ranks wait for the one with the most work: at least
        the mean, the longest row, and the two rows that must share a rank if there are more rows than ranks.

        Args:
          lengths: tokens of each row, prompts included.
        """
        total = self.fixed * self.minibatches
        for part in np.array_split(self.token * lengths + self.pair * lengths**2, self.minibatches):
            if not len(part):
                continue
            work = np.sort(part)[::-1]
            shared = work[self.ranks - 1] + work[self.ranks] if len(work) > self.ranks else 0.0
            total += max(work.sum() / self.ranks, work[0], shared)
        return float(total)


class ScoredUpdate(NamedTuple):
    """Seconds of a batch that other models score, one after the other, before it is trained on.

    Attributes:
      update: of the trainer ranks.
      scoring: of each of these models.
    """

    update: UpdateLaw
    scoring: Sequence[UpdateLaw]

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of a batch; see `UpdateTimes`."""
        return self.update.seconds(lengths) + sum(times.seconds(lengths) for times in self.scoring)


MOST_SPLITS = 8  # that are simulated
SIMULATED_STEPS = 10  # of a simulation, after those in which the pipeline fills


class Workload(NamedTuple):
    """Rows of a run.

    Attributes:
      lengths: of the sampled tokens of a row.
      prompt: tokens of a prompt.
      hardware: of each device.
    """

    lengths: Lengths
    prompt: int
    hardware: Hardware

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE

    def rank(self, pool: str = "train", scoring: Collection[str] = (), memo: TraceMemo | None = None) -> RankWork:
        """Work of a rank of a pool, beside the generator ranks and those of the roles in `scoring`."""
        return RankWork(self.prompt, self.hardware, pool, ("generate", *scoring), memo)


class DeviceSplit(NamedTuple):
    """A way to split devices.

    Attributes:
      train, generate: numbers of devices; a run on shared devices has all in both.
      shared: whether they are the same devices, which take turns.
      fits: whether the formula of memory lets the trainer fit.
      result: of the simulation.
      scoring: names of roles with devices of their own, and how many these are.
    """

    train: int
    generate: int
    shared: bool
    fits: bool
    result: Simulated
    scoring: Sequence[tuple[str, int]] = ()


def rule_of(settings: Settings) -> LedgerRule:
    """The bounds that the flags give."""
    return LedgerRule(settings.run.batch_prompts, settings.asynchrony.staleness, settings.asynchrony.window)


def lengths_of(settings: Settings, most: int) -> Lengths:
    """The lengths of --lengths, or half of the greatest length in the mean.

    Args:
      most: tokens of the longest completion.

    Raises:
      SettingsError: --lengths has none.
    """
    text = settings.estimate.lengths
    if text is None:
        return law_of_mean(most / 2, most)
    path = Path(text)
    most *= turns_of(settings).replies
    with blaming(f"lengths={text}"):
        if not path.exists():
            return parse_lengths(text)
        changes = [file.stat().st_mtime_ns for file in (path, path / "metrics.jsonl", path / ROLLOUTS) if file.exists()]
        return _stored_lengths(path, most, tuple(changes))


@functools.lru_cache(maxsize=2)  # a plan for several numbers of devices asks again for each
def _stored_lengths(path: Path, most: int, changes: tuple[int, ...]) -> Lengths:
    """Lengths of a run or a log; `changes` are the times at which its files were changed."""
    return lengths_of_run(path, most) if path.is_dir() else logged_lengths(path, most)


def cut_remarks(lengths: Lengths) -> list[str]:
    """A line on lengths of a log that are longer than a completion may be; none where none is."""
    if not isinstance(lengths, LoggedLengths) or not lengths.cut:
        return []
    return [f"{lengths.cut} of {len(lengths.tokens)} lengths are cut at {lengths.most} tokens (--max_new_tokens)"]


class TracedRanks(NamedTuple):
    """Ranks that train, or score, by traces of their steps.

    Attributes:
      times: of a batch, by a step whose rows have the mean length.
      full: a step whose rows have the greatest length.
    """

    times: UpdateTimes
    full: Estimate

    def on(self, count: int) -> tuple[dict[str, int], UpdateTimes]:
        """The mesh of `count` devices, by another size of `data`, and the times of a batch there.

        Raises:
          SettingsError: they are no multiple of those that share a row.
        """
        sizes = self.full.job.sizes
        world = Mesh(sizes).world
        unit = world // sizes["data"]
        if count % unit:
            raise SettingsError(f"{count} devices are not a multiple of {unit}")
        times = self.times._replace(ranks=self.times.ranks * count // world)
        return {**sizes, "data": count // unit}, times

    def nbytes(self, count: int) -> float:
        """Memory of a rank where the mesh has `count` devices, by another size of `data`, and rows of full length."""
        settings = self.full.job.settings
        over = parts(settings.sharding.fsdp_axes)
        sharded = settings.sharding.fsdp and (not over or "dp" in over)
        share = Mesh(self.full.job.sizes).world / count if sharded else 1.0
        held = ("weights", "optimizer", "gradients")
        phases = self.full.phases.values()
        return max(costs.total + (share - 1) * sum(costs.peak.get(kind, 0.0) for kind in held) for costs in phases)


def traced_ranks(settings: Settings, algorithm: Algorithm, lengths: Lengths, work: RankWork) -> TracedRanks:
    """Trace the ranks of a pool.

    Args:
      settings: by `pool_settings`.
      algorithm: of the run.
      lengths: of the sampled tokens of a row.
      work: of a rank, whose rows have the greatest length.

    Raises:
      ValueError: a flag cannot work.
    """
    short = with_flags(settings, max_new_tokens=max(1, round(lengths.mean)))
    mean, full = (pool_estimate(flags, algorithm, work) for flags in (short, settings))
    ranks = devices(mean.job.sizes, ROW_AXES)
    tokens = math.ceil(rows_of_step(mean.job) / ranks) * mean.tokens
    minibatches = settings.updates.minibatches if work.pool == "train" else 1
    return TracedRanks(UpdateTimes(ranks, step_seconds(mean, work.hardware) / tokens, minibatches=minibatches), full)


def async_run(job: RLJob, update: UpdateLaw, generate: int, work: Workload, rule: LedgerRule) -> AsyncRun:
    """The run that trains on a job's mesh and generates on other devices.

    Args:
      job: on the mesh of its trainer; replicas of the engine have the tensor and expert ranks of its generate mesh.
      update: times of the trainer.
      generate: devices of the generators.
      work: its rows.
      rule: bounds of the ledger.
    """
    model = job.models[job.main_role]
    tensor, expert = job.generate_sizes["tensor"], job.generate_sizes["expert"]
    times = engine_times(model, work.hardware, tensor, job.dtype.itemsize, expert)
    turns = turns_of(job.settings)
    own = model.abilities.cost.expert_parameters
    weights = job.dtype.itemsize * (trees.count(model.shapes) - own + own / expert) / tensor
    return AsyncRun(
        rule=rule,
        samples=job.sampling.samples,
        lengths=work.lengths,
        prompt=work.prompt,
        engine=times,
        replicas=generate // (expert * tensor),
        slots=rows_together(times, expert * job.settings.engines.decode_rows, work.prompt + work.lengths.mean, expert),
        update=update,
        transfer=message_seconds(work.hardware, 1, weights, near=False),
        environment=turns.episode_waits,
    )


def simulate_rule(run: AsyncRun, rule: LedgerRule) -> Simulated:
    """The same run under a rule."""
    return simulate_run(run._replace(rule=rule), steps=SIMULATED_STEPS + 3 + int(rule.staleness))


def simulate_splits(
    job: RLJob, trainer: TracedRanks, work: Workload, rule: LedgerRule
) -> tuple[list[DeviceSplit], dict[DeviceSplit, AsyncRun]]:
    """Simulate splits of a job's devices, and the run in which both share all of them.

    Args:
      job: on all devices.
      trainer: traced on all devices.
      work: rows of the run.
      rule: bounds of the ledger, of the splits; the shared run has staleness 0.

    Returns: the splits, the fastest that fits first, and the run of each.
    """
    everything = Mesh(job.sizes).world
    unit = everything // job.sizes["data"]
    replica = replica_ranks(job.generate_sizes)
    runs = dict([shared_split(job, trainer, everything, work, rule)])
    for train in _counts(everything, unit, replica):
        run = async_run(job, trainer.on(train)[1], everything - train, work, rule)
        generating = run.replicas * replica
        fits = trainer.nbytes(train) <= work.room
        runs[DeviceSplit(train, generating, False, fits, simulate_rule(run, rule))] = run
    return sorted(runs, key=split_key), runs


def shared_split(
    job: RLJob, trainer: TracedRanks, count: int, work: Workload, rule: LedgerRule
) -> tuple[DeviceSplit, AsyncRun]:
    """The run in which `count` devices train and generate by turns, simulated. Raises: SettingsError, as in `on`."""
    run = async_run(job, trainer.on(count)[1], count, work, rule._replace(staleness=0, window=1))
    return DeviceSplit(count, count, True, trainer.nbytes(count) <= work.room, simulate_rule(run, run.rule)), run


def split_key(split: DeviceSplit) -> tuple[bool, float]:
    """Sort key of splits: fitting splits first, by the seconds of a step."""
    return not split.fits, split.result.step


def _counts(everything: int, unit: int, replica: int) -> Sequence[int]:
    """Numbers of devices of a trainer: some numbers that leave whole replicas for generation, evenly spaced."""
    counts = [n for n in range(unit, everything, unit) if (everything - n) % replica == 0]
    stride = math.ceil((len(counts) + 1) / MOST_SPLITS)
    return counts[stride - 1 :: stride]


STALENESS = (0, 1, 2, 4)  # of the second table
RESULT_COLUMNS = ("a step", "steps/h", "tokens/s", "age mean", "max", "trainer busy", "generators busy")


class Schedules(NamedTuple):
    """Simulated runs.

    Attributes:
      rule: of the splits.
      lengths: of completions.
      splits: the fastest that fits first.
      rules: rules at the best split that is not shared, with their results.
    """

    rule: LedgerRule
    lengths: Lengths
    splits: Sequence[DeviceSplit]
    rules: Sequence[tuple[LedgerRule, Simulated]]


def wants_schedules(settings: Settings) -> bool:
    """True if a dry run simulates asynchronous runs."""
    return settings.asynchrony.staleness > 0 or settings.estimate.lengths is not None


def schedules_of(settings: Settings, algorithm: Algorithm, hardware: Hardware, tokens: int) -> Schedules:
    """Simulate the runs of the flags.

    Args:
      tokens: of a prompt.

    Raises:
      ValueError: a flag cannot work.
    """
    rule = rule_of(settings)
    job, trainer, work = _all_devices(settings, algorithm, hardware, tokens)
    splits, runs = simulate_splits(job, trainer, work, rule)
    best = next((split for split in splits if not split.shared), None)
    rules = [] if best is None else _tried_rules(runs[best], rule, best.result)
    return Schedules(rule, work.lengths, splits, rules)


def simulate_shared(settings: Settings, algorithm: Algorithm, hardware: Hardware, tokens: int) -> Simulated:
    """Simulate the run of a mesh whose devices train and generate by turns, with the lengths of --lengths.

    Args:
      tokens: of a prompt.

    Raises:
      ValueError: a flag cannot work.
    """
    job, trainer, work = _all_devices(settings, algorithm, hardware, tokens)
    return shared_split(job, trainer, Mesh(job.sizes).world, work, rule_of(settings))[0].result


def _all_devices(
    settings: Settings, algorithm: Algorithm, hardware: Hardware, tokens: int
) -> tuple[RLJob, TracedRanks, Workload]:
    """The job on all devices of a mesh, its trainer traced on them, and the rows of the run."""
    job = plain_job(settings, algorithm, hardware.memory)
    assert isinstance(job, RLJob)
    work = Workload(lengths_of(settings, job.sampling.max_new_tokens), tokens, hardware)
    return job, traced_ranks(with_flags(settings, generate_mesh=None), algorithm, work.lengths, work.rank()), work


def placed_schedules(
    settings: Settings, placement: Placement, algorithm: Algorithm, work: Workload, transfer: float
) -> Schedules:
    """Simulate the run of a placement, beside one in which all its devices do both if they can.

    Args:
      settings: the flags.
      placement: of the ranks.
      work: rows of the run.
      transfer: seconds until the generator ranks have new weights.

    Raises:
      ValueError: a flag cannot work.
    """
    training = pool_settings(settings, placement.train, learns=True)
    job = plain_job(training, algorithm, work.hardware.memory)
    assert isinstance(job, RLJob)
    job = dataclasses.replace(job, generate_sizes=placement.generate.sizes)
    rule = rule_of(settings)
    scoring = [
        traced_ranks(pool_settings(settings, pool, learns=False), algorithm, work.lengths, work.rank(name)).times
        for name, pool in placement.scoring.items()
    ]
    trainer = traced_ranks(training, algorithm, work.lengths, work.rank(scoring=placement.scoring))
    update = ScoredUpdate(trainer.times, scoring) if scoring else trainer.times
    run = async_run(job, update, len(placement.generate.ranks), work, rule)._replace(transfer=transfer)
    own = tuple((name, len(pool.ranks)) for name, pool in placement.scoring.items())
    train = len(placement.train.ranks)
    fits = trainer.nbytes(train) <= work.room
    splits = [DeviceSplit(train, len(placement.generate.ranks), False, fits, simulate_rule(run, rule), own)]
    try:
        all_roles = traced_ranks(training, algorithm, work.lengths, work.rank()) if scoring else trainer
        splits.append(shared_split(job, all_roles, placement.world, work, rule)[0])
    except SettingsError:  # such as devices that cannot be divided
        pass
    rules = _tried_rules(run, rule, splits[0].result)
    return Schedules(rule, work.lengths, sorted(splits, key=split_key), rules)


def _tried_rules(run: AsyncRun, rule: LedgerRule, result: Simulated) -> list[tuple[LedgerRule, Simulated]]:
    """A run under other rules than its own too.

    Args:
      run: of a split of the devices.
      rule: its own rule.
      result: of the run under it.
    """
    staleness = sorted({*STALENESS, rule.staleness})
    windows = sorted({1, rule.window, rule.places})
    tried = [rule._replace(staleness=s, window=w) for s in staleness for w in windows if s or w == 1]
    return [(other, result if other == rule else simulate_rule(run, other)) for other in tried]


def schedules_text(schedules: Schedules) -> str:
    """Tables and the best split."""
    rule, law, splits, rules = schedules
    head = (
        f"asynchronous, S={rule.staleness:g}, W={rule.window}: no group is more than {rule.most_age} "
        f"version{'s' * (rule.most_age != 1)} behind; "
        f"completions of {law.mean:,.0f} tokens in the mean, {law.most:,} at most"
    )
    rows = [(_devices(split), *_numbers(split.result), "yes" if split.fits else "no") for split in splits]
    lines = [head, *cut_remarks(law), "", *table(("devices", *RESULT_COLUMNS, "fits"), rows), "", _best(splits)]
    if apart := [name for name, _ in splits[0].scoring or splits[-1].scoring]:
        lines[-1:-1] = [f"trainer busy: with its waits for the scores of {', '.join(apart)}", ""]
    if rules:
        cells = [(f"{other.staleness:g}", str(other.window), *_numbers(result)) for other, result in rules]
        best = next(split for split in splits if not split.shared)
        lines += ["", f"{_devices(best)}, by staleness and window:", *table(("S", "W", *RESULT_COLUMNS), cells)]
    return "\n".join(lines)


def _best(splits: Sequence[DeviceSplit]) -> str:
    """The line that names the best split."""
    best = splits[0]
    if not best.fits:
        return "no split fits"
    if best.shared:
        return f"the best: shared devices, {duration_text(best.result.step)} a step"
    shared = next(split for split in splits if split.shared)
    gain = shared.result.step / best.result.step
    beside = f", {gain:.2f} times as fast as shared devices" if shared.fits else "; shared devices do not fit"
    return f"the best: {_devices(best)}, {duration_text(best.result.step)} a step{beside}"


def _devices(split: DeviceSplit) -> str:
    if split.shared:
        return f"{split.train} shared"
    pools = [("train", split.train), ("generate", split.generate), *split.scoring]
    return ", ".join(f"{name} {count}" for name, count in pools)


def busy_cells(result: Simulated) -> tuple[str, str, str]:
    """Seconds of a step, and the shares of the time in which the trainer and the generators work."""
    return duration_text(result.step), f"{result.trainer_busy:.0%}", f"{result.generators_busy:.0%}"


def _numbers(result: Simulated) -> tuple[str, ...]:
    step, *busy = busy_cells(result)
    rates = f"{result.steps_per_hour:,.1f}", f"{result.tokens:,.0f}", f"{result.age_mean:.2f}", str(result.age_max)
    return step, *rates, *busy


def schedules_object(schedules: Schedules) -> dict[str, Any]:
    """The numbers as JSON has them."""
    rule, law, splits, rules = schedules
    return {
        "staleness": rule.staleness,
        "window": rule.window,
        "most_age": rule.most_age,
        "length_mean": law.mean,
        "length_max": law.most,
        "splits": [split._asdict() | {"result": split.result._asdict()} for split in splits],
        "rules": [{"staleness": other.staleness, "window": other.window} | result._asdict() for other, result in rules],
    }
