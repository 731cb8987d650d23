"""CompactionRL: PPO over episodes whose history the policy summarises; the last reward reaches the summaries too.

References: Li et al., 2026, https://arxiv.org/abs/2607.05378. Read were its abstract, and what notes and a port on
  BrowseComp-Plus say of its method: a critic instead of a group, a mean over tokens, no KL, one rollout a prompt, gamma
  1, lambda 1 - 1 / (1.5 length), and advantages discounted by the tokens of later segments. There the length is that of
  the segment, as the notes have it; here, as in `gae`, that of the episode.
verl: an RFC (verl#5375). TRL: none found in 1.16. No code of the authors was found.

Run it with an environment of `compacting`, --samples_per_prompt=1, --critic_warmup_steps and --critic_updates=2.
`--summaries=false` is the variant that the paper compares with: the policy and the critic do not learn from summaries.
"""

from funrl.algos.advantages.returns import gae, length_adaptive
from funrl.algos.advantages.segments import discount_segments, mask_summaries
from funrl.algos.advantages.shaping import to_last_token
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.value_loss import clipped_value_loss


def compaction(
    summaries: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    alpha: float = 1.5,
    value_clip: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """CompactionRL.

    Args:
      summaries: whether summaries are trained.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      alpha: lambda of the policy is 1 - 1 / (alpha length), and 0 up to a length of 1 / alpha; that of the critic is 1.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    decay = length_adaptive(alpha)
    masks = () if summaries else (mask_summaries(),)
    term = with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(to_last_token(), gae(1.0, decay, critic_lambda=1.0), discount_segments(1.0, decay), *masks),
        losses={
            "critic": reduce(clipped_value_loss(value_clip), token_mean()),
            "policy": reduce(term, token_mean()),
        },
    )
