"""Advantages of a scored batch, and what there is to say of it."""

from __future__ import annotations

from typing import Any

from funrl import trees
from funrl.algos import core
from funrl.algos.core import Advantage
from funrl.batch import Batch
from funrl.trainer.step import engine_gap


def advantages(chain: Advantage, state: Any, batch: Batch) -> tuple[Batch, Any, dict[str, float]]:
    """Run an advantage chain on scored rows; its sums have one order, that of the CPU, on every rank.

    Args:
      state: of the chain; begins as `chain.init()`.
      batch: the same on every rank.

    Returns: the rows to train on, with what the chain makes; the chain's state; metrics.
    """
    here = on_cpu(batch)
    made, state, metrics = core.apply_advantage(chain, state, here)
    told = describe(here, made) | {name: float(metric.value) for name, metric in metrics.items()}
    return trees.map(lambda x: x.to(batch.tokens.device), made), state, told


def on_cpu(batch: Batch) -> Batch:
    """The batch where every sum has one order. A GPU may add the rows of a group in another order on every rank, and
    ranks that differ in a last bit may keep other rows."""
    return trees.map(lambda x: x.cpu(), batch)


def describe(batch: Batch, made: Batch) -> dict[str, float]:
    """Metrics of a scored batch; what no token has is left out.

    Args:
      batch, made: before and after the advantage chain; without one, the same.
    """
    mask, score_B = batch.mask, batch.get("score")
    response = mask.sum(1).double()
    advantage = mask.new_zeros(0) if made.get("advantage") is None else made.advantage[made.mask]
    out = {} if score_B is None else {
        "reward/mean": score_B.mean(), "reward/max": score_B.max(), "reward/min": score_B.min(),
    }  # fmt: skip
    out |= {
        "response_length/mean": response.mean(), "response_length/max": response.max(),
        "response_length/min": response.min(), "response_length/clip_ratio": batch.truncated.double().mean(),
        "rollout/logp_mean": batch.rollout_logp[mask].mean(),
        "perf/total_num_tokens": batch.length.sum(),
    }  # fmt: skip
    if len(advantage):
        out |= {"critic/advantages/mean": advantage.mean(), "critic/advantages/max": advantage.max()}
        out |= {"critic/advantages/min": advantage.min()}
    if batch.get("old_logp") is not None:
        out |= {name: metric.value for name, metric in engine_gap(batch).items()}
    scores = batch.get("scores")
    if scores is not None and scores.shape[1] > 1:
        out |= {f"reward/{i}/mean": column.nanmean() for i, column in enumerate(scores.unbind(1), 1)}
    if made.get("value") is not None and made.get("returns") is not None and len(advantage):
        returns, values = made.returns[made.mask], made.value[made.mask]
        out |= {"critic/values/mean": values.mean(), "critic/returns/mean": returns.mean()}
        if len(returns) > 1:
            unexplained = (returns - values).var() / returns.var().clamp_min(1e-12)
            out |= {"critic/vf_explained_var": 1 - unexplained}
    return {name: float(value) for name, value in out.items()}
