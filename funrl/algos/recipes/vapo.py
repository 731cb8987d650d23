"""VAPO: PPO for long reasoning; two lambdas, one of them growing with the response, and imitation of successes.

References: Yue et al., 2025, https://arxiv.org/abs/2504.05118.
verl and TRL: no such recipe. The paper also pretrains the critic on Monte Carlo returns, with the policy frozen.
"""

from funrl.algos.advantages.returns import gae, length_adaptive, whiten
from funrl.algos.advantages.shaping import to_last_token
from funrl.algos.advantages.token_selection import mark_positives
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce, scale, sum_losses
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.likelihood import imitated_tokens, negative_log_likelihood, restrict
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.value_loss import clipped_value_loss


def vapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    alpha: float = 0.05,
    imitation_coef: float = 0.1,
    value_clip: float | None = 0.5,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Value-based augmented PPO.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      alpha: lambda of the policy is 1 - 1 / (alpha length), and 0 up to a length of 1 / alpha; that of the critic is 1.
      imitation_coef: factor of the likelihood of the tokens of successful completions, in units of advantage per nat.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef)
    imitation = reduce(scale(imitation_coef, negative_log_likelihood()), token_mean())
    return Algorithm(
        advantage=chain(
            to_last_token(), gae(1.0, length_adaptive(alpha), critic_lambda=1.0), whiten(), mark_positives()
        ),
        losses={
            "critic": reduce(clipped_value_loss(value_clip), token_mean()),
            "policy": sum_losses(reduce(surrogate, token_mean()), restrict(imitation, imitated_tokens)),
        },
    )
