"""RAE: REINFORCE in self-play, each role with a running mean of its own rewards as the baseline.

References: SPIRAL, Liu et al., 2025, https://arxiv.org/abs/2506.24119.
verl and TRL: none. prime-rl has it, with baselines that a restart forgets; here they are in the checkpoint.
"""

from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.steps import role_baseline
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_sum_mean


def rae(
    decay: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Role-conditioned advantage estimation.

    Args:
      decay: of the running mean, per episode, from 0 to 1.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(role_baseline(decay), to_tokens()), losses={"policy": reduce(surrogate, sequence_sum_mean())}
    )
