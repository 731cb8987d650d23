"""Baselines and scales of outcomes. Pieces on [B], each before `to_tokens`.

Rows of one prompt share a number in `batch.group`. Two rules hold in every piece that compares rows of a group: a group
of one row gets exactly 0, and so does every row of a group whose rewards are equal, whatever the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import Groups, group_max, group_mean, group_min, group_std, group_sum, groups_of
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.losses.pair_losses import check_beta
from funrl.algos.masks import where_masked
from funrl.batch import Batch


def group_center() -> Advantage:
    """Subtract the group mean: x_i - mean_G x, on [B].

    Needs: group [B].

    Warning: a group of one row gets 0. verl's grpo, opo and gpg keep its raw reward (mean 0, deviation 1), TRL gives 0.
    """
    return stateless(lambda x_B, batch: x_B - group_mean(x_B, groups_of(batch.group)), per="row")


def group_scale(eps: float = 1e-6) -> Advantage:
    """Divide by the group's standard deviation (n - 1 below) plus eps, on [B].

    A group of equal numbers or of one row is left unchanged; after `group_center` it is 0.

    Args:
      eps: in the unit of x, at least 0.
    Needs: group [B].

    Raises:
      ValueError: eps is below 0.
    References: GRPO, Shao et al., 2024, https://arxiv.org/abs/2402.03300

    Warning: eps is 1e-6 in verl and here, 1e-4 in TRL, 1e-9 in OpenRLHF. In verl equal rewards leave a rounding error
    that is divided by eps (seven times 0.1 in float32: an advantage of -0.0074); here they give exactly 0.
    """
    check_eps("group_scale", eps)

    def divide(x_B: Tensor, batch: Batch) -> Tensor:
        std_B = group_std(x_B, groups_of(batch.group))
        return x_B / torch.where(std_B > 0, std_B + eps, torch.ones_like(std_B))

    return stateless(divide, per="row")


def batch_scale(eps: float = 1e-6, alone: bool = True) -> Advantage:
    """Divide by the batch's standard deviation (n - 1 below) plus eps, on [B]; equal numbers are left alone.

    Prompts whose rewards differ more then weigh more than others. Before `group_center` the deviation is that of the
    raw rewards, differences between prompts included, which is TRL's scale_rewards="batch" (eps 1e-4 there); after it,
    the deviation of the centred rewards, as in the last step of GDPO.

    Args:
      eps: in the unit of x, at least 0.
      alone: count rows that are alone in their group. Use False after `leave_one_out`, which gives such rows 0:
        counting them would make the deviation too small.
    Needs: group [B] unless alone.

    Raises:
      ValueError: eps is below 0.
    """
    check_eps("batch_scale", eps)

    def divide(x_B: Tensor, batch: Batch) -> Tensor:
        counted_B = torch.ones_like(x_B, dtype=torch.bool) if alone else groups_of(batch.group).size > 1
        std_B = group_std(x_B, groups_of((~counted_B).to(torch.int64)))
        std = torch.where(counted_B, std_B, torch.zeros_like(std_B)).amax()
        return x_B / torch.where(std > 0, std + eps, torch.ones_like(std))

    return stateless(divide, per="row")


def batch_center() -> Advantage:
    """Subtract the batch mean: x_i - mean x, on [B]. With `batch_scale`, PRPO.

    If all scores are equal, each row gets exactly 0. A group of equal scores among others does not: a prompt that is
    always solved gets positive advantages, one that is never solved gets negative ones.
    """
    return stateless(lambda x_B, batch: x_B - group_mean(x_B, _one_group(x_B)), per="row")


def constant_baseline(value: float = 0.5) -> Advantage:
    """Subtract a constant: x_i - value, on [B].

    Off-policy, the number affects more than the variance: it sets how much right answers count relative to wrong ones.

    Args:
      value: in units of reward.
    References: TOPR, Le Roux et al., 2025, https://arxiv.org/abs/2503.14286
    """
    return stateless(lambda x_B, batch: x_B - value, per="row")


def relative_to_mean() -> Advantage:
    """Subtract the group mean and divide by it: (x_i - mean_G x) / mean_G x, on [B].

    With rewards of 0 and 1 this estimates the gradient of log p, where p is the probability of solving the prompt:
    rarely solved prompts count more. A group whose mean is not above 0 gets 0.

    Needs: group [B]; scores that are at least 0.
    References: MaxRL, Tajwar et al., 2026, https://arxiv.org/abs/2602.02710

    Warning: the authors and SkyRL add 1e-6 to the mean and divide by negative means too, which flips the sign of the
    whole group; prime-rl gives 0, as here. A group of one row gets 0 here and in prime-rl, and its raw reward in
    theirs.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        mean_B = group_mean(x_B, groups_of(batch.group))
        above_B = mean_B > 0
        return torch.where(above_B, (x_B - mean_B) / torch.where(above_B, mean_B.detach(), 1), torch.zeros_like(x_B))

    return stateless(compare, per="row")


def optimal_value_baseline(beta: float = 0.5) -> Advantage:
    """Subtract the optimal value under a KL cost of beta: x_i - beta log mean_G exp(x / beta), on [B].

    Args:
      beta: in units of reward per nat, above 0. The baseline tends to the group's mean for large beta, to its maximum
        for small beta.
    Needs: group [B].

    Raises:
      ValueError: beta is not above 0.
    References: A*-PO, Brantley et al., 2025, https://arxiv.org/abs/2505.20686

    Warning: the mean is over the samples of the policy in this batch. The authors and TRL take it over samples of the
    reference, once before training, and then need one sample a prompt; the two agree at the first step.
    """
    check_beta(beta)

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        best_B = group_max(x_B, groups)
        return x_B - best_B - beta * group_mean(((x_B - best_B) / beta).exp(), groups).log()

    return stateless(compare, per="row")


def group_log_ratio(beta: float = 0.1, against: str = "ref_logp") -> Advantage:
    """Add beta times the group's mean log-ratio to each number: x_i + beta mean_G sum_t log(pi_old / pi'), on [B].

    This is the target of `log_ratio_regression` where log-ratios are centred in the group too, as in GVPO.

    Args:
      beta: in units of reward per nat, above 0.
      against: field of the log-probabilities of pi'.
    Needs: old_logp and `against` [B, T] (nats), group [B].

    Raises:
      ValueError: beta is not above 0.
    References: GVPO, Zhang et al., 2025, https://arxiv.org/abs/2504.19599
    """
    check_beta(beta)

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        moved_BT = where_masked(batch.old_logp - getattr(batch, against), signal.mask)
        moved_B = batch.across.sums(moved_BT).to(signal.x.dtype)
        return signal._replace(x=signal.x + beta * group_mean(moved_B, groups_of(batch.group))), state

    return Advantage(lambda: (), update)


def class_sizes() -> Advantage:
    """Signed size of a row's class in its group: +n for the n rows with x > 0, -m for the m others; on [B].

    After `group_center` the classes are the rows above the group's mean and the others. A group of one class gets 0.

    Needs: group [B].
    References: REAL, Zhai et al., 2026, https://arxiv.org/abs/2602.05630
    """

    def count(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        good_B = x_B > 0
        good_rows_B = group_sum(good_B.to(x_B.dtype), groups)
        other_rows_B = groups.size.to(x_B.dtype) - good_rows_B
        mixed_B = (good_rows_B > 0) & (other_rows_B > 0)
        return torch.where(mixed_B, torch.where(good_B, good_rows_B, -other_rows_B), torch.zeros_like(x_B))

    return stateless(count, per="row")


def leave_one_out() -> Advantage:
    """Subtract the mean of the group's other rows: x_i - mean_{j != i} x_j = (x_i - mean_G x) n / (n - 1).

    Needs: group [B].
    References: Kool et al., 2019; RLOO, Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740

    Warning: a group of one row gets 0. verl's rloo gives its raw reward, verl's rloo_vectorized 0.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        return (x_B - group_mean(x_B, groups)) * groups.size / (groups.size - 1).clamp_min(1)

    return stateless(compare, per="row")


def win_rate() -> Advantage:
    """Win rate of a row in its group, less 1/2: mean_{j != i} (1[x_i > x_j] + 1[x_i = x_j] / 2) - 1/2.

    A row is not compared with itself, so the rates of a group have a mean of 1/2 whatever its size. The result is from
    -1/2 to 1/2, and 0 for a group of one row or of equal scores. Memory grows with the square of the rows.

    Needs: group [B].
    References: SPPO, Wu et al., 2024, https://arxiv.org/abs/2405.00675

    Warning: the paper's estimate is the mean over all rows of the group, the row itself included as a tie, which pulls
    the rate towards 1/2 by the factor (n - 1) / n.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        same_BB = groups.index[:, None] == groups.index
        lead_B = (torch.sign(x_B[:, None] - x_B) * same_BB).sum(1)
        return lead_B / (2 * (groups.size - 1).clamp_min(1))

    return stateless(compare, per="row")


def prompt_baseline() -> Advantage:
    """Subtract the score that the prompt's earlier samples let expect: x_i - v(prompt_i), on [B].

    The source measures it: each new measurement of a prompt halves the weight of the earlier ones, and a prompt without
    any has the mean of the others.

    Needs: prompt_value [B].
    References: SPO, Xu and Ding, 2025, https://arxiv.org/abs/2509.13232, whose weight of earlier samples depends on how
      far the policy has moved since.
    """
    return stateless(lambda x_B, batch: x_B - batch.prompt_value, per="row")


def greedy_baseline() -> Advantage:
    """Subtract the greedy completion's score: x_i - b_i. Needs: greedy_score [B].

    References: ReMax, Li et al., 2024, https://arxiv.org/abs/2310.10505
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        return x_B - batch.greedy_score.to(x_B.dtype)

    return stateless(compare, per="row")


def length_weighted_center() -> Advantage:
    """Subtract the length-weighted group mean: x_i - sum_G l x / sum_G l.

    This baseline has the least variance if the squared norm of a completion's gradient grows with its length l. l is
    the number of sampled tokens, including tokens that a correction has rejected.

    Needs: group [B].
    References: OPO, Hao et al., 2025, https://arxiv.org/abs/2505.23585

    Warning: a group of one row gets 0; verl's opo gives its raw reward.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        length_B = batch.across.sums(batch.mask).to(signal.x.dtype)
        return signal._replace(x=signal.x - group_mean(signal.x, groups_of(batch.group), length_B)), state

    return Advantage(lambda: (), update)


def informative_rescale() -> Advantage:
    """Multiply by rows / (rows of groups whose x are not all 0), against dilution by groups without a signal.

    Comes after `group_center`, which makes x exactly 0 in a group of equal rewards.

    Needs: group [B].
    References: GPG, Chu et al., 2025, https://arxiv.org/abs/2504.02546

    Warning: as in the paper, the denominator counts the rows of groups with unequal rewards. verl counts the rows whose
    reward is not 0, which is a different number.
    """

    def rescale(x_B: Tensor, batch: Batch) -> Tensor:
        teaches_B = group_max(x_B.abs(), groups_of(batch.group)) > 0
        return x_B * (x_B.shape[0] / teaches_B.sum().clamp_min(1).to(x_B.dtype))

    return stateless(rescale, per="row")


def best_of_group(eps: float | None = 1e-6) -> Advantage:
    """Give only the best row of a group an advantage, which trains pass@k.

    A_i = x_1 - x_2 for the best row i of the group, divided by the group's standard deviation plus eps; else 0.

    Args:
      eps: in the unit of x, at least 0; None: no division.
    Needs: group [B].

    Raises:
      ValueError: eps is below 0.
    References: Tang et al., 2025, https://arxiv.org/abs/2503.19595

    Warning: a group of one row gets 0; verl's grpo_passk raises. Two rows that tie for the best both get 0.
    """
    check_eps("best_of_group", eps)

    def lead(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        best_B = x_B == group_max(x_B, groups)
        alone_B = best_B & (group_sum(best_B.to(x_B.dtype), groups) == 1) & (groups.size > 1)
        second_B = group_max(torch.where(best_B, -torch.inf, x_B), groups)
        lead_B = torch.where(alone_B, x_B - second_B, torch.zeros_like(x_B))
        return lead_B if eps is None else lead_B / (group_std(x_B, groups) + eps)

    return stateless(lead, per="row")


def max_at_k(k: int = 4) -> Advantage:
    """Advantages for max@k, the expected best of k completions: n (m_n - m_{n-1}[i]), on [B].

    m_n is the mean over all sets of k rows of the group of the largest x in the set, an unbiased estimate of max@k from
    n rows; m_{n-1}[i] is the same without row i. The difference is k times

        mean_{S with i} max_S x - mean_{S without i} max_S x,

    so (1 / n) sum_i A_i grad log pi(i) is an unbiased estimate of the gradient of max@k, and the advantages of a group
    add up to 0. k = 1 is `leave_one_out`.

    Args:
      k: completions of which the best counts, at least 1. A group of n <= k rows gets the advantages of max@(n - 1),
        and one row gets 0.
    Needs: group [B].

    Raises:
      ValueError: k is below 1.
    References: Takashiro et al., 2026, https://arxiv.org/abs/2606.06080; PKPO, Walder and Karkhanis, 2025,
      https://arxiv.org/abs/2505.15201, whose advantages do not add up to 0.
    """
    if k < 1:
        raise ValueError(f"max_at_k({k}): k must be at least 1")

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        if not len(x_B):
            return x_B
        groups = groups_of(batch.group)
        table_GN, order_B, place_B = _sorted_groups((x_B - group_min(x_B, groups)).double(), groups)
        size_G1 = groups.index.bincount(minlength=groups.count).double()[:, None]
        rank_GN = torch.arange(table_GN.shape[1], device=x_B.device).double().expand_as(table_GN)
        most_G1 = (size_G1 - 1).clamp(min=1, max=k)
        whole_GN = table_GN * _largest_shares(rank_GN, size_G1, most_G1)
        below_GN = table_GN * _largest_shares(rank_GN, size_G1 - 1, most_G1)  # of rows below the one left out
        above_GN = table_GN * _largest_shares(rank_GN - 1, size_G1 - 1, most_G1)
        without_GN = below_GN.cumsum(1) - below_GN + above_GN.sum(1, keepdim=True) - above_GN.cumsum(1)
        advantage_GN = size_G1 * (whole_GN.sum(1, keepdim=True) - without_GN) * (size_G1 > 1)
        out_B = torch.empty_like(x_B)
        out_B[order_B] = advantage_GN[groups.index[order_B], place_B].to(x_B.dtype)
        return out_B

    return stateless(compare, per="row")


def _sorted_groups(x_B: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of each group in ascending order.

    Returns: [G, N] a row for each group, 0 after its last number; [B] the rows by group and number; [B] their columns.
    """
    by_number_B = x_B.argsort(stable=True)
    order_B = by_number_B[groups.index[by_number_B].argsort(stable=True)]
    index_B = groups.index[order_B]
    counts_G = groups.index.bincount(minlength=groups.count)
    place_B = torch.arange(len(x_B), device=x_B.device) - (counts_G.cumsum(0) - counts_G)[index_B]
    table_GN = x_B.new_zeros(groups.count, int(counts_G.max()))
    table_GN[index_B, place_B] = x_B[order_B]
    return table_GN, order_B, place_B


def _largest_shares(rank_GN: Tensor, size_G1: Tensor, k_G1: Tensor) -> Tensor:
    """Shares of the sets of k among n rows whose largest is the row of a rank, from 0: C(rank, k - 1) / C(n, k)."""
    share_GN = (k_G1 / size_G1.clamp_min(1)).expand(rank_GN.shape)
    for taken in range(1, int(k_G1.max())):
        factor_GN = (rank_GN - taken + 1).clamp_min(0) / (size_G1 - taken).clamp_min(1)
        share_GN = torch.where(taken < k_G1, share_GN * factor_GN, share_GN)
    return share_GN


def _one_group(x_B: Tensor) -> Groups:
    """All rows as one group."""
    return groups_of(x_B.new_zeros(x_B.shape, dtype=torch.int64))


def check_eps(name: str, eps: float | None) -> None:
    """Raise ValueError where eps is below 0."""
    if eps is not None and eps < 0:
        raise ValueError(f"{name}(eps={eps}): eps must be at least 0")
