"""Settings that all rows of logits share."""

from __future__ import annotations

from typing import NamedTuple


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
