"""Hierarchical GRPO: proposing agents are compared over the prompt, solving agents within their episode.

References: prime-rl's hierarchical_grpo, https://github.com/PrimeIntellect-ai/prime-rl.
verl and TRL: none. prime-rl names the roles that are compared within an episode, and does not divide by a deviation.

Without an environment there is one agent, and this is GRPO without the deviation.
"""

from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.steps import hierarchical_center
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def hierarchical_grpo(
    proposers: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """GRPO of agents that propose and agents that solve.

    Args:
      proposers: how many agents, the first of the environment's, are compared over the prompt's episodes.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), kl_coef, entropy_coef)
    return Algorithm(
        advantage=chain(hierarchical_center(proposers), to_tokens()),
        losses={"policy": reduce(surrogate, token_mean())},
    )
