"""Advantages from rewards: pieces of a chain, each from scores [B] or token rewards [B, T] to the same or to [B, T].

Rows of one prompt share a number in `batch.group`. Two rules hold in every piece that compares rows of a group:
a group of one row has nothing to be compared with, and gets exactly 0; so does every row of a group whose rewards are
equal, whatever the rounding. `whiten` compares tokens, not rows: where completions differ in length, the mean over
tokens of what was centred by rows is not 0, and zeros before it are that mean, negated and scaled, after it. What lies
outside the mask of the result is exactly 0, and may be NaN in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Signal, check_rank, stateless, where_masked
from funrl.algos.groups import group_mean, group_std, groups_of
from funrl.batch import Batch
from funrl.compiled_kernels.scan import reverse_linear_scan


def group_center() -> Advantage:
    """Takes the group's mean off each score: x_i - mean_G x, on [B].

    Needs: score, group [B].

    Warning: a group of one row gets 0. verl's grpo, opo and gpg keep its raw reward (mean 0, deviation 1), TRL gives 0.
    """
    return stateless(lambda x_B, batch: x_B - group_mean(x_B, groups_of(batch.group)), "score", "group", per="row")


def group_scale(eps: float = 1e-6) -> Advantage:
    """Divides each number by its group's standard deviation (n - 1 below) plus eps, on [B].

    A group of equal numbers or of one row is left as it is, which after `group_center` is 0.

    Args:
      eps: in the unit of x.
    Needs: score, group [B].
    References: GRPO, Shao et al., 2024, https://arxiv.org/abs/2402.03300

    Warning: eps is 1e-6 in verl and here, 1e-4 in TRL, 1e-9 in OpenRLHF. verl divides the rounding that equal rewards
    leave behind by eps (seven times 0.1 in float32: an advantage of -0.0074); here equal rewards give exactly 0.
    """

    def divide(x_B: Tensor, batch: Batch) -> Tensor:
        std_B = group_std(x_B, groups_of(batch.group))
        return x_B / torch.where(std_B > 0, std_B + eps, torch.ones_like(std_B))

    return stateless(divide, "score", "group", per="row")


def batch_scale(eps: float = 1e-6) -> Advantage:
    """Divides by the standard deviation of all rows (n - 1 below) plus eps, on [B]; equal numbers are left alone.

    Prompts whose rewards differ much then weigh more than others. Before `group_center` the deviation is that of the
    raw rewards, differences between prompts included, which is TRL's scale_rewards="batch" (eps 1e-4 there); after it,
    the deviation of what is left, as in the last step of GDPO.

    Args:
      eps: in the unit of x.
    Needs: score [B].
    """

    def divide(x_B: Tensor, batch: Batch) -> Tensor:
        std_B = group_std(x_B, groups_of(x_B.new_zeros(x_B.shape, dtype=torch.int64)))
        return x_B / torch.where(std_B > 0, std_B + eps, torch.ones_like(std_B))

    return stateless(divide, "score", per="row")


Lambda = Callable[[Tensor], Tensor]


def gae(gamma: float = 1.0, lam: float | Lambda = 1.0, critic_lam: float | None = None) -> Advantage:
    """Generalised advantage estimation over the sampled tokens, on [B, T]; sets the critic's target.

    delta[t] = r[t] + gamma v[t'] - v[t],  A[t] = delta[t] + gamma lam A[t'],  returns[t] = A[t] + v[t],
    where t' is the next sampled token of the row (a tool's output between them is stepped over), and after the last
    one v and A are 0. Rewards at tokens that were not sampled are not seen.

    Args:
      gamma: discount per sampled token.
      lam: how far to trust sampled rewards over the critic; 1 is Monte Carlo, 0 one step. A function gives each row
        its own, from lengths [B, 1] in sampled tokens, rejected ones included: see `length_adaptive`.
      critic_lam: the lambda of the returns; None: the same one. Decoupled, 1 in VAPO.
    Needs: score, value [B, T] in units of reward. Sets: signal.returns.
    Raises:
      ValueError: gamma or a lambda is outside 0 to 1; in a run, the signal is of outcomes [B].
    References: Schulman et al., 2016, https://arxiv.org/abs/1506.02438
    """
    for name, factor in {"gamma": gamma, "lam": lam, "critic_lam": critic_lam}.items():
        if isinstance(factor, (int, float)) and not 0 <= factor <= 1:
            raise ValueError(f"gae({name}={factor}): give a factor from 0 to 1")

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        check_rank(signal, "token")
        assert batch.value is not None
        mask_BT, x_BT = signal.mask, where_masked(signal.x, signal.mask)
        value_BT = where_masked(batch.value, mask_BT).to(x_BT.dtype)
        delta_BT = where_masked(x_BT + gamma * next_sampled(value_BT, mask_BT) - value_BT, mask_BT)
        policy_lam = lam(batch.mask.sum(1, keepdim=True).to(x_BT.dtype)) if callable(lam) else lam
        advantage_BT = where_masked(accumulate(delta_BT, mask_BT, gamma * policy_lam), mask_BT)
        target_BT = advantage_BT
        if critic_lam is not None:
            target_BT = where_masked(accumulate(delta_BT, mask_BT, gamma * critic_lam), mask_BT)
        return signal._replace(x=advantage_BT, returns=target_BT + value_BT), state

    return Advantage(lambda: (), update, frozenset({"score", "value"}), frozenset({"returns"}))


def length_adaptive(alpha: float = 0.05) -> Lambda:
    """Lambda that grows with the response, 1 - 1 / (alpha length), and is 0 below a length of 1 / alpha.

    The weights of the temporal differences then sum to about alpha times the length, so that a long response's
    advantage is not dominated by the critic's bias.

    Args:
      alpha: per token.
    References: VAPO, Yue et al., 2025, https://arxiv.org/abs/2504.05118
    """
    return lambda lengths: (1 - 1 / (alpha * lengths.clamp_min(1))).clamp_min(0)


def reward_to_go(gamma: float = 1.0) -> Advantage:
    """The discounted sum of the rewards from each sampled token on: G[t] = r[t] + gamma G[t'], on [B, T].

    Tokens that were not sampled are stepped over: they neither discount nor count.

    Args:
      gamma: discount per sampled token.
    Needs: score [B].
    """

    def collect(x_BT: Tensor, batch: Batch) -> Tensor:
        return where_masked(accumulate(where_masked(x_BT, batch.mask), batch.mask, gamma), batch.mask)

    return stateless(collect, "score", per="token")


def accumulate(x_BT: Tensor, mask_BT: Tensor, decay: float | Tensor) -> Tensor:
    """y[t] = x[t] + decay y[t'] with t' the next masked token; positions between carry y[t'] unchanged.

    Args:
      x_BT: 0 outside the mask.
      decay: per masked token; a number or a tensor that broadcasts to [B, T].
    """
    carry_BT = torch.where(mask_BT, torch.as_tensor(decay, dtype=x_BT.dtype, device=x_BT.device), 1.0)
    return reverse_linear_scan(x_BT, carry_BT.to(x_BT.dtype))


def next_sampled(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x at the next masked token to the right, 0 where there is none; x is 0 outside the mask."""
    at_or_after_BT = reverse_linear_scan(x_BT, (~mask_BT).to(x_BT.dtype))
    return torch.nn.functional.pad(at_or_after_BT[:, 1:], (0, 1))


def whiten(eps: float = 1e-8) -> Advantage:
    """Mean 0 and variance 1 over all masked tokens of the batch: (x - mean) / sqrt(var + eps), on [B, T].

    The variance has n - 1 below. Equal numbers, or a single token, give exactly 0; a zero among others does not stay 0
    unless the mean over tokens is 0. Signal.returns is left alone.

    Args:
      eps: in the squared unit of x.

    Warning: verl does not mask again after gae's whitening, so its tool tokens have advantages; here they are 0.
    OpenRLHF has n below and clamps the variance to 1e-8 in the place of adding it.
    """

    def standardise(x_BT: Tensor, batch: Batch) -> Tensor:
        mask_BT = batch.mask
        count = mask_BT.sum()
        least = x_BT.masked_fill(~mask_BT, torch.inf).amin()
        shifted_BT = where_masked(x_BT - least, mask_BT)
        centred_BT = where_masked(shifted_BT - shifted_BT.sum() / count, mask_BT)
        variance = centred_BT.square().sum() / (count - 1).clamp_min(1)
        return centred_BT * (variance + eps).rsqrt()

    return stateless(standardise, per="token")
