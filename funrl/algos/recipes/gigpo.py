"""GiGPO: GRPO over episodes, and within it over their steps that were taken in one state.

References: Feng et al., 2025, https://arxiv.org/abs/2505.10978.
verl: none; verl-agent, the authors' fork, has it, with states by the environment's observation, as ROLL has.
TRL: none.

Without an environment there is one step in one state, and this is Dr. GRPO's advantage times 1 + step_coef.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.steps import step_groups
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean


def gigpo(
    step_coef: float = 1.0,
    gamma: float = 0.95,
    deviation: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
) -> Algorithm:
    """Group-in-group policy optimisation.

    Args:
      step_coef: weight of the advantage of a step among those in its state; that of the episode is 1.
      gamma: discount per turn of the rewards that follow a step.
      deviation: divide both advantages by the deviation of what they are compared with.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
    """
    episode = (group_center(), group_scale()) if deviation else (group_center(),)
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), kl_coef)
    return Algorithm(
        advantage=chain(*episode, step_groups(step_coef, gamma, 1e-6 if deviation else None)),
        losses={"policy": reduce(surrogate, sequence_mean())},
    )
