"""Supervised terms: likelihood of given tokens."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.core import Term, needs
from funrl.algos.terms import kept
from funrl.batch import Batch


def negative_log_likelihood() -> Term:
    """-log pi(t), the loss of supervised fine-tuning; `batch.mask` says which tokens are learned.

    For the assistant's turns only, the mask is true on those. Token weights come with `weighted`. Under a token-mean
    this is the cross-entropy per token.

    Needs: nothing but tokens and mask.
    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats).
    """

    @needs()
    def term(logp_BT: Tensor, batch: Batch):
        loss_BT = -kept(logp_BT, batch.mask)
        return loss_BT, {"actor/nll": loss_BT.detach()}

    return term
