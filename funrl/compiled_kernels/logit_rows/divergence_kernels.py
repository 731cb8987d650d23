"""Triton kernels of the divergence of two rows of logits; each row is read once.

`funrl.compiled_kernels.linear_divergence` computes the same in plain passes.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from funrl.compiled_kernels.logit_rows.kernels import run_kernel, tempered, widths
from funrl.compiled_kernels.logit_rows.settings import DivergenceSettings

_FORWARD = tl.constexpr(0)  # beta 0, KL(p || q) of the teacher p and the student q
_REVERSE = tl.constexpr(1)  # beta 1, KL(q || p)
_MIXTURE = tl.constexpr(2)  # in between


@triton.jit
def _log_mixture(logq, logp, log_beta, log_rest):
    """Logarithm of beta p + (1 - beta) q."""
    a = logp + log_beta
    b = logq + log_rest
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _divergence_sums(
    student_ptr,
    teacher_ptr,
    facts_ptr,
    sums_ptr,
    V,
    temperature,
    cap,
    teacher_cap,
    log_beta,
    log_rest,
    capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    kind: tl.constexpr,
    width: tl.constexpr,
):
    """Two parts of one row's divergence, before their weights beta and 1 - beta."""
    c = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    normalizer = tl.load(facts_ptr + 4 * c)
    teacher_normalizer = tl.load(facts_ptr + 4 * c + 1)
    of_teacher = tl.zeros([width], tl.float32)
    of_student = tl.zeros([width], tl.float32)
    for begin in range(0, V, width):
        inside = begin + lanes < V
        y, _ = tempered(tl.load(student_ptr + c * V + begin + lanes, mask=inside, other=0.0), temperature, cap, capped)
        z, _ = tempered(
            tl.load(teacher_ptr + c * V + begin + lanes, mask=inside, other=0.0),
            temperature,
            teacher_cap,
            teacher_capped,
        )
        logq = y - normalizer
        logp = z - teacher_normalizer
        if kind == _FORWARD:
            of_teacher += tl.where(inside, tl.exp(logp) * (logp - logq), 0.0)
        elif kind == _REVERSE:
            of_student += tl.where(inside, tl.exp(logq) * (logq - logp), 0.0)
        else:
            logm = _log_mixture(logq, logp, log_beta, log_rest)
            of_teacher += tl.where(inside, tl.exp(logp) * (logp - logm), 0.0)
            of_student += tl.where(inside, tl.exp(logq) * (logq - logm), 0.0)
    tl.store(sums_ptr + 2 * c, tl.sum(of_teacher, 0))
    tl.store(sums_ptr + 2 * c + 1, tl.sum(of_student, 0))


@triton.jit
def _divergence_gradients(
    student_ptr,
    teacher_ptr,
    facts_ptr,
    out_ptr,
    V,
    temperature,
    cap,
    teacher_cap,
    log_beta,
    log_rest,
    capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    kind: tl.constexpr,
    width: tl.constexpr,
):
    """Gradients of some of the student's logits in one row; that of D is q (g - sum q g), and q - p at beta 0."""
    c = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < V
    y, slope = tempered(tl.load(student_ptr + c * V + column, mask=inside, other=0.0), temperature, cap, capped)
    z, _ = tempered(
        tl.load(teacher_ptr + c * V + column, mask=inside, other=0.0), temperature, teacher_cap, teacher_capped
    )
    logq = y - tl.load(facts_ptr + 4 * c)
    logp = z - tl.load(facts_ptr + 4 * c + 1)
    q = tl.exp(logq)
    to_student = tl.load(facts_ptr + 4 * c + 2)
    if kind == _FORWARD:
        d = q - tl.exp(logp)
    elif kind == _REVERSE:
        d = q * (logq - logp - to_student)
    else:
        rest = tl.exp(log_rest)
        d = q * (rest * (logq - _log_mixture(logq, logp, log_beta, log_rest)) - to_student)
    tl.store(out_ptr + c * V + column, d * tl.load(facts_ptr + 4 * c + 3) * slope, mask=inside)


def launch_divergence_sums(x_CV: Tensor, teacher_CV: Tensor, facts_C4: Tensor, settings: DivergenceSettings) -> Tensor:
    """Parts of the divergence of each row, [C, 2] float32: KL from the teacher and from the student, without weights.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.divergence_sums`.
    """
    C, V = x_CV.shape
    sums_C2 = torch.empty(C, 2, dtype=torch.float32, device=x_CV.device)
    if C:
        tensors = *(x.contiguous() for x in (x_CV, teacher_CV, facts_C4)), sums_C2
        flags = *_flags(settings), widths(V, 1)[0]
        run_kernel(_divergence_sums, (C,), tensors, (V, *_numbers(settings)), flags)
    return sums_C2


def launch_divergence_gradients(
    out_CV: Tensor, x_CV: Tensor, teacher_CV: Tensor, facts_C4: Tensor, settings: DivergenceSettings
) -> None:
    """Write the gradient of the student's logits to `out_CV`, which shares no memory with them.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.divergence_gradients`.
    """
    C, V = x_CV.shape
    assert out_CV.is_contiguous(), "rows of gradients stand end to end"
    if C:
        tensors = *(x.contiguous() for x in (x_CV, teacher_CV, facts_C4)), out_CV
        width = widths(V, 1)[0]
        flags = *_flags(settings), width
        run_kernel(_divergence_gradients, (C, triton.cdiv(V, width)), tensors, (V, *_numbers(settings)), flags)


def _numbers(settings: DivergenceSettings) -> tuple[float, ...]:
    beta = settings.beta
    logs = (math.log(beta), math.log1p(-beta)) if 0 < beta < 1 else (0.0, 0.0)
    return settings.temperature, settings.cap or 1.0, settings.teacher_cap or 1.0, *logs


def _flags(settings: DivergenceSettings) -> tuple[bool, bool, int]:
    kind = {0.0: _FORWARD, 1.0: _REVERSE}.get(settings.beta, _MIXTURE).value
    return bool(settings.cap), bool(settings.teacher_cap), kind
