"""SPIN: self-play fine-tuning; a demonstration against what the policy writes itself, by DPO's loss.

References: Chen et al., 2024, https://arxiv.org/abs/2401.01335.
verl: the recipe of that name pairs the better and the worse of two samples by a reward, which is `online_dpo` here.
TRL has none since SPIN's own trainer, a DPO on texts that were generated beforehand.

Prompts bring a demonstration each, as text in their field "demonstration" (`--fields=demonstration:COLUMN`); no reward
is needed. The opponent and the reference are those of the first step: the paper's next iteration is a run that begins
with the weights of this one. Samples are drawn anew in every step, by the policy as it is.
"""

from __future__ import annotations

from dataclasses import replace

from funrl.algos.core import Algorithm
from funrl.algos.recipes.dpo import dpo


def spin(beta: float = 0.1, loss: str = "sigmoid") -> Algorithm:
    """Self-play fine-tuning: of several samples of a prompt the one with the least reward is the opponent.

    Args:
      beta: how much a nat of log-ratio counts.
      loss: as in dpo; the paper's is the logistic one, sigmoid.
    """
    return replace(dpo(loss, beta), example="demonstrated")
