"""The dry run's counts of episodes beside those of a real run."""

import dataclasses

import pytest
from selection import quick
from small_runs import begin, one_step
from test_episode_runs import episode_job

from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost.tracing.estimate import turns_of
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode
from funrl.trainer.settings.settings import settings_of

CPU = HARDWARE["cpu"]


class Calls:
    """The calculator's conversation with a policy that writes as much as it may, in tokens."""

    def __init__(self, turns, reply, context):
        self.turns, self.reply, self.context = turns, reply, context

    async def run(self, policy, example, seed):
        trajectory = policy.start(example.tokens)
        for turn in range(self.turns):
            if turn:
                trajectory = policy.extend(trajectory, [5] * self.context)
            _, trajectory = await policy.sample(trajectory, max_tokens=self.reply)
        return Episode([trajectory], {"policy": float(trajectory.leaf.tokens[0] % 2)})


@pytest.mark.parametrize("turns", quick([1, 2, 3], [3]))
def test_tokens_and_turns_are_those_of_a_real_run(turns):
    reply, context = 3, 4
    job = episode_job(recipe("grpo"), Calls(turns, reply, context), samples_per_prompt=2, batch_prompts=4)
    job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, max_new_tokens=reply, stop=()))
    run, state = begin(job, single())
    _, metrics = one_step(run, state)
    prompts = {len(example.tokens) for example in job.task.prompts}
    assert len(prompts) == 1
    (prompt,) = prompts
    flags = {"assume_turns": turns, "assume_turn_tokens": context, "max_new_tokens": reply, "task": "calculator"}
    flags |= {"batch_prompts": 4, "samples_per_prompt": 2, "dry_run": True}
    dry = dry_run.plain_job(settings_of(**flags), recipe("grpo")(), CPU.memory)
    estimate = dry_run.estimate(dry, prompt, CPU)
    assert metrics["episodes/turns"] == turns_of(dry.settings).replies == turns
    assert metrics["episodes/tokens"] == estimate.tokens
    assert metrics["perf/total_num_tokens"] == 8 * estimate.tokens
    assert metrics["response_length/mean"] == turns * reply
