"""Advantages of scored rows, and what there is to say of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from funrl.algos.advantages.units import by_unit, units_of, units_of_copies
from funrl.algos.applying import apply_advantage
from funrl.algos.core import Advantage
from funrl.algos.masks import total, where_masked
from funrl.batch import Batch
from funrl.mesh.collectives import pmax
from funrl.trainer.steps.engine_gap import engine_tokens, whole_engine_gap
from funrl.trainer.steps.step_rows import Rows, mapped, on_cpu, take


def advantages(
    chain: Advantage, state: object, rows: Rows, names: Sequence[str] = ()
) -> tuple[Rows, object, dict[str, float]]:
    """Run an advantage chain on scored rows; its sums have one order, whatever the mesh.

    Args:
      state: of the chain; begins as `chain.init()`.
      names: of the rewards, as in `describe`.

    Returns: the rows to train on, with what the chain makes; the chain's state; metrics.
    """
    here = on_cpu(rows)
    drawn = list[Tensor]()

    def choose(batch: Batch, numbers: Tensor) -> Batch:
        drawn.append(numbers)
        return batch

    advantaged, state, metrics = apply_advantage(chain, state, here.batch, choose)
    sampled = advantaged.get("rollout_logp") is not None
    values = describe(here, advantaged, names) if sampled else {}
    values |= {name: float(metric.value) for name, metric in metrics.items()}
    result = mapped(here._replace(batch=advantaged), lambda x: x.to(rows.batch.tokens.device))
    if not drawn:
        return result, state, values
    taken = take(result, drawn[0].numpy())
    unit_N = taken.batch.get("unit")
    if unit_N is not None:
        taken = taken.with_fields(unit=units_of_copies(unit_N, drawn[0].to(unit_N.device)))
    return taken, state, values


def describe(rows: Rows, made: Batch, names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of scored rows; what no token has is left out. Demonstrations, which were not sampled, do not count.

    Where rows belong to episodes, outcomes and lengths are those of each agent of an episode.

    Args:
      rows, made: before and after the advantage chain; without one, the same.
      names: of the columns of `scores`; (): their numbers, from 1.
    """
    units = units_of(rows.batch)
    batch = rows.batch if units is None else by_unit(rows.batch, units)
    mask = engine_tokens(batch)
    own_B = torch.ones_like(batch.truncated)
    demonstration = batch.get("demonstration")
    if demonstration is not None:
        own_B = batch.across.sums(demonstration) == 0
    sampled = _count(mask, batch)
    response_B = batch.across.sums(mask.double())[own_B]
    out = {
        "response_length/mean": response_B.mean(),
        "response_length/max": response_B.max(),
        "response_length/min": response_B.min(),
        "response_length/clip_ratio": batch.truncated[own_B].double().mean(),
        "rollout/logp_mean": total(batch.rollout_logp, mask, batch) / sampled,
        "perf/total_num_tokens": batch.length.sum(),
    }
    score_B = batch.get("score")
    scores_BK = batch.get("scores")
    if score_B is not None and (demonstration is None or scores_BK is not None):  # else only it distinguished pairs
        score_B = score_B[own_B]
        group_B = batch.get("group")
        out |= {"reward/mean": score_B.mean(), "reward/max": score_B.max(), "reward/min": score_B.min()}
        out |= equal_groups(score_B, None if group_B is None else group_B[own_B])
    if scores_BK is not None and scores_BK.shape[1] > 1:
        columns = zip(names or range(1, scores_BK.shape[1] + 1), scores_BK[own_B].unbind(1), strict=True)
        out |= {f"reward/{name}/mean": column.nanmean() for name, column in columns}
    count = _count(made.mask, batch)
    peaks = {}
    advantage = made.get("advantage")
    values = made.get("value")
    returns = made.get("returns")
    if advantage is not None and count > 0:
        out["critic/advantages/mean"] = total(advantage, made.mask, batch) / count
        peaks |= {
            "critic/advantages/max": (advantage, made.mask, 1),
            "critic/advantages/min": (advantage, made.mask, -1),
        }
    if values is not None and returns is not None and count > 0:
        out["critic/values/mean"] = total(values, made.mask, batch) / count
        out["critic/returns/mean"] = total(returns, made.mask, batch) / count
        if count > 1:
            unexplained = _variance(returns - values, made.mask, batch, count)
            variance = _variance(returns, made.mask, batch, count).clamp_min(1e-12)
            out |= {"critic/vf_explained_var": 1 - unexplained / variance}
    if batch.get("old_logp") is not None:
        gaps, largest = whole_engine_gap(batch, rows.mesh)
        out |= gaps
        peaks |= {name: (x.reshape(1), torch.ones(1, dtype=torch.bool), 1) for name, x in largest.items()}
    return {name: float(value) for name, value in (out | _peaks(peaks, rows)).items()}


def equal_groups(score_B: Tensor, group_B: Tensor | None) -> dict[str, Tensor]:
    """The share of groups of several rows whose scores are all equal; nothing where there is no such group."""
    if group_B is None:
        return {}
    _, at_B, count_G = group_B.unique(return_inverse=True, return_counts=True)
    one_G = score_B.new_zeros(len(count_G)).scatter(0, at_B, score_B)  # of any row of the group
    unlike_G = torch.bincount(at_B, weights=(score_B != one_G[at_B]).double(), minlength=len(count_G))
    several_G = count_G > 1
    return {"reward/equal_groups": (unlike_G == 0)[several_G].double().mean()} if several_G.any() else {}


def _count(mask_bT: Tensor, batch: Batch) -> Tensor:
    """The tokens of the mask in all rows of the step, in float64."""
    return total(torch.ones_like(mask_bT, dtype=torch.float64), mask_bT, batch)


def _variance(x_bT: Tensor, mask_bT: Tensor, batch: Batch, count: Tensor) -> Tensor:
    """The unbiased variance of x over the mask and all rows of the step."""
    off_bT = x_bT.double() - total(x_bT, mask_bT, batch) / count
    return total(where_masked(off_bT, mask_bT).square(), mask_bT, batch) / (count - 1)


def _peaks(wanted: dict[str, tuple[Tensor, Tensor, int]], rows: Rows) -> dict[str, Tensor]:
    """The largest (sign 1) or smallest (-1) number of x on a mask, over all ranks, in one collective.

    Args:
      wanted: name -> x, mask, sign.
    """
    if not wanted:
        return {}
    low = torch.tensor(-np.inf, dtype=torch.float64)
    mine = [torch.where(mask, sign * x.double(), low).max() if x.numel() else low for x, mask, sign in wanted.values()]
    most = pmax(torch.stack(mine).to(rows.mesh.device), rows.mesh, rows.mesh.row_axes).cpu()
    return {name: sign * x for (name, (_, _, sign)), x in zip(wanted.items(), most, strict=True)}
