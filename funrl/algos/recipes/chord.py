"""CHORD: GRPO on the policy's own rows, plus fine-tuning on demonstrations of the same prompts that fades out.

References: Zhang et al., 2025, https://arxiv.org/abs/2508.11408.
verl: none; Trinity-RFT has the authors' version. ms-swift: chord_sft_dataset, with other prompts in separate batches;
  phi is off by default. TRL has none.

Each prompt brings a demonstration, as text in its field "demonstration" (`--fields=demonstration:COLUMN`).
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.imitation import weigh_demonstrations
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce, sum_losses, weighted
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.likelihood import (
    demonstrated_tokens,
    negative_log_likelihood,
    restrict,
    sampled_tokens,
    uncertain_likelihood,
)
from funrl.algos.losses.reductions import token_mean


def chord(
    phi: bool = True,
    peak: float = 0.9,
    valley: float = 0.05,
    decay_steps: int = 200,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Controllable harmonisation of on- and off-policy learning: (1 - mu) RL + mu imitation.

    Args:
      phi: weight imitated tokens by p (1 - p), largest where the policy is undecided; False: plain likelihood.
      peak: mu in the first step.
      valley: mu from the end of the decay on.
      decay_steps: steps over which mu falls.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef)
    likelihood = weighted(uncertain_likelihood() if phi else negative_log_likelihood())
    learning = restrict(reduce(surrogate, token_mean()), sampled_tokens)
    imitation = restrict(reduce(likelihood, token_mean()), demonstrated_tokens)
    return Algorithm(
        advantage=chain(
            group_center(), group_scale(), to_tokens(), weigh_demonstrations(peak, valley, 0, decay=decay_steps)
        ),
        losses={"policy": sum_losses(learning, imitation)},
    )
