"""An evaluation whose completions or episodes replicas write beside their groups, or beside the trainer."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from funrl.data.prompts import Example
from funrl.environments.run import EpisodeRunner, EpisodeSpending, Tickets, episode_groups
from funrl.mesh.collectives import from_first
from funrl.mesh.counter import shared_counter
from funrl.mesh.mesh import SINGLE
from funrl.rollout.episode_records import EpisodeRecord, from_record, to_record
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion, Request, RequestGroups
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import EpisodeSetup, policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import Rollout, collected_rollout, pending_rewards, raise_everywhere, to_rows
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.prompts import evaluate_heldout
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows


class WrittenPart(NamedTuple):
    """A replica's part of an evaluation.

    Attributes:
      completions: of its prompts, ascending by their numbers.
      episodes: numbers and records of its episodes, ascending, where prompts become episodes.
      costs: of each of them.
      problem: message of the error that ends the run; None without one.
    """

    completions: list[Completion] = []  # noqa: RUF012  (never mutated)
    episodes: list[tuple[int, EpisodeRecord]] = []  # noqa: RUF012  (never mutated)
    costs: list[EpisodeSpending] = []  # noqa: RUF012  (never mutated)
    problem: str | None = None


class ProgramBeside:
    """A program beside the groups of a replica, until whose end the engine keeps its weights.

    Attributes:
      goes_on: whether there is one, on all tensor ranks.
      tasks: of it, on the first tensor rank.
    """

    def __init__(self, resident: ResidentEngine | None, loop: asyncio.AbstractEventLoop) -> None:
        """Begin without one.

        Args:
          resident: the engine, on the first tensor rank.
          loop: that runs the program.
        """
        self.goes_on = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._resident = resident
        self._loop = loop

    def begin(self, program: Callable[[ResidentEngine], Coroutine[Any, Any, Any]]) -> None:
        """Begin a program, which runs on the first tensor rank. Collective over "tensor"."""
        self.goes_on = True
        if self._resident is not None:
            self.tasks = [self._loop.create_task(program(self._resident))]

    @property
    def has_ended(self) -> bool:
        """True on the first tensor rank between the end of the program and `end`."""
        return self.goes_on and self._resident is not None and self.tasks[0].done()

    def end(self) -> None:
        """Note on all tensor ranks that the program has ended."""
        self.goes_on = False

    @property
    def result(self) -> Any:
        """Result of the program that has ended; None on the other tensor ranks."""
        return self.tasks[0].result() if self.tasks else None


class HeldoutWriter:
    """Writer of this replica's part of an evaluation, which evaluates all parts.

    Replica r of N has the held-out prompts r, r + N, and so on. Completions and rewards depend on the prompt, its seed
    and the weights alone, so that the metrics are those of an evaluation that has the engines to itself.
    """

    def __init__(self, generation: Generation, step: int) -> None:
        """Begin without completions.

        Args:
          generation: as of a source, on the mesh to generate on.
          step: number of training steps before the evaluation.
        """
        mesh = generation.engine.mesh
        self._generation = generation
        self._step = step
        self._samples = generation.evaluation.sampling.samples
        self._own = slice(int(mesh.index(mesh.row_axes)), None, mesh.size(mesh.row_axes))
        self._begin = time.perf_counter()
        self._pending = None
        if generation.episodes is None:
            self._pending = pending_rewards(generation.engine, generation.evaluation.heldout, self._samples)

    async def write(self, resident: ResidentEngine) -> WrittenPart:
        """Write this replica's part, on its first tensor rank."""
        setup = self._generation.episodes
        if setup is not None:
            return await self._episodes(setup, resident)
        heldout, sampling, _, seed, _ = self._generation.evaluation
        owned = [example.owned for example in heldout]
        groups = RequestGroups([example.tokens for example in heldout], sampling, seed, owned=owned)

        async def complete(request: Request) -> Completion:
            done = (await resident.ask(request))._replace(number=request.number)
            if self._pending is not None:
                self._pending.add(done)
            return done

        own = [request for group in groups[self._own] for request in group]
        return WrittenPart(list(await asyncio.gather(*map(complete, own))))

    def evaluate(self, part: WrittenPart | None, show: Show, clock: Clock) -> dict[str, float]:
        """Metrics of all parts. Collective over the mesh to generate on.

        Args:
          part: of this replica; None on its other tensor ranks.
          show: receives some completions.
          clock: times the wait for rewards.

        Raises:
          RewardError: a reward function or the environment has failed; raised on every rank.
        """
        mesh = self._generation.engine.mesh
        written: WrittenPart = from_first(part, mesh, "tensor")
        raise_everywhere(written.problem, (), mesh)
        collected = functools.partial(self._collected, written)
        return evaluate_heldout(self._generation, clock, show, self._step, collected)

    def _collected(
        self,
        written: WrittenPart,
        generation: Generation,
        clock: Clock,
        examples: Sequence[Example],
        *,
        sampling: Sampling,
        **others: Any,
    ) -> tuple[Rollout, Rows]:
        """All parts as one rollout, and their rows; see `rewarded_rows`."""
        engine = generation.engine
        if generation.episodes is not None:
            setup = generation.episodes
            episodes = [(number, from_record(record)) for number, record in written.episodes]
            return rollout_of_episodes(setup, engine, episodes, examples, sampling, costs=written.costs)
        count = len(examples) * sampling.samples
        with clock.phase("eval"):
            done = collected_rollout(engine, written.completions, self._pending, rows=count, begin=self._begin)
        rows = to_rows(examples, done, sampling, generation.form)
        return done, rows if generation.rewards.rescore is None else generation.rewards.rescore(rows, examples, "eval")

    async def _episodes(self, setup: EpisodeSetup, resident: ResidentEngine) -> WrittenPart:
        heldout, sampling, _, seed, _ = self._generation.evaluation
        policy = policy_setup(setup, sampling)
        groups = episode_groups(heldout, self._samples, seed)[self._own]
        try:
            runner = EpisodeRunner(setup.environment, policy, setup.limits)
            episodes = await runner.run(resident, Tickets(groups, shared_counter(SINGLE), replicas=1))
        except RunEndingError as error:
            return WrittenPart(problem=str(error))
        records = [(number, to_record(episode)) for number, episode in episodes]
        return WrittenPart([], records, [runner.costs[number] for number, _ in episodes])
