"""Supervised terms, and losses on a part of the tokens.

`batch.mask` says which tokens are learned: true on the assistant's turns only, it is supervised fine-tuning of the
assistant.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funrl.algos.core import Loss, Term, needs, needs_of, reduce, weighted
from funrl.algos.reductions import token_mean
from funrl.algos.terms import kept
from funrl.batch import Batch


def negative_log_likelihood() -> Term:
    """-log pi(t), the loss of supervised fine-tuning. Under a token mean it is the cross-entropy per token.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats).
    """

    @needs()
    def term(logp_BT: Tensor, batch: Batch):
        loss_BT = -kept(logp_BT, batch.mask)
        return loss_BT, {"actor/nll": loss_BT.detach()}

    return term


def dynamic_likelihood() -> Term:
    """-sg(pi(t)) log pi(t): the likelihood, less eager on tokens that the model finds improbable.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats, not weighed).
    References: DFT, Wu et al., 2025, https://arxiv.org/abs/2508.05629
    """

    @needs()
    def term(logp_BT: Tensor, batch: Batch):
        nll_BT = -kept(logp_BT, batch.mask)
        return nll_BT.detach().neg().exp() * nll_BT, {"actor/nll": nll_BT.detach()}

    return term


def sft() -> Loss:
    """Supervised fine-tuning: the mean of -log pi over the tokens of the mask, times `batch.weight` where it is given.

    The denominator counts tokens whatever their weights. For the assistant's turns only, let the mask say so.
    """
    term = negative_log_likelihood()

    @needs()
    def loss(logp_BT: Tensor, batch: Batch):
        return reduce(weighted(term), token_mean())(logp_BT, batch)

    return loss


def restrict(loss: Loss, which: Callable[[Batch], Tensor]) -> Loss:
    """The loss over a part of the mask only: the other tokens are in neither numerator nor denominator.

    Args:
      loss: what is restricted.
      which: batch -> bool that broadcasts to [B, T]; a constant of the batch, never of a log-probability.
    """

    @needs(*needs_of(loss, which))
    def restricted(logp_BT: Tensor, batch: Batch):
        return loss(logp_BT, batch._replace(mask=batch.mask & which(batch)))

    return restricted


def positives(threshold: float = 0.0) -> Callable[[Batch], Tensor]:
    """The rows whose outcome is above a threshold: with `restrict` and a likelihood, VAPO's positive-example loss.

        restrict(reduce(scale(0.1, negative_log_likelihood()), token_mean()), positives())

    Args:
      threshold: in units of reward.
    Needs: score [B]; rows are single sequences.
    References: VAPO, Yue et al., 2025, https://arxiv.org/abs/2504.05118
    """

    @needs("score")
    def which(batch: Batch) -> Tensor:
        assert batch.score is not None
        return (batch.score > threshold)[:, None]

    return which
