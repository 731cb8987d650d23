"""PPO: a policy, a critic and a frozen reference learn a task whose answers can be verified.

    python -m funrl.experiments.ppo --mesh=dp4,tp2
    python -m funrl.experiments.ppo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The first command launches eight ranks by itself, teaches a small decoder from scratch to add numbers by imperfect
demonstrations, and lets PPO do the rest. The loop is `funrl/trainer/loop.py`; what makes it PPO is all here.

Left out on purpose: a learned reward model, early stopping on the KL, and shared weights of policy and critic.
"""

import sys

from funrl.algos.advantages import gae, whiten
from funrl.algos.core import Algorithm, add, chain, reduce, weighted
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import adaptive_kl, fixed_kl, kl_in_reward, to_last_token
from funrl.algos.terms import clipped_surrogate, entropy_bonus
from funrl.algos.value import clipped_value_loss
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    value_clip: float = 0.5,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    kl_coef: float = 0.01,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Proximal policy optimisation, Schulman et al., 2017, https://arxiv.org/abs/1707.06347.

    Args:
      clip_low: how far the probability ratio of a token may fall below 1
      clip_high: how far the probability ratio of a token may rise above 1
      dual_clip: the largest ratio that counts where the advantage is negative
      value_clip: how far a value may move in one step, in units of reward
      gamma: discount of a reward, per token
      gae_lambda: trust in sampled rewards over the critic, per token; 1 is rewards alone
      kl_coef: reward taken off per nat of KL to the reference; 0: no reference is kept
      kl_target: nats a token; the coefficient then adapts to hold this KL
      entropy_coef: loss taken off per nat of entropy
    """
    controller = fixed_kl(kl_coef) if kl_target is None else adaptive_kl(kl_coef, kl_target)
    rewards = [to_last_token(), kl_in_reward(controller)] if kl_coef else [to_last_token()]
    terms = [weighted(clipped_surrogate(clip_low, clip_high, dual_clip))]
    if entropy_coef:
        terms.append(entropy_bonus(entropy_coef))
    return Algorithm(
        advantage=chain(*rewards, gae(gamma, gae_lambda), whiten()),
        policy_loss=reduce(add(*terms), token_mean()),
        value_loss=reduce(clipped_value_loss(value_clip), token_mean()),
    )


if __name__ == "__main__":
    sys.exit(main("ppo", algorithm="funrl.experiments.ppo:algorithm"))
