"""A trial episode of an environment, before a run: one that cannot work is an error in a line.

The first example is run in a process of its own, with a policy that gives the same reply again and again. Nothing of
it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from funrl.data.prompts import Example
from funrl.data.tokenizer import encode_text
from funrl.environments.attempt import EpisodeClock, attempt_episode
from funrl.environments.environment import Environment
from funrl.environments.hosted import HostedEnvironment, open_hosted
from funrl.processes.environment import read_environment
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup, RunEndingError
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import run_coroutine
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import episode_setup
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.episode_rows import policy_setup

TRIAL_SEED = 1 << 42  # no episode of a run has it
TRIAL_REPLY = "1"
TRIAL_TURNS = 2  # so that `step` is called once, and its messages are rendered
TRIAL_BYTES = 1 << 40  # of memory, as the run has no bound either


def check_first_episode(job: Job) -> None:
    """Run one episode of a job whose environment is the user's, on the first rank.

    Raises:
      SettingsError: it fails, each time that --episode_retries allows.
    """
    if not isinstance(job, RLJob) or job.task.environment is None or job.task.embedded or read_environment():
        return
    if job.settings.run.env_check == "off":
        return
    environment = job.task.environment
    setup = episode_setup(job, environment)
    limits = setup.limits._replace(turns=min(setup.limits.turns, TRIAL_TURNS))
    examples = job.task.prompts or job.task.heldout
    own = environment.environment if isinstance(environment, HostedEnvironment) else environment
    try:
        text = encode_text(job.tokenizer, TRIAL_REPLY)
    except Exception:  # a tokenizer that has no such character
        text = []
    reply = [*text, *job.stop[:1]] or [0]
    for _ in range(1 + limits.retries):
        begin = time.monotonic()
        problem = episode_failure(own, examples[0], reply, policy_setup(setup, job.sampling), limits)
        if not problem:
            return
        if time.monotonic() - begin > limits.environment_s:
            break
    flags = job.settings.environments
    name = f"--env={flags.env}" if flags.env else f"env={type(own).__name__}"
    raise SettingsError(
        f"{name}: a trial episode with the first example and the reply {TRIAL_REPLY!r} failed: {problem}; "
        "--env_check=off begins the run without it"
    )


def episode_failure(
    environment: Environment, example: Example, reply: Sequence[int], setup: PolicySetup, limits: EpisodeLimits
) -> str:
    """Reason why an episode failed, in a line; ""."""

    async def complete(request: Request) -> Completion:
        sampling = request.sampling
        tokens = torch.tensor(reply[: sampling.max_new_tokens])
        logp = torch.zeros(len(tokens))
        finish = "stop" if int(tokens[-1]) in sampling.stop else "length"
        versions = torch.zeros(len(tokens), dtype=torch.int64)
        return Completion(0, tokens, logp, raw_logp=logp, versions=versions, finish=finish)

    hosted = HostedEnvironment(environment, 1)
    policy = Policy(complete, setup, TRIAL_SEED, limits)
    clock = EpisodeClock(limits.environment_s)

    async def run() -> Episode:
        return await attempt_episode(lambda: hosted.run(policy, example, TRIAL_SEED), policy, clock)

    try:
        with open_hosted(hosted, setup.chat, setup.serve, TRIAL_BYTES):
            episode = run_coroutine(run())
    except RunEndingError as error:
        return str(error)
    return episode.problem.partition("\n")[0] if episode.status == "failed" else ""
