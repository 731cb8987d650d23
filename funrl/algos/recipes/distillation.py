"""On-policy distillation: the student samples, the teacher scores every token.

References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649; as a reward, Lu and Thinking Machines, 2025,
  https://thinkingmachines.ai/blog/on-policy-distillation
verl: both forms, the policy gradient only with the clipped loss. In 0.9.1 its advantage is that of the policy of now;
  here it is that of the policy that sampled, so the two agree at the first update on a batch.
TRL: GKD and DistillationTrainer, over the whole vocabulary; its MiniLLM was removed by 1.16. SDFT on sampled tokens is
  this with a mean by sequence; over top tokens it chooses the policy's, and without the rest it renormalises both.
"""

from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.teacher_rewards import teacher_advantage
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.teacher import forward_kl_topk, kl_to_teacher


def distillation(
    direct: bool = False,
    kind: str | None = None,
    rest: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """KL(student || teacher) on the student's own samples, by policy gradient or directly.

    Args:
      direct: minimise the estimate itself.
      kind: the estimator of the KL, as in `funrl.algos.losses.kl`; None: k1 by policy gradient, k1+ directly. Or
        forward: KL(teacher || student) over the teacher's top tokens, always minimised directly.
      rest: with forward, count all other tokens as one more outcome.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1, without `direct`.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Raises:
      ValueError: k1 directly, whose gradient has a mean of 0; rest without forward.

    Warning: scores are ignored, including changes by earlier pieces such as the penalties of `corrected`.
    """
    if direct and kind == "k1":
        raise ValueError("distillation(direct=True, kind='k1'): its gradient has a mean of 0; 'k1+' has that of k2")
    if rest and kind != "forward":
        raise ValueError(f"distillation(rest=True, kind={kind!r}): rest works with kind 'forward' only")
    kind = kind or ("k1+" if direct else "k1")
    if kind == "forward":
        term = forward_kl_topk(rest)
        advantage = to_tokens()
    else:
        term = kl_to_teacher(kind) if direct else clipped_surrogate(clip_low, clip_high)
        advantage = teacher_advantage(kind.removesuffix("+"))
    return Algorithm(
        advantage=advantage, losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), token_mean())}
    )
