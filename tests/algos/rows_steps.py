"""References of advantages by steps and agents, as loops over Python floats."""

from __future__ import annotations

import statistics

import torch
from pieces import Row, grid, members, sampled
from rows_advantages import masked, mean, to_turns, turns_of

from funrl import algos


def with_agents(batch):
    """Agents of episodes: rows 0, 2 and 4 are of one group, and 0 and 4 of one agent; states that recur."""
    rows = torch.arange(len(batch.group))
    turns = torch.zeros_like(batch.mask, dtype=torch.int64) if batch.get("turn") is None else batch.turn
    own = batch.across.own(rows)
    return batch._replace(
        agent=torch.tensor([0, 1, 1, 0, 0, 1, 2])[rows % 7],
        episode=torch.tensor([0, 1, 1, 2, 3, 1, 4])[rows % 7] + 5 * (rows // 7),
        state=torch.where(batch.mask, (turns + own[:, None] // 3) % 2, 0) + 1000,
        author=torch.where(batch.mask, 1, torch.arange(batch.mask.shape[1]).expand(batch.mask.shape) % 5),
    )


def ends(b, i):
    """The last place of each turn of a row."""
    return {k: places[-1] for k, places in turns_of(b, i).items()}


def stepwise(weight, gamma, eps):
    def reference(x, b):
        returns = to_turns(gamma)(b.score, b)["x"]
        steps = [(i, k, t) for i in range(len(x)) for k, t in ends(b, i).items()]
        out = grid(b)
        for i, k, t in steps:
            peers = [returns[j][s] for j, _, s in steps if j in members(b, i) and b.state[j][s] == b.state[i][t]]
            step = returns[i][t] - mean(peers)
            if eps is not None and len(peers) > 1 and statistics.stdev(peers) > 0:
                step /= statistics.stdev(peers) + eps
            for place in turns_of(b, i)[k]:
                out[i][place] = x[i] + weight * step
        return {"x": out}

    return reference


def turnwise(weight, eps):
    def reference(x, b):
        out = grid(b)
        for i in range(len(x)):
            own = turns_of(b, i)
            for k, places in own.items():
                value = x[i]
                if k != max(own):
                    peers = [j for j in members(b, i) if k in turns_of(b, j) and k != max(turns_of(b, j))]
                    earned = [sum(b.token_reward[j][t] for t in turns_of(b, j)[k]) for j in peers]
                    value = weight * x[i]
                    if len(peers) > 1 and statistics.stdev(earned) > 0:
                        mine = sum(b.token_reward[i][t] for t in places)
                        value += (mine - mean(earned)) / (statistics.stdev(earned) + eps)
                for t in places:
                    out[i][t] = value
        return {"x": out}

    return reference


def turn_lengths(limit, buffer, factor, tokens=False):
    def reference(x, b):
        penalty = [
            {k: factor * max(0, len(places) - (limit - buffer)) / buffer for k, places in turns_of(b, i).items()}
            for i in range(len(x))
        ]
        if not tokens:
            return {"x": [v - sum(penalty[i].values()) for i, v in enumerate(x)]}
        out = grid(b)
        for i in range(len(x)):
            for t in sampled(b, i):
                out[i][t] = x[i][t] - sum(penalty[i][k] for k, end in ends(b, i).items() if end == t)
        return {"x": out}

    return reference


def hierarchical(proposers):
    def reference(x, b):
        out = []
        for i in range(len(x)):
            if b.agent[i] < proposers:
                peers = [x[j] for j in members(b, i) if b.agent[j] == b.agent[i]]
            else:
                peers = [x[j] for j in range(len(x)) if b.episode[j] == b.episode[i] and b.agent[j] >= proposers]
            out.append(x[i] - mean(peers))
        return {"x": out}

    return reference


def running(decay):
    def reference(x, b):
        agents = b.agent or [0] * len(x)
        baseline, out = {}, []
        for value, agent in zip(x, agents, strict=True):
            before = baseline.get(agent, 0.0)
            out.append(value - before)
            baseline[agent] = decay * before + (1 - decay) * value
        return {"x": out}

    return reference


def observations(others):
    def reference(x, b):
        observed = [
            [not on and (author == 2 or (others and author == 3)) for on, author in zip(*row, strict=True)]
            for row in zip(b.mask, b.author, strict=True)
        ]
        mask = [[a or o for a, o in zip(*row, strict=True)] for row in zip(b.mask, observed, strict=True)]
        kept = [[v if on else 0.0 for v, on in zip(*row, strict=True)] for row in zip(x, b.mask, strict=True)]
        return {"x": kept, "mask": mask, "observed": observed}

    return reference


def with_prefixes(batch):
    """Rows that share their first reply, those of equal parity the second, and each fourth row the third."""
    own_B1 = batch.across.own(torch.arange(len(batch.group)))[:, None]
    places_BT = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape)
    turn_BT = places_BT // 3
    branch_BT = torch.where(turn_BT < 3, own_B1 % 2 ** turn_BT.clamp_max(3), own_B1)
    return batch._replace(turn=turn_BT, tokens=7 * branch_BT + places_BT)


def subtrees(by_size):
    def reference(x, b):
        rows = range(len(x))
        turns = [max((b.turn[i][t] for t in sampled(b, i)), default=0) for i in rows]

        def begin(i, k):
            return [b.tokens[i][t] for t in range(max(sampled(b, i), default=-1) + 1) if b.turn[i][t] <= k]

        def sharing(i, k, last):
            return [j for j in members(b, i) if turns[j] >= last and begin(j, k) == begin(i, k)]

        advantage = []
        for i in rows:
            trees = [members(b, i), *(sharing(i, k, k + 1) for k in range(turns[i]))]
            trees = [tree for place, tree in enumerate(trees) if place == 0 or len(tree) > 1]
            weights = [len(tree) if by_size else 1 for tree in trees]
            parts = [w * (x[i] - mean([x[j] for j in tree])) for w, tree in zip(weights, trees, strict=True)]
            advantage.append(sum(parts) / sum(weights))
        out = grid(b)
        for i in rows:
            for t in sampled(b, i):
                out[i][t] = mean([advantage[j] for j in sharing(i, b.turn[i][t], b.turn[i][t])])
        return {"x": out}

    return reference


def without_summaries(x, b):
    kept = [[on and author != 4 for on, author in zip(*row, strict=True)] for row in zip(b.mask, b.author, strict=True)]
    return {
        "x": [[v if on else 0.0 for v, on in zip(*row, strict=True)] for row in zip(x, kept, strict=True)],
        "mask": kept,
    }


def with_summaries(batch):
    """Every third token that the policy sampled is of a summary."""
    places = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape)
    return batch._replace(author=torch.where(batch.mask, torch.where(places % 3 == 0, 4, 1), 0))


def row(name, make, reference, **how):
    return Row(name, "advantage", make, reference, **how)


ROWS = [
    row("step_groups", algos.step_groups, stepwise(1.0, 0.95, None), prepare=with_agents, compiles=False),
    row(
        "step_groups deviation",
        lambda: algos.step_groups(0.4, 0.7, 1e-3),
        stepwise(0.4, 0.7, 1e-3),
        prepare=with_agents,
        compiles=False,
    ),
    row("subtree_baselines", algos.subtree_baselines, subtrees(False), prepare=with_prefixes, compiles=False),
    row(
        "subtree_baselines size",
        lambda: algos.subtree_baselines(True),
        subtrees(True),
        prepare=with_prefixes,
        compiles=False,
    ),
    row("turn_relative", algos.turn_relative, turnwise(1.0, 1e-6), compiles=False),
    row("turn_relative weight", lambda: algos.turn_relative(0.3, 0.1), turnwise(0.3, 0.1), compiles=False),
    row("turn_length_penalty", lambda: algos.turn_length_penalty(6, 4, 0.5), turn_lengths(6, 4, 0.5)),
    row(
        "turn_length_penalty tokens",
        lambda: algos.turn_length_penalty(4, 4),
        turn_lengths(4, 4, 1.0, tokens=True),
        tokens=True,
    ),
    row("hierarchical_center", algos.hierarchical_center, hierarchical(1), prepare=with_agents),
    row("hierarchical_center 2", lambda: algos.hierarchical_center(2), hierarchical(2), prepare=with_agents),
    row("hierarchical_center 0", lambda: algos.hierarchical_center(0), hierarchical(0), prepare=with_agents),
    row("role_baseline", algos.role_baseline, running(0.95), prepare=with_agents, permutes=False),
    row("role_baseline alone", lambda: algos.role_baseline(0.5), running(0.5), permutes=False),
    row("learn_observations", algos.learn_observations, observations(False), tokens=True, prepare=with_agents),
    row(
        "learn_observations others",
        lambda: algos.learn_observations(True),
        observations(True),
        tokens=True,
        prepare=with_agents,
    ),
    row("mask_summaries", algos.mask_summaries, without_summaries, tokens=True, prepare=with_summaries),
    row("discount_segments", lambda: algos.discount_segments(0.9, 0.8), lambda x, b: {"x": masked(x, b)}, tokens=True),
]
