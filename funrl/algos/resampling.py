"""Training more often on the rows whose reward can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Signal
from funrl.batch import Batch
from funrl.seeds import derived_seed


def resample_rows(kind: str = "pow", power: float = 2.0, seed: int = 0) -> Advantage:
    """Draws the rows to train on with replacement, as many as there are, by how extreme their score is.

    Row i is drawn in proportion to w_i + 1e-8: |s_i|^power ("pow"); 1 for the best and the worst score and 0 for the
    others ("max_min"); 0.4 for the best and 0.1 for the others ("max_random"). The signal is left alone but for
    `rows`, which the loop applies after the chain. The draw depends on the seed and the number of batches before only,
    and is the same on every process; the state, carried from step to step, is that number.

    Args:
      kind: "pow", "max_min" or "max_random".
      power: of the score, for "pow".
      seed: of the draws.
    Needs: score [B], as it came, before shaping.
    Raises:
      ValueError: the kind is unknown.
    References: PF-PPO, Zhang et al., 2024, https://arxiv.org/abs/2409.06957
    """
    if kind not in ("pow", "max_min", "max_random"):
        raise ValueError(f"resample_rows({kind!r}): there are pow, max_min and max_random")

    def update(signal: Signal, batches: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        assert batch.score is not None
        score_B = batch.score.detach().cpu().double()
        best_B = score_B == score_B.amax()
        if kind == "pow":
            weight_B = score_B.abs() ** power
        elif kind == "max_min":
            weight_B = (best_B | (score_B == score_B.amin())).double()
        else:
            weight_B = torch.where(best_B, 0.4, 0.1)
        draws = torch.Generator().manual_seed(derived_seed(seed, int(batches)))
        cumulative_B = (weight_B + 1e-8).double().cumsum(0)
        uniform_B = torch.rand(score_B.shape, generator=draws, dtype=torch.float64) * cumulative_B[-1]
        rows = torch.searchsorted(cumulative_B, uniform_B, right=True).clamp_max(score_B.numel() - 1)
        return signal._replace(rows=rows.to(signal.x.device)), batches + 1

    return Advantage(lambda: torch.zeros((), dtype=torch.int64), update, frozenset({"score"}))
