"""Episodes of later steps: their environments run in a thread of the trainer ranks, during the update of this one.

Generators of other jobs complete the turns with the weights of now, and new weights wait until all of these episodes
have ended. So an episode depends on its prompt, its seed and one version, whoever writes it. An environment is used by
one thread at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from funrl.data.prompts import Example
from funrl.environments.environment import Environment
from funrl.environments.run import EpisodeGroup, EpisodeLimits, EpisodeRun, episode_groups, run_episodes, run_of_replica
from funrl.mesh.mesh import Mesh
from funrl.mesh.sums import own_range
from funrl.rollout.engine import Engine
from funrl.rollout.joined.engine import JoinedEngine
from funrl.rollout.policy import PolicySetup
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.ahead.side_thread import SideProgram, SideThread
from funrl.trainer.sources.episode_rows import EpisodeSetup, policy_setup


class EpisodesAhead:
    """Episodes of later steps, until the step that they are for.

    Attributes:
      taken: numbers of the groups that were run together, and the first seed of each, since the step began.
    """

    def __init__(self, engine: JoinedEngine, thread: SideThread, setup: EpisodeSetup, sampling: Sampling) -> None:
        """Begin with none.

        Args:
          engine: of the generators.
          thread: runs the episodes.
          setup: how they are made.
          sampling: of the policy's replies.
        """
        self.taken: list[tuple[int, int]] = []
        self._engine = engine
        self._setup = setup
        self._sampling = sampling
        self._thread = thread
        self._begun: dict[int, SideProgram] = {}  # by the first seed

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
        mesh = self._engine.mesh
        share = own_range(len(groups), mesh, mesh.row_axes)
        own = groups[share.start : share.stop]
        self._begun[key] = self._thread.begin(functools.partial(self._run, groups=own))

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
        key = groups[0].seeds[0]
        self.taken.append((len(groups), key))
        begun = self._begun.pop(key, None)
        if begun is not None:
            return run_of_replica(self._thread.result(begun), mesh)
        self._engine.finish_ahead()  # the environment is used by one thread at a time
        return run_episodes(engine, mesh, environment, groups, policy, limits)

    def groups(self, consumed: int, seed: int) -> list[tuple[object, ...]]:
        """The groups that were trained on or dropped since the step began, in their order, as a log has them.

        These are the first fields of `LoggedGroup`: no switches and tokens, for each turn records its own versions.

        Args:
          consumed: prompts taken before the step.
          seed: of the run.
        """
        logged = list[tuple[object, ...]]()
        for count, first_seed in self.taken:
            if first_seed == request_seed(derived_seed(seed, consumed), 0):  # others are of greedy episodes
                logged += [(consumed + place, consumed, 0, (), ()) for place in range(count)]
                consumed += count
        return logged

    def _run(self, engine: JoinedEngine, groups: Sequence[EpisodeGroup]) -> EpisodeRun:
        """Run groups, in the thread."""
        setup = self._setup
        policy = policy_setup(setup, self._sampling)
        limits = setup.limits._replace(fixed=True)
        return run_episodes(engine, engine.mesh, setup.environment, groups, policy, limits)
