"""SPIN: self-play fine-tuning; DPO's loss on a demonstration against the policy's own sample.

References: Chen et al., 2024, https://arxiv.org/abs/2401.01335.
verl: the recipe of that name pairs the better and the worse of two samples by a reward, which is `online_dpo` here.
TRL has none; SPIN's own trainer was a DPO on texts that were generated beforehand.

Each prompt brings a demonstration, as text in its field "demonstration" (`--fields=demonstration:COLUMN`); no reward is
needed. The current policy samples the opponent in every step. The reference stays the initial model: the paper's next
iteration is a new run that starts from the weights of this one.
"""

from dataclasses import replace

from funrl.algos.core import Algorithm
from funrl.algos.recipes.dpo import dpo


def spin(beta: float = 0.1, loss: str = "sigmoid") -> Algorithm:
    """Self-play fine-tuning: among several samples of a prompt, the one with the lowest reward is the opponent.

    Args:
      beta: scale of the log-ratio, per nat.
      loss: as in dpo; the paper's is the logistic one, sigmoid.
    """
    return replace(dpo(loss, beta), example="demonstrated")
