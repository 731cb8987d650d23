"""Likelihood terms of supervised training, and losses on a part of the tokens.

`batch.mask` marks the trained tokens; for supervised fine-tuning of an assistant it is true on the assistant's turns.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funrl.algos.core import Loss
from funrl.algos.terms import Term
from funrl.batch import Batch


def negative_log_likelihood() -> Term:
    """-log pi(t), the loss of supervised fine-tuning. Under a token mean it is the cross-entropy per token.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats).
    """
    return lambda logp_BT, batch: (-logp_BT, {"actor/nll": -logp_BT})


def dynamic_likelihood() -> Term:
    """-sg(pi(t)) log pi(t): likelihood with less weight on improbable tokens.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats, not weighed).
    References: DFT, Wu et al., 2025, https://arxiv.org/abs/2508.05629
    """
    return lambda logp_BT, batch: (-logp_BT.detach().exp() * logp_BT, {"actor/nll": -logp_BT})


def entropy_gated_likelihood(alpha: float = 1.0, scale: float = 3.0) -> Term:
    """-sg(min(H / scale, 1)^alpha) log pi(t): likelihood with less weight where entropy H is low.

    An improbable token is still learned if the entropy H is high, since the model is uncertain there. If H is low, the
    model contradicts the demonstration, and learning the token would destroy what the model knows.

    Args:
      alpha: exponent of the gate, at least 0; 0 is plain likelihood.
      scale: entropy in nats at which a token counts fully, above 0; the default is close to ln 20.
    Needs: entropy [B, T], of the current policy.
    Returns: a term; loss [B, T] in nats; metrics "actor/nll" (nats, not weighed), "actor/entropy" (nats).

    Raises:
      ValueError: alpha is below 0, or the scale not above 0.
    References: EAFT, Diao et al., 2026, https://arxiv.org/abs/2601.02151

    Warning: H is over the whole vocabulary. The paper and LLaMA-Factory take it over the 20 most probable tokens,
    renormalised, where it is at most ln 20; on text the two are nearly the same.
    """
    if alpha < 0 or scale <= 0:
        raise ValueError(f"entropy_gated_likelihood(alpha={alpha}, scale={scale}): alpha >= 0 and scale > 0 are needed")

    def term(logp_BT: Tensor, batch: Batch):
        gate_BT = (batch.entropy.detach() / scale).clamp(0, 1) ** alpha
        return -gate_BT * logp_BT, {"actor/nll": -logp_BT, "actor/entropy": batch.entropy}

    return term


def uncertain_likelihood() -> Term:
    """-sg(p (1 - p)) log p with p = pi(t): likelihood, mostly of tokens with p near 1/2.

    Returns: a term; loss [B, T] in nats; metric "actor/nll" (nats, not weighed).
    References: CHORD's phi, Zhang et al., 2025, https://arxiv.org/abs/2508.11408
    """

    def term(logp_BT: Tensor, batch: Batch):
        p_BT = logp_BT.detach().exp()
        return -p_BT * (1 - p_BT) * logp_BT, {"actor/nll": -logp_BT}

    return term


def restrict(loss: Loss, which: Callable[[Batch], Tensor]) -> Loss:
    """The loss over a part of the mask only. Other tokens are in neither numerator nor denominator.

    A sequence is a row, or all rows of an agent's episode, with the tokens that are left.

    Args:
      loss: the loss to restrict.
      which: batch -> bool that broadcasts to [B, T], such as `imitated_tokens`; may not read fields that the step
        writes.
    """

    def part(batch: Batch) -> Batch:
        return batch._replace(mask=batch.mask & which(batch), episode_tokens=None)  # which are counted anew

    return Loss(lambda batch: loss.denominators(part(batch)), lambda x_BT, batch: loss.numerators(x_BT, part(batch)))


def demonstrated_tokens(batch: Batch) -> Tensor:
    """The tokens of demonstrations; for `restrict`."""
    return batch.demonstration


def sampled_tokens(batch: Batch) -> Tensor:
    """The tokens outside demonstrations; for `restrict`."""
    return ~batch.demonstration


def imitated_tokens(batch: Batch) -> Tensor:
    """The tokens that `mark_positives` marked; for `restrict`."""
    return batch.imitated


def observed_tokens(batch: Batch) -> Tensor:
    """The tokens that `learn_observations` put into the mask; for `restrict`."""
    return batch.observed


def opening_tokens(batch: Batch) -> Tensor:
    """The first sampled tokens of sequences, after `flow_targets`; for `restrict`."""
    return batch.opening


def acted_tokens(batch: Batch) -> Tensor:
    """The tokens that the policy sampled, after `learn_observations`; for `restrict`."""
    return ~batch.observed
