"""A reward model: its output at the last token learns to be higher for the better of two completions.

References: Ouyang et al., 2022, https://arxiv.org/abs/2203.02155.
verl: trains none. TRL: RewardTrainer; center_rewards_coefficient is `center`, a margin is used where the data have one.
"""

from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.reward_models import pairwise_reward


def reward_model(center: float = 0.0, margin: bool = False) -> Algorithm:
    """Bradley and Terry's likelihood of the preferences.

    Args:
      center: pulls the mean reward of a pair to 0, in 1 / reward^2.
      margin: use the target difference that the data give for each pair.
    """
    return Algorithm(None, {"reward_model": reduce(pairwise_reward(center, margin), sequence_mean())}, example="pair")
