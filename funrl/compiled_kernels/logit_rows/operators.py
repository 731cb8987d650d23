"""The kernels of `kernels` as operators, and whether a device computes with them.

Triton is imported where one of them first runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run, largest_error
from funrl.compiled_kernels.logit_rows.plain import row_sums_, to_d_logits_
from funrl.compiled_kernels.logit_rows.settings import DivergenceSettings, RowSettings

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of hidden states whose logits are in float32


def logit_row_sums(x_CV: Tensor, row_CN: Tensor, settings: RowSettings) -> tuple[Tensor, Tensor]:
    """`row_sums_` of logits before cap and temperature, which stay as they are.

    Args:
      x_CV: logits.
      row_CN: picked columns, int64.
      settings: with the extras that are wanted.

    Returns: [C, S] float32 maxima, sums of e^x and of the extras; [C, N] the picked columns' x.
    """
    return _row_sums(x_CV, row_CN, *settings)


@torch.no_grad()  # in a backward pass, which is not differentiated again
def logit_gradients(
    out_CV: Tensor, x_CV: Tensor, row_CN: Tensor, grad_CN: Tensor, facts_C6: Tensor, settings: RowSettings
) -> None:
    """`to_d_logits_` of logits before cap and temperature, written to other memory in its dtype.

    Args:
      out_CV: takes the gradients.
      x_CV, row_CN: as in `logit_row_sums`.
      grad_CN: gradients of picked columns, over the temperature; 0: the column is another rank's.
      facts_C6: of `row_facts`.
      settings: with the extras that have a gradient.
    """
    _d_logits(out_CV, x_CV, row_CN, grad_CN, facts_C6, *settings)


# Flat arguments: torch.library takes tensors and numbers, no records.
@operator("funrl::logit_row_sums")
def _row_sums(
    x_CV: Tensor, row_CN: Tensor, temperature: float, cap: float, entropy: bool, squared: bool
) -> tuple[Tensor, Tensor]:
    from funrl.compiled_kernels.logit_rows import kernels

    return kernels.launch_row_sums(x_CV, row_CN, RowSettings(temperature, cap, entropy, squared))


@_row_sums.register_fake
def _(x_CV, row_CN, temperature, cap, entropy, squared):
    sums_CS = x_CV.new_empty(x_CV.shape[0], 2 + entropy + squared, dtype=torch.float32)
    return sums_CS, x_CV.new_empty(row_CN.shape, dtype=torch.float32)


@operator("funrl::logit_row_gradients", mutates_args=("out_CV",))
def _d_logits(
    out_CV: Tensor,
    x_CV: Tensor,
    row_CN: Tensor,
    grad_CN: Tensor,
    facts_C6: Tensor,
    temperature: float,
    cap: float,
    entropy: bool,
    squared: bool,
) -> None:
    from funrl.compiled_kernels.logit_rows import kernels

    settings = RowSettings(temperature, cap, entropy, squared)
    kernels.launch_gradients(out_CV, x_CV, row_CN, grad_CN, facts_C6, settings)


@_d_logits.register_fake
def _(out_CV, *_):
    return None


def row_facts(normalizer_T: Tensor, result: dict[str, Tensor], grad: dict[str, Tensor]) -> Tensor:
    """Scalars of each row for `logit_gradients`, [T, 6] float32.

    Args:
      normalizer_T: log sum e^z over the whole vocabulary.
      result, grad: as in `to_d_logits_`.

    Returns: the normalizer; the sum of the gradients of picked columns; entropy and its gradient; sum p^2 and its
      gradient. What has no gradient is 0.
    """
    none_T = torch.zeros_like(normalizer_T)
    facts = [normalizer_T, grad["logp"].sum(-1) if "logp" in grad else none_T]
    for name in ("entropy", "sum_pi_squared"):
        facts += [result[name][:, 0], grad[name][:, 0]] if name in grad else [none_T, none_T]
    return torch.stack(facts, 1)


def divergence_sums(x_CV: Tensor, teacher_CV: Tensor, facts_C4: Tensor, settings: DivergenceSettings) -> Tensor:
    """Parts of the divergence of each row over these columns, [C, 2] float32, by one read of both rows.

    With q of the student, p of the teacher and m of their mixture they are KL(p || m) and KL(q || m); at beta 0
    KL(p || q) and 0, at beta 1 0 and KL(q || p).

    Args:
      x_CV, teacher_CV: logits before cap and temperature.
      facts_C4: both normalizers, of the student and of the teacher, and two numbers that are not read.
      settings: of both.
    """
    return _divergence_sums(x_CV, teacher_CV, facts_C4, *settings)


@torch.no_grad()
def divergence_gradients(
    out_CV: Tensor, x_CV: Tensor, teacher_CV: Tensor, facts_C4: Tensor, settings: DivergenceSettings
) -> None:
    """Write the gradient of the student's logits to other memory in its dtype, by one read of both rows.

    Args:
      out_CV: takes the gradients.
      x_CV, teacher_CV: as in `divergence_sums`.
      facts_C4: both normalizers, the student's part of the divergence with its weight, and the gradient of the
        divergence over the temperature.
      settings: of both.
    """
    _divergence_gradients(out_CV, x_CV, teacher_CV, facts_C4, *settings)


@operator("funrl::divergence_row_sums")
def _divergence_sums(
    x_CV: Tensor,
    teacher_CV: Tensor,
    facts_C4: Tensor,
    beta: float,
    temperature: float,
    cap: float,
    teacher_cap: float,
) -> Tensor:
    from funrl.compiled_kernels.logit_rows import divergence_kernels

    settings = DivergenceSettings(beta, temperature, cap, teacher_cap)
    return divergence_kernels.launch_divergence_sums(x_CV, teacher_CV, facts_C4, settings)


@_divergence_sums.register_fake
def _(x_CV, *_):
    return x_CV.new_empty(x_CV.shape[0], 2, dtype=torch.float32)


@operator("funrl::divergence_row_gradients", mutates_args=("out_CV",))
def _divergence_gradients(
    out_CV: Tensor,
    x_CV: Tensor,
    teacher_CV: Tensor,
    facts_C4: Tensor,
    beta: float,
    temperature: float,
    cap: float,
    teacher_cap: float,
) -> None:
    from funrl.compiled_kernels.logit_rows import divergence_kernels

    settings = DivergenceSettings(beta, temperature, cap, teacher_cap)
    divergence_kernels.launch_divergence_gradients(out_CV, x_CV, teacher_CV, facts_C4, settings)


@_divergence_gradients.register_fake
def _(out_CV, *_):
    return None


def logit_rows_error(device: str) -> float:
    """Largest error of a small call of the kernels of single rows, on a device."""
    generator = torch.Generator().manual_seed(0)
    x_CV = torch.randn(3, 70, generator=generator)
    row_C1 = torch.tensor([[0], [69], [7]])
    expected_CV = x_CV.double().log_softmax(-1)
    to_d_logits_(expected_CV, row_C1, row_C1 >= 0, {}, {"logp": torch.ones(3, 1, dtype=torch.float64)})
    top_C, picked_C1, sum_C = row_sums_(x_CV.double(), row_C1, ())
    facts_C6 = row_facts((top_C + sum_C.log()).float(), {}, {"logp": torch.ones(3, 1)})
    x_CV, row_C1, facts_C6 = (x.to(device) for x in (x_CV, row_C1, facts_C6))
    out_CV = torch.empty_like(x_CV)
    sums_CS, picked_here_C1 = logit_row_sums(x_CV, row_C1, RowSettings())
    logit_gradients(out_CV, x_CV, row_C1, torch.ones_like(picked_here_C1), facts_C6, RowSettings())
    pairs = (sums_CS, torch.stack([top_C, sum_C], 1)), (picked_here_C1, picked_C1), (out_CV, expected_CV)
    return largest_error(pairs)


def by_kernels(*hidden: Tensor, trial: Callable[[str], float] = logit_rows_error) -> bool:
    """True if the rows of logits of hidden states are for the kernels: on CUDA and ROCm, in 16 or 32 bits.

    Args:
      trial: as in `kernels_run`.
    """
    return all(x.is_cuda and x.dtype in _DTYPES for x in hidden) and kernels_run(trial)
