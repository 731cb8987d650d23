"""Rows of episodes: paths, shared nodes, what all ranks know."""

import math
import random

import numpy as np
import pytest
import torch

from funrl.algos import chain, reduce, reward_to_go, sequence_mean, to_last_token, to_turns
from funrl.algos.advantages.units import episode_fields, units_of
from funrl.algos.applying import apply_advantage
from funrl.data.packing import RowCost
from funrl.environments.row_paths import paths_of
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.text import parse
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.trainer.sources.episode_rows import (
    rows_of_episodes,
    scored_rows,
    transcript_of,
)
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.generation import RowForm
from funrl.trainer.sources.pending_rewards import add_totals
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches, packed, plan_epoch
from funrl.trainer.steps.roles import Role, row_fields_of
from funrl.trainer.steps.step_rows import RowUnits, UpdatePlan

COUNT, SAMPLES = 24, 4


def sampled(parent, rng, finish="stop"):
    n = rng.randint(1, 5)
    raw = torch.tensor([-rng.random() for _ in range(n)], dtype=torch.float64)
    tokens = [rng.randrange(50) for _ in range(n)]
    return Node(parent, tokens, True, raw, raw - 1, torch.full((n,), 3), finish=finish)


def random_episode(seed):
    """Two agents at times, branches, retries, trajectories that share nodes or are parts of others."""
    rng = random.Random(seed)
    ends = []
    for agent in ("policy", "critic")[: rng.randint(1, 2)]:
        root = Node(None, [rng.randrange(50) for _ in range(rng.randint(1, 4))], False)
        leaves = [root]
        for _ in range(rng.randint(1, 6)):
            node = sampled(rng.choice(leaves), rng)
            leaves.append(Node(node, [7, 8], False) if rng.random() < 0.5 else node)
        ends += [Trajectory(agent, leaf) for leaf in rng.sample(leaves, rng.randint(1, len(leaves)))]
    rewards = {agent: rng.choice([0.0, 1.0, None]) for agent in ("policy", "critic")}
    nodes = dict.fromkeys(n for end in ends for n in end.nodes() if n.sampled)
    turn_rewards = {node: rng.random() for node in nodes if rng.random() < 0.3}
    status = "failed" if rng.random() < 0.1 else "done"
    return Episode(ends, rewards, turn_rewards, status=status)


FORM = RowForm(agents=("policy", "critic"), pad=0, dtype=torch.float64, versions=True)


def rows_here(mesh=None):
    mesh = mesh or single()
    ranks = mesh.size(mesh.row_axes)
    own = [(e, random_episode(e)) for e in range(COUNT) if (e // SAMPLES) % ranks == int(mesh.index(mesh.row_axes))]
    return rows_of_episodes(own, COUNT, SAMPLES, FORM, mesh)


def test_each_sampled_node_is_trained_exactly_once_and_rows_are_what_the_model_saw():
    rows, _ = rows_here()
    batch = rows.batch
    row = 0
    for number in range(COUNT):
        episode = random_episode(number)
        trained = []
        for path in paths_of(episode):
            ids = [t for node in path.nodes for t in node.tokens]
            assert batch.tokens[row, : len(ids)].tolist() == ids and batch.length[row] == len(ids)
            assert batch.episode[row] == number and batch.group[row] == number // SAMPLES
            begin = 0
            earned = math.fsum(episode.turn_rewards.get(node, 0.0) for node in path.nodes)
            for node in path.nodes:
                here = slice(begin, begin + len(node.tokens))
                assert batch.mask[row, here].all() == (node in path.trained)
                if node in path.trained:
                    assert torch.equal(batch.rollout_logp[row, here], node.sampling_logp)
                    less = earned if node is path.nodes[-1] else 0.0
                    assert batch.token_reward[row, here].sum() == episode.turn_rewards.get(node, 0) - less
                    assert (batch.version[row, here] == 3).all()
                begin = here.stop
            assert not batch.mask[row, begin:].any()
            trained += path.trained
            row += 1
        on_paths = {node for end in episode.ends for node in end.nodes() if node.sampled}
        assert len(trained) == len(set(trained)) and set(trained) == on_paths
    assert row == len(batch.tokens)


def test_a_trajectory_that_another_goes_on_from_is_no_row_of_its_own():
    """Listing parts of a path, or a path twice, changes no bit of any field."""
    for number in range(COUNT):
        rng = random.Random(number)
        episode = random_episode(number)
        ends = []
        for end in episode.ends:
            parts = [Trajectory(end.agent, node) for node in end.nodes() if rng.random() < 0.3]
            ends += [*rng.sample(parts, len(parts)), end] if rng.random() < 0.5 else [end, end, *parts]
        paths = [paths_of(Episode(ends, episode.rewards)) for ends in (episode.ends, ends)]
        assert [(p.nodes, p.trained) for p in paths[0]] == [(p.nodes, p.trained) for p in paths[1]]


def test_a_micro_batch_has_the_rows_of_an_agent_and_their_number():
    """Where a loss has sums over whole episodes, numbers of units are those of their first segments."""
    rows, _ = rows_here()
    plan = UpdatePlan(3, minibatches=3, token_budget=32, cost=RowCost())
    units = rows.units(True)
    epoch = plan_epoch(rows.lengths, single(), plan, units=units)
    seen = {}
    for part, packing in zip(epoch.parts, epoch.packings, strict=True):
        most = int(packing.size.max())
        for number, piece in enumerate(packed(rows, packing, part, most, row_fields=("unit",))):
            own = piece.rows.tolist()
            for unit in units.together[own]:
                assert seen.setdefault(unit, (len(part), number)) == (len(part), number)
            first = [own.index(next(r for r in own if units.together[r] == units.together[row])) for row in own]
            segments = piece.batch.segments
            expected = torch.tensor([0, *(1 + place for place in first)])[segments.long()]
            assert torch.equal(piece.batch.unit, expected)
    assert len(seen) == len(set(units.together.tolist()))


def test_turns_count_the_replies_before_a_token():
    rng = random.Random(0)
    root = Node(None, [1, 2], False)
    first = sampled(root, rng)
    heard = Node(first, [3], False)
    second = sampled(heard, rng)
    rows, table = rows_of_episodes(
        [(0, Episode([Trajectory("policy", second)], {"policy": 1.0}))], 1, 1, RowForm(dtype=torch.float64), single()
    )
    n, m = len(first.tokens), len(second.tokens)
    assert rows.batch.turn[0, : 3 + n + m].tolist() == [0] * (2 + n) + [1] * (1 + m)
    assert not rows.batch.token_reward.any() and table.turns.tolist() == [2]
    assert rows.batch.truncated.tolist() == [False] and rows.batch.episode_tokens.tolist() == [n + m]


def test_a_reward_that_turns_earned_counts_once():
    """A path that earned 2 and then 3 returns 5 from its first reply and 3 from its second, in a chain of tokens."""
    rng = random.Random(0)
    first = sampled(Node(None, [1, 2], False), rng)
    second, other = (sampled(Node(first, [3], False), rng) for _ in range(2))
    ends = [Trajectory("policy", second), Trajectory("policy", other)]
    episode = Episode(ends, {"policy": 5.0}, {first: 2.0, second: 3.0})
    batch = rows_of_episodes([(0, episode)], 1, 1, RowForm(dtype=torch.float64), single())[0].batch
    for algorithm in (chain(to_last_token(), reward_to_go()), to_turns()):
        made = apply_advantage(algorithm, algorithm.init(), batch)[0]
        begin, end = 2 + len(first.tokens), 3 + len(first.tokens)
        assert made.advantage[0, 2:begin].unique().tolist() == [5.0]
        assert made.advantage[:, end:][made.mask[:, end:]].unique().tolist() == [3.0]


def test_a_failed_group_and_an_unscored_agent_are_left_out():
    rows, table = rows_here()
    kept = scored_rows(rows, table, SAMPLES)
    for episode, agent in zip(kept.batch.episode.tolist(), kept.batch.agent.tolist(), strict=True):
        group = range(episode // SAMPLES * SAMPLES, episode // SAMPLES * SAMPLES + SAMPLES)
        assert all(random_episode(e).status == "done" for e in group)
        assert random_episode(episode).rewards[("policy", "critic")[agent]] is not None
    assert 0 < len(kept.batch.score) < len(rows.batch.score)


def test_a_reply_that_a_limit_ended_is_truncated():
    rng = random.Random(0)
    end = Trajectory("policy", sampled(Node(None, [1], False), rng, finish="length"))
    for status, expected in (("done", True), ("turns", True)):
        rows, _ = rows_of_episodes([(0, Episode([end], {"policy": 1.0}, status=status))], 1, 1, RowForm(), single())
        assert rows.batch.truncated.tolist() == [expected]


def test_an_unknown_agent_is_an_error():
    end = Trajectory("judge", sampled(Node(None, [1], False), random.Random(0)))
    with pytest.raises(ValueError, match=r"agents \['judge'\].*policy"):
        rows_of_episodes([(0, Episode([end], {"judge": 1.0}))], 1, 1, RowForm(), single())


def test_the_rows_of_an_episode_are_in_one_mini_batch():
    rows, _ = rows_here()
    plan = UpdatePlan(3, minibatches=5, token_budget=64, cost=RowCost())
    epoch = plan_epoch(rows.lengths, single(), plan, units=rows.units(False))
    assert sorted(np.concatenate(epoch.parts).tolist()) == list(range(len(rows.lengths)))
    parts = [set(rows.examples[part].tolist()) for part in epoch.parts]
    assert sum(map(len, parts)) == len(set(rows.examples.tolist())) and len(parts) == 5


def test_episodes_of_one_row_are_chosen_as_rows_are():
    lengths = np.arange(30) % 7 + 3
    plan = UpdatePlan(2, minibatches=4, token_budget=64, cost=RowCost())
    plain = plan_epoch(lengths, single(), plan)
    same = plan_epoch(lengths, single(), plan, units=RowUnits(np.arange(30) + 100))
    assert [p.tolist() for p in plain.parts] == [p.tolist() for p in same.parts]
    assert np.array_equal(plain.to, same.to)


def _summary(mesh):
    rows, table = rows_here(mesh)
    batch = rows.batch
    own = {int(n): (batch.tokens[i].tolist(), batch.mask[i].tolist()) for i, n in enumerate(rows.own)}
    return own, [
        x.tolist()
        for x in (
            batch.episode,
            batch.agent,
            batch.score,
            batch.length,
            batch.episode_tokens,
            batch.episode_first,
            batch.truncated,
            table.failed,
            table.turns,
        )
    ]


@pytest.mark.gloo
def test_ranks_number_rows_as_one_process_does():
    whole, facts = _summary(single())
    own, others = launch(_summary, parse("dp2"), "cpu")
    assert others == facts
    for number, (tokens, mask) in own.items():
        width = min(len(tokens), len(whole[number][0]))
        assert tokens[:width] == whole[number][0][:width] and mask[:width] == whole[number][1][:width]


def test_episodes_are_counted_by_the_mask_that_a_role_learns_from():
    """A correction leaves out every second token of the policy, and none of a role that learns from what is sampled."""
    rows, _ = rows_here()
    every = torch.arange(rows.batch.tokens.shape[1]) % 2 == 0
    rows = rows.with_fields(sampled=rows.batch.mask, mask=rows.batch.mask & every)
    rows = rows.with_fields(**episode_fields(rows.batch, units_of(rows.batch)))
    loss = reduce(lambda x_BT, batch: (torch.ones_like(x_BT), {}), sequence_mean())
    numbers = np.arange(len(rows.owner))
    for mask in ("mask", "sampled"):
        role = Role(None, loss=loss, mask=mask)  # type: ignore[arg-type]
        (total,) = denominators({"role": role}, rows, [numbers])
        pieces = [p.batch for p in own_micro_batches(rows, 64, mask=mask, row_fields=row_fields_of(loss))]
        nums = [loss.numerators(torch.zeros(p.mask.shape, dtype=torch.float64), p)[0][0] for p in pieces]
        assert float(total["role"].denominators[0]) == pytest.approx(float(sum(nums)))


def forked_episode(rendered):
    """Two turns, and a third after a fork whose root is these tokens."""
    rng = random.Random(0)
    opening = Node(None, [1, 2], sampled=False, messages=({"role": "user"},))
    first = sampled(opening, rng)
    second = sampled(Node(first, [7, 8], sampled=False, messages=({"role": "tool"},)), rng)
    root = Node(None, rendered, sampled=False, turns_before=2, messages=({"role": "user"},))
    third = sampled(root, rng)
    ends = [Trajectory("policy", second), Trajectory("policy", third)]
    return Episode(ends, {"policy": 1.0}, forked=1)


@pytest.mark.parametrize(("rendered", "first"), [([1, 2, 3, 4, 5], 2), ([9], 1)], ids=["longer", "shorter"])
def test_turns_are_counted_over_a_fork_and_the_transcript_is_of_what_goes_on(rendered, first):
    episode = forked_episode(rendered)
    rows, _ = rows_of_episodes([(0, episode)], 1, 1, FORM._replace(agents=("policy",)), single())
    batch = rows.batch
    assert batch.turn[0][batch.mask[0]].unique().tolist() == [0, 1]
    assert batch.turn[1][batch.mask[1]].unique().tolist() == [first]  # a number is below the length of its row
    assert (batch.author[1] > 1).sum() == 0 and (batch.author[0] == 2).sum() == 2  # no root is an answer
    last = episode.ends[1].leaf.tokens
    expected = [3, 4, 5, *last] if first == 2 else [9, *last]
    shown = transcript_of(0, episode, FORM)
    assert shown.tokens.tolist() == expected and shown.written == expected[:-1]


def test_forks_that_only_some_replicas_have_are_means_over_all_episodes():
    totals = add_totals({"failed": (2.0, 4), "forks/thinking": (1.0, 4)}, {"failed": (0.0, 4)})
    assert episode_metrics(totals, "eval/") == {"eval/episodes/failed": 0.25, "eval/episodes/forks/thinking": 0.125}
    assert episode_metrics({}) == {}
