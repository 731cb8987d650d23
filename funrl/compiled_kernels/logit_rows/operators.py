"""The kernels of `kernels` as operators, and whether a device computes with them.

Triton is imported where one of them first runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import assumed_gpu, kernels_run, largest_error
from funrl.compiled_kernels.logit_rows.plain import row_sums_, to_d_logits_
from funrl.compiled_kernels.logit_rows.settings import DivergenceSettings, LogitBlock, RowSettings

L2_SHARE = 2 / 3  # of the cache that a block of logits takes; the operands of its product pass through the rest
TILE = (128, 256)  # rows and columns of a product that one processor computes at a time
_LEAST_WAVES = 2  # tiles of each processor, below which products by blocks lose more than reads of logits cost
_DIRECT = ("cpu", "cuda")  # a block takes a GPU less time than torch's call of an operator takes the host
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of hidden states whose logits are in float32


class ColumnBlocks(NamedTuple):
    """Size of a GPU's L2 cache in tiles of products, for blocks of logits that stay in it.

    Attributes:
      numbers: float32 numbers of a block at most.
      processors: that compute a tile each at a time.
    """

    numbers: int
    processors: int

    def width(self, tokens: int, columns: int) -> int:
        """Columns of a block of some tokens, of `columns` in all; all of them where a block would be small.

        The tiles of a block occupy all processors twice or more, so that its product loses little at the end.
        """
        rows = -(-tokens // TILE[0])
        waves = self.numbers // (self.processors * TILE[0] * TILE[1])
        width = waves * self.processors // max(1, rows) * TILE[1]
        return min(width, columns) if waves >= _LEAST_WAVES and width else columns


def column_blocks(tokens: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Columns of logits by blocks that stay in the L2 of a device; as one block where it has none, or a small one."""
    width = columns
    if (blocks := l2_blocks(device)) is not None:
        width = blocks.width(tokens, columns)
    return (slice(first, min(first + width, columns)) for first in range(0, columns, max(1, width)))


def l2_blocks(device: torch.device) -> ColumnBlocks | None:
    """Blocks for the L2 of a device, or of the GPU that is assumed; None: it is no GPU, or its size is unknown."""
    if (gpu := assumed_gpu()) is not None:
        return ColumnBlocks(int(L2_SHARE * gpu.l2_bytes) // 4, gpu.processors)
    return _gpu_blocks(device.index) if device.type == "cuda" and torch.cuda.is_available() else None


@functools.cache
def _gpu_blocks(index: int | None) -> ColumnBlocks:
    facts = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return ColumnBlocks(int(L2_SHARE * getattr(facts, "L2_cache_size", 0)) // 4, facts.multi_processor_count)


def empty_row_sums(rows: int, picks: int, settings: RowSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the running sums of some rows and their picked columns, for `add_row_sums_`."""
    count = 2 + settings.entropy + settings.squared
    sums_CS, picked_CN = (torch.empty(rows, n, dtype=torch.float32, device=device) for n in (count, picks))
    return sums_CS, picked_CN


def add_row_sums_(sums_CS: Tensor, picked_CN: Tensor, block: LogitBlock, settings: RowSettings) -> None:
    """Add a block of columns to running sums over the columns of logits.

    Args:
      sums_CS: float32 maxima m of z = logit / temperature, capped; sums e^(z - m); of the extras that are wanted sums
        (z - m) e^(z - m) and e^2(z - m).
      picked_CN: float32 z of the picked columns; those outside of the block stay as they are.
      block: the sums begin with the first one.
      settings: with the extras that are wanted.
    """
    _row_sums(block.x_CB, block.row_CN, sums_CS, picked_CN, block.first, *settings)


def logit_row_sums(x_CV: Tensor, row_CN: Tensor, settings: RowSettings) -> tuple[Tensor, Tensor]:
    """`row_sums_` of logits before cap and temperature, which stay as they are.

    Args:
      x_CV: logits.
      row_CN: picked columns, int64.
      settings: with the extras that are wanted.

    Returns: [C, S] float32 maxima, sums of e^x and of the extras; [C, N] the picked columns' x.
    """
    sums_CS, picked_CN = empty_row_sums(len(x_CV), row_CN.shape[1], settings, x_CV.device)
    add_row_sums_(sums_CS, picked_CN, LogitBlock(x_CV, row_CN), settings)
    return sums_CS, picked_CN.sub_(sums_CS[:, :1])


@torch.no_grad()  # in a backward pass, which is not differentiated again
def logit_gradients(
    out_CB: Tensor, block: LogitBlock, grad_CN: Tensor, facts_C6: Tensor, settings: RowSettings
) -> None:
    """`to_d_logits_` of a block of logits, written to other memory in its dtype.

    Args:
      out_CB: takes the gradients; columns of wider rows, or rows of their own.
      block: the logits.
      grad_CN: gradients of picked columns, over the temperature; 0: the column is another rank's.
      facts_C6: of `row_facts`.
      settings: with the extras that have a gradient.
    """
    _d_logits(out_CB, *block[:2], grad_CN, facts_C6, block.first, *settings)


# Flat arguments: torch.library takes tensors and numbers, no records.
@operator("funrl::logit_row_sums", mutates_args=("sums_CS", "picked_CN"), direct=_DIRECT)
def _row_sums(
    x_CB: Tensor,
    row_CN: Tensor,
    sums_CS: Tensor,
    picked_CN: Tensor,
    first: int,
    temperature: float,
    cap: float,
    entropy: bool,
    squared: bool,
) -> None:
    from funrl.compiled_kernels.logit_rows import kernels

    settings = RowSettings(temperature, cap, entropy, squared)
    kernels.launch_row_sums(LogitBlock(x_CB, row_CN, first), sums_CS, picked_CN, settings)


@_row_sums.register_fake
def _(x_CB, *_):
    return None


@operator("funrl::logit_row_gradients", mutates_args=("out_CB",), direct=_DIRECT)
def _d_logits(
    out_CB: Tensor,
    x_CB: Tensor,
    row_CN: Tensor,
    grad_CN: Tensor,
    facts_C6: Tensor,
    first: int,
    temperature: float,
    cap: float,
    entropy: bool,
    squared: bool,
) -> None:
    from funrl.compiled_kernels.logit_rows import kernels

    settings = RowSettings(temperature, cap, entropy, squared)
    kernels.launch_gradients(out_CB, LogitBlock(x_CB, row_CN, first), grad_CN, facts_C6, settings)


@_d_logits.register_fake
def _(out_CB, *_):
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
    """Largest error of a small call of the kernels of single rows, in two blocks of columns, on a device."""
    generator = torch.Generator().manual_seed(0)
    x_CV = torch.randn(3, 70, generator=generator)
    row_C1 = torch.tensor([[0], [69], [7]])
    expected_CV = x_CV.double().log_softmax(-1)
    to_d_logits_(expected_CV, row_C1, row_C1 >= 0, {}, {"logp": torch.ones(3, 1, dtype=torch.float64)})
    top_C, picked_C1, sum_C = row_sums_(x_CV.double(), row_C1, ())
    facts_C6 = row_facts((top_C + sum_C.log()).float(), {}, {"logp": torch.ones(3, 1)})
    x_CV, row_C1, facts_C6 = (x.to(device) for x in (x_CV, row_C1, facts_C6))
    out_CV = torch.empty_like(x_CV)
    settings = RowSettings()
    sums_CS, picked_here_C1 = empty_row_sums(*row_C1.shape, settings, x_CV.device)
    for columns in (slice(0, 48), slice(48, 70)):
        block = LogitBlock(x_CV[:, columns].contiguous(), row_C1, columns.start)
        add_row_sums_(sums_CS, picked_here_C1, block, settings)
        logit_gradients(out_CV[:, columns], block, torch.ones_like(picked_here_C1), facts_C6, settings)
    shifted_C1 = picked_here_C1 - sums_CS[:, :1]
    pairs = (sums_CS, torch.stack([top_C, sum_C], 1)), (shifted_C1, picked_C1), (out_CV, expected_CV)
    return largest_error(pairs)


def by_kernels(*hidden: Tensor, trial: Callable[[str], float] = logit_rows_error) -> bool:
    """True if the rows of logits of hidden states are for the kernels: on CUDA and ROCm, in 16 or 32 bits.

    Args:
      trial: as in `kernels_run`.
    """
    if any(x.dtype not in _DTYPES for x in hidden):
        return False
    return assumed_gpu() is not None or (all(x.is_cuda for x in hidden) and kernels_run(trial))
