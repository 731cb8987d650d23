"""Importance ratios of policy terms, (logp, batch) -> [B, T], and helpers of terms over whole sequences.

A log-ratio is clamped to +-20 before the exponential, and the gradient vanishes where the clamp acts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.algos.masks import on_tokens_of_sequence, sums_by_sequence
from funrl.algos.terms import Term, check_called, run_term
from funrl.batch import Batch

Ratio = Callable[[Tensor, Batch], Tensor]

LOG_RATIO_BOUND = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) for x clamped to +-20."""
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def either(condition_BT: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two floats in the dtype of `like`; torch.where itself would round them to float32."""
    return torch.where(condition_BT, torch.full_like(like, yes), torch.full_like(like, no))


def sum_of_sequence(x_BT: Tensor, batch: Batch) -> Tensor:
    """The sum over the mask of each token's own sequence, broadcast to its masked tokens; 0 elsewhere.

    All rows of an agent's episode are one sequence, in which each token that was sampled counts once.
    """
    return on_tokens_of_sequence(sums_by_sequence(x_BT, batch.mask, batch), batch.mask, batch)


def mean_of_sequence(x_BT: Tensor, batch: Batch) -> Tensor:
    """The mean over the mask of each token's own sequence, broadcast to its masked tokens; 0 elsewhere."""
    length_BT = sum_of_sequence(torch.ones_like(x_BT), batch)
    return sum_of_sequence(x_BT, batch) / length_BT.clamp_min(1)


def log_ratio(logp_BT: Tensor, batch: Batch) -> Tensor:
    """log(pi / pi_old). Needs: old_logp."""
    return logp_BT - batch.old_logp


def token_ratio(sampled_by: str = "old_logp") -> Ratio:
    """r_t = pi(t) / pi_old(t), the importance ratio of every token.

    Args:
      sampled_by: field of the denominator's log-probabilities: "old_logp", or "rollout_logp" for the engine's; the
        ratio then includes the gap between engine and trainer.
    Needs: `sampled_by` [B, T].
    Returns: a ratio, (logp, batch) -> [B, T].
    """
    return lambda logp_BT, batch: bounded_exp(logp_BT - getattr(batch, sampled_by))


def product_ratio() -> Ratio:
    """prod_t pi(t) / pi_old(t), the importance ratio of a whole sequence, on each of its tokens.

    Needs: old_logp [B, T].
    Returns: a ratio, (logp, batch) -> [B, T], constant over a sequence.
    """
    return lambda logp_BT, batch: bounded_exp(sum_of_sequence(log_ratio(logp_BT, batch), batch))


def sequence_ratio(per_token: bool = False, mean: bool = True) -> Ratio:
    """s = exp(mean_t log(pi(t) / pi_old(t))), the length-normalised ratio of a sequence, on each of its tokens.

    The sequence y of the paper is the whole response to a prompt, which the reward is of. So the sequence of an episode
    is all that one agent sampled in it, over all of its rows: the likelihood of an episode is the product over these
    tokens, each given the path before it, whatever branches there are.

    With `per_token` it is GSPO-token's s_t = sg(s) pi(t) / sg(pi(t)): the same value, but a token's ratio moves only
    that token's probability. With an advantage that is the same on all tokens of a sequence the two have equal
    gradients.

    Args:
      per_token: take GSPO-token's form, for advantages that differ by token.
      mean: normalise by the length; False: s is the product of the tokens' ratios, as in TRL's RLOO.
    Needs: old_logp [B, T].
    Returns: a ratio, (logp, batch) -> [B, T], constant over a sequence.
    References: Zheng et al., 2025, https://arxiv.org/abs/2507.18071

    Warning: verl's gspo is the per-token form, and clamps the log-ratio at 10 from above only.
    """

    def ratio(logp_BT: Tensor, batch: Batch) -> Tensor:
        moved_BT = log_ratio(logp_BT, batch)
        whole_BT = mean_of_sequence(moved_BT, batch) if mean else sum_of_sequence(moved_BT, batch)
        if per_token:
            whole_BT = whole_BT.detach() + logp_BT - logp_BT.detach()
        return bounded_exp(whole_BT)

    return ratio


def or_token_ratio(ratio: Ratio | None) -> Ratio:
    """The ratio, or `token_ratio()` for None.

    Raises:
      PieceError: it is a factory that was not called.
    """
    if ratio is None:
        return token_ratio()
    check_called(ratio, "Ratio")
    return ratio


def times_ratio(term: Term, ratio: Ratio | None = None) -> Term:
    """The term's loss times a ratio; the gradient goes through both factors.

    A one-sample estimate under tokens of an older policy becomes one under the policy itself: times_ratio(
    kl_to_reference("k3")) is the bias-corrected KL of DeepSeek-V3.2.

    Args:
      term: whose loss is multiplied.
      ratio: how the ratio is taken; None is `token_ratio()`.
    Needs: what the ratio and the term need.
    Returns: a term; its metrics are those of the term.
    """
    check_called(term, "Term")
    ratio = or_token_ratio(ratio)

    def multiplied(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, logp_BT, batch)
        return ratio(logp_BT, batch) * loss_BT, metrics

    return multiplied
