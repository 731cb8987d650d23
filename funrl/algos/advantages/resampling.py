"""Training more often on the rows whose reward can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Signal
from funrl.algos.metrics import Max, Mean
from funrl.batch import Batch
from funrl.seeds import derived_seed


def resampling_weights(score_B: Tensor, kind: str = "pow", power: float = 2.0) -> Tensor:
    """Probability that each row is sampled, [B] float64, summing to 1.

    Proportional to w_i + 1e-8, where w_i is |s_i|^power ("pow"); 1 for the best and the worst score and 0 for the
    others ("max_min"); or 0.4 for the best and 0.1 for the others ("max_random").

    Args:
      kind: "pow", "max_min" or "max_random".
      power: exponent of the score, for "pow".

    Raises:
      ValueError: the kind is unknown.

    Example:
      >>> resampling_weights(torch.tensor([0.0, 1.0, -3.0])).round(decimals=6).tolist()  # 0, 1 and 9 of 10
      [0.0, 0.1, 0.9]
    """
    score_B = score_B.detach().cpu().double()
    best_B = score_B == score_B.amax()
    if kind == "pow":
        weight_B = score_B.abs() ** power
    elif kind == "max_min":
        weight_B = (best_B | (score_B == score_B.amin())).double()
    elif kind == "max_random":
        weight_B = torch.where(best_B, 0.4, 0.1).double()
    else:
        raise ValueError(f"{kind!r} is not a way to weigh rows: use pow, max_min or max_random")
    weight_B = weight_B + 1e-8
    return weight_B / weight_B.sum()


def resample_rows(kind: str = "pow", power: float = 2.0, seed: int = 0) -> Advantage:
    """Resample the rows of the batch with replacement, extreme scores more often.

    The probabilities are those of `resampling_weights`. Only `rows` of the signal changes; it is applied after the
    chain. The sample depends only on the seed and the number of batches before, and is the same on every rank; the
    state, carried from step to step, is that number.

    Args:
      kind, power: of `resampling_weights`.
      seed: of the sampling.
    Needs: score [B], as it came, before shaping.
    Metrics: "resampling/rows", the share of rows that were sampled at least once; "resampling/effective", the effective
      number of rows, 1 / sum w^2, as a share of all; "resampling/largest", the largest weight.

    Raises:
      ValueError: the kind is unknown.
    References: PF-PPO, Zhang et al., 2024, https://arxiv.org/abs/2409.06957
    """
    resampling_weights(torch.zeros(1), kind)

    def update(signal: Signal, batches: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        weight_B = resampling_weights(batch.score, kind, power)
        draws = torch.Generator().manual_seed(derived_seed(seed, int(batches)))
        cumulative_B = weight_B.cumsum(0)
        uniform_B = torch.rand(weight_B.shape, generator=draws, dtype=torch.float64) * cumulative_B[-1]
        rows = torch.searchsorted(cumulative_B, uniform_B, right=True).clamp_max(weight_B.numel() - 1)
        count = weight_B.new_tensor(float(weight_B.numel()))
        drawn = torch.zeros_like(weight_B).index_fill(0, rows, 1.0).sum()
        metrics = signal.metrics | {
            "resampling/rows": Mean(drawn, count),
            "resampling/effective": Mean(1 / weight_B.square().sum(), count),
            "resampling/largest": Max(weight_B.amax()),
        }
        return signal._replace(rows=rows.to(signal.x.device), metrics=metrics), batches + 1

    return Advantage(lambda: torch.zeros((), dtype=torch.int64), update)
