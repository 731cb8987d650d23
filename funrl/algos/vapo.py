"""VAPO: PPO for long reasoning; two lambdas, one of them growing with the response, and imitation of successes.

References: Yue et al., 2025, https://arxiv.org/abs/2504.05118.
verl and TRL: not there as such. The paper also pretrains the critic on Monte Carlo returns, with the policy held
  still.
"""

from __future__ import annotations

from funrl.algos.advantages import gae, length_adaptive, whiten
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce, scale, together
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import to_last_token
from funrl.algos.supervised import negative_log_likelihood, positives, restrict
from funrl.algos.terms import clipped_surrogate
from funrl.algos.value import clipped_value_loss


def vapo(
    low: float = 0.2,
    high: float = 0.28,
    alpha: float = 0.05,
    imitation: float = 0.1,
    value_clip: float | None = 0.5,
    entropy: float = 0.0,
) -> Algorithm:
    """Value-based augmented PPO.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      alpha: lambda of the policy is 1 - 1 / (alpha length), per token; lambda of the critic is 1.
      imitation: factor of the likelihood of the tokens of successful completions, in units of advantage per nat.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, value, old_logp.
    """
    surrogate = reduce(policy(clipped_surrogate(low, high), 0.0, entropy), token_mean())
    successes = restrict(reduce(scale(imitation, negative_log_likelihood()), token_mean()), positives())
    return Algorithm(
        advantage=chain(to_last_token(), gae(1.0, length_adaptive(alpha), critic_lam=1.0), whiten()),
        policy_loss=together(surrogate, successes),
        value_loss=reduce(clipped_value_loss(value_clip), token_mean()),
    )
