"""Likelihood terms of supervised training, and losses on a part of the tokens.

`batch.mask` says which tokens are trained on: true on the assistant's turns only, it is supervised fine-tuning of the
assistant.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funrl.algos.core import Loss, Term
from funrl.batch import Batch


def negative_log_likelihood() -> Term:
    """-log pi(t), the loss of supervised fine-tuning. Under a token mean it is the cross-entropy per token.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats).
    """
    return lambda logp_BT, batch: (-logp_BT, {"actor/nll": -logp_BT})


def dynamic_likelihood() -> Term:
    """-sg(pi(t)) log pi(t): the likelihood, less eager on tokens that the model finds improbable.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats, not weighed).
    References: DFT, Wu et al., 2025, https://arxiv.org/abs/2508.05629
    """
    return lambda logp_BT, batch: (-logp_BT.detach().exp() * logp_BT, {"actor/nll": -logp_BT})


def restrict(loss: Loss, which: Callable[[Batch], Tensor]) -> Loss:
    """The loss over a part of the mask only: the other tokens are in neither numerator nor denominator.

    Args:
      loss: what is restricted.
      which: batch -> bool that broadcasts to [B, T]; of fields that the step does not write, such as `imitated_tokens`.
    """

    def part(batch: Batch) -> Batch:
        return batch._replace(mask=batch.mask & which(batch))

    return Loss(lambda batch: loss.denominators(part(batch)), lambda x_BT, batch: loss.numerators(x_BT, part(batch)))


def imitated_tokens(batch: Batch) -> Tensor:
    """The tokens that `mark_positives` marked; for `restrict`."""
    return batch.imitated
