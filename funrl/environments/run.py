"""Run episodes on an engine: groups by tickets, environments beside the engine's steps, failures tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.mesh.mesh import Mesh
from funrl.rollout.engine import Engine
from funrl.rollout.episodes import Episode
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling


class EpisodeGroup(NamedTuple):
    """The episodes of one example. They are run on one replica and scored together.

    Attributes:
      example: the prompt, and the other fields of its record.
      first: number of the first episode; the others follow.
      seeds: of each episode; the first call of the policy has the noise of `Request.seed`.
    """

    example: Example
    first: int
    seeds: Sequence[int]


class EpisodeLimits(NamedTuple):
    """Limits of an episode, and of a replica.

    Attributes:
      turns: sampled turns of a trajectory.
      tokens: sampled tokens of a trajectory; 0: as many as the model has positions for.
      environment_s: seconds that an environment may take between two calls of the policy.
      retries: further attempts at an episode whose environment failed.
      waiting: bound on the unfinished episodes of a replica, which bounds their memory on the host.
    """

    turns: int = 16
    tokens: int = 0
    environment_s: float = 60.0
    retries: int = 1
    waiting: int = 1024


class PolicySetup(NamedTuple):
    """How the policy of an episode samples and renders.

    Attributes:
      sampling: of a reply; `max_new_tokens` bounds each reply, `samples` is ignored.
      chat: renders messages and reads replies; None: the environment talks in token ids.
    """

    sampling: Sampling
    chat: TemplateChat | None = None


class EpisodeRun(NamedTuple):
    """Episodes of a replica, and what it took to run them.

    Attributes:
      episodes: (number, episode) pairs, ascending: number = that of its group's first one + its index in the group.
      wall_s: seconds from begin to end.
      running_s: seconds of them in which the engine had an unfinished request.
      environment_s: seconds that environments took, summed over episodes; on the replica's first rank.
      attempts: attempts at the episodes, failed ones included.
    """

    episodes: list[tuple[int, Episode]]
    wall_s: float
    running_s: float
    environment_s: float
    attempts: int


def episode_groups(examples: Sequence[Example], samples: int, seed: int, first: int = 0) -> list[EpisodeGroup]:
    """Groups of `samples` episodes of each example, with the noise of today's completions of these prompts.

    Args:
      examples: of all replicas.
      samples: episodes of each.
      seed: of the step.
      first: number of the first episode of the first example.
    """
    return [
        EpisodeGroup(example, first + n * samples, [request_seed(seed, n * samples + i) for i in range(samples)])
        for n, example in enumerate(examples)
    ]


def run_episodes(
    engine: Engine,
    mesh: Mesh,
    environment: Environment,
    groups: Sequence[EpisodeGroup],
    setup: PolicySetup,
    limits: EpisodeLimits = EpisodeLimits(),
) -> EpisodeRun:
    """Run the episodes of the groups that this replica takes. Collective over the mesh.

    A failed episode is tried again with a new call of the environment and the same seeds, `limits.retries` times; then
    its status is "failed". An environment's `score` replaces the rewards of a group of which no episode has failed.

    Args:
      engine: this replica's engine, awake and without unfinished requests.
      mesh: of the engines; its row axes are the replicas. All tensor ranks of a replica make this call.
      environment: makes the episodes; it runs on the first tensor rank of a replica only.
      groups: groups of all replicas, the same on every rank.
      setup: how the policy samples and renders.
      limits: of each episode.

    Returns: every episode of the groups that this replica took, once; the same on all of its tensor ranks.

    Raises:
      RuntimeError, FloatingPointError: as the engine raises them.
    """
    raise NotImplementedError
