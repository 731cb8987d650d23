"""A process reward model: its output at the end of every step predicts whether the solution is right so far.

References: Lightman et al., 2023, https://arxiv.org/abs/2305.20050.
verl: trains none. TRL: its PRMTrainer, no longer in 1.16, took the cross-entropy of two outputs, which is this loss on
  their difference.
"""

from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.reward_models import step_reward


def process_reward_model() -> Algorithm:
    """Cross-entropy of the label of every step; a mean over steps."""
    return Algorithm(None, {"process_reward_model": reduce(step_reward(), token_mean())}, example="steps")
