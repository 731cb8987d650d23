"""Gap between the trainer's and the engine's log-probabilities of the tokens that the engine sampled: its distribution.

Quantiles are taken of counts in fixed buckets, which are added over micro-batches and ranks. A bucket has the gaps
whose float32 numbers begin with the same `BUCKET_BITS` bits of exponent and mantissa, so that its lowest gap, which
stands for all of them, is at most 1/32 below. That is one sum of 64 KiB over ranks a step, whatever the number of
tokens; gathering the gaps of 16,384 rows of 33,000 tokens would be 4.3 GB on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from funrl.algos.losses.ratios import bounded_exp
from funrl.algos.masks import total, where_masked
from funrl.algos.metrics import EffectiveShare, Max, Mean, Metric, Sum, token_mean_of
from funrl.batch import Batch
from funrl.mesh.collectives import psum
from funrl.mesh.mesh import Mesh

GAP_MEAN = "rollout/logprob_gap_mean"
GAP_COUNTS = "rollout/logprob_gap_counts"  # of a micro-batch, among its metrics; `gap_metrics` takes quantiles of them
GAP_QUANTILES = {"rollout/logprob_gap_p50": 0.5, "rollout/logprob_gap_p99": 0.99, "rollout/logprob_gap_p999": 0.999}
RATIO_MEAN = "rollout/ratio_mean"
EFFECTIVE_SHARE = "rollout/effective_share"
ENGINE_GAPS = frozenset(
    {GAP_MEAN, "rollout/logprob_gap_max", "rollout/stale_gap_max", RATIO_MEAN, EFFECTIVE_SHARE, *GAP_QUANTILES}
)
_DISTANCES: dict[str, Callable[[float], float]] = {RATIO_MEAN: lambda x: abs(x - 1), EFFECTIVE_SHARE: lambda x: 1 - x}
BUCKET_BITS = 13  # behind the sign of a float32: 8 of the exponent and 5 of the mantissa
_CUT = 31 - BUCKET_BITS


def engine_gap(batch: Batch) -> dict[str, Metric]:
    """Distance of the trainer's log-probabilities from those of the engine that sampled, in nats, and their ratios.

    The mean, the counts for quantiles, and mean and effective sample size of the ratios are of all sampled tokens. The
    largest distance is of tokens that the weights which score them sampled, with keys and values that these computed;
    that of all others is `rollout/stale_gap_max`.
    """
    mask_BT = engine_tokens(batch)
    gap_BT = where_masked((batch.old_logp - batch.rollout_logp).abs(), mask_BT)
    weight_BT = _weights(batch, mask_BT)
    count = mask_BT.count_nonzero().to(gap_BT)
    metrics: dict[str, Metric] = {
        GAP_MEAN: token_mean_of(gap_BT, mask_BT),
        GAP_COUNTS: Sum(_counts(gap_BT, mask_BT)),
        RATIO_MEAN: Mean(weight_BT.sum(), count),
        EFFECTIVE_SHARE: EffectiveShare(weight_BT.sum(), weight_BT.square().sum(), count),
    }
    stale_BT = batch.get("stale")
    if stale_BT is None:
        return metrics | {"rollout/logprob_gap_max": _largest(gap_BT)}
    return metrics | {
        "rollout/logprob_gap_max": _largest(where_masked(gap_BT, ~stale_BT)),
        "rollout/stale_gap_max": _largest(where_masked(gap_BT, stale_BT)),
    }


def whole_engine_gap(batch: Batch, mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values of `engine_gap` over all rows of the step, sums in their order; and this rank's largest ones."""
    mask_BT = engine_tokens(batch)
    own = engine_gap(batch)
    weight_BT = _weights(batch, mask_BT).double()
    gap_BT = (batch.old_logp - batch.rollout_logp).abs()
    sampled = total(torch.ones_like(weight_BT), mask_BT, batch)
    weights = total(weight_BT, mask_BT, batch)
    counts = psum(own.pop(GAP_COUNTS).value.to(mesh.device), mesh, mesh.row_axes).cpu()
    values = {
        GAP_MEAN: total(gap_BT, mask_BT, batch) / sampled,
        GAP_COUNTS: counts,
        RATIO_MEAN: weights / sampled,
        EFFECTIVE_SHARE: EffectiveShare(weights, total(weight_BT.square(), mask_BT, batch), sampled).value,
    }
    return gap_metrics(values), {name: metric.value for name, metric in own.items() if isinstance(metric, Max)}


def gap_metrics(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics with quantiles instead of counts: the smallest gap that this share of the tokens does not exceed."""
    metrics = dict(values)
    counts = metrics.pop(GAP_COUNTS, None)
    if counts is None:
        return metrics
    up_to = counts.cumsum(0)
    ranks = torch.stack([share * up_to[-1] for share in GAP_QUANTILES.values()])
    bits = torch.searchsorted(up_to, ranks).int() << _CUT
    return metrics | dict(zip(GAP_QUANTILES, bits.view(torch.float32).double(), strict=True))


def worst_gaps(*policies: Mapping[str, float]) -> dict[str, float]:
    """Of the metrics of gaps of several policies, each from the policy whose engine is farthest; NaN is farthest."""
    names = [name for name in dict.fromkeys(name for metrics in policies for name in metrics) if name in ENGINE_GAPS]

    def distance(name: str, value: float) -> float:
        return math.inf if math.isnan(value) else _DISTANCES.get(name, abs)(value)

    return {
        name: max((x[name] for x in policies if name in x), key=functools.partial(distance, name)) for name in names
    }


def engine_tokens(batch: Batch) -> Tensor:
    """Mask of the tokens that an engine sampled: those of demonstrations are left out."""
    given = batch.get("demonstration")
    return batch.mask if given is None else batch.mask & ~given


def _weights(batch: Batch, mask_BT: Tensor) -> Tensor:
    """Importance weights trainer / engine of the tokens of a mask, 0 elsewhere; the log is clamped to +-20."""
    return where_masked(bounded_exp(batch.old_logp - batch.rollout_logp), mask_BT)


def _counts(gap_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Number of tokens of the mask in each bucket, float64."""
    bucket_BT = (gap_BT.float().view(torch.int32) >> _CUT) & ((1 << BUCKET_BITS) - 1)  # the sign of a NaN is cut off
    counts = torch.zeros(1 << BUCKET_BITS, dtype=torch.float64, device=gap_BT.device)
    return counts.scatter_add(0, bucket_BT.flatten().long(), mask_BT.flatten().double())


def _largest(x: Tensor) -> Max:
    return Max(x.max() if x.numel() else x.new_zeros(()))
