"""Log-probabilities of tokens given their logits, as the decoding step computes those of the tokens that it samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import check_parts, check_tensor, kernel_bits
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.exact.dispatch import is_aligned
from funrl.compiled_kernels.kernel_library import library
from funrl.compiled_kernels.packed import parts_of


class LogitMoments(NamedTuple):
    """Sums over a row of logits, or over a rank's part of it, relative to the largest one of the whole row.

    Attributes:
      above_TN: float64, some logits minus the largest one, at most 0.
      sums_T3: float64; with z = above / temperature, the sums of e^z, z e^z and e^2z.
    """

    above_TN: Tensor
    sums_T3: Tensor


def largest_logits(logits_TV: Tensor) -> Tensor:
    """The largest logit of each row, [T]; NaN does not count on a CPU."""
    if is_aligned(logits_TV):
        return logits_TV.amax(1)
    bits = kernel_bits("logits_TV", logits_TV, 2, wide=True)
    logits_TV = logits_TV.contiguous()
    T, V = logits_TV.shape
    top_T = logits_TV.new_empty(T)
    library().funrl_tops(bits, logits_TV.data_ptr(), T, V, top_T.data_ptr(), torch.get_num_threads())
    return top_T


def logit_moments(
    logits_TV: Tensor, top_T: Tensor, ids_TN: Tensor, temperature: float, parts: int, more: bool = False
) -> LogitMoments:
    """Sums of rows of logits.

    Args:
      logits_TV: float32 or float64 on the CPU, of the whole vocabulary or of a rank's part.
      top_T: the largest logit of the whole vocabulary.
      ids_TN: columns of `logits_TV`.
      temperature: above 0.
      parts: equal parts of the columns whose sums are added by a binary tree; a power of two, at most 8.
      more: compute all three sums; else only the first.

    Raises:
      KernelError: another dtype or device of the logits.
      ValueError: an id is not a column, or the other arguments do not fit the logits.
    """
    if is_aligned(logits_TV):
        above_TN = logits_TV.gather(1, ids_TN).double() - top_T.double()[:, None]
        return LogitMoments(above_TN, aligned_kernels().launch_logit_sums(logits_TV, top_T, temperature, more))
    bits = kernel_bits("logits_TV", logits_TV, 2, wide=True)
    T, V = logits_TV.shape
    N = ids_TN.shape[-1] if ids_TN.ndim else 0
    check_tensor("top_T", top_T, logits_TV.dtype, (T,))
    check_tensor("ids_TN", ids_TN, torch.int64, (T, N))
    check_parts(parts, V)
    logits_TV = logits_TV.contiguous()
    top_T = top_T.contiguous()
    ids_TN = ids_TN.contiguous()
    above_TN = torch.empty(T, N, dtype=torch.float64)
    sums_T3 = torch.zeros(T, 3, dtype=torch.float64)
    rows = (bits, logits_TV.data_ptr(), T, V, parts, top_T.data_ptr(), temperature)
    results = (above_TN.data_ptr(), sums_T3.data_ptr(), torch.get_num_threads())
    if library().funrl_moments(*rows, ids_TN.data_ptr(), N, more, *results):
        raise ValueError(f"ids_TN are from {ids_TN.min()} to {ids_TN.max()}, they must be columns of {V} logits")
    return LogitMoments(above_TN, sums_T3)


def log_probabilities(above_TN: Tensor, sum_T: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """above / temperature - log(sum) in float64, rounded to a dtype: [T, N].

    Args:
      above_TN: of `LogitMoments`.
      sum_T: float64, of e^z over the whole vocabulary.
    """
    if is_aligned(above_TN):
        return (above_TN / temperature - sum_T.log()[:, None]).to(dtype)
    kernel_bits("above_TN", above_TN, 2)
    check_tensor("above_TN", above_TN, torch.float64, above_TN.shape)
    check_tensor("sum_T", sum_T, torch.float64, above_TN.shape[:1])
    above_TN = above_TN.contiguous()
    sum_T = sum_T.contiguous()
    out_TN = torch.empty(above_TN.shape, dtype=dtype)
    bits = kernel_bits("the result", out_TN, wide=True)
    sizes = above_TN.shape
    pointers = (above_TN.data_ptr(), sum_T.data_ptr())
    library().funrl_log_probabilities(bits, *pointers, *sizes, temperature, out_TN.data_ptr())
    return out_TN


def token_log_probabilities(logits_TV: Tensor, ids_TN: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of tokens under softmax(logits / temperature), [T, N] nats, in the dtype of the logits.

    Args:
      logits_TV: float32 or float64 on the CPU, of the whole vocabulary.
    """
    top_T = largest_logits(logits_TV)
    moments = logit_moments(logits_TV, top_T, ids_TN, temperature, parts_of(logits_TV.shape[1]))
    return log_probabilities(moments.above_TN, moments.sums_T3[:, 0], temperature, logits_TV.dtype)
