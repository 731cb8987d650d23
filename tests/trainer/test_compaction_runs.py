"""Runs on episodes whose history is compacted: the same numbers on every mesh, every sampled token trained once."""

import functools

import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, scored_batch, steps_program
from test_episode_runs import episode_job

from funrl.algos.recipes import recipe
from funrl.environments.adapters import message_environment
from funrl.environments.compaction import compacting
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single

RECIPES = {"compaction": recipe("compaction"), "masked": functools.partial(recipe("compaction"), summaries=False)}


class Digits:
    """Asks three times; the reward is the parity of what was written."""

    async def reset(self, example, seed):
        self.written = []
        return [{"role": "user", "content": "12"}], ()

    async def step(self, message):
        self.written.append(message["content"])
        text = "".join(self.written)
        ended = len(self.written) == 3
        return [{"role": "user", "content": "3"}], float(sum(map(ord, text)) % 2) if ended else None, ended

    async def close(self): ...


def job_of(name, **settings):
    environment = compacting(message_environment(Digits), at=11, request="?", framing="*")
    return episode_job(RECIPES[name], environment, max_new_tokens=4, **settings)


def test_summaries_are_trained_or_masked():
    batches = {name: scored_batch(*begin(job_of(name), single()))[0].batch for name in RECIPES}
    whole, masked = batches["compaction"], batches["masked"]
    summaries = whole.author == 4
    assert summaries.any() and (whole.mask & summaries).sum() == summaries.sum()
    assert torch.equal(masked.mask, whole.mask & ~summaries) and torch.equal(masked.sampled, whole.sampled)
    rows = whole.episode.bincount()
    assert rows.max() > 1
    for batch in (whole, masked):
        for episode in range(len(rows)):
            own = batch.episode == episode
            assert (batch.episode_tokens[own] == batch.mask[own].sum()).all()
            assert len(batch.score[own].unique()) == 1


@functools.cache
def steps_of_mesh(name, mesh):
    job = job_of(name, mesh=mesh)
    return launch(steps_program(job, 1), job.sizes, "cpu")


CASES = [(name, mesh) for name in RECIPES for mesh in ("dp2", "sp2")]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("case", quick(CASES, [("masked", "dp2")]), ids=" on ".join)
def test_compacted_episodes_give_the_same_numbers_on_every_mesh(case):
    name, mesh = case
    other = steps_of_mesh(name, "dp1")
    assert_same(steps_of_mesh(name, mesh), other, 1e-9)
    for metrics in other["metrics"]:
        assert metrics["episodes/compactions"] > 0 and metrics["episodes/failed"] == 0
