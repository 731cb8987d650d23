"""Advantages of single tokens: generalised estimation, rewards to go, whitening. Pieces on token rewards [B, T].

Outside the mask the result is exactly 0, whatever the batch holds there, NaN included. `whiten` compares tokens, not
rows: where completions differ in length, values centred over rows have a nonzero mean over tokens. `whiten` subtracts
that mean, so tokens that were 0 before it are not 0 after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.across import CACHED
from funrl.algos.advantages.groups import power_of_two
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.masks import row_or_episode_sums, total, where_masked
from funrl.algos.scan import reverse_linear_scan
from funrl.batch import Batch

Lambda = Callable[[Tensor], Tensor]


class AdvantagesAndReturns(NamedTuple):
    """Advantages and the critic's target, [B, T], 0 outside the mask."""

    advantage: Tensor
    returns: Tensor


def generalised_advantages(
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    gamma: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
    critic_lambda: float | Tensor | None = None,
) -> AdvantagesAndReturns:
    """Generalised advantage estimation over the masked tokens of each row; `gae` has the formula.

    Args:
      gae_lambda, critic_lambda: numbers, or tensors that broadcast to [B, T].

    Example:
      >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
      >>> generalised_advantages(reward, value, torch.tensor([[True, True]])).advantage.tolist()
      [[0.5, 0.75]]
    """
    rows = max(1, CACHED // max(reward_BT.shape[1], 1))  # rows are independent; a few at a time fit in the cache

    def by_rows(x: object) -> Iterator[Any]:
        return iter(x.split(rows)) if isinstance(x, Tensor) and x.dim() == 2 and len(x) > 1 else itertools.repeat(x)

    inputs = (reward_BT, value_BT, mask_BT, gamma, gae_lambda, critic_lambda)
    if len(reward_BT) <= rows:
        return _advantages_of_rows(*inputs)
    parts = [_advantages_of_rows(*some) for some in zip(*map(by_rows, inputs))]  # noqa: B905 (numbers are repeated)
    return AdvantagesAndReturns(*map(torch.cat, zip(*parts, strict=True)))


def _advantages_of_rows(
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    critic_lambda: float | Tensor | None,
) -> AdvantagesAndReturns:
    value_BT = where_masked(value_BT, mask_BT).to(reward_BT.dtype)
    reward_BT = where_masked(reward_BT, mask_BT)
    delta_BT = where_masked(reward_BT + gamma * next_sampled(value_BT, mask_BT) - value_BT, mask_BT)

    def accumulated(decay: float | Tensor) -> Tensor:
        return where_masked(accumulate(delta_BT, mask_BT, gamma * decay), mask_BT)

    advantage_BT = accumulated(gae_lambda)
    target_BT = advantage_BT if critic_lambda is None else accumulated(critic_lambda)
    return AdvantagesAndReturns(advantage_BT, target_BT + value_BT)


def gae(gamma: float = 1.0, gae_lambda: float | Lambda = 1.0, critic_lambda: float | None = None) -> Advantage:
    """Generalised advantage estimation over the sampled tokens, on [B, T]; sets the critic's target.

    delta[t] = r[t] + gamma v[t'] - v[t],  A[t] = delta[t] + gamma lambda A[t'],  returns[t] = A[t] + v[t],
    where t' is the next sampled token of the row (a tool's output in between is skipped), and v and A are 0 after the
    last one. Rewards at tokens that were not sampled are ignored.

    Args:
      gamma: discount per sampled token.
      gae_lambda: how far to trust sampled rewards over the critic; 1 is Monte Carlo, 0 one step. A function gives each
        row its own lambda, from lengths [B, 1] in sampled tokens of the row, or of its agent's episode, rejected ones
        included: see `length_adaptive`.
      critic_lambda: the lambda of the returns; None: gae_lambda. VAPO uses 1.
    Needs: value [B, T] in units of reward. Makes: returns.

    Raises:
      ValueError: gamma or a lambda is outside 0 to 1; in a run, the signal still holds outcomes [B].
    References: Schulman et al., 2016, https://arxiv.org/abs/1506.02438
    """
    for name, factor in {"gamma": gamma, "gae_lambda": gae_lambda, "critic_lambda": critic_lambda}.items():
        if isinstance(factor, (int, float)) and not 0 <= factor <= 1:
            raise ValueError(f"gae({name}={factor}): it must be from 0 to 1")

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        if callable(gae_lambda):
            own_lambda = gae_lambda(row_or_episode_sums(torch.ones_like(signal.x), batch.mask, batch))
        else:
            own_lambda = gae_lambda
        out = generalised_advantages(
            signal.x, batch.value, signal.mask, gamma=gamma, gae_lambda=own_lambda, critic_lambda=critic_lambda
        )
        return signal._replace(x=out.advantage, returns=out.returns), state

    return Advantage(lambda: (), update)


def length_adaptive(alpha: float = 0.05) -> Lambda:
    """Lambda grows with length: max(0, 1 - 1 / (alpha length)).

    The weights of the temporal differences then sum to about alpha times the length, so that a long response's
    advantage is not dominated by the critic's bias.

    Args:
      alpha: per token, above 0.

    Raises:
      ValueError: alpha is not above 0.
    References: VAPO, Yue et al., 2025, https://arxiv.org/abs/2504.05118
    """
    if alpha <= 0:
        raise ValueError(f"length_adaptive(alpha={alpha}): it must be above 0")
    return lambda lengths: (1 - 1 / (alpha * lengths.clamp_min(1))).clamp_min(0)


def reward_to_go(gamma: float = 1.0) -> Advantage:
    """Discounted sum of rewards from each sampled token on: G[t] = r[t] + gamma G[t'], on [B, T].

    Tokens that were not sampled are skipped: they neither discount nor count.

    Args:
      gamma: discount per sampled token.
    """

    def collect(x_BT: Tensor, batch: Batch) -> Tensor:
        return where_masked(accumulate(where_masked(x_BT, batch.mask), batch.mask, gamma), batch.mask)

    return stateless(collect, per="token")


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
    """Standardise over all masked tokens: (x - mean) / sqrt(var + eps), on [B, T].

    The variance has the denominator n - 1. Equal numbers, or a single token, give exactly 0; a zero among others does
    not stay 0 unless the mean over tokens is 0. Signal.returns is unchanged. The divisor is a constant of derivatives:
    see `reward_parts`.

    Args:
      eps: in the squared unit of x.

    Warning: verl does not mask again after gae's whitening, so its tool tokens have advantages; here they are 0.
    OpenRLHF divides the variance by n and clamps it to 1e-8 instead of adding eps.
    """

    def standardise(x_BT: Tensor, batch: Batch) -> Tensor:
        mask_BT = batch.mask
        dtype = x_BT.dtype
        count = total(mask_BT, mask_BT, batch)
        largest_b1 = where_masked(x_BT.detach().abs(), mask_BT).amax(1, keepdim=True)
        unit = power_of_two(batch.across.rows.sums(largest_b1).amax())  # squares of large rewards overflow float32
        x_BT = x_BT / unit.to(dtype)
        least_b1 = torch.where(mask_BT, x_BT.detach(), torch.inf).amin(1, keepdim=True)
        least = batch.across.rows.sums(least_b1).amin().to(dtype)  # the smallest number of all rows
        shifted_BT = where_masked(x_BT - least, mask_BT)
        mean = total(shifted_BT, mask_BT, batch) / count
        centred_BT = where_masked(shifted_BT - mean.to(dtype), mask_BT)
        variance = total(centred_BT.detach().square(), mask_BT, batch) / (count - 1).clamp_min(1)
        return centred_BT * (variance + eps / unit.square()).rsqrt().to(dtype)

    return stateless(standardise, per="token")
