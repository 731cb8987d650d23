"""Advantages of paths of a tree: each is compared with the paths that share its beginning, at every branch."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import Groups, group_mean, group_sum, groups_of
from funrl.algos.advantages.turns import groups_with, row_turns, turn_count
from funrl.algos.core import Advantage, Signal, check_rank
from funrl.algos.masks import where_masked
from funrl.batch import Batch

DIGESTS = 1 << 31  # above every digest of a beginning
MIX_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))  # of SplitMix64, as signed numbers


def subtree_baselines(by_size: bool = False) -> Advantage:
    """TreePO's advantage: mean over the subtrees d that hold path i of x_i - mean_d x, on [B] -> [B, T].

    A row is a path from the prompt to a leaf, whose agent has the leaf's reward. Subtree 0 is the prompt's rows, of all
    agents; subtree d holds its rows that share all tokens through reply d, and more of them follow; one with a single
    path does not count. A reply that several rows share is trained once, with the mean advantage of these paths. The
    rows of an agent that has several, as where its history was compacted, count as one. Without turns there is one
    subtree, the group.

    Args:
      by_size: weigh each subtree by its number of paths.
    Needs: tokens [B, T], group [B]. Uses turn [B, T], episode, agent [B].
    References: TreePO, Li et al., 2025, https://arxiv.org/abs/2508.17445

    Warning: the authors' code trains a shared token once for each path, which multiplies it by their number, and keeps
    the raw reward of a group of one row, which gets 0 here.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        across = batch.across.rows
        turns = row_turns(batch, batch.mask)
        units = torch.arange(len(signal.x), device=signal.x.device)
        unit_R = across.sums(batch.across.own(units)[:, None]).long()
        x_R = signal.x[unit_R].double()  # not of sums, which are constants to `advantage_parts`
        root_R = _prompts(batch)[unit_R]
        last_R = across.sums(turns.of_token.amax(1, keepdim=True))
        turn_BT = batch.get("turn")
        first_R = torch.zeros_like(last_R) if turn_BT is None else across.sums(turn_BT[:, :1])  # above 0 after a fork
        depths = range(turn_count(turns, batch))
        keys = [root_R * DIGESTS + across.sums(_digests(batch, depth)[:, None]).long() for depth in depths]

        def sharing(depth: int, last: int) -> Groups:
            return groups_with((first_R <= depth) & (last_R >= last), keys[depth])

        total_R = torch.zeros_like(x_R)
        weight_R = torch.zeros_like(x_R)
        for place, groups in enumerate([groups_of(root_R), *(sharing(depth, depth + 1) for depth in depths[:-1])]):
            share_R, size_R = _once(groups, unit_R, len(units))
            own_R = where_masked(size_R if by_size else torch.ones_like(x_R), (size_R > 1) | (place == 0))
            total_R = total_R + own_R * (x_R - group_mean(x_R, groups, share_R))
            weight_R = weight_R + own_R
        advantage_R = total_R / weight_R
        result_BT = torch.zeros(batch.mask.shape, dtype=signal.x.dtype, device=signal.x.device)
        for depth in depths:
            groups = sharing(depth, depth)
            shared_R = group_mean(advantage_R, groups, _once(groups, unit_R, len(units))[0])
            here_BT = (turns.of_token == depth) & signal.mask
            result_BT = torch.where(here_BT, across.own(shared_R)[:, None].to(signal.x.dtype), result_BT)
        return signal._replace(x=result_BT), state

    return Advantage(lambda: (), update)


def _once(groups: Groups, unit_R: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Weights with which each unit counts once in its groups, and the number of units of each row's group, [R] each."""
    share_R = 1 / groups_of(groups.index * units + unit_R).size.double()
    return share_R, group_sum(share_R, groups).round()


def _prompts(batch: Batch) -> Tensor:
    """Number of each unit's prompt, from 0: of episodes, `group` has one number for each prompt and agent."""
    agent_B = batch.get("agent")
    episode_B = batch.get("episode")
    agents = 1 if agent_B is None or episode_B is None or not len(agent_B) else int(agent_B.max()) + 1
    return groups_of(batch.group // agents).index


def _digests(batch: Batch, depth: int) -> Tensor:
    """[b] int64 below 2^31, a digest of each row's tokens through the reply of a number, context included."""
    turn_BT = batch.get("turn")
    places_T = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
    end_B1 = torch.where(batch.mask, places_T, 0).amax(1, keepdim=True)  # a path ends with a sampled token
    through_BT = places_T <= end_B1
    if turn_BT is not None:
        through_BT = through_BT & (turn_BT <= depth)
    mixed_BT = (batch.tokens.long() + 1) * MIX_FACTORS[0] + places_T * MIX_FACTORS[1]
    mixed_BT = (mixed_BT ^ (mixed_BT >> 29)) * MIX_FACTORS[1]  # products of int64 wrap around
    return where_masked(mixed_BT ^ (mixed_BT >> 32), through_BT).sum(1) & (DIGESTS - 1)
