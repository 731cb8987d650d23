"""ECHO: GRPO, and the likelihood of what tools wrote between the policy's replies.

References: prime-rl's echo, https://github.com/PrimeIntellect-ai/prime-rl.
verl: in a recipe. TRL has none. prime-rl weighs messages by role, 0.1 for tools, without the template around them where
  its renderer tells.

Without an environment nothing is observed, and this is GRPO with a mean over tokens.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.steps import learn_observations
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce, scale, sum_losses
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.likelihood import acted_tokens, negative_log_likelihood, observed_tokens, restrict
from funrl.algos.losses.reductions import token_mean


def echo(
    observation_coef: float = 0.1,
    others: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """GRPO that also predicts its observations.

    Args:
      observation_coef: factor of the likelihood of what tools wrote, in units of advantage per nat.
      others: also predict what users and other agents wrote between replies.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), kl_coef, entropy_coef)
    likelihood = reduce(scale(observation_coef, negative_log_likelihood()), token_mean())
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens(), learn_observations(others)),
        losses={
            "policy": sum_losses(
                restrict(reduce(surrogate, token_mean()), acted_tokens), restrict(likelihood, observed_tokens)
            )
        },
    )
