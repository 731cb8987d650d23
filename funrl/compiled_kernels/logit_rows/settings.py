"""Settings that all rows of logits share, and blocks of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowSettings(NamedTuple):
    """Scale of logits, and the extras that are computed, or have a gradient.

    Attributes:
      temperature: above 0.
      cap: logits x become cap tanh(x / cap), before the temperature; 0: they stay.
      entropy, squared: the extras "entropy" and "sum_pi_squared".
    """

    temperature: float = 1.0
    cap: float = 0.0
    entropy: bool = False
    squared: bool = False


class DivergenceSettings(NamedTuple):
    """Scales of a student's and a teacher's logits, and the kind of their divergence.

    Attributes:
      beta: as in `funrl.compiled_kernels.linear_divergence.divergence`.
      temperature: of both, above 0.
      cap, teacher_cap: as in `RowSettings`.
    """

    beta: float
    temperature: float
    cap: float
    teacher_cap: float


class LogitBlock(NamedTuple):
    """Logits of some columns, before cap and temperature.

    Attributes:
      x_CB: the logits, float32 or narrower; they stay as they are.
      row_CN: int64 picked columns among all columns.
      first: number of the block's first column.
    """

    x_CB: Tensor
    row_CN: Tensor
    first: int = 0
