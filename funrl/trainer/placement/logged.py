"""Groups of an asynchronous run written again: each token by the weights that sampled it, as the log of the run says.

The log has the groups of each batch in their order, and where new weights took over in each completion. A run that
trains and generates by turns has each of these weights in its order, so it continues with each what it was to sample
with them. A completion depends on its prompt, its seed and these weights alone: on a CPU it has the same bits.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funrl import trees
from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEnvironment, LoggedEpisode, logged_episode
from funrl.environments.run import EpisodeRun
from funrl.kinds import joined_lines
from funrl.rollout.engine import Engine, complete, onload_engine
from funrl.rollout.episode_replay import turn_request
from funrl.rollout.episodes import Episode, Node
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, open_rows, saved_steps
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.messages import GroupPrompt, age_metrics, join_groups, switches_of
from funrl.trainer.sources.curriculum import as_chosen
from funrl.trainer.sources.generation import CompletionRun, Rollout, pending_rewards
from funrl.trainer.sources.group_rows import join_samples
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.prompts import baseline_sampling, prompt_source
from funrl.trainer.sources.source import DroppedPrompt, Generation, RemoteGenerators, SampledPrompts, Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, with_stale

WEIGHING_METRICS = ("curriculum/", "difficulty/")


class LoggedGroup(NamedTuple):
    """A group of a run.

    Attributes:
      position: of its prompt in the order of prompts.
      first: position of the first group of the batch that it was due in.
      generator: the replica that wrote it.
      switches: of each sample, (first token, version) pairs; those of the greedy completion follow.
      tokens: (version, sampled tokens) pairs of all samples.
      dropped: prompts before it in its place, whose rows the filter dropped. They are not written again.
    """

    position: int
    first: int
    generator: int
    switches: Sequence[Sequence[tuple[int, int]]]
    tokens: Sequence[tuple[int, int]]
    dropped: Sequence[DroppedPrompt] = ()


class LoggedPart(NamedTuple):
    """Tokens of a completion, or of a turn of an episode, that one version sampled.

    Attributes:
      group: of the completion or episode.
      sample: its number in the group; that after the last one of a greedy completion or episode.
      turn: of an episode, as the log has it; None: a completion of the prompt.
      tokens: number of tokens; None: up to the end.
      model: that sampled it, as `Request.model`.
    """

    group: LoggedGroup
    sample: int
    turn: Node | None
    tokens: int | None
    model: str = ""

    @property
    def key(self) -> Hashable:
        """Key that the parts of one completion share."""
        return (self.group.position, self.sample) if self.turn is None else self.turn


class LoggedGroups(NamedTuple):
    """Groups of a run.

    Attributes:
      by_step: those of each step's batch.
      episodes: by their seeds, of a run with an environment.
      weights: metrics of the weights that chose prompts, by step; the choice is not made again.
    """

    by_step: Mapping[int, Sequence[LoggedGroup]]
    episodes: Mapping[int, LoggedEpisode] = {}
    weights: Mapping[int, dict[str, float]] = {}


def read_groups(run_dir: str | Path) -> LoggedGroups | None:
    """The groups of all saved steps of a run; None: the run was not asynchronous, or a step has none.

    Raises:
      CheckpointError: episodes are missing or cannot be read.
    """
    folder = Path(run_dir) / ROLLOUTS
    by_step = {}
    episodes = {}
    weights = {}
    for step in saved_steps(folder):
        record = open_rows(folder, step).record
        groups = record.get("groups")
        if groups is None:
            return None
        logged = (LoggedGroup(*group) for group in groups)
        by_step[step] = [group._replace(dropped=[DroppedPrompt(*x) for x in group.dropped]) for group in logged]
        drawn = record["metrics"]["drawn"]
        weights[step] = {name: value for name, value in drawn.items() if name.startswith(WEIGHING_METRICS)}
        if "agents" in record:
            episodes |= {logged.seed: logged for logged in read_episodes(folder, step)}
    return LoggedGroups(by_step, episodes, weights=weights) if by_step else None


class LoggedWriter(RemoteGenerators):
    """Writer of the groups of a log with the engine of this rank, which shows and evaluates nothing."""

    refills = True

    def __init__(self, generation: Generation, log: LoggedGroups, models: Mapping[str, Engine]) -> None:
        """Begin before the first step.

        Args:
          generation: as of a source, on this rank's mesh.
          log: of the run.
          models: engines of the models, by name; "" is the policy.
        """
        self.generation = generation
        self._models = models
        self.log = log
        self._left: Sequence[LoggedGroup] = ()  # of the step
        self._batch: Sequence[LoggedGroup] = ()
        self._begun: dict[Hashable, Completion] = {}  # by the keys of their parts
        self._parts = collections.defaultdict[tuple[str, int], list[LoggedPart]](list)  # by model and version
        for group in (group for step in sorted(log.by_step) for group in log.by_step[step]):
            if self._is_own(group):
                self._add_parts(group)

    def begin_step(self, step: int) -> None:
        """Begin to write the groups of a step, after all that its weights sample is sampled. Collective."""
        self._sample()
        self._left = self.log.by_step[step]
        if self.generation.episodes is not None:
            self._environment.forget()

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> SampledPrompts:
        """Rows of the next groups of the step, as many as these places; see `RemoteGenerators`. Collective."""
        del seed
        self._batch, self._left = self._left[: len(places)], self._left[len(places) :]
        assert len(self._batch) == len(places)
        done, rows = self._written(self._batch, sampling, first=0)
        places = self.generation.schedule.numbers_at(np.array([group.position for group in self._batch]))
        examples = [self.generation.schedule.prompts[place] for place in places.tolist()]
        replaced = [prompt for group in self._batch for prompt in group.dropped]
        rows = with_stale(rows, self.generation.engine.engine.version or 0)
        return SampledPrompts(examples, places, done, rows, replaced)

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of the greedy completions or episodes of some groups of the step; see `RemoteGenerators`."""
        del places
        logged = [self._batch[place] for place in groups.tolist()]
        return self._written(logged, sampling, first=self.generation.sampling.samples)[1]

    def _written(self, groups: Sequence[LoggedGroup], sampling: Sampling, first: int) -> tuple[Rollout, Rows]:
        """Completions or episodes of some groups, and their rows. Collective.

        Each group is made into rows by itself, as in the run: sums have the same bits then.

        Args:
          groups: of a batch.
          sampling: of the samples.
          first: number of the first sample of each group.
        """
        parts = []
        for group in groups:
            run = self._run_of(group, sampling, first)
            parts.append(join_samples(self.generation, run, [self._example(group.position)], sampling))
        facts = [done._asdict() for done, _ in parts]
        mesh = self.generation.engine.mesh
        return join_groups(facts, [rows for _, rows in parts], mesh, samples=sampling.samples)

    def _run_of(self, group: LoggedGroup, sampling: Sampling, first: int) -> CompletionRun | EpisodeRun:
        """This replica's completions or episodes of a group; the arguments are those of `_written`."""
        example = self._example(group.position)
        numbers = range(sampling.samples if self._is_own(group) else 0)
        if self.generation.episodes is not None:
            logged = [self._logged_episode(group, first + number) for number in numbers]
            turns = [{node: self._begun.pop(node) for node in sampled_nodes(x.episode)} for x in logged]
            again = [self._environment.resampled(x, example, done) for x, done in zip(logged, turns, strict=True)]
            return EpisodeRun(list(enumerate(again)), ())
        pending = pending_rewards(self.generation.engine, [example], sampling.samples)
        completions = [self._begun.pop((group.position, first + n))._replace(number=n) for n in numbers]
        if pending is not None:
            for completion in completions:
                pending.add(completion)
        return CompletionRun(completions, pending, time.perf_counter())

    @property
    def _environment(self) -> LoggedEnvironment:
        environment = self.generation.setup.environment
        assert isinstance(environment, LoggedEnvironment)
        return environment

    def metrics(self) -> dict[str, float]:
        """Ages of the batch's tokens; it has no times."""
        return age_metrics([dict(group.tokens) for group in self._batch], self.generation.engine.engine.version or 0)

    def _add_parts(self, group: LoggedGroup) -> None:
        """Note which version samples which tokens of a group."""
        if self.generation.episodes is None:
            samples = [(LoggedPart(group, sample, None, None), s) for sample, s in enumerate(group.switches)]
        else:
            models = self.generation.episodes.models or {}
            samples = [
                (
                    LoggedPart(group, sample, node, None, models.get(agent, "")),
                    switches_of(node.numbers.versions),
                )
                for sample in range(self.generation.sampling.samples + self.generation.greedy_baseline)
                for node, agent in sampled_nodes(self._logged_episode(group, sample).episode).items()
            ]
        for part, switches in samples:
            ends = [begin for begin, _ in switches[1:]]
            for (begin, version), end in zip(switches, [*ends, None], strict=True):
                tokens = None if end is None else end - begin
                self._parts[part.model, version].append(part._replace(tokens=tokens))

    def _sample(self) -> None:
        """Sample all tokens of this replica's groups that the present weights sampled."""
        held = [(name, engine.version or 0) for name, engine in self._models.items()]
        parts = [part for key in held for part in self._parts.pop(key, [])]
        requests = [
            self._request(part)._replace(number=number, begun=self._begun.get(part.key), most=part.tokens)
            for number, part in enumerate(parts)
        ]
        for part, done in zip(parts, complete(self.generation.engine.engine, requests), strict=True):
            self._begun[part.key] = done

    def _request(self, part: LoggedPart) -> Request:
        """The request of a completion or of a turn, from its begin."""
        if part.turn is not None:
            return turn_request(part.turn)._replace(model=part.model)
        example = self._example(part.group.position)
        sampling = self.generation.sampling
        own = sampling if part.sample < sampling.samples else baseline_sampling(sampling)
        return Request(0, example.tokens, own, self._seed(part.group, part.sample), owned=joined_lines([example.owned]))

    def _seed(self, group: LoggedGroup, sample: int) -> int:
        """Seed of a sample of a group."""
        seed = derived_seed(self.generation.schedule.seed, group.first)
        prompt = GroupPrompt(-1, seed, group.position - group.first, group.position)
        return [*prompt.seeds(self.generation.sampling.samples), prompt.baseline_seed][sample]

    def _logged_episode(self, group: LoggedGroup, sample: int) -> LoggedEpisode:
        """The episode of a sample. Raises: MissingEpisodeError."""
        return logged_episode(self.log.episodes, self._seed(group, sample), self._example(group.position))

    def _is_own(self, group: LoggedGroup) -> bool:
        mesh = self.generation.engine.mesh
        return group.position % mesh.size(mesh.row_axes) == int(mesh.index(mesh.row_axes))

    def _example(self, position: int) -> Example:
        return self.generation.schedule.examples_at([position])[0]


def sampled_nodes(episode: Episode) -> dict[Node, str]:
    """The turns in an episode that a model has sampled, with their agents."""
    return {node: end.agent for end in episode.ends for node in end.nodes() if node.sampled}


def logged_source(
    log: LoggedGroups, job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Source:
    """A source that writes the groups of a log again, and evaluates nothing; with the log a `MakeSource`."""
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = generation_of(job, parts, frozen, clock, show)._replace(shows=lambda step: False)
    setup = generation.episodes
    if setup is not None:
        setup = setup._replace(form=setup.form._replace(versions=True))
    generation = generation._replace(episodes=setup, form=generation.form._replace(versions=True))
    models = {"": parts.generator.engine, **parts.generator.further}
    writer = LoggedWriter(generation, log, models)
    source = prompt_source(generation._replace(remote=writer, schedule=as_chosen(generation.schedule)), clock, show)

    @onload_engine(parts.generator.serving)
    def at_step(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        writer.begin_step(step)
        rows, state, metrics = source.next_rows(state, step)
        return rows, state, log.weights.get(step, {}) | metrics | writer.metrics()

    return source._replace(next_rows=at_step)
