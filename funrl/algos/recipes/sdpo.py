"""SDPO: the policy with more in its prompt is the teacher of each token; its advantage is mixed with that of rewards.

References: Huebotter et al., 2026, https://arxiv.org/abs/2601.20802. Its abstract, a summary of its method and the page
  of a port (sdpo-rl) were read: the mix of both advantages, the teacher after a solved attempt, and its moving average;
  and TRL's trainer, whose numbers are in the tests.
verl: in the authors' fork, with the KL over the teacher's top tokens.
TRL 1.16: an experimental trainer, by default of the teacher alone (distillation_weight=1). At the first update on a
  batch its gradient is this one with std_eps=1e-4, but its teacher's part is a mean by sequence. Later that part has
  the advantage of the policy of now, times the ratio, at most 2. Its teacher reads the first solved other attempt, also
  for solved ones; completions without it and without feedback have no teacher's part. Here the teacher reads the best
  attempt that scores more, else the policy's prompt, after which its part is 0 with --follow=teacher:1 only.

Run it with --teacher_context=sibling, or with a field of feedback or a demonstration, and --follow=teacher:1:0.05;
without --follow the teacher is the first policy, with --follow=teacher:1 the policy of now. With reward_share=0 it is
SDFT (https://arxiv.org/abs/2601.19897) after a demonstration, and OPSD after the answer, both as policy gradients.
TRL's SDFT compares the policy's top tokens by default, or, as here, sampled ones.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.teacher_rewards import teacher_advantage
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def sdpo(
    reward_share: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Self-distillation policy optimisation.

    Args:
      reward_share: of GRPO's advantage, from 0 to 1; the teacher's, its log-probability less the policy's, has the
        rest.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      std_eps: added to the deviation that a group's rewards are divided by.

    Raises:
      ValueError: the share is not from 0 to 1.

    Warning: the teacher's advantage is of sampled tokens; the paper also compares the most probable tokens, as
      `distillation --kind=forward` does.
    """
    if not 0 <= reward_share <= 1:
        raise ValueError(f"sdpo(reward_share={reward_share}): give a share from 0 to 1")
    return Algorithm(
        advantage=chain(
            group_center(), group_scale(std_eps), to_tokens(), teacher_advantage("k1", reward_share, 1 - reward_share)
        ),
        losses={
            "policy": reduce(with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef), token_mean())
        },
    )
