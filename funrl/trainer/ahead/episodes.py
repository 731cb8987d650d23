"""Episodes of later steps: their environments run in a thread of the ranks that train, during the update of this one.

Generators of other jobs complete the turns with the weights of now, and new weights wait until all of these episodes
have ended. So an episode depends on its prompt, its seed and one version, whoever writes it. An environment is used by
one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from funrl.data.prompts import Example
from funrl.environments.environment import Environment
from funrl.environments.run import EpisodeGroup, EpisodeLimits, EpisodeRun, episode_groups, run_episodes, run_of_replica
from funrl.mesh.collectives import AXES, gather_objects, pmax
from funrl.mesh.mesh import Mesh
from funrl.mesh.sums import own_range
from funrl.processes.heartbeat import beside_the_program
from funrl.rollout.certificate import SyncError
from funrl.rollout.engine import Engine
from funrl.rollout.joined.engine import JoinedEngine, NoGeneratorError
from funrl.rollout.policy import PolicySetup, RunEndingError
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.episode_rows import EpisodeSetup, policy_setup

_ENDING = (RunEndingError, SyncError, NoGeneratorError)  # errors that end a run on all ranks


class LoggedPrompt(NamedTuple):
    """A group of episodes in the log of a step: the first fields of a `LoggedGroup`.

    Attributes:
      position: of its prompt in the order of prompts.
      first: position from which the samples are numbered.
      generator, switches, tokens: 0 or empty, for each turn records its own versions.
    """

    position: int
    first: int
    generator: int = 0
    switches: tuple[()] = ()
    tokens: tuple[()] = ()


class EpisodesAhead:
    """Episodes of later steps, until the step that they are for.

    Attributes:
      taken: numbers of the groups that were run together, and the first seed of each, since the step began.
    """

    def __init__(self, engine: JoinedEngine, setup: EpisodeSetup, sampling: Sampling) -> None:
        """Begin with none.

        Args:
          engine: of the generators.
          setup: how episodes are made.
          sampling: of the policy's replies.
        """
        self.taken: list[tuple[int, int]] = []
        self._engine = engine
        self._setup = setup
        self._sampling = sampling
        self._threads = ThreadPoolExecutor(1, "episodes") if engine.mesh.index("tensor") == 0 else None
        self._begun: dict[int, Future[EpisodeRun] | None] = {}  # by the first seed; None: another rank runs them
        self._engines: set[JoinedEngine] = set()  # of those that have not ended

    def begin(self, examples: Sequence[Example], seed: int) -> None:
        """Begin the episodes of some prompts, this replica's share, with the weights of now; unless they have begun.

        Args:
          examples: prompts of all replicas.
          seed: of their noise.
        """
        groups = episode_groups(examples, self._sampling.samples, seed)
        key = groups[0].seeds[0]
        if key in self._begun:
            return
        self._begun[key] = None
        if self._threads is not None:
            mesh = self._engine.mesh
            share = own_range(len(groups), mesh, mesh.row_axes)
            engine = self._engine.beside()
            self._engines.add(engine)
            self._begun[key] = self._threads.submit(self._run, engine, groups[share.start : share.stop])

    def run(
        self,
        engine: Engine,
        mesh: Mesh,
        environment: Environment,
        groups: Sequence[EpisodeGroup],
        policy: PolicySetup,
        limits: EpisodeLimits,
    ) -> EpisodeRun:
        """`run_episodes`, or the episodes of these groups that have been run ahead. Collective.

        Raises:
          RunEndingError, SyncError, NoGeneratorError: on all ranks, where those of one replica have failed so.
        """
        self._engine.finish_ahead()
        key = groups[0].seeds[0]
        self.taken.append((len(groups), key))
        if key not in self._begun:
            return run_episodes(engine, mesh, environment, groups, policy, limits)
        future = self._begun.pop(key)
        run = None
        failure = None
        try:
            run = None if future is None else future.result()
        except _ENDING as error:
            failure = error
        _raise_on_all_ranks(failure, mesh)
        return run_of_replica(run, mesh)

    def groups(self, consumed: int, seed: int) -> list[LoggedPrompt]:
        """The groups that were trained on or dropped since the step began, in their order.

        Args:
          consumed: prompts taken before the step.
          seed: of the run.
        """
        logged = []
        for count, first_seed in self.taken:
            if first_seed == request_seed(derived_seed(seed, consumed), 0):  # others are of greedy episodes
                logged += [LoggedPrompt(consumed + place, consumed) for place in range(count)]
                consumed += count
        return logged

    def close(self) -> None:
        """End what goes on."""
        for engine in list(self._engines):
            engine.stop()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _run(self, engine: JoinedEngine, groups: Sequence[EpisodeGroup]) -> EpisodeRun:
        """Run groups, in the thread."""
        setup = self._setup
        try:
            with beside_the_program():
                policy = policy_setup(setup, self._sampling)
                limits = setup.limits._replace(fixed=True)
                return run_episodes(engine, engine.mesh, setup.environment, groups, policy, limits)
        finally:
            self._engines.discard(engine)
            self._engine.leave(engine)


def _raise_on_all_ranks(failure: Exception | None, mesh: Mesh) -> None:
    """Raise what has failed on one rank on every rank, so that none is left waiting in a collective."""
    failed = torch.tensor(float(failure is not None), device=mesh.device)
    if not pmax(failed, mesh, AXES):
        return
    kind = next((i for i, kind in enumerate(_ENDING) if isinstance(failure, kind)), None)
    faults = gather_objects(None if kind is None else (kind, str(failure)), mesh)
    kind, words = next(fault for fault in faults if fault is not None)
    raise _ENDING[kind](words) from failure
