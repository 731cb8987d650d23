"""The gap between engine and trainer at every step, as a distribution over tokens."""

import numpy as np
import pytest
import torch
from small_runs import GRPO, begin, scored_batch, small_job

from funrl.batch import example
from funrl.mesh.mesh import single
from funrl.trainer.phases import learn_batch
from funrl.trainer.steps.advantage_phase import describe
from funrl.trainer.steps.engine_gap import GAP_COUNTS, GAP_QUANTILES, engine_gap, gap_metrics, worst_gaps

DRAWS = {
    "long tail": lambda rng, n: rng.lognormal(-8, 3, n),
    "mostly equal": lambda rng, n: np.where(rng.random(n) < 0.995, 0.0, 0.25),
    "tiny": lambda rng, n: rng.random(n) * 1e-30,
    "one bucket": lambda rng, n: np.full(n, 0.5),
}


def batch_of(gaps, shape):
    """A batch whose trainer is above the engine by these gaps, with other numbers outside of the mask."""
    batch = example(["tokens", "mask", "old_logp", "rollout_logp", "truncated", "length"])
    gap_BT = torch.tensor(gaps).view(shape)
    mask_BT = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.8
    return batch._replace(
        mask=mask_BT,
        tokens=torch.zeros(shape, dtype=torch.long),
        old_logp=torch.where(mask_BT, 0.0, torch.nan).double(),
        rollout_logp=torch.where(mask_BT, -gap_BT, 7.0),
    )


@pytest.mark.parametrize("name", DRAWS)
def test_quantiles_are_order_statistics_rounded_down(name):
    batch = batch_of(DRAWS[name](np.random.default_rng(1), 20_000), (40, 500))
    gaps = -batch.rollout_logp[batch.mask].numpy()
    values = gap_metrics({GAP_COUNTS: engine_gap(batch)[GAP_COUNTS].value})
    assert values.keys() == GAP_QUANTILES.keys()
    for key, share in GAP_QUANTILES.items():
        exact = np.quantile(gaps, share, method="inverted_cdf")
        assert exact * (1 - 1 / 32) - 1e-44 <= values[key].item() <= exact * (1 + 1e-6)


def test_counts_of_parts_add_up_to_those_of_the_whole():
    batch = batch_of(DRAWS["long tail"](np.random.default_rng(2), 4_000), (8, 500))
    fields = "mask", "old_logp", "rollout_logp"
    parts = [batch._replace(**{name: getattr(batch, name)[i::3] for name in fields}) for i in range(3)]
    counts = torch.stack([engine_gap(part)[GAP_COUNTS].value for part in parts]).sum(0)
    assert torch.equal(counts, engine_gap(batch)[GAP_COUNTS].value)
    assert counts.sum() == batch.mask.sum() and counts.numel() * counts.itemsize == 1 << 16


def test_of_several_policies_the_farthest_is_reported():
    largest, ratio, share = "rollout/logprob_gap_max", "rollout/ratio_mean", "rollout/effective_share"
    near = {largest: 0.1, ratio: 1.1, share: 0.9, "actor/loss": 1.0}
    far = {largest: 0.3, ratio: 0.8, share: 0.2, "second/loss": 2.0}
    worst = {largest: 0.3, ratio: 0.8, share: 0.2}
    assert worst_gaps(near, far) == worst_gaps(far, near) == worst
    for pair in ((near, {largest: np.nan}), ({largest: np.nan}, near)):
        assert np.isnan(worst_gaps(*pair)[largest])


@pytest.mark.parametrize("gap", [torch.inf, -torch.nan])
def test_a_gap_that_is_no_number_is_not_hidden(gap):
    values = gap_metrics({GAP_COUNTS: engine_gap(batch_of(np.full(100, gap), (10, 10)))[GAP_COUNTS].value})
    assert not any(value.isfinite() for value in values.values())


def test_without_a_sampled_token_quantiles_are_zero():
    batch = batch_of(np.ones(100), (10, 10))
    counts = engine_gap(batch._replace(mask=torch.zeros_like(batch.mask)))[GAP_COUNTS].value
    assert not any(gap_metrics({GAP_COUNTS: counts}).values())


@pytest.mark.parametrize("score_old", [False, True])
def test_a_step_has_quantiles_mean_ratio_and_effective_share(score_old):
    """A tenth of the tokens are off by log 2: the mean ratio is 0.9 + 0.1 / 2."""
    run, state = begin(small_job(GRPO, minibatches=1, samples_per_prompt=5, token_budget=24), single())
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    off = torch.zeros_like(batch.rollout_logp)
    off[batch.mask.nonzero()[::10].unbind(1)] = np.log(2)
    rows = rows.with_fields(rollout_logp=batch.rollout_logp + off)
    if score_old:
        rows = rows.with_fields(old_logp=batch.rollout_logp)
        metrics = describe(rows, rows.batch)
    else:
        _, metrics = learn_batch(run, state, rows)
    n, k = int(batch.mask.sum()), int((off != 0).sum())
    assert metrics["rollout/logprob_gap_p50"] < 1e-12
    for name in ("rollout/logprob_gap_p99", "rollout/logprob_gap_p999"):
        assert np.log(2) * (1 - 1 / 32) <= metrics[name] <= np.log(2)
    assert metrics["rollout/ratio_mean"] == pytest.approx((n - k / 2) / n, rel=1e-9)
    assert metrics["rollout/effective_share"] == pytest.approx((n - k / 2) ** 2 / (n * (n - 0.75 * k)), rel=1e-9)
