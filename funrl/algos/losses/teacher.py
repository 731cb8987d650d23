"""Distillation from a teacher on the student's own samples, as terms."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.losses.kl import kl_to
from funrl.algos.terms import Term
from funrl.batch import Batch


def kl_to_teacher(kind: str = "k3") -> Term:
    """Estimate of KL(pi || pi_teacher) per sampled token.

    Args:
      kind: as in `funrl.algos.losses.kl`; "k1+" has the value of k1 and the right gradient, that of k2.
    Needs: teacher_logp [B, T].
    Returns: a term; loss [B, T] in nats; metric "distillation/loss".
    References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649
    """
    return kl_to("teacher_logp", kind, "distillation/loss")


def divergence_to_teacher() -> Term:
    """Divergence of policy and teacher over the whole vocabulary.

    `Algorithm.divergence` selects it: the forward or the reverse KL, or a Jensen-Shannon divergence between them. The
    step computes it from the hidden states of both models in chunks, so no [T, V] tensor is materialised.

    Needs: divergence [B, T], differentiable.
    Returns: a term; loss [B, T] in nats; metric "distillation/loss".
    References: GKD, Agarwal et al., 2023, https://arxiv.org/abs/2306.13649
    """
    return lambda logp_BT, batch: (batch.divergence, {"distillation/loss": batch.divergence})


def forward_kl_topk(rest: bool = False) -> Term:
    """sum_k p_k (log p_k - log q_k) over the teacher's top K tokens, at least 0; p the teacher, q the student.

    Both are probabilities over the whole vocabulary, so this is KL(p || q) if K is the size of the vocabulary.

    Args:
      rest: count all other tokens as one more outcome, of probability 1 - sum_k p_k. The result is then the KL of two
        distributions, a lower bound of KL(p || q), and its gradient also moves the mass of the other tokens.
    Needs: teacher_topk_logp, topk_logp [B, T, K]; the second differentiable.
    Returns: a term; loss [B, T] in nats; metrics "distillation/loss", "distillation/teacher_mass",
      "distillation/student_mass" (probability of the K tokens).
    References: Hinton et al., 2015, https://arxiv.org/abs/1503.02531

    Warning: verl drops the remaining mass, which is `rest=False`. In TRL it depends on the trainer: async_distillation
    adds it by default, as `rest=True` does; SDPO has it as an option.
    """

    def term(logp_BT: Tensor, batch: Batch):
        p_BTK = batch.teacher_topk_logp.exp()
        teacher_BTK = batch.teacher_topk_logp
        student_BTK = batch.topk_logp
        teacher_BT = p_BTK.sum(-1)
        student_BT = student_BTK.exp().sum(-1)
        loss_BT = (p_BTK * (teacher_BTK - student_BTK)).sum(-1)
        if rest:
            p_BT, q_BT = ((1 - mass_BT).clamp_min(REST) for mass_BT in (teacher_BT, student_BT))
            loss_BT = loss_BT + p_BT * (p_BT.log() - q_BT.log())
        return loss_BT.clamp_min(0), {
            "distillation/loss": loss_BT.clamp_min(0),
            "distillation/teacher_mass": teacher_BT,
            "distillation/student_mass": student_BT,
        }

    return term


REST = 1e-7  # lower bound of the other tokens' total probability, which keeps the logarithm finite
