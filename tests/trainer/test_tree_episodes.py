"""TreePO on episodes whose trajectories are a tree: every leaf is an agent with a reward of its own."""

import dataclasses
import functools
from statistics import fmean

import pytest
from selection import quick
from small_runs import assert_same, begin, scored_batch, steps_program
from test_episode_runs import episode_job

from funrl.algos import subtree_baselines
from funrl.algos.recipes.treepo import treepo
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode


class Tree:
    """Two first replies, each with two answers."""

    agents = ("policy", "leaf1", "leaf2", "leaf3")

    async def run(self, policy, example, seed):
        ends, rewards = [], {}
        for _ in range(2):
            _, begun = await policy.sample(policy.start(example.tokens), max_tokens=2)
            begun = policy.extend(begun, [5])
            for _ in range(2):
                reply, path = await policy.sample(begun, max_tokens=3)
                name = self.agents[len(ends)]
                ends.append(dataclasses.replace(path, agent=name))
                rewards[name] = sum(reply.tokens) % 7 / 7
        return Episode(ends, rewards)


@functools.cache
def steps_of_mesh(mesh):
    job = episode_job(treepo, Tree(), mesh=mesh, samples_per_prompt=2)
    return launch(steps_program(job, 2), job.sizes, "cpu")


def replies_of(batch):
    """The two replies of each row's path, trained or not: a path ends with the second."""
    for i, length in enumerate(batch.length.tolist()):
        turns = batch.turn[i, :length].tolist()
        tokens = batch.tokens[i, :length].tolist()
        yield [[token for token, turn in zip(tokens, turns, strict=True) if turn == k] for k in (0, 1)]


def test_advantages_of_a_tree_equal_loops_over_its_paths():
    make = lambda: dataclasses.replace(treepo(), advantage=subtree_baselines())  # noqa: E731
    run, state = begin(episode_job(make, Tree(), samples_per_prompt=2), single())
    batch = scored_batch(run, state)[0].batch
    assert len(batch.group) == 4 * 2 * 4
    paths = [[tuple(reply) for reply in replies] for replies in replies_of(batch)]
    scores = batch.score.tolist()
    advantages = []
    for i, (first, _) in enumerate(paths):
        group = [j for j in range(len(paths)) if j // 8 == i // 8]
        branch = [j for j in group if paths[j][0] == first]
        advantages.append(fmean(scores[i] - fmean(scores[j] for j in rows) for rows in (group, branch)))
    for i, (first, answer) in enumerate(paths):
        group = [j for j in range(len(paths)) if j // 8 == i // 8 and paths[j][0] == first]
        same = [j for j in group if paths[j][1] == answer]
        for turn, rows in enumerate((group, same)):
            values = batch.advantage[i][batch.mask[i] & (batch.turn[i] == turn)]
            expected = fmean(advantages[j] for j in rows)
            assert values.tolist() == pytest.approx([expected] * len(values), abs=1e-12)
    shared = (batch.mask & (batch.turn == 0)).any(1)
    assert shared.sum() == len(shared) / 2  # a first reply is trained in one of its two paths
    centred = batch.score - batch.score.reshape(4, 8).mean(1).repeat_interleave(8)
    last = (batch.mask & (batch.turn == 1)).double().argmax(1, keepdim=True)
    assert (batch.advantage.gather(1, last)[:, 0] - centred).abs().max() > 0.01  # its branch counts beside the group


@pytest.mark.parametrize("mesh", quick(["dp4", "tp2", "dp2,tp2", "sp2"], ("dp2,tp2",)))
def test_the_same_numbers_on_every_mesh(mesh):
    assert_same(steps_of_mesh(mesh), steps_of_mesh("dp1"), 1e-9)
