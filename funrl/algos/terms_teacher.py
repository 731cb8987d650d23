"""Distillation from a teacher on the student's own samples, as terms and as rewards."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.core import Advantage, Term, needs, stateless
from funrl.algos.kl import kl_estimate, kl_to
from funrl.algos.terms import constant, kept
from funrl.batch import Batch


def kl_to_teacher(kind: str = "k3") -> Term:
    """An estimate of KL(pi || pi_teacher) per sampled token, minimised directly.

    Args:
      kind: as in `funrl.algos.kl`; "k1+" has the value of k1 and the right gradient, that of k2.
    Needs: teacher_logp [B, T].
    Returns: a term; loss [B, T] in nats; metric "distillation/loss".
    References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649
    """
    return kl_to("teacher_logp", kind, "distillation/loss")


def teacher_advantage(kind: str = "k1") -> Advantage:
    """Puts -KL(pi_old || pi_teacher) per token in the place of the reward: the policy gradient follows the teacher.

    Whatever `signal.x` was is added to it, token by token, where it is [B, T]. Outcomes [B] are dropped, with what
    pieces before have made of them: to learn from scores too, put `to_last_token` or `to_tokens` before.

    Args:
      kind: the estimator of the KL, as in `funrl.algos.kl`.
    Needs: old_logp, teacher_logp [B, T].
    References: Lu and Thinking Machines, 2025, https://thinkingmachines.ai/blog/on-policy-distillation
    """
    estimate = kl_estimate(kind)

    def reward(x: Tensor, batch: Batch) -> Tensor:
        kl_BT = estimate(constant(batch.old_logp, batch.mask), constant(batch.teacher_logp, batch.mask))
        return -kl_BT if x.dim() == 1 else kept(x, batch.mask) - kl_BT

    return stateless(reward, "old_logp", "teacher_logp")


def forward_kl_top() -> Term:
    """sum_k p_k (log p_k - log q_k) over the teacher's K likeliest tokens, at least 0; p the teacher, q the student.

    Both are probabilities over the whole vocabulary, so that with K of its size this is KL(p || q).

    Needs: teacher_top_logp, student_top_logp [B, T, K]; the second differentiable.
    Returns: a term; loss [B, T] in nats; metrics "distillation/loss", "distillation/teacher_mass",
      "distillation/student_mass" (probability of the K tokens).
    References: Hinton et al., 2015, https://arxiv.org/abs/1503.02531
    """

    @needs("teacher_top_logp", "student_top_logp")
    def term(logp_BT: Tensor, batch: Batch):
        mask_BT1 = batch.mask[..., None]
        teacher_BTK, student_BTK = constant(batch.teacher_top_logp, mask_BT1), kept(batch.student_top_logp, mask_BT1)
        p_BTK = teacher_BTK.exp()
        loss_BT = kept((p_BTK * (teacher_BTK - student_BTK)).sum(-1), batch.mask).clamp_min(0)
        return loss_BT, {
            "distillation/loss": loss_BT.detach(),
            "distillation/teacher_mass": p_BTK.sum(-1),
            "distillation/student_mass": student_BTK.detach().exp().sum(-1),
        }

    return term
