"""Advantages of a scored batch, and what there is to say of it."""

from __future__ import annotations

from typing import Any

from funrl import trees
from funrl.algos.core import Algorithm, Signal
from funrl.batch import Batch, select
from funrl.trainer.step import engine_gap


def advantages(algorithm: Algorithm, state: Any, batch: Batch) -> tuple[Batch, Any, dict[str, float]]:
    """Runs the advantage chain of an algorithm; its sums have one order, that of the CPU, on every rank.

    Args:
      state: of the chain; begins as `algorithm.advantage.init()`.
      batch: scored rows; the same on every rank.

    Returns: the rows to train on, with what the chain makes ("sampled" is the mask before it); the chain's state; metrics.
    """
    if algorithm.advantage is None:
        return batch, state, {}
    here = on_cpu(batch)
    signal, state = algorithm.advantage.update(Signal(here.score, here.mask), state, here)
    metrics = describe(here, signal) | {name: float(metric.value) for name, metric in signal.metrics.items()}
    signal = trees.map(lambda x: x.to(batch.tokens.device), signal)
    made = {"advantage": signal.x, "mask": signal.mask, "returns": signal.returns, "weight": signal.weight}
    batch = batch._replace(sampled=batch.mask, **made, **signal.extra)
    return (batch if signal.rows is None else select(batch, signal.rows)), state, metrics


def on_cpu(batch: Batch) -> Batch:
    """The batch where every sum has one order. A GPU may add the rows of a group in another order on every rank, and
    ranks that differ in a last bit may keep other rows."""
    return trees.map(lambda x: x.cpu(), batch)


def describe(batch: Batch, signal: Signal) -> dict[str, float]:
    """Metrics of a scored batch; what no token has is left out."""
    mask, score_B = batch.mask, batch.score
    response = mask.sum(1).double()
    advantage = signal.x[signal.mask]
    out = {
        "reward/mean": score_B.mean(), "reward/max": score_B.max(), "reward/min": score_B.min(),
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
    scores, values = batch.get("scores"), batch.get("value")
    if scores is not None and scores.shape[1] > 1:
        out |= {f"reward/{i}/mean": mean for i, mean in enumerate(scores.mean(0), 1)}
    if values is not None and signal.returns is not None and len(advantage):
        returns, values = signal.returns[signal.mask], values[signal.mask]
        out |= {"critic/values/mean": values.mean(), "critic/returns/mean": returns.mean()}
        if len(returns) > 1:
            unexplained = (returns - values).var() / returns.var().clamp_min(1e-12)
            out |= {"critic/vf_explained_var": 1 - unexplained}
    return {name: float(value) for name, value in out.items()}
