"""On-policy distillation: the student samples, the teacher judges every token.

References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649; as a reward, Lu and Thinking Machines, 2025,
  https://thinkingmachines.ai/blog/on-policy-distillation
verl: either form, the policy gradient with the clipped loss only. TRL: GKD, over the whole vocabulary, and MiniLLM.
"""

from __future__ import annotations

from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate
from funrl.algos.terms_teacher import forward_kl_top, kl_to_teacher, teacher_advantage


def distillation(
    direct: bool = False, kind: str | None = None, low: float = 0.2, high: float = 0.2, entropy: float = 0.0
) -> Algorithm:
    """KL(student || teacher) on the student's own samples, by policy gradient or directly.

    Args:
      direct: minimise the estimate itself.
      kind: the estimator of the KL, as in `funrl.algos.kl`; None: "k1" by policy gradient, "k1+" directly. Or
        "forward", KL(teacher || student) over the teacher's likeliest tokens in the place of each sampled one, which is
        always minimised directly.
      low, high: how far the ratio may fall below and rise above 1, without `direct`.
      entropy: factor of the entropy bonus.
    Needs: old_logp, teacher_logp; teacher_top_logp and student_top_logp for "forward". Scores are not looked at,
      nor what pieces before have made of them, such as the penalties of `corrected`.
    Raises:
      ValueError: "k1" directly, whose gradient has a mean of 0.
    """
    if direct and kind == "k1":
        raise ValueError("distillation(direct=True, kind='k1'): its gradient has a mean of 0; 'k1+' has that of k2")
    kind = kind or ("k1+" if direct else "k1")
    if kind == "forward":
        return Algorithm(to_tokens(), reduce(policy(forward_kl_top(), 0.0, entropy), token_mean()))
    term = kl_to_teacher(kind) if direct else clipped_surrogate(low, high)
    return Algorithm(
        advantage=chain(teacher_advantage(kind.removesuffix("+"))),
        policy_loss=reduce(policy(term, 0.0, entropy), token_mean()),
    )
