"""Episodes that span several steps. A group stays with the replica that took it, where its environments live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import take_next
from funrl.environments.ongoing import OngoingEpisodes, OngoingRun, Round, recorded_episodes
from funrl.environments.run import EpisodeGroup
from funrl.mesh import collectives
from funrl.rollout.policy import PolicySetup
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.serve.endpoint import serve_agent
from funrl.trainer.partial_rollouts.begun import Examined, NewPrompts, examples_at, sample_numbers
from funrl.trainer.sources.episode_rows import EpisodeSetup, rollout_of_episodes
from funrl.trainer.sources.generation import LONGEST_REMARK
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import Totals
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.storage.row_shards import HeldRows

UNFILTERED_BATCHES = 2  # begun in a step, for episodes that continue or fail: most are far shorter than the longest
PADDING = " "  # of a record's JSON, where others are longer


class BegunEpisodes(NamedTuple):
    """Groups of episodes that were begun and are not trained on yet, in the order of the prompts.

    Attributes:
      places: [P] position of each group's prompt in the order of the prompts.
      seeds: [P, S] of the episodes.
      owner: [P] replica of each group, as an index over the row axes of the generate mesh.
      waiting: [P] episodes that have not ended.
      steps: [P] steps in which the group was run.
      records: of this replica's own groups, in their order.
      restarted: episodes begun anew in this step, since their environments differed from their records.
      entries: none; they come with the examined episodes.
    """

    places: np.ndarray
    seeds: np.ndarray
    owner: np.ndarray
    waiting: np.ndarray
    steps: np.ndarray
    records: Sequence[str]
    restarted: int = 0
    entries: Totals = {}  # noqa: RUF012  (never mutated)


class EpisodeWriter:
    """Writer of episodes; see `RowWriter`."""

    def __init__(self, generation: Generation, setup: EpisodeSetup, tokens: int, clock: Clock, show: Show):
        """Make it.

        Args:
          generation: of the source.
          setup: how episodes are made.
          tokens: bound on the new tokens of a trajectory in a step.
          clock: times the phases.
          show: receives remarks.
        """
        sampling = generation.sampling
        self.longest = trajectory_tokens(setup, sampling.max_new_tokens)
        batches = generation.selection.max_refills if generation.selection.filter else UNFILTERED_BATCHES
        self.most_new: int | None = generation.schedule.batch * batches
        self._most_steps = -(-self.longest // tokens)
        self._generation = generation
        self._setup = setup
        self._clock = clock
        self._show = show
        self._samples = sampling.samples
        self._mesh = generation.engine.mesh
        policy = PolicySetup(sampling, setup.chat, serve=serve_agent)
        self._ongoing = OngoingEpisodes(setup.environment, policy, setup.limits)

    def nothing(self) -> BegunEpisodes:
        """No groups."""
        none = np.zeros(0, np.int64)
        return BegunEpisodes(none, np.zeros((0, self._samples), np.int64), none, waiting=none, steps=none, records=())

    def ready(self, held: BegunEpisodes) -> np.ndarray:
        """[P] bool, groups whose episodes have all ended."""
        return held.waiting == 0

    def select(self, held: BegunEpisodes, prompts: np.ndarray) -> BegunEpisodes:
        """Some groups, in ascending order."""
        own = np.flatnonzero(held.owner == self._index)
        records = [held.records[place] for place in np.flatnonzero(np.isin(own, prompts)).tolist()]
        columns = [x[prompts] for x in (held.places, held.seeds, held.owner, held.waiting, held.steps)]
        return BegunEpisodes(*columns, records=records)

    def write(
        self, held: BegunEpisodes, going_on: np.ndarray, new: NewPrompts, tokens: int | None
    ) -> tuple[BegunEpisodes, int]:
        """Continue some groups and begin some; see `RowWriter`.

        A group that was begun as many steps ago as the longest trajectory takes is run to its end, so that its oldest
        token is never older, however many trajectories its episodes have.
        """
        schedule = self._generation.schedule
        going_on = going_on & ~self.ready(held)
        if not going_on.any() and not new.count:
            return held, new.begin
        taken = take_next(schedule.prompts, new.count, schedule.seed, position=new.begin, weights=new.weights)
        noise = derived_seed(schedule.seed, new.begin)
        numbers = range(new.count * self._samples)
        seeds = np.array([request_seed(noise, n) for n in numbers], np.int64).reshape(-1, self._samples)
        none = np.zeros(new.count, np.int64)
        held = held._replace(
            places=np.concatenate([held.places, taken.positions]),
            seeds=np.concatenate([held.seeds, seeds]),
            owner=np.concatenate([held.owner, none - 1]),
            waiting=np.concatenate([held.waiting, none]),
            steps=np.concatenate([held.steps + going_on, none + 1]),
        )
        going_on = np.concatenate([going_on, none > 0])
        with self._clock.phase("generate"):
            run = self._ongoing.run(
                self._generation.engine.engine, self._mesh, self._round(held, going_on, len(none), tokens)
            )
        return self._after(held, run), taken.end

    def examine(self, held: BegunEpisodes) -> Examined:
        """Rows of ended episodes, and what the filter keeps of them."""
        generation = self._generation
        own = np.flatnonzero(held.owner == self._index)
        numbers = sample_numbers(own, self._samples).tolist()
        ended = [episode for record in held.records for episode in recorded_episodes(record)]
        episodes = list(zip(numbers, ended, strict=True))
        count = len(held.places)
        examples = examples_at(generation.schedule, held.places)
        done, rows = rollout_of_episodes(self._setup, generation.engine, episodes, examples, generation.sampling)
        kept_PS = filter_samples(generation, rows, count)
        totals = {"entries": done.entries, "episodes": done.episodes}
        return Examined(held.places, rows, kept_PS, done.scores, done.failed, **totals)

    def metrics(self, held: BegunEpisodes) -> dict[str, float]:
        """Metrics of episodes between steps."""
        return {
            "partial/waiting_episodes": float(held.waiting.sum()),
            "partial/restarted_episodes": float(held.restarted),
        }

    def tree(self, held: BegunEpisodes) -> dict[str, trees.Tree]:
        """Groups as a tree of tensors, with records of one width on all ranks."""
        columns = {name: getattr(held, name) for name in ("places", "seeds", "owner", "waiting", "steps")}
        tensors: dict[str, Tensor] = {name: torch.from_numpy(x) for name, x in columns.items()}
        longest = torch.tensor(max(map(len, held.records), default=0), device=self._mesh.device)
        width = int(collectives.pmax(longest, self._mesh, self._mesh.row_axes)) if len(held.places) else 0
        data = "".join(record.ljust(width, PADDING) for record in held.records).encode()
        records = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(len(held.records), width).copy())
        return {**tensors, "records": records}

    def held(self, tree: dict[str, trees.Tree]) -> BegunEpisodes:
        """The groups of a tree."""
        columns = {name: tree[name].numpy() for name in ("places", "seeds", "owner", "waiting", "steps")}
        records = [bytes(row).decode().rstrip(PADDING) for row in tree["records"].cpu().numpy()]
        return BegunEpisodes(**columns, records=records)

    def saved(self, tree: dict[str, trees.Tree]) -> dict[str, trees.Tree]:
        """The tree itself."""
        return tree

    def rows(self, tree: dict[str, trees.Tree]) -> HeldRows:
        """The records; each replica has its own."""
        return HeldRows(frozenset({"records"}), tree["owner"].numpy(), self._mesh)

    def close(self) -> None:
        """End all episodes and their environments."""
        self._ongoing.close()

    @property
    def _index(self) -> int:
        return int(self._mesh.index(self._mesh.row_axes))

    def _round(self, held: BegunEpisodes, going_on: np.ndarray, new: int, tokens: int | None) -> Round:
        """The groups to run; the last `new` ones begin."""
        examples = examples_at(self._generation.schedule, held.places)
        groups = [
            EpisodeGroup(example, int(place) * self._samples, seeds)
            for example, place, seeds in zip(examples, held.places, held.seeds.tolist(), strict=True)
        ]
        own = np.flatnonzero(held.owner == self._index)
        records = dict(zip(own.tolist(), held.records, strict=True))
        last = held.steps >= self._most_steps
        continued = [
            (groups[n], records[n], None if last[n] else tokens)
            for n in np.flatnonzero(going_on).tolist()
            if n in records
        ]
        return Round(groups[len(groups) - new :], continued, tokens)

    def _after(self, held: BegunEpisodes, run: OngoingRun) -> BegunEpisodes:
        """The groups after a rollout; every rank knows what its replica has run."""
        mesh = self._mesh
        place_of = {int(place) * self._samples: n for n, place in enumerate(held.places)}
        table = torch.zeros(1 + len(held.places), 3, dtype=torch.int64)
        table[0, 0] = run.restarted
        records = dict(zip(np.flatnonzero(held.owner == self._index).tolist(), held.records, strict=True))
        for record in run.groups:
            number = place_of[record.first]
            records[number] = record.text
            table[1 + number] = torch.tensor([1, self._index, record.waiting])
        whole = collectives.psum(table.to(mesh.device), mesh, mesh.row_axes).cpu().numpy()
        restarted = int(whole[0, 0])
        ran_P, owner_P, waiting_P = whole[1:].T
        if restarted:
            problems = collectives.gather_objects(run.problem, mesh)
            self._show.note(
                f"{restarted} episodes begin anew, as their environments did not repeat what a checkpoint has of them, "
                f"such as: {next(filter(None, problems))[:LONGEST_REMARK]}; let the environment draw from the seed "
                "that it gets"
            )
        return held._replace(
            owner=np.where(ran_P > 0, owner_P, held.owner),
            waiting=np.where(ran_P > 0, waiting_P, held.waiting),
            records=[records[number] for number in sorted(records)],
            restarted=held.restarted + restarted,
        )


def trajectory_tokens(setup: EpisodeSetup, new_tokens: int) -> int:
    """Bound on the tokens that a trajectory samples.

    Args:
      setup: of the episodes.
      new_tokens: bound on those of a turn.
    """
    limits = setup.limits
    bounds = [limits.turns * new_tokens, limits.tokens, limits.length]
    return min(bound for bound in bounds if bound)
