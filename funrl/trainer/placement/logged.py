"""Groups of an asynchronous run written again: each token by the weights that sampled it, as the log of the run says.

The log has the groups of each batch in their order, and where new weights took over in each completion. A run that
trains and generates by turns has each of these weights in its order, so it continues with each what it was to sample
with them. A completion depends on its prompt, its seed and these weights alone: on a CPU it has the same bits.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funrl import trees
from funrl.data.order import places_in_order
from funrl.data.prompts import Example
from funrl.rollout.engine import awake, complete
from funrl.rollout.requests import Completion, Request, request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, open_rows, saved_steps
from funrl.trainer.jobs.build import Parts
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.groups import age_metrics
from funrl.trainer.sources.generation import Rollout, collected_rollout, pending_rewards, to_rows
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.sources.prompts import Generation, prompt_source
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows


class LoggedGroup(NamedTuple):
    """A group of a run.

    Attributes:
      position: of its prompt in the order of prompts.
      first: position of the first group of the batch that it was due in.
      generator: the replica that wrote it.
      switches: of each sample, (first token, version) pairs.
      tokens: (version, sampled tokens) pairs of all samples.
    """

    position: int
    first: int
    generator: int
    switches: Sequence[Sequence[tuple[int, int]]]
    tokens: Sequence[tuple[int, int]]


class LoggedPart(NamedTuple):
    """Tokens of a sample that one version sampled.

    Attributes:
      group: of the sample.
      sample: its number in the group.
      tokens: number of tokens; None: up to the end.
    """

    group: LoggedGroup
    sample: int
    tokens: int | None


class LoggedGroups(NamedTuple):
    """Groups of a run, by the steps whose batches they are."""

    by_step: Mapping[int, Sequence[LoggedGroup]]


def read_groups(run_dir: str | Path) -> LoggedGroups | None:
    """The groups of all saved steps of a run; None: the run was not asynchronous, or a step has none."""
    folder = Path(run_dir) / ROLLOUTS
    by_step = {}
    for step in saved_steps(folder):
        groups = open_rows(folder, step).record.get("groups")
        if groups is None:
            return None
        by_step[step] = [LoggedGroup(*group) for group in groups]
    return LoggedGroups(by_step) if by_step else None


class LoggedWriter:
    """An `Elsewhere` that writes the groups of a log with the engine of this rank."""

    def __init__(self, generation: Generation, log: LoggedGroups) -> None:
        """Begin before the first step.

        Args:
          generation: as of a source, on this rank's mesh.
          log: of the run.
        """
        self.generation = generation
        self.log = log
        self.step = 0
        self._begun: dict[tuple[int, int], Completion] = {}  # by position and sample
        self._parts = collections.defaultdict[int, list[LoggedPart]](list)  # by version
        for group in (group for step in sorted(log.by_step) for group in log.by_step[step]):
            for sample, switches in enumerate(group.switches):
                ends = [begin for begin, _ in switches[1:]]
                for (begin, version), end in zip(switches, [*ends, None], strict=True):
                    part = LoggedPart(group, sample, None if end is None else end - begin)
                    self._parts[version].append(part)
        self._batch: Rollout | None = None

    def order(self, places: np.ndarray) -> np.ndarray:
        """Places of the prompts of the step's batch, after all that its weights sampled was sampled. Collective."""
        generation = self.generation
        self._sample(generation.engine.engine.version or 0)
        groups = self.log.by_step[self.step]
        samples = generation.sampling.samples
        begin = time.perf_counter()
        examples = [self._example(group.position) for group in groups]
        pending = pending_rewards(generation.engine, examples, samples)
        completions = []
        for place, group in enumerate(groups):
            for sample in range(samples if self._is_own(group) else 0):
                done = self._begun.pop((group.position, sample))._replace(number=place * samples + sample)
                completions.append(done)
                if pending is not None:
                    pending.add(done)
        rows = len(groups) * samples
        self._batch = collected_rollout(generation.engine, completions, pending, rows=rows, begin=begin)
        prompts, _, seed, _ = generation.schedule
        assert len(groups) == len(places)
        return np.concatenate([places_in_order(prompts, 1, seed, group.position) for group in groups])

    def rewarded_rows(self, examples: Sequence[Example], sampling: Sampling, seed: int) -> tuple[Rollout, Rows]:
        """Rows of the groups that `order` has completed; see `Elsewhere`."""
        done = self._batch
        assert done is not None
        generation = self.generation
        rows = to_rows(examples, done, sampling, generation.pad, versions=True, choices=generation.choices)
        version = generation.engine.engine.version
        return done, rows.with_fields(stale=rows.batch.mask & (rows.batch.version != version))

    def samples(self, count: int) -> list[ShownSample]:
        """None: nothing is shown."""
        return []

    def evaluate(self, step: int, show: Show) -> dict[str, float]:
        """No metrics: nothing is evaluated."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Ages of the batch's tokens; it has no times."""
        tokens: collections.Counter[int] = collections.Counter()
        for group in self.log.by_step[self.step]:
            tokens.update(dict(group.tokens))
        return age_metrics(tokens, self.generation.engine.engine.version or 0)

    def _sample(self, version: int) -> None:
        """Sample all tokens of this replica's groups that a version sampled."""
        generation = self.generation
        sampling = generation.sampling
        parts = [part for part in self._parts.pop(version, []) if self._is_own(part.group)]
        requests = []
        for number, (group, sample, tokens) in enumerate(parts):
            base = derived_seed(generation.schedule.seed, group.first)
            seed = request_seed(base, (group.position - group.first) * sampling.samples + sample)
            prompt = self._example(group.position).tokens
            begun = self._begun.get((group.position, sample))
            requests.append(Request(number, prompt, sampling, seed, begun=begun, most=tokens))
        for part, done in zip(parts, complete(generation.engine.engine, requests), strict=True):
            self._begun[part.group.position, part.sample] = done

    def _is_own(self, group: LoggedGroup) -> bool:
        mesh = self.generation.engine.mesh
        return group.position % mesh.size(mesh.row_axes) == int(mesh.index(mesh.row_axes))

    def _example(self, position: int) -> Example:
        prompts, _, seed, _ = self.generation.schedule
        return prompts[int(places_in_order(prompts, 1, seed, position)[0])]


def logged_source(
    log: LoggedGroups, job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Source:
    """A source that writes the groups of a log again, and evaluates nothing; with the log a `MakeSource`."""
    assert isinstance(job, RLJob) and parts.generator is not None
    generation = generation_of(job, parts, frozen, clock, show)._replace(shows=lambda step: False)
    writer = LoggedWriter(generation, log)
    source = prompt_source(generation._replace(elsewhere=writer), clock, show)

    @awake(parts.generator.serving)
    def at_step(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        writer.step = step
        rows, state, metrics = source.next_rows(state, step)
        return rows, state, metrics | writer.metrics()

    return source._replace(next_rows=at_step)
