"""Advantages of episodes by their steps and agents: GiGPO, MT-GRPO, hierarchical GRPO, RAE, and lengths of turns.

Without turns, states or agents, as of single completions, a row is one turn in one state of one agent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.baselines import check_eps
from funrl.algos.advantages.groups import group_mean, group_std, groups_of
from funrl.algos.advantages.turns import check_factors, groups_with, row_turns, turn_count, turn_returns
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.losses.ratios import either
from funrl.algos.masks import where_masked
from funrl.algos.scan import reverse_linear_scan
from funrl.batch import Batch

MOST_AGENTS = 32  # numbers of agents that have a baseline of their own
STATES = 1 << 31  # above every digest of a state


def step_groups(weight: float = 1.0, gamma: float = 0.95, eps: float | None = None) -> Advantage:
    """Add GiGPO's step advantage to the episode's: A_E[i] + weight A_S[i, k] on the tokens of turn k, [B] -> [B, T].

    A_S[i, k] = R[i, k] - mean R over the steps of the group's episodes that were taken in the same state, of one agent;
    R[i, k] = sum_{j >= k} gamma^(j - k) r[i, j], with the outcome in the last turn's r. A step whose state no other has
    gets 0. x is A_E, as `group_center` gives it; R is of the raw score.

    Args:
      weight: of A_S, relative to A_E.
      gamma: discount per turn, from 0 to 1.
      eps: A_S is divided by the standard deviation of its state plus eps, in units of reward; None: it is not.
    Needs: group, score [B]. Uses turn, state, token_reward [B, T].

    Raises:
      ValueError: gamma is outside 0 to 1, or eps is below 0.
    References: Feng et al., 2025, https://arxiv.org/abs/2505.10978

    Warning: without a deviation as here by default, F_norm is 1, which the paper uses for most tasks; verl-agent's
    mean_std_norm divides. Its state is the environment's observation; `Episode.states` names it, and the default is
    what was said since the reply before. Steps of one episode in one state are compared too, as in the paper.
    """
    check_factors("step_groups", gamma=gamma)
    check_eps("step_groups", eps)

    def add_steps(x_B: Tensor, batch: Batch) -> Tensor:
        turns = row_turns(batch, batch.mask)
        returns_BT = turn_returns(batch.score.to(x_B.dtype), batch, gamma)
        state_BT = batch.get("state")
        state_BT = torch.zeros_like(turns.of_token) if state_BT is None else state_BT.long()
        across = batch.across.rows
        group_R = across.sums(batch.across.own(groups_of(batch.group).index)[:, None])
        places_KBT = [turns.ends() & (turns.of_token == turn) for turn in range(turn_count(turns, batch))]
        values_KR = torch.stack([across.sums(where_masked(returns_BT, here)) for here in places_KBT])
        states_KR = torch.stack([across.sums(where_masked(state_BT.double(), here)) for here in places_KBT])
        present_KR = torch.stack([across.sums(here) for here in places_KBT]) > 0
        keys_KR = (group_R * STATES + states_KR).long()
        steps = groups_with(present_KR.flatten(), keys_KR.flatten())
        values = values_KR.flatten()
        relative = values - group_mean(values, steps)
        if eps is not None:
            std = group_std(values, steps)
            relative = relative / torch.where(std > 0, std + eps, 1)
        result_BT = batch.across.own(x_B)[:, None].expand(batch.mask.shape)
        for turn, relative_R in enumerate(relative.view_as(values_KR)):
            step_B1 = weight * across.own(relative_R)[:, None].to(x_B.dtype)
            result_BT = torch.where(turns.of_token == turn, result_BT + step_B1, result_BT)
        return where_masked(result_BT, batch.mask)

    return stateless(add_steps, per="row")


def turn_relative(outcome_weight: float = 1.0, eps: float = 1e-6) -> Advantage:
    """MT-GRPO's advantages of turns: A_T[i, k] + outcome_weight A_O[i], and A_O[i] in the last turn; [B] -> [B, T].

    A_T[i, k] = (r[i, k] - mean_G r[k]) / (std_G r[k] + eps) over the episodes of the group that have a turn after k,
    each with one number; r sums `token_reward` over the turn. x is A_O, as `group_center` and `group_scale` give it. A
    turn that no other episode has gets A_T = 0, as do equal rewards.

    Args:
      outcome_weight: of A_O in turns before the last.
      eps: in the unit of the rewards, at least 0.
    Needs: group [B]. Uses turn, token_reward [B, T].

    Raises:
      ValueError: eps is below 0.
    References: Zeng et al., 2025, https://arxiv.org/abs/2505.11821

    Warning: the paper has two turns. An agent's reward includes what its turns earned, so A_O does too; the paper's
    outcome does not.
    """
    check_eps("turn_relative", eps)

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        mask_BT = batch.mask
        turns = row_turns(batch, mask_BT)
        across = batch.across
        outcome_BT = across.own(x_B)[:, None].expand(mask_BT.shape)
        reward_BT = batch.get("token_reward")
        reward_BT = torch.zeros_like(outcome_BT) if reward_BT is None else reward_BT.to(x_B.dtype)
        earned_BT = turns.on_tokens(turns.sums(reward_BT))
        last_BT = turns.of_token == turns.of_token.amax(1, keepdim=True)
        result_BT = outcome_BT
        for turn in range(turn_count(turns, batch) - 1):
            own_BT = (turns.of_token == turn) & mask_BT & ~last_BT
            here_BT = own_BT & turns.ends()
            counts_U = across.sums(here_BT)
            values_U = across.sums(where_masked(earned_BT, here_BT)) / counts_U.clamp_min(1)
            groups = groups_with(counts_U > 0, batch.group)
            std_U = group_std(values_U, groups)
            mean_B1, scale_B1 = (
                across.own(z)[:, None].to(x_B.dtype)
                for z in (group_mean(values_U, groups), torch.where(std_U > 0, 1 / (std_U + eps), 0))
            )
            relative_BT = (earned_BT - mean_B1) * scale_B1
            result_BT = torch.where(own_BT, relative_BT + outcome_weight * outcome_BT, result_BT)
        return where_masked(result_BT, mask_BT)

    return stateless(compare, per="row")


def turn_length_penalty(limit: int, buffer: int, factor: float = 1.0) -> Advantage:
    """Penalise turns near the longest reply allowed: `overlong_penalty` of each turn.

    x - factor sum_k max(0, n[k] - (limit - buffer)) / buffer on [B], n[k] the sampled tokens of turn k, rejected ones
    included; on [B, T] each turn's part at its last token.

    Args:
      limit: the longest turn allowed, tokens.
      buffer: number of tokens over which the penalty grows, above 0.
      factor: the penalty of a turn at the limit, in units of reward.
    Uses turn [B, T].

    Raises:
      ValueError: the buffer is not above 0, or longer than the limit.
    References: DAPO's overlong penalty, Yu et al., 2025, https://arxiv.org/abs/2503.14476, by turn.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"turn_length_penalty: buffer {buffer} must be above 0 and at most the limit {limit}")

    def punish(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        turns = row_turns(batch, batch.mask)
        lengths_BT = turns.on_tokens(turns.sums(torch.ones_like(turns.mask, dtype=signal.x.dtype)))
        penalty_BT = factor * (lengths_BT - (limit - buffer)).clamp_min(0) / buffer
        at_ends_BT = where_masked(penalty_BT, turns.ends())
        if signal.x.dim() == 1:
            return signal._replace(x=signal.x - batch.across.sums(at_ends_BT).to(signal.x.dtype)), state
        return signal._replace(x=where_masked(signal.x - at_ends_BT, signal.mask)), state

    return Advantage(lambda: (), punish)


def hierarchical_center(proposers: int = 1) -> Advantage:
    """Compare the first agents over the group, and the others within their episode: x_i - mean of its peers, on [B].

    Agents 0 to `proposers` - 1, such as one that writes a problem, are compared with the same agent in other episodes
    of the prompt. The others, such as several that solve it, are compared with one another, as only they had the same
    problem. One without peers gets 0.

    Args:
      proposers: how many agents are compared over the group, by their order in `Environment.agents`; at least 0.
    Needs: group [B]. Uses episode, agent [B].

    Raises:
      ValueError: proposers is below 0.
    References: prime-rl's hierarchical_grpo, https://github.com/PrimeIntellect-ai/prime-rl, which names the roles.
    """
    if proposers < 0:
        raise ValueError(f"hierarchical_center(proposers={proposers}): it must be at least 0")

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        agent_B = batch.get("agent")
        episode_B = batch.get("episode")
        group_B = groups_of(batch.group).index
        if agent_B is None or episode_B is None:
            return x_B - group_mean(x_B, groups_of(group_B))
        over_group_B = group_B * (agent_B.max() + 1) + agent_B
        within_B = over_group_B.max() + 1 + groups_of(episode_B).index
        return x_B - group_mean(x_B, groups_of(torch.where(agent_B < proposers, over_group_B, within_B)))

    return stateless(compare, per="row")


def role_baseline(decay: float = 0.95) -> Advantage:
    """Subtract a running mean of the agent's own rewards: x_i - b, then b <- decay b + (1 - decay) x_i, on [B].

    In a game of several roles one may win more often whatever the policy does; each is compared with its own past.
    Episodes are taken in the order of the batch, which is that of their numbers; b begins as 0 and is the state.

    Args:
      decay: from 0 to 1.
    Uses agent [B]; without it there is one agent.

    Raises:
      ValueError: the decay is outside 0 to 1; in a run, there are more than 32 agents.
    References: RAE of SPIRAL, Liu et al., 2025, https://arxiv.org/abs/2506.24119

    Warning: the paper's algorithm updates b before it subtracts it, which shrinks the advantage by the factor decay; a
    reward is compared with earlier ones here, as in prime-rl.
    """
    check_factors("role_baseline", decay=decay)

    def compare(signal: Signal, before: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        check_rank(signal, "row")
        agent_B = batch.get("agent")
        agent_B = torch.zeros_like(signal.x, dtype=torch.int64) if agent_B is None else agent_B
        roles_A = torch.arange(MOST_AGENTS, device=agent_B.device)
        if not torch.compiler.is_compiling() and bool((agent_B >= MOST_AGENTS).any()):
            raise ValueError(f"role_baseline(): agent {int(agent_B.max())}; only {MOST_AGENTS} have a baseline")
        own_AB = roles_A[:, None] == agent_B
        new_AB = where_masked(((1 - decay) * signal.x.double()).expand(own_AB.shape), own_AB)
        first_A1 = before.to(new_AB)[:, None]
        inputs_AB = torch.cat((first_A1, new_AB), 1)
        decays_AB = torch.nn.functional.pad(either(own_AB, decay, 1.0, like=new_AB), (1, 0))
        baselines_AB = reverse_linear_scan(inputs_AB.flip(1), decays_AB.flip(1)).flip(1)  # before all, after each row
        baseline_B = baselines_AB[:, :-1].gather(0, agent_B[None])[0]
        return signal._replace(x=signal.x - baseline_B.to(signal.x.dtype)), baselines_AB[:, -1].to(before)

    return Advantage(lambda: torch.zeros(MOST_AGENTS, dtype=torch.float64), compare)


def learn_observations(others: bool = False) -> Advantage:
    """Put what tools wrote between replies into the mask, with x = 0, for a loss on `observed_tokens`.

        sum_losses(restrict(reduce(clipped_surrogate(), token_mean()), acted_tokens),
                   restrict(reduce(scale(0.1, negative_log_likelihood()), token_mean()), observed_tokens))

    Put it last in the chain. What several rows share is in one of them. The tokens of the template around a tool's
    output count as its own.

    Args:
      others: also take what users and other agents wrote between replies.
    Uses author [B, T]. Makes: observed.
    References: prime-rl's echo, https://github.com/PrimeIntellect-ai/prime-rl
    """

    def extend(signal: Signal, state: trees.Tree, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        author_BT = batch.get("author")
        if author_BT is None:
            observed_BT = torch.zeros_like(signal.mask)
        else:
            observed_BT = ~batch.mask & ((author_BT == 2) | ((author_BT == 3) & others))
        return signal._replace(
            x=where_masked(signal.x, signal.mask),
            mask=signal.mask | observed_BT,
            extra=signal.extra | {"observed": observed_BT},
        ), state

    return Advantage(lambda: (), extend)
