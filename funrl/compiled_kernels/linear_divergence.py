"""Divergence of a student from a teacher over the whole vocabulary, straight from the hidden states of both.

Logits [T, V] are never whole in memory, neither the student's nor the teacher's: a chunk of tokens at a time, computed
again in the backward pass. Under tensor parallelism each rank holds some rows of both vocabularies; the ranks meet for
the normalizers of each chunk, which are small, so that every matmul is done once a pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.gpu_kernels.trials import largest_error
from funrl.compiled_kernels.linear import add_products_, product
from funrl.compiled_kernels.linear_logprob import project
from funrl.compiled_kernels.logit_rows import operators
from funrl.compiled_kernels.logit_rows.plain import cap_slope
from funrl.compiled_kernels.logit_rows.settings import DivergenceSettings, RowSettings
from funrl.mesh.collectives import pmax, psum
from funrl.mesh.mesh import SINGLE, Mesh


def divergence(logp: Tensor, teacher_logp: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student q from a teacher p.

        m = beta p + (1 - beta) q,   D = beta KL(p || m) + (1 - beta) KL(q || m);
        at beta = 0 KL(p || q), the forward KL;   at beta = 1 KL(q || p), the reverse KL

    Args:
      logp, teacher_logp: log q and log p [..., V] in nats, of whole distributions.
      beta: from 0, which covers what the teacher does, to 1, which keeps to what it is sure of.

    Returns: [...] in nats, differentiable in both.

    Raises:
      ValueError: beta is not in [0, 1].

    References: Agarwal et al., 2023 (GKD), https://arxiv.org/abs/2306.13649
    Warning: the sum above goes to 0 at both ends, like beta KL(p || q) and (1 - beta) KL(q || p). There it is the KL
      itself, as in TRL: the value jumps, so 0.01 is no small change from 0.
    """
    check_divergence_beta(beta)
    if beta == 0:
        return _divergence_of(teacher_logp, logp)
    if beta == 1:
        return _divergence_of(logp, teacher_logp)
    m_logp = log_mixture(logp, teacher_logp, beta)
    return beta * _divergence_of(teacher_logp, m_logp) + (1 - beta) * _divergence_of(logp, m_logp)


def log_mixture(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """log (beta p + (1 - beta) q), for beta in between 0 and 1."""
    return torch.logaddexp(teacher_logp + math.log(beta), logp + math.log1p(-beta))


def check_divergence_beta(beta: float) -> None:
    """Raise ValueError where `beta` is not in [0, 1]."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it goes from 0, the forward KL, to 1, the reverse KL")


def linear_divergence(
    hidden_TD: Tensor,
    unembed_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_unembed_VE: Tensor,
    beta: float = 0.5,
    mesh: Mesh = SINGLE,
    temperature: float = 1.0,
    chunk: int = 512,
    caps: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """`divergence` of q = softmax(hidden unembed^T / temperature) from the teacher's p, token by token.

    Args:
      hidden_TD, teacher_hidden_TE: the same on every tensor rank.
      unembed_VD, teacher_unembed_VE: this rank's rows of the vocabulary, the same tokens of both, equally many on
        every rank.
      beta: 0 is the forward KL(p || q), 1 the reverse KL(q || p), 0.5 the Jensen-Shannon divergence.
      mesh: the vocabulary is split over "tensor".
      temperature: of both, above 0.
      chunk: tokens at a time; about six tensors [chunk, V / tensor ranks] in float32 are alive together.
      caps: of the student's logits and of the teacher's: x becomes cap tanh(x / cap), before the temperature.

    Returns: [T] in nats, in float32 or wider. The student's hidden and unembedding have a gradient, complete for
      hidden on every tensor rank; the teacher has none.

    Raises:
      ValueError: beta or temperature is out of its range, or tokens or vocabularies differ.

    References: Agarwal et al., 2023 (GKD), https://arxiv.org/abs/2306.13649
    Warning: as in TRL, there is no factor temperature^2, which in Hinton et al. (2015) makes up for small gradients.
    """
    check_divergence_beta(beta)
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, it must be above 0")
    if len(hidden_TD) != len(teacher_hidden_TE):
        raise ValueError(f"the student has {len(hidden_TD)} tokens and the teacher {len(teacher_hidden_TE)}")
    if len(unembed_VD) != len(teacher_unembed_VE):
        raise ValueError(
            f"the student's vocabulary has {len(unembed_VD)} rows and the teacher's {len(teacher_unembed_VE)}; "
            "a divergence compares the same tokens"
        )
    teacher = teacher_hidden_TE.detach(), teacher_unembed_VE.detach()
    value_T, *_ = _LinearDivergence.apply(hidden_TD, unembed_VD, *teacher, beta, mesh, temperature, chunk, caps)
    return value_T


def linear_divergence_reference(
    hidden_TD: Tensor,
    unembed_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_unembed_VE: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """`linear_divergence` on one device in float64 with whole logits."""
    student, teacher = (
        (hidden.double() @ unembed.double().T / temperature).log_softmax(-1)
        for hidden, unembed in ((hidden_TD, unembed_VD), (teacher_hidden_TE.detach(), teacher_unembed_VE.detach()))
    )
    return divergence(student, teacher, beta)


class _LinearDivergence(AutogradFunction):
    @staticmethod
    def forward(hidden_TD, unembed_VD, teacher_TE, teacher_VE, beta, mesh, temperature, chunk, caps):
        settings = DivergenceSettings(beta, temperature, *(cap or 0.0 for cap in caps))
        rows_of = _kernel_rows if operators.by_kernels(hidden_TD, teacher_TE, trial=divergence_error) else _plain_rows
        rows = [
            rows_of((h_CD, t_CE), (unembed_VD, teacher_VE), settings, mesh)
            for h_CD, t_CE in zip(hidden_TD.split(chunk), teacher_TE.split(chunk), strict=True)
        ]
        sums_2T, normalizer_2T = torch.cat(rows, 1).split(2)
        to_teacher_T, to_student_T = psum(sums_2T, mesh, "tensor").unbind(0)
        return to_teacher_T + to_student_T, to_student_T, *normalizer_2T.unbind(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden_TD, unembed_VD, teacher_TE, teacher_VE, *ctx.args = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(hidden_TD, unembed_VD, teacher_TE, teacher_VE, *output[1:])

    @staticmethod
    def backward(ctx, grad_T, *_):
        hidden_TD, unembed_VD, teacher_TE, teacher_VE, to_student_T, normalizer_T, teacher_T = ctx.saved_tensors
        beta, mesh, temperature, chunk, caps = ctx.args
        d_hidden = []
        d_unembed = None
        if ctx.needs_input_grad[1]:
            d_unembed = torch.zeros(unembed_VD.shape, dtype=normalizer_T.dtype, device=unembed_VD.device)
        settings = DivergenceSettings(beta, temperature, *(cap or 0.0 for cap in caps))
        d_logits_of = (
            _kernel_d_logits if operators.by_kernels(hidden_TD, teacher_TE, trial=divergence_error) else _plain_d_logits
        )
        facts_T4 = torch.stack([normalizer_T, teacher_T, to_student_T, grad_T / temperature], 1)
        for low in range(0, max(1, len(hidden_TD)), chunk):
            part = slice(low, low + chunk)
            d_CV = d_logits_of((hidden_TD[part], teacher_TE[part]), (unembed_VD, teacher_VE), facts_T4[part], settings)
            if ctx.needs_input_grad[0]:
                d_hidden.append(product(d_CV, unembed_VD.T))
            if d_unembed is not None:
                add_products_(d_unembed, d_CV, hidden_TD[part])
        whole = psum(torch.cat(d_hidden), mesh, "tensor") if d_hidden else None
        return whole, None if d_unembed is None else d_unembed.to(unembed_VD.dtype), *(None,) * 7


def _plain_rows(
    hidden: tuple[Tensor, Tensor], unembed: tuple[Tensor, Tensor], settings: DivergenceSettings, mesh: Mesh
) -> Tensor:
    """Both parts of the divergence over this rank's tokens, and both normalizers over all: [4, C].

    Args:
      hidden, unembed: of the student and of the teacher.
    """
    student_CV, teacher_CV = _both_logits(hidden, unembed, settings)
    normalizer_2C = _normalizers(student_CV, teacher_CV, mesh)
    logp_CV, teacher_logp_CV = (
        z.sub_(n[:, None]) for z, n in zip((student_CV, teacher_CV), normalizer_2C, strict=True)
    )
    return torch.cat([_sums(logp_CV, teacher_logp_CV, settings.beta), normalizer_2C])


def _kernel_rows(
    hidden: tuple[Tensor, Tensor], unembed: tuple[Tensor, Tensor], settings: DivergenceSettings, mesh: Mesh
) -> Tensor:
    """`_plain_rows` by two reads of both logits."""
    student_CV = project(hidden[0], unembed[0])
    teacher_CV = project(hidden[1], unembed[1])
    none_C0 = torch.zeros(len(student_CV), 0, dtype=torch.int64, device=student_CV.device)
    sums = [
        operators.logit_row_sums(x_CV, none_C0, RowSettings(settings.temperature, cap))[0]
        for x_CV, cap in ((student_CV, settings.cap), (teacher_CV, settings.teacher_cap))
    ]
    top_2C, total_2C = torch.stack(sums).unbind(-1)
    most_2C = pmax(top_2C, mesh, "tensor")
    normalizer_2C = most_2C + psum(total_2C * (top_2C - most_2C).exp(), mesh, "tensor").log()
    facts_C4 = torch.cat([normalizer_2C, torch.zeros_like(normalizer_2C)]).T
    to_teacher_C, to_student_C = operators.divergence_sums(student_CV, teacher_CV, facts_C4, settings).unbind(1)
    beta = settings.beta
    weighted_2C = torch.stack([to_teacher_C * (beta or 1), to_student_C * (1 - beta if beta < 1 else 1)])
    return torch.cat([weighted_2C, normalizer_2C])


def _plain_d_logits(
    hidden: tuple[Tensor, Tensor], unembed: tuple[Tensor, Tensor], facts_C4: Tensor, settings: DivergenceSettings
) -> Tensor:
    """Gradients of the student's logits in the dtype of hidden states.

    Args:
      hidden, unembed: of the student and of the teacher.
      facts_C4: both normalizers, the student's part of the divergence, its gradient over the temperature.
    """
    normalizer_C, teacher_C, to_student_C, grad_C = facts_C4.unbind(1)
    student_CV, teacher_CV = _both_logits(hidden, unembed, settings)
    slope_CV = cap_slope(student_CV * settings.temperature, settings.cap) if settings.cap else None
    logp_CV = student_CV.sub_(normalizer_C[:, None])
    d_CV = _d_logits(logp_CV, teacher_CV.sub_(teacher_C[:, None]), to_student_C[:, None], settings.beta)
    d_CV = d_CV if slope_CV is None else d_CV.mul_(slope_CV)
    return d_CV.mul_(grad_C[:, None]).to(hidden[0].dtype)


def _kernel_d_logits(
    hidden: tuple[Tensor, Tensor], unembed: tuple[Tensor, Tensor], facts_C4: Tensor, settings: DivergenceSettings
) -> Tensor:
    """`_plain_d_logits` by one read of both logits and one write."""
    student_CV = project(hidden[0], unembed[0])
    teacher_CV = project(hidden[1], unembed[1])
    d_CV = torch.empty_like(student_CV, dtype=hidden[0].dtype)
    operators.divergence_gradients(d_CV, student_CV, teacher_CV, facts_C4, settings)
    return d_CV


def divergence_error(device: str) -> float:
    """Largest error of a small divergence and its gradient by the kernels, on a device."""
    generator = torch.Generator().manual_seed(0)
    hidden, unembed, teacher, teacher_unembed = (torch.randn(n, 8, generator=generator) for n in (3, 70, 3, 70))
    student = hidden.double().requires_grad_()
    with torch.enable_grad():
        value_C = linear_divergence_reference(student, unembed, teacher, teacher_unembed)
    (d_hidden,) = torch.autograd.grad(value_C.sum(), student)
    states = hidden.to(device), teacher.to(device)
    weights = unembed.to(device), teacher_unembed.to(device)
    settings = DivergenceSettings(0.5, 1.0, 0.0, 0.0)
    to_teacher_C, to_student_C, *normalizers = _kernel_rows(states, weights, settings, SINGLE)
    facts_C4 = torch.stack([*normalizers, to_student_C, torch.ones_like(to_student_C)], 1)
    d_CV = _kernel_d_logits(states, weights, facts_C4, settings)
    pairs = (to_teacher_C + to_student_C, value_C.detach()), (d_CV @ weights[0], d_hidden)
    return largest_error(pairs)


def _both_logits(
    hidden: tuple[Tensor, Tensor], unembed: tuple[Tensor, Tensor], settings: DivergenceSettings
) -> tuple[Tensor, Tensor]:
    """Tempered logits [C, V] of the student and of the teacher."""
    caps = settings.cap or None, settings.teacher_cap or None
    student_CV, teacher_CV = (project(h, w, cap) for h, w, cap in zip(hidden, unembed, caps, strict=True))
    if settings.temperature == 1:  # a pass less
        return student_CV, teacher_CV
    return student_CV.div_(settings.temperature), teacher_CV.div_(settings.temperature)


def _normalizers(student_CV: Tensor, teacher_CV: Tensor, mesh: Mesh) -> Tensor:
    """log sum e^z over the whole vocabulary, of the student and of the teacher, [2, C]."""
    most_2C = pmax(torch.stack([student_CV.amax(-1), teacher_CV.amax(-1)]), mesh, "tensor")
    pairs = zip((student_CV, teacher_CV), most_2C, strict=True)
    sum_2C = psum(torch.stack([(z - m[:, None]).exp_().sum(-1) for z, m in pairs]), mesh, "tensor")
    return most_2C + sum_2C.log()


def _sums(logp_CV: Tensor, teacher_CV: Tensor, beta: float) -> Tensor:
    """The two parts of the divergence over this rank's tokens, [2, C]: the teacher's KL and the student's, weighted."""
    if beta == 0:
        forward_C = _kl(teacher_CV, logp_CV)
        return torch.stack([forward_C, torch.zeros_like(forward_C)])
    if beta == 1:
        reverse_C = _kl(logp_CV, teacher_CV)
        return torch.stack([torch.zeros_like(reverse_C), reverse_C])
    mixture_CV = log_mixture(logp_CV, teacher_CV, beta)
    return torch.stack([beta * _kl(teacher_CV, mixture_CV), (1 - beta) * _kl(logp_CV, mixture_CV)])


def _kl(p_CV: Tensor, q_CV: Tensor) -> Tensor:
    """sum p (log p - log q) over this rank's tokens, of log-probabilities."""
    return (p_CV - q_CV).mul_(p_CV.exp()).sum(-1)


def _d_logits(logp_CV: Tensor, teacher_CV: Tensor, to_student_C1: Tensor, beta: float) -> Tensor:
    """The gradient of the student's logits; both inputs are used up.

    With g = (1 - beta) (log q - log m), and log q - log p at beta = 1, it is q (g - sum q g), where sum q g is the
    student's part of the divergence. At beta = 0 it is q - p.
    """
    if beta == 0:
        return logp_CV.exp_().sub_(teacher_CV.exp_())
    against_CV, scale = (teacher_CV, 1) if beta == 1 else (log_mixture(logp_CV, teacher_CV, beta), 1 - beta)
    q_CV = logp_CV.exp()
    return logp_CV.sub_(against_CV).mul_(scale).sub_(to_student_C1).mul_(q_CV)


def _divergence_of(p_logp: Tensor, q_logp: Tensor) -> Tensor:
    return (p_logp.exp() * (p_logp - q_logp)).sum(-1)
