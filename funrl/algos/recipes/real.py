"""REAL: rewards as labels; the rows of a group are classified by how their probability has changed.

References: Zhai et al., 2026, https://arxiv.org/abs/2602.05630.
verl: none. ms-swift: loss_type real, the mean over groups, each of which must be in one micro-batch. TRL has none.
"""

from funrl.algos.advantages.baselines import class_sizes, group_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.sequence_terms import classification


def real(tau: float = 0.5, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> Algorithm:
    """Rewards as labels: rows above their group's mean against the others, without advantages or clips.

    Args:
      tau: nats per token over which the weight of a completion changes.
      kl_coef: factor of the KL in the loss, in nats per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in nats per nat.

    Warning: the other rows of a group enter with their values before the batch's first update: see `classification`.
    """
    term = with_regularizers(classification(tau), kl_coef, entropy_coef)
    return Algorithm(
        advantage=chain(group_center(), class_sizes(), to_tokens()), losses={"policy": reduce(term, sequence_mean())}
    )
