"""Advantages of turns: an episode's replies, each with all of its tokens.

`batch.turn` [B, T] numbers the turns of a row. A turn that several rows share is on the mask of one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import Groups, group_mean, groups_of
from funrl.algos.advantages.returns import accumulate, next_sampled
from funrl.algos.advantages.shaping import last_of
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.masks import where_masked
from funrl.algos.scan import reverse_linear_scan
from funrl.batch import Batch


class RowTurns(NamedTuple):
    """RowTurns of rows. A row has at most as many as tokens: K = T.

    Attributes:
      of_token: [B, T] int64, turn of each token.
      mask: [B, T] tokens that count.
    """

    of_token: Tensor
    mask: Tensor

    def sums(self, x_BT: Tensor) -> Tensor:
        """The sum of x over the tokens of each turn, [B, K]."""
        return torch.zeros_like(x_BT).scatter_add(1, self.of_token, where_masked(x_BT, self.mask))

    def first(self, x_BT: Tensor) -> tuple[Tensor, Tensor]:
        """x at the first token of each turn, 0 where the row has none; and whether it has one; [B, K] each."""
        T = self.mask.shape[1]
        places_BT = torch.where(self.mask, torch.arange(T, device=self.mask.device), T)
        first_BK = torch.full_like(places_BT, T).scatter_reduce(1, self.of_token, places_BT, "amin")
        present_BK = first_BK < T
        return where_masked(x_BT.gather(1, first_BK.clamp_max(T - 1)), present_BK), present_BK

    def ends(self) -> Tensor:
        """[B, T] bool, the last token of each turn."""
        following_BT = next_sampled(where_masked(self.of_token + 1, self.mask).double(), self.mask)
        return self.mask & (following_BT != self.of_token + 1)

    def on_tokens(self, x_BK: Tensor) -> Tensor:
        """The number of each token's turn [B, T]."""
        return where_masked(x_BK.gather(1, self.of_token), self.mask)


def to_turns(gamma: float = 1.0) -> Advantage:
    """Give each token the rewards of its turn and, discounted by turns, of the later ones: [B] -> [B, T].

    R[k] = r[k] + gamma R[k + 1], where r[k] sums `token_reward` over the tokens of turn k, and the last turn has the
    outcome too.

    Args:
      gamma: discount per turn, from 0 to 1.
    Uses turn [B, T] if it is there; otherwise a row is one turn. Adds batch.token_reward [B, T] if it is given.

    Raises:
      ValueError: gamma is outside 0 to 1.
    """
    check_factors("to_turns", gamma=gamma)

    return stateless(lambda x_B, batch: turn_returns(x_B, batch, gamma), per="row")


def turn_returns(x_B: Tensor, batch: Batch, gamma: float) -> Tensor:
    """The discounted rewards of each token's turn and of later ones, [B, T]; see `to_turns`."""
    mask_BT = batch.mask
    turns = row_turns(batch, mask_BT)
    reward_BT = batch.get("token_reward")
    own_B1 = batch.across.own(x_B)[:, None]
    outcome_BT = torch.where(last_of(mask_BT) & mask_BT, own_B1, torch.zeros_like(own_B1))
    total_BT = outcome_BT if reward_BT is None else outcome_BT + where_masked(reward_BT, mask_BT).to(x_B.dtype)
    sums_BK = turns.sums(total_BT)
    return turns.on_tokens(reverse_linear_scan(sums_BK, torch.full_like(sums_BK, gamma)))


def turn_center() -> Advantage:
    """Subtract from each turn's number the mean of the group's turns of that place, on [B, T].

    x[i, k] - mean over the rows j of the group that have a turn k of x[j, k]. All tokens of a turn have its number, as
    `to_turns` gives it. A turn that no other row of the group has gets exactly 0, as do equal numbers. An agent's
    episode is one row here: where it branched, its number is the mean over its turns of that place.

    Needs: group [B]. Uses turn [B, T].
    """

    def centre(x_BT: Tensor, batch: Batch) -> Tensor:
        mask_BT = batch.mask
        turns = row_turns(batch, mask_BT)
        across = batch.across
        ends_BT = turns.ends()
        centred_BT = where_masked(x_BT, mask_BT)
        for turn in range(turn_count(turns, batch)):
            here_BT = ends_BT & (turns.of_token == turn)
            counts_U = across.sums(here_BT)
            values_U = across.sums(where_masked(x_BT, here_BT)) / counts_U.clamp_min(1)
            groups = groups_with(counts_U > 0, batch.group)
            own_B1 = where_masked(x_BT, here_BT).sum(1, keepdim=True)  # a row has at most one turn of a place
            means_B1 = across.own(group_mean(values_U, groups))[:, None].to(own_B1)
            mean_B1 = torch.where(across.own(groups.size)[:, None] > 1, means_B1, own_B1)
            centred_BT = torch.where(mask_BT & (turns.of_token == turn), centred_BT - mean_B1, centred_BT)
        return centred_BT

    return stateless(centre, per="token")


def turn_gae(gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantage:
    """Generalised advantage estimation over turns, on [B, T]; sets the critic's target.

    A[k] = r[k] + gamma v[k'] - v[k] + gamma lambda A[k'], where r[k] sums the rewards of the turn's tokens, v[k] is the
    value before its first token, and k' is the next turn. All tokens of a turn have its advantage, and its target
    A[k] + v[k].

    Args:
      gamma: discount per turn, from 0 to 1.
      gae_lambda: how far to trust sampled rewards over the critic, from 0 to 1.
    Uses turn [B, T]. Needs: value [B, T] in units of reward. Makes: returns.

    Raises:
      ValueError: a factor is outside 0 to 1.
    References: Schulman et al., 2016, https://arxiv.org/abs/1506.02438; with a turn as the action, as in ArCHer, Zhou
      et al., 2024, https://arxiv.org/abs/2402.19446
    """
    check_factors("turn_gae", gamma=gamma, gae_lambda=gae_lambda)

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        turns = row_turns(batch, signal.mask)
        rewards_BK = turns.sums(signal.x)
        values_BK, present_BK = turns.first(where_masked(batch.value, signal.mask).to(signal.x.dtype))
        following_BK = next_sampled(values_BK, present_BK)
        delta_BK = where_masked(rewards_BK + gamma * following_BK - values_BK, present_BK)
        advantage_BK = where_masked(accumulate(delta_BK, present_BK, gamma * gae_lambda), present_BK)
        returns_BT = turns.on_tokens(advantage_BK + values_BK)
        return signal._replace(x=turns.on_tokens(advantage_BK), returns=returns_BT), state

    return Advantage(lambda: (), update)


def row_turns(batch: Batch, mask_BT: Tensor) -> RowTurns:
    """The turns of a rank's rows; tokens that do not count are in the first. Without `turn` a row is one turn."""
    turn_BT = batch.get("turn")
    none_BT = torch.zeros_like(mask_BT, dtype=torch.int64)
    return RowTurns(none_BT if turn_BT is None else torch.where(mask_BT, turn_BT.long(), none_BT), mask_BT)


def turn_count(turns: RowTurns, batch: Batch) -> int:
    """The largest number of turns of a row, of all ranks."""
    return 1 + int(batch.across.rows.sums(turns.of_token.amax(1, keepdim=True)).max())


def groups_with(present_U: Tensor, group_U: Tensor) -> Groups:
    """Groups of the present units; each absent unit is alone."""
    groups = groups_of(group_U)
    alone_U = groups.count + torch.arange(len(group_U), device=group_U.device)
    return groups_of(torch.where(present_U, groups.index, alone_U))


def check_factors(name: str, **factors: float) -> None:
    """Raise ValueError where a factor is outside 0 to 1."""
    for argument, factor in factors.items():
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}({argument}={factor}): it must be from 0 to 1")
