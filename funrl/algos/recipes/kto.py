"""KTO: completions labelled good or bad, without pairs, relative to how far the policy has moved.

References: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.
verl: none. TRL: KTOTrainer; desirable_weight and undesirable_weight are `desirable` and `undesirable`, loss_type
  apo_zero_unpaired is `loss="apo_zero"`. It recomputes the reference point in every micro-batch.
"""

from typing import Literal

from funrl.algos.advantages.unpaired import reference_point
from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.preference import kto_loss
from funrl.algos.losses.reductions import sequence_mean


def kto(
    loss: Literal["kto", "apo_zero"] = "kto", beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0
) -> Algorithm:
    """Kahneman-Tversky optimisation.

    Args:
      loss: kto, with a reference point; or apo_zero, whose reference point is 0.
      beta: scale of the log-ratio, per nat.
      desirable, undesirable: weight of a good and of a bad completion; if the numbers differ, number times weight
        should be about the same for both.
    """
    term = kto_loss(beta, desirable, undesirable, baseline=loss == "kto")
    advantage = reference_point() if loss == "kto" else None
    return Algorithm(advantage, {"policy": reduce(term, sequence_mean())}, example="labelled")
