"""Terms on some tokens only: selected by a piece of the chain, or by the current policy.

The other tokens have a loss of 0 and still count in the denominator. `restrict` takes tokens out of both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.algos.terms import Term, run_term
from funrl.batch import Batch

Selection = Callable[[Tensor, Batch], Tensor]


def on_tokens(term: Term, which: Selection) -> Term:
    """The term's loss on the tokens that `which(logp, batch)` gives, 0 on the others.

    The log-probabilities, and `batch.entropy` if it is read, are those of the policy that is being trained, so the
    choice can depend on the updates since sampling.

    Args:
      term: what is minimised on these tokens.
      which: (logp, batch) -> [B, T] bool; no gradient flows through it.
    Needs: what the term and `which` need.
    Returns: a term; its metrics are the term's.
    """

    def chosen(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, logp_BT, batch)
        return torch.where(which(logp_BT.detach(), batch), loss_BT, torch.zeros_like(loss_BT)), metrics

    return chosen


def on_selected(term: Term) -> Term:
    """The term's loss on the tokens of `batch.selected`, 0 on the others. Needs: selected, what the term needs."""
    return on_tokens(term, lambda logp_BT, batch: batch.selected)


def off_selected(term: Term) -> Term:
    """The term's loss, 0 on the tokens of `batch.selected`. Needs: selected, what the term needs."""
    return on_tokens(term, lambda logp_BT, batch: ~batch.selected)


def entropy_above(threshold: float) -> Selection:
    """Tokens at which the current policy's entropy is above a threshold, in nats. Needs: entropy [B, T]."""
    return lambda logp_BT, batch: batch.entropy.detach() > threshold


def probability_below(threshold: float) -> Selection:
    """Tokens whose probability under the current policy is below a threshold."""
    return lambda logp_BT, batch: logp_BT.exp() < threshold
